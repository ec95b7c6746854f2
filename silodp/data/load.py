"""From a source to silos: read, encode targets, select, hold out a test set, divide, preprocess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
from jaxtyping import Int

from silodp.config import DataConfig
from silodp.data.datasets import DATASETS, load_dataset
from silodp.data.partition import Request, Rows, divide, hold_out, select
from silodp.data.preprocess import (
    apply_steps,
    categorical_columns,
    parse_steps,
)
from silodp.data.tables import (
    Columns,
    Single,
    Source,
    align_tables,
    check_features,
    read_one,
    read_tables,
)
from silodp.data.types import FederatedData, Note, SiloData, Table, Task
from silodp.errors import ConfigError

MOST_INFERRED_CLASSES = 20


@dataclass(frozen=True)
class _Pool:
    """All records in one table; `groups` is set when they already belong to silos."""

    table: Table
    test: Table | None
    task: Task
    notes: list[Note]


def load_data(
    source: Source,
    silos: int | None = None,
    partition: str | None = None,
    *,
    target: str | None = None,
    silo_column: str | None = None,
    task: Task | None = None,
    classes: Sequence[str | int] | None = None,
    preprocess: Sequence[str] = (),
    test: float | Single | None = None,
    seed: int = 0,
    records: int | None = None,
    sizes: Sequence[int] | None = None,
    alpha: float | None = None,
    limit: int | None = None,
    per_class: int | None = None,
) -> FederatedData:
    """Read `source` and give every silo its records.

    Args:
        source: a dataset's name; a file, DataFrame or (features, targets), to be divided by
            `silo_column` or by `partition` (iid by default) into `silos`; or a folder, pattern, list
            or dict with one entry per silo.
        classes: the labels, if known beforehand; any other label is then an error.
        test: a fraction to hold out, or a table of its own; by default the dataset's customary test
            records, if any. Copies of a record never land on both sides: the split comes first.
        seed: of the split, the selection and the partition; public.
        records: keep the first so many records of every silo. sizes: of the silos (iid, by-label).
        per_class, limit: use only the first so many records of every class, so many drawn at random.
        target, silo_column: columns of a table. task: classification or regression, when it is not clear.
        alpha: of the dirichlet partition. preprocess: see `silodp.data.preprocess`.

    Records with several arrays, whole numbers or several targets: `FederatedData.of`.

    Returns:
        The silos, their test records, and notes on how they were prepared.

    Example:
        >>> import numpy as np, silodp
        >>> rng = np.random.default_rng(0)
        >>> pairs = {name: (rng.normal(size=(n, 3)), rng.integers(2, size=n)) for name, n in (("a", 30), ("b", 20))}
        >>> silodp.load_data(pairs, test=0.2).sizes
        (24, 16)
    """
    steps = parse_steps(preprocess)
    columns = Columns(target, silo_column, categorical_columns(steps))
    pool = _pool(source, columns, task, classes, test)
    table, notes = pool.table, list(pool.notes)
    labels = table.targets if table.classes else None
    if limit is not None or per_class is not None:
        table = table.take(select(len(table), labels, limit, per_class, _rng(seed, "select")))
        notes.append(Note(True, f"limit = {limit}, per_class = {per_class}: {len(table)} records"))
    held_out = pool.test
    if isinstance(test, float | int):
        table, held_out = _split(table, test, _rng(seed, "split"))
        notes.append(Note(True, f"{len(held_out)} records held out for testing, seed {seed}"))
    parts, names, note = _divide(table, silos, partition, sizes, alpha, seed)
    column = silo_column if table.groups is not None else None
    parts = _checked(parts, names, records, column)
    table, parts = _only_used(table, parts)
    if records is not None:
        notes.append(Note(True, f"the first {records} records of every silo are used"))
    table, held_out, fitted = apply_steps(steps, table, held_out)
    for each in filter(None, (table, held_out)):
        check_features(each)
    return FederatedData(
        source=pool.table.source,
        silos=tuple(_silo(n, table.take(rows)) for n, rows in zip(names, parts, strict=True)),
        test=None if held_out is None else _silo("test", held_out),
        task=pool.task,
        classes=table.classes,
        notes=(*notes, note, *fitted),
    )


def read_data(options: DataConfig) -> FederatedData:
    """The records that a config's data section describes."""
    if options.source is None:
        raise ConfigError("data.source is missing: name a dataset or a file, or pass data to silodp.train")
    given = options.model_dump(exclude={"source", "silos", "partition"}, exclude_none=True)
    try:
        return load_data(options.source, options.silos, options.partition, **given)
    except (ValueError, OSError) as error:
        raise ConfigError(f"data: {error}") from None


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """Streams that do not shift when another purpose is switched on or off."""
    if seed < 0:
        raise ValueError(f"seed = {seed}: need 0 or more")
    return np.random.default_rng([seed, *purpose.encode()])


