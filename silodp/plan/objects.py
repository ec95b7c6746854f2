"""From Python objects to a config.

`silodp.train(algorithm=..., channel=..., epsilon=...)` and `silodp.train(config)` are the same run, because both become
the same `Config`: a dict or a TOML file is the objects written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import equinox as eqx

from silodp.algorithms import find
from silodp.channels import Channel
from silodp.config import AlgorithmConfig, Config
from silodp.data.types import FederatedData
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.models import Model
from silodp.parse import load_config, parse_config
from silodp.plan.parts import channel_of

Described = Config | Mapping[str, Any] | Path | str
DataLike = FederatedData | Mapping[str, Any]
ModelLike = Model | Mapping[str, Any] | str


class Objects(TypedDict, total=False):
    """What may stand in the place of a config.

    algorithm: what `silodp.algorithms.Spider(...)` and the like give, a dict of the algorithm section, or a name.
    channel: `silodp.channels.Untrusted()` and the like, or the name of a trust model (default: untrusted).
    epsilon, delta, gdp: the target; without one the run is not private. privacy: further keys of that section.
    seed: of the simulation. run: further keys of the run section. grid, select, private_trials: of a sweep.
    scale, whiten, intercepts, evaluate: dicts of those sections, stages beside the training.
    """

    algorithm: AlgorithmConfig | Mapping[str, Any] | str
    channel: Channel | str
    epsilon: float
    delta: float
    gdp: float
    privacy: Mapping[str, Any]
    seed: int
    run: Mapping[str, Any]
    grid: Mapping[str, Sequence[float | bool | str]]
    select: str
    private_trials: float
    scale: Mapping[str, Any]
    whiten: Mapping[str, Any]
    intercepts: Mapping[str, Any]
    evaluate: Mapping[str, Any]


# Single keys, and whole sections.
KEYS = {
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
    "gdp": "privacy.gdp",
    "seed": "run.seed",
    "grid": "sweep.grid",
    "select": "sweep.select",
    "private_trials": "sweep.private_trials",
}
STAGES = ("scale", "whiten", "intercepts", "evaluate")
SECTIONS = ("privacy", "run", *STAGES)


class Asked(NamedTuple):
    """A config, and the data and the model where they are objects."""

    config: Config
    data: FederatedData | None
    model: Model | None


def asked(
    config: Described | None, data: DataLike | None, model: ModelLike | None, objects: Mapping[str, Any]
) -> Asked:
    """What `train`, `sweep` and `account` were asked for, as a config or as objects."""
    refuse_unknown(objects)
    loaded = data if isinstance(data, FederatedData) else None
    made = model if isinstance(model, Model) else None
    described = {} if loaded is not None or data is None else {"data": data}
    described |= {} if made is not None or model is None else {"model": model}
    if config is None:
        return Asked(config_from(**described, **objects), loaded, made)
    if described or objects:
        given = ", ".join([*described, *objects])
        raise ConfigError(f"{given}: given beside a config; put it into the config, or give objects only")
    return Asked(as_config(config), loaded, made)


def as_config(config: Described) -> Config:
    if isinstance(config, Config):
        return config
    return load_config(config) if isinstance(config, str | Path) else parse_config(dict(config))


def config_from(
    *, data: Mapping[str, Any] | None = None, model: Mapping[str, Any] | str | None = None, **objects: Any
) -> Config:
    """The config that these objects are."""
    if objects.get("algorithm") is None:
        raise ConfigError("algorithm is missing: give a config, or e.g. algorithm=silodp.algorithms.Spider(...)")
    if isinstance(objects.get("channel"), type):
        name = objects["channel"].__name__
        raise ConfigError(f"channel = {name}: is a class; give an object, {name}(...)")
    channel, values = objects.get("channel"), dict(section_keys("algorithm", algorithm_section(objects["algorithm"])))
    put(values, section_keys("data", data or {}))
    put(values, section_keys("model", {"kind": model} if isinstance(model, str) else model or {}))
    for section in SECTIONS:
        put(values, section_keys(section, objects.get(section) or {}))
    put(values, {KEYS[name]: value for name, value in objects.items() if name in KEYS and value is not None})
    put(values, channel.options() if isinstance(channel, Channel) else {"privacy.trust": channel} if channel else {})
    tree = nested(values)
    for section in STAGES:
        if objects.get(section) is not None:
            tree.setdefault(section, {})  # {}: its defaults
    config = parse_config(tree)
    if isinstance(channel, Channel):
        check_same(channel, config)
    return config


def algorithm_section(given: AlgorithmConfig | Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(given, str):
        return {"name": given}
    return given.model_dump(exclude_unset=True) if isinstance(given, AlgorithmConfig) else given


HINTS = {
    "algorithm": "a name, or e.g. silodp.algorithms.Spider(rounds=10, ...)",
    "data": 'e.g. {"source": "wbcd"}, or what silodp.load_data gives',
    "model": "the name of a kind, or a silodp.Model",
}


def section_keys(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(keys, Mapping):
        hint = f", {HINTS[section]}" if section in HINTS else ""
        raise ConfigError(f"{section} = {keys!r}: must be a dict of the section's keys{hint}")
    return {f"{section}.{key}": value for key, value in keys.items() if value is not None}  # None says nothing


def put(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if key in values and values[key] != value:
            raise ConfigError(f"{key}: given twice, as {values[key]!r} and as {value!r}; leave one of them out")
        values[key] = value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        tree.setdefault(section, {})[key] = value
    return tree


def check_same(channel: Channel, config: Config) -> None:
    """The config must give this very channel back: nothing that the object says may be lost."""
    built = channel_of(config, find(config.algorithm.name))
    if type(built) is not type(channel):
        raise ConfigError(
            f"channel = {type(channel).__name__}: with these options it would be {type(built).__name__}; "
            "say compressor and randomizer in the channel only"
        )
    if not eqx.tree_equal(built, channel):
        raise ConfigError(
            f"channel = {type(channel).__name__}: holds values that a plan fills in (multipliers and the like); "
            "leave them out"
        )


def refuse_unknown(objects: Mapping[str, Any]) -> None:
    for name in objects:
        if name not in Objects.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}; known: {', '.join(Objects.__annotations__)}")


def facts_of(data: FederatedData, parameters: int | None = None) -> Facts:
    """What everybody knows about the data."""
    names = tuple(silo.name for silo in data.silos)
    return Facts(data.sizes, names, data.record, max(1, len(data.classes)), data.task, parameters)
