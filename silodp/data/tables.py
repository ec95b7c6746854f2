"""Readers: arrays, DataFrames, CSV, Parquet, LIBSVM and npz files, each into a `Table`.

Several files (a list, a folder, a pattern) mean one file per silo. Every fault is a one-line
ValueError that names the file, the column or record (counted from 1) and the remedy.
"""

from __future__ import annotations

import glob
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
from jaxtyping import Float32

from silodp.data.frames import (
    UNREADABLE,
    header,
    looks_like_a_record,
    most,
    names_of,
    parsed,
    read_parquet,
    reason,
    refuse_same_file,
    refuse_twice,
)
from silodp.data.identifiers import identifies
from silodp.data.types import Table
from silodp.later import Later

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")

Single = Union[str, Path, "pd.DataFrame", tuple, Table]
Source = Single | Sequence[Single] | Mapping[str, Single]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are for; all the others are features."""

    target: str | None = None
    silo: str | None = None
    categorical: tuple[str, ...] = ()  # may hold strings, because a one-hot step will use them
    ignored: str | None = None


def read_tables(source: Source, columns: Columns) -> tuple[list[Table], list[str]]:
    """The tables of `source`, with common columns, and their names where each one is a silo."""
    if isinstance(source, str | Path) and _is_many(str(source)):
        source = list(_paths(str(source)))
    if not isinstance(source, Mapping | list):
        return [read_one(source, columns)], []  # pyright: ignore[reportArgumentType]
    each = source.values() if isinstance(source, Mapping) else source
    refuse_same_file([one for one in each if isinstance(one, str | Path)])
    if isinstance(source, Mapping):
        tables = [replace(read_one(one, columns), source=name) for name, one in source.items()]
    else:
        tables = [read_one(one, columns, f"silo {i}") for i, one in enumerate(source)]
    if not tables:
        raise ValueError("data source: an empty list; give one file or table per silo")
    return align_tables(tables), silo_names(source, tables)


def silo_names(source: Sequence[Single] | Mapping[str, Single], tables: Sequence[Table]) -> list[str]:
    """As they were given; of files what tells them apart, not where they lie."""
    if isinstance(source, Mapping):
        return list(source)
    files = [Path(one) for one in source if isinstance(one, str | Path)]
    short = iter(names_of(files) if files else ())
    return [next(short) if isinstance(one, str | Path) else t.source for one, t in zip(source, tables, strict=True)]


def read_one(source: Single, columns: Columns, name: str | None = None) -> Table:
    if isinstance(source, Table):
        return source
    if isinstance(source, str | Path):
        return _read_file(Path(source), columns)
    if isinstance(source, tuple) and len(source) == 2:
        return from_arrays(name or "arrays", *source)
    if isinstance(source, pd.DataFrame):
        return from_frame(source, name or "DataFrame", columns)
    raise ValueError(
        f"data source: cannot read a {type(source).__name__}; give a path, a DataFrame, "
        "a pair (features, targets), or a list or dict of these with one entry per silo"
    )


def from_arrays(
    source: str,
    features: np.ndarray,
    targets: np.ndarray,
    names: Sequence[str] = (),
    silo_of: np.ndarray | None = None,
) -> Table:
    """A table of numeric arrays, checked: (n, ...) features, (n,) targets, finite, not empty."""
    if isinstance(features, dict) or isinstance(targets, dict):
        raise ValueError(f"{source}: several arrays are no table; use silodp.FederatedData.of")
    features, targets = np.asarray(features), np.asarray(targets)
    if features.ndim < 2 or targets.ndim != 1 or len(features) != len(targets):
        raise ValueError(
            f"{source}: features of shape {features.shape} and targets of shape {targets.shape}; "
            "need (n, columns...) and (n,) with the same n"
        )
    if features.size == 0:
        raise ValueError(f"{source}: no data, shape {features.shape}; need records and columns")
    if features.dtype.kind not in "buif":
        raise ValueError(f"{source}: features of type {features.dtype}; need numbers")
    if silo_of is not None and np.shape(silo_of) != (len(features),):
        raise ValueError(f"{source}: need one silo name per record, got shape {np.shape(silo_of)}")
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, reported below
        features = np.ascontiguousarray(features, np.float32)
    table = Table(source, features, targets, tuple(names))
    check_features(table)
    check_targets(table)
    return table if silo_of is None else _grouped(table, silo_of)


def _grouped(table: Table, silo_of: np.ndarray) -> Table:
    values, codes = np.unique(silo_of, return_inverse=True)
    return replace(table, groups=codes, silo_names=tuple(map(str, values)))


def check_features(table: Table) -> None:
    finite = np.isfinite(table.features).reshape(len(table), -1)
    if finite.all():
        return
    row, column = np.argwhere(~finite)[0]
    label = f"'{own_name(table.names[column])}'" if table.names else str(column + 1)
    raise ValueError(
        f"{table.source}: record {row + 1}, column {label} is missing, infinite or beyond float32; "
        "fill in or drop such records"
    )


def own_name(name: str) -> str:
    """Of a column; what one-hot adds to it is a value."""
    return name.partition("=")[0]


def check_targets(table: Table) -> None:
    kind = table.targets.dtype.kind
    if kind in "US":  # text is never missing
        return
    bad = ~np.isfinite(table.targets) if kind in "buif" else np.asarray(pd.isna(table.targets))
    if bad.any():
        raise ValueError(
            f"{table.source}: record {int(np.argmax(bad)) + 1} has a missing or infinite target; "
            "fill in or drop such records"
        )


def from_frame(frame: pd.DataFrame, source: str, columns: Columns) -> Table:
    frame = frame.rename(columns=str)
    _check_columns(frame, source, columns)
    other = (columns.target, columns.silo, columns.ignored)
    names = [c for c in frame.columns if c not in other]
    if not names or frame.empty:
        raise ValueError(f"{source}: no feature columns or no records beside the target")
    features = np.empty((len(frame), len(names)), np.float32)
    categories = {}
    for j, name in enumerate(names):
        if name in columns.categorical:
            features[:, j], categories[name] = _codes(pd.Series(frame[name]), source)
        else:
            features[:, j] = _numbers(pd.Series(frame[name]), source)
    silo_of = _silo_of(pd.Series(frame[columns.silo]), source) if columns.silo else None
    targets = _raw(pd.Series(frame[columns.target]))
    table = from_arrays(source, features, targets, names, silo_of)
    return replace(table, categories=categories)


def _check_columns(frame: pd.DataFrame, source: str, columns: Columns) -> None:
    listed = _listed(list(frame.columns))
    if columns.target is None:
        raise ValueError(f"{source}: target is not set; name the target column, one of: {listed}")
    for key, name in (("target", columns.target), ("silo_column", columns.silo)):
        if name is not None and name not in frame.columns:
            raise ValueError(f"{source}: {key} = '{name}' is not a column; there are: {listed}")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise ValueError(f"{source}: column '{twice}' occurs twice; give every column its own name")


def _listed(names: list[str]) -> str:
    """The columns there are, unless the first line may be a record: a file without a header."""
    if looks_like_a_record(names):
        return f"{len(names)}, not shown because the first line looks like a record"
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _raw(column: pd.Series) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column) and column.isna().any():
        return column.to_numpy(np.float64, na_value=np.nan)
    if pd.api.types.is_numeric_dtype(column):
        return column.to_numpy(column.dtype.type if column.dtype.kind in "buif" else None)
    return column.to_numpy(object, na_value=None)


def _silo_of(column: pd.Series, source: str) -> np.ndarray:
    if column.isna().any():
        row = int(np.argmax(column.isna())) + 1
        raise ValueError(f"{source}: record {row} has no silo in column '{column.name}'")
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy(str)


def _numbers(column: pd.Series, source: str) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column) and column.dtype.kind in "buif":
        with np.errstate(over="ignore"):
            return column.to_numpy(np.float64, na_value=np.nan).astype(np.float32)
    parsed = pd.Series(pd.to_numeric(column, errors="coerce"))
    bad = np.asarray(parsed.isna() & column.notna())
    row = int(np.argmax(bad))
    fix = "drop the column" if identifies(str(column.name)) else f"add the step 'one-hot:{column.name}'"
    raise ValueError(f"{source}: column '{column.name}' is not numeric (see record {row + 1}); correct it, or {fix}")


def _codes(column: pd.Series, source: str) -> tuple[np.ndarray, tuple[str, ...]]:
    missing = np.asarray(column.isna())
    if missing.any():
        row = int(np.argmax(missing)) + 1
        raise ValueError(f"{source}: record {row}, column '{column.name}' is missing; fill it in")
    values, codes = np.unique(column.astype(str).to_numpy(str), return_inverse=True)
    return codes, tuple(values.tolist())


# --- files -------------------------------------------------------------------------------------


def _is_many(source: str) -> bool:
    return Path(source).is_dir() or (glob.has_magic(source) and not Path(source).exists())


def _paths(source: str) -> list[Path]:
    if Path(source).is_dir():
        found = [p for p in Path(source).iterdir() if _suffix(p) in READERS]
        wanted = f"a folder with files ending in {', '.join(READERS)}"
    else:
        found, wanted = [Path(p) for p in glob.glob(source)], "a pattern that matches files"
    if not found:
        raise ValueError(f"{source}: no data files found; need {wanted}")
    return sorted(found)


def _suffix(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return Path(name).suffix.lower()


def _read_file(path: Path, columns: Columns) -> Table:
    reader = READERS.get(_suffix(path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if reader is None:
        raise ValueError(f"{path}: unknown kind of file; need one of {', '.join(READERS)}")
    return reader(path, columns)


def _unreadable(path: Path, kind: str, why: str) -> ValueError:
    """To be raised outside of `except`: an error remembers the one that is handled, which may quote a cell."""
    return ValueError(f"{path}: not a readable {kind} file ({why})")


def _read_csv(path: Path, columns: Columns) -> Table:
    refuse_twice(path, header(path))
    frame = parsed(path)
    if pd.Series(pd.to_numeric(pd.Series(frame.columns), errors="coerce")).notna().all():
        raise ValueError(f"{path}: the first line holds numbers; it has to name the columns")
    return from_frame(frame, str(path), columns)


def _read_parquet(path: Path, columns: Columns) -> Table:
    return from_frame(read_parquet(path), str(path), columns)


def _read_libsvm(path: Path, columns: Columns) -> Table:
    from sklearn.datasets import load_svmlight_file

    features, targets, why = None, None, ""
    try:
        sparse, targets = load_svmlight_file(str(path), zero_based=False)[:2]  # pyright: ignore
        if 8 * math.prod(sparse.shape) > most(path):  # pyright: ignore
            raise MemoryError
        features = sparse.toarray()  # pyright: ignore
    except UNREADABLE as fault:
        why = reason(fault)
    if features is None:  # told here: an error within `except` would carry the parser's, which may quote the file
        raise _unreadable(path, "LIBSVM", why)
    table = from_arrays(str(path), features, targets)  # pyright: ignore
    return replace(table, open_width=True)


def _read_npz(path: Path, columns: Columns) -> Table:
    arrays = load_npz(path)
    names = "X" if "X" in arrays else "features", columns.target
    if columns.target is None:
        names = names[0], "y" if "y" in arrays else "targets"
    for name in (*names, *filter(None, [columns.silo])):
        if name not in arrays:
            raise ValueError(
                f"{path}: no array '{name}' (there are: {', '.join(arrays)}); need X and y, or features and targets"
            )
    silo_of = None if columns.silo is None else arrays[columns.silo]
    labels = [str(n) for n in arrays.get("feature_names", ())]
    return from_arrays(str(path), arrays[names[0]], arrays[str(names[1])], labels, silo_of)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file; pickled objects are refused."""
    try:
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > most(path):
                raise MemoryError
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except UNREADABLE as fault:
        why = reason(fault)
    raise _unreadable(path, "npz", why)


