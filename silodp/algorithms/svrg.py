"""FedProx-SVRG and FedProx-PL-SVRG (Lowy, Ghafelebashi, Razaviyayn 2023, Alg. 1 and 2; Thm 2.2).

    anchor = x = x0
    every `restart` rounds:  anchor = x;  g = private_mean(clip(grad f(anchor; z), clip)) over all records
    every round:             d = private_mean(clip(grad f(x; z) - grad f(anchor; z), C)) over a Poisson batch
                             x = prox(x - step_size * (g + d))

C = min(2 * clip, clip_difference * |x - anchor|); without clip_difference it is the paper's 2 * clip. The paper takes
restart = floor(n / batch) and samples with replacement, for which its guarantee is false; here batches are Poisson.
PL-SVRG runs stages of `epochs` restarts; a stage starts from an iterate of the stage before, drawn uniformly.

Formal guarantee: ceil(R/restart) full-batch releases `value` of sensitivity 2*clip/n and R sampled releases
`difference` of sensitivity 2*C/batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.core import Algorithm, Answer, Federation, Silo, Stream, Vector, distance
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector
    anchor: Vector
    g: Vector
    drawn: Vector  # uniform among the iterates of this stage so far


class ProxSVRG(Algorithm):
    """Differences against an anchor that moves every `restart` rounds."""

    queries: ClassVar[tuple[str, ...]] = ("value", "difference")

    clip: Any
    restart: int = eqx.field(static=True)
    batch: BatchRule = Full()
    clip_difference: Any = None
    epochs: int | None = eqx.field(static=True, default=None)

    def init(self, x0: Vector) -> State:
        return State(x0, x0, jnp.zeros_like(x0), x0)

    def round(self, state: State, fed: Federation) -> State:
        state = self.stage_start(state, fed)
        fresh = fed.round % self.restart == 0
        anchor = jnp.where(fresh, state.x, state.anchor)
        g = fed.cond(fresh, lambda: fed.mean(self.value, anchor), lambda: state.g)
        v = g + fed.mean(self.difference, state.x, anchor)
        x = self.prox(state.x - self.step_size * v, self.step_size)
        return State(x, anchor, g, self.stage_draw(state.drawn, x, fed))

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value")

    def difference(self, silo: Silo, x: Vector, anchor: Vector) -> Answer:
        clip = None if self.clip is None else 2 * self.clip
        if clip is not None and self.clip_difference is not None:
            clip = jnp.minimum(clip, self.clip_difference * distance(x, anchor))
        return silo.mean([x, anchor], [1.0, -1.0], clip, "difference", self.batch)

    def stage_start(self, state: State, fed: Federation) -> State:
        if self.epochs is None:
            return state
        begins = (fed.round > 0) & (fed.round % (self.epochs * self.restart) == 0)
        x = jnp.where(begins, state.drawn, state.x)
        return State(x, state.anchor, state.g, state.drawn)

    def stage_draw(self, drawn: Vector, x: Vector, fed: Federation) -> Vector:
        if self.epochs is None:
            return x
        position = fed.round % (self.epochs * self.restart)
        return jnp.where(fed.coin("stage") * (position + 1) < 1, x, drawn)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        values = sum(r % self.restart == 0 for r in rounds)
        return [Stream("value", values, Full()), Stream("difference", len(rounds), self.batch)]
