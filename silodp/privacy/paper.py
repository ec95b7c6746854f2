"""The noise that the five papers print, in our units, so that a figure can be reproduced as it was run.

Every function returns a `Printed`: the paper's claim and the releases with the printed noise, whose
true cost `true_epsilon` computes. Multipliers are std over replace-one sensitivity (events.py): the
papers' Lipschitz or clip constants cancel. None of this is used unless calibration = "paper".

Papers: 000 CE-PSGM, 001 Lowy et al. (ISRL-DP), 002 SoteriaFL, 003 DIFF2, 004 mu2.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy.optimize import brentq
from scipy.special import gammaln, ndtr
from scipy.stats import binom

from silodp.privacy import gaussian
from silodp.privacy.accountant import check_delta, check_epsilon, epsilon
from silodp.privacy.events import Disjoint, FixedSize, Full, Poisson, Releases, Spent, two_level

SOTERIA_CONSTANT = 48.0  # the paper leaves c open; this is the value in its authors' program


@dataclass(frozen=True)
class Printed:
    """A paper's claim and what it releases to get it."""

    claim: float
    delta: float
    spent: tuple[Spent, ...]

    @property
    def true_epsilon(self) -> float:
        return epsilon(self.spent, self.delta)

    @property
    def violated(self) -> bool:
        return self.true_epsilon > self.claim

    @property
    def multipliers(self) -> dict[str, float]:
        return {part.releases.stream: part.multiplier for part in self.spent}


def diff2(epsilon: float, delta: float, rounds: int, restart: int, u: float = 1.25) -> Printed:
    """DIFF2-GD and, with restart = 1 (where u -> 1), DP-GD: Proposition 4.1 of 003."""
    values = math.ceil(rounds / restart)
    return _printed(epsilon, delta, _value_and_difference(epsilon, delta, values, rounds - values, (u, u / (u - 1))))


def bvr(
    epsilon: float,
    delta: float,
    rounds: int,
    restart: int,
    local_steps: int,
    batch: int,
    records: int,
    silos: int,
    u: tuple[float, float] = (3.0, 3.0),
) -> Printed:
    """DIFF2-BVR-L-SGD: Proposition E.2 of 003 with its sampling bound, Lemma B.7. Real counts."""
    values = math.ceil(rounds / restart)
    server = _value_and_difference(epsilon, delta, values, rounds - values, u)
    visits = math.ceil(rounds / silos)
    share = 1 - 1 / u[0] - 1 / u[1]
    multiplier = bvr_local(epsilon, delta, local_steps * visits, batch, records, share)
    steps = Releases("local", (local_steps - 1) * visits, FixedSize(batch, records))
    return _printed(epsilon, delta, (*server, Spent(steps, multiplier)))


def bvr_local(epsilon: float, delta: float, uses: int, batch: int, records: int, share: float = 1.0) -> float:
    """Multiplier of the local steps at the printed order alpha: uses * eps'(alpha), with eps' of Lemma B.7, takes
    `share` of what log(1/delta)/(alpha-1) leaves of epsilon (first statement of Proposition E.2)."""
    alpha = _diff2_order(epsilon, delta)
    budget = share * (epsilon - math.log(1 / delta) / (alpha - 1))
    used = lambda log_s: uses * _sampled_rdp_b7(alpha, math.exp(log_s), batch / records)
    return math.exp(float(brentq(lambda log_s: math.log(used(log_s) / budget), -3.0, 20.0)))  # type: ignore[arg-type]


def spider(epsilon: float, delta: float, rounds: int, restart: int) -> Printed:
    """FedProx-SPIDER (001, Alg. 3): Theorem F.1 with R = rounds - 1, as it runs r = 0..R. Both streams
    are given the whole budget. The difference's noise is the printed cap, at sensitivity 4L/n."""
    values, printed_rounds = math.ceil(rounds / restart), rounds - 1
    common = 2 * math.sqrt(math.log(1 / delta)) / epsilon
    value = common * math.sqrt(max(printed_rounds / restart, 1.0))
    difference = common * math.sqrt(printed_rounds)
    return _printed(
        epsilon,
        delta,
        (
            Spent(Releases("value", values, Full()), value),
            Spent(Releases("difference", rounds - values, Full()), difference),
        ),
    )


def prox_sgd(epsilon: float, delta: float, rounds: int) -> Printed:
    """Noisy Prox-SGD (001, Alg. 6): sigma^2 = 8 L^2 ln(1/delta) / (eps K)^2 of Theorem E.1's proof."""
    multiplier = math.sqrt(2 * math.log(1 / delta)) / epsilon
    return _printed(epsilon, delta, (Spent(Releases("value", rounds, Disjoint()), multiplier),))