READERS: dict[str, Callable[[Path, Columns], Table]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
    ".libsvm": _read_libsvm,
    ".svm": _read_libsvm,
}


# --- common columns ----------------------------------------------------------------------------


def align_tables(tables: list[Table]) -> list[Table]:
    """The same columns, in the order of the first table, and the same category lists."""
    if all(t.open_width for t in tables):
        width = max(t.features.shape[1] for t in tables)
        tables = [_widen(t, width) for t in tables]
    tables = [_reorder(t, tables[0]) for t in tables]
    union = {
        name: tuple(sorted({value for t in tables for value in t.categories[name]})) for name in tables[0].categories
    }
    return [_recode(t, union) for t in tables]


def _widen(table: Table, width: int) -> Table:
    missing = width - table.features.shape[1]
    return replace(table, features=np.pad(table.features, ((0, 0), (0, missing))))


def _reorder(table: Table, first: Table) -> Table:
    if table.names == first.names and table.features.shape[1:] == first.features.shape[1:]:
        return table
    if table.names and first.names and set(table.names) == set(first.names):
        order = [table.names.index(name) for name in first.names]
        return replace(table, features=table.features[:, order], names=first.names)
    raise ValueError(f"{table.source}: {_difference(table, first)}; give all the same columns")


def _difference(table: Table, first: Table) -> str:
    lacks = [name for name in first.names if name not in table.names]
    extra = [name for name in table.names if name not in first.names]
    if table.names and first.names and (lacks or extra):
        told = [f"lacks {lacks[:5]}"] if lacks else []
        a_header = set(table.names) & set(first.names) and not looks_like_a_record(extra)
        told += [f"has the extra {extra[:5] if a_header else 'columns of its first line'}"] if extra else []
        return f"compared with {first.source}, it {' and '.join(told)}"
    shapes = table.features.shape[1:], first.features.shape[1:]
    return f"records of shape {shapes[0]}, but {shapes[1]} in {first.source}"


def _recode(table: Table, union: Mapping[str, tuple[str, ...]]) -> Table:
    if dict(table.categories) == dict(union):
        return table
    features: Float32[np.ndarray, "n d"] = table.features.copy()
    for name, values in union.items():
        column = table.names.index(name)
        place = np.array([values.index(value) for value in table.categories[name]])
        features[:, column] = place[features[:, column].astype(int)]
    return replace(table, features=features, categories=union)
