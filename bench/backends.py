"""PyTorch and numpy as backends of the eager loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from bench.cases import Case
from bench.loops import Backend, Records
from bench.peers_numpy import by_factors, clipped_sum, combined, row_norms
from bench.peers_torch import ACTIVATIONS, penalty, record_losses
from silodp.run.runner import Prepared

Layout = list[tuple[str, str, tuple[int, ...]]]  # layer, leaf, shape, in the order of the flat vector


def layout_of(prepared: Prepared) -> Layout:
    params = prepared.parts.objective.unravel(prepared.setting.x0)
    return [(name, leaf, params[name][leaf].shape) for name in sorted(params) for leaf in sorted(params[name])]


def unflatten(layout: Layout, x: Any) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, leaf, shape in layout:
        end = begin + int(np.prod(shape))
        tree.setdefault(name, {})[leaf] = x[begin:end].reshape(shape)
        begin = end
    return tree


class NumpyBackend(Backend):
    def __init__(self, case: Case, prepared: Prepared):
        self.case, self.layout = case, layout_of(prepared)
        self.rng = np.random.default_rng(0)

    def load(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def clipped_sum(self, points: Sequence[Any], signs: Sequence[float], records: Records, clip: float) -> np.ndarray:
        trees = [unflatten(self.layout, x) for x in points]
        if len(points) == 1 and not self.case.penalty:
            tree = by_factors(self.case, trees[0], records, clip)
            return np.concatenate([g.ravel() for layer in tree.values() for g in layer.values()])
        return np.concatenate(clipped_sum(self.case, trees, list(signs), records, clip))

    def clipped_rows(self, points: Sequence[Any], signs: Sequence[float], records: Records, clip: float) -> np.ndarray:
        rows = combined(self.case, [unflatten(self.layout, x) for x in points], list(signs), *records)
        factors = np.minimum(1, clip / row_norms(rows)).astype(np.float32)
        return factors[:, None] * np.concatenate(rows, axis=1)

    def normal(self, size: int) -> np.ndarray:
        return self.rng.standard_normal(size, np.float32)

    def length(self, vector: np.ndarray) -> float:
        return float(np.linalg.norm(vector))

    def stack(self, parts: Sequence[Any]) -> np.ndarray:
        return np.concatenate(parts)

    def choose(self, records: Records, probability: float) -> Records:
        rows = np.flatnonzero(self.rng.random(len(records[1])) < probability)
        return records[0][rows], records[1][rows]

    def mask(self, size: int, keep: int) -> np.ndarray:
        chosen = np.zeros(size, np.float32)
        chosen[self.rng.permutation(size)[:keep]] = 1
        return chosen


class TorchBackend(Backend):
    def __init__(self, case: Case, prepared: Prepared):
        self.case, self.layout = case, layout_of(prepared)
        self.act = ACTIVATIONS[case.activation]
        self.rows = vmap(grad(self.loss), in_dims=(None, 0, 0))

    def load(self, array: np.ndarray) -> Tensor:
        loaded = torch.from_numpy(np.array(array))
        return loaded if loaded.is_floating_point() or self.case.loss == "logistic" else loaded.long()

    def losses(self, x: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        layers = list(unflatten(self.layout, x).values())
        h = features
        for i, layer in enumerate(layers):
            h = F.linear(h, layer["weight"], layer.get("bias"))
            h = self.act(h) if i + 1 < len(layers) else h
        return record_losses(self.case.loss, h, targets) + penalty(self.case, [x])

    def loss(self, x: Tensor, feature: Tensor, target: Tensor) -> Tensor:
        return self.losses(x, feature[None], target[None])[0]

    def clipped_rows(self, points: Sequence[Tensor], signs: Sequence[float], records: Records, clip: float) -> Tensor:
        if len(records[1]) == 1:
            rows = [self.single(x, records)[None] for x in points]
        else:
            rows = [self.rows(x, *records) for x in points]
        g = rows[0] if len(rows) == 1 else signs[0] * rows[0] + signs[1] * rows[1]
        return g * (clip / g.norm(dim=1).clamp(min=1e-30)).clamp(max=1)[:, None]

    def single(self, x: Tensor, records: Records) -> Tensor:
        """One record needs no vmap: plain autograd is quicker."""
        at = x.detach().requires_grad_()
        return torch.autograd.grad(self.losses(at, *records)[0], at)[0]

    def clipped_sum(self, points: Sequence[Tensor], signs: Sequence[float], records: Records, clip: float) -> Tensor:
        if not len(records[1]):
            return torch.zeros_like(points[0])
        return self.clipped_rows(points, signs, records, clip).sum(dim=0)

    def normal(self, size: int) -> Tensor:
        return torch.randn(size)

    def length(self, vector: Tensor) -> float:
        return float(vector.norm())

    def stack(self, parts: Sequence[Any]) -> Tensor:
        return torch.cat(list(parts))

    def choose(self, records: Records, probability: float) -> Records:
        rows = torch.nonzero(torch.rand(len(records[1])) < probability)[:, 0]
        return records[0][rows], records[1][rows]

    def mask(self, size: int, keep: int) -> Tensor:
        chosen = torch.zeros(size)
        chosen[torch.randperm(size)[:keep]] = 1
        return chosen
