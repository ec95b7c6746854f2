"""The kinds of columns that a schema knows: what each may say, and how its cells become features.

All constants are public. Numbers, days and places in an order are mapped to [-1, 1], flags to 0 and 1, categories to
one indicator for each value and one for all others. A column with `missing` has an indicator of missing cells too.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Float, Float64
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from silodp.data.cells import (
    Cells,
    check_same,
    emptied,
    flag,
    label,
    labels,
    place,
    read_cells,
    read_numbers,
    spellings,
)
from silodp.data.days import Day, Formats, check_formats, day
from silodp.data.numbers import KNOTS, Bend, Constants, bends, scaled, scaled_to
from silodp.later import Later

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")

Label = StrictBool | StrictInt | StrictFloat | StrictStr
DAYS = {"days": 1.0, "months": 365.2425 / 12, "years": 365.2425}
OTHER = "other"


def interval(value: Any) -> Any:
    """Two numbers, the lowest first; "private" is left for the field to judge."""
    if value is None or value == "private":
        return value
    is_number = lambda x: type(x) in (int, float) and abs(x) <= sys.float_info.max
    numbers = isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
    if not numbers or not 0 < value[1] - value[0] < math.inf:  # of finite ends, the width may be infinite
        raise ValueError("give two numbers, the lowest first, e.g. [0, 120]")
    return tuple(map(float, value))


def different(values: tuple[Any, ...], case: bool, key: str, least: int = 1) -> None:
    """Lists are checked as they will be compared."""
    if len(values) < least:
        raise ValueError(f"{key}: lists {len(values)}; list {'all of them' if least == 1 else 'two or more'}")
    if any(not label(value) for value in values):
        raise ValueError(f"{key}: an empty text stands for a missing cell; leave it out and give missing")
    places = labels(values, case)
    for i, value in enumerate(values):
        last = places[label(value, case)]
        if last != i:
            same = "" if case else ", or set case = true if upper and lower case differ"
            raise ValueError(f"{key}: {value!r} and {values[last]!r} are the same text; list it once{same}")


Same = tuple[Annotated[tuple[Label, ...], Field(min_length=2)], ...]
Interval = Annotated[tuple[float, float], BeforeValidator(interval)]


class Part(BaseModel):
    """Types are taken at their word: true is no number, and a number no text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class Column(Part):
    """What all columns have that become features."""

    identifier: Literal[False] | None = Field(default=None, description="false: it only looks like an identifier")

    def names(self, column: str) -> list[str]:
        """Of the features."""
        return [column]

    def indicator(self) -> bool:
        return getattr(self, "missing", None) is not None

    def fill(self) -> float | None:
        """What stands for a missing cell; None: such a cell is refused."""
        raise NotImplementedError

    empty: tuple[Label, ...] = Field(default=(), description="what else means an empty cell, such as -9 or unknown")

    @model_validator(mode="after")
    def _empty_or_listed(self) -> Column:
        marks = {label(mark) for mark in self.empty}
        if marks & {label(value) for value in getattr(self, "values", ())}:
            raise ValueError("empty: lists one of the values; take it out of one of them")
        return self

    def read(self, cells: pd.Series) -> Cells:
        return self.parsed(emptied(cells, self.empty))

    def parsed(self, cells: pd.Series) -> Cells:
        raise NotImplementedError

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        raise NotImplementedError

    def allowed(self) -> str:
        """What a cell may hold, and what to do about one that does not."""
        raise NotImplementedError


