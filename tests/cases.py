"""One runnable case for every registered algorithm under each of its trust models: the conformance table's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from silodp.algorithms import REGISTRY
from silodp.config import Config
from silodp.parse import parse_config
from silodp.plan.plan import Plan

ROUNDS = 6
OPTIONS: dict[str, dict[str, Any]] = {name: entry.example for name, entry in REGISTRY.items()}
CASES = [(name, trust) for name, entry in REGISTRY.items() for trust in entry.trusts or ()]


def first_of_its_kind() -> set[tuple[str, str]]:
    """Cases whose class and channel no earlier case has: the others are the same code under another name."""
    kinds: dict[Any, tuple[str, str]] = {}
    for name, trust in CASES:
        entry = REGISTRY[name]
        options = tuple(option in entry.example for option in ("compressor", "local_steps", "epochs"))
        kind = (entry.build, trust, options, entry.randomizer, entry.private)
        kinds.setdefault(kind, (name, trust))
    return set(kinds.values())


def once_each(cases: list[tuple], also_slow: Callable[[str, str], bool] = lambda name, trust: False) -> list:
    """The same rows, those that repeat a kind marked slow."""
    first = first_of_its_kind()
    quick = lambda name, trust: (name, trust) in first and not also_slow(name, trust)
    return [pytest.param(*row, marks=() if quick(*row[:2]) else pytest.mark.slow) for row in cases]


def case(name: str, trust: str, *, rounds: int = ROUNDS, private: bool = True, **changes: Any) -> Config:
    """The case's config on the fixture data; `changes` are algorithm options."""
    options = {"name": name, "rounds": rounds, "step_size": 0.3} | OPTIONS[name] | changes
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


def with_test_seed(plan: Plan) -> Plan:
    """The same run in message mode. A silo takes a seed only when the config says that the run is a test."""
    run = plan.config.run.model_copy(update={"mode": "messages", "test_seed": True})
    return replace(plan, config=plan.config.model_copy(update={"run": run}))
