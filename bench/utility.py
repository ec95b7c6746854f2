"""`python -m bench.utility [TASK ...] [--quick] [--print]`: what `auto` reaches at an epsilon, beside others.

Every number is kept in bench/utility.json as soon as it is measured, so that a stopped run goes on where it was.
Numbers of `auto` are dropped when a constant of its recipe changes. The page and the figure are written at the end.

Features are standardised by means and deviations of the training records, which no epsilon covers, and records are
shortened to a public length: the same for all methods.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from bench.rivals import DELTA, central, linear_model, trees
from bench.tasks import TASKS, Split, Task, in_pieces, split
from bench.utility_page import KEPT, write_page
from silodp.cluster import Place, place_of, spread
from silodp.data import FederatedData
from silodp.parse import parse_config
from silodp.plan import auto as recipe
from silodp.plan.make import knots_that_pay
from silodp.plan.objects import facts_of
from silodp.run.sweep import run_configs
from silodp.stages import whiten

EPSILONS, TRUSTS = (0.5, 1.0, 3.0, 8.0), ("trusted", "aggregated", "untrusted")
# The stated search of DP-GD, by name of its method: everything is tried, the best on test records is taken.
SEARCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "dp-gd": {"rounds": (20,), "step_size": (3.0, 10.0, 30.0, 100.0), "clip": (0.1, 0.3, 1.0)},
    "dp-gd, momentum": {
        "rounds": (40,), "step_size": (1.0, 3.0, 10.0), "clip": (0.1, 0.3, 1.0), "optimiser": ("nesterov",),
    },
}  # fmt: skip
SEEDS = {"auto": 5, "local": 2, "dp-gd": 2, "dp-gd, momentum": 2}  # others: as many as auto
ALONE = 2  # silos that are trained alone, in the mean
QUICK = (1.0, 3.0)
JOB = "bench.utility:run_job"
MOST_IN_PIECES = 20  # features


def config(task: Task, epsilon: float, trust: str, seed: int, algorithm: dict[str, Any], **more: Any) -> Any:
    privacy = {"epsilon": epsilon, "delta": DELTA, "trust": trust}
    tree = {"model": {"kind": task.kind}, "privacy": privacy, "algorithm": algorithm}
    return parse_config(tree | {"run": {"seed": seed, "every": algorithm.get("rounds", 20)}} | more)


def scores(task: Task, data: FederatedData, configs: list[Any]) -> list[float]:
    """Accuracy, or R^2, on the test records."""
    outcomes = run_configs(configs, data)
    if task.kind != "linear":
        return [outcome.history[-1]["test_accuracy"] for outcome in outcomes]
    assert data.test is not None
    variance = float(np.var(data.test.targets))
    return [1 - outcome.history[-1]["test_loss"] / variance for outcome in outcomes]


def auto(task: Task, data: FederatedData, epsilon: float, trust: str, seed: int) -> float:
    """With the public step `pieces` where it says that this pays, as the estimators do."""
    asked = config(task, epsilon, trust, seed, {"name": "auto"}, whiten={"scale": 1.0})
    knots = knots_that_pay(asked, facts_of(data), lambda knots: data.input_shape[0] * (knots + 1))
    return scores(task, in_pieces(data, knots) if knots else data, [asked])[0]


def auto_on_pieces(task: Task, data: FederatedData, epsilon: float, trust: str, seed: int) -> float:
    asked = config(task, epsilon, trust, seed, {"name": "auto"}, whiten={"scale": 1.0})
    return scores(task, in_pieces(data), [asked])[0]


def local(task: Task, made: Split, epsilon: float, seed: int) -> float:
    """Each silo by itself: `auto` on its own records."""
    alone = range(min(ALONE, task.silos))
    return float(np.mean([auto(task, made.alone(i), epsilon, "trusted", seed) for i in alone]))


def searched(task: Task, made: Split, method: str, epsilons: tuple[float, ...], trust: str, seed: int) -> list[Any]:
    """DP-GD at every point of its search, for each epsilon: one program."""
    search = SEARCHES[method]
    points = [dict(zip(search, values, strict=True)) for values in itertools.product(*search.values())]
    options = [{"name": "dp-gd", "weights": "size", **point} for point in points]
    configs = [config(task, epsilon, trust, seed, each) for epsilon in epsilons for each in options]
    return np.reshape(scores(task, made.data, configs), (len(epsilons), -1)).tolist()


def constants_of_auto() -> str:
    """Changes whenever a constant of the recipe does."""
    numbers = [(module.__name__, name, vars(module)[name]) for module in (recipe, whiten) for name in vars(module)]
    told = [repr(each) for each in numbers if each[1].isupper()]
    return hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()[:16]


class Found:
    """Measured numbers by task|epsilon|trust|method|seed."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def keep(self, key: str, value: Any) -> None:
        self.found[key] = value

    def once(self, key: str, value: Callable[[], Any]) -> None:
        if key not in self:
            self.keep(key, value())


