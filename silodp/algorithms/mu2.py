"""DP-mu2-FL (Reshef, Levy 2024, Alg. 1 untrusted, Alg. 2 trusted; Thm 5.2, 6.2): corrected momentum, one pass.

    w = x = y = x1; q_i = 0
    for t = 1..T, each silo on its next record (or chunk):
        s_i = mean of clip(t * grad f(x; z) - (t-1) * grad f(y; z), clip)         (alpha_t = t; y is the point before x)
        q_i = q_i + s_i
        w = project(w - step_size * private_mean(q_i)), on the ball of diameter D around 0
        y, x = x, x + 2/(t+2) * (w - x)
    return the last point at which gradients were taken

The paper assumes |s_i| <= S = G + 2*L*D; clipping s_i to `clip` = S makes the guarantee need no assumption. Its Alg. 2
takes the second gradient on another record, which is an erratum. Convex losses.

Formal guarantee: T releases `value`. A record enters one s_i and is then part of every later q_i, so each release has
sensitivity 2*clip/chunk for it, and the record of the first round is charged for all T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from silodp.core import Algorithm, Answer, Federation, Release, Silo, Stream, Vector
from silodp.prox import Ball
from silodp.sampling import Cumulative


class State(eqx.Module):
    x: Vector  # where gradients were last taken: the method's output
    ahead: Vector  # where they are taken next
    w: Vector


class Mu2(Algorithm):
    """Every silo keeps q_i; the server only ever sees it with noise."""

    queries: ClassVar[tuple[str, ...]] = ("corrected",)

    clip: Any
    diameter: Any
    batch: Cumulative

    def init(self, x0: Vector) -> State:
        return State(x0, x0, x0)

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        return jnp.zeros_like(x0)

    def round(self, state: State, fed: Federation) -> State:
        t = jnp.float32(fed.round + 1)
        x = state.ahead
        q = fed.mean(self.corrected, x, state.x)
        moved = self.prox(state.w - self.step_size * q, self.step_size)
        w = Ball(self.diameter / 2)(moved, self.step_size)
        return State(x, x + 2 / (t + 2) * (w - x), w)

    def corrected(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        t = jnp.float32(silo.round + 1)
        s = silo.mean([x, y], [t, 1 - t], self.clip, "value", self.batch).release()
        silo.memory = silo.memory + s.value
        return Release(silo.memory, s.bound, "value")

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]
