"""The methods as a textbook writes them: float64 numpy, logistic loss, all records of all silos, no clip, no noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from silodp.config import Config
from silodp.data import FederatedData

Gradient = Callable[[np.ndarray], np.ndarray]


def silo_gradients(data: FederatedData) -> list[Gradient]:
    """The gradient of each silo's mean logistic loss; parameters are (bias, weights)."""

    def of(features: np.ndarray, targets: np.ndarray) -> Gradient:
        rows = np.hstack([np.ones((len(features), 1)), features.astype(np.float64)])
        labels = np.where(targets > 0, 1.0, -1.0)
        return lambda x: -(labels / (1 + np.exp(labels * (rows @ x)))) @ rows / len(rows)

    return [of(silo.features, silo.targets) for silo in data.silos]


def soft_threshold(y: np.ndarray, level: float) -> np.ndarray:
    return np.sign(y) * np.maximum(np.abs(y) - level, 0)


def textbook(name: str, config: Config, data: FederatedData) -> np.ndarray:
    """The last iterate after the config's rounds from zero."""
    options, parts = config.algorithm, silo_gradients(data)
    mean = lambda x: np.mean([gradient(x) for gradient in parts], axis=0)
    eta = options.step_size or 0.0
    l1 = float(options.prox["strength"]) if isinstance(options.prox, dict) else 0.0
    x = np.zeros(1 + data.input_shape[0])
    for _ in range(options.rounds):
        if name == "local-sgd":
            x = np.mean([local_steps(x, g, eta, options.local_steps or 1) for g in parts], axis=0)
        else:
            # With exact gradients a recursive difference, a variance-reduced or a plain gradient are the same.
            x = soft_threshold(x - eta * mean(x), eta * l1)
    return x


def local_steps(x: np.ndarray, gradient: Gradient, eta: float, steps: int) -> np.ndarray:
    for _ in range(steps):
        x = x - eta * gradient(x)
    return x
