"""Drafts of a schema. From names alone nothing is learnt about records; from values, the draft says that it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.data.cells import Cells, flag, is_missing, label, read_cells, read_numbers
from silodp.data.days import day
from silodp.data.identifiers import identifies
from silodp.data.kinds import DAYS
from silodp.later import Later
from silodp.parse import toml_key, toml_literal

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")

TODO = "TODO"
MOST_VALUES = 50  # of a category that is drafted from values
FILL_IN = "no value was looked at. Fill in every TODO from public knowledge."
NAMES_ONLY = f"# Drafted from the names of the columns; {FILL_IN}"
TYPES_ONLY = f"# Drafted from names and types of the columns; {FILL_IN}"
KEYS = """\
# number: range = [0, 120], or centre = 60.0 and scale = 20.0, or range = "private" (for a part of the budget)
# category: values = ["a", "b"]; anything else is "other". ordered: values from low to high. flag: yes/no, 1/0
# date: reference = 2024-12-31, unit = "years", range = [0, 110], and format = "%d.%m.%Y" unless it is as 2024-12-31
# All but ignore: missing = a public constant that stands for empty cells; without it they are refused (in a category
# they are "other"). Where codes mean an empty cell: empty = [-9, "unknown"].
"""
FROM_VALUES = (
    "# NOT PRIVATE: ranges, values and constants below are those of the records in the file.\n"
    "# Replace them by public knowledge before this schema leaves your site."
)
Keys = Mapping[str, tuple[Any, str]]  # value and comment, by key

NUMBER: Keys = {
    "kind": ("number", "or category, ordered, date, flag, ignore"),
    "range": (TODO, 'TODO: [lowest, highest], or centre and scale instead, or "private"'),
}
BY_TYPE: dict[str, Keys] = {
    "number": {"kind": ("number", ""), "range": NUMBER["range"]},
    "flag": {"kind": ("flag", "")},
    "date": {
        "kind": ("date", ""),
        "reference": (TODO, "TODO: a day such as 2024-12-31; a date becomes the time from it to this day"),
        "unit": ("years", "or months, days"),
        "range": (TODO, "TODO: [lowest, highest] in that unit"),
    },
    "category": {"kind": ("category", "or ordered"), "values": ([], 'TODO: list them; anything else is "other"')},
}
IGNORED: Keys = {"kind": ("ignore", "named like an identifier")}


def table(title: str, keys: Keys) -> str:
    lines = [f"{key} = {toml_literal(value)}{f'  # {note}' if note else ''}" for key, (value, note) in keys.items()]
    return "\n".join([f"[{title}]", *lines, ""])


def column_draft(name: str, keys: Keys = NUMBER) -> str:
    """What to add to a schema for one column; it is refused until it is filled in."""
    return table(f"columns.{toml_key(name)}", IGNORED if identifies(name) else keys)


def columns_draft(names: Iterable[str]) -> str:
    return "\n".join(map(column_draft, names))


def from_names(names: Iterable[str], target: str | None, silo: str | None) -> str:
    """A schema from the first line of a file."""
    return _schema(NAMES_ONLY, dict.fromkeys(names, NUMBER), _blank_target(target), silo, target)


def from_types(types: Mapping[str, str], target: str | None, silo: str | None) -> str:
    """A schema from names and kinds, where a file says them without its rows."""
    columns = {name: BY_TYPE[kind] for name, kind in types.items()}
    return _schema(TYPES_ONLY, columns, _blank_target(target), silo, target)


def from_values(frame: pd.DataFrame, target: str | None, silo: str | None) -> str:
    """A schema whose constants are those of the records: for one's own site."""
    columns = {name: _found(pd.Series(frame[name])) for name in frame.columns if name not in (target, silo)}
    drafted = _blank_target(target) if target is None else _found_target(pd.Series(frame[target]), target)
    return _schema(FROM_VALUES, columns, drafted, silo, target)


def _schema(comment: str, columns: Mapping[str, Keys], target: Keys, silo: str | None, named: str | None) -> str:
    parts = [f"{comment}\n{KEYS}", f"silo = {toml_literal(silo)}\n" if silo else "", table("target", target)]
    parts += [column_draft(name, keys) for name, keys in columns.items() if name not in (named, silo)]
    return "\n".join(filter(None, parts))


def _blank_target(name: str | None) -> Keys:
    wanted = "TODO: list them, or give range = [lowest, highest] for a number"
    return {"name": (name or "", "" if name else "TODO: the column to predict"), "classes": ([], wanted)}


def _found_target(column: pd.Series, name: str) -> Keys:
    numbers = read_numbers(column)
    if not numbers.wrong.any() and len(np.unique(numbers.values[~numbers.missing])) > 2:
        return {"name": (name, ""), "range": (_bounds(numbers), "or classes = [...]")}
    return {"name": (name, ""), "classes": (_texts(column), "")}


def _found(column: pd.Series) -> Keys:
    for kind, cells in _readings(column):
        if not cells.wrong.any() and not cells.missing.all():
            return kind(cells)
    texts = _texts(column)
    if not 0 < len(texts) <= MOST_VALUES:
        return {"kind": ("ignore", f"empty, or more than {MOST_VALUES} different texts")}
    return {"kind": ("category", "or ordered"), "values": (texts, "")}


def _readings(column: pd.Series) -> list[tuple[Any, Cells]]:
    """What a column may be; the first that fits is taken."""
    days = read_cells(column, day)
    return [(_flag, read_cells(column, flag)), (_number, read_numbers(column)), (_date, days)]


def _with_missing(keys: dict[str, tuple[Any, str]], cells: Cells, constant: Any) -> Keys:
    return keys | ({"missing": (constant, "an indicator is added")} if cells.missing.any() else {})


def _flag(cells: Cells) -> Keys:
    return _with_missing({"kind": ("flag", "")}, cells, False)


def _number(cells: Cells) -> Keys:
    lowest, highest = _bounds(cells)
    keys: dict[str, tuple[Any, str]] = {"kind": ("number", ""), "range": ([lowest, highest], "")}
    return _with_missing(keys, cells, (lowest + highest) / 2)


def _date(cells: Cells) -> Keys:
    first, last = _bounds(cells)
    keys: dict[str, tuple[Any, str]] = {
        "kind": ("date", ""),
        "reference": (_iso(last), "a date becomes the time from it to this day"),
        "unit": ("years", "or months, days"),
        "range": ([0.0, float(np.ceil((last - first) / DAYS["years"]))], ""),
    }
    return _with_missing(keys, cells, _iso((first + last) // 2))


def _iso(ordinal: float) -> str:
    return date.fromordinal(int(ordinal)).isoformat()


def _bounds(cells: Cells) -> list[float]:
    """The least and the greatest; a range has two different ends."""
    fine = cells.values[~cells.missing & ~cells.wrong & np.isfinite(cells.values)]
    lowest, highest = (float(fine.min()), float(fine.max())) if len(fine) else (0.0, 0.0)
    return [lowest, highest if highest > lowest else lowest + 1.0]


def _texts(column: pd.Series) -> list[str]:
    """Different labels as a schema compares them, as the file first writes them."""
    first: dict[str, str] = {}
    for cell in column.dropna().unique():
        first.setdefault(label(cell), label(cell, case=True))
    return sorted(text for key, text in first.items() if not is_missing(key))
