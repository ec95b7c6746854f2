"""DIFF2-BVR-L-SGD (Murata, Suzuki 2023, Alg. 4; Thm 5.3): recursive differences, then local steps of ONE silo a round.

    v as in DIFF2-GD (silodp.algorithms.differences);  x_1 = x - step_size * v
    silo r mod N, for k = 2..K, on a fixed-size batch:
        v_k = v_{k-1} + private(clip(grad f(x_{k-1}; z) - grad f(x_{k-2}; z), clip_local * |x_{k-1} - x_{k-2}|))
        x_k = x_{k-1} - step_size * v_k
    y, x = x, x_K

K = 1 is DIFF2-GD. Formal guarantee: the releases of DIFF2-GD and, for the silo that works, K-1 releases `local` in each
of its rounds, noised in the silo: whatever the trust model, local steps protect and are charged to that silo alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx

from silodp.algorithms.differences import RecursiveDifference
from silodp.algorithms.refine import State, advance, local_stream, refined
from silodp.core import Federation, Public, Silo, Stream, Vector
from silodp.sampling import BatchRule, Full


class LocalDifference(RecursiveDifference):
    """One silo a round carries the estimate on by `local_steps` - 1 steps of its own."""

    queries: ClassVar[tuple[str, ...]] = ("value", "difference", "refine")

    clip_local: Any = None
    local_steps: int = eqx.field(static=True, default=1)
    batch_local: BatchRule = Full()

    def round(self, state: State, fed: Federation) -> State:
        return advance(self, state.x, self.estimate(state, fed), fed)

    def refine(self, silo: Silo, x: Vector, y: Vector, v: Vector) -> Public:
        return refined(self, silo, x, y, v)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [*super().releases(silo, sizes, rounds), local_stream(self, silo, len(sizes), rounds)]
