"""PAPERS: a file for each family, with its loop, what it releases, its theorem's choices, its printed noise and its
registry entries.

`find(name)` gives an algorithm's entry. `silodp.algorithms.Spider(rounds=20, clip=1.0)` and the like are the
`[algorithm]` section of a config as an object: what `silodp.train(algorithm=...)` takes.

Example:
    >>> import silodp
    >>> options = silodp.algorithms.Spider(rounds=20, step_size=0.3, clip=1.0, clip_difference=0.5)
    >>> options.name, options.rounds
    ('spider', 20)
    >>> "MBPSGMFG" in dir(silodp.algorithms)
    True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from silodp import registry
from silodp.config import AlgorithmConfig
from silodp.errors import ConfigError
from silodp.parse import parse_config

if TYPE_CHECKING:
    from silodp.algorithms.entry import Entry

_CAPITALS = {"gd", "sgd", "dp", "sdp", "ldp", "cdp", "svrg", "saga", "pl", "bvr", "l", "mb", "ce", "psgm", "fg"}


def class_name(name: str) -> str:
    """dp-gd -> DPGD, spider-alt -> SpiderAlt."""
    return "".join(part.upper() if part in _CAPITALS else part.capitalize() for part in name.split("-"))


_NAMES = {class_name(name): name for name in registry.OWN["algorithm"]}

__all__ = ["REGISTRY", "find", *_NAMES]


class Registry(Mapping[str, "Entry"]):
    """The library's own entries by name; a family's file is imported when one of its names is looked up."""

    def __getitem__(self, name: str) -> Entry:
        if name not in registry.algorithms():
            raise KeyError(name)
        return registry.find("algorithm", name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(registry.algorithms())

    def __len__(self) -> int:
        return len(registry.algorithms())


REGISTRY = Registry()


def find(name: str) -> Entry:
    """The entry of an algorithm: the library's own, registered, of another package, or `module:Class`."""
    if name == registry.AUTO:
        return replace(REGISTRY[registry.AUTO_IS], summary=registry.AUTO_SENTENCE, theory=None, printed=None)
    if name in REGISTRY:
        return REGISTRY[name]
    from silodp.algorithms.entry import Entry
    from silodp.core import Algorithm

    found = registry.find("algorithm", name)
    if isinstance(found, Entry):
        return found
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm.name = {name!r}: is no subclass of silodp.Algorithm")
    return Entry(found, **found.entry)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registered = _NAMES[name]

    def options(**given: Any) -> AlgorithmConfig:
        return parse_config({"algorithm": {"name": registered, **given}}).algorithm

    options.__name__ = options.__qualname__ = name
    options.__doc__ = f"The `[algorithm]` section of {registered}; keyword arguments are its keys."
    return options


def __dir__() -> list[str]:
    return __all__
