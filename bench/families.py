"""The library's other families for `python -m bench.utility`: at their best, and as their papers prescribe.

These are whole runs of the library, silo by silo. All settings and epsilons of a family under one trust model differ in
traced numbers only, so they share one compiled program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.averages import DELTA, Ground
from bench.tasks import LONGEST, Split
from silodp.data import FederatedData
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.run.sweep import run_configs

BOTH, SILOS = ("trusted", "untrusted"), ("untrusted",)
TOGETHER = 24  # settings that are in memory at once
WORST = -9.0  # of a setting that diverged
UNIT = 0.15  # steps and clip norms of squared losses are so many times, and one over it, those given
Cell = tuple[float, str]


@dataclass(frozen=True)
class Family:
    """An algorithm, what its search tries, and the rest of its options: of the smallest silo's records and the
    parameters."""

    algorithm: str
    trusts: tuple[str, ...]
    rounds: int
    search: dict[str, tuple[float, ...]]
    options: Callable[[int, int], dict[str, Any]]
    told: str  # the options, for the page

    @property
    def points(self) -> list[dict[str, float]]:
        return [dict(zip(self.search, values, strict=True)) for values in itertools.product(*self.search.values())]

    @property
    def sentence(self) -> str:
        tried = "; ".join(f"{name} {', '.join(f'{v:g}' for v in values)}" for name, values in self.search.items())
        return f"{self.algorithm}, {self.rounds} rounds, {self.told}; {tried} ({', '.join(self.trusts)})"


# Six points each: most of the time goes into plans and accounts of single settings.
STEPS, CLIPS = (1.0, 4.0, 16.0), (0.1, 0.5)
DIFFERENCES = {"step_size": STEPS, "clip": (0.5,), "clip_difference": (0.1, 0.4)}
FAMILIES = {
    "dp-sgd": Family(
        "dp-sgd", BOTH, 60, {"step_size": (2.0, 8.0, 32.0), "clip": CLIPS},
        lambda n, d: {"batch": max(1, n // 4), "average": 15},
        "Poisson batches of a quarter, mean of the last 15 iterates",
    ),
    "spider": Family(
        "spider", BOTH, 24, DIFFERENCES, lambda n, d: {"restart": 6, "average": 6},
        "a fresh gradient every 6, mean of the last 6 iterates",
    ),
    "diff2": Family(
        "diff2-gd", BOTH, 24, DIFFERENCES, lambda n, d: {"restart": 12, "average": 6},
        "a fresh gradient every 12, mean of the last 6 iterates",
    ),
    "local steps": Family(
        "local-sgd", SILOS, 10, {"step_size": STEPS, "clip": CLIPS},
        lambda n, d: {"local_steps": 4, "sampling": "full", "average": 3},
        "4 local steps on all records, mean of the last 3 iterates",
    ),
    "soteria": Family(
        "soteria-gd", SILOS, 60, {"step_size": STEPS, "clip": CLIPS},
        lambda n, d: {"compressor": "rand-k", "keep": max(1, d // 4), "average": 15},
        "rand-k that keeps a quarter, shifted, mean of the last 15 iterates",
    ),
    "mu2": Family(
        "mu2", BOTH, 30, {"step_size": (0.1, 0.3, 1.0), "clip": (0.5, 2.0)}, lambda n, d: {"diameter": 20.0},
        "one pass in a ball of diameter 20",
    ),
}  # fmt: skip


def searched(made: Split, method: str, cells: Sequence[Cell], seed: int) -> list[list[float]]:
    """A row of scores for each cell: every point of the family's search."""
    return np.reshape(run_scores(made.kind, made.data, trees_of(made, method, cells, seed)), (len(cells), -1)).tolist()


def trees_of(made: Split, method: str, cells: Sequence[Cell], seed: int) -> list[dict[str, Any]]:
    family = FAMILIES[method]
    options = {"name": family.algorithm, "rounds": family.rounds, "weights": "size"}
    options |= family.options(min(made.sizes), ground_of(made).facts().parameters or 0)
    return [
        tree_of(made.kind, cell, seed, options | {name: scaled(made.kind, name, v) for name, v in point.items()})
        for cell, point in itertools.product(cells, family.points)
    ]