def prox_svrg(epsilon: float, delta: float, epochs: int, batch: int, records: int, restarts: int = 1) -> Printed:
    """FedProx-SVRG and, with restarts > 1, PL-SVRG (001, Alg. 1 and 2): Theorem E.2."""
    inner = epochs * (records // batch)
    log = math.log(2 / delta)
    value = 8 * math.sqrt(restarts * epochs * log * math.log(5 * epochs / delta)) / epsilon
    difference = 8 * math.sqrt(restarts * inner * log * math.log(2.5 * inner / delta)) / epsilon
    sampling = Poisson(batch / records)
    return _printed(
        epsilon,
        delta,
        (
            Spent(Releases("value", restarts * epochs, Full()), value),
            Spent(Releases("difference", restarts * inner, sampling), difference * batch / records),
        ),
    )


def alternate_spider(epsilon: float, delta: float, rounds: int, records: int) -> Printed:
    """Fed-SPIDER, alternate form (001, Alg. 11, noise of App. H.2), rounds/2 pairs of rounds."""
    values = math.ceil(rounds / 2)
    noisy = lambda stream, count: _lowy_sgd(stream, count, epsilon, delta, rounds, records)
    return _printed(epsilon, delta, (noisy("value", values), noisy("difference", rounds - values)))


def mb_sgd(epsilon: float, delta: float, rounds: int, records: int) -> Printed:
    """ISRL-DP MB-SGD, the baseline of 001, App. H.2 (there it samples with replacement)."""
    return _printed(epsilon, delta, (_lowy_sgd("value", rounds, epsilon, delta, rounds, records),))


def local_sgd(epsilon: float, delta: float, rounds: int, local_steps: int, records: int) -> Printed:
    """ISRL-DP Local SGD, the baseline of 001: as MB-SGD with every local step a release."""
    steps = rounds * local_steps
    return _printed(epsilon, delta, (_lowy_sgd("local", steps, epsilon, delta, steps, records),))


def lowy_batch(epsilon: float, rounds: int, records: int) -> int:
    """The batch size that goes with the noise of 001, App. H.2."""
    return min(records, max(1, int(records * math.sqrt(epsilon) / (2 * math.sqrt(rounds)))))


def soteria(
    epsilon: float,
    delta: float,
    rounds: int,
    batch: int,
    records: int,
    estimator: Literal["gd", "sgd", "svrg", "saga"],
    constant: float = SOTERIA_CONSTANT,
) -> Printed:
    """SoteriaFL and its uncompressed forms LDP-SGD, LDP-SVRG: eq. (4) of 002."""
    reduced = estimator in ("svrg", "saga")
    squares = 2.0 if reduced else 0.25  # G_A^2/4 + G_B^2 in units of G^2
    std = math.sqrt(constant * squares * rounds * math.log(1 / delta)) / (records * epsilon)
    if reduced:
        bound, sampling = two_level(1.0, batch, records)
        return _printed(epsilon, delta, (Spent(Releases("value", rounds, sampling), std / bound),))
    return _printed(epsilon, delta, (_sgd(std, rounds, records if estimator == "gd" else batch, records),))


def cdp_sgd(
    epsilon: float,
    delta: float,
    rounds: int,
    batch: int,
    records: int,
    constant: float = SOTERIA_CONSTANT / 4,
) -> Printed:
    """CDP-SGD (002, Alg. 1): Theorem 4. The default gives the noise of SoteriaFL-SGD."""
    std = math.sqrt(constant * rounds * math.log(1 / delta)) / (records * epsilon)
    return _printed(epsilon, delta, (_sgd(std, rounds, batch, records),))


def mu2(rho: float, delta: float, rounds: int) -> Printed:
    """DP-mu2-FL (004, Theorems 5.1 and 6.1): exact, and the claim is in GDP. Every release after the
    record's own still carries it, so the first record takes part in all of them."""
    spent = (Spent(Releases("value", rounds, Full()), math.sqrt(rounds) / rho),)
    return Printed(gaussian.epsilon_of(delta, rho), delta, spent)


def with_replacement_epsilon(draws: int, records: int, multiplier: float, count: int, delta: float) -> float:
    """What `count` releases on `draws` draws WITH replacement cost at least (bound 2L/draws).

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


def _printed(claim: float, delta: float, spent: tuple[Spent, ...]) -> Printed:
    check_epsilon(claim)
    check_delta(delta)
    return Printed(claim, delta, tuple(part for part in spent if part.releases.count))


def _diff2_order(epsilon: float, delta: float) -> int:
    return 1 + math.ceil(2 * math.log(1 / delta) / epsilon)


def _value_and_difference(
    epsilon: float, delta: float, values: int, differences: int, u: tuple[float, float]
) -> tuple[Spent, Spent]:
    """sigma_i^2 = 4 u_i alpha count_i / ((n P)^2 eps) over the sensitivity 2/(n P)."""
    alpha = _diff2_order(epsilon, delta)
    first = u[0] if differences else 1.0
    return (
        Spent(Releases("value", values, Full()), math.sqrt(first * alpha * values / epsilon)),
        Spent(
            Releases("difference", differences, Full()),
            math.sqrt(u[1] * alpha * differences / epsilon),
        ),
    )


def _sampled_rdp_b7(alpha: int, multiplier: float, rate: float) -> float:
    """Lemma B.7 of 003 for a Gaussian of this multiplier: eps(j) = j / (2 multiplier^2)."""
    each = lambda j: j / (2 * multiplier**2)
    j = np.arange(2, alpha + 1)
    choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)
    last = math.log(2.0) + (j - 1) * each(j)
    last[0] = each(2) + min(math.log(-4 * math.expm1(-each(2))), math.log(2.0))
    terms = j * math.log(rate) + choose + last
    return float(np.logaddexp.reduce(np.append(terms, 0.0))) / (alpha - 1)


def _lowy_sgd(stream: str, count: int, epsilon: float, delta: float, rounds: int, records: int) -> Spent:
    """sigma^2 = 8 L^2 ln(2/delta) R / (n eps)^2 (32 for differences, of twice the sensitivity)."""
    batch = lowy_batch(epsilon, rounds, records)
    multiplier = batch / records * math.sqrt(2 * math.log(2 / delta) * rounds) / epsilon
    return Spent(Releases(stream, count, Poisson(batch / records)), multiplier)


def _sgd(std: float, rounds: int, batch: int, records: int) -> Spent:
    """Noise of this std, in units of G, on a mean over `batch`."""
    sampling = Full() if batch == records else Poisson(batch / records)
    return Spent(Releases("value", rounds, sampling), std * batch / 2)
