"""Centre and scale of columns that have no public range, found privately: a stage before all others.

    magnitude  how often |x| of each column lies between two powers of two: gives a limit
    middle     the mean of x, clipped to the limit: gives the centre
    spread     how often |x - centre| lies between two powers of two: seven tenths lie below the scale
    every silo replaces x by (x - centre) / scale, clipped to +-4

Bins that noise alone could have filled are not counted. Its size is seen in the histograms themselves, of which most
bins are empty.

Formal guarantee: one release of each of the three, of sensitivity (2 + rounding) * sqrt(columns) / n: a record has one
number of at most 1 in each column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.releases import Answer, Vector
from silodp.sampling import Full
from silodp.stages.maps import Scaling

LOWEST, HIGHEST = -24, 40  # powers of two that are told apart
BINS = HIGHEST - LOWEST + 1
COMMON = 0.01  # a bin of fewer records than this is not worth a wider range
BELOW = 0.7  # of the records lie within the scale
WIDEST = 4.0
COLUMNS = ("columns",)  # the shape of a public argument: a number for each


class State(eqx.Module):
    x: Vector  # centres, then scales


class Ranges(Algorithm):
    """One round of three questions about some columns."""

    queries: ClassVar = {"magnitude": (), "middle": (COLUMNS,), "spread": (COLUMNS,)}

    columns: tuple[int, ...] = eqx.field(static=True)

    @staticmethod
    def of(columns: Sequence[int]) -> Ranges:
        return Ranges(jnp.float32(1.0), build_prox("none"), tuple(columns))

    @property
    def size(self) -> int:
        return 2 * len(self.columns)

    @property
    def clip(self) -> float:
        return math.sqrt(len(self.columns))

    @property
    def together(self) -> int:
        return 3

    def shapes(self, query: str, parameters: int) -> list[tuple[int, ...]]:
        return [(len(self.columns),) for _ in self.queries[query]]

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.size))

    def round(self, state: State, fed: Federation) -> State:
        limits = jax.vmap(widest)(self._counted(fed.mean(self.magnitude)))
        centres = limits * fed.mean(self.middle, limits)
        counts = self._counted(fed.mean(self.spread, centres))
        return State(jnp.concatenate([centres, jax.vmap(scale_of)(counts, limits)]))

    def _own(self, record: Any) -> Vector:
        return record[0][jnp.asarray(self.columns)]

    def _counted(self, released: Vector) -> Float[Array, "k b"]:
        """Counts of bins without those that may be noise."""
        noise = jnp.median(jnp.abs(released)) / 0.6745  # of a Gaussian, half lies within this many deviations
        counts = released.reshape(len(self.columns), BINS)
        return jnp.where(counts > 4 * noise, counts, 0.0)

    def magnitude(self, silo: Silo) -> Answer:
        return silo.statistic(lambda record: bins(self._own(record)), self.clip, "magnitude")

    def middle(self, silo: Silo, limits: Vector) -> Answer:
        return silo.statistic(lambda record: jnp.clip(self._own(record) / limits, -1, 1), self.clip, "middle")

    def spread(self, silo: Silo, centres: Vector) -> Answer:
        return silo.statistic(lambda record: bins(self._own(record) - centres), self.clip, "spread")

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        whole, each = BINS * len(self.columns), len(self.columns)
        lengths = {"magnitude": whole, "middle": each, "spread": whole}
        return [Stream(name, len(rounds), Full(), dimension=length) for name, length in lengths.items()]


def bins(values: Float[Array, " k"]) -> Vector:
    """For each value a row of zeros with a one where its size lies; all rows in one."""
    _, power = jnp.frexp(values)
    power = jnp.where(jnp.abs(values) < 2.0**LOWEST, LOWEST, jnp.clip(power, LOWEST, HIGHEST))
    return (jnp.arange(LOWEST, HIGHEST + 1) == power[:, None]).astype(jnp.float32).ravel()


def widest(counts: Float[Array, " b"]) -> Float[Array, ""]:
    """The power of two below which nearly all values lie; 1 where nothing can be told from noise."""
    common = counts >= COMMON
    last = BINS - 1 - jnp.argmax(common[::-1])
    return jnp.where(common.any(), jnp.exp2((last + LOWEST).astype(jnp.float32)), 1.0)


def scale_of(counts: Float[Array, " b"], limit: Float[Array, ""]) -> Float[Array, ""]:
    """What `BELOW` of the values lie within, between two powers of two by proportion."""
    total = counts.sum()
    upto = jnp.cumsum(counts) / jnp.where(total > 0, total, 1.0)
    place = jnp.argmax(upto >= BELOW)
    before = jnp.where(place > 0, upto[place - 1], 0.0)
    part = (BELOW - before) / jnp.maximum(upto[place] - before, 1e-6)
    found = jnp.exp2((place + LOWEST - 1).astype(jnp.float32)) * (1 + jnp.clip(part, 0.0, 1.0))
    return jnp.where(total > 0, found, limit)


def scaling_of(released: Vector, columns: Sequence[int], features: int) -> Scaling:
    """For all features; those beside the columns stay as they are."""
    told, at = np.asarray(released, np.float32), list(columns)
    centre, scale, limit = np.zeros(features), np.ones(features), np.full(features, np.inf)
    centre[at], scale[at], limit[at] = told[: len(at)], told[len(at) :], WIDEST
    return Scaling(centre.astype(np.float32), scale.astype(np.float32), limit.astype(np.float32))
