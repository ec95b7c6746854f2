"""`python -m bench.networks [TASK ...] [--seeds N] [--print]`: what each part of a LeNet's recipe brings.

Every variant is the recipe with one thing changed. It is tried with every step of its task's list, and the best on test
records is shown: all figures here are chosen with a look at test records, alike for all variants. Numbers are kept in
bench/networks.json as soon as they are measured, so that a stopped run goes on where it was. The page is
docs/networks.md, with the tables of bench.network_rule, which has the mlps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import network_rule
from silodp.data import FederatedData, load_data
from silodp.parse import parse_config
from silodp.run.sweep import run_configs

HERE = Path(__file__).parent
KEPT, PAGE, NOTES = HERE / "networks.json", HERE.parent / "docs" / "networks.md", HERE / "networks_notes.md"
EPSILON, CLIP = 3.0, 0.1
Change = dict[str, dict[str, Any]]

NO_MEAN: Change = {"algorithm": {"average": 1}}
PLAIN: Change = {"model": {"norm": "none"}}
RELU: Change = {"model": {"activation": "relu"}}
AUTO: Change = {"algorithm": {"name": "auto"}}
SMALL_START: Change = {"model": {"initial": "normal", "initial_scale": 0.03}}


@dataclass(frozen=True)
class Task:
    """Records in ten silos, the recipe's model and algorithm, steps that are tried, and variants."""

    data: dict[str, Any]
    model: dict[str, Any]
    algorithm: dict[str, Any]
    steps: tuple[float, ...]
    variants: dict[str, Change]
    told: str


def minibatches(batch: int, rounds: int) -> dict[str, Any]:
    mean = {"kind": "exponential", "decay": 0.9}
    return {"name": "dp-sgd", "batch": batch, "rounds": rounds, "clip": CLIP, "weights": "size", "average": mean}


LENET = {"kind": "cnn", "activation": "tanh", "norm": "group"}
TASKS = {
    "mnist, cnn": Task(
        {"source": "mnist", "silos": 10, "limit": 10_000, "preprocess": ["divide:255"]},
        LENET,
        minibatches(100, 60),
        (2.0,),
        {
            "recipe": {},
            "relu without norm": {"model": {"activation": "relu", "norm": "none"}},
            "without norm": PLAIN,
            "relu": RELU,
            "small start": SMALL_START,
            "last iterate": NO_MEAN,
            "clip norm 0.5": {"algorithm": {"clip": 0.5}},
            "a quarter of the batch, four times the rounds": {"algorithm": minibatches(25, 240)},
            "five views": {"model": {"views": ["shift:1"]}},
            "as `auto` takes it": AUTO,
        },
        "10,000 of MNIST's images, LeNet (44,426 parameters), 60 rounds, clip norm .1",
    ),
    "cifar10, cnn": Task(
        {"source": "cifar10", "silos": 10, "limit": 10_000, "preprocess": ["divide:255"]},
        LENET,
        minibatches(100, 100),
        (1.0,),
        {
            "recipe": {},
            "relu without norm": {"model": {"activation": "relu", "norm": "none"}},
            "as `auto` takes it": AUTO,
        },
        "10,000 of CIFAR-10's images, LeNet (62,006 parameters), 100 rounds, clip norm .1",
    ),
}


def tree_of(task: Task, change: Change, step: float, seed: int) -> dict[str, Any]:
    """`step`: how far parameters move at most."""
    algorithm = {**task.algorithm, **change.get("algorithm", {})}
    algorithm["step_size"] = step / algorithm["clip"]
    every = algorithm["rounds"]
    if change is AUTO:  # which leaves nothing to choose
        algorithm, every = AUTO["algorithm"], 1000
    return {
        "model": {**task.model, **change.get("model", {})},
        "privacy": {"epsilon": EPSILON, "trust": "trusted"},
        "algorithm": {key: value for key, value in algorithm.items() if value is not None},
        "run": {"seed": seed, "every": every},
    }


def accuracies(task: Task, data: FederatedData, change: Change, seeds: Sequence[int]) -> list[list[float]]:
    """By seed and step; one program for all."""
    points = [(seed, step) for seed in seeds for step in task.steps]
    configs = [parse_config(tree_of(task, change, step, seed)) for seed, step in points]
    found = [outcome.history[-1]["test_accuracy"] for outcome in run_configs(configs, data)]
    return np.round(np.reshape(found, (len(seeds), -1)), 4).tolist()


def kept() -> dict[str, list[float]]:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def keep(key: str, found: list[float]) -> None:
    partial = KEPT.with_suffix(".partial")
    partial.write_text(json.dumps(kept() | {key: found}, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, KEPT)
    print(f"{key}: {max(found):.4f} of {np.round(found, 4).tolist()}", flush=True)


def measure(names: list[str], seeds: int, most: int) -> None:
    for name in names:
        task, data = TASKS[name], None
        for variant, change in task.variants.items():
            missing = [seed for seed in range(seeds) if f"{name}|{variant}|{seed}" not in kept()]
            if missing and most:
                data, most = data or load_data(**task.data), most - 1
                for seed, found in zip(missing, accuracies(task, data, change, missing), strict=True):
                    keep(f"{name}|{variant}|{seed}", found)


def rows_of(name: str, found: dict[str, list[float]]) -> list[str]:
    rows = {}
    for variant in TASKS[name].variants:
        seeds = [value for key, value in found.items() if key.startswith(f"{name}|{variant}|")]
        if seeds:
            means = np.mean(seeds, axis=0)
            rows[variant] = (float(means.max()), TASKS[name].steps[int(means.argmax())], len(seeds))
    base = rows.get("recipe", (float("nan"), 0, 0))[0]
    return [
        f"| {variant} | {best:.3f} ({seeds}) | {'' if variant == 'recipe' else f'{best - base:+.3f}'} | {step:g} |"
        for variant, (best, step, seeds) in rows.items()
    ]


def write_page(found: dict[str, list[float]]) -> str:
    parts = [NOTES.read_text(encoding="utf-8").rstrip(), network_rule.tables()]
    for name, task in TASKS.items():
        if rows := rows_of(name, found):
            head = ["| variant | accuracy (seeds) | against the recipe | step |", "|---|---|---|---|"]
            parts.append("\n".join([f"### {name}", "", f"{task.told}.", "", *head, *rows]))
    text = "\n\n".join(parts) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.networks", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all when left out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most", type=int, default=10_000, help="stop after so many new rows")
    parser.add_argument("--print", action="store_true", help="measure nothing: write the page from what is kept")
    options = parser.parse_args()
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    if not options.print:
        measure(options.tasks or list(TASKS), options.seeds, options.most)
    page = write_page(kept())
    if options.print:
        print(page)


if __name__ == "__main__":
    main()
