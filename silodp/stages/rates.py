"""How often each class occurs in a silo, privately: a stage before training that gives every silo an intercept.

    v(record) = (1 for its class, 0 for the others) - 1 / classes
    r_i       = mean of v over silo i's records, with noise of the silo's own, + 1 / classes
    p_i       = m + w_i (r_i - m),   m: mean of all r_i by the silos' weights
                                     w_i = what noise leaves of the distance (James, Stein 1961); 0: nothing
    o_i       = log(p_i + c_i) - log(m + c_i),   c_i: so much noise and chance could have made alone

Every record of silo i is trained on with the scores f(features) + o_i, and the silo's own predictions are made with
them. That is Bayes' rule where the silos' records of a class are alike and only its rate differs (label shift). Where
rates differ because features do, o_i counts the difference twice. Without o_i the model is that of the mean rates m.

Everybody learns the released rates of every silo. The offsets depend on nothing else.

Formal guarantee: one release `rates` a silo, of sensitivity (2 + rounding) * |v| / n, noised in the silo under every
trust model, because it is about one silo; |v| <= sqrt(1 - 1 / classes) by construction, and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.records import target_of
from silodp.releases import Public, Vector
from silodp.sampling import Full
from silodp.stages.maps import Offsets
from silodp.stages.whiten import worth_of

STREAM = "rates"
CLEAR = 2.0  # stds of noise; what is larger is told

Table = Float[np.ndarray, "silos classes"]
Each = Float[np.ndarray, " silos"]


class State(eqx.Module):
    x: Float[Array, " numbers"]  # a row of numbers for each silo, one after the other


class Rates(Algorithm):
    """A round for each silo: the mean of its records' classes, noised in the silo."""

    queries: ClassVar = {"rates": ()}

    silos: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)

    @staticmethod
    def of(silos: int, classes: int) -> Rates:
        return Rates(jnp.float32(1.0), build_prox("none"), silos, classes)

    @property
    def clip(self) -> float:
        """The length of a record's numbers."""
        return math.sqrt(1 - 1 / self.classes)

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.silos * self.classes))

    def round(self, state: State, fed: Federation) -> State:
        row = fed.local(fed.round, self.rates)
        return State(jax.lax.dynamic_update_slice(state.x, row, (fed.round * self.classes,)))

    def rates(self, silo: Silo) -> Public:
        return Public(silo.privatise(silo.statistic(self.numbers, self.clip, STREAM)))

    def numbers(self, record: PyTree) -> Vector:
        label = jnp.maximum(target_of(record[1]), 0)  # a label of -1 means the same as 0
        return (jnp.arange(self.classes) == label) - jnp.float32(1 / self.classes)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(STREAM, int(silo in rounds), Full(), local=True, dimension=self.classes)]

    def table(self, released: Vector) -> Table:
        """The released rates, a row for each silo; each is moved to the nearest that add up to 1."""
        told = np.asarray(released, np.float64).reshape(self.silos, self.classes)
        return told - told.mean(axis=1, keepdims=True) + 1 / self.classes


def offsets_of(table: Table, stds: Each, sizes: Sequence[int], weights: Sequence[float]) -> Offsets:
    """From released rates and the std of the noise in each silo's."""
    told = np.clip(np.average(table, axis=0, weights=weights), 0.0, None)
    mean, records = told / told.sum(), np.asarray(sizes, np.float64)
    # The squared distance of released rates from those that the silo's records were drawn by.
    noise = (table.shape[1] - 1) * stds**2 + (1 - np.sum(mean**2)) / records
    worth = np.array([worth_of(row - mean, float(own)) for row, own in zip(table, noise, strict=True)])
    found = mean + worth[:, None] * (table - mean)
    unclear = (CLEAR * stds + 1 / records)[:, None]
    offsets = np.log(np.clip(found, 0.0, 1.0) + unclear) - np.log(mean + unclear)
    return Offsets((offsets - offsets.mean(axis=1, keepdims=True)).astype(np.float32))
