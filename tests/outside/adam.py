"""Adam at the server, on private means of clipped gradients.

Formal guarantee: that of DP-GD: a release `value` in every round; Adam only sees what was released.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.core import POINT, Algorithm
from silodp.facts import Stream
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Any
    first: Any
    second: Any


class ServerAdam(Algorithm):
    queries: ClassVar = {"value": (POINT,)}
    entry: ClassVar = {"summary": "Adam at the server", "example": {"clip": 1.0, "decay": 0.9}}

    clip: Any
    decay: Any = 0.9
    decay_squares: Any = 0.99
    batch: BatchRule = Full()

    def init(self, x0):
        return State(x0, jnp.zeros_like(x0), jnp.zeros_like(x0))

    def round(self, state, fed):
        g = fed.mean(self.value, state.x)
        first = self.decay * state.first + (1 - self.decay) * g
        second = self.decay_squares * state.second + (1 - self.decay_squares) * g**2
        t = jnp.float32(fed.round + 1)
        scaled = first / (1 - self.decay**t) / (jnp.sqrt(second / (1 - self.decay_squares**t)) + 1e-6)
        return State(self.prox(state.x - self.step_size * scaled, self.step_size), first, second)

    def value(self, silo, x):
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def releases(self, silo, sizes, rounds):
        return [Stream("value", len(rounds), self.batch)]
