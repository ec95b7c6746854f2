"""`python -m bench.network_rule [TASK ...]`: how `auto`'s rounds, step and clip norm for networks were chosen.

A twin of dp-sgd on an mlp, outside of the library (whose noise it takes): a grid would be too dear within. Silos are
alike and of equal size, so that the average over them is that over all records; trust and epsilon say how much noise is
on it. Every task has every combination of rounds, path, clip norm and output. The rule was chosen on CHOSEN_ON; other
tasks had no say in it. Figures are accuracies, or R^2, on test records, kept in bench/network_rule.json as they are
measured. Tasks of numbers are those of bench.utility, scaled as an estimator's ranges would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.tasks import TASKS as TABLES
from bench.tasks import split
from silodp.data import load_data
from silodp.facts import Facts
from silodp.models import ACTIVATIONS
from silodp.networks import between
from silodp.parse import parse_config
from silodp.plan.auto_networks import CLIP, CROSS_ENTROPY, RATE, SQUARED, Path, rounds_of
from silodp.plan.make import make_plan

KEPT = pathlib.Path(__file__).parent / "network_rule.json"
SILOS, DELTA = 10, 1e-5
CELLS = tuple(itertools.product(("trusted", "untrusted"), (1.0, 3.0)))
ROUNDS, CLIPS = (30, 100, 300), (0.1, 0.5)
# rounds * step: parameters get no further from their start
PATHS = (12.5, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
SHORT_PATHS = (3.0, 6.0, 12.5, 25.0, 50.0, 100.0, 200.0)  # of squared losses
OUTPUTS = ("last iterate", "running mean", "mean of the last half")
RUNNING = 1  # what `auto` takes
TASKS: dict[str, dict[str, Any]] = {
    "covtype": {"source": "covtype", "limit": 20_000, "test": 0.2, "preprocess": ["standardise"]},
    "mnist": {"source": "mnist", "limit": 10_000, "preprocess": ["hog"]},
    "a9a": {"source": "a9a"},
    "cifar10": {"source": "cifar10", "limit": 10_000, "preprocess": ["hog-colour"]},
}
TOLD = {
    "covtype": "16,000 records of Covertype, 7 classes, standardised (2,000 parameters).",
    "mnist": "10,000 images as oriented gradients (12,900 parameters).",
    "a9a": "32,561 records, 123 columns of 0 and 1 (4,000 parameters).",
    "cifar10": "10,000 images by `hog-colour` (31,000 parameters).",
}
NUMBERS = {  # to predict
    "california": (16_512, 8),
    "computers": (5008, 9),
    "wages": (3332, 11),
    "food": (19_177, 5),
    "star": (4599, 11),
}
FEATURE, TARGET = 0.5, 0.3  # their deviations
CHOSEN_ON = ("covtype", "mnist", "california", "computers", "wages")
EVERY = (*TASKS, *NUMBERS)
Params = dict[str, jax.Array]
Records = tuple[jax.Array, jax.Array]
Point = tuple[str, float, float, float]  # trust, epsilon, clip norm, path


@dataclass(frozen=True)
class Network:
    """One hidden layer, its start, and the part of the records in a batch."""

    activation: str = "tanh"
    norm: str = "group"
    start: float | None = None  # deviation of a normal start; None: uniform in +-1/sqrt(fan-in), as in the library
    width: int = 32
    rate: float = RATE
    squared: bool = False  # the loss; else cross-entropy

    def begin(self, key: jax.Array, inputs: int, outputs: int) -> Params:
        shapes = {"w1": (inputs, self.width), "b1": (self.width,), "w2": (self.width, outputs), "b2": (outputs,)}
        fans = {"w1": inputs, "b1": inputs, "w2": self.width, "b2": self.width}
        keys = dict(zip(shapes, jax.random.split(key, 4), strict=True))
        if self.start is not None:
            return {name: self.start * jax.random.normal(keys[name], shapes[name]) for name in shapes}
        uniform = partial(jax.random.uniform, minval=-1, maxval=1)
        return {name: uniform(keys[name], shapes[name]) / math.sqrt(fans[name]) for name in shapes}

    def scores(self, p: Params, x: jax.Array, probes: tuple[Any, Any] = (0.0, 0.0)) -> tuple[jax.Array, jax.Array]:
        """And what the hidden layer gives; probes are added to what the layers' activations see."""
        h = jax.vmap(between(ACTIVATIONS[self.activation], self.norm))(x @ p["w1"] + p["b1"] + probes[0])
        return h @ p["w2"] + p["b2"] + probes[1], h

    def clipped_sum(self, p: Params, x: jax.Array, y: jax.Array, counts: jax.Array, clip: jax.Array) -> Params:
        """Of the records' gradients. That of a dense layer is an outer product: its length is known without it."""

        def loss(probes: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            z, h = self.scores(p, x, probes)
            return jnp.sum((z - y) ** 2) if self.squared else -jnp.sum(jax.nn.log_softmax(z) * y), h

        (d1, d2), h = jax.grad(loss, has_aux=True)((jnp.zeros((len(x), self.width)), jnp.zeros(y.shape)))
        square = lambda a: jnp.sum(a * a, axis=1)
        length = jnp.sqrt(square(d1) * (square(x) + 1) + square(d2) * (square(h) + 1))
        d1, d2 = (d * (counts * jnp.minimum(1, clip / jnp.maximum(length, 1e-12)))[:, None] for d in (d1, d2))
        return {"w1": x.T @ d1, "b1": d1.sum(axis=0), "w2": h.T @ d2, "b2": d2.sum(axis=0)}


RECIPE = Network()


@cache
def planned(trust: str, epsilon: float, rounds: int, rate: float, size: int) -> float:
    """The library's std of the noise on the average of a batch's gradients, in clip norms."""
    batch = {"name": "dp-gd"} if rate == 1 else {"name": "dp-sgd", "batch": round(rate * size)}
    options = {**batch, "rounds": rounds, "clip": 1.0, "step_size": 1.0}
    config = parse_config({"privacy": {"epsilon": epsilon, "delta": DELTA, "trust": trust}, "algorithm": options})
    return make_plan(config, Facts((size,) * SILOS, tuple(map(str, range(SILOS))))).std_of_average("value")


@partial(jax.jit, static_argnums=(0, 1))
def trained(net: Network, rounds: int, key: jax.Array, records: Records, settings: dict[str, jax.Array]) -> Any:
    """The OUTPUTS of every setting; all have the same start, batches and draws of noise."""
    x, y = records
    expected = net.rate * len(x)
    most = min(len(x), math.ceil(expected + 6 * math.sqrt(expected)))
    p0 = net.begin(jax.random.fold_in(key, 0), x.shape[1], y.shape[1])

    def step(own: dict[str, jax.Array], p: Params, batch: tuple[jax.Array, ...], noise: Params) -> Params:
        rows, classes, counts = batch
        total = net.clipped_sum(p, rows, classes, counts, own["clip"])
        mean = jax.tree.map(lambda s, z: s / expected + own["clip"] * own["std"] * z, total, noise)
        return jax.tree.map(lambda a, g: a - own["step"] / own["clip"] * g, p, mean)

    def batch_of(key: jax.Array) -> Any:
        """As many records as coins would give, each equally likely."""
        if net.rate == 1:
            return x, y, jnp.ones(len(x))
        heads, drawn = jax.random.split(key)
        rows = jax.random.choice(drawn, len(x), (most,), replace=False)
        return x[rows], y[rows], jnp.arange(most) < jax.random.binomial(heads, len(x), net.rate)

    def one(carry: Any, t: jax.Array) -> Any:
        last, running, half = carry
        for_batch, for_noise = jax.random.split(jax.random.fold_in(key, t + 1))
        keys = dict(zip(p0, jax.random.split(for_noise, len(p0)), strict=True))
        noise = {name: jax.random.normal(keys[name], p0[name].shape) for name in p0}
        last = jax.vmap(step, (0, 0, None, None))(settings, last, batch_of(for_batch), noise)
        newest = (1 - 0.9) / (1 - 0.9 ** (t + 1.0))
        running = jax.tree.map(lambda m, a: m + newest * (a - m), running, last)
        half = jax.tree.map(lambda m, a: m + jnp.where(2 * t >= rounds, 2 / rounds, 0) * a, half, last)
        return (last, running, half), None

    copies = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(settings["clip"]), *a.shape)), p0)
    return jax.lax.scan(one, (copies, copies, jax.tree.map(jnp.zeros_like, copies)), jnp.arange(rounds))[0]


