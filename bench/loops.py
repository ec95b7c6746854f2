"""The same algorithms as eager loops, as one would write them in PyTorch or numpy: silo by silo, round by round.

A loop is written once; its backend (PyTorch or numpy) has the clipped sums and the noise. `stacked` puts the silos of
a round into one batch where the algorithm allows it: the best an eager loop can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bench.cases import Case, silo_arrays
from silodp.compressors import shift_rate
from silodp.run.runner import Prepared

Vector = Any  # a flat vector of the backend
Records = tuple[Any, Any]
Step = Callable[[int], Vector]  # round number -> the point after it


class Backend(Protocol):
    """Flat vectors, clipped sums over records, and normal numbers."""

    def load(self, array: np.ndarray) -> Any: ...

    def clipped_sum(
        self, points: Sequence[Vector], signs: Sequence[float], records: Records, clip: float
    ) -> Vector: ...

    def clipped_rows(self, points: Sequence[Vector], signs: Sequence[float], records: Records, clip: float) -> Any: ...

    def normal(self, size: int) -> Vector: ...

    def length(self, vector: Vector) -> float: ...

    def stack(self, parts: Sequence[Any]) -> Any: ...

    def choose(self, records: Records, probability: float) -> Records: ...

    def mask(self, size: int, keep: int) -> Vector: ...


class Loop:
    """What all loops share: records, start, noise multipliers (0 without privacy)."""

    def __init__(self, case: Case, prepared: Prepared, backend: Backend):
        self.case, self.backend = case, backend
        self.options: Any = prepared.config.algorithm
        self.silos = [(backend.load(a), backend.load(b)) for a, b in silo_arrays(prepared)]
        self.x = backend.load(np.asarray(prepared.setting.x0))
        self.size = prepared.parts.objective.parameters
        self.algorithm: Any = prepared.parts.algorithm
        noise = prepared.parts.channel.multipliers
        self.noise = {name: float(values[0]) for name, values in noise.items()}

    def noised(self, value: Vector, stream: str, bound: float) -> Vector:
        std = self.noise.get(stream, 0.0) * bound
        return value + std * self.backend.normal(self.size) if std else value


class Diff2(Loop):
    """Recursive differences; noise once at a trusted server, or in each silo."""

    def __init__(self, case: Case, prepared: Prepared, backend: Backend, stacked: bool):
        super().__init__(case, prepared, backend)
        self.trusted = prepared.config.privacy.trust == "trusted"
        self.previous, self.v = self.x, None
        self.capped = self.algorithm.capped
        if stacked and self.trusted:
            together = [backend.stack(part) for part in zip(*self.silos, strict=True)]
            self.count, self.silos = len(self.silos), [(together[0], together[1])]
        else:
            self.count = len(self.silos)

    def __call__(self, round: int) -> Vector:
        options, b = self.options, self.backend
        clip, points, signs, stream = options.clip, [self.x], [1.0], "value"
        if round % self.algorithm.restart:
            clip = options.clip_difference * b.length(self.x - self.previous)
            clip = min(clip, 2 * options.clip) if self.capped else clip
            points, signs, stream = [self.x, self.previous], [1.0, -1.0], "difference"
        mean = self.mean(points, signs, stream, clip)
        self.v = mean if stream == "value" else self.v + mean
        self.previous, self.x = self.x, self.x - options.step_size * self.v
        return self.x

    def mean(self, points: list[Vector], signs: list[float], stream: str, clip: float) -> Vector:
        total = 0.0
        for records in self.silos:
            count = len(records[1])
            own = self.backend.clipped_sum(points, signs, records, clip) / count
            total = total + (own if self.trusted else self.noised(own, stream, 2 * clip / count))
        mean = total / len(self.silos)
        records_in_all = sum(len(records[1]) for records in self.silos)
        return self.noised(mean, stream, 2 * clip / records_in_all) if self.trusted else mean


class Mu2(Loop):
    """Corrected momentum; the silos' records of a round are one batch, their sums q one matrix."""

    def __init__(self, case: Case, prepared: Prepared, backend: Backend, stacked: bool):
        super().__init__(case, prepared, backend)
        self.w = self.before = self.x
        self.count = len(self.silos)
        self.clip, self.radius = float(self.algorithm.clip), float(self.algorithm.diameter) / 2
        self.step = float(self.algorithm.step_size)
        self.q: Any = 0.0

    def __call__(self, round: int) -> Vector:
        b, t, x = self.backend, round + 1, self.x
        picked = [(a[round : round + 1], c[round : round + 1]) for a, c in self.silos]
        records = tuple(b.stack(part) for part in zip(*picked, strict=True)) if self.count > 1 else picked[0]
        self.q = self.q + b.clipped_rows([x, self.before], [float(t), float(1 - t)], records, self.clip)
        std = self.noise.get("value", 0.0) * 2 * self.clip
        noise = std * b.normal(self.count * self.size).reshape(self.count, self.size) if std else 0.0
        w = self.w - self.step * (self.q + noise).mean(axis=0)
        length = b.length(w)
        self.w = w * (self.radius / length) if length > self.radius else w
        self.before, self.x = x, x + 2 / (t + 2) * (self.w - x)
        return self.x


class Soteria(Loop):
    """SoteriaFL-SGD: Poisson batches, noise, and rand-k compression against each silo's shift."""

    def __init__(self, case: Case, prepared: Prepared, backend: Backend, stacked: bool):
        super().__init__(case, prepared, backend)
        channel: Any = prepared.parts.channel
        self.rate = shift_rate(channel.compressor.omega(self.size))
        self.shifts: list[Any] = [0 * self.x for _ in self.silos]
        self.shift = 0 * self.x

    def __call__(self, round: int) -> Vector:
        mean = 0.0
        for i, records in enumerate(self.silos):
            count = len(records[1])
            expected = self.options.batch or count
            batch = records if self.options.batch is None else self.backend.choose(records, expected / count)
            own = self.backend.clipped_sum([self.x], [1.0], batch, self.options.clip) / expected
            own = self.noised(own, "value", 2 * self.options.clip / expected)
            keep = self.options.keep
            sent = (own - self.shifts[i]) * (self.backend.mask(self.size, keep) * (self.size / keep))
            self.shifts[i] = self.shifts[i] + self.rate * sent
            mean = mean + sent / len(self.silos)
        step = self.shift + mean
        self.shift = self.shift + self.rate * mean
        self.x = self.x - self.options.step_size * step
        return self.x


LOOPS: dict[str, Callable[..., Loop]] = {"diff2-gd": Diff2, "spider": Diff2, "mu2": Mu2, "soteria-sgd": Soteria}


def loop_of(case: Case, prepared: Prepared, backend: Backend, stacked: bool = False) -> Step:
    return LOOPS[case.tree["algorithm"]["name"]](case, prepared, backend, stacked)  # type: ignore[return-value]
