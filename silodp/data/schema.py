"""The public description of a table: what a schema.toml may say, checked, and the way from raw rows to features.

Nothing here is learnt from records. What is wrong with a schema or with a table is told all at once, one line each,
without a single cell.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int32, Shaped
from pydantic import Field, StrictBool, ValidationError, model_validator

from silodp.data import inspection
from silodp.data.cells import Cells, check_same, place, read_cells, read_numbers, spellings
from silodp.data.draft import columns_draft
from silodp.data.explained import explained
from silodp.data.identifiers import identifies
from silodp.data.kinds import (
    Column,
    Interval,
    Kind,
    Label,
    Number,
    Part,
    Same,
    different,
    some,
)
from silodp.data.numbers import Constants, scaled, scaled_to
from silodp.errors import ConfigError, Problems
from silodp.later import Later
from silodp.parse import toml_key, toml_literal
from silodp.records import number_only

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")


class Target(Part):
    """What is predicted: one of some classes, or a number in a public range."""

    name: str = Field(min_length=1)
    classes: tuple[Label, ...] | None = None
    range: Interval | None = None
    same: Same = Field(default=(), description="other spellings: lists, each with one of the classes first")
    unit: str | None = None
    case: StrictBool = Field(default=False, description="whether upper and lower case differ in classes")

    @model_validator(mode="after")
    def _classes_or_range(self) -> Target:
        if (self.classes is None) == (self.range is None):
            raise ValueError("give classes = [...], or range = [lowest, highest] for a number")
        if self.classes is not None:
            different(self.classes, self.case, "classes", least=2)
        check_same(self.classes or (), self.same, self.case, "classes")
        return self

    def read(self, cells: pd.Series) -> Cells:
        if self.classes is None:
            return read_numbers(cells)
        places = spellings(self.classes, self.same, self.case)
        return read_cells(cells, lambda cell: place(cell, places, self.case, None))

    def allowed(self) -> str:
        return "a number, with a decimal point" if self.classes is None else f"one of {some(self.classes)}"


class Encoded(NamedTuple):
    """A table as training takes it; `silos` names each record's silo where the schema has a silo column."""

    features: Float32[np.ndarray, "n d"]
    targets: Shaped[np.ndarray, " n"]
    silos: Shaped[np.ndarray, " n"] | None

    __repr__ = number_only