@partial(jax.jit, static_argnums=0)
def figures(net: Network, params: Params, x: jax.Array, truth: jax.Array) -> jax.Array:
    """Accuracies, or R^2."""

    def figure(p: Params) -> jax.Array:
        z = net.scores(p, x)[0]
        if net.squared:
            return 1 - jnp.mean((z[:, 0] - truth) ** 2) / jnp.var(truth)
        return jnp.mean(jnp.argmax(z, axis=1) == truth)

    return jax.lax.map(figure, params)


@cache
def loaded(task: str) -> tuple[Records, Records]:
    """Training records with numbers or their classes as indicators, and test records with numbers or labels."""
    if task in NUMBERS:
        made = split(TABLES[task], 0)
        unit = FEATURE * math.sqrt(made.train[0].shape[1])
        (x, y), (tested, truth) = made.train, made.test
        return (jnp.asarray(unit * x), TARGET * jnp.asarray(y)[:, None]), (jnp.asarray(unit * tested), TARGET * truth)
    data = load_data(**TASKS[task], silos=1)
    assert data.test is not None
    (silo,) = data.silos
    targets = jax.nn.one_hot(np.asarray(silo.targets), len(data.classes))
    flat = lambda features: jnp.asarray(features).reshape(len(features), -1)
    return (flat(silo.features), targets), (flat(data.test.features), jnp.asarray(data.test.targets))