class Kept(Found):
    """The same in a file. Several processes may measure different tasks."""

    def __init__(self) -> None:
        super().__init__(self.read())

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        if found.get("constants of auto") != constants_of_auto():
            found = {k: v for k, v in found.items() if "|auto" not in k and "|local|" not in k}
        return found | {"constants of auto": constants_of_auto()}

    def keep(self, key: str, value: Any) -> None:
        with KEPT.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.found = self.read() | {key: value}
            partial = KEPT.with_suffix(".partial")
            partial.write_text(json.dumps(self.found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(partial, KEPT)
        print(f"{key}: {np.max(value):.4f}", flush=True)


def measure(
    names: list[str], seeds: int, epsilons: tuple[float, ...], methods: list[str], trusts: list[str], kept: Kept,
    place: Place | None,
) -> None:  # fmt: skip
    """One split after the other, so that a stopped run has all tasks."""
    wanted = [
        {"name": name, "seed": seed, "method": method, "epsilons": epsilons, "trusts": trusts}
        for seed, name, method in itertools.product(range(seeds), names, methods)
        if seed < min(seeds, SEEDS.get(method, seeds))
    ]
    if place is None:
        for job in wanted:
            measured(**job, kept=kept)
        return
    for number, text in spread(JOB, [json.dumps(job | {"known": kept.found}) for job in wanted], place):
        for key, value in json.loads(text).items():
            kept.keep(key, value)
        print(f"{wanted[number]['name']}, {wanted[number]['method']}, split {wanted[number]['seed']}: done", flush=True)


def run_job(text: str) -> str:
    """In a worker: one method on one split of one task; what it adds to what is known."""
    job = json.loads(text)
    known = job.pop("known")
    found = Found(dict(known))
    measured(**job | {"epsilons": tuple(job["epsilons"])}, kept=found)
    return json.dumps({key: value for key, value in found.found.items() if key not in known}, default=float)


@lru_cache(1)  # methods on one split come after one another
def split_of(name: str, seed: int) -> Split:
    return split(TASKS[name], seed)


def measured(name: str, seed: int, method: str, epsilons: tuple[float, ...], trusts: list[str], kept: Found) -> None:
    task, made = TASKS[name], split_of(name, seed)
    key = lambda epsilon, trust: f"{name}|{epsilon}|{trust}|{method}|{seed}"
    if method == "no privacy":
        kept.once(f"{name}|none|none|linear|{seed}", lambda: linear_model(task, made.train, made.test))
        kept.once(f"{name}|none|none|trees|{seed}", lambda: trees(task, made.train, made.test))
    elif method in SEARCHES:
        for trust in trusts:
            missing = tuple(e for e in epsilons if key(f"{e:g}", trust) not in kept)
            found = searched(task, made, method, missing, trust, seed) if missing else []
            for epsilon, row in zip(missing, found, strict=True):
                kept.keep(key(f"{epsilon:g}", trust), row)
    else:
        for epsilon in epsilons:
            one_epsilon(task, made, method, epsilon, seed, trusts, kept, lambda trust: key(f"{epsilon:g}", trust))  # noqa: B023


def one_epsilon(
    task: Task, made: Split, method: str, epsilon: float, seed: int, trusts: list[str], kept: Found,
    key: Callable[[str], str],
) -> None:  # fmt: skip
    if method == "auto":
        for trust in trusts:
            kept.once(key(trust), lambda: auto(task, made.data, epsilon, trust, seed))  # noqa: B023 (called at once)
    elif method == "auto on pieces" and made.train[0].shape[1] <= MOST_IN_PIECES:
        for trust in trusts:
            kept.once(key(trust), lambda: auto_on_pieces(task, made.data, epsilon, trust, seed))  # noqa: B023
    elif method == "local":
        kept.once(key("none"), lambda: local(task, made, epsilon, seed))
    elif method in central(task):
        rival = central(task)[method]
        kept.once(key("trusted"), lambda: rival(task, made.train, made.test, epsilon, seed))


METHODS = ["no privacy", "auto", "auto on pieces", "dp-gd", "objective", "adassp", "local", "dp-gd, momentum", "dp-ebm"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.utility", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="two epsilons, one split")
    parser.add_argument("--print", action="store_true", help="measure nothing: write page and figure from what is kept")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--trusts", nargs="*", choices=TRUSTS, default=list(TRUSTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a dask.distributed scheduler that runs the methods")
    parser.add_argument("--workers", type=int, metavar="N", help="run the methods in N worker processes")
    options = parser.parse_args()
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    kept, epsilons = Kept(), QUICK if options.quick else EPSILONS
    if not options.print:
        seeds = 1 if options.quick else options.seeds
        measure(
            options.tasks or list(TASKS),
            seeds,
            epsilons,
            options.methods,
            options.trusts,
            kept,
            place_of(options.cluster, options.workers),
        )
    print(write_page(kept.found))


if __name__ == "__main__":
    main()
