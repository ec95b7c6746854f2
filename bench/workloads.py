"""The models of the gradient parts, with random records; every peer computes on these very arrays.

The first ones have been in the benchmark for long and the library was tuned on them. The others are shapes that users
bring: silodp gets the losses of WRITTEN as they are written in JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.brought import FEATURES, POSITIONS, SHAPES, WIDTH, WORDS, WRITTEN, Scores, initial, own_convolution, stack
from silodp.models import Model, build_model, from_loss

Tree = dict[str, dict[str, np.ndarray]]
STEP = 0.01  # how far apart the two points of a difference are, in every coordinate
MOST_BYTES = 1.5e9  # of all records' gradients: peers that hold them at one time are left out beyond
Loss = Any


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its records (seeded noise) and two points; `classes` 0 means a number is predicted."""

    name: str
    kind: str
    model: Model
    written: Loss  # as one would write it in JAX without silodp
    shape: tuple[int, ...]
    classes: int
    records: int
    loss: str  # "squared", "logistic" or "cross-entropy"
    activation: str = "relu"
    penalty: float = 0.0

    @cached_property
    def features(self) -> np.ndarray:
        rng, shape = np.random.default_rng(1), (self.records, *self.shape)
        if self.kind == "words":
            return rng.integers(0, WORDS, shape).astype(np.int32)
        return rng.normal(size=shape).astype(np.float32)

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

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.point(0)))

    @property
    def all_fit(self) -> bool:
        """Whether every record's gradient may be held at one time."""
        return 4 * self.records * self.parameters <= MOST_BYTES


def loss_with(scores: Scores, loss: str, penalty: float) -> Loss:
    def of_record(params: Any, record: Any) -> Any:
        z, target = scores(params, record[0]), record[1]
        if loss == "squared":
            return (z[0] - target) ** 2
        if loss == "logistic":
            added = penalty * sum(jnp.sum(x * x / (1 + x * x)) for x in jax.tree.leaves(params)) if penalty else 0.0
            return jax.nn.softplus((1 - 2 * target) * z[0]) + added
        return jax.nn.logsumexp(z) - z[target]

    return of_record


def built(
    name: str, kind: str, inputs: Any, records: int, classes: int, loss: str = "cross-entropy", penalty: float = 0.0,
    **options: Any,
) -> Workload:  # fmt: skip
    """One of the library's own models."""
    if penalty:
        options |= {"regulariser": penalty, "regulariser_clip": "inside"}
    model = build_model(kind, inputs=inputs, outputs=classes or 1, **options)
    activation = options.get("activation", "relu")
    written = loss_with(partial(stack, activation), loss, penalty)
    shape = inputs if isinstance(inputs, tuple) else (inputs,)
    return Workload(name, kind, model, written, shape, classes, records, loss, activation, penalty)


def brought(name: str, kind: str, shape: tuple[int, ...], records: int) -> Workload:
    """A network of the user's own: plain JAX, except that its convolutions are silodp's."""
    plain = WRITTEN.get(kind, partial(stack, "relu"))
    own = WRITTEN.get(kind, partial(stack, "relu", convolution=own_convolution))
    written, taken = (loss_with(scores, "cross-entropy", 0.0) for scores in (plain, own))
    model = from_loss(taken, partial(initial, SHAPES[kind]), name=kind)
    return Workload(name, kind, model, written, shape, 10, records, "cross-entropy")


@cache
def dense_workloads() -> list[Workload]:
    mlp = partial(built, kind="mlp")
    return [
        mlp("MLP 784-64-10 x 6,000", inputs=784, records=6000, classes=10, hidden=(64,), activation="sigmoid"),
        mlp("MLP 8-10-1 x 1,651", inputs=8, records=1651, classes=0, loss="squared", hidden=(10,),
            activation="softplus"),
        built("logistic 123 x 3,256, penalty", "logistic", 123, 3256, 2, "logistic", penalty=0.2),
        mlp("MLP 100-256-256-10 x 20,000", inputs=100, records=20_000, classes=10, hidden=(256, 256)),
        mlp("MLP 2000-512-2 x 2,000", inputs=2000, records=2000, classes=2, hidden=(512,)),
        built("softmax 5000-10 x 1,430", "softmax", 5000, 1430, 10),
        built("logistic 30 x 500", "logistic", 30, 500, 2, "logistic"),
    ]  # fmt: skip


@cache
def other_workloads() -> list[Workload]:
    return [
        built("LeNet x 500", "cnn", (3, 32, 32), 500, 10),
        brought("CNN 28x28, 16-32 channels x 2,000", "cnn", (1, 28, 28), 2000),
        brought("embedding 5,000 x 64, length 64 x 2,000", "words", (WIDTH,), 2000),
        brought("784-64-LayerNorm-10 x 6,000", "normed", (784,), 6000),
        brought("attention 16 x 32 x 1,000", "attention", (POSITIONS, FEATURES), 1000),
        brought("GRU 16 x 32-64 x 1,000", "gru", (POSITIONS, FEATURES), 1000),
    ]
