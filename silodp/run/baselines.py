"""What one would compare a run with: a predictor that looks at no features, and a linear model without privacy.

They are computed on the records, as the history is: no epsilon covers them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from silodp.data.types import FederatedData

FEW_FEATURES = 500
NEWTON_STEPS, TINY = 100, 1e-9
LARGEST = 10_000_000  # numbers times classes for which a linear model takes a second or two
Columns = dict[str, dict[str, float]]


def baselines(data: FederatedData, metric: str | None, *, without_privacy: bool) -> Columns:
    """By column of the history: the metric on the test records, of each predictor by its name."""
    test = data.test
    plain = all(isinstance(part, np.ndarray) for part in (data.silos[0].features, data.silos[0].targets))
    if metric is None or test is None or not len(test) or not plain or np.ndim(data.silos[0].targets) != 1:
        return {}
    kept = {"majority class" if metric == "accuracy" else "mean predictor": constant(data, metric)}
    if without_privacy and cost(data) <= LARGEST:
        kept["linear model without privacy"] = linear(data, metric)
    return {f"test_{metric}": kept}


def pooled(data: FederatedData) -> tuple[np.ndarray, np.ndarray]:
    features = np.concatenate([np.asarray(silo.features) for silo in data.silos])
    return features.reshape(len(features), -1), np.concatenate([np.asarray(silo.targets) for silo in data.silos])


def cost(data: FederatedData) -> int:
    return sum(data.sizes) * int(np.prod(data.input_shape)) * max(1, len(data.classes))


def constant(data: FederatedData, metric: str) -> float:
    targets, truth = pooled(data)[1], np.asarray(data.test.targets)  # pyright: ignore[reportOptionalMemberAccess]
    if metric == "mse":
        return float(np.mean((truth - targets.mean()) ** 2))
    values, counts = np.unique(targets, return_counts=True)
    return float(np.mean(truth == values[counts.argmax()]))


def linear(data: FederatedData, metric: str) -> float:
    """A linear model on all silos' records together."""
    assert data.test is not None
    features, targets = pooled(data)
    tests = np.asarray(data.test.features).reshape(len(data.test), -1)
    if metric == "accuracy" and len(np.unique(targets)) < 2:
        return constant(data, metric)
    predicted = fitted(metric, features, targets)(tests)
    right = predicted == data.test.targets if metric == "accuracy" else (predicted - data.test.targets) ** 2
    return float(np.mean(right))


Predict = Callable[[np.ndarray], np.ndarray]


def fitted(metric: str, features: np.ndarray, targets: np.ndarray) -> Predict:
    """Least squares, or logistic regression; of two classes and few features before scikit-learn would be imported."""
    if metric == "mse":
        w = np.linalg.lstsq(with_one(features), targets.astype(np.float64), rcond=None)[0]
        return lambda x: with_one(x) @ w
    classes = np.unique(targets)
    if len(classes) == 2 and features.shape[1] <= FEW_FEATURES:
        w = two_classes(with_one(features), targets == classes[1])
        return lambda x: classes[(with_one(x) @ w > 0).astype(int)]
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # near enough for a line in a figure
        return LogisticRegression(max_iter=200).fit(features, targets).predict


def with_one(features: np.ndarray) -> np.ndarray:
    return np.hstack([features.astype(np.float64), np.ones((len(features), 1))])


def two_classes(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Newton's steps on what scikit-learn minimises: the sum of losses and |w|^2 / 2, without the constant's weight."""
    penalty = np.ones(x.shape[1])
    penalty[-1] = 0.0
    loss = lambda w: np.logaddexp(0, np.where(positive, -1.0, 1.0) * (x @ w)).sum() + penalty @ w**2 / 2
    w = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        p = 0.5 * (1 + np.tanh(x @ w / 2))
        gradient = x.T @ (p - positive) + penalty * w
        hessian = (x.T * (p * (1 - p))) @ x + np.diag(penalty + TINY)
        step = np.linalg.solve(hessian, gradient)
        shorter = (2.0**-k for k in range(20))
        size = next((each for each in shorter if loss(w - each * step) < loss(w)), None)
        if size is None:
            return w  # nothing is gained any more
        w = w - size * step
    return w
