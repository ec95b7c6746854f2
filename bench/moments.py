"""`python -m bench.moments [TASK ...]`: second moments that are full, diagonal, or of blocks, on tables in pieces.

A feature's pieces are a block. Everything else is `auto`'s, whose own choice of pieces and moment stands beside.
Models are trained by `bench.averages`, as in `python -m bench.utility`.
"""

from __future__ import annotations

import argparse

import numpy as np

from bench.averages import auto_setting, scores
from bench.tasks import LONGEST, TASKS, Split, split
from bench.utility import WHITEN, auto, ground_of

CELLS = [(epsilon, trust) for epsilon in (0.5, 1.0, 3.0) for trust in ("trusted", "untrusted")]
SEEDS, KNOTS = 2, 3


def blocks_of(made: Split, knots: int) -> list[int]:
    """For each feature of `made.in_pieces(knots)` the number of its block; flags stand alone."""
    numbers = int(made.numbers.sum())
    return [i % numbers for i in range((knots - 1) * numbers)] + list(range(numbers, len(made.numbers)))


def measured(name: str, knots: int, seed: int) -> np.ndarray:
    """A row for each cell: the moments, then `auto` as it is."""
    made = split(TASKS[name], seed)
    ground = ground_of(made.in_pieces(knots))
    asked = [{"moment": "full"}, {"moment": "diagonal"}, {"moment": "blocks", "blocks": blocks_of(made, knots)}]
    plans = [ground.plan(*cell, {"name": "auto"}, WHITEN | each) for cell in CELLS for each in asked]
    found = scores(ground, [auto_setting(ground, plan, seed) for plan in plans], LONGEST)
    return np.hstack([np.reshape(found, (len(CELLS), -1)), np.reshape(auto(made, CELLS, seed), (-1, 1))])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["covtype", "california", "gas-turbine", "wbcd"])
    asked = parser.parse_args(arguments)
    print(f"accuracy or R^2, mean of {SEEDS} splits, broken lines of {KNOTS} knots")
    print("| task | epsilon | trust | full | diagonal | blocks | `auto` as it is |")
    print("|---|---|---|---|---|---|---|")
    for name in asked.tasks:
        rows = np.mean([measured(name, KNOTS, seed) for seed in range(SEEDS)], axis=0)
        for (epsilon, trust), row in zip(CELLS, rows, strict=True):
            cells = " | ".join(f"{value:.3f}".replace("0.", ".") for value in row)
            print(f"| {name} | {epsilon:g} | {trust} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
