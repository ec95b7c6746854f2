"""DP-SCAFFOLD (Noble, Bellet, Dieuleveut 2022): local steps with control variates c_i that stay in the silos.

Formal guarantee: every local step is a release `local`, noised in the silo; all that is sent and kept is made of those.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp import Algorithm, Public, Stream
from silodp.core import POINT
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Any
    c: Any


class Scaffold(Algorithm):
    queries: ClassVar = {"train": (POINT, POINT)}
    entry: ClassVar = {
        "trusts": ("untrusted",),
        "summary": "local steps with control variates",
        "example": {"clip": 1.0, "batch": 8, "local_steps": 3, "server_step": 0.9},
        "sampling": "poisson",
    }

    clip: Any
    local_steps: int = eqx.field(static=True)
    server_step: Any = 1.0  # an option that the library has never heard of
    batch: BatchRule = Full()

    def init(self, x0):
        return State(x0, jnp.zeros_like(x0))

    def remember(self, silo, x0):
        return jnp.zeros_like(x0)

    def round(self, state, fed):
        moved, changed = jnp.split(fed.mean(self.train, state.x, state.c), 2)
        return State(state.x + self.server_step * moved, state.c + len(fed.present) / fed.silos * changed)

    def train(self, silo, x, c):
        own = silo.memory

        def step(k, y):
            g = silo.privatise(silo.mean([y], [1.0], self.clip, "local", self.batch, k), k)
            return self.prox(y - self.step_size * (g - own + c), self.step_size)

        y = silo.loop(self.local_steps, step, x)
        silo.memory = own - c + (x - y) / (self.local_steps * self.step_size)
        return Public(jnp.concatenate([y - x, silo.memory - own]))

    def stream_of(self, query):
        return "local"

    def releases(self, silo, sizes, rounds):
        return [Stream("local", len(rounds) * self.local_steps, self.batch, local=True)]
