"""What a bundle.json may say: each key by itself, and all of them beside each other.

A bundle may come from anywhere, and be damaged or edited. What is wrong is told by its key when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from silodp import registry
from silodp.config import ModelConfig
from silodp.data.kinds import Interval, Label
from silodp.data.schema import Schema
from silodp.errors import ConfigError, one_line
from silodp.front.labels import labels_of, sorted_classes
from silodp.parse import key_path
from silodp.report.files import REMEDY

MODEL = "model.safetensors"
DTYPE = r"^[|<>=]?(b1|[iuf][1248]|U\d{1,5}|O8?)$"  # of labels; a longer text would take memory for nothing

OBJECT = "must be an object of JSON"
WORDS = {
    "missing": "is missing",
    "dict_type": OBJECT,
    "model_type": OBJECT,
    "string_pattern_mismatch": "no type of labels",
    "too_short": "too few",
    "too_long": "too many",
}


class Told(BaseModel):
    """Types are taken at their word; keys that a later version adds are not looked at."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Features(Told):
    count: PositiveInt
    names: list[str] | None


class Options(Told):
    """Of the estimator; those that something hangs on when it is loaded, beside others."""

    model_config = ConfigDict(extra="allow")

    epsilon: float | None = None
    class_weight: list[Annotated[list[Label], Field(min_length=2, max_length=2)]] | None = None
    target_range: Interval | None = None


class Made(Told):
    model: str
    plan: str


class Promise(Told):
    made: Made


class Index(Told):
    estimator: str
    options: Options
    model: ModelConfig
    columns: dict[str, Any] | None = Field(alias="schema")  # pydantic keeps the name `schema` for itself
    features: Features
    inputs: PositiveInt
    plan: str
    certificate: Promise | None
    held_out: dict[str, Any] | None = None
    silos: Annotated[list[str], Field(min_length=2)] | None = None  # that have an intercept
    classes: Annotated[list[Label], Field(min_length=2)] | None = None
    classes_type: Annotated[str, Field(pattern=DTYPE)] | None = None
    versions: dict[str, str]
    files: dict[str, str]
    digest: str

    @property
    def outputs(self) -> int:
        return len(self.classes or [0])


def checked(told: Mapping[str, Any], estimators: Mapping[str, Any]) -> tuple[dict[str, Any], Index]:
    """What was told, with the schema's columns in the order of the features; an error names the first wrong key."""
    try:
        index = Index.model_validate(dict(told))
    except ValidationError as error:
        raise ConfigError(f"{first_of(error)}; {REMEDY}") from None
    if index.estimator not in estimators:
        raise ConfigError(f"estimator {index.estimator!r} is not known; install a later version of silodp")
    for problem in disagreements(index, estimators[index.estimator]):
        raise ConfigError(f"{problem}; {REMEDY}")
    taken = dict(told) | {"model": index.model.model_dump(mode="json", exclude_unset=True)}  # "3" was read as 3
    if index.columns is None:
        return taken, index
    ordered = in_order(index.columns["columns"], index.features.names or [])
    return taken | {"schema": index.columns | {"columns": ordered}}, index


def first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    words = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return one_line(f"{key_path(first['loc'])}: {WORDS.get(first['type'], words)}")


def disagreements(index: Index, kind: Any) -> Iterator[str]:
    """Keys that are right by themselves and not beside each other. `kind`: the estimator's class."""
    name = index.estimator
    unknown = sorted(index.options.model_fields_set - (set(kind().get_params()) - {"random_state"}))
    if unknown:
        yield f"options: {unknown[0]!r} is no option of a {name}"
    if "kind" not in index.model.model_fields_set or not registry.is_own("model", index.model.kind):
        yield "model.kind: no model of the library"
    if (index.classes is None) != (kind._task == "regression"):
        yield f"classes: a {name} has {'none' if index.classes else 'two or more'}"
    if index.classes is not None and not labels_agree(index.classes, index.classes_type):
        yield "classes: they occur twice, or are not of classes_type"
    if len(set(index.silos or ())) < len(index.silos or ()):
        yield "silos: one occurs twice"
    if index.certificate is not None:
        yield from of_another_run(index, index.certificate.made)
    elif index.options.epsilon is not None:
        yield "certificate: null, though an epsilon was given"
    yield from wrong_features(index) if index.columns is None else wrong_schema(index, kind._task)


def labels_agree(classes: list[Any], kind: str | None) -> bool:
    try:
        return kind is not None and labels_of(classes, kind).tolist() == classes and len(set(classes)) == len(classes)
    except (ValueError, TypeError, OverflowError, MemoryError):
        return False


def of_another_run(index: Index, made: Made) -> Iterator[str]:
    if made.model != index.files.get(MODEL):
        yield f"certificate.made.model: the certificate is of another model than {MODEL}"
    if made.plan != index.plan:
        yield "certificate.made.plan: the certificate is of another plan"


def wrong_features(index: Index) -> Iterator[str]:
    """Of features that were used as given."""
    names, count = index.features.names, index.features.count
    if count != index.inputs or (names is not None and len(names) != count):
        yield f"features: {count} are counted, {count if names is None else len(names)} named, inputs = {index.inputs}"
    if index.classes is None and index.options.target_range is None:
        yield "options.target_range: is missing, and there is no schema"


def wrong_schema(index: Index, task: str) -> Iterator[str]:
    """Of features that a schema encodes; `Schema.read` tells what is wrong with the schema itself."""
    schema = Schema.read(index.columns or {})
    names, encoded = index.features.names or [], len(schema.feature_names)
    if sorted(names) != sorted(schema.used) or index.features.count != len(names):
        yield "features: names and count are not those of the schema's columns"
    if encoded != index.inputs:
        yield f"inputs = {index.inputs}: the schema's columns give {encoded}"
    if schema.task != task or schema.private:
        yield f"schema: not of a fitted {index.estimator}: its target is for another, or a range is still private"
    elif index.classes is not None and sorted_classes(schema)[0].tolist() != index.classes:
        yield "classes: not those of the schema's target, in their order"


def in_order(columns: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Columns in the order of the features, because keys of JSON have none; ignored ones keep their places."""
    following, used = iter(names), set(names)
    order = [next(following) if name in used else name for name in columns]
    return {name: columns[name] for name in order}
