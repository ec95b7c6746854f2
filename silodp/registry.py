"""Parts by name: the library's own, those that a program registers, and those of other packages.

A config names an algorithm, a trust model, a compressor, a randomizer or a model. A name is looked up among

1. the library's own parts,
2. what `silodp.register(...)` was given in this process,
3. entry points of installed packages, in the groups silodp.algorithms, silodp.channels, ... (KINDS),
4. `module:Class`, imported as `python -m` would find it.

2 to 4 run code from outside, so whoever chooses the name chooses the code. In a process that answers others (a silo),
or that reads a plan which others have written, `close` refuses them all, except what its own operator has listed.
Nothing here imports JAX.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from silodp.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The config key that names a part of each kind.
KINDS = {
    "algorithm": "algorithm.name",
    "channel": "privacy.trust",
    "compressor": "algorithm.compressor",
    "randomizer": "algorithm.randomizer",
    "model": "model.kind",
}

# Where an algorithm's entry stands: the family's file, and the names it defines (tests compare the two).
FAMILIES: dict[str, tuple[str, ...]] = {
    "gradient": ("gd", "dp-gd", "mb-sgd", "dp-sgd", "prox-sgd", "sdp-prox-sgd"),
    "local": ("local-sgd",),
    "differences": ("diff2-gd", "diff2-bvr-l-sgd", "spider", "spider-alt", "sdp-spider"),
    "svrg": ("prox-svrg", "prox-pl-svrg", "sdp-prox-svrg", "sdp-prox-pl-svrg"),
    "soteria": (
        "soteria-gd", "soteria-sgd", "soteria-svrg", "soteria-saga", "cdp-sgd", "ldp-sgd", "ldp-svrg",
    ),
    "mu2": ("mu2",),
    "psgm": ("mb-psgm", "ce-psgm", "mb-psgm-fg", "ce-psgm-fg"),
}  # fmt: skip

# What the methods of a family have in common.
SENTENCES = {
    "gradient": "the server takes a step along a noised gradient in every round (gd, mb-sgd: without noise)",
    "local": "silos take noised steps of their own and the server averages their models",
    "differences": "noise goes on what changed since the last point, with a fresh gradient every `restart` rounds",
    "svrg": "noise goes on the difference to an anchor, for losses with any prox",
    "soteria": "noised messages are compressed before they are sent (ldp-sgd, ldp-svrg: the same, uncompressed)",
    "mu2": "convex losses: one pass over the records with corrected momentum, on a ball",
    "psgm": "momentum is built from noised differences, with or without local steps",
}

# A name that becomes an algorithm once public facts are known (silodp.plan.auto): for tables, DP-GD.
AUTO, AUTO_IS = "auto", "dp-gd"
AUTO_SENTENCE = "everything is chosen from public facts: features scaled or whitened by private moments, then dp-gd"

# Models that are one matrix on the features.
LINEAR = ("linear", "ridge", "logistic", "softmax")

OWN: dict[str, dict[str, str]] = {
    "algorithm": {AUTO: "silodp.algorithms.gradient:ENTRIES"}
    | {name: f"silodp.algorithms.{family}:ENTRIES" for family, all_ in FAMILIES.items() for name in all_},
    "channel": {
        "trusted": "silodp.channels.trusted:Trusted",
        "untrusted": "silodp.channels.untrusted:Untrusted",
        "aggregated": "silodp.channels.aggregated:Aggregated",
        "shuffled": "silodp.channels.shuffled:Shuffled",
    },
    "compressor": {
        "identity": "silodp.compressors:Identity",
        "rand-k": "silodp.compressors:RandK",
        "qsgd": "silodp.compressors:QSGD",
        "natural": "silodp.compressors:Natural",
    },
    "randomizer": {
        "duchi": "silodp.channels.randomizers:Duchi",
        "privunit": "silodp.channels.randomizers:PrivUnitG",
        "pvec": "silodp.channels.pvec:Summed",
    },
    "model": dict.fromkeys((*LINEAR, "mlp", "cnn"), "silodp.models:build_model"),
}

# Named data and ways to divide it: here too, so that they are listed without pandas (tests compare).
DATASETS = ("wbcd", "mnist", "a9a", "california", "gas-turbine", "blogfeedback", "covtype", "kddcup99", "cifar10")
PARTITIONS = ("iid", "by-label", "by-class", "label-pairs", "label-pairs-shared", "dirichlet", "round-robin")

_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
_allowed: set[str] | None = None  # of names from outside; None: all


def register(name: str, part: Any, *, kind: str | None = None) -> Any:
    """Make a part known under a name, for configs that are run in this process.

    Args:
        name: what a config will call it; a name of the library's own cannot be taken.
        part: a subclass of `silodp.Algorithm`, `silodp.Channel`, `silodp.Compressor` or of a randomizer, a function
            from facts to a `silodp.Model`, or "module:Class".
        kind: "algorithm", "channel", "compressor", "randomizer" or "model"; worked out from the class when left out.

    Returns:
        The part, so that it may be used as `silodp.register("mine", Mine)` below the class.

    Example:
        >>> import silodp
        >>> _ = silodp.register("tiny-gd", "silodp.algorithms.gradient:GradientDescent", kind="algorithm")
        >>> silodp.registry.is_known("algorithm", "tiny-gd")
        True
    """
    kind = kind or kind_of(part)
    if kind not in KINDS:
        raise ConfigError(f"register: kind = {kind!r}: unknown; known: {', '.join(KINDS)}")
    if name in OWN[kind]:
        raise ConfigError(f"register: {name!r} is a name of the library's own; give another")
    if not name or ":" in name:
        raise ConfigError(f"register: name = {name!r}: give a name without ':'")
    _registered[kind][name] = part
    return part


def close(allowed: Iterable[str] = ()) -> None:
    """From now on nothing from outside is imported in this process, except names that its operator lists."""
    global _allowed
    _allowed = set(allowed)


def is_closed() -> bool:
    return _allowed is not None


def algorithms() -> list[str]:
    """The library's own, without the name that becomes one of them."""
    return [name for name in OWN["algorithm"] if name != AUTO]


