"""From what a user holds (a frame with a schema, or arrays) to silos' records. No error shows a cell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped

from silodp.data.frames import looks_like_a_record
from silodp.data.identifiers import identifies
from silodp.data.inspection import named
from silodp.data.kinds import Category, Date, Flag, Number, Ordered
from silodp.data.numbers import Constants
from silodp.data.schema import Schema
from silodp.data.types import FederatedData, Note, SiloData
from silodp.errors import ConfigError
from silodp.records import number_only, with_weight

ONE_SILO = "all records"
TARGET_DEVIATION = 1 / 3  # of a target that is mapped to [-1, 1]: a range is taken to span six deviations
AS_THEY_ARE = Constants(0.0, 1.0, np.inf)  # numbers whose centre and scale a private stage will find
SchemaLike = Schema | Mapping[str, Any] | Path | str
AS_GIVEN = Note(False, "features are used as given: what was fitted on records to make them, such as a scaler")


class Rows(NamedTuple):
    """A table to train on: targets are labels or numbers as given, or codes and scaled numbers where a schema is."""

    features: Any
    targets: Any
    silos: Shaped[np.ndarray, " n"] | None
    weights: Shaped[np.ndarray, " n"] | None = None  # of the records, from 0 to 1

    __repr__ = number_only


def weights_of(given: Any, rows: int, largest: Any) -> Shaped[np.ndarray, " n"] | None:
    """Weights as parts of the largest that is allowed; larger ones count as that."""
    if given is None:
        return None
    if not isinstance(largest, int | float) or not 0 < largest < np.inf:
        raise ConfigError("largest_weight: give a positive number, known beforehand; larger weights count as it")
    found = column_of(given, rows, "sample_weight")
    if found.dtype.kind not in "buif" or not (np.isfinite(found) & (found >= 0)).all():
        raise ConfigError("sample_weight: some are negative, missing or no numbers; give numbers from 0 on")
    if not found.any():
        raise ConfigError("sample_weight: must contain at least one non-zero number")
    return np.minimum(found / largest, 1.0).astype(np.float32)


# --- with a schema ---------------------------------------------------------------------------------------------


def schema_for(source: SchemaLike, y: Any, silo: Any, task: str) -> Schema:
    """The schema with the silo column that `fit` names; y and the task must be the schema's."""
    schema = Schema.read(source)
    if schema.task != task:
        other, fix = ("classes", "SiloClassifier") if task == "regression" else ("a range", "SiloRegressor")
        raise ConfigError(f"schema: target '{schema.target.name}' has {other}; use {fix}")
    if isinstance(y, str) and y != schema.target.name:
        raise ConfigError(f"y = {y!r}: the schema's target is {schema.target.name!r}; give this one")
    if silo is None or (isinstance(silo, str) and silo == schema.silo):
        return schema
    if schema.silo is not None:
        raise ConfigError(f"silo: the schema has silo = {schema.silo!r}; leave one of them out")
    return Schema.read(schema.to_dict() | {"silo": silo}) if isinstance(silo, str) else schema


def with_target(schema: Schema, frame: Any, y: Any) -> pd.DataFrame:
    """The frame with a target that was given beside it."""
    table = named(frame)
    if y is None or isinstance(y, str):
        return table
    return table.assign(**{schema.target.name: column_of(y, len(table), "y")})


def encoded_rows(schema: Schema, frame: Any, y: Any, silo: Any) -> Rows:
    table = with_target(schema, frame, y)
    labels = None if silo is None or isinstance(silo, str) else silo_labels(silo, len(table))
    encoded = schema.encode(table, constants=dict.fromkeys(schema.private, AS_THEY_ARE))
    return Rows(encoded.features, encoded.targets, encoded.silos if labels is None else labels)


MISSING = 0.25  # factor of an indicator of missing cells: they are few, and the noise on it is as long as on others
SQUARES = {Category: 1.0, Flag: 1 / 2, Ordered: 1 / 3, Date: 1 / 9}  # that are expected of a column's features together


def of_bends(column: Number) -> float:
    """Factor of a broken line's bends beside the line."""
    return 2 * column.deviation


def usual_square(schema: Schema) -> float:
    """Of the length of encoded features, by what is expected of each kind of column.

    A range is taken to span six deviations. The second moment's noise counts less the longer features are, until they
    are clipped: with 1/3 for a range (all of it equally likely) wbcd loses .02 at epsilon 1, and other tables nothing.
    """
    bent = lambda column: of_bends(column) ** 2 * sum(bend.usual().variance for bend in column.bends)
    number = lambda column: column.deviation**2 + bent(column)
    columns = schema.used.values()
    return float(sum(number(c) if isinstance(c, Number) else SQUARES[type(c)] for c in columns))


def public_scale(schema: Schema) -> list[float]:
    """Makes encoded features about 1 long together: a factor for each."""
    factors: list[float] = []
    for name, column in schema.used.items():
        others = len(column.names(name)) - 1
        factors += [1.0] + [of_bends(column) if isinstance(column, Number) else 1.0] * others
        factors += [MISSING] if column.indicator() else []
    return [float(factor / np.sqrt(usual_square(schema))) for factor in factors]


def private_columns(schema: Schema) -> list[int]:
    """Features whose centre and scale a private stage has to find."""
    return [i for i, name in enumerate(schema.feature_names) if name in schema.private]


