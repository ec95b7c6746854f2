"""What several families take from one paper: its name, its rates, and the noise that it prints.

Papers: 000 CE-PSGM, 001 Lowy et al. (ISRL-DP), 002 SoteriaFL, 003 DIFF2, 004 mu2. Printed noise is in our units,
multipliers of the replace-one sensitivity, so the papers' Lipschitz and clip constants cancel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from silodp.algorithms.entry import Case
from silodp.errors import Inadmissible
from silodp.facts import limits
from silodp.later import Later
from silodp.privacy import gaussian
from silodp.privacy.roots import root

laws = Later("dp_accounting.pld.pld_pmf")
special = Later("scipy.special")
stats = Later("scipy.stats")

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


def summed_noise(epsilon: float, delta: float) -> float:
    """The multiplier of one P_vec sum that a paper calls with these parameters: a Gaussian's that has exactly them."""
    return 1 / gaussian.mu_of(epsilon, delta)


def amplified(case: Case, batch: int | None = None) -> float:
    """N n / (M K): what the SDP algorithms of 001 count on from silos and records that are drawn in secret. Who takes
    part is public here, and batches are not drawn with replacement: the certificate shows what is really left."""
    present, _ = limits(case.options.participation, case.silos)
    return case.silos * case.records / (present * (batch or case.records))


def with_replacement_epsilon(draws: int, records: int, multiplier: float, count: int, delta: float) -> float:
    """What `count` releases on `draws` draws WITH replacement, as 001 samples, cost at least (bound 2L/draws).

    The attack: all other records equal the replacing one, so that a record drawn j times shifts the
    release by j bounds, against no shift. Losses are rounded down: the truth is no smaller.
    """
    times = np.arange(draws + 1)
    weights = stats.binom.pmf(times, draws, 1 / records)
    times, weights = times[weights > 1e-18] / multiplier, weights[weights > 1e-18]
    x = np.linspace(-10, times[-1] + 10, 200_001)
    mass = sum(w * np.diff(special.ndtr(x - t)) for w, t in zip(weights, times, strict=True))
    loss = np.logaddexp.reduce([math.log(w) + t * x[:-1] - t * t / 2 for w, t in zip(weights, times, strict=True)])
    interval = max(math.sqrt(float(np.sum(mass * loss**2))) / 500, float(loss[-1]) / 200_000)
    cell = np.floor(loss / interval).astype(int)
    law = np.bincount(cell - cell[0], mass)
    one = laws.DensePLDPmf(interval, int(cell[0]), law, 0.0, pessimistic_estimate=False)
    return float(one.self_compose(count).get_epsilon_for_delta(delta))


def bvr_noise(case: Case) -> dict[str, float]:
    """Proposition E.2 of 003 with its sampling bound, Lemma B.7. Real counts, u = (3, 3)."""
    options = case.options
    K, batch = options.local_steps or 1, options.batch_local or case.records
    rate = batch / case.records
    if 0.05 < rate < 1:
        raise Inadmissible((f"Lemma B.7 says nothing for a sampling rate of {rate:.3g} (above 1/20)",))
    visits = math.ceil(options.rounds / case.silos)
    local = bvr_local(case, K * visits, rate, share=1 - 1 / 3 - 1 / 3)
    return diff2_noise(case, (3.0, 3.0)) | ({"local": local} if K > 1 else {})


def bvr_local(case: Case, uses: int, rate: float, share: float = 1.0) -> float:
    """Multiplier of the local steps at the printed order alpha: uses * eps'(alpha), with eps' of Lemma B.7, takes
    `share` of what log(1/delta)/(alpha-1) leaves of epsilon (first statement of Proposition E.2)."""
    alpha = diff2_order(case)
    budget = share * (case.epsilon - math.log(1 / case.delta) / (alpha - 1))
    used = lambda log_s: uses * sampled_rdp(alpha, math.exp(log_s), rate)
    return math.exp(root(lambda log_s: math.log(used(log_s) / budget), -3.0, 20.0))


def sampled_rdp(alpha: int, multiplier: float, rate: float) -> float:
    """Lemma B.7 of 003 for a Gaussian of this multiplier: eps(j) = j / (2 multiplier^2)."""
    each = lambda j: j / (2 * multiplier**2)
    j = np.arange(2, alpha + 1)
    gammaln = special.gammaln
    choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)
    last = math.log(2.0) + (j - 1) * each(j)
    last[0] = each(2) + min(math.log(-4 * math.expm1(-each(2))), math.log(2.0))
    terms = j * math.log(rate) + choose + last
    return float(np.logaddexp.reduce(np.append(terms, 0.0))) / (alpha - 1)


def spider_noise(case: Case) -> dict[str, float]:
    """Theorem F.1 of 001 with R = rounds - 1, as it runs r = 0..R. Both streams are given the whole budget. The
    difference's noise is the printed cap, at sensitivity 4L/n."""
    printed_rounds = case.options.rounds - 1
    common = 2 * math.sqrt(math.log(1 / case.delta)) / case.epsilon
    value = common * math.sqrt(max(printed_rounds / (case.options.restart or 1), 1.0))
    return {"value": value, "difference": common * math.sqrt(printed_rounds)}


def summed_spider(case: Case) -> dict[str, float]:
    """Algorithm 10 of 001, lines 8 and 12, with R = rounds - 1."""
    options, R, q = case.options, max(1, case.options.rounds - 1), case.options.restart or 1
    log, second = math.sqrt(2 * math.log(1 / case.delta)), options.batch_difference or case.batch
    value = case.epsilon * amplified(case, case.batch) / (4 * log * max(1.0, math.sqrt(q / R)))
    difference = case.epsilon * amplified(case, second) / (4 * log * math.sqrt(R))
    return {
        "value": summed_noise(value, case.delta * min(q, R) / (2 * R)),
        "difference": summed_noise(difference, case.delta / (2 * R)),
    }
