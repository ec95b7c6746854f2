"""The four models of the gradient parts, with random records; every peer computes on these very arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import jax
import numpy as np

from silodp.models import Model, build_model

Tree = dict[str, dict[str, np.ndarray]]
STEP = 0.01  # how far apart the two points of a difference are, in every coordinate


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its records (seeded noise) and two points; `classes` 0 means a number is predicted."""

    name: str
    model: Model
    shape: tuple[int, ...]
    classes: int
    records: int
    loss: str  # "squared", "logistic" or "cross-entropy"
    activation: str = "relu"
    penalty: float = 0.0

    @cached_property
    def features(self) -> np.ndarray:
        return np.random.default_rng(1).normal(size=(self.records, *self.shape)).astype(np.float32)

    @cached_property
    def targets(self) -> np.ndarray:
        rng = np.random.default_rng(2)
        if self.classes == 0:
            return rng.normal(size=self.records).astype(np.float32)
        return rng.integers(0, self.classes, self.records).astype(np.int32)

    def point(self, which: int) -> Tree:
        """The first point is near the model's start; the second is close to the first, as between rounds."""
        start = self.model.init(jax.random.key(0))
        rng, near = np.random.default_rng(3), np.random.default_rng(4)
        moved = lambda leaf: np.asarray(leaf) + 0.05 * rng.normal(size=leaf.shape)
        first = jax.tree.map(moved, start)
        if which == 1:
            first = jax.tree.map(lambda leaf: leaf + STEP * near.normal(size=leaf.shape), first)
        return jax.tree.map(lambda leaf: leaf.astype(np.float32), first)

    def points(self, count: int) -> list[Tree]:
        return [self.point(i) for i in range(count)]


@cache
def workloads() -> list[Workload]:
    mlp = build_model("mlp", inputs=784, outputs=10, hidden=(64,), activation="sigmoid")
    small = build_model("mlp", inputs=8, hidden=(10,), activation="softplus")
    logistic = build_model("logistic", inputs=123, outputs=2, regulariser=0.2, regulariser_clip="inside")
    lenet = build_model("cnn", inputs=(3, 32, 32), outputs=10)
    return [
        Workload("MLP 784-64-10 x 6,000", mlp, (784,), 10, 6000, "cross-entropy", "sigmoid"),
        Workload("MLP 8-10-1 x 1,651", small, (8,), 0, 1651, "squared", "softplus"),
        Workload("logistic 123 x 3,256", logistic, (123,), 2, 3256, "logistic", penalty=0.2),
        Workload("LeNet x 500", lenet, (3, 32, 32), 10, 500, "cross-entropy"),
    ]
