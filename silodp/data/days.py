"""Days in a table, and the ways of writing them that a schema may name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator

from silodp.data.cells import is_missing

PROBES = (date(2001, 2, 3), date(1999, 12, 31), date(2012, 11, 10))


def day(cell: Any, forms: Sequence[str] = ()) -> float:
    """The number of a day; text is ISO 8601, or in the first of `forms` (as for strptime) that fits."""
    if isinstance(cell, date):  # datetimes and pandas' timestamps too
        return float(cell.toordinal())
    if not isinstance(cell, str):
        raise ValueError("no day")
    if is_missing(cell):
        return math.nan
    text = cell.strip()
    if not forms:
        return float(datetime.fromisoformat(text).toordinal())
    found = next(filter(None, (day_or_none(text, form) for form in forms)), None)
    if found is None:
        raise ValueError("no day")
    return float(found.toordinal())


def check_formats(forms: tuple[str, ...]) -> None:
    """Each tells a whole day, and no two read one text as different days."""
    for form, probe in itertools.product(forms, PROBES):
        if day_or_none(probe.strftime(form), form) != probe:
            raise ValueError(f'format: {form!r} does not tell a day; write it as for strptime, e.g. "%d.%m.%Y"')
    for (one, other), probe in itertools.product(itertools.permutations(forms, 2), PROBES):
        if day_or_none(probe.strftime(one), other) not in (None, probe):
            raise ValueError(f"format: {one!r} and {other!r} read one text as different days; correct the files of one")


def day_or_none(text: str, form: str) -> date | None:
    try:
        return datetime.strptime(text, form).date()
    except ValueError:
        return None


def as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def one_day(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip()).date()
        except ValueError:
            value = None
    if isinstance(value, datetime):
        return value.date()
    if value is not None and isinstance(value, date):
        return value
    raise ValueError("give a day as 2024-12-31")


Formats = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Day = Annotated[date, BeforeValidator(one_day)]
