"""The same algorithms as eager PyTorch loops, as one would write them by hand: silo by silo, round by round.

`stacked` puts the silos of a trusted server into one batch: the best an eager loop can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from bench.brought_torch import ACTIVATIONS
from bench.cases import Case, silo_arrays
from bench.peers_torch import penalty, record_losses
from silodp.compressors import shift_rate
from silodp.run.prepare import Prepared

Records = tuple[Tensor, Tensor]
Step = Callable[[int], Tensor]  # round number -> the point after it


class Loop:
    """What all loops share: records, start, noise multipliers (0 without privacy), and clipped sums of flat vectors."""

    def __init__(self, case: Case, prepared: Prepared, stacked: bool):
        self.case = case
        self.options: Any = prepared.config.algorithm
        self.silos = [self.loaded(*silo) for silo in silo_arrays(prepared)]
        if stacked:
            together = [torch.cat(part) for part in zip(*self.silos, strict=True)]
            self.silos = [(together[0], together[1])]
        self.x = torch.from_numpy(np.array(prepared.setting.x0))
        self.size = prepared.ground.objective.parameters
        self.algorithm: Any = prepared.plan.algorithm
        params = prepared.ground.objective.unravel(prepared.setting.x0)
        # Layers and leaves in the order of the flat vector.
        self.shapes = [{leaf: params[name][leaf].shape for leaf in sorted(params[name])} for name in sorted(params)]
        self.rows = vmap(grad(lambda x, a, b: self.losses(x, a[None], b[None])[0]), in_dims=(None, 0, 0))
        noise = prepared.plan.noised.multipliers
        self.noise = {name: float(values[0]) for name, values in noise.items()}

    def loaded(self, features: np.ndarray, targets: np.ndarray) -> Records:
        labels = torch.from_numpy(np.array(targets))
        return torch.from_numpy(np.array(features)), labels.long() if self.case.loss == "cross-entropy" else labels

    def losses(self, x: Tensor, h: Tensor, targets: Tensor) -> Tensor:
        begin = 0
        for i, shapes in enumerate(self.shapes):
            layer = {}
            for leaf, shape in shapes.items():
                layer[leaf] = x[begin : begin + prod(shape)].reshape(shape)
                begin += prod(shape)
            h = F.linear(h, layer["weight"], layer.get("bias"))
            h = ACTIVATIONS[self.case.activation](h) if i + 1 < len(self.shapes) else h
        return record_losses(self.case.loss, h, targets) + penalty(self.case.penalty, [x])

    def clipped_rows(self, points: Sequence[Tensor], signs: Sequence[float], records: Records, clip: float) -> Tensor:
        at = self.single if len(records[1]) == 1 else self.rows
        rows = [at(x, *records) for x in points]
        g = rows[0] if len(rows) == 1 else signs[0] * rows[0] + signs[1] * rows[1]
        return g * (clip / g.norm(dim=1).clamp(min=1e-30)).clamp(max=1)[:, None]

    def single(self, x: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """One record needs no vmap: plain autograd is quicker."""
        at = x.detach().requires_grad_()
        return torch.autograd.grad(self.losses(at, features, targets)[0], at)[0][None]

    def clipped_sum(self, points: Sequence[Tensor], signs: Sequence[float], records: Records, clip: float) -> Tensor:
        if not len(records[1]):
            return torch.zeros_like(points[0])
        return self.clipped_rows(points, signs, records, clip).sum(dim=0)

    def noised(self, value: Tensor, stream: str, bound: float) -> Tensor:
        std = self.noise.get(stream, 0.0) * bound
        return value + std * torch.randn(self.size) if std else value


class Diff2(Loop):
    """Recursive differences; noise once at a trusted server, or in each silo."""

    def __init__(self, case: Case, prepared: Prepared, stacked: bool):
        super().__init__(case, prepared, stacked)
        self.trusted = prepared.config.privacy.trust == "trusted"
        self.previous, self.v = self.x, torch.zeros_like(self.x)

    def __call__(self, round: int) -> Tensor:
        options = self.options
        if round % self.algorithm.restart:
            clip = options.clip_difference * float((self.x - self.previous).norm())
            clip = min(clip, 2 * options.clip) if self.algorithm.capped else clip
            self.v = self.v + self.mean([self.x, self.previous], [1.0, -1.0], "difference", clip)
        else:
            self.v = self.mean([self.x], [1.0], "value", options.clip)
        self.previous, self.x = self.x, self.x - options.step_size * self.v
        return self.x

    def mean(self, points: list[Tensor], signs: list[float], stream: str, clip: float) -> Tensor:
        total = torch.zeros_like(self.x)
        for records in self.silos:
            count = len(records[1])
            own = self.clipped_sum(points, signs, records, clip) / count
            total = total + (own if self.trusted else self.noised(own, stream, 2 * clip / count))
        mean = total / len(self.silos)
        records_in_all = sum(len(records[1]) for records in self.silos)
        return self.noised(mean, stream, 2 * clip / records_in_all) if self.trusted else mean


class Mu2(Loop):
    """Corrected momentum; the silos' records of a round are one batch, their sums q one matrix."""

    def __init__(self, case: Case, prepared: Prepared, stacked: bool):
        super().__init__(case, prepared, stacked)
        self.w = self.before = self.x
        self.clip, self.radius = float(self.algorithm.clip), float(self.algorithm.diameter) / 2
        self.step = float(self.algorithm.step_size)
        self.q = torch.zeros(len(self.silos), self.size)

    def __call__(self, round: int) -> Tensor:
        t, x = round + 1, self.x
        picked = [(a[round : round + 1], c[round : round + 1]) for a, c in self.silos]
        together = [torch.cat(part) for part in zip(*picked, strict=True)] if len(picked) > 1 else picked[0]
        records = (together[0], together[1])
        self.q = self.q + self.clipped_rows([x, self.before], [float(t), float(1 - t)], records, self.clip)
        std = self.noise.get("value", 0.0) * 2 * self.clip
        noise = std * torch.randn(*self.q.shape) if std else 0.0
        w = self.w - self.step * (self.q + noise).mean(dim=0)
        length = float(w.norm())
        self.w = w * (self.radius / length) if length > self.radius else w
        self.before, self.x = x, x + 2 / (t + 2) * (self.w - x)
        return self.x