def _silo(name: str, table: Table) -> SiloData:
    return SiloData(name, table.features, table.targets)


def _pool(
    source: Source,
    columns: Columns,
    task: Task | None,
    classes: Sequence[str | int] | None,
    test: float | Single | None,
) -> _Pool:
    if isinstance(source, str) and source in DATASETS:
        task = task or DATASETS[source].task
        train, held_out = load_dataset(source)
        tables, names = [train], []
    elif isinstance(source, str) and not Path(source).suffix and not Path(source).exists():
        raise ValueError(f"data source '{source}': no such file or folder, and no dataset: {', '.join(DATASETS)}")
    else:
        (tables, names), held_out = read_tables(source, columns), None
    if isinstance(test, float | int):
        tables, held_out = tables + ([held_out] if held_out is not None else []), None
    elif test is not None:
        held_out = read_one(test, replace(columns, silo=None, ignored=columns.silo), "test")
    *tables, held_out = _aligned(tables, held_out)
    public = classes is not None or (isinstance(source, str) and source in DATASETS)
    task, labels, notes = _targets(tables, task, classes, public)
    tables = [_encode(table, labels, public) for table in tables]
    held_out = None if held_out is None else _encode(held_out, labels, public)
    return _Pool(_concatenate(tables, names), held_out, task, notes)


def _aligned(tables: list[Table], test: Table | None) -> list:
    return align_tables([*tables, test]) if test is not None else [*align_tables(tables), None]


def _concatenate(tables: list[Table], names: list[str]) -> Table:
    """`names`: of the silos, where each table is one."""
    first = tables[0]
    if len(tables) == 1 and not names:
        return first
    if names and any(t.groups is not None for t in tables):
        raise ValueError("silo_column: there is one table per silo already; leave it out")
    whole = replace(
        first,
        features=np.concatenate([t.features for t in tables]),
        targets=np.concatenate([t.targets for t in tables]),
    )
    if not names:
        return whole
    return replace(
        whole,
        source=f"{len(tables)} tables",
        groups=np.repeat(np.arange(len(tables)), [len(t) for t in tables]),
        silo_names=tuple(names),
    )


def _given_silos(table: Table) -> list[Rows]:
    return [np.flatnonzero(table.groups == i) for i in range(len(table.silo_names))]


# --- targets -----------------------------------------------------------------------------------


def _targets(
    tables: list[Table], task: Task | None, classes: Sequence[str | int] | None, public: bool
) -> tuple[Task, tuple[str, ...], list[Note]]:
    """Task, class labels in the order of their indices (none for regression), and notes."""
    if task is not None and task not in get_args(Task):
        raise ValueError(f"task = '{task}': need one of {', '.join(get_args(Task))}")
    notes = []
    if task is None:
        task = "classification" if classes or _looks_like_classes(tables) else "regression"
        notes.append(Note(True, f"task taken to be {task} (set `task` to change it)"))
    if task == "regression":
        if classes:
            raise ValueError("classes: only for classification, but task = 'regression'")
        return task, (), notes
    labels = tuple(map(str, classes)) if classes else _found_labels(tables)
    if len(labels) < 2 or len(set(labels)) < len(labels):
        told = f"{len(labels)} labels, {len(set(labels))} of them different"
        raise ValueError(f"classes: {told}; need two or more different labels")
    return task, labels, [*notes, Note(True, f"labels, taken as known beforehand: {_shown(labels, public)}")]


def _shown(labels: tuple[str, ...], public: bool) -> str:
    """Labels that were found in records are counted, those that were given or are a dataset's are shown."""
    if not public:
        return f"{len(labels)} that occur in the records; `classes` lists them"
    return ", ".join(f"{label} -> {i}" for i, label in enumerate(labels[:30]))


def _looks_like_classes(tables: list[Table]) -> bool:
    if any(t.targets.dtype.kind not in "iuf" for t in tables):
        return True
    values = np.unique(np.concatenate([t.targets for t in tables]))
    return len(values) <= MOST_INFERRED_CLASSES and bool(np.all(values == np.round(values)))


def _found_labels(tables: list[Table]) -> tuple[str, ...]:
    found = {label for table in tables for label in _labels(table)[0]}
    try:
        return tuple(sorted(found, key=int))
    except ValueError:
        return tuple(sorted(found))