def raw_constants(schema: Schema) -> dict[str, tuple[float, float]]:
    """Centre and scale of every number, by the name of its feature."""
    numbers = {name: column.constants() for name, column in schema.used.items() if isinstance(column, Number)}
    return {name: (to.centre, to.scale) for name, to in numbers.items() if to is not None}


# --- without one -----------------------------------------------------------------------------------------------


def plain_rows(X: Any, y: Any, silo: Any) -> Rows:
    """Features, targets and silos, where y and silo may name columns of X; features are checked by the estimator."""
    for what, name in (("y", y), ("silo", silo)):
        if isinstance(name, str):
            check_column(X, name, what)
    if isinstance(y, str) and y == silo:
        raise ConfigError(f"silo = {silo!r} is the target too; name another column")
    given = [name for name in (y, silo) if isinstance(name, str)]
    targets = X[y] if isinstance(y, str) else y
    labels = X[silo] if isinstance(silo, str) else silo
    features = X.drop(columns=given) if given else X
    if isinstance(features, pd.DataFrame):
        check_features(features)
    return Rows(features, targets, None if labels is None else silo_labels(labels, rows_of(X)))


def check_column(X: Any, name: str, what: str) -> None:
    if not isinstance(X, pd.DataFrame):
        raise ConfigError(f"{what} = {name!r}: a column, but X is a {type(X).__name__}; give a DataFrame or an array")
    found = list(X.columns).count(name)
    if found != 1:
        told = "is not a column of the frame; name one that is" if not found else "occurs twice; rename one column"
        raise ConfigError(f"{what} = {name!r}: {told}")


def check_features(frame: pd.DataFrame) -> None:
    """Of raw rows without a schema: only numbers can be used, and nothing that says whose record it is."""
    twice = [str(name) for name in frame.columns[frame.columns.duplicated()]]
    if twice:
        raise ConfigError(f"{_told(twice)}: each occurs twice; give every column its own name")
    persons = [str(name) for name in frame.columns if identifies(str(name))]
    if persons:
        raise ConfigError(f"{_told(persons)}: named like identifiers of persons; drop them, or give a schema")
    texts = [str(name) for name, kind in frame.dtypes.items() if kind.kind not in "buif"]
    if texts:
        raise ConfigError(f"{_told(texts)}: not numbers; give schema= (silodp schema draft FILE writes a draft)")
    empty = [str(name) for name in frame.columns[frame.isna().any()]]
    if empty:
        raise ConfigError(f"{_told(empty)}: missing cells; give schema= with missing = a public constant")


def rows_of(X: Any) -> int:
    return X.shape[0] if hasattr(X, "shape") else len(X)


def _told(names: list[str]) -> str:
    """Columns by their names, unless these may be cells: a file without a header."""
    if looks_like_a_record(names):
        return f"{len(names)} columns, not named because the first line looks like a record"
    return "columns " + ", ".join(f"'{name}'" for name in names)


def column_of(values: Any, rows: int, what: str) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim != 1 or len(found) != rows:
        raise ConfigError(f"{what}: shape {found.shape} beside {rows} rows; give one for each row")
    return found


def check_there(targets: Any) -> None:
    """Before scikit-learn looks at them, which stumbles over pandas' NA."""
    if pd.isna(np.asarray(targets, dtype=object)).any():
        raise ConfigError("y: some are missing; fill in or drop these records")


def numbers_of(values: Any, what: str) -> Float64[np.ndarray, "..."]:
    try:
        found = np.asarray(values).astype(np.float64)
    except (ValueError, TypeError):  # which quote the cell: an error that is raised here would remember it
        found = None
    if found is None:
        raise ConfigError(f"{what}: holds text where numbers are needed; give numbers")
    if not np.isfinite(found).all():
        raise ConfigError(f"{what}: some are missing or infinite; fill in or drop these records")
    return found


def silo_labels(values: Any, rows: int) -> Shaped[np.ndarray, " n"]:
    found = column_of(values, rows, "silo")
    if pd.isna(np.asarray(values, dtype=object)).any():  # of a list NumPy makes texts, and of what is missing "nan"
        raise ConfigError("silo: some records have none; fill them in or drop these records")
    return found.astype(str)


# --- silos -----------------------------------------------------------------------------------------------------


def federated(rows: Rows, classes: tuple[str, ...], notes: tuple[Note, ...]) -> FederatedData:
    silos = np.full(len(rows.targets), ONE_SILO) if rows.silos is None else rows.silos
    names, places = np.unique(silos, return_inverse=True)
    parts = [np.flatnonzero(places == i) for i in range(len(names))]
    few = sum(len(part) < 2 for part in parts)
    if few:
        # names are not told: the column may be the wrong one, with a name for each record
        raise ConfigError(f"silo: {few} of {len(parts)} have 1 sample only; name another column, or drop these records")
    targets = lambda p: rows.targets[p] if rows.weights is None else with_weight(rows.targets[p], rows.weights[p])
    held = [SiloData(str(name), rows.features[p], targets(p)) for name, p in zip(names, parts, strict=True)]
    if not np.isfinite(rows.features).all():
        raise ConfigError("X: holds infinity, NaN or values beyond float32; fill in or drop such records")
    task = "classification" if classes else "regression"
    counted = [] if rows.weights is None else [Note(True, "records count by weights from 0 to 1, after clipping")]
    told = (*notes, *counted, Note(True, f"{len(held)} silos as given"))
    return FederatedData("records", tuple(held), None, task, classes, told)
