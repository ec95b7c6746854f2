"""One runnable case for every registered algorithm under each of its trust models: the conformance table's rows."""

from __future__ import annotations

from typing import Any

from silodp.algorithms import REGISTRY
from silodp.config import Config, parse_config

ROUNDS = 6
OPTIONS: dict[str, dict[str, Any]] = {name: entry.example for name, entry in REGISTRY.items()}
CASES = [(name, trust) for name, entry in REGISTRY.items() for trust in entry.trusts]


def case(name: str, trust: str, *, rounds: int = ROUNDS, private: bool = True, **changes: Any) -> Config:
    """The case's config on the fixture data; `changes` are algorithm options."""
    options = {"name": name, "rounds": rounds, "step_size": 0.3} | OPTIONS[name] | changes
    if trust == "shuffled" and options.get("batch") is None:
        options["weights"] = "size"  # all messages count alike
    privacy: dict[str, Any] = {"trust": trust, "delta": 1e-4}
    if private and REGISTRY[name].private:
        privacy["epsilon"] = 4.0
    tree = {
        "model": {"kind": "logistic"},
        "privacy": privacy,
        "algorithm": {key: value for key, value in options.items() if value is not None},
        "run": {"every": 2, "seed": 3},
    }
    return parse_config(tree)
