"""A clipped mean written by hand in numpy, for the networks of the workloads.

One point of a dense network needs no per-record gradients (|delta a^T|^2 = |delta|^2 |a|^2); all else forms them, a
microbatch at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bench.peer import Build, Peer, Shape
from bench.workloads import Tree, Workload

MICROBATCH_FLOATS = 1 << 18  # numbers in the per-record gradients that exist at a time
SIGNS = [1.0, -1.0]
Array = np.ndarray


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def activate(kind: str, z: Array) -> tuple[Array, Array]:
    """The activation and its derivative."""
    if kind == "sigmoid":
        s = sigmoid(z)
        return s, s * (1 - s)
    if kind == "softplus":
        return np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))), sigmoid(z)
    return np.maximum(z, 0), (z > 0).astype(z.dtype)


def score_cotangent(loss: str, z: Array, targets: Array) -> Array:
    """Derivative of each record's loss in its scores."""
    if loss == "squared":
        return 2 * (z - targets[:, None])
    if loss == "logistic":
        sign = (1 - 2 * targets[:, None]).astype(z.dtype)
        return sign * sigmoid(sign * z)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(z)), targets] -= 1
    return p


def dense_taps(net: Shape, params: Tree, h: Array, targets: Array) -> tuple[list[tuple], Array]:
    """(layer, its inputs, its cotangents) from last to first, and the cotangent of the network's input."""
    names = [n for n in params if n.startswith("dense")]
    inputs, slopes = [], []
    for name in names:
        inputs.append(h)
        h = h @ params[name]["weight"].T + params[name].get("bias", 0)
        if name != names[-1]:
            h, slope = activate(net.activation, h)
            slopes.append(slope)
    delta, taps = score_cotangent(net.loss, h, targets), []
    for i in range(len(names) - 1, -1, -1):
        taps.append((names[i], inputs[i], delta))
        delta = delta @ params[names[i]]["weight"] if i or "conv1" in params else delta
        delta = delta * slopes[i - 1] if i else delta
    return taps, delta


