"""A private look at held-out records: how good a model is, in every silo and over all, with error bars.

    v(record) = (right - 1/2, loss / most - 1/2, one of the bins of its score, half as high)       classes
    v(record) = (squared error / most - 1/2, target, target^2)                                      numbers

Each silo adds noise to the mean of v over its held-out records; everything below is computed from these means. The bins
of both classes' scores give the area under the ROC curve.

Formal guarantee: one release `metric` a silo, of sensitivity (2 + rounding) * |v| / n, noised in the silo under every
trust model; |v| is bounded by construction, and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.core import POINT, Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.records import moved, target_of
from silodp.releases import Public, Vector
from silodp.sampling import Full

STREAM = "metric"
BINS = 16
DRAWS = 200  # of the error bar of an area under the curve


class State(eqx.Module):
    x: Float[Array, " numbers"]  # a row of numbers for each silo, one after the other
    model: Vector


class Metrics(Algorithm):
    """A round for each silo: the mean of its held-out records' numbers, noised in the silo."""

    queries: ClassVar = {"metric": (POINT,)}

    most: Any  # a loss counts as this at most
    silos: int = eqx.field(static=True)
    classes: int = eqx.field(static=True)  # 1: a number is predicted

    @staticmethod
    def of(most: float, silos: int, classes: int) -> Metrics:
        return Metrics(jnp.float32(1.0), build_prox("none"), jnp.float32(most), silos, classes)

    @property
    def bins(self) -> int:
        return 2 * BINS if self.classes == 2 else 0

    @property
    def size(self) -> int:
        return 3 if self.classes == 1 else 2 + self.bins

    @property
    def clip(self) -> float:
        """The longest a record's numbers can be."""
        if self.classes == 1:
            return math.sqrt(0.25 + 2.0)
        return math.sqrt(0.75 if self.bins else 0.5)

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.silos * self.size), x0)

    def round(self, state: State, fed: Federation) -> State:
        row = fed.local(fed.round, self.metric, state.model)
        return State(jax.lax.dynamic_update_slice(state.x, row, (fed.round * self.size,)), state.model)

    def metric(self, silo: Silo, x: Vector) -> Public:
        objective: Any = silo.objective
        numbers = lambda record: self.numbers(objective.model, objective.unravel(x), record)
        return Public(silo.privatise(silo.statistic(numbers, self.clip, STREAM)))

    def numbers(self, model: Any, params: PyTree, record: PyTree) -> Vector:
        features, target = record[0], target_of(record[1])
        score = moved(model.scores(params, features), record[1])
        if self.classes == 1:
            error = jnp.square(jnp.ravel(score)[0] - target)
            # Targets within +-1 differ by 2 at most: the bound of an error is four times that of a squared target.
            known = jnp.clip(2 * target / jnp.sqrt(self.most), -1.0, 1.0)
            return jnp.stack([self._of_most(error), known, jnp.square(known)])
        right = (predicted(score) == jnp.maximum(target, 0)).astype(jnp.float32) - 0.5
        loss = self._of_most(log_loss(score, target))
        return jnp.concatenate([jnp.stack([right, loss]), self._bin(score, target)])

    def _of_most(self, loss: Array) -> Array:
        return jnp.where(jnp.isnan(loss), 1.0, jnp.clip(loss / self.most, 0.0, 1.0)) - 0.5

    def _bin(self, score: Array, target: Array) -> Array:
        """Where the record's probability of the second class lies, beside those of its own class."""
        if not self.bins:
            return jnp.zeros(0)
        chance = jax.nn.sigmoid(margin(score))
        place = jnp.clip(jnp.floor(chance * BINS), 0, BINS - 1) + BINS * (target > 0)
        return 0.5 * (jnp.arange(self.bins) == place)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(STREAM, int(silo in rounds), Full(), local=True, dimension=self.size)]


def predicted(score: Array) -> Array:
    return (score > 0).astype(jnp.int32) if score.ndim == 0 else jnp.argmax(score)


def margin(score: Array) -> Array:
    return score if score.ndim == 0 else score[1] - score[0]


def log_loss(score: Array, target: Array) -> Array:
    if score.ndim == 0:
        return jnp.logaddexp(0.0, jnp.where(target > 0, -score, score))
    return jax.nn.logsumexp(score) - score[jnp.maximum(target, 0).astype(jnp.int32)]
