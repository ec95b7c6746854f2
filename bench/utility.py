"""`python -m bench.utility [TASK ...] [--quick]`: what `auto` reaches at an epsilon, beside DP-GD tuned on the tests.

Every cell is kept in bench/utility.json as soon as it is measured, so that a stopped run goes on where it was. Features
are standardised by means and deviations of the training records, which no epsilon covers: the same for all methods.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LinearRegression, LogisticRegression

from silodp.data import FederatedData
from silodp.data.datasets import load_dataset
from silodp.parse import parse_config
from silodp.run.sweep import run_configs

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "utility.json", HERE.parent / "docs" / "utility.md"
EPSILONS, TRUSTS = (0.5, 1.0, 3.0, 8.0), ("trusted", "untrusted")
GRID = {"rounds": (20, 100), "step_size": (0.3, 1.0, 3.0, 10.0, 30.0), "clip": (0.03, 0.1, 0.3, 1.0)}
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """Records, how many silos share them, and whether they were looked at when the recipe's constants were chosen."""

    silos: int
    kind: str  # of the model
    read: Callable[[], Arrays]
    seen: bool


def named(source: str, limit: int | None = None, change: Callable[[np.ndarray], np.ndarray] | None = None) -> Any:
    def read() -> Arrays:
        table = load_dataset(source)[0]
        rows = np.random.default_rng(0).permutation(len(table.features))[:limit]
        targets = np.asarray(table.targets)[rows]
        return table.features[rows].reshape(len(rows), -1), targets if change is None else change(targets)

    return read


def as_arrays(bunch: Any, change: Callable[[np.ndarray], np.ndarray] = lambda y: y) -> Arrays:
    return np.asarray(bunch.data, np.float32), change(bunch.target)


TASKS = {
    "wbcd": Task(4, "logistic", lambda: as_arrays(load_breast_cancer()), True),
    "a9a": Task(10, "logistic", named("a9a", None, lambda y: (y.astype(float) > 0).astype(int)), True),
    "covtype": Task(10, "logistic", named("covtype", 20_000, lambda y: (y.astype(int) == 2).astype(int)), True),
    "california": Task(10, "linear", named("california"), True),
    "gas-turbine": Task(10, "linear", named("gas-turbine"), True),
    "digits parity": Task(3, "logistic", lambda: as_arrays(load_digits(), lambda y: y % 2), True),
    "digits": Task(3, "softmax", lambda: as_arrays(load_digits()), True),
    "blogfeedback": Task(10, "linear", named("blogfeedback", None, np.log1p), False),
}


def prepared(task: Task, seed: int) -> tuple[FederatedData, Arrays, Arrays]:
    """One split: silos of equal size, features about 1 long, a target of unit deviation."""
    features, targets = task.read()
    order = np.random.default_rng(seed).permutation(len(features))
    cut = len(order) // 5
    test, train = order[:cut], order[cut:]
    centre, spread = features[train].mean(0), features[train].std(0)
    scaled = (features - centre) / np.where(spread > 0, spread, 1) / math.sqrt(features.shape[1])
    classes: tuple[str, ...] = ()
    if task.kind == "linear":
        targets = (targets - targets[train].mean()) / targets[train].std()
    else:
        labels, targets = np.unique(targets, return_inverse=True)
        classes = tuple(map(str, labels))
    pair = lambda rows: (scaled[rows].astype(np.float32), targets[rows])
    silos = {f"silo {i}": pair(rows) for i, rows in enumerate(np.array_split(train, task.silos))}
    return FederatedData.of(silos, test=pair(test), classes=classes), pair(train), pair(test)


def config(task: Task, epsilon: float, trust: str, seed: int, algorithm: dict[str, Any], **more: Any) -> Any:
    privacy = {"epsilon": epsilon, "delta": 1e-5, "trust": trust}
    tree = {"model": {"kind": task.kind}, "privacy": privacy, "algorithm": algorithm, "run": {"seed": seed}}
    return parse_config(tree | more)


def scores(task: Task, data: FederatedData, configs: list[Any]) -> list[float]:
    """Accuracy, or R^2, on the test records."""
    outcomes = run_configs(configs, data)
    if task.kind != "linear":
        return [outcome.history[-1]["test_accuracy"] for outcome in outcomes]
    assert data.test is not None
    variance = float(np.var(data.test.targets))
    return [1 - outcome.history[-1]["test_loss"] / variance for outcome in outcomes]


