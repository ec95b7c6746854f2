"""Features whitened by a private second moment: the first stage of a run, before its training.

    A = private mean of a a^T,  a = (scale * features, 1), |a| <= clip
    P = (A + ridge)^(-1/2),     ridge: the size of the noise in A
    every silo replaces its features by P a / sqrt(d_eff),  d_eff = sum of eigenvalues a / (a + ridge)

Whitened features have length about 1 and no direction that matters more than another, so that one step size suits all.
The map depends on the released moment alone: whatever is trained on mapped records is as private as it is on others.

Formal guarantee: one release `moment` over all records, of sensitivity (sqrt(2) + rounding) * clip^2 / n: two matrices
a a^T are never further apart than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Facts, Stream
from silodp.prox import build_prox
from silodp.releases import Answer, Vector, unpacked
from silodp.sampling import Full

STREAM = "moment"
SMALLEST_RIDGE = 1e-5  # of the mean eigenvalue, where there is no noise


class State(eqx.Module):
    x: Vector


class Moment(Algorithm):
    """One round: the second moment of the features, with a constant beside them."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of a record's features
    scale: Any  # of the features, before the constant comes in
    features: int = eqx.field(static=True)  # with the constant

    @staticmethod
    def of(clip: float, features: int, scale: float | None) -> Moment:
        """`scale`: makes features about 1 long; left out, that of standardised ones."""
        scale = scale or 1 / math.sqrt(max(1, features - 1))
        return Moment(jnp.float32(1.0), build_prox("none"), jnp.float32(clip), jnp.float32(scale), features)

    @property
    def size(self) -> int:
        return self.features * (self.features + 1) // 2

    def init(self, x0: Vector) -> State:
        return State(x0)

    def round(self, state: State, fed: Federation) -> State:
        return State(fed.mean(self.moment))

    def moment(self, silo: Silo) -> Answer:
        return silo.squares(lambda record: jnp.append(record[0] * self.scale, 1.0), self.clip**2, STREAM)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(STREAM, len(rounds), Full(), dimension=self.size, squares=True)]


@dataclass(frozen=True)
class Whitening:
    """The public map from a record's features to whitened ones, and how many directions of them carry signal."""

    matrix: Float[np.ndarray, "k k"]
    directions: float

    @staticmethod
    def of(moment: Vector, std: float, scale: float) -> Whitening:
        """From a released moment, the std of the noise in each of its numbers, and the scale of its features."""
        matrix = np.asarray(unpacked(moment), np.float64)
        values, vectors = np.linalg.eigh(matrix)
        values = np.maximum(values, 0)
        # The noise alone has eigenvalues up to this: a direction below it cannot be told from none.
        ridge = max(np.sqrt(2 * len(values)) * std, SMALLEST_RIDGE * float(np.mean(values)), 1e-30)
        directions = max(1.0, float(np.sum(values / (values + ridge))))
        root = (vectors / np.sqrt((values + ridge) * directions)) @ vectors.T
        root[:, :-1] *= scale
        return Whitening(root.astype(np.float32), directions)

    @staticmethod
    def none(facts: Facts) -> Whitening:
        """Before anything is known of the records: a constant beside their features, to check shapes by."""
        return Whitening(np.eye(facts.input_shape[0] + 1, dtype=np.float32), 1.0)

    def features(self, features: Float[Array, "... k"]) -> Float[Array, "... k1"]:
        matrix = jnp.asarray(self.matrix)
        return features @ matrix[:, :-1].T + matrix[:, -1]

    def records(self, records: PyTree) -> PyTree:
        return jax.jit(self.features)(records[0]), records[1]

    def algorithm(self, algorithm: Algorithm) -> Algorithm:
        """With steps in units of what the loss allows: its curvature is that of one direction in `directions`."""
        longer = algorithm.step_size * jnp.float32(self.directions)
        return eqx.tree_at(lambda a: a.step_size, algorithm, longer)