def names(kind: str) -> list[str]:
    """The names of one kind that can be used here, the library's own first."""
    return [*OWN[kind], *_registered[kind], *(point.name for point in _entry_points(kind))]


def is_own(kind: str, name: str) -> bool:
    return name in OWN[kind]


def is_known(kind: str, name: str) -> bool:
    """Whether the name can be looked up; nothing is imported. What is installed is searched last: that takes long."""
    known = ":" in name or name in OWN[kind] or name in _registered[kind]
    return known or any(point.name == name for point in _entry_points(kind))


def check(kind: str, name: str) -> None:
    """Refuse a name that nobody knows, before anything is imported."""
    if not is_known(kind, name):
        known = names(kind)
        close = difflib.get_close_matches(name, known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{KINDS[kind]} = {name!r}: unknown{meant}; known: {', '.join(known)}, or MODULE:CLASS")


def find(kind: str, name: str) -> Any:
    """The part of that name: the library's own object, or the class or function from outside."""
    check(kind, name)
    if name in OWN[kind]:
        return _imported(KINDS[kind], OWN[kind][name])
    _refuse_unlisted(KINDS[kind], name)
    if name in _registered[kind]:
        part = _registered[kind][name]
        return _imported(KINDS[kind], part) if isinstance(part, str) else part
    for point in _entry_points(kind):
        if point.name == name:
            return point.load()
    return _imported(KINDS[kind], name)


def _refuse_unlisted(key: str, name: str) -> None:
    if _allowed is not None and name not in _allowed:
        raise ConfigError(f"{key} = {name!r}: not the library's own, and not listed by this silo's operator")


def function(key: str, path: str) -> Any:
    """What "module:name" stands for, where a config's `key` takes the user's own code."""
    _refuse_unlisted(key, path)
    return _imported(key, path)


PLAIN = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


def check_option(key: str, value: Any, annotation: Any) -> None:
    """Refuse a value that is not what the field of a part is annotated with, where that is a plain type."""
    told = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = [kind for kind in map(str.strip, told.split("|")) if kind != "None"]
    found = type(value.item() if hasattr(value, "item") else value).__name__
    fits = found in kinds or (found == "int" and "float" in kinds)
    if value is not None and not fits and PLAIN.keys() >= set(kinds):
        raise ConfigError(f"{key} = {value!r}: must be {' or '.join(PLAIN[kind] for kind in kinds)}")


def path_of(kind: str, name: str) -> str:
    """`name` or, for a registered part, the "module:Class" under which another process finds it."""
    part = _registered[kind].get(name, name)
    if isinstance(part, str):
        return part
    if part.__module__ == "__main__":
        raise ConfigError(
            f"{KINDS[kind]} = {name!r}: defined in the program that runs; a silo's process cannot import it: "
            "move it into a module"
        )
    return f"{part.__module__}:{part.__qualname__}"


def name_of(kind: str, part: type) -> str:
    """The name under which a config finds this class."""
    path = f"{part.__module__}:{part.__qualname__}"
    known = OWN[kind] | _registered[kind]
    name = next((name for name, home in known.items() if home is part or home == path), path)
    if "<locals>" in name:
        raise ConfigError(f"{part.__name__}: defined inside a function; give it a name with silodp.register(...)")
    return name


def _imported(key: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    if "" not in sys.path and not module.startswith("silodp."):
        sys.path.insert(0, "")  # a module beside the config, as `python -m` would find it
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key} = {path!r}: cannot be imported ({error})") from None


def _entry_points(kind: str) -> Iterable[EntryPoint]:
    from importlib import metadata  # here: `silodp --help` and `list` look nothing up

    return metadata.entry_points(group=f"silodp.{kind}s")


# Their base classes by name: whoever looks a part up need not import what all parts need.
BASES = {
    "silodp.core:Algorithm": "algorithm",
    "silodp.channels.channel:Channel": "channel",
    "silodp.compressors:Compressor": "compressor",
    "silodp.channels.randomizers:Randomizer": "randomizer",
}


def kind_of(part: Any) -> str:
    """What a class or function is: which kind of part it can be registered as."""
    if isinstance(part, type):
        for base in part.__mro__:
            if kind := BASES.get(f"{base.__module__}:{base.__qualname__}"):
                return kind
    elif callable(part):
        return "model"
    raise ConfigError(f"register: {part!r}: cannot tell what it is; give kind = one of {', '.join(KINDS)}")
