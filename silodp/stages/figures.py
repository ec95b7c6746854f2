"""What the numbers of held-out records say: metrics with standard errors, of every silo and over all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from silodp.releases import Vector
from silodp.stages.evaluate import BINS, STREAM, Metrics

if TYPE_CHECKING:
    from silodp.plan.plan import Plan

DRAWS = 200  # of the error bar of an area under the curve


def held_out_figures(plan: Plan, table: Vector) -> dict[str, Any]:
    """Every silo's figures and those over all held-out records, each with its standard error, as plain data."""
    stage = plan.evaluation
    assert stage is not None
    asked, sizes = stage.algorithm, np.asarray(stage.facts.sizes)
    assert isinstance(asked, Metrics)
    rows = np.asarray(table, np.float64).reshape(len(sizes), asked.size)
    stds = stage.std_over_clip(STREAM) * asked.clip if plan.private else np.zeros(len(sizes))
    weights = np.asarray(stage.facts.weights)
    overall = figures(asked, weights @ rows, float(np.linalg.norm(weights * stds)), int(sizes.sum()))
    each = [figures(asked, row, float(std), int(n)) for row, std, n in zip(rows, stds, sizes, strict=True)]
    silos = [
        {"silo": name, "records": int(n)} | plain(own)
        for name, n, own in zip(stage.facts.names, sizes, each, strict=True)
    ]
    return {"records": int(sizes.sum())} | plain(overall) | {"silos": silos}


def plain(found: dict[str, Figure]) -> dict[str, Any]:
    return {name: {"value": f.value, "error": f.error} for name, f in found.items() if math.isfinite(f.value)}


@dataclass(frozen=True)
class Figure:
    """A metric with its standard error: of the noise and of the records held out together."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {self.error:.3f}"


def figures(asked: Metrics, row: Float[np.ndarray, " k"], std: float, records: int) -> dict[str, Figure]:
    """What one row of means says; `std`: of the noise in each of its numbers, `records`: that it is a mean of."""
    told = np.asarray(row, np.float64)
    most = float(asked.most)
    if asked.classes == 1:
        return of_numbers(told, std, records, most)
    accuracy, loss = told[0] + 0.5, most * min(1.0, max(0.0, told[1] + 0.5))
    found = {
        "accuracy": Figure(within(accuracy), math.hypot(std, sampling(accuracy, records))),
        "log_loss": Figure(loss, math.hypot(most * std, spread(loss, most, records))),
    }
    if asked.bins:
        counts = 2 * told[2:].reshape(2, BINS)
        found["auc"] = area_with_error(counts, 2 * std, records)
        found["majority"] = majority(counts, 2 * std, records)
    return found


def of_numbers(told: Float[np.ndarray, " k"], std: float, records: int, most: float) -> dict[str, Figure]:
    error = most * min(1.0, max(0.0, told[0] + 0.5))
    variance = max(1e-6, told[2] - told[1] ** 2) * most / 4
    found = Figure(error, math.hypot(most * std, spread(error, most, records)))
    moved = math.hypot(found.error / variance, error / variance**2 * most / 4 * std * math.hypot(1.0, 2 * told[1]))
    return {"mse": found, "r2": Figure(1 - error / variance, moved)}


def within(share: float) -> float:
    return min(1.0, max(0.0, share))


def sampling(share: float, records: int) -> float:
    return math.sqrt(max(within(share) * (1 - within(share)), 1 / (4 * records)) / records)


def spread(mean: float, most: float, records: int) -> float:
    """At most: a number between 0 and `most` with this mean varies no more."""
    return math.sqrt(max(0.0, mean * (most - mean)) / records)


def area(counts: Float[np.ndarray, "2 b"]) -> float:
    """The chance that a record of the second class has the higher score, ties counting half."""
    first, second = np.maximum(counts, 0)
    if not (first.sum() > 0 and second.sum() > 0):
        return 0.5
    below = np.cumsum(first) - first / 2
    return float(second @ below / (first.sum() * second.sum()))


def area_with_error(counts: Float[np.ndarray, "2 b"], std: float, records: int) -> Figure:
    """Its error is found by drawing noise and records again."""
    rng = np.random.default_rng(0)
    shares = np.maximum(counts, 0).ravel()
    shares = shares / shares.sum() if shares.sum() > 0 else np.full(shares.size, 1 / shares.size)
    drawn = rng.multinomial(records, shares, DRAWS) / records + std * rng.normal(size=(DRAWS, shares.size))
    return Figure(area(counts), float(np.std([area(each.reshape(2, -1)) for each in drawn])))


def majority(counts: Float[np.ndarray, "2 b"], std: float, records: int) -> Figure:
    """What always saying the larger class would get."""
    share = within(float(counts.sum(axis=1).max() / max(counts.sum(), 1e-6)))
    return Figure(share, math.hypot(std * math.sqrt(BINS / 2), sampling(share, records)))
