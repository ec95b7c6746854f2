"""`python -m bench.nonlinear [TASK ...]`: models of tables that are not linear, in the same budget.

`auto` on the features as they are, on its own broken lines (an additive model), on random features beside the features
(relu of public random directions), and `auto`'s small network. The first three are trained by `bench.averages`, the
network through the whole library, on one split. Boosted histograms are dp-ebm of `python -m bench.utility`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import numpy as np

from bench.averages import DELTA
from bench.families import Cell, run_scores
from bench.tasks import TASKS, Split, split
from bench.utility import auto

CELLS: list[Cell] = [(epsilon, trust) for epsilon in (1.0, 3.0) for trust in ("trusted", "untrusted")]
SEEDS, RANDOM = 3, (50, 200)
HEADS = ("linear", "broken lines", *(f"{count} random features" for count in RANDOM), "network")


def with_random_features(made: Split, count: int) -> Split:
    """Public: drawn from a seed, not from the records."""
    rng = np.random.default_rng(0)
    size = made.train[0].shape[1]
    directions, shifts = rng.normal(size=(size, count)), rng.normal(size=count) / 2

    def changed(x: np.ndarray) -> np.ndarray:
        bent = np.maximum(0, x @ directions + shifts) * math.sqrt(2 / count)
        return (np.hstack([x, bent - bent.mean(axis=1, keepdims=True)]) / math.sqrt(2)).astype(np.float32)

    pair = lambda held: (changed(held[0]), held[1])
    flags = np.zeros(size + count, bool)
    return replace(made, train=pair(made.train), test=pair(made.test), numbers=flags)


def network(made: Split) -> list[float]:
    asked = [{"epsilon": epsilon, "delta": DELTA, "trust": trust} for epsilon, trust in CELLS]
    tree: dict[str, Any] = {"model": {"kind": "mlp"}, "algorithm": {"name": "auto"}, "run": {"every": 100}}
    scaled = lambda held: (held[0] * np.float32(math.sqrt(held[0].shape[1])), held[1])  # standardised again
    data = replace(made, train=scaled(made.train), test=scaled(made.test)).data
    return run_scores(made.kind, data, [tree | {"privacy": privacy} for privacy in asked])


def measured(name: str) -> np.ndarray:
    """A row for each cell, a column for each model."""
    found = []
    for seed in range(SEEDS):
        made = split(TASKS[name], seed)
        ways = [auto(made, CELLS, seed, knots=0), auto(made, CELLS, seed)]
        ways += [auto(with_random_features(made, count), CELLS, seed, knots=0) for count in RANDOM]
        found.append(np.hstack(ways))
    return np.hstack([np.mean(found, axis=0), np.reshape(network(split(TASKS[name], 0)), (-1, 1))])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["covtype", "california", "magic", "phoneme", "penbased", "ring"])
    asked = parser.parse_args(arguments)
    print(f"accuracy or R^2, mean of {SEEDS} splits; of the network one split")
    print("| task | epsilon | trust | " + " | ".join(HEADS) + " |")
    print("|---" * (3 + len(HEADS)) + "|")
    for name in asked.tasks:
        for (epsilon, trust), row in zip(CELLS, measured(name), strict=True):
            cells = " | ".join(f"{value:.3f}".replace("0.", ".") for value in row)
            print(f"| {name} | {epsilon:g} | {trust} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