class Number(Column):
    """A number: clipped to a public range, or centred and scaled by public constants."""

    kind: Literal["number"]
    range: Interval | Literal["private"] | None = None
    centre: StrictFloat | None = None
    scale: StrictFloat | None = Field(default=None, gt=0)
    unit: str | None = None
    missing: StrictFloat | None = None
    pieces: StrictInt | None = Field(
        default=None, description="knots of a broken line in its place: 3, 5, 9, 17, 33 or 65; 0: it stays a line"
    )

    @model_validator(mode="after")
    def _one_scale(self) -> Number:
        given = [key for key in ("centre", "scale") if getattr(self, key) is not None]
        if self.range is not None and given:
            raise ValueError(f"range and {' and '.join(given)} are given together; give a range, or centre and scale")
        if self.range is None and len(given) < 2:
            raise ValueError('give range = [lowest, highest], or centre and scale, or range = "private"')
        if isinstance(self.range, tuple) and self.missing is not None:
            within(self.missing, self.range, f"missing = {self.missing:g}")
        if self.pieces and self.pieces not in KNOTS:
            known = ", ".join(map(str, KNOTS))
            raise ValueError(f"pieces = {self.pieces}: knots of a broken line; give 0 for none, or one of {known}")
        if self.pieces and self.range == "private":
            raise ValueError(f"pieces = {self.pieces}: knots need a public range; give one, or leave pieces out")
        return self

    @property
    def deviation(self) -> float:
        """That is expected of the scaled number: a range is taken to span six of them."""
        return 1 / 3 if isinstance(self.range, tuple) else 1.0

    @property
    def bends(self) -> list[Bend]:
        """Beside the line."""
        return bends(self.pieces or 0)

    def names(self, column: str) -> list[str]:
        chosen = self.constants()
        at = lambda bend, to: bend.place * self.deviation * to.scale + to.centre
        places = [] if chosen is None else [at(bend, chosen) for bend in self.bends]
        return [column, *(f"{column} near {place}" for place in told_apart(places))]

    def constants(self) -> Constants | None:
        """None for a private range."""
        if self.centre is not None and self.scale is not None:
            return Constants(self.centre, self.scale)
        return scaled_to(self.range) if isinstance(self.range, tuple) else None

    def fill(self) -> float | None:
        return self.missing

    def parsed(self, cells: pd.Series) -> Cells:
        return read_numbers(cells)

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        chosen = self.constants() or constants
        assert chosen is not None  # the schema refuses before
        found = scaled(values, chosen)[:, None]
        return np.hstack([found, *(bend.of(found / self.deviation) for bend in self.bends)])

    def allowed(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"a number{unit}, with a decimal point, without thousands separators and without its unit"


def told_apart(places: list[float]) -> list[str]:
    """Numbers with six digits, or as many as tell them apart; with their place in the list where none do."""
    texts = lambda digits: [f"{place:.{digits}g}" for place in places]
    found = next((told for told in map(texts, range(6, 18)) if len(set(told)) == len(told)), None)
    return found or [f"{text} ({i})" for i, text in enumerate(texts(17), 1)]


def within(value: float, bounds: tuple[float, float], told: str) -> None:
    if not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"{told}: outside the range {bounds[0]:g} to {bounds[1]:g}; give one inside")


class Category(Column):
    """One of a public list of values, in no order; anything else is "other"."""

    kind: Literal["category"]
    values: tuple[Label, ...]
    same: Same = Field(default=(), description="other spellings: lists, each with one of the values first")
    case: StrictBool = Field(default=False, description="whether upper and lower case differ")
    missing: Label | None = None

    @model_validator(mode="after")
    def _listed(self) -> Category:
        different(self.values, self.case, "values")
        check_same(self.values, self.same, self.case, "values")
        if self.missing is not None and label(self.missing, self.case) not in self.places():
            raise ValueError(f'missing = {self.missing!r}: not one of the values; give one of them, or "{OTHER}"')
        return self

    def listed(self) -> list[str]:
        """The values, and the one that stands for all others."""
        texts = [label(value, case=True) for value in self.values]
        return texts if OTHER in labels(self.values, self.case) else [*texts, OTHER]

    def places(self) -> dict[str, int]:
        return spellings(self.listed(), self.same, self.case)

    def unlisted(self, cells: pd.Series) -> int:
        """How many cells hold a text that nobody listed: they count as "other"."""
        only = partial(place, places=self.places(), case=self.case, unlisted=None)
        return int(read_cells(emptied(cells, self.empty), only).wrong.sum())

    def names(self, column: str) -> list[str]:
        return [f"{column}={value}" for value in self.listed()]

    def fill(self) -> float | None:
        return float(self.places()[OTHER if self.missing is None else label(self.missing, self.case)])

    def parsed(self, cells: pd.Series) -> Cells:
        places = self.places()
        return read_cells(cells, partial(place, places=places, case=self.case, unlisted=float(places[OTHER])))

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        return (values[:, None] == np.arange(len(self.listed()))).astype(np.float64)

    def allowed(self) -> str:
        return "one text or number"


