"""What is wrong with a schema, in one line for each mistake: the key, what it says, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from silodp.data.kinds import KINDS
from silodp.parse import LIMITS, shown

TARGET_KEYS = ("name", "classes", "range", "same", "unit", "case")
SCHEMA_KEYS = ("silo", "target", "columns")
WISHES = {
    "missing": "is missing",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": 'must be a table, e.g. {kind = "ignore"}',
    "too_short": "is empty; name at least one column",
}


def explained(error: ValidationError) -> list[str]:
    """The mistakes of all keys; of a key that fits none of several types, the first."""
    by_key: dict[str, ErrorDetails] = {}
    for each in error.errors():
        by_key.setdefault(_key(each), each)
    return [line for each in by_key.values() for line in _line(each).split("\n")]


def _path(error: ErrorDetails) -> list[str]:
    """Where it is, without the names that pydantic gives to the members of a union."""
    place = [str(part) for part in error["loc"]]
    if place[:1] == ["columns"] and len(place) > 2:
        place = [*place[:2], *place[3:4]]  # columns, name, kind, key, ...
    return place[:3] if place[:1] == ["columns"] else place[:2]


def _key(error: ErrorDetails) -> str:
    return ".".join(_path(error))


def _line(error: ErrorDetails) -> str:
    key, kind = _key(error), error["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_known(error)}"
    if kind == "union_tag_not_found":
        return f"{key}: kind is missing; give one of {', '.join(KINDS)}"
    if kind == "union_tag_invalid":
        tag = str(error.get("ctx", {}).get("tag"))
        return f"{key}.kind = {tag!r}: unknown{_meant(tag, KINDS)}; known: {', '.join(KINDS)}"
    if kind == "value_error":
        return _own_words(key, error)
    if kind == "missing":
        return f"{key}: {WISHES[kind]}; give it"
    return f"{key}{shown(error['input'])}: {_wish(error)}"


def _own_words(key: str, error: ErrorDetails) -> str:
    words = error["msg"].removeprefix("Value error, ")
    if not key or isinstance(error["input"], dict):
        return f"{key}: {words}" if key else words
    return f"{key}{shown(error['input'])}: {words}"


def _wish(error: ErrorDetails) -> str:
    if error["type"] in WISHES:
        return WISHES[error["type"]]
    for name, words in LIMITS.items():
        if name in error.get("ctx", {}):
            return f"must be {words} {error.get('ctx', {})[name]:g}"
    return "must be " + error["msg"].removeprefix("Input should be ")


def _known(error: ErrorDetails) -> str:
    place = error["loc"]
    names = TARGET_KEYS if place[0] == "target" else SCHEMA_KEYS
    if place[0] == "columns":
        names = tuple(KINDS[str(place[2])].model_fields)
    return f"{_meant(str(place[-1]), names)}; known: {', '.join(names)}"


def _meant(given: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