class Schema(Part):
    """The public description of a table: its target, its silo column if there is one, and the kind of every column.

    Everything in it is known beforehand, not taken from records: docs/schema.md has the kinds and their keys.

    Args:
        target: `name`, and `classes` or `range`. silo: the column that names each record's silo.
        columns: by name, each with its `kind` (number, category, ordered, date, flag or ignore) and that kind's keys.

    Example:
        >>> import pandas as pd, silodp
        >>> schema = silodp.Schema.read({
        ...     "target": {"name": "outcome", "classes": ["well", "ill"]},
        ...     "columns": {
        ...         "age": {"kind": "number", "range": [0, 120], "missing": 60},
        ...         "sex": {"kind": "category", "values": ["female", "male"]},
        ...     },
        ... })
        >>> schema.feature_names
        ('age', 'age missing', 'sex=female', 'sex=male', 'sex=other')
        >>> rows = pd.DataFrame({"sex": ["Male", "unknown"], "age": [90, None], "outcome": ["ill", "well"]})
        >>> schema.features(rows).tolist(), schema.targets(rows).tolist()
        ([[0.5, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]], [1, 0])
    """

    silo: str | None = Field(default=None, min_length=1)
    target: Target
    columns: dict[str, Kind] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Schema:
        found = [*self._roles(), *self._identifiers()]
        if found:
            raise ValueError("\n".join(found))
        return self

    def _roles(self) -> Iterator[str]:
        if self.silo == self.target.name:
            yield f"silo = {self.silo!r} is the target too; name another column"
        for role, name in (("target", self.target.name), ("silo", self.silo)):
            if name in self.columns:
                yield f"columns.{name}: it is the {role}; leave it out of the columns"
        if not self.used:
            yield "columns: all are ignored; give at least one a kind"
        names = pd.Index(self.feature_names)
        for name in names[names.duplicated()]:
            yield f"columns: two features are called {name!r}; rename a column"

    def _identifiers(self) -> Iterator[str]:
        for name, column in self.used.items():
            if column.identifier is None and identifies(name):
                yield (
                    f'columns.{name}: named like an identifier of persons; set kind = "ignore", '
                    "or identifier = false if many records share each value"
                )

    # --- reading and writing ----------------------------------------------------------------------------------

    @classmethod
    def read(cls, source: Schema | Mapping[str, Any] | Path | str) -> Schema:
        """A schema from a TOML file, or from a dict of the same; all that is wrong is told at once."""
        if isinstance(source, Schema):
            return source
        if not isinstance(source, Mapping | Path | str):
            raise ConfigError(f"schema: a {type(source).__name__}; give the path of a TOML file, or a dict")
        if isinstance(source, str) and "\n" in source:
            raise ConfigError("schema: a text of several lines; give the path of a TOML file, or a dict")
        tree = source if isinstance(source, Mapping) else _toml(Path(source))
        where = "schema" if isinstance(source, Mapping) else str(source)
        try:
            return cls.model_validate(dict(tree))
        except ValidationError as error:
            raise Problems(f"{where}: {line}" for line in explained(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """What `read` takes and JSON can hold."""
        return without_empty(self.model_dump(mode="json", exclude_none=True))

    def to_toml(self) -> str:
        """What a schema.toml holds."""
        tree = self.to_dict()
        parts = [("", {"silo": self.silo} if self.silo else {}), ("[target]\n", tree["target"])]
        parts += [(f"[columns.{toml_key(name)}]\n", column) for name, column in tree["columns"].items()]
        lines = lambda keys: "".join(f"{toml_key(key)} = {toml_literal(value)}\n" for key, value in keys.items())
        return "\n".join(title + lines(keys) for title, keys in parts if keys)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its canonical JSON; the order of columns counts, because it is the order of the features."""
        tree = self.to_dict() | {"columns": list(self.to_dict()["columns"].items())}
        return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    # --- what it describes ------------------------------------------------------------------------------------

    @property
    def used(self) -> dict[str, Column]:
        """The columns that become features."""
        return {name: column for name, column in self.columns.items() if isinstance(column, Column)}

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the columns of `features`, in their order."""
        indicator = lambda name, column: [f"{name} missing"] if column.indicator() else []
        return tuple(n for name, column in self.used.items() for n in (*column.names(name), *indicator(name, column)))

    @property
    def blocks(self) -> tuple[int, ...]:
        """For each feature the number of its column: what `whiten.blocks` takes."""
        each = [len(column.names(name)) + bool(column.indicator()) for name, column in self.used.items()]
        return tuple(i for i, count in enumerate(each) for _ in range(count))

    @property
    def private(self) -> tuple[str, ...]:
        """Numbers without a public range: their centre and scale come from a private stage."""
        return tuple(n for n, column in self.used.items() if isinstance(column, Number) and column.range == "private")

    @property
    def task(self) -> str:
        return "regression" if self.target.classes is None else "classification"

    def in_pieces(self, knots: int) -> Schema:
        """The schema with every number as a broken line, but those that say how they want to be encoded."""
        tree = self.to_dict()
        for name in self.numbers:
            tree["columns"][name]["pieces"] = knots
        return Schema.read(tree)

    @property
    def numbers(self) -> list[str]:
        """Columns with a public range or scale that say nothing of pieces."""
        plain = lambda column: isinstance(column, Number) and column.pieces is None and column.range != "private"
        return [name for name, column in self.used.items() if plain(column)]

    def closed(self, constants: Mapping[str, tuple[float, float]]) -> Schema:
        """The schema with what was found for columns whose range is private: public from now on."""
        tree = self.to_dict()
        for name, (centre, scale) in constants.items():
            column = {key: value for key, value in tree["columns"][name].items() if key != "range"}
            tree["columns"][name] = column | {"centre": centre, "scale": scale}
        return Schema.read(tree)

    # --- raw rows ---------------------------------------------------------------------------------------------

    def problems(self, frame: pd.DataFrame, source: str = "frame", *, fitting: bool = True) -> list[str]:
        """What is wrong with a table, one line each, never a cell.

        Args:
            frame: raw rows. source: its name, for the lines.
            fitting: target and silo must be there, and every column must be in the schema.
        """
        return inspection.inspected(self, frame, source, fitting).problems

    def encode(
        self,
        frame: pd.DataFrame,
        *,
        constants: Mapping[str, tuple[float, ...]] | None = None,
        source: str = "frame",
    ) -> Encoded:
        """Features, targets and silos of rows to train on; an error names every problem, and drafts unnamed columns."""
        chosen = self._constants(constants)
        found = inspection.inspected(self, frame, source, fitting=True)
        if found.problems:
            raise Problems(found.problems, columns_draft(found.extra))
        table = inspection.named(frame)
        silos = None if self.silo is None else inspection.silo_names(pd.Series(table[self.silo]))
        return Encoded(self._features(found.cells, chosen), self._targets(table), silos)

    def features(
        self,
        frame: pd.DataFrame,
        *,
        constants: Mapping[str, tuple[float, ...]] | None = None,
        source: str = "frame",
    ) -> Float32[np.ndarray, "n d"]:
        """Features of raw rows, in the order of `feature_names`; other columns are ignored, the target may be missing.

        Args:
            frame: raw rows, typed or with text as in a CSV file; the order of its columns does not matter.
            constants: centre and scale of every column whose range is private.
            source: the table's name, for errors.
        """
        chosen = self._constants(constants)
        return self._features(self._cells(frame, source), chosen)

    def targets(self, frame: pd.DataFrame, source: str = "frame") -> Shaped[np.ndarray, " n"]:
        """Class numbers as int32, or the target clipped to its range and mapped to [-1, 1] as float32."""
        found = inspection.target_problems(self, inspection.named(frame), source)
        if found:
            raise Problems(found)
        return self._targets(inspection.named(frame))

    def private_numbers(self, frame: pd.DataFrame, source: str = "frame") -> dict[str, Float64[np.ndarray, " n"]]:
        """Raw numbers of the columns whose range is private, `missing` filled in; they are as secret as the rows."""
        cells = self._cells(frame, source)
        return {name: self._filled(name, cells[name]) for name in self.private}

    def labels(self, codes: Int32[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        """Class numbers back as the schema writes the classes."""
        if self.target.classes is None:
            raise ValueError("labels: the target is a number; use original")
        alike = len({type(value) for value in self.target.classes}) == 1
        return np.array(self.target.classes, dtype=None if alike else object)[np.asarray(codes)]

    def original(self, values: Float32[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Predicted numbers back in the target's own unit."""
        if self.target.range is None:
            raise ValueError("original: the target is a class; use labels")
        to = scaled_to(self.target.range)
        return np.asarray(values, np.float64) * to.scale + to.centre

    def _constants(self, given: Mapping[str, tuple[float, ...]] | None) -> dict[str, Constants]:
        given = given or {}
        lacking = [name for name in self.private if name not in given]
        if lacking:
            raise ConfigError(
                f'columns {", ".join(lacking)}: range = "private"; give constants {{name: (centre, scale)}}'
            )
        unasked = [name for name in given if name not in self.private]
        if unasked:
            raise ConfigError(f'constants: {", ".join(unasked)} is no column with range = "private"; leave it out')
        for name, (centre, scale, *_) in given.items():
            if not (np.isfinite(centre) and 0 < scale < np.inf):
                raise ConfigError(f"constants: {name} needs a finite centre and a positive scale")
        return {name: Constants(*map(float, pair)) for name, pair in given.items()}

    def _cells(self, frame: pd.DataFrame, source: str) -> dict[str, Cells]:
        """Of rows to predict."""
        found = inspection.inspected(self, frame, source, fitting=False)
        if found.problems:
            raise Problems(found.problems)
        return found.cells

    def _filled(self, name: str, cells: Cells) -> Float64[np.ndarray, " n"]:
        fill = self.used[name].fill()
        return cells.values if fill is None else np.where(cells.missing, fill, cells.values)

    def _features(self, cells: Mapping[str, Cells], constants: Mapping[str, Constants]) -> Float32[np.ndarray, "n d"]:
        blocks = []
        for name, column in self.used.items():
            blocks.append(column.encoded(self._filled(name, cells[name]), constants.get(name)))
            blocks += [cells[name].missing[:, None]] if column.indicator() else []
        return np.hstack(blocks).astype(np.float32)

    def _targets(self, frame: pd.DataFrame) -> Shaped[np.ndarray, " n"]:
        values = self.target.read(pd.Series(frame[self.target.name])).values
        if self.target.range is None:
            return values.astype(np.int32)
        return scaled(values, scaled_to(self.target.range)).astype(np.float32)


def without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    """Without lists that hold nothing: a schema is written as it was given."""
    plain = lambda part: {key: value for key, value in part.items() if value != []}
    columns = {name: plain(column) for name, column in tree["columns"].items()}
    return tree | {"target": plain(tree["target"]), "columns": columns}


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"schema {str(path)!r}: no such file; give the path of a TOML file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors may begin a file with a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
