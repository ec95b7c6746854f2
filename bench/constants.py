"""`python -m bench.constants NAME=VALUE ...`: what other constants of `auto` would bring, each by itself.

NAME is one of silodp.plan.auto or silodp.stages.whiten (RIDGE), or one of a recipe (SQUARES.luck). A row for each task:
accuracy or R^2 with the other constant, less that of `auto` as it is, in the mean over splits, with the same splits and
noise. At the end mean and median over the tasks. Features, tasks and training are those of `bench.utility`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from bench.families import Cell
from bench.tasks import TASKS
from bench.utility import EPSILONS, auto, readable, split_of
from silodp import cache
from silodp.plan import auto as recipe
from silodp.stages import whiten

TRUSTS = ("trusted", "untrusted")
CELLS: list[Cell] = list(itertools.product(EPSILONS, TRUSTS))


@contextmanager
def changed(name: str, value: float) -> Iterator[None]:
    """The constant has this value until the end of the block."""
    module = next((m for m in (recipe, whiten) if hasattr(m, name.split(".")[0])), None)
    if module is None or not name.split(".")[0].isupper():
        raise ValueError(f"{name}: no constant of silodp.plan.auto or silodp.stages.whiten")
    first, _, field = name.partition(".")
    kept: dict[str, Any] = {first: getattr(module, first)}
    other: dict[str, Any] = {first: value}
    if field:
        made = replace(kept[first], **{field: value})
        kept["RECIPES"] = recipe.RECIPES
        other = {first: made, "RECIPES": {k: made if r is kept[first] else r for k, r in recipe.RECIPES.items()}}
    vars(module).update(other)
    try:
        yield
    finally:
        vars(module).update(kept)


def gain(task: str, name: str, value: float, splits: int) -> np.ndarray:
    """Of every cell, in the mean over splits."""
    found = []
    for seed in range(splits):
        own = as_it_is(task, seed)
        with changed(name, value):
            found.append(np.ravel(auto(split_of(task, seed), CELLS, seed)) - own)
    return np.mean(found, axis=0)


@lru_cache(None)
def as_it_is(task: str, seed: int) -> np.ndarray:
    return np.ravel(auto(split_of(task, seed), CELLS, seed))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.constants", description=__doc__)
    parser.add_argument("changes", nargs="+", metavar="NAME=VALUE")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), help="all that were looked at, when left out")
    parser.add_argument("--splits", type=int, default=2, help="of every task; times 3 or 12 where it is small or tiny")
    options = parser.parse_args()
    names = readable(options.tasks or [name for name, task in TASKS.items() if task.seen])
    cache.keep_programs()
    try:
        changes = [(name, float(value)) for name, _, value in (each.partition("=") for each in options.changes)]
        for change in changes:
            with changed(*change):
                pass
    except (ValueError, TypeError, AttributeError) as error:
        parser.error(f"give NAME=NUMBER, such as RIDGE=0 or SQUARES.luck=2.5: {error}")
    for name, value in changes:
        print(f"| {name} = {value:g} | " + " | ".join(f"{trust}, {epsilon:g}" for epsilon, trust in CELLS) + " |")
        print("|---" * (len(CELLS) + 1) + "|", flush=True)
        rows = []
        for task in names:
            rows.append(gain(task, name, value, options.splits * TASKS[task].times))
            print(row(task, rows[-1]), flush=True)
        print(row("mean", np.mean(rows, axis=0)), row("median", np.median(rows, axis=0)), sep="\n", flush=True)


def row(name: str, values: np.ndarray) -> str:
    return f"| {name} | " + " | ".join(f"{value:+.3f}" for value in values) + " |"


if __name__ == "__main__":
    main()
