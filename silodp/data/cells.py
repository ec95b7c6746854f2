"""Raw cells of a table, typed or as a CSV file holds them, read as numbers. No error here ever names a cell.

A cell is fine, missing or wrong. Missing are None, NaN and the spellings in MISSING; wrong is what cannot be read.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from silodp.later import Later
from silodp.records import number_only

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")

MISSING = frozenset(["", "na", "n/a", "#n/a", "nan", "null", "none", "-", ".", "?"])
FLAGS = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "1": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0, "0": 0.0}

Parse = Callable[[Any], float]  # NaN for a missing cell; ValueError for a wrong one


class Cells(NamedTuple):
    """What a column holds; `values` means nothing where a cell is missing or wrong."""

    values: Float64[np.ndarray, " n"]
    missing: Bool[np.ndarray, " n"]
    wrong: Bool[np.ndarray, " n"]

    __repr__ = number_only


def read_cells(column: pd.Series, parse: Parse) -> Cells:
    """Every distinct cell is parsed once; True, 1 and 1.0 are distinct."""
    cells = column.astype(object)
    try:
        codes = pd.factorize(cells)[0]  # -1: None and NaN
    except TypeError:  # lists and the like
        return Cells(np.zeros(len(column)), np.zeros(len(column), bool), np.ones(len(column), bool))
    kinds, types = pd.factorize(cells.map(type))
    _, first, places = np.unique(codes * len(types) + kinds, return_index=True, return_inverse=True)
    parsed = [math.nan if codes[i] < 0 else _tried(parse, cells.iloc[i]) for i in first]
    values = np.array([0.0 if value is None else value for value in parsed], np.float64)[places]
    wrong = np.array([value is None for value in parsed], bool)[places]
    return Cells(values, np.isnan(values), wrong)


def _tried(parse: Parse, cell: Any) -> float | None:
    try:
        return parse(cell)
    except (ValueError, TypeError, OverflowError):
        return None


def emptied(column: pd.Series, marks: Sequence[Any]) -> pd.Series:
    """The column without the cells that hold one of the marks of an empty cell."""
    if not marks:
        return column
    known = {label(mark) for mark in marks}
    return column.mask(column.map(lambda cell: label(cell) in known).astype(bool))


def read_numbers(column: pd.Series) -> Cells:
    if column.dtype.kind in "iuf":
        values = column.to_numpy(np.float64, na_value=np.nan)
        return Cells(values, np.isnan(values), np.zeros(len(values), bool))
    return read_cells(column, number)


def number(cell: Any) -> float:
    if isinstance(cell, bool | np.bool_):
        raise ValueError("a truth value")
    if not isinstance(cell, str):
        return float(cell)
    if "_" in cell:  # Python would read 1_000
        raise ValueError("an underscore")
    try:
        return float(cell)
    except ValueError:
        if is_missing(cell):
            return math.nan
        raise


def flag(cell: Any) -> float:
    text = label(cell)
    if text in FLAGS:
        return FLAGS[text]
    if is_missing(text):
        return math.nan
    raise ValueError("no truth value")


def place(cell: Any, places: Mapping[str, int], case: bool, unlisted: float | None) -> float:
    """Where a label stands in a list; a label that is listed is never missing. None: what is unlisted is wrong."""
    text = label(cell, case)
    if text in places:
        return float(places[text])
    if is_missing(text):
        return math.nan
    if unlisted is None:
        raise ValueError("not listed")
    return unlisted


def is_missing(text: str) -> bool:
    return text.strip().casefold() in MISSING


def label(value: Any, case: bool = False) -> str:
    """A label as it is compared: stripped, 2.0 as 2, True as true, upper and lower case alike unless `case`."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    text = unicodedata.normalize("NFC", str(value).strip())
    text = re.sub(r"^([+-]?\d+)\.0+$", r"\1", text)  # whole numbers beside an empty cell are written 2.0
    return text if case else text.casefold()


def labels(values: Sequence[Any], case: bool) -> dict[str, int]:
    """Places by label; two of the same label share one place, which the schema refuses."""
    return {label(value, case): i for i, value in enumerate(values)}


def spellings(values: Sequence[Any], same: Sequence[Sequence[Any]], case: bool) -> dict[str, int]:
    """Places by label, those of other spellings included."""
    places = labels(values, case)
    return places | {label(other, case): places[label(first, case)] for first, *others in same for other in others}


def check_same(values: Sequence[Any], same: Sequence[Sequence[Any]], case: bool, key: str) -> None:
    """Every list of spellings begins with a listed value, and no spelling means two of them."""
    listed, seen = labels(values, case), set()
    for first, *others in same:
        if label(first, case) not in listed:
            raise ValueError(f"same: {first!r} is not one of the {key}; begin each list with one, then other spellings")
        for other in (label(value, case) for value in others):
            if not other or other in listed or other in seen:
                raise ValueError("same: a spelling is empty, listed already or given twice; give each once")
            seen.add(other)
