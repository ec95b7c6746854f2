"""The shapes of data on its way to a run: `Table` as read, `FederatedData` ready to train on.

Setting: N silos, silo i holds n_i records (features, targets); sizes are public and may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Shaped

from silodp.errors import ConfigError, plainly
from silodp.records import (
    PARTS,
    Arrays,
    Description,
    as_arrays,
    count,
    described,
    difference,
    map_parts,
    named_parts,
)

Task = Literal["classification", "regression"]
MARKS = {True: "public", False: "not private"}  # what a note begins with where it is shown


@dataclass(frozen=True)
class Table:
    """Records as read from one place.

    `targets` are raw labels or numbers until encoding has set `classes` (classification)
    or turned them to float32 (regression). A column named in `categories` holds indices into its
    list of values. `groups` is the silo of each record, an index into `silo_names`, if it is known.
    """

    source: str
    features: Float32[np.ndarray, "n ..."] = field(repr=False)
    targets: Shaped[np.ndarray, " n"] = field(repr=False)
    # Of the columns; empty when they have none (images, bare arrays). Of a file without a header they are a record.
    names: tuple[str, ...] = field(default=(), repr=False)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    classes: tuple[str, ...] = field(default=(), repr=False)
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)
    silo_names: tuple[str, ...] = field(default=(), repr=False)
    open_width: bool = False  # LIBSVM leaves out zeros, so a file may seem narrower than it is

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: Int[np.ndarray, " k"]) -> Table:
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, features=self.features[rows], targets=self.targets[rows], groups=groups)


class Note(NamedTuple):
    """What was done to the records before the run, and whether it is public: made without looking at them."""

    public: bool
    text: str
    fitted: str = ""  # the preprocessing step that learnt from records, where one did

    def __str__(self) -> str:
        return f"{MARKS[self.public]}: {self.text}"

    @staticmethod
    def read(line: str) -> Note:
        """A note from its own text, as a run's summary.json keeps it."""
        mark, _, text = line.partition(": ")
        return Note({mark: public for public, mark in MARKS.items()}[mark], text)


@dataclass(frozen=True)
class SiloData:
    """The records of one silo (or of the test set), the records first in every array.

    Features and targets are an array each, or dicts and tuples of arrays. Numbers are kept as float32, whole numbers as
    int32, truth values as they are.
    """

    name: str
    features: Arrays = field(repr=False)
    targets: Arrays = field(repr=False)

    def __post_init__(self) -> None:
        if plainly(self.name) != self.name:  # it could write lines of a certificate; not quoted: it may be a cell
            raise ConfigError("silo: a control character or a line break in a silo's name; rename it")
        try:
            for part in PARTS:
                object.__setattr__(self, part, as_arrays(getattr(self, part), part))
            count(self.named())
        except ValueError as error:
            raise ValueError(f"silo {self.name!r}: {error}") from None

    def __len__(self) -> int:
        return count(self.named())

    def __repr__(self) -> str:
        return f"SiloData({self.name!r}, {len(self)} records of {self.record})"

    def named(self) -> dict[str, np.ndarray]:
        """All arrays by their path, e.g. features/tokens."""
        return named_parts((self.features, self.targets))

    @property
    def record(self) -> tuple[Description, Description]:
        """Types and shapes of one record's features and targets (see `silodp.records`)."""
        return described((self.features, self.targets))


