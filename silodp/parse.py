"""A config's text: TOML in, checked, with one line for what is wrong; TOML out."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from silodp import registry
from silodp.config import Config, Section
from silodp.errors import ConfigError


def load_config(path: Path | str, overrides: list[str] | None = None) -> Config:
    """A TOML file with `section.key=value` overrides, checked."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist; give the path of a TOML file")
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return parse_config(with_overrides(tree, overrides or []))


def parse_config(tree: dict[str, Any]) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    check_names(config)
    check_own_options(config)
    return config


def named_parts(config: Config) -> dict[str, str]:
    """The parts that a config names, by kind."""
    options = config.algorithm
    named = {
        "algorithm": options.name,
        "channel": config.privacy.trust,
        "compressor": options.compressor,
        "randomizer": options.randomizer,
        "model": config.model.kind,
    }
    return {kind: name for kind, name in named.items() if name is not None}


def check_names(config: Config) -> None:
    """A name that nobody knows is found before anything is imported or run."""
    for kind, name in named_parts(config).items():
        registry.check(kind, name)


def check_own_options(config: Config) -> None:
    """A key that the library does not know is a mistake, unless a part from outside may know it.

    Those are checked when the part is built, against its own fields.
    """
    outside = {kind for kind, name in named_parts(config).items() if not registry.is_own(kind, name)}
    if not outside & {"algorithm", "compressor"}:
        for key in config.algorithm.own:
            raise ConfigError(f"algorithm.{key}: unknown key{suggestion(('algorithm', key))}")
    if "channel" not in outside:
        for key in config.privacy.own:
            raise ConfigError(f"privacy.{key}: unknown key{suggestion(('privacy', key))}")


def with_overrides(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`section.key=value`, the value read as TOML when it can be and as a string otherwise."""
    tree = {name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()}
    for override in overrides:
        path, equals, text = override.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set {override!r}: write section.key=value, e.g. algorithm.rounds=100")
        if not isinstance(tree.setdefault(section, {}), dict):
            raise ConfigError(f"{section} = {tree[section]!r}: must be a section, [{section}]")
        tree[section][key] = toml_value(text.strip())
    return tree


def toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


MOST_SHOWN = 12  # items of a list in an error: a longer one may be a column
LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
UNION_TAGS = ("literal[", "list[", "dict[", "constrained-", "function-")


def explain(error: ValidationError) -> str:
    """One line for the first thing that is wrong."""
    everything = error.errors()
    first = everything[0]
    if first["type"] == "extra_forbidden":
        return f"{key_path(first['loc'])}: unknown key{suggestion(first['loc'])}"
    # A value that fits none of several types gives an error for each: they are told together.
    same = [e for e in everything if e["loc"][:2] == first["loc"][:2]]
    path = max((key_path(e["loc"]) for e in same), key=lambda p: p.count("."))
    same = [e for e in same if key_path(e["loc"]) == path]
    wanted = list(dict.fromkeys(wish(e) for e in same))
    own_words = same[0]["type"] == "value_error"
    if own_words and isinstance(same[0]["input"], dict | Section):
        return f"{path}: {wanted[0]}"
    return f"{path}{shown(same[0]['input'])}: {'' if own_words else 'must be '}{' or '.join(wanted)}"


def shown(value: Any) -> str:
    """A config's value in an error; records that were given in its place are not shown."""
    return f" = {value!r}" if _is_plain(value) else f": a {type(value).__name__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_SHOWN and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= MOST_SHOWN and all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, int, float, bool)


def wish(error: ErrorDetails) -> str:
    """What would be right, in few words; for a number its whole range."""
    if error["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"):
        limits = [
            f"{words} {getattr(constraint, name):g}"
            for constraint in fields_of(error["loc"])[str(error["loc"][1])].metadata
            for name, words in LIMITS.items()
            if getattr(constraint, name, None) is not None
        ]
        return " ".join(["a finite number", " and ".join(limits)]).strip()
    return error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")


def key_path(location: tuple[int | str, ...]) -> str:
    """`section.key`, without the names that pydantic gives to the members of a union."""
    parts = map(str, location)
    return ".".join(p for p in parts if p not in ("str", "int", "float", "bool") and not p.startswith(UNION_TAGS))


def fields_of(location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """The keys of a section, or the sections."""
    known: Any = Config
    for part in location[:1]:
        annotation: Any = known.model_fields[str(part)].annotation
        known = next(iter(get_args(annotation)), annotation)  # a section that may be left out is a union with None
    return known.model_fields


def suggestion(location: tuple[int | str, ...]) -> str:
    """What was probably meant, and what there is."""
    names = list(fields_of(location[:-1]))
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{meant}; known: {', '.join(names)}"


FILLED_BY_AUTO = ("algorithm", "model", "whiten")  # sections


def to_toml(config: Config) -> str:
    """The whole config as TOML, defaults too: it means the same under a version with other defaults."""
    # Rounds that the theorem is to choose are no default: they are left out, so that it chooses again.
    chosen = {"rounds"} if config.algorithm.theory else set()
    left_out = {"algorithm": chosen - config.algorithm.model_fields_set}
    tree = config.model_dump(exclude_none=True, exclude=left_out)
    names = {config.algorithm.name, *config.sweep.grid.get("algorithm.name", ())}
    if registry.AUTO in names:  # it takes what is said for the user's choice: defaults here are no choices
        said = config.model_dump(exclude_unset=True, exclude_none=True)
        tree |= {name: said.get(name, {}) for name in FILLED_BY_AUTO if name in tree}
    filled = {name: {k: v for k, v in section.items() if v not in ([], {})} for name, section in tree.items()}
    sections = [
        f"[{name}]\n" + "".join(f"{key} = {toml_literal(value)}\n" for key, value in section.items())
        for name, section in filled.items()
    ]
    return "\n".join(sections)


def toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_literal(name)


def toml_literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_literal(k)} = {toml_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