def auto(task: Task, data: FederatedData, epsilon: float, trust: str, seed: int) -> float:
    return scores(task, data, [config(task, epsilon, trust, seed, {"name": "auto"}, whiten={"scale": 1.0})])[0]


def tuned(task: Task, data: FederatedData, epsilon: float, trust: str, seed: int, quick: bool) -> list[float]:
    """DP-GD at every point of the grid; which is best is chosen on test records, over all seeds."""
    grid = {key: values[:: 2 if quick else 1] for key, values in GRID.items()}
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    options = [{"name": "dp-gd", "weights": "size", **point} for point in points]
    return scores(task, data, [config(task, epsilon, trust, seed, each) for each in options])


def without_privacy(task: Task, train: Arrays, test: Arrays) -> float:
    model = LinearRegression() if task.kind == "linear" else LogisticRegression(C=100.0, max_iter=2000)
    return float(model.fit(*train).score(*test))


def measure(names: list[str], seeds: int, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}

    def keep(key: str, value: Callable[[], Any]) -> None:
        if key not in found:
            found[key] = value()
            partial = KEPT.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
            os.replace(partial, KEPT)
            print(f"{key}: {np.round(np.max(found[key]), 4)}", flush=True)

    for name, seed in itertools.product(names, range(seeds)):
        task = TASKS[name]
        data, train, test = prepared(task, seed)
        keep(f"{name}|none|none|{seed}", lambda: without_privacy(task, train, test))  # noqa: B023 (called at once)
        for epsilon, trust in itertools.product((1.0, 3.0) if quick else EPSILONS, TRUSTS):
            cell = (task, data, epsilon, trust, seed)
            keep(f"{name}|{epsilon:g}|{trust}|{seed}|auto", lambda: auto(*cell))  # noqa: B023
            if seed < 3:
                keep(f"{name}|{epsilon:g}|{trust}|{seed}|dp-gd{' quick' * quick}", lambda: tuned(*cell, quick))  # noqa: B023
    return found


def table(found: dict[str, Any]) -> str:
    """Mean over seeds: auto, the best setting of DP-GD on the test records, and no privacy."""
    lines = ["| task | epsilon | trust | auto | dp-gd, tuned on test | no privacy |", "|---|---|---|---|---|---|"]
    for name, epsilon, trust in itertools.product(TASKS, EPSILONS, TRUSTS):
        of = lambda text: [v for k, v in found.items() if k.startswith(text)]
        own = [v for k, v in found.items() if k.startswith(f"{name}|{epsilon:g}|{trust}|") and k.endswith("auto")]
        grid = [v for k, v in found.items() if k.startswith(f"{name}|{epsilon:g}|{trust}|") and "dp-gd" in k]
        if own and grid:
            best = f"{np.max(np.mean(grid, axis=0)):.3f}"
            mark = name if TASKS[name].seen else f"{name} *"
            error = np.std(own) / math.sqrt(len(own))
            plain = np.mean(of(f"{name}|none|"))
            lines.append(
                f"| {mark} | {epsilon:g} | {trust} | {np.mean(own):.3f} +- {error:.3f} | {best} | {plain:.3f} |"
            )
    return "\n".join(lines)


PAGE_TEXT = """# Utility: what an epsilon buys

Written by `python -m bench.utility`. Accuracy for classes, R^2 for numbers, on a fifth of the records; silos of equal
size; delta 1e-5. `auto` has the same constants everywhere and sees nothing but public facts. DP-GD has the setting of
its grid (rounds, step size, clip norm) that is best on the test records, which nobody who keeps an epsilon can do.
Tasks with a star were not looked at when the recipe's constants were chosen. Features are standardised by the training
records' own means and deviations, for all methods; no epsilon covers that.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.utility", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="two epsilons, a coarse grid")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    found = measure(options.tasks or list(TASKS), options.seeds, options.quick)
    PAGE.write_text(PAGE_TEXT.format(table=table(found)))
    print(table(found))


if __name__ == "__main__":
    main()