def measured(task: str, net: Network, rounds: int, seed: int, points: Sequence[Point]) -> np.ndarray:
    """Figures by output and point."""
    train, (tested, labels) = loaded(task)
    size = len(train[0]) // SILOS
    rows = [(planned(trust, eps, rounds, net.rate, size), clip, path / rounds) for trust, eps, clip, path in points]
    settings = dict(zip(("std", "clip", "step"), jnp.asarray(rows, jnp.float32).T, strict=True))
    made = trained(net, rounds, jax.random.key(seed), train, settings)
    return np.array([figures(net, output, tested, labels) for output in made])


# --- what is measured ------------------------------------------------------------------------------------------


def grid_of(task: str) -> list[Point]:
    paths = SHORT_PATHS if task in NUMBERS else PATHS
    return [(*cell, clip, path) for cell, clip, path in itertools.product(CELLS, CLIPS, paths)]


PART_ROUNDS = 100
PART_CELLS = (("trusted", 3.0), ("untrusted", 1.0))
PART_POINTS: list[Point] = [(*cell, CLIP, path) for cell, path in itertools.product(PART_CELLS, PATHS[3:])]
PARTS = {
    "recipe": (RECIPE, PART_ROUNDS),
    "relu": (Network(activation="relu"), PART_ROUNDS),
    "without norm": (Network(norm="none"), PART_ROUNDS),
    "relu without norm": (Network(activation="relu", norm="none"), PART_ROUNDS),
    "small start (normal, 0.03)": (Network(start=0.03), PART_ROUNDS),
    "64 hidden units": (Network(width=64), PART_ROUNDS),
    "a quarter of the batch, four times the rounds": (Network(rate=RATE / 4), 4 * PART_ROUNDS),
    "all records, a quarter of the rounds": (Network(rate=1.0), PART_ROUNDS // 4),
}


def rule_of(task: str) -> dict[int, list[Point]]:
    """What `auto` takes: the cells' points, by rounds."""
    (x, y), _ = loaded(task)
    path: Path = SQUARED if task in NUMBERS else CROSS_ENTROPY
    parameters = (x.shape[1] + 1) * RECIPE.width + (RECIPE.width + 1) * y.shape[1]
    points: dict[int, list[Point]] = {}
    for cell in CELLS:
        nu = math.sqrt(parameters) * planned(*cell, 1, 1.0, len(x) // SILOS)
        rounds = rounds_of(nu)
        points.setdefault(rounds, []).append((*cell, CLIP, min(path.at(nu), path.step * rounds)))
    return points


def asked(task: str, seeds: int) -> Iterator[tuple[str, Network, int, int, list[Point]]]:
    """Key, network, rounds, seed and points of everything that is measured for a task."""
    recipe = replace(RECIPE, squared=task in NUMBERS)
    for rounds, points in rule_of(task).items():
        cells = " and ".join(cell_name(trust, epsilon) for trust, epsilon, *_ in points)
        yield from ((f"{task}|rule: {cells}|{seed}", recipe, rounds, seed, points) for seed in range(seeds))
    for rounds in ROUNDS:
        yield from ((f"{task}|grid of {rounds}|{seed}", recipe, rounds, seed, grid_of(task)) for seed in range(seeds))
    if task in NUMBERS:
        return
    for part, (net, rounds) in PARTS.items():
        yield from ((f"{task}|{part}|{seed}", net, rounds, seed, PART_POINTS) for seed in range(seeds))


def cell_name(trust: str, epsilon: float) -> str:
    return f"{trust}, epsilon {epsilon:g}"


def kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def keep(key: str, found: np.ndarray) -> None:
    unfinished, numbers = KEPT.with_suffix(".partial"), np.round(found.astype(float), 4).tolist()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((kept() | {key: numbers}).items())]
    unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(unfinished, KEPT)
    print(f"{key}: {found.max():.4f}", flush=True)


def seeds_of(task: str, what: str, found: dict[str, Any]) -> np.ndarray:
    """By seed, output and point."""
    return np.array([value for key, value in found.items() if key.startswith(f"{task}|{what}|")])


# --- what is told ----------------------------------------------------------------------------------------------


def tables() -> str:
    found = kept()
    return "\n\n".join(text for task in EVERY for text in (rule_table(task, found), part_table(task, found)) if text)


def rule_table(task: str, found: dict[str, Any]) -> str:
    rules = {cell: rule_figures(task, cell_name(*cell), found) for cell in CELLS}
    grids = {r: own.mean(axis=0) for r in ROUNDS if len(own := seeds_of(task, f"grid of {r}", found))}
    if not grids or not all(map(len, rules.values())):
        return ""
    said = "the rule was chosen on this task" if task in CHOSEN_ON else "this task had no say in the rule"
    head = ["| | `auto` | best of the grid | that is |", "|---|---|---|---|"]
    rows = [rule_row(cell, i, rules[cell], grids, grid_of(task)) for i, cell in enumerate(CELLS)]
    return "\n".join([f"### {task}, mlp: {said}", "", f"{told(task)} Seeds: {len(rules[CELLS[0]])}.", "", *head, *rows])


def rule_figures(task: str, cell: str, found: dict[str, Any]) -> np.ndarray:
    """By seed."""
    begin = f"{task}|rule: "
    cells = {key: key.removeprefix(begin).split("|")[0].split(" and ") for key in found if key.startswith(begin)}
    return np.array([found[key][RUNNING][names.index(cell)] for key, names in cells.items() if cell in names])


def told(task: str) -> str:
    if task not in NUMBERS:
        return TOLD[task]
    records, columns = NUMBERS[task]
    return f"R^2, on the first split of [the page of methods](utility.md). {records:,} records, {columns} columns."


def rule_row(
    cell: tuple[str, float], i: int, rule: np.ndarray, grids: dict[int, np.ndarray], points: list[Point]
) -> str:
    own = slice(i * len(points) // len(CELLS), (i + 1) * len(points) // len(CELLS))
    best, rounds, output, at = max(
        (grid[o, own].max(), r, o, int(grid[o, own].argmax())) for r, grid in grids.items() for o in range(len(OUTPUTS))
    )
    _, _, clip, path = points[own][at]
    shown = f"{rounds} rounds, step {path / rounds:.3g}, clip {clip:g}, {OUTPUTS[output]}"
    return f"| {cell_name(*cell)} | {rule.mean():.4f} | {best:.4f} ({rule.mean() - best:+.4f}) | {shown} |"


def part_table(task: str, found: dict[str, Any]) -> str:
    measured_parts = {part: own for part in PARTS if len(own := seeds_of(task, part, found))}
    if "recipe" not in measured_parts:
        return ""
    shown = [(part, own[:, RUNNING]) for part, own in measured_parts.items()]
    recipe = measured_parts["recipe"]
    shown[1:1] = [(OUTPUTS[o], recipe[:, o]) for o in range(len(OUTPUTS)) if o != RUNNING]
    heads = [cell_name(*cell) for cell in PART_CELLS]
    rows = [f"| {part} ({len(own)}) | {' | '.join(part_cells(own, recipe[:, RUNNING]))} |" for part, own in shown]
    return "\n".join([f"| {task}, mlp (seeds) | {' | '.join(heads)} |", "|---|" + "---|" * len(heads), *rows])


def part_cells(own: np.ndarray, recipe: np.ndarray) -> list[str]:
    """Accuracy at the best path of each cell, what it is above the recipe, and the standard error of that."""
    cells = []
    for mine, base in zip(
        np.split(own, len(PART_CELLS), axis=1), np.split(recipe, len(PART_CELLS), axis=1), strict=True
    ):
        best, its = mine[:, mine.mean(axis=0).argmax()], base[:, base.mean(axis=0).argmax()]
        apart = best - its[: len(best)]
        error = f" ± {apart.std(ddof=1) / math.sqrt(len(apart)):.3f}" if len(apart) > 1 else ""
        cells.append(f"{best.mean():.3f}" + ("" if np.array_equal(own, recipe) else f" ({apart.mean():+.3f}{error})"))
    return cells


def noise_table(size: int = 1000, rates: Sequence[float] = (0.03, RATE, 0.3)) -> str:
    """Noise of batches, in that of all records after as many rounds; trusted silos of so many records."""
    rows = ["| epsilon, rounds | " + " | ".join(f"{rate:.0%} of the records" for rate in rates) + " |"]
    rows.append("|---|" + "---|" * len(rates))
    for epsilon, rounds in itertools.product((1.0, 3.0), ROUNDS):
        noise = [planned("trusted", epsilon, rounds, rate, size) for rate in (*rates, 1.0)]
        ratios = " | ".join(f"{each / noise[-1]:.2f}" for each in noise[:-1])
        rows.append(f"| {epsilon:g}, {rounds} | {ratios} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.network_rule", description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(EVERY)}; all when left out")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="what begins so: rule, grid, or a part")
    parser.add_argument("--print", action="store_true", help="measure nothing: print the tables of what is kept")
    parser.add_argument("--noise", action="store_true", help="print how much more noise batches carry than all records")
    options = parser.parse_args()
    if unknown := set(options.tasks) - set(EVERY):
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    for task in [] if options.print or options.noise else options.tasks or EVERY:
        for key, net, rounds, seed, points in asked(task, options.seeds):
            if key not in kept() and key.split("|")[1].startswith(options.only):
                keep(key, measured(task, net, rounds, seed, points))
    print(noise_table() if options.noise else tables())


if __name__ == "__main__":
    main()