def _labels(table: Table) -> tuple[list[str], Int[np.ndarray, " n"]]:
    """Distinct labels as text, and the place of each record's; 1, 1.0 and '1' are the same."""
    raw = table.targets.astype(str) if table.targets.dtype.kind == "O" else table.targets
    values, places = np.unique(raw, return_inverse=True)
    if values.dtype.kind == "f":
        broken = values != np.round(values)
        if broken.any():
            row = int(np.argmax(broken[places]))
            raise ValueError(
                f"{table.source}: record {row + 1} has a target that is no class label; "
                "use whole numbers or names, or task = 'regression'"
            )
        values = values.astype(np.int64)
    return [str(value) for value in values], places


def _encode(table: Table, labels: tuple[str, ...], public: bool) -> Table:
    """Targets as float32, or as the int32 index of each label."""
    if not labels:
        if table.targets.dtype.kind not in "buif":
            raise ValueError(f"{table.source}: the targets are no numbers; use task = 'classification'")
        return replace(table, targets=table.targets.astype(np.float32))
    found, places = _labels(table)
    index = {label: i for i, label in enumerate(labels)}
    codes = np.array([index.get(label, -1) for label in found], np.int32)[places]
    if (codes < 0).any():
        row = int(np.argmax(codes < 0))
        need = ", ".join(labels[:12]) if public else f"the {len(labels)} that training records have"
        raise ValueError(f"{table.source}: record {row + 1} has an unknown label; need one of {need}")
    return replace(table, targets=codes, classes=labels)


# --- silos -------------------------------------------------------------------------------------


def _split(table: Table, fraction: float, rng: np.random.Generator) -> tuple[Table, Table]:
    """Within each silo when the silos are given, otherwise over all records."""
    parts = [np.arange(len(table))] if table.groups is None else _given_silos(table)
    kept, test = hold_out(parts, fraction, rng)
    return table.take(kept), replace(table.take(test), groups=None)


def _divide(
    table: Table,
    silos: int | None,
    partition: str | None,
    sizes: Sequence[int] | None,
    alpha: float | None,
    seed: int,
) -> tuple[list[Rows], list[str], Note]:
    if table.groups is not None:
        if partition is not None or sizes is not None or alpha is not None:
            raise ValueError(
                f"partition = '{partition}': the source already says which records belong to which "
                "silo; leave out partition, sizes and alpha"
            )
        parts, names = _given_silos(table), list(table.silo_names)
        if silos not in (None, len(parts)):
            raise ValueError(f"silos = {silos}: the source has {len(parts)} silos")
        return parts, names, Note(True, f"{len(parts)} silos as given")
    kind = partition or "iid"
    labels = table.targets if table.classes else None
    fixed = None if sizes is None else tuple(sizes)
    if fixed is not None and silos not in (None, len(fixed)):
        raise ValueError(f"silos = {silos}: sizes lists {len(fixed)} silos")
    rng = _rng(seed, "partition")
    parts = divide(kind, Request(len(table), labels, table.classes, silos, fixed, alpha, rng))
    text = f"partition {kind} into {len(parts)} silos, seed {seed}"
    if sum(map(len, parts)) > len(np.unique(np.concatenate(parts))):
        text += "; silos share records, so the guarantee is per record AND silo, not per record"
    return parts, [f"silo {i}" for i in range(len(parts))], Note(True, text)


def _checked(parts: list[Rows], names: list[str], records: int | None, column: str | None) -> list[Rows]:
    """`column` names the silos, where one does: what it holds is not shown, because it may be the wrong column."""
    least = 2 if records is None else records
    if least < 2:
        raise ValueError(f"records = {records}: every silo needs 2 or more")
    few = sum(len(rows) < least for rows in parts)
    if few and column is not None:
        told = f"{few} of its {len(parts)} silos have fewer than {least} training records"
        raise ValueError(f"silo_column = '{column}': {told}; name another column, or drop these records")
    for name, rows in zip(names, parts, strict=True):
        if len(rows) < least:
            raise ValueError(f"silo '{name}' has {len(rows)} training record(s); needs {least}")
    return [rows[:records] for rows in parts]


def _only_used(table: Table, parts: list[Rows]) -> tuple[Table, list[Int[np.ndarray, " k"]]]:
    """Drop records no silo holds, so that no preprocessing step is fitted on them."""
    used = np.unique(np.concatenate(parts))
    return table.take(used), [np.searchsorted(used, rows) for rows in parts]