class Soteria(Loop):
    """SoteriaFL-SGD: Poisson batches, noise, and rand-k compression against each silo's shift."""

    def __init__(self, case: Case, prepared: Prepared, stacked: bool):
        super().__init__(case, prepared, stacked)
        channel: Any = prepared.plan.noised
        self.rate = shift_rate(channel.compressor.omega(self.size))
        self.shifts = [torch.zeros_like(self.x) for _ in self.silos]
        self.shift = torch.zeros_like(self.x)

    def __call__(self, round: int) -> Tensor:
        mean = torch.zeros_like(self.x)
        for i, records in enumerate(self.silos):
            expected = self.options.batch or len(records[1])
            own = self.clipped_sum([self.x], [1.0], self.chosen(records), self.options.clip) / expected
            own = self.noised(own, "value", 2 * self.options.clip / expected)
            sent = (own - self.shifts[i]) * (self.mask() * (self.size / self.options.keep))
            self.shifts[i] = self.shifts[i] + self.rate * sent
            mean = mean + sent / len(self.silos)
        step = self.shift + mean
        self.shift = self.shift + self.rate * mean
        self.x = self.x - self.options.step_size * step
        return self.x

    def chosen(self, records: Records) -> Records:
        if self.options.batch is None:
            return records
        count = len(records[1])
        rows = torch.nonzero(torch.rand(count) < self.options.batch / count)[:, 0]
        return records[0][rows], records[1][rows]

    def mask(self) -> Tensor:
        mask = torch.zeros(self.size)
        mask[torch.randperm(self.size)[: self.options.keep]] = 1
        return mask


LOOPS: dict[str, Any] = {"diff2-gd": Diff2, "spider": Diff2, "mu2": Mu2, "soteria-sgd": Soteria}


def eager_loops(case: Case, prepared: Prepared) -> dict[str, Step]:
    make = LOOPS[case.tree["algorithm"]["name"]]
    loops = {"PyTorch loop": make(case, prepared, stacked=False)}
    if case.tree["privacy"]["trust"] == "trusted":
        loops["PyTorch loop, silos stacked"] = make(case, prepared, stacked=True)
    return loops