@dataclass(frozen=True)
class FederatedData:
    """The silos of one run, all with the same arrays, and a test set if there is one.

    Args:
        source: where the records came from. silos: each one's records. test: records held out, if any.
        task: classification or regression. classes: the label of class 0, 1, ...; empty for regression.
        notes: how the records were prepared, and whether that was private.

    Example:
        >>> import silodp
        >>> data = silodp.load_data("wbcd", silos=4, test=0.2)
        >>> data.sizes, data.classes, data.input_shape
        ((114, 114, 114, 113), ('benign', 'malignant'), (30,))
    """

    source: str
    silos: tuple[SiloData, ...]
    test: SiloData | None
    task: Task
    classes: tuple[str, ...]  # label of class index 0, 1, ...; empty for regression
    notes: tuple[Note, ...]

    def __post_init__(self) -> None:
        if not self.silos:
            raise ValueError("data: no silos; give at least one")
        for other in (*self.silos[1:], *([] if self.test is None else [self.test])):
            _check_alike(other, self.silos[0])

    def __repr__(self) -> str:
        """Shapes and numbers: labels and silos' names may have been found in records."""
        tested = "" if self.test is None else f", {len(self.test)} test records"
        kind = f"{self.task}, {len(self.classes)} classes" if self.classes else self.task
        held = f"{len(self.silos)} silos, {sum(self.sizes)} records{tested}"
        return f"FederatedData({self.source!r}, {kind}, {held} of {self.record})"

    @staticmethod
    def of(
        silos: Mapping[str, tuple[Arrays, Arrays]],
        *,
        test: tuple[Arrays, Arrays] | None = None,
        task: Task | None = None,
        classes: Sequence[str] = (),
    ) -> FederatedData:
        """Records given as arrays: (features, targets) of every silo, each an array or a dict or tuple of arrays.

        Args:
            silos: by name. Arrays have the records first; lists are read as arrays.
            test: records to measure on, like a silo's.
            task: classification or regression; what `classes` says when left out.
            classes: the labels, where the target is one class number.

        Example:
            >>> import numpy as np, silodp
            >>> silo = {"tokens": np.zeros((4, 7), int), "age": np.zeros(4)}, np.ones(4)
            >>> silodp.FederatedData.of({"a": silo, "b": silo}).record
            ({'tokens': 'int32[7]', 'age': 'float32[]'}, 'float32[]')
        """
        stated = "classification" if classes else "regression"
        if task not in (None, stated):
            raise ValueError(f"task = {task!r}: with {len(classes)} classes it is {stated}")
        given = tuple(_given(name, pair) for name, pair in silos.items())
        tested = None if test is None else _given("test", test)
        note = Note(True, f"{len(given)} silos as given")
        return FederatedData("arrays", given, tested, stated, tuple(map(str, classes)), (note,))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(silo) for silo in self.silos)

    @property
    def record(self) -> tuple[Description, Description]:
        return self.silos[0].record

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a record's features, where they are one array."""
        features = self.silos[0].features
        if not isinstance(features, np.ndarray):
            raise ValueError(f"input_shape: the features are not one array but {self.record[0]}")
        return features.shape[1:]

    def stack(self) -> tuple[Arrays, Arrays, Int[np.ndarray, " N"]]:
        """Features, targets and sizes of all silos; records first, zeros behind them."""
        sizes = np.array(self.sizes, dtype=np.int32)
        own = [silo.named() for silo in self.silos]
        first = self.silos[0].features, self.silos[0].targets
        features, targets = map_parts(lambda name, _: _padded([arrays[name] for arrays in own]), first)
        return features, targets, sizes


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    longest = max(map(len, arrays))
    stacked = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def _check_alike(other: SiloData, first: SiloData) -> None:
    if other.record == first.record:
        return
    whose = f"silo {first.name!r}"
    told = difference(named_parts(other.record), named_parts(first.record), whose)
    raise ValueError(f"silo {other.name!r}: {told or f'nested differently than {whose}'}; give all the same arrays")


def _given(name: str, pair: tuple[Arrays, Arrays]) -> SiloData:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"silo {name!r}: a {type(pair).__name__}; need a pair (features, targets)")
    silo = SiloData(name, *pair)
    if len(silo) < 2:
        raise ValueError(f"silo {name!r} has {len(silo)} record(s); needs 2")
    for path, array in silo.named().items():
        if not np.isfinite(array).all():
            raise ValueError(
                f"silo {name!r}: {path} holds missing or infinite values, or some beyond float32; "
                "fill in or drop such records"
            )
    return silo
