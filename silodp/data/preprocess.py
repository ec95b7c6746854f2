"""Preprocessing steps, named in the config and recorded in the run.

A step is text, `name` or `name:argument`. Steps that use only constants from the config are noted
`public`. Steps that look at the records to set themselves up (means, principal axes, maxima) are
noted `not private: fitted on private data`: no epsilon covers what they reveal. They are fitted
on training records only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from silodp.data import image_steps
from silodp.data.numbers import FARTHEST, KNOTS, bends
from silodp.data.tables import load_npz, own_name
from silodp.data.types import Note, Table

Transform = Callable[[Table], Table]
Fitted = tuple[Transform, Note]  # the transform, and its note


@dataclass(frozen=True)
class Step:
    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name

    def error(self, wanted: str) -> ValueError:
        return ValueError(f"preprocess step '{self}': {wanted}")

    def number(self) -> float:
        """The argument as a constant that is safe to divide by."""
        value = self.numbers(1)[0]
        if value == 0:
            raise self.error("the constant must not be 0")
        return value

    def numbers(self, count: int) -> list[float]:
        try:
            values = [float(part) for part in self.argument.split(",")]
        except ValueError:
            values = []
        if len(values) != count or not np.isfinite(values).all():
            raise self.error(f"needs {count} finite number(s) after the colon")
        return values

    def no_argument(self) -> None:
        if self.argument:
            raise self.error("takes no argument")

    def public(self, detail: str) -> Note:
        return Note(True, f"{self}: {detail}")

    def fitted(self, detail: str) -> Note:
        return Note(False, f"fitted on private data: {self}: {detail}", fitted=str(self))


def parse_steps(texts: Sequence[str]) -> list[Step]:
    steps = []
    for text in texts:
        name, _, argument = text.partition(":")
        step = Step(name.strip(), argument.strip())
        if step.name not in STEPS:
            raise step.error(f"unknown; need one of {', '.join(STEPS)}")
        steps.append(step)
    return steps


def unit_length(texts: Sequence[str]) -> bool:
    """Whether the last of these steps leaves records about 1 long."""
    return bool(texts) and texts[-1].partition(":")[0].strip() in UNIT_LENGTH


UNIT_LENGTH = (*image_steps.STEPS, "normalise", "pieces")


def pieces_of(texts: Sequence[str]) -> int:
    """How many features the last of these steps makes of each, all of one bend after those of another; 0: no pieces."""
    last = parse_steps(texts[-1:])
    if not last or last[0].name != "pieces":
        return 0
    return len(bends(_knots(last[0]))) + 1


def categorical_columns(steps: Sequence[Step]) -> tuple[str, ...]:
    """Columns that a one-hot step will expand, and that may therefore hold strings."""
    return tuple(name for step in steps if step.name == "one-hot" for name in _one_hot_names(step))


def apply_steps(steps: Sequence[Step], train: Table, test: Table | None) -> tuple[Table, Table | None, list[Note]]:
    """Fit every step on `train`, apply it to both, and say what was done."""
    notes = []
    for step in steps:
        transform, note = STEPS[step.name](step, train)
        train, test = transform(train), None if test is None else transform(test)
        notes.append(note)
    if train.categories:
        name = next(iter(train.categories))
        raise ValueError(f"column '{name}' holds categories; add the step 'one-hot:{name}'")
    return train, test, notes


def _on_features(function: Callable[[np.ndarray], np.ndarray]) -> Transform:
    def transform(table: Table) -> Table:
        with np.errstate(over="ignore"):  # the caller reports values beyond float32
            return replace(table, features=function(table.features).astype(np.float32))

    return transform


def _on_flat_features(function: Callable[[np.ndarray], np.ndarray]) -> Transform:
    """For steps that make new columns, so that old names no longer apply."""
    return lambda table: replace(table, features=function(_flat(table.features)).astype(np.float32), names=())


def _flat(features: Float32[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n d"]:
    return features.reshape(len(features), -1)


def _no_categories(step: Step, train: Table) -> None:
    if train.categories:
        raise step.error(f"one-hot {', '.join(train.categories)} first")


def _flatten(step: Step, train: Table) -> Fitted:
    step.no_argument()
    return _on_features(_flat), step.public("each record as one row of numbers")


def _divide(step: Step, train: Table) -> Fitted:
    constant = step.number()
    _no_categories(step, train)
    return _on_features(lambda x: x / constant), step.public("features over a constant")


def _standardise(step: Step, train: Table) -> Fitted:
    """Per feature; constants from an npz file with `mean` and `std`, or fitted."""
    if step.argument:
        mean, std = _constants(step, train)
        note = step.public("per feature, with constants from the file")
    else:
        mean = train.features.mean(axis=0, dtype=np.float64)
        std = train.features.std(axis=0, dtype=np.float64)
        # a column that is constant in float32 carries nothing: it becomes 0, not 0/0
        std = np.where(std > 1e-7 * np.abs(mean), std, 1.0)
        note = step.fitted("mean and deviation of every feature")
    codes = [train.names.index(name) for name in train.categories]  # indices, not quantities
    mean[..., codes], std[..., codes] = 0.0, 1.0
    mean, std = mean.astype(np.float32), std.astype(np.float32)
    return _on_features(lambda x: (x - mean) / std), note


def _constants(step: Step, train: Table) -> tuple[np.ndarray, np.ndarray]:
    path, shape = Path(step.argument), train.features.shape[1:]
    if not path.is_file():
        raise step.error("no such file; need an npz file with arrays mean and std")
    arrays = load_npz(path)
    found = [arrays.get(name, np.empty(0)) for name in ("mean", "std")]
    if any(a.shape != shape or not np.isfinite(a).all() for a in found) or (found[1] <= 0).any():
        raise step.error(f"need finite arrays mean and std > 0 of shape {shape}")
    return found[0].astype(np.float64), found[1].astype(np.float64)


def _standardise_all(step: Step, train: Table) -> Fitted:
    """One mean and one deviation for all features, as usual for pixels."""
    _no_categories(step, train)
    if step.argument:
        mean, std = step.numbers(2)
        note = step.public("one given mean and deviation for all features")
    else:
        mean = float(train.features.mean(dtype=np.float64))
        std = float(train.features.std(dtype=np.float64))
        note = step.fitted(f"one mean {mean:.6g} and deviation {std:.6g} for all features")
    if std <= 0:
        raise step.error("the deviation has to be positive")
    return _on_features(lambda x: (x - np.float32(mean)) / np.float32(std)), note


def _pca(step: Step, train: Table) -> Fitted:
    _no_categories(step, train)
    flat = _flat(train.features)
    if not step.argument.isdecimal() or not 1 <= int(step.argument) <= min(flat.shape):
        raise step.error(f"needs a number of components from 1 to {min(flat.shape)}")
    from sklearn.decomposition import PCA

    pca = PCA(int(step.argument), svd_solver="full" if flat.shape[1] < 50 else "covariance_eigh")
    pca.fit(flat)
    share = pca.explained_variance_ratio_.sum()
    note = step.fitted(f"principal axes, {share:.1%} of the variance kept")
    return _on_flat_features(pca.transform), note


def _normalise(step: Step, train: Table) -> Fitted:
    step.no_argument()
    _no_categories(step, train)

    def unit(x: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(_flat(x), axis=1)
        norms[norms == 0] = 1
        return x / norms.reshape(-1, *[1] * (x.ndim - 1))

    return _on_features(unit), step.public("every record to unit norm, by itself")


def _bias(step: Step, train: Table) -> Fitted:
    step.no_argument()
    _no_categories(step, train)
    append = lambda x: np.column_stack([x, np.ones(len(x), np.float32)])
    return _on_flat_features(append), step.public("a last column of ones")


PIECES = 5  # knots of a feature


def _knots(step: Step) -> int:
    knots = PIECES if not step.argument else step.numbers(1)[0]
    if knots not in KNOTS:
        raise step.error(f"needs a number of knots: one of {', '.join(map(str, KNOTS))}")
    return int(knots)


def _pieces(step: Step, train: Table) -> Fitted:
    """`pieces`, or `pieces:KNOTS`: each standardised feature as a line with knots: linear models become additive."""
    knots = _knots(step)
    _no_categories(step, train)
    return _on_flat_features(lambda x: _in_pieces(x, knots)), step.public(
        "every feature, in deviations, and how near it is to places in its range"
    )


def _in_pieces(x: Float32[np.ndarray, "n d"], knots: int) -> np.ndarray:
    """(bends, x / 2), about 1 long for features of unit deviation."""
    parts = bends(knots)
    usual = sum(bend.usual().variance for bend in parts) + 1 / 4  # mean square of one feature's columns together
    line = np.clip(x, -FARTHEST, FARTHEST) / 2
    return np.hstack([*(bend.of(x) for bend in parts), line]) / np.sqrt(usual * max(1, x.shape[1]))


def _one_hot_names(step: Step) -> list[str]:
    names = [name.strip() for name in step.argument.split(",") if name.strip()]
    if not names:
        raise step.error("name the columns after the colon, e.g. one-hot:service,flag")
    return names


def _one_hot(step: Step, train: Table) -> Fitted:
    names = _one_hot_names(step)
    there = list(dict.fromkeys(map(own_name, train.names)))
    for name in names:
        if name not in train.names:
            raise step.error(f"'{name}' is not a column; there are: {', '.join(there[:12])}")
    values = {name: _values(train, name) for name in names}

    def transform(table: Table) -> Table:
        for name in names:
            table = _expand(table, name, *values[name])
        return table

    width = sum(len(codes) for codes, _ in values.values())
    return transform, step.fitted(f"{width} columns, one for each value in the data")


def _values(train: Table, name: str) -> tuple[np.ndarray, list[str]]:
    """Numbers that stand for the values of a column, and what to call them."""
    if name in train.categories:
        labels = list(train.categories[name])
        return np.arange(len(labels)), labels
    numbers = np.unique(train.features[:, train.names.index(name)])
    return numbers, [f"{number:g}" for number in numbers]


def _expand(table: Table, name: str, codes: np.ndarray, labels: Sequence[str]) -> Table:
    """The column replaced, in place, by one indicator per value; unseen values give zeros."""
    at = table.names.index(name)
    x, names = table.features, table.names
    indicators = (x[:, at : at + 1] == codes).astype(np.float32)
    return replace(
        table,
        features=np.hstack([x[:, :at], indicators, x[:, at + 1 :]]),
        names=(*names[:at], *(f"{name}={label}" for label in labels), *names[at + 1 :]),
        categories={key: value for key, value in table.categories.items() if key != name},
    )


def _scale_targets(step: Step, train: Table, constant: float, note: Note) -> Fitted:
    if train.classes:
        raise step.error("is for regression, but the targets are classes")
    scaled = lambda table: (table.targets / constant).astype(np.float32)
    return lambda table: replace(table, targets=scaled(table)), note


def _target_divide(step: Step, train: Table) -> Fitted:
    return _scale_targets(step, train, step.number(), step.public("targets over a constant"))


def _target_max(step: Step, train: Table) -> Fitted:
    step.no_argument()
    largest = float(np.abs(train.targets).max())
    if largest == 0:
        raise step.error("all targets are 0")
    note = step.fitted("targets over their largest magnitude")
    return _scale_targets(step, train, largest, note)


def _target_parity(step: Step, train: Table) -> Fitted:
    step.no_argument()
    if not train.classes or not all(name.isdecimal() for name in train.classes):
        raise step.error("needs class labels that are whole numbers")
    parity = np.array([int(name) % 2 for name in train.classes], np.int32)
    change = lambda t: replace(t, targets=parity[t.targets], classes=("even", "odd"))
    return change, step.public("class 0 for even labels, 1 for odd")


STEPS: dict[str, Callable[[Step, Table], Fitted]] = {
    "flatten": _flatten,
    "divide": _divide,
    "standardise": _standardise,
    "standardise-all": _standardise_all,
    "pca": _pca,
    "normalise": _normalise,
    "bias": _bias,
    **image_steps.STEPS,
    "pieces": _pieces,
    "one-hot": _one_hot,
    "target-divide": _target_divide,
    "target-max": _target_max,
    "target-parity": _target_parity,
}
