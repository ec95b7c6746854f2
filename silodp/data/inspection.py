"""What is wrong with a table: all of it, one line each, with the file, the column, how many rows, and the fix.

No line holds a value of a record, and how many rows is rounded. A file without a header holds a record where the names
should be: names are shown only beside one that the schema knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

from silodp.data.cells import Cells, is_missing, label
from silodp.data.kinds import Category, Column, Date, Flag, Number, Ordered
from silodp.errors import ConfigError
from silodp.later import Later

if TYPE_CHECKING:
    import pandas as pd

    from silodp.data.schema import Schema
else:
    pd = Later("pandas")


HINTS: dict[type[Column], str] = {
    Number: ", or list codes of empty cells in empty = [...]",
    Category: "",
    Ordered: ', or use kind = "category"',
    Date: ", or give format = [...], as for strptime",
    Flag: ', or use kind = "category" with same = [...]',
}


def named(frame: Any) -> pd.DataFrame:
    """The table with its names as text, as a schema writes them."""
    if not isinstance(frame, pd.DataFrame):
        raise ConfigError(f"rows: a {type(frame).__name__}; give a pandas DataFrame whose columns have names")
    return frame.set_axis([str(name).strip() for name in frame.columns], axis=1)


class Inspected(NamedTuple):
    """One line for each problem, the columns that the schema does not know, and what the others hold."""

    problems: list[str]
    extra: list[str]
    cells: dict[str, Cells]


def inspected(schema: Schema, frame: pd.DataFrame, source: str, fitting: bool) -> Inspected:
    table = named(frame)
    unnamed = _header_problem(schema, list(table.columns), source)
    if unnamed:
        return Inspected([unnamed], [], {})
    cells = {name: column.read(pd.Series(table[name])) for name, column in schema.used.items() if name in table.columns}
    found = [*_lacking(schema, table, source, fitting), *_cells(schema, cells, source, fitting)]
    if not fitting:
        return Inspected(found, [], cells)
    found += [*target_problems(schema, table, source, there=False), *_silo_problems(schema, table, source)]
    if not len(table):
        found.append(f"{source}: no records; give at least one row below the header")
    extra = [name for name in table.columns if name not in known(schema)]
    if extra:
        found.append(f'{source}: not in the schema: {_quoted(extra)}; add each, at least with kind = "ignore"')
    return Inspected(found, extra, cells)


def known(schema: Schema) -> set[str]:
    return {*schema.columns, schema.target.name, *filter(None, [schema.silo])}


def rows(number: int) -> str:
    """How many, rounded to one digit: what a line tells about a table does not hang on one record."""
    if number < 10:
        return "fewer than 10 rows"
    return f"about {int(float(f'{number:.0e}'))} rows"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _header_problem(schema: Schema, names: list[str], source: str) -> str | None:
    if not set(names) & known(schema):
        split = [sep for sep in (";", "\t", "|") if len(names) == 1 and sep in names[0]]
        if split:
            return f"{source}: columns are separated by {split[0]!r}; read the file with sep={split[0]!r}"
        return f"{source}: no column of the schema is there; the first line has to hold the names of the columns"
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1))
    if "" in names:
        return f"{source}: column {names.index('') + 1} has no name; name it, or write the file without row numbers"
    if twice:
        return f"{source}: column {_quoted(twice)} occurs twice; give every column its own name"
    return None


def _lacking(schema: Schema, table: pd.DataFrame, source: str, fitting: bool) -> Iterator[str]:
    """Columns that have to be there; one in other letters is named, because it is public then."""
    wanted = [*schema.used]
    if fitting:
        wanted += [schema.target.name, *filter(None, [schema.silo])]
    by_label = {label(name): name for name in table.columns}
    add = "add it, or take it out of the schema" if fitting else "add it: the model needs it"
    for name in wanted:
        if name not in table.columns:
            close = by_label.get(label(name))
            fix = f"rename '{close}'" if close else add
            yield f"{source}: column '{name}' is not there; {fix}"


def _cells(schema: Schema, read: dict[str, Cells], source: str, fitting: bool) -> Iterator[str]:
    """A schema can still be changed while it is fitted, and not once a model hangs on it."""
    for name, cells in read.items():
        column, where = schema.used[name], f"{source}: column '{name}'"
        empty = column.fill() is not None
        fix = ("correct or empty them" if empty else "correct them") + (HINTS[type(column)] if fitting else "")
        yield from _wrong(cells, where, column.allowed(), fix)
        if not empty and cells.missing.any():
            more = ", or give the column missing = a public constant" if fitting else ""
            yield f"{where}: {rows(int(cells.missing.sum()))} are empty; fill them in{more}"


def _wrong(cells: Cells, where: str, allowed: str, fix: str) -> Iterator[str]:
    if cells.wrong.any():
        yield f"{where}: {rows(int(cells.wrong.sum()))} cannot be read; allowed: {allowed}; {fix}"


def target_problems(schema: Schema, table: pd.DataFrame, source: str, there: bool = True) -> list[str]:
    """Of the target's cells; with `there`, also that the column is missing."""
    name = schema.target.name
    if name not in table.columns:
        return [f"{source}: target column '{name}' is not there; add it"] if there else []
    cells = schema.target.read(pd.Series(table[name]))
    found = list(_wrong(cells, f"{source}: target '{name}'", schema.target.allowed(), "correct them"))
    if cells.missing.any():
        found.append(
            f"{source}: target '{name}': {rows(int(cells.missing.sum()))} are empty; fill them in or drop these rows"
        )
    return found


def others(schema: Schema, frame: pd.DataFrame, source: str) -> Iterator[str]:
    """Categories with texts that nobody listed, for who may look at these rows: allowed, and easily not meant."""
    table = named(frame)
    for name, column in schema.used.items():
        count = column.unlisted(pd.Series(table[name])) if isinstance(column, Category) else 0
        if count:
            yield (
                f"{source}: column '{name}': {rows(count)} hold a text that is not listed and count as \"other\"; "
                'for another spelling give same = [["listed value", "other spelling"]]'
            )


def silo_names(column: pd.Series) -> Shaped[np.ndarray, " n"]:
    return np.array([label(cell, case=True) for cell in column])


def _silo_problems(schema: Schema, table: pd.DataFrame, source: str) -> list[str]:
    if schema.silo is None or schema.silo not in table.columns:
        return []
    empty = int(_empty(pd.Series(table[schema.silo])).sum())
    return (
        [f"{source}: silo '{schema.silo}': {rows(empty)} are empty; fill them in or drop these rows"] if empty else []
    )


def _empty(column: pd.Series) -> Bool[np.ndarray, " n"]:
    return np.asarray(column.isna()) | np.array([isinstance(cell, str) and is_missing(cell) for cell in column], bool)
