"""What one would compare a run with: a predictor that looks at no features, and a linear model without privacy.

They are computed on the records, as the history is: no epsilon covers them.
"""

from __future__ import annotations

import warnings

import numpy as np

from silodp.data.types import FederatedData

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
    """scikit-learn's, on all silos' records together."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LinearRegression, LogisticRegression

    assert data.test is not None
    features, targets = pooled(data)
    tests = np.asarray(data.test.features).reshape(len(data.test), -1)
    if metric == "accuracy" and len(np.unique(targets)) < 2:
        return constant(data, metric)
    model = LogisticRegression(max_iter=200) if metric == "accuracy" else LinearRegression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # near enough for a line in a figure
        predicted = model.fit(features, targets).predict(tests)
    right = predicted == data.test.targets if metric == "accuracy" else (predicted - data.test.targets) ** 2
    return float(np.mean(right))
