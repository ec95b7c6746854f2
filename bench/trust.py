"""`python -m bench.trust [noise] [utility] [cost]`: what each trust model costs. Prints tables, draws docs/trust.png.

noise: the root mean square error of a private mean against the number of silos. utility: what `auto` reaches, the
recipe of silodp.estimators, on four data sets. cost: CPU seconds and bytes of a round of 32 silos, 50,000 parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.tasks import TASKS, split
from bench.utility import whole_runs
from silodp.channels.aggregated import Part
from silodp.channels.untrusted import Noised
from silodp.config import Config
from silodp.facts import Facts
from silodp.noise import Entropy, rounded_gaussian
from silodp.plan.make import make_plan
from silodp.plots import curve_figure
from silodp.randomness import SystemRandomness
from silodp.releases import Account

FIGURE = Path(__file__).parents[1] / "docs" / "trust.png"
KEPT = Path(__file__).parent / ".trust.json"  # not in the repository: a stopped run goes on where it was
UTILITY, EPSILONS = ("wbcd", "a9a", "covtype", "california"), (1.0, 3.0)
ROUNDS, RECORDS, PARAMETERS = 50, 500, 30
SILOS = (2, 4, 8, 16, 32, 64, 128)
LEVELS: dict[str, dict[str, Any]] = {
    "trusted": {"trust": "trusted"},
    "aggregated, nobody colludes": {"trust": "aggregated", "colluding": 0},
    "aggregated, half collude": {"trust": "aggregated"},
    "shuffled": {"trust": "shuffled"},
    "untrusted": {"trust": "untrusted"},
}


def planned(silos: int, records: int, parameters: int, privacy: dict[str, Any]) -> Any:
    algorithm = {"name": "dp-gd", "rounds": ROUNDS, "step_size": 1.0, "clip": 1.0, "weights": "size"}
    tree: Any = {"algorithm": algorithm, "privacy": {"epsilon": 1.0, "delta": 1e-5} | privacy}
    return make_plan(
        Config(**tree), Facts((records,) * silos, tuple(f"silo {i}" for i in range(silos)), parameters=parameters)
    )


def noise() -> None:
    """Of a mean of 30 numbers, in clip norms: 50 rounds, epsilon 1, 500 records in a silo."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for label, privacy in LEVELS.items():
        plans = [planned(silos, RECORDS, PARAMETERS, privacy) for silos in SILOS]
        error = lambda plan: math.sqrt(PARAMETERS) * plan.std_of_average(next(iter(plan.multipliers)))
        lines[label] = [float(n) for n in SILOS], [error(plan) for plan in plans]
    title = "Error of a private mean, epsilon 1"
    curve_figure(FIGURE, lines, "silos", "clip norms", title=title, log_x=True, log_y=True, markers=True)
    print("| silos | " + " | ".join(map(str, SILOS)) + " |\n" + "|---" * (len(SILOS) + 1) + "|")
    for label, (_, errors) in lines.items():
        print(f"| {label} | " + " | ".join(f"{error:.3g}" for error in errors) + " |")


def utility(seeds: int = 5) -> None:
    """Accuracy, or R^2, on a fifth of the records: mean over five seeds. A stopped run goes on."""
    kept = {label: privacy for label, privacy in LEVELS.items() if label != "shuffled"}
    found: dict[str, float] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name, seed in itertools.product(UTILITY, range(seeds)):
        cells = lambda label: [f"{name}|{epsilon:g}|{label}|{seed}" for epsilon in EPSILONS]  # noqa: B023
        left = [label for label in kept if not found.keys() >= set(cells(label))]
        for label in left:
            asked = [({"epsilon": epsilon} | kept[label], seed) for epsilon in EPSILONS]
            found |= zip(cells(label), whole_runs(split(TASKS[name], seed), asked), strict=True)
            KEPT.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    print("| task | epsilon | " + " | ".join(kept) + " |\n" + "|---" * (len(kept) + 2) + "|")
    for name, epsilon in itertools.product(UTILITY, EPSILONS):
        cells = [[found[f"{name}|{epsilon:g}|{label}|{seed}"] for seed in range(seeds)] for label in kept]
        print(f"| {name} | {epsilon:g} | " + " | ".join(map(shown, cells)) + " |")


