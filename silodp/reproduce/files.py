"""Experiment files: where they lie, and how one extends another.

    extends = "spider-fig8"  # a paper's experiment, or the path of a TOML file, seen from this one

takes everything from that file. What is said anew counts: tables ([levels], [search], [quick], [config.data], ...) are
merged key by key, everything else is replaced, lists as a whole. Lists grow under `add`, and only there:

    [[add.lines]]  # after the lines of spider-fig8; panels, metrics, published, claims, notes, axes, seeds likewise
    name = "MB-PSGM-FG"

A panel that is added is shown even where `only` leaves out others. Units that are as they were in the other file keep
their fingerprints, so their results are not computed again; a new metric or seed changes every unit.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from silodp.config import Section
from silodp.errors import ConfigError
from silodp.reproduce.experiment import Experiment

PAPERS = resources.files("silodp.reproduce") / "papers"
LISTS = [name for name, field in Experiment.model_fields.items() if get_origin(field.annotation) is list]


def names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in PAPERS.iterdir() if entry.name.endswith(".toml"))


def load_experiment(name: str) -> Experiment:
    """A paper's experiment by name, or one of your own by the path of its TOML file."""
    called = {"name": Path(name).name.removesuffix(".toml")}
    try:
        experiment = Experiment.model_validate(called | described(name) | {"file": name})
    except ValidationError as error:
        raise ConfigError(f"experiment {name}: {explained(error)}") from None
    if experiment.only is None:
        return experiment
    panels = [panel for panel in experiment.panels if panel.name in experiment.only]
    return experiment.model_copy(update={"panels": panels})


def described(name: str, folder: Path | None = None, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """The file's tree, with all that it takes from the file it extends; `below`: the files that led here."""
    said = f"experiment {below[-1]}: extends = {name!r}" if below else f"experiment {name!r}"
    file = located(name, folder or Path(), said)
    if str(file) in below:
        raise ConfigError(f"{said}: the files extend each other in a circle; take one `extends` out")
    tree = parsed(file)
    parent = tree.pop("extends", None)
    if parent is None and "add" in tree:
        raise ConfigError(f"{said}: [add] adds to what another file says; give extends, or write [[lines]] and so on")
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise ConfigError(f"{said}: extends = {parent!r}: must be the name of an experiment or a TOML file")
    return extended(described(parent, Path(str(file)).parent, (*below, str(file))), tree, said)


def located(name: str, folder: Path, said: str) -> Traversable:
    if not name.endswith(".toml"):
        if name not in names():
            raise ConfigError(f"{said}: unknown; known: {', '.join(names())}, or the path of a TOML file")
        return PAPERS / f"{name}.toml"
    file = (folder / name).resolve()
    if not file.is_file():
        raise ConfigError(f"{said}: there is no file {file}")
    return file


def parsed(file: Traversable) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment {file}: not valid TOML: {error}") from None


def extended(old: dict[str, Any], new: dict[str, Any], said: str) -> dict[str, Any]:
    """What a file says over what the file it extends does: see above."""
    more = additions(new, said)
    tree = merged(old, {key: value for key, value in new.items() if key != "add"})
    if "panels" in more and "only" in old and "only" not in new:
        tree["only"] = [*old["only"], *(panel.get("name") for panel in more["panels"] if isinstance(panel, dict))]
    return tree | {key: [*listed(tree, key, said), *values] for key, values in more.items()}


def additions(new: dict[str, Any], said: str) -> dict[str, list[Any]]:
    more = new.get("add", {})
    if not isinstance(more, dict) or not all(isinstance(values, list) for values in more.values()):
        raise ConfigError(f"{said}: add = {more!r}: must hold lists, written [[add.lines]] or add.notes = [...]")
    for key in more:
        if key not in LISTS:
            raise ConfigError(f"{said}: add.{key}: nothing can be added to it; known: {', '.join(LISTS)}")
        if key in new:
            raise ConfigError(f"{said}: {key} and add.{key}: the one replaces the list, the other adds; give one")
    return more


def listed(tree: dict[str, Any], key: str, said: str) -> list[Any]:
    """The list that is there, or what it is when nobody gives it."""
    field = Experiment.model_fields[key]
    there = tree.get(key, [] if field.is_required() else field.default)
    if not isinstance(there, list):
        raise ConfigError(f"{said}: {key} = {there!r}: must be a list")
    return there


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    tables = {key for key in old.keys() & new.keys() if isinstance(old[key], dict) and isinstance(new[key], dict)}
    return old | new | {key: merged(old[key], new[key]) for key in tables}


def explained(error: ValidationError) -> str:
    """One line for the first thing that is wrong: place, value, and what would be right."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key; known: {', '.join(section_at(first['loc'][:-1]).model_fields)}"
    if first["type"] == "missing":
        return f"{where}: is missing"
    words = first["msg"].removeprefix("Value error, ")
    return f"{where} = {first['input']!r}: {words}" if where else words


def section_at(place: tuple[int | str, ...]) -> type[Section]:
    """The kind of table at a place such as ("lines", 3)."""
    section: type[Section] = Experiment
    for key in place:
        if isinstance(key, str):
            kind = section.model_fields[key].annotation
            section = next(t for t in (kind, *get_args(kind)) if isinstance(t, type) and issubclass(t, Section))
    return section