def conv_forward(layer: dict[str, Array], h: Array) -> tuple[Array, tuple]:
    """relu and 2x2 max pooling after the convolution; what the way back needs."""
    weight, count = layer["weight"], len(h)
    windows = sliding_window_view(h, (5, 5), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
    side = windows.shape[1]
    patches = np.ascontiguousarray(windows).reshape(count, side * side, -1)
    z = (patches @ weight.reshape(len(weight), -1).T + layer["bias"]).transpose(0, 2, 1)
    cells = np.maximum(z, 0).reshape(count, -1, side // 2, 2, side // 2, 2)
    pooled = cells.max(axis=(3, 5))
    chosen = (cells == pooled[:, :, :, None, :, None]) & (cells > 0)
    return pooled, (patches, chosen)


def conv_back(layer: dict[str, Array], kept: tuple, delta: Array, shape: tuple[int, ...]) -> tuple[dict, Array]:
    patches, chosen = kept
    weight, count = layer["weight"], len(delta)
    back = (chosen * delta[:, :, :, None, :, None]).reshape(count, len(weight), -1)
    rows = {"weight": (back @ patches).reshape(count, *weight.shape), "bias": back.sum(axis=2)}
    side = shape[-1] - 4
    spread = (back.transpose(0, 2, 1) @ weight.reshape(len(weight), -1)).reshape(count, side, side, -1, 5, 5)
    below = np.zeros((count, *shape), np.float32)
    for i in range(5):
        for j in range(5):
            below[:, :, i : i + side, j : j + side] += spread[..., i, j].transpose(0, 3, 1, 2)
    return rows, below


def record_gradients(net: Shape, params: Tree, h: Array, targets: Array) -> dict[str, dict[str, Array]]:
    """Every record's own gradient, penalty included."""
    kept, shapes = {}, {}
    for name in (n for n in params if n.startswith("conv")):
        shapes[name] = h.shape[1:]
        h, kept[name] = conv_forward(params[name], h)
    top = h.shape
    taps, delta = dense_taps(net, params, h.reshape(len(h), -1), targets)
    rows = {name: {"weight": d[:, :, None] * a[:, None, :], "bias": d} for name, a, d in taps}
    for name in reversed(kept):
        delta = delta.reshape(top) if delta.ndim == 2 else delta
        rows[name], delta = conv_back(params[name], kept[name], delta, shapes[name])
    slope = lambda x: 2 * net.penalty * x / (1 + x * x) ** 2
    own = lambda name, leaf, x: rows[name][leaf] + slope(x) if net.penalty else rows[name][leaf]
    return {name: {leaf: own(name, leaf, x) for leaf, x in layer.items()} for name, layer in params.items()}


def combined(net: Shape, points: list[Tree], signs: list[float], features: Array, targets: Array) -> list[Array]:
    """Every record's sum_k signs[k] * gradient at points[k]: one flat block of rows for each leaf."""
    at = [record_gradients(net, p, features, targets) for p in points]
    rows = [[g.reshape(len(g), -1) for layer in tree.values() for g in layer.values()] for tree in at]
    if len(rows) == 1:
        return rows[0]
    return [np.float32(signs[0]) * g + np.float32(signs[1]) * h for g, h in zip(*rows, strict=True)]


def row_norms(rows: list[Array]) -> Array:
    return np.sqrt(sum(np.einsum("nk,nk->n", g, g) for g in rows))


def clipped_sum(net: Shape, points: list[Tree], signs: list[float], records: Any, clip: float) -> list[Array]:
    """The sum of clipped combinations, leaf by leaf, from per-record gradients of a microbatch at a time."""
    features, targets = records
    total = [np.zeros(x.size, np.float32) for layer in points[0].values() for x in layer.values()]
    size = microbatch(points[0])
    for begin in range(0, len(features), size):
        part = slice(begin, begin + size)
        rows = combined(net, points, signs, features[part], targets[part])
        factors = np.minimum(1, clip / np.maximum(row_norms(rows), 1e-30)).astype(np.float32)
        for leaf, g in zip(total, rows, strict=True):
            leaf += factors @ g
    return total


def microbatch(params: Tree) -> int:
    """Records at a time."""
    return max(1, MICROBATCH_FLOATS // sum(x.size for layer in params.values() for x in layer.values()))


def by_factors(net: Shape, params: Tree, records: Any, clip: float) -> Tree:
    """One point of a dense network without penalty: norms from the layers' inputs and cotangents."""
    taps, _ = dense_taps(net, params, *records)
    square = lambda v: np.einsum("nk,nk->n", v, v)
    norms = np.sqrt(sum(square(d) * (square(a) + ("bias" in params[name])) for name, a, d in taps))
    factors = np.minimum(1, clip / np.maximum(norms, 1e-30)).astype(np.float32)[:, None]
    sums = {name: {"bias": (factors * d).sum(axis=0), "weight": (factors * d).T @ a} for name, a, d in taps}
    return {name: {leaf: sums[name][leaf] for leaf in layer} for name, layer in params.items()}


@cache
def clip_of(work: Workload, points: int) -> float:
    """The median norm of some records' gradients (or differences): about half of them are clipped."""
    return float(
        np.median(row_norms(combined(work, work.points(points), SIGNS, work.features[:64], work.targets[:64])))
    )


def hand_written(work: Workload, points: int) -> Peer:
    at, clip, records = work.points(points), clip_of(work, points), (work.features, work.targets)
    if points == 1 and "conv1" not in at[0] and not work.penalty:
        read = lambda tree: {n: {k: x / work.records for k, x in layer.items()} for n, layer in tree.items()}
        return Peer(lambda: by_factors(work, at[0], records, clip), read, note="norms from the layers' factors")

    def read_leaves(total: list[Array]) -> Tree:
        left = iter(total)
        return {n: {k: next(left) / work.records for k in layer} for n, layer in at[0].items()}

    note = f"per-record gradients, {min(work.records, microbatch(at[0])):,} at a time"
    return Peer(lambda: clipped_sum(work, at, SIGNS, records, clip), read_leaves, note=note)


PEERS: dict[str, Build] = {"numpy, hand-written": hand_written}
