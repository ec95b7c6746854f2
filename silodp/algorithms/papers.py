"""What several families take from one paper: its name, its rates, and the noise that it prints.

Papers: 000 CE-PSGM, 001 Lowy et al. (ISRL-DP), 002 SoteriaFL, 003 DIFF2, 004 mu2. Printed noise is in our units,
multipliers of the replace-one sensitivity, so the papers' Lipschitz and clip constants cancel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy.special import ndtr
from scipy.stats import binom

from silodp.algorithms.entry import Case

LOWY = "Lowy, Ghafelebashi, Razaviyayn 2023"
DIFF2 = "Murata, Suzuki 2023 (DIFF2)"
SOTERIA = "Li, Zhao, Li, Chi 2022 (SoteriaFL)"
MU2 = "Reshef, Levy 2024 (DP-mu2-FL)"
PSGM = "Efficient Private Federated Non-Convex Optimization with Shuffled Model"

SHUFFLED = ("shuffled",)
NONCONVEX = "(sqrt(d) / (n sqrt(N) eps))^(4/3) untrusted"
CONVEX = "sqrt(d) / (n N eps) trusted, sqrt(d) / (n sqrt(N) eps) untrusted"
SUMS = "32 (d + 1)"
FULL: dict[str, Any] = {"sampling": "full", "samplings": ("full",)}


def diff2_order(case: Case) -> int:
    """The Renyi order at which DIFF2 converts."""
    return 1 + math.ceil(2 * math.log(1 / case.delta) / case.epsilon)


def diff2_noise(case: Case, u: tuple[float, float] = (1.25, 5.0)) -> dict[str, float]:
    """Proposition 4.1 of 003: sigma_i^2 = 4 u_i alpha count_i / ((n P)^2 eps) over the sensitivity 2/(n P).

    With restart = 1 (DP-GD) all goes to the values, where u -> 1.
    """
    rounds, alpha = case.options.rounds, diff2_order(case)
    values = math.ceil(rounds / (case.options.restart or 1))
    differences = rounds - values
    noise = {"value": math.sqrt((u[0] if differences else 1.0) * alpha * values / case.epsilon)}
    if differences:
        noise["difference"] = math.sqrt(u[1] * alpha * differences / case.epsilon)
    return noise


def lowy_batch(epsilon: float, uses: int, records: int) -> int:
    """The batch size that goes with the noise of 001, App. H.2."""
    return min(records, max(1, int(records * math.sqrt(epsilon) / (2 * math.sqrt(uses)))))


def lowy_sgd_noise(case: Case, uses: int, *streams: str) -> dict[str, float]:
    """App. H.2 of 001: sigma^2 = 8 L^2 ln(2/delta) R / (n eps)^2 (32 for differences, of twice the sensitivity).

    The formula fixes the noise's std whatever the batch; our multiplier is relative to 2*clip/batch.
    """
    multiplier = case.batch / case.records * math.sqrt(2 * math.log(2 / case.delta) * uses) / case.epsilon
    return dict.fromkeys(streams, multiplier)


def with_replacement_epsilon(draws: int, records: int, multiplier: float, count: int, delta: float) -> float:
    """What `count` releases on `draws` draws WITH replacement, as 001 samples, cost at least (bound 2L/draws).

    The attack: all other records equal the replacing one, so that a record drawn j times shifts the
    release by j bounds, against no shift. Losses are rounded down: the truth is no smaller.
    """
    times = np.arange(draws + 1)
    weights = binom.pmf(times, draws, 1 / records)
    times, weights = times[weights > 1e-18] / multiplier, weights[weights > 1e-18]
    x = np.linspace(-10, times[-1] + 10, 200_001)
    mass = sum(w * np.diff(ndtr(x - t)) for w, t in zip(weights, times, strict=True))
    loss = np.logaddexp.reduce([math.log(w) + t * x[:-1] - t * t / 2 for w, t in zip(weights, times, strict=True)])
    interval = max(math.sqrt(float(np.sum(mass * loss**2))) / 500, float(loss[-1]) / 200_000)
    cell = np.floor(loss / interval).astype(int)
    law = np.bincount(cell - cell[0], mass)
    one = DensePLDPmf(interval, int(cell[0]), law, 0.0, pessimistic_estimate=False)
    return float(one.self_compose(count).get_epsilon_for_delta(delta))