def ground_of(made: Split) -> Ground:
    return Ground(made.kind, made.train, made.test, made.sizes)


def scaled(kind: str, name: str, value: float) -> float:
    """Gradients of squared losses are longer."""
    if kind != "linear" or name == "diameter":
        return value
    return value * UNIT if name == "step_size" else value / UNIT


def tree_of(kind: str, cell: Cell, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    privacy: dict[str, Any] = {"epsilon": cell[0], "delta": DELTA, "trust": cell[1]}
    if "clip_difference" in options:  # two streams: then the library can tell how to share the budget
        privacy["split"] = "optimal"
    run = {"seed": seed, "every": options.get("rounds", 1)}  # the last row is all that is looked at
    return {"model": {"kind": kind}, "privacy": privacy, "algorithm": options, "run": run}


def run_scores(kind: str, data: FederatedData, trees: Sequence[dict[str, Any]]) -> list[float]:
    """Accuracy, or R^2, on the test records, of whole runs of the library."""
    configs = [parse_config(tree) for tree in trees]
    ends = [outcome.history[-1] for outcome in run_configs(configs, data, together=TOGETHER)]
    assert data.test is not None
    variance = float(np.var(data.test.targets))
    found = [1 - end["test_loss"] / variance if kind == "linear" else end["test_accuracy"] for end in ends]
    return np.maximum(np.nan_to_num(found, nan=WORST, neginf=WORST), WORST).tolist()


# --- what the papers prescribe ------------------------------------------------------------------------------

DEFAULTS = "papers' defaults"
MOST_ROUNDS = 100  # of those that a theorem asks for; the rest is then chosen to go with them
LENGTH = math.sqrt(LONGEST**2 + 1)  # of a record with its constant
# gradient_bound and smoothness of a record's loss. A squared loss has no bound: residuals of one deviation are taken.
CONSTANTS = {
    "logistic": (LENGTH, LENGTH**2 / 4),
    "softmax": (math.sqrt(2) * LENGTH, LENGTH**2 / 2),
    "linear": (2 * LENGTH, 2 * LENGTH**2),
}
PRESCRIBED: dict[str, tuple[tuple[str, ...], Callable[[int], dict[str, Any]]]] = {
    "dp-gd": (BOTH, lambda d: {}),
    "spider": (BOTH, lambda d: {}),
    "diff2-gd": (BOTH, lambda d: {}),
    "mu2": (BOTH, lambda d: {"diameter": 10.0}),
    "soteria-sgd": (SILOS, lambda d: {"compressor": "rand-k", "keep": max(1, d // 4)}),
}


def prescribed_under(trust: str) -> list[str]:
    return [name for name, (trusts, _) in PRESCRIBED.items() if trust in trusts]


def defaults(made: Split, cells: Sequence[Cell], seed: int) -> list[list[float]]:
    """A row for each cell: the algorithms that there are under its trust model, each by its theorem's choices."""
    asked = [(cell, name) for cell in cells for name in prescribed_under(cell[1])]
    found = iter(run_scores(made.kind, made.data, [prescribed(made, *each, seed) for each in asked]))
    return [[next(found) for _ in prescribed_under(cell[1])] for cell in cells]


def prescribed(made: Split, cell: Cell, name: str, seed: int) -> dict[str, Any]:
    facts, (bound, smooth) = ground_of(made).facts(), CONSTANTS[made.kind]
    options = {"name": name, "theory": True, "gradient_bound": bound, "smoothness": smooth}
    options |= PRESCRIBED[name][1](facts.parameters or 0)
    asked = make_plan(parse_config(tree_of(made.kind, cell, seed, options)), facts).config.algorithm.rounds
    return tree_of(made.kind, cell, seed, options | {"rounds": min(asked, MOST_ROUNDS)})
