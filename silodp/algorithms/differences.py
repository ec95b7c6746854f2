"""Recursive differences with restarts: DIFF2-GD (Murata, Suzuki 2023, Alg. 1 and 3; Thm 4.3) and FedProx-SPIDER
(Lowy, Ghafelebashi, Razaviyayn 2023, Alg. 3; Thm 3.1). The two papers' estimators are one.

    v = 0; y = x = x0
    for r = 0..R-1:
        if r mod restart == 0:  v = private_mean(clip(grad f(x; z), clip))
        else:                   v = v + private_mean(clip(grad f(x; z) - grad f(y; z), clip_difference * |x - y|))
        y, x = x, prox(x - step_size * v)

A difference moves with |x - y|, so its noise shrinks as the run settles; that is the whole point of the method.
A difference of two gradients clipped to `clip` cannot exceed 2 * clip: `capped` uses that. DIFF2's own form has no cap.

Formal guarantee: ceil(R/restart) releases `value` of sensitivity 2*clip/n and the other rounds' releases `difference`
of sensitivity 2*min(clip_difference*|x-y|, 2*clip)/n. Both streams are calibrated together (Lowy's Thm F.1 gives each
of them the whole budget: an erratum).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.algorithms.refine import State
from silodp.core import Algorithm, Answer, Federation, Silo, Stream, Vector, distance
from silodp.privacy.accountant import optimal_share
from silodp.sampling import BatchRule, Full


class RecursiveDifference(Algorithm):
    """v follows the gradient by private differences and starts afresh every `restart` rounds."""

    queries: ClassVar[tuple[str, ...]] = ("value", "difference")

    clip: Any
    clip_difference: Any
    restart: int = eqx.field(static=True)
    capped: bool = eqx.field(static=True, default=True)
    batch: BatchRule = Full()

    def init(self, x0: Vector) -> State:
        return State(x0, x0, jnp.zeros_like(x0))

    def round(self, state: State, fed: Federation) -> State:
        v = self.estimate(state, fed)
        return State(self.prox(state.x - self.step_size * v, self.step_size), state.x, v)

    def estimate(self, state: State, fed: Federation) -> Vector:
        return fed.cond(
            fed.round % self.restart == 0,
            lambda: fed.mean(self.value, state.x),
            lambda: state.v + fed.mean(self.difference, state.x, state.previous),
        )

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def difference(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        return silo.mean([x, y], [1.0, -1.0], self.difference_clip(x, y), "difference", self.batch)

    def difference_clip(self, x: Vector, y: Vector) -> Any:
        if self.clip_difference is None:
            return None
        scaled = self.clip_difference * distance(x, y)
        return jnp.minimum(scaled, 2 * self.clip) if self.capped and self.clip is not None else scaled

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        values = sum(r % self.restart == 0 for r in rounds)
        differences = len(rounds) - values
        return [Stream("value", values, self.batch), Stream("difference", differences, self.batch)]

    def optimal_shares(self, rounds: int) -> dict[str, float] | None:
        """Guesses that a step has length step_size * clip; then both streams' noise is known."""
        if self.clip is None or self.restart == 1:
            return None
        step = float(self.step_size) * float(self.clip)
        difference = min(float(self.clip_difference) * step, 2 * float(self.clip))
        values = -(-rounds // self.restart)
        path = (self.restart - 1) * difference**2
        share = optimal_share(values, rounds - values, float(self.clip) ** 2, path)
        return {"value": share, "difference": 1 - share}
