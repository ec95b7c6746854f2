"""What `python -m bench.front` compares with. All get the epsilon and delta of the front door, and more than any user
has: every free choice of theirs is the one that is best on the test records.

dp-gd       full gradients, clipped and noised; on features as the schema encodes them, and on features standardised by
            the training records' own means and deviations (no epsilon covers that)
objective   objective perturbation (Kifer, Smith, Thakurta 2012, Gaussian noise): one party that sees all records
diffprivlib IBM's LogisticRegression and LinearRegression: one party, delta 0
adassp      sufficient statistics (Wang 2018): regression only, one party
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LinearRegression, LogisticRegression

from silodp.privacy import gaussian

INTERPRETER = "SILODP_DIFFPRIVLIB"
ROUNDS, STEPS = (20, 100), (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
CLIPS = (0.01, 0.03, 0.1, 0.3, 1.0)
LENGTHS = (0.5, 1.0, 2.0)  # records are shortened to this length where a method needs a bound


@dataclass(frozen=True)
class Split:
    """Encoded records of one split, about 1 long; targets are 0 and 1, or numbers in [-1, 1]."""

    train: np.ndarray
    targets: np.ndarray
    test: np.ndarray
    truth: np.ndarray
    classes: bool

    def score(self, x: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Accuracy or R^2 of each column of scores."""
        scores = scores.reshape(len(scores), -1)
        if self.classes:
            return np.mean((scores > 0) == (x[:, None] > 0.5), axis=0)
        with np.errstate(all="ignore"):
            found = 1 - np.mean((scores - x[:, None]) ** 2, axis=0) / np.var(x)
        return np.where(np.isfinite(found), found, -np.inf)

    def tested(self, weights: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.score(self.truth, with_one(self.test) @ weights)


def with_one(features: np.ndarray) -> np.ndarray:
    return np.hstack([features, np.ones((len(features), 1), features.dtype)])


def standardised(split: Split) -> Split:
    centre, spread = split.train.mean(0), split.train.std(0)
    scale = np.where(spread > 0, spread, 1) * math.sqrt(split.train.shape[1])
    to = lambda x: ((x - centre) / scale).astype(np.float32)
    return Split(to(split.train), split.targets, to(split.test), split.truth, split.classes)


def dp_gd(split: Split, epsilon: float, delta: float, silos: int, seed: int) -> list[float]:
    """Test scores of every setting, in a fixed order. silos: as many add noise of their own; 1 for a trusted server."""
    mu = gaussian.mu_of(epsilon, delta)
    found = []
    for features, rounds in itertools.product((split, standardised(split)), ROUNDS):
        found += descended(features, rounds, math.sqrt(silos * rounds) / mu, seed)
    return found


def descended(split: Split, rounds: int, noise: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    steps, clips = (np.array(each, np.float32) for each in zip(*itertools.product(STEPS, CLIPS), strict=True))
    x, y = with_one(split.train).astype(np.float32), split.targets.astype(np.float32)[:, None]
    lengths = np.linalg.norm(x, axis=1)[:, None]
    weights = np.zeros((x.shape[1], len(steps)), np.float32)
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            scores = x @ weights
            slopes = (expit(scores) if split.classes else scores) - y
            slopes *= np.minimum(1, clips / np.maximum(np.abs(slopes) * lengths, 1e-12))
            drawn = rng.normal(size=weights.shape).astype(np.float32) * (2 * clips * noise)
            weights -= steps * (x.T @ slopes + drawn) / len(x)
    return split.tested(weights).tolist()


def shortened(features: np.ndarray, length: float) -> np.ndarray:
    x = with_one(features).astype(np.float64)
    return x * np.minimum(1, length / np.linalg.norm(x, axis=1))[:, None]


def objective(split: Split, epsilon: float, delta: float, seed: int) -> list[float]:
    """Only for classes: a squared loss has no bound on its gradients."""
    if not split.classes:
        return []
    rng, found = np.random.default_rng(seed), []
    for length in LENGTHS:
        x = shortened(split.train, length)
        std = length * math.sqrt(8 * math.log(2 / delta) + 4 * epsilon) / epsilon
        ridge = length**2 / 4 * 2 / epsilon
        found.append(minimised(x, split.targets, rng.normal(size=x.shape[1]) * std, ridge))
    return [float(split.tested(weights)[0]) for weights in found]


def minimised(x: np.ndarray, y: np.ndarray, noise: np.ndarray, ridge: float) -> np.ndarray:
    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = x @ w
        value = np.sum(np.logaddexp(0, margin) - y * margin) + ridge / 2 * w @ w + noise @ w
        return value / len(x), (x.T @ (expit(margin) - y) + ridge * w + noise) / len(x)

    return minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x


def diffprivlib(split: Split, epsilons: Sequence[float], seed: int) -> list[list[float]]:
    """By an interpreter that has it (bench/front_diffprivlib.py says which); no scores where there is none."""
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        return [[] for _ in epsilons]
    other = standardised(split)
    features = {"train": split.train, "test": split.test, "train2": other.train, "test2": other.test}
    told = {"targets": split.targets, "truth": split.truth, "classes": split.classes}
    bound = float(np.abs(split.train).max())  # public: the schema's columns are in [-1, 1]
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, **features, **told, epsilons=epsilons, seed=seed, lengths=LENGTHS, bound=bound)
        file.flush()
        command = [interpreter, str(Path(__file__).with_name("front_diffprivlib.py")), file.name]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def adassp(split: Split, epsilon: float, delta: float, seed: int) -> list[float]:
    """Three Gaussian releases of equal shares: smallest eigenvalue, second moment, product with the target."""
    if split.classes:
        return []
    rng, found, share = np.random.default_rng(seed), [], gaussian.mu_of(epsilon, delta) / math.sqrt(3)
    for features, length in itertools.product((split, standardised(split)), LENGTHS):
        x, y = shortened(features.train, length), split.targets
        d, square, product = x.shape[1], math.sqrt(2) * length**2, 2 * length  # how far they move
        least = np.linalg.eigvalsh(x.T @ x)[0] + rng.normal() * length**2 / share
        lowest = max(0.0, least - 2 * length**2 / share)
        ridge = max(0.0, math.sqrt(d) * square / share * 2 - lowest)
        drawn = np.triu(rng.normal(size=(d, d))) * square / share
        moment = x.T @ x + drawn / math.sqrt(2) + np.triu(drawn, 1).T / math.sqrt(2)
        weights = np.linalg.solve(moment + ridge * np.eye(d), x.T @ y + rng.normal(size=d) * product / share)
        tested = shortened(features.test, length) @ weights
        found.append(float(split.score(split.truth, tested)[0]))
    return found


def without_privacy(split: Split) -> float:
    model = LogisticRegression(C=100.0, max_iter=2000) if split.classes else LinearRegression()
    return float(model.fit(split.train, split.targets).score(split.test, split.truth))


def tuned(peer: str, split: Split, epsilon: float, delta: float, seed: int) -> list[float]:
    """Test scores of a peer's settings, in a fixed order; none where it does not do such a task."""
    if peer == "diffprivlib":
        return diffprivlib(split, [epsilon], seed)[0]
    return {"objective": objective, "adassp": adassp}[peer](split, epsilon, delta, seed)
