"""Private stochastic gradients with momentum (STORM): MB-PSGM and CE-PSGM ("Efficient Private Federated Non-Convex
Optimization with Shuffled Model", Alg. 1; Thm 4.2, A.3), under any trust model.

    y = x = x0; v = 0
    for r = 0..R-1:   rho = 1 in round 0, `momentum` afterwards
        v = (1 - rho) * (v + private_mean(clip(grad f(x; z) - grad f(y; z), clip_difference * |x - y|)))
            + rho * private_mean(clip(grad f(x; z), clip))
        silo r mod N: w_0 = w_1 = x; for k = 1..K:
            v_k = v_{k-1} + private(clip(grad f(w_k; z) - grad f(w_{k-1}; z), clip_local * |w_k - w_{k-1}|))
            w_{k+1} = prox(w_k - step_size * v_k)
        y, x = x, w_{K+1}

local_steps K = 1 is MB-PSGM: the first local difference is zero and nothing local is released. Full batches are the -FG
variants. The paper takes the value at the point before x: an erratum. `fused` (ours) sends one vector a record,
clip(grad f(x; z) - (1-rho) * grad f(y; z), C) with C = (1-rho) * clip_difference * |x-y| + rho * clip:
one release a round instead of two. `batch_first` (B0) is a batch of round 0's own. Through a shuffler the two messages
of a record come from one batch, as in the paper; on the Gaussian channels each stream draws its own.

Formal guarantee: R releases `value` and R-1 releases `difference` (fused: R `value`), and for the silo that works K-1
releases `local` in each of its rounds. With `batch_first` the value of round 0 is a stream of its own, `first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.algorithms.refine import State, advance, local_stream, refined
from silodp.core import FIRST, Algorithm, Answer, Federation, Public, Silo, Stream, Vector, distance
from silodp.sampling import BatchRule, Full


class MomentumDifference(Algorithm):
    """STORM's estimator, with local steps of one silo a round."""

    queries: ClassVar[tuple[str, ...]] = ("value", "difference", "fused_value", "first_value", "refine")

    clip: Any
    clip_difference: Any
    momentum: Any
    batch: BatchRule = Full()
    batch_first: BatchRule | None = None
    fused: bool = eqx.field(static=True, default=False)
    clip_local: Any = None
    local_steps: int = eqx.field(static=True, default=1)
    batch_local: BatchRule = Full()

    def init(self, x0: Vector) -> State:
        return State(x0, x0, jnp.zeros_like(x0))

    def round(self, state: State, fed: Federation) -> State:
        return advance(self, state.x, self.estimate(state, fed), fed)

    def estimate(self, state: State, fed: Federation) -> Vector:
        if self.batch_first is None:
            return self.momentum_estimate(state, fed)
        return fed.cond(
            fed.round == 0,
            lambda: fed.mean(self.first_value, state.x),
            lambda: self.momentum_estimate(state, fed),
        )

    def momentum_estimate(self, state: State, fed: Federation) -> Vector:
        x, y, keep = state.x, state.previous, 1 - self.momentum
        if self.fused:
            return (1 - self.share(fed.round)) * state.v + fed.mean(self.fused_value, x, y)
        fresh = fed.mean(self.value, x)
        return fed.cond(
            fed.round == 0,
            lambda: fresh,
            lambda: keep * (state.v + fed.mean(self.difference, x, y)) + self.momentum * fresh,
        )

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def first_value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, FIRST, self.batch_first)

    def difference(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        return silo.mean([x, y], [1.0, -1.0], self.difference_clip(x, y), "difference", self.batch)

    def share(self, round: Any) -> Any:
        """rho: a fresh start in round 0, the momentum afterwards."""
        return jnp.where(round == 0, 1.0, self.momentum)

    def fused_value(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        rho = self.share(silo.round)
        clip = None if self.clip is None else (1 - rho) * self.difference_clip(x, y) + rho * self.clip
        return silo.mean([x, y], [1.0, rho - 1], clip, "value", self.batch)

    def difference_clip(self, x: Vector, y: Vector) -> Any:
        return None if self.clip_difference is None else self.clip_difference * distance(x, y)

    def refine(self, silo: Silo, x: Vector, y: Vector, v: Vector) -> Public:
        return refined(self, silo, x, y, v)

    def stream_of(self, query: str) -> str:
        return {"fused_value": "value", "first_value": FIRST, "refine": "local"}.get(query, query)

    @property
    def together(self) -> int:
        return 1 if self.fused else 2

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        later = 0 if self.fused else sum(r > 0 for r in rounds)
        first = 0 if self.batch_first is None else sum(r == 0 for r in rounds)
        streams = [
            Stream("value", len(rounds) - first, self.batch),
            Stream("difference", later, self.batch),
            local_stream(self, silo, len(sizes), rounds),
        ]
        return streams if self.batch_first is None else [*streams, Stream(FIRST, first, self.batch_first)]
