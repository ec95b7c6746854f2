"""The methods as a textbook writes them: float64 numpy, logistic loss, no clip, no noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from silodp.config import Config
from silodp.data import FederatedData, SiloData

Gradient = Callable[[np.ndarray], np.ndarray]


def gradient_of(silo: SiloData, rows: slice = slice(None)) -> Gradient:
    """The gradient of the mean logistic loss over these records; parameters are (bias, weights)."""
    features = silo.features[rows].astype(np.float64)
    table = np.hstack([np.ones((len(features), 1)), features])
    labels = np.where(silo.targets[rows] > 0, 1.0, -1.0)
    return lambda x: -(labels / (1 + np.exp(labels * (table @ x)))) @ table / len(table)


def soft_threshold(y: np.ndarray, level: float) -> np.ndarray:
    return np.sign(y) * np.maximum(np.abs(y) - level, 0)


def textbook(name: str, config: Config, data: FederatedData) -> np.ndarray:
    """The last iterate after the config's rounds from zero."""
    options = config.algorithm
    parts = [gradient_of(silo) for silo in data.silos]
    weights = data.sizes if options.weights == "size" else None
    mean = lambda x: np.average([gradient(x) for gradient in parts], axis=0, weights=weights)
    eta = options.step_size or 0.0
    l1 = float(options.prox["strength"]) if isinstance(options.prox, dict) else 0.0
    x = np.zeros(1 + data.input_shape[0])
    if name == "mu2":
        return mu2(data, x, eta, options.rounds, options.batch or 1, options.diameter or 0.0)
    for r in range(options.rounds):
        if name == "local-sgd":
            x = np.mean([local_steps(x, g, eta, options.local_steps or 1) for g in parts], axis=0)
        elif name == "prox-sgd":
            x = x - eta * np.mean([chunk_gradient(silo, r, options.rounds)(x) for silo in data.silos], axis=0)
        elif name in ("diff2-bvr-l-sgd", "ce-psgm", "ce-psgm-fg"):
            x = carried_on(x, mean(x), parts[r % len(parts)], eta, options.local_steps or 1)
        else:
            # With exact gradients a recursive difference, a variance-reduced or a plain gradient are the same.
            x = soft_threshold(x - eta * mean(x), eta * l1)
    return x


def local_steps(x: np.ndarray, gradient: Gradient, eta: float, steps: int) -> np.ndarray:
    for _ in range(steps):
        x = x - eta * gradient(x)
    return x


def chunk_gradient(silo: SiloData, round: int, rounds: int) -> Gradient:
    size = len(silo) // rounds
    return gradient_of(silo, slice(round * size, (round + 1) * size))


def carried_on(x: np.ndarray, v: np.ndarray, gradient: Gradient, eta: float, steps: int) -> np.ndarray:
    """One silo carries the estimate on by its own differences."""
    before, x = x, x - eta * v
    for _ in range(steps - 1):
        v = v + gradient(x) - gradient(before)
        before, x = x, x - eta * v
    return x


def mu2(data: FederatedData, x: np.ndarray, eta: float, rounds: int, chunk: int, diameter: float) -> np.ndarray:
    w, y, q = x, x, np.zeros_like(x)
    for t in range(1, rounds + 1):
        records = slice((t - 1) * chunk, t * chunk)
        fresh = [gradient_of(silo, records) for silo in data.silos]
        q = q + np.mean([t * g(x) - (t - 1) * g(y) for g in fresh], axis=0)
        w = w - eta * q
        w = w * min(1, diameter / 2 / max(np.linalg.norm(w), 1e-300))
        y, x = x, (1 - 2 / (t + 2)) * x + 2 / (t + 2) * w
    return y