class Ordered(Column):
    """One of a public list of values, from the lowest to the highest."""

    kind: Literal["ordered"]
    values: tuple[Label, ...]
    same: Same = Field(default=(), description="other spellings: lists, each with one of the values first")
    case: StrictBool = Field(default=False, description="whether upper and lower case differ")
    missing: Label | None = None

    @model_validator(mode="after")
    def _listed(self) -> Ordered:
        different(self.values, self.case, "values", least=2)
        check_same(self.values, self.same, self.case, "values")
        if self.missing is not None and label(self.missing, self.case) not in labels(self.values, self.case):
            raise ValueError(f"missing = {self.missing!r}: not one of the values; give one of them")
        return self

    def fill(self) -> float | None:
        return None if self.missing is None else float(labels(self.values, self.case)[label(self.missing, self.case)])

    def parsed(self, cells: pd.Series) -> Cells:
        places = spellings(self.values, self.same, self.case)
        return read_cells(cells, partial(place, places=places, case=self.case, unlisted=None))

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        return scaled(values, scaled_to((0.0, len(self.values) - 1.0)))[:, None]

    def allowed(self) -> str:
        return f"one of {some(self.values)}"


def some(values: tuple[Any, ...], most: int = 12) -> str:
    """Values of the schema, which are public."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


class Date(Column):
    """A day, as the time from it to a public day of reference."""

    kind: Literal["date"]
    reference: Day
    unit: Literal["days", "months", "years"]
    range: Interval
    format: Formats = Field(default=(), description="as for strptime, one or several, e.g. %d.%m.%Y; default: ISO 8601")
    missing: Day | None = None

    @model_validator(mode="after")
    def _days(self) -> Date:
        check_formats(self.format)
        if self.missing is not None:
            age = self.age(self.missing.toordinal())
            within(age, self.range, f"missing = {self.missing} is {age:.1f} {self.unit}")
        return self

    def age(self, ordinal: Any) -> Any:
        return (self.reference.toordinal() - ordinal) / DAYS[self.unit]

    def fill(self) -> float | None:
        return None if self.missing is None else float(self.missing.toordinal())

    def parsed(self, cells: pd.Series) -> Cells:
        return read_cells(cells, partial(day, forms=self.format))

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        return scaled(self.age(values), scaled_to(self.range))[:, None]

    def allowed(self) -> str:
        return f"a day as {' or '.join(self.format) or '2024-12-31'}"


class Flag(Column):
    """True or false, in the usual spellings."""

    kind: Literal["flag"]
    missing: StrictBool | None = None

    def fill(self) -> float | None:
        return None if self.missing is None else float(self.missing)

    def parsed(self, cells: pd.Series) -> Cells:
        return read_cells(cells, flag)

    def encoded(self, values: Float64[np.ndarray, " n"], constants: Constants | None) -> Float[np.ndarray, "n k"]:
        return values[:, None]

    def allowed(self) -> str:
        return "true or false, yes or no, 1 or 0"


class Ignore(Part):
    """A column that may be there and is never read."""

    kind: Literal["ignore"]


Kind = Annotated[Number | Category | Ordered | Date | Flag | Ignore, Field(discriminator="kind")]
KINDS: dict[str, type[Part]] = {
    "number": Number, "category": Category, "ordered": Ordered, "date": Date, "flag": Flag, "ignore": Ignore,
}  # fmt: skip
