"""The tasks of `python -m bench.utility`: records, silos, and whether they were looked at before.

`seen`: looked at when the constants of `auto` were chosen. The others were first measured for the printed table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine

from silodp.data import FederatedData
from silodp.data.datasets import load_dataset
from silodp.data.images import oriented_gradients
from silodp.data.preprocess import apply_steps, parse_steps
from silodp.data.types import Table

Arrays = tuple[np.ndarray, np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]
Read = Callable[[], Arrays]
LONGEST = math.sqrt(1.25)  # of a record's features, in deviations of all of them together


@dataclass(frozen=True)
class Task:
    """How many silos share the records, the kind of model, and how they are read."""

    silos: int
    kind: str
    read: Callable[[], Arrays]
    seen: bool

    @property
    def metric(self) -> str:
        return "R^2" if self.kind == "linear" else "accuracy"


def same(values: np.ndarray) -> np.ndarray:
    return values


def named(
    source: str, limit: int | None, change: Change = same, features: Change | None = None
) -> Callable[[], Arrays]:
    def read() -> Arrays:
        table = load_dataset(source)[0]
        rows = np.random.default_rng(0).permutation(len(table.features))[:limit]
        made = table.features[rows]
        made = made.reshape(len(rows), -1) if features is None else features(made)
        return made, change(np.asarray(table.targets)[rows])

    return read


def bunch(load: Callable[..., Any], change: Change = same) -> Read:
    def read() -> Arrays:
        features, targets = load(return_X_y=True)
        return np.asarray(features, np.float32), change(targets)

    return read


def is_normal(labels: np.ndarray) -> np.ndarray:
    return (labels == "normal").astype(int)


def codes_as_flags(features: np.ndarray) -> np.ndarray:
    """KDD's columns 1, 2 and 3 hold codes."""
    flags = [features[:, [column]] == np.unique(features[:, column]) for column in (1, 2, 3)]
    return np.hstack([np.delete(features, (1, 2, 3), axis=1), *flags]).astype(np.float32)


TASKS = {
    "wbcd": Task(4, "logistic", bunch(load_breast_cancer), True),
    "digits parity": Task(3, "logistic", bunch(load_digits, lambda y: y % 2), True),
    "digits": Task(3, "softmax", bunch(load_digits), True),
    "california": Task(10, "linear", named("california", None), True),
    "gas-turbine": Task(10, "linear", named("gas-turbine", None), True),
    "covtype": Task(10, "logistic", named("covtype", 20_000, lambda y: (y.astype(int) == 2).astype(int)), True),
    "covtype, 7 classes": Task(10, "softmax", named("covtype", 20_000), True),
    "a9a": Task(10, "logistic", named("a9a", None, lambda y: (y.astype(float) > 0).astype(int)), True),
    "mnist, hog": Task(10, "softmax", named("mnist", 20_000, same, lambda x: oriented_gradients(x, 4, 8)), True),
    "wine": Task(2, "softmax", bunch(load_wine), False),
    "diabetes": Task(2, "linear", bunch(load_diabetes), False),
    "kdd": Task(10, "logistic", named("kddcup99", 20_000, is_normal, codes_as_flags), False),
    "blogfeedback": Task(10, "linear", named("blogfeedback", 20_000, np.log1p), False),
}


@dataclass(frozen=True)
class Split:
    """One split: silos of equal size, features about 1 long, a target of unit deviation."""

    data: FederatedData
    train: Arrays
    test: Arrays

    def alone(self, silo: int) -> FederatedData:
        held = self.data.silos[silo]
        return FederatedData.of({held.name: (held.features, held.targets)}, test=self.test, classes=self.data.classes)


def in_pieces(data: FederatedData) -> FederatedData:
    """The same silos with every feature as a line with knots (the preprocessing step `pieces`)."""
    step, silos = parse_steps(["pieces"]), {}
    rescaled = lambda x: Table("bench", (x * math.sqrt(x.shape[1])).astype(np.float32), np.zeros(len(x)))
    mapped = lambda x: apply_steps(step, rescaled(x), None)[0].features
    for held in data.silos:
        silos[held.name] = (mapped(held.features), held.targets)
    assert data.test is not None
    return FederatedData.of(silos, test=(mapped(data.test.features), data.test.targets), classes=data.classes)


def split(task: Task, seed: int) -> Split:
    features, targets = task.read()
    order = np.random.default_rng(seed).permutation(len(features))
    cut = len(order) // 5
    test, train = order[:cut], order[cut:]
    centre, spread = features[train].mean(0), features[train].std(0)
    scaled = (features - centre) / np.where(spread > 0, spread, 1) / math.sqrt(features.shape[1])
    scaled *= np.minimum(1, LONGEST / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1e-12))
    classes: tuple[str, ...] = ()
    if task.kind == "linear":
        targets = (targets - targets[train].mean()) / targets[train].std()
    else:
        labels, targets = np.unique(targets, return_inverse=True)
        classes = tuple(map(str, labels))
    pair = lambda rows: (scaled[rows].astype(np.float32), targets[rows])
    silos = {f"silo {i}": pair(rows) for i, rows in enumerate(np.array_split(train, task.silos))}
    return Split(FederatedData.of(silos, test=pair(test), classes=classes), pair(train), pair(test))
