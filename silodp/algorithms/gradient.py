"""Gradient descent on private means: DP-GD, DP-SGD and their non-private forms GD, MB-SGD; one-pass Prox-SGD.

DP-GD is the baseline of DIFF2 (Murata, Suzuki); DP-SGD is MB-SGD of Lowy, Ghafelebashi and Razaviyayn; with one pass
over the data it is their Noisy Prox-SGD (Alg. 6, 7; Thm 2.1).

    for r = 0..R-1:
        x = prox(x - step_size * private_mean(clip(grad f(x; z), clip)))

Formal guarantee: R releases `value`, each over a batch drawn by `batch`, of sensitivity 2*clip/b under replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx

from silodp.core import Algorithm, Answer, Federation, Silo, Stream, Vector
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector


class GradientDescent(Algorithm):
    """x <- prox(x - step_size * mean of clipped gradients)."""

    queries: ClassVar[tuple[str, ...]] = ("value",)

    clip: Any
    batch: BatchRule = Full()

    def init(self, x0: Vector) -> State:
        return State(x0)

    def round(self, state: State, fed: Federation) -> State:
        v = fed.mean(self.value, state.x)
        return State(self.prox(state.x - self.step_size * v, self.step_size))

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]