def shown(each: list[float]) -> str:
    """Mean and its standard error; seeds that came out worse than no model at all stand apart."""
    good, bad = [e for e in each if e >= 0], [e for e in each if e < 0]
    told = f"{np.mean(good):.3f} ± {np.std(good) / math.sqrt(len(good) - 1):.3f}"
    return told + "".join(f"; one seed {e:.1f}" for e in bad)


def cost(silos: int = 32, size: int = 50_000) -> None:
    """What silos and server do beside gradients: noise, masks, packing, and reading the sum. One core's seconds."""
    value = np.random.default_rng(0).normal(size=size).astype(np.float32) / math.sqrt(size)
    print("| channel | CPU s, all silos | CPU s, server | MB up |\n|---|---|---|---|")
    print("| untrusted | {:.2f} | {:.2f} | {:.1f} |".format(*untrusted_round(silos, size, value)))
    for label, missing, away in (("", 0, 0), (", missing = 3", 3, 0), (", missing = 3, and 3 do not answer", 3, 3)):
        told = aggregated_round(silos, size, value, missing, away)
        print(f"| aggregated{label} | " + "{:.2f} | {:.2f} | {:.1f} |".format(*told))


def untrusted_round(silos: int, size: int, value: np.ndarray) -> tuple[float, float, float]:
    plan = planned(silos, RECORDS, size, {"trust": "untrusted"})
    std, entropy = float(plan.std_over_clip("value")[0]), Entropy()
    step = 2.0 ** math.floor(math.log2(std)) / 256
    began = time.process_time()
    drawn = [rounded_gaussian(value.astype(np.float64), std, step, entropy) * step for _ in range(silos)]
    packed = [plan.noised.pack(Noised(jnp.asarray(each, jnp.float32), jnp.float32(step))) for each in drawn]
    middle = time.process_time()
    server = plan.noised.server_end({"value": size}, None)
    server.mean(packed, jnp.full(silos, 1 / silos), Account.empty(["value"], (silos,)), SystemRandomness())
    return middle - began, time.process_time() - middle, sum(p.arrays["value"].nbytes for p in packed) / 1e6


def aggregated_round(silos: int, size: int, value: np.ndarray, missing: int, away: int) -> tuple[float, float, float]:
    plan = planned(silos, RECORDS, size, {"trust": "aggregated", "missing": missing})
    ends = [plan.noised.silo_end(plan.declared, i, b"plan", None) for i in range(silos)]
    for end in ends:
        end.agree([each.key for each in ends])
    bound = plan.declared.bounds_over_clip("value")[0]
    step = 2.0 ** math.floor(math.log2(float(plan.noised.grids["value"].step)))
    std = jnp.float32(bound * plan.multipliers["value"][0] * (1 + 1e-6))
    part = Part(jnp.asarray(value), jnp.float32(bound), None, std, jnp.float32(step), jnp.int32(0), "value")
    server = plan.noised.server_end({"value": size}, None)
    server.expect(0, "value", [RECORDS] * silos, size)
    spent = [0.0]

    def talk(said: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        said = {i: texts(header) for i, header in said.items()}
        began = time.process_time()
        told = {i: ends[i].step(header) for i, header in said.items()}
        spent[0] += time.process_time() - began
        return {i: texts(answer) for i, answer in told.items()}

    whole = time.process_time()
    server.prepare(talk, range(silos))
    began = time.process_time()
    packed = [end.send(0, "value", part) for end in ends[: silos - away]]
    spent[0] += time.process_time() - began
    server.open(talk, range(len(packed)))
    server.mean(packed, jnp.full(len(packed), 1 / silos), Account.empty(["value"], (silos,)), SystemRandomness())
    sent = sum(p.arrays["part"].nbytes for p in packed) + server.bits / 8
    return spent[0], time.process_time() - whole - spent[0], sent / 1e6


def texts(tree: Any) -> Any:
    """As JSON brings it: keys are text."""
    return {str(key): texts(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def main() -> None:
    parts = {"noise": noise, "utility": utility, "cost": cost}
    parser = argparse.ArgumentParser(prog="python -m bench.trust", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all when left out")
    for name in parser.parse_args().parts or parts:
        print(f"\n{name}: {parts[name].__doc__}\n")
        parts[name]()


if __name__ == "__main__":
    main()
