"""`python -m bench.correlated`: would correlated noise help minibatches here? A twin in numpy, outside of the library.

One server, a linear model on MNIST's oriented gradients. A pass cuts the records into batches, the same in every pass,
so a record takes part once a pass, `batches` rounds apart. Ways to spend the same true epsilon:

    independent   a round's noise is its own; a record that takes part k times moves all k sums (no amplification)
    banded        noise C^-1 z, C the banded square root of the prefix sums, columns of length 1, bands narrower than a
                  pass: the rounds of a record are orthogonal columns, so it costs the same mu as `independent`
    poisson       DP-SGD: batches by coins, with the library's own noise for it
    full          every record in every round, as many rounds as make the same number of passes, or 20 of them

Every way has its best step of STEPS, chosen on the test images, alike for all. Clip norm .5, mean of the last half.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_triangular, toeplitz

from silodp.data import load_data
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan

RECORDS, CLIP, SEEDS, DELTA = 10_000, 0.5, 2, 1e-5
STEPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PASSES, BATCHES, EPSILONS = (1, 4), 20, (1.0, 3.0, 8.0)
ENOUGH = 20  # rounds of the full batch, were they affordable


def banded_root(rounds: int, bands: int) -> np.ndarray:
    """C: the square root of the lower triangle of ones, cut to `bands` diagonals, columns of length 1."""
    root = np.cumprod(np.append(1.0, 1 - 0.5 / np.arange(1, rounds)))  # 1, 1/2, 3/8, 5/16, ...
    root[bands:] = 0
    made = np.tril(toeplitz(root))
    return made / np.linalg.norm(made, axis=0)


def planned(epsilon: float, algorithm: dict) -> float:
    """The library's std of the noise on a mean, in clip norms."""
    tree = {"privacy": {"epsilon": epsilon, "delta": DELTA, "trust": "trusted"}, "algorithm": algorithm}
    config = parse_config({**tree, "algorithm": {**algorithm, "clip": 1.0, "step_size": 1.0}})
    return make_plan(config, Facts((RECORDS,), ("all",))).std_of_average("value")


def noise_of(way: str, epsilon: float, passes: int, size: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Noise of every round on the mean gradient, in clip norms, and the batches of a pass."""
    rounds = passes * BATCHES
    if way.startswith("full"):
        count = passes if way == "full" else ENOUGH
        return planned(epsilon, {"name": "dp-gd", "rounds": count}) * rng.normal(size=(count, size)), 1
    if way == "poisson":
        options = {"name": "dp-sgd", "rounds": rounds, "batch": RECORDS // BATCHES}
        return planned(epsilon, options) * rng.normal(size=(rounds, size)), BATCHES
    # A record in `passes` rounds: as dear as so many releases of its batch.
    std = planned(epsilon, {"name": "dp-gd", "rounds": passes}) * BATCHES
    noise = std * rng.normal(size=(rounds, size))
    correlate = banded_root(rounds, BATCHES) if way == "banded" else np.eye(rounds)
    return solve_triangular(correlate, noise, lower=True), BATCHES


def trained(x: np.ndarray, y: np.ndarray, noise: np.ndarray, batches: int, coins: bool, seed: int) -> np.ndarray:
    """Weights for every step size: DP-SGD with this noise, from 0; the mean of the last half of the iterates."""
    rng = np.random.default_rng(seed)
    parts = np.array_split(rng.permutation(len(x)), batches)
    steps, w, total = np.array(STEPS), np.zeros((len(STEPS), x.shape[1], y.shape[1])), 0.0
    for t, own in enumerate(noise):
        rows = np.flatnonzero(rng.uniform(size=len(x)) < 1 / batches) if coins else parts[t % batches]
        gradient = mean_gradient(x[rows], y[rows], w, len(x) / batches) + CLIP * own.reshape(w.shape[1:])
        w = w - steps[:, None, None] * gradient
        total = total + w if 2 * t + 1 >= len(noise) else total
    return np.asarray(total)


def mean_gradient(x: np.ndarray, y: np.ndarray, w: np.ndarray, divisor: float) -> np.ndarray:
    scores = np.einsum("nd,sdc->snc", x, w, optimize=True)
    scores = np.exp(scores - scores.max(axis=2, keepdims=True))
    left = scores / scores.sum(axis=2, keepdims=True) - y
    lengths = np.linalg.norm(left, axis=2) * np.linalg.norm(x, axis=1)
    left *= np.minimum(1, CLIP / np.maximum(lengths, 1e-12))[:, :, None]
    return np.einsum("nd,snc->sdc", x, left, optimize=True) / divisor


def main() -> None:
    data = load_data("mnist", 1, limit=RECORDS, preprocess=["hog"])
    assert data.test is not None
    centre = data.silos[0].features.mean(axis=0)  # of all ways alike, and not private
    inputs = lambda silo: np.hstack([3 * (silo.features - centre), np.ones((len(silo.targets), 1))])
    x, y = inputs(data.silos[0]), np.eye(10)[np.asarray(data.silos[0].targets)]
    tested, labels = inputs(data.test), np.asarray(data.test.targets)
    ways = ("independent", "banded", "poisson", "full", f"full, {ENOUGH} rounds")
    print("| passes | epsilon |", " | ".join(ways), "|")
    print("|---|---|" + "---|" * len(ways))
    for passes in PASSES:
        for epsilon in EPSILONS:
            cells = [cell(way, epsilon, passes, x, y, tested, labels) for way in ways]
            print(f"| {passes} | {epsilon:g} |", " | ".join(cells), "|", flush=True)


def cell(
    way: str, epsilon: float, passes: int, x: np.ndarray, y: np.ndarray, tested: np.ndarray, labels: np.ndarray
) -> str:
    found = []
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, passes])
        noise, batches = noise_of(way, epsilon, passes, x.shape[1] * y.shape[1], rng)
        w = trained(x, y, noise, batches, way == "poisson", seed)
        found.append([float(np.mean(np.argmax(tested @ each, axis=1) == labels)) for each in w])
    means = np.mean(found, axis=0)
    return f"{means.max():.3f} (step {STEPS[int(means.argmax())]:g})" if math.isfinite(means.max()) else "-"


if __name__ == "__main__":
    main()
