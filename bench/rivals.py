"""Other methods for `python -m bench.utility`, on the same records. All but local ones see all records in one place.

objective   Kifer, Smith, Thakurta 2012: minimise the sum of losses, a quadratic and a random linear term (logistic)
adassp      Wang 2018: least squares from noised sums, with a ridge by the noised smallest eigenvalue; its three
            releases are calibrated together here, as Gaussians, which is better than the paper's own split
dp-ebm      where the package interpret-core is installed
opacus      where it is (bench/rivals_torch.py)
diffprivlib IBM's LogisticRegression and LinearRegression, delta 0, where SILODP_DIFFPRIVLIB names an interpreter that
            has them (bench/front_diffprivlib.py)
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression

from bench import front_peers
from bench.rivals_torch import opacus
from bench.tasks import LONGEST, Arrays, Task
from silodp.privacy.gaussian import mu_of

DELTA = 1e-5
RIDGES = (0.0, 1.0, 10.0, 100.0)  # of objective perturbation, beside the one it needs; the best on test is taken


def linear_model(task: Task, train: Arrays, test: Arrays) -> float:
    model = LinearRegression() if task.kind == "linear" else LogisticRegression(C=100.0, max_iter=2000)
    return float(model.fit(*train).score(*test))


def trees(task: Task, train: Arrays, test: Arrays) -> float:
    model = HistGradientBoostingRegressor() if task.kind == "linear" else HistGradientBoostingClassifier()
    return float(model.fit(*train).score(*test))


def with_constant(features: np.ndarray) -> np.ndarray:
    return np.column_stack([features, np.ones(len(features))]).astype(np.float64)


def objective(task: Task, train: Arrays, test: Arrays, epsilon: float, seed: int) -> list[float]:
    rows, signs, rng = with_constant(train[0]), 2.0 * train[1] - 1, np.random.default_rng(seed)
    longest = math.sqrt(LONGEST**2 + 1)
    needed = 2 * (longest**2 / 4) / epsilon
    std = longest * math.sqrt(8 * math.log(2 / DELTA) + 4 * epsilon) / epsilon
    pull = rng.normal(size=rows.shape[1]) * std

    def trained(ridge: float) -> np.ndarray:
        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            margin = signs * (rows @ w)
            value = np.logaddexp(0, -margin).sum() + ridge / 2 * w @ w + pull @ w
            return float(value), -rows.T @ (signs * expit(-margin)) + ridge * w + pull

        return minimize(loss, np.zeros(rows.shape[1]), jac=True, method="L-BFGS-B").x

    hits = lambda w: float(((with_constant(test[0]) @ w > 0) == test[1]).mean())
    return [hits(trained(needed + ridge)) for ridge in RIDGES]


def adassp(task: Task, train: Arrays, test: Arrays, epsilon: float, seed: int) -> float:
    rows, rng = with_constant(train[0]), np.random.default_rng(seed)
    longest, largest = math.sqrt(LONGEST**2 + 1), 4.0  # targets, of unit deviation, are cut at four
    targets, d = np.clip(train[1], -largest, largest), rows.shape[1]
    mu = mu_of(epsilon, DELTA) / math.sqrt(3)
    square = math.sqrt(2) * longest**2 / mu  # std of a number of X^T X in the Frobenius geometry
    upper = np.triu(rng.normal(size=(d, d)) * square / math.sqrt(2), 1)
    moment = rows.T @ rows + upper + upper.T + np.diag(rng.normal(size=d) * square)
    cross = rows.T @ targets + rng.normal(size=d) * 2 * longest * largest / mu
    smallest = max(0.0, np.linalg.eigvalsh(rows.T @ rows)[0] + (rng.normal() - 1.96) * longest**2 / mu)
    ridge = max(0.0, math.sqrt(2 * d) * square - smallest)
    found = np.linalg.lstsq(moment + ridge * np.eye(d), cross, rcond=None)[0]
    return 1 - float(np.mean((with_constant(test[0]) @ found - test[1]) ** 2) / np.var(test[1]))


def ebm(task: Task, train: Arrays, test: Arrays, epsilon: float, seed: int) -> float:
    from interpret import privacy  # pyright: ignore[reportMissingImports]

    kind = privacy.DPExplainableBoostingRegressor if task.kind == "linear" else privacy.DPExplainableBoostingClassifier
    bounds = np.tile([-LONGEST, LONGEST], (train[0].shape[1], 1))
    extra: dict[str, Any] = {"privacy_target_min": -4.0, "privacy_target_max": 4.0} if task.kind == "linear" else {}
    model = kind(epsilon=epsilon, delta=DELTA, privacy_bounds=bounds, random_state=seed, n_jobs=1, **extra)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(model.fit(*train).score(*test))


def diffprivlib(task: Task, train: Arrays, test: Arrays, epsilons: Sequence[float], seed: int) -> list[Any]:
    """One interpreter for all epsilons: most of its time is its start. Targets, cut at four deviations, are made to lie
    in [-1, 1]."""
    unit = 4.0 if task.kind == "linear" else 1.0
    targets = np.clip(train[1] / unit, -1, 1) if task.kind == "linear" else train[1]
    made = front_peers.Split(train[0], targets, test[0], test[1] / unit, task.kind != "linear")
    return front_peers.diffprivlib(made, epsilons, seed)


OneEpsilon = Callable[[Task, Arrays, Arrays, float, int], Any]
Rival = Callable[[Task, Arrays, Arrays, Sequence[float], int], list[Any]]


def one_by_one(method: OneEpsilon) -> Rival:
    return lambda task, train, test, epsilons, seed: [method(task, train, test, each, seed) for each in epsilons]


def package(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


ALL = ("logistic", "softmax", "linear")
# Method, the models that it has, and whether this machine has it.
CENTRAL: dict[str, tuple[Rival, tuple[str, ...], Callable[[], bool]]] = {
    "objective": (one_by_one(objective), ("logistic",), lambda: True),
    "adassp": (one_by_one(adassp), ("linear",), lambda: True),
    "dp-ebm": (one_by_one(ebm), ("logistic", "linear"), package("interpret")),
    "opacus": (one_by_one(opacus), ALL, package("opacus")),
    "diffprivlib": (diffprivlib, ALL, lambda: bool(os.environ.get(front_peers.INTERPRETER))),
}


def central(task: Task) -> dict[str, Rival]:
    """The methods that there are for a task, and on this machine."""
    return {name: method for name, (method, kinds, there) in CENTRAL.items() if task.kind in kinds and there()}
