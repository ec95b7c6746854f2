"""Gradient descent on features whitened by a private second moment: the first round asks for the mean of a a^T.

Formal guarantee: one release `moment` (a statistic of the records, no gradient), of d x d numbers, and R - 1 releases
`value`; both are clipped means whose bounds the library computes.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.core import POINT, Algorithm
from silodp.facts import Stream
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Any
    moment: Any


class Whitened(Algorithm):
    queries: ClassVar = {"moment": (), "value": (POINT,)}
    entry: ClassVar = {
        "trusts": ("trusted", "untrusted"),
        "summary": "descent in the metric of a private second moment",
        "example": {"clip": 1.0, "clip_moment": 4.0, "features": 5, "ridge": 0.5},
    }

    clip: Any
    clip_moment: Any
    ridge: Any
    features: int = eqx.field(static=True)
    batch: BatchRule = Full()

    def init(self, x0):
        return State(x0, jnp.eye(self.features))

    def round(self, state, fed):
        moment = fed.cond(fed.round == 0, lambda: self.square(fed.mean(self.moment)), lambda: state.moment)
        g = fed.cond(fed.round == 0, lambda: jnp.zeros_like(state.x), lambda: fed.mean(self.value, state.x))
        metric = jnp.linalg.inv(moment @ moment + self.ridge * jnp.eye(self.features))
        step = jnp.concatenate([g[: -self.features], metric @ g[-self.features :]])
        return State(self.prox(state.x - self.step_size * step, self.step_size), moment)

    def square(self, flat):
        return flat.reshape(self.features, self.features)

    def moment(self, silo):
        return silo.statistic(lambda z: jnp.outer(z[0], z[0]).ravel(), self.clip_moment, "moment")

    def value(self, silo, x):
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def releases(self, silo, sizes, rounds):
        first = sum(r == 0 for r in rounds)
        size = self.features**2
        return [Stream("value", len(rounds) - first, self.batch), Stream("moment", first, Full(), dimension=size)]
