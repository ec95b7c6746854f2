"""The papers' bounds as numbers for one setting: what `silodp bounds CONFIG` prints.

Every bound is evaluated as its statement prints it, but for two slips that the proofs do not have and a row names.
The constants that O(.) and Omega(.) hide are 1, F(x0) - min F is 1, and the logarithms are those that the statement
shows (a tilde hides the rest). So numbers of one column compare rates, not runs. n is the smallest silo, N the silos
of a round. What no config tells is taken at its largest: mu2's variances (G and L bound them) and its gradient at the
optimum (G bounds it). What a theorem assumes of the sizes and the target is checked, with constant 1 again; its steps
and clips are taken to be its own. A bound whose assumption fails is shown with what fails: it then says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from silodp.algorithms.proofs import (
    ENOUGH,
    ENOUGH_MESSAGES,
    EVERYBODY,
    MODEST,
    SMALL_LOCAL_BATCH,
    Condition,
    at_least,
    at_most,
    first_batch,
    small_epsilon,
)
from silodp.algorithms.theory import GAP, Choice, condition, heterogeneity
from silodp.errors import ConfigError

GRADIENT, EXCESS = "squared gradient norm", "excess loss"


@dataclass(frozen=True)
class Bound:
    """One line: of which paper, for whom, of what, and the formula."""

    paper: str
    method: str
    trust: str
    of: str
    formula: str
    value: Callable[[Choice], float]
    conditions: tuple[Condition, ...] = ()
    lower: bool = False


def log(c: Choice) -> float:
    return math.log(1 / c.privacy.delta)


def silos_noise(c: Choice) -> float:
    """d ln(1/delta) / (eps^2 n^2 N): of the mean of silos that each add their own."""
    return c.d * log(c) / (c.epsilon**2 * c.n**2 * c.silos)


def all_noise(c: Choice) -> float:
    """The same where only the mean is noised."""
    return c.d * log(c) / (c.epsilon * c.n * c.silos) ** 2


def diff2_optimum(c: Choice) -> float:
    return (c.L * c.G * c.d) ** (2 / 3) / (c.n * c.silos * c.epsilon) ** (4 / 3)


def soteria(c: Choice) -> float:
    return c.G * math.sqrt((1 + c.omega) * c.L * silos_noise(c))


def tau(c: Choice) -> float:
    return math.sqrt((1 + c.omega) ** 3 / c.silos)


def mu2(c: Choice, spread: float) -> float:
    D, T = c.constant("diameter"), c.n
    S = c.G + 2 * c.L * D
    return 4 * D * S * (1 / T + 2 * math.sqrt(c.d) / (c.rho * T * spread) + 1 / math.sqrt(T * c.silos))


def bvr(c: Choice) -> float:
    """Thm F.4 at R = rounds, K = local_steps, b = batch_local, with its proof's L/sqrt(K b)."""
    K, b, R = c.steps, c.options.batch_local or c.n, c.options.rounds
    descent = c.L / K + heterogeneity(c) + c.L / math.sqrt(K * b) + c.L * math.sqrt(c.d / (K * c.epsilon)) / b
    return GAP * (descent / R + c.L * math.sqrt(c.d / (c.silos * R)) / (c.n * c.epsilon)) + diff2_optimum(c)


def psgm_server(c: Choice, sampled: float = 1.0) -> float:
    """`sampled`: by what batches enlarge the first part."""
    reach = c.silos * c.n * c.epsilon
    return sampled * (c.d * GAP * c.L * c.G) ** (2 / 3) / reach ** (4 / 3) + c.d * c.G**2 / reach**2


def psgm_local(c: Choice) -> float:
    """What Thm A.2 and 4.2 have beside the server's part, at R = rounds, K = local_steps, b = batch_local."""
    K, b, R = c.steps, c.options.batch_local or c.n, c.options.rounds
    exact = heterogeneity(c) / R + c.L / (R * K) + c.L / (R * math.sqrt(K * b))
    noisy = (
        c.L * math.sqrt(c.d) * (1 / (R * math.sqrt(K * c.epsilon) * b) + 1 / (math.sqrt(R * c.silos) * c.n * c.epsilon))
    )
    return GAP * (exact + noisy)


def psgm_batches(c: Choice) -> float:
    """What Thm A.3 and 4.2 have for a batch of K b = `batch`: the part of sampling, and the server's."""
    R, drawn = c.options.rounds, c.silos * c.constant("batch")
    ratio = c.silos * c.n * c.epsilon / math.sqrt(R * c.d * drawn)
    sampling = (GAP * c.L * c.G / drawn) ** (2 / 3) + c.G**2 / (drawn * R)
    return sampling + psgm_server(c, 1 + ratio + ratio ** (1 / 3))


def psgm_momentum(c: Choice) -> float:
    """The beta of Thm A.3 and 4.2, before its limit of 1."""
    sampled = momentum_scale(c) * (c.silos * c.constant("batch")) ** (1 / 3) / c.options.rounds ** (2 / 3)
    return max(1 / c.options.rounds, min(private_momentum(c), sampled))


def momentum_scale(c: Choice) -> float:
    return (GAP * c.L / c.G**2) ** (2 / 3)


def private_momentum(c: Choice) -> float:
    """The beta of Thm A.2 and A.4, where it is above 1/R."""
    return momentum_scale(c) * (c.silos * c.n * c.epsilon) ** (2 / 3) / (c.d ** (1 / 3) * c.options.rounds)


ALL_MESSAGES = (
    MODEST,
    at_least("N n >= ln(1/delta)/epsilon", lambda c: c.silos * c.n, lambda c: log(c) / c.epsilon),
    at_most("beta <= 1", private_momentum, lambda _: 1.0),
)
BATCHES = (
    MODEST,
    ENOUGH_MESSAGES,
    at_most("beta <= 1", psgm_momentum, lambda _: 1.0),
    at_most(
        "1/(R b0) <= beta^2/batch",
        lambda c: 1 / (c.options.rounds * first_batch(c)),
        lambda c: psgm_momentum(c) ** 2 / c.constant("batch"),
    ),
)
LOCAL_BATCHES = (
    *BATCHES,
    ("batch = K batch_local", lambda c: c.options.batch == c.steps * (c.options.batch_local or c.n)),
    ("batch < n, b0 < n", lambda c: max(c.constant("batch"), first_batch(c)) < c.n),
)
PL_EPSILON = small_epsilon("2 ln(2/delta) and 15", lambda log: min(2 * (log + math.log(2)), 15))
SMALL_DELTA = at_most("delta <= 1/(n N)", lambda c: c.privacy.delta, lambda c: 1 / (c.n * c.silos))
LOWER_SILOS = (
    SMALL_DELTA,
    at_most("epsilon <= sqrt(N)", lambda c: c.epsilon, lambda c: math.sqrt(c.silos)),
    EVERYBODY,
    # its delta0 is a round's, which is no larger than the target's
    at_least("N >= 16 ln(2/(delta n))", lambda c: c.silos, lambda c: 16 * math.log(2 / (c.privacy.delta * c.n))),
)
LOWER_ANY = (SMALL_DELTA, at_most("epsilon <= 1", lambda c: c.epsilon, lambda _: 1.0))


LOWY, DIFF2, SOTERIA, MU2, PSGM = "Lowy et al.", "DIFF2", "SoteriaFL", "mu2", "PSGM"
UPPER = [
    Bound(LOWY, "spider, Thm 3.1", "untrusted", GRADIENT, "(G L s)^(2/3) + G^2 s, s = d ln(1/delta) / (eps^2 n^2 N)",
          lambda c: (c.G * c.L * GAP * silos_noise(c)) ** (2 / 3) + c.G**2 * silos_noise(c),
          (small_epsilon("2 ln(1/delta)", lambda log: 2 * log), EVERYBODY)),
    Bound(LOWY, "sdp-spider, Thm 3.2", "shuffled", GRADIENT, "(G L s)^(2/3) + G^2 s, s = d ln(1/delta) / (eps n N)^2",
          lambda c: (c.G * c.L * GAP * all_noise(c)) ** (2 / 3) + c.G**2 * all_noise(c),
          (MODEST, EVERYBODY)),
    Bound(LOWY, "prox-sgd, Thm 2.1", "untrusted", EXCESS,
          "G^2/mu (kappa^2 d ln(1/delta) / (eps^2 n^2 N) + kappa / (N n))",
          lambda c: c.G**2 / c.constant("pl_constant")
          * (condition(c) ** 2 * silos_noise(c) + condition(c) / (c.silos * c.n)),
          (small_epsilon("8 ln(1/delta) and 15", lambda log: min(8 * log, 15)),
           at_least("n >= kappa", lambda c: c.n, condition))),
    Bound(LOWY, "prox-pl-svrg, Thm 2.2", "untrusted", EXCESS, "kappa G^2 d ln(1/delta) / (mu eps^2 n^2 N)",
          lambda c: condition(c) * c.G**2 * silos_noise(c) / c.constant("pl_constant"), (PL_EPSILON, EVERYBODY)),
    Bound(LOWY, "sdp-prox-pl-svrg, Thm 2.2", "shuffled", EXCESS, "kappa G^2 d ln(1/delta) / (mu (eps n N)^2)",
          lambda c: condition(c) * c.G**2 * all_noise(c) / c.constant("pl_constant"), (PL_EPSILON, EVERYBODY)),
    Bound(DIFF2, "diff2-gd, Thm 4.3", "trusted", GRADIENT, "(L G d)^(2/3) / (n N eps)^(4/3)", diff2_optimum,
          (ENOUGH,)),
    Bound(DIFF2, "diff2-bvr-l-sgd, Thm 5.3", "trusted", GRADIENT, "the same, in fewer rounds", diff2_optimum,
          (ENOUGH, *SMALL_LOCAL_BATCH)),
    Bound(DIFF2, "diff2-bvr-l-sgd, Thm F.4", "trusted", GRADIENT,
          "(L/K + tau + L/sqrt(K b) + L sqrt(d)/(sqrt(K eps) b)) / R + L sqrt(d)/(n eps sqrt(N R)) + as 5.3; "
          "L/sqrt(K b) is the proof's, the statement has L/(sqrt(K) b)", bvr,
          (ENOUGH, *SMALL_LOCAL_BATCH)),
    Bound(DIFF2, "dp-gd, Remark 4.4", "trusted", GRADIENT, "sqrt(L) G sqrt(d) / (n N eps)",
          lambda c: math.sqrt(c.L * c.d) * c.G / (c.n * c.silos * c.epsilon)),
    Bound(SOTERIA, "cdp-sgd, Thm 1; soteria-svrg and -saga, Cor. 2 and 3", "untrusted", GRADIENT,
          "G sqrt((1+omega) L d ln(1/delta)) / (sqrt(N) n eps)", soteria),
    Bound(SOTERIA, "soteria-gd and -sgd, Cor. 1", "untrusted", GRADIENT, "the same times 1 + ((1+omega)^3/N)^(1/4)",
          lambda c: soteria(c) * (1 + math.sqrt(tau(c)))),
    Bound(MU2, "mu2, Thm 5.2", "untrusted", EXCESS,
          "4 D S (1/n + 2 sqrt(d)/(rho n sqrt(N)) + 1/sqrt(n N)), S = G + 2 L D",
          lambda c: mu2(c, math.sqrt(c.silos))),
    Bound(MU2, "mu2, Thm 6.2", "trusted", EXCESS,
          "4 D S (1/n + 2 sqrt(d)/(rho n N) + 1/sqrt(n N)), S = G + 2 L D",
          lambda c: mu2(c, c.silos)),
    Bound(PSGM, "mb-psgm-fg, Thm A.4", "shuffled", GRADIENT,
          "L/R + (d L G)^(2/3) / (N n eps)^(4/3) + d G^2 / (N n eps)^2",
          lambda c: GAP * c.L / c.options.rounds + psgm_server(c), ALL_MESSAGES),
    Bound(PSGM, "ce-psgm-fg, Thm A.2", "shuffled", GRADIENT,
          "tau/R + L/(R K) + L/(R sqrt(K b)) + L sqrt(d) (1/(R sqrt(K eps) b) + 1/(n eps sqrt(N R))) + as A.4",
          lambda c: psgm_local(c) + psgm_server(c), ALL_MESSAGES),
    Bound(PSGM, "mb-psgm, Thm A.3", "shuffled", GRADIENT,
          "L/R + (L G / (N B))^(2/3) + G^2/(N B R) + (1 + l + l^(1/3)) (d L G)^(2/3) / (N n eps)^(4/3) "
          "+ d G^2 / (N n eps)^2, l = N n eps / sqrt(R d N B), B = batch; "
          "l is Thm 4.2's and its proof's, the statement has l^2",
          lambda c: GAP * c.L / c.options.rounds + psgm_batches(c), BATCHES),
    Bound(PSGM, "ce-psgm, Thm 4.2", "shuffled", GRADIENT, "A.2's part of local steps + all of A.3 but L/R, B = K b",
          lambda c: psgm_local(c) + psgm_batches(c), LOCAL_BATCHES),
]  # fmt: skip
LOWER = [
    Bound(LOWY, "any, Thm 3.3 and F.3", "untrusted", GRADIENT, "G^2 min(1, d ln(1/delta) / (eps^2 n^2 N))",
          lambda c: c.G**2 * min(1.0, silos_noise(c)), LOWER_SILOS, lower=True),
    Bound(LOWY, "any, Thm 3.3", "shuffled", GRADIENT, "G^2 min(1, d ln(1/delta) / (eps n N)^2)",
          lambda c: c.G**2 * min(1.0, all_noise(c)), LOWER_ANY, lower=True),
]  # fmt: skip


SETTING: dict[str, Callable[[Choice], float | None]] = {
    "n": lambda c: c.n,
    "N": lambda c: c.silos,
    "d": lambda c: c.d,
    "epsilon": lambda c: c.epsilon,
    "delta": lambda c: c.privacy.delta,
    "rho": lambda c: c.rho,
    "L": lambda c: c.options.smoothness,
    "G": lambda c: c.options.gradient_bound,
    "D": lambda c: c.options.diameter,
    "mu": lambda c: c.options.pl_constant,
    "tau": heterogeneity,
    "omega": lambda c: c.omega,
    "R": lambda c: c.options.rounds,
    "K": lambda c: c.steps,
    "B": lambda c: c.options.batch,
    "b": lambda c: c.options.batch_local,
    "b0": lambda c: c.options.batch_first,
}


def setting(c: Choice) -> dict[str, float]:
    """The numbers that the bounds are for, by the letters of the formulas; without those that the config lacks."""
    found = {letter: known(number, c) for letter, number in SETTING.items()}
    return {letter: number for letter, number in found.items() if number is not None}


def known(number: Callable[[Choice], float | None], c: Choice) -> float | None:
    try:
        return number(c)
    except ConfigError:
        return None


def bounds(c: Choice) -> list[dict[str, Any]]:
    """A row for each bound; a constant that one of them needs and the config lacks is named in its row."""
    return [row(bound, c) for bound in (*UPPER, *LOWER)]


def row(bound: Bound, c: Choice) -> dict[str, Any]:
    told = {
        "paper": bound.paper, "method": bound.method, "trust": bound.trust, "of": bound.of, "formula": bound.formula,
        "lower": bound.lower,
    }  # fmt: skip
    try:
        unmet = [words for words, holds in bound.conditions if not holds(c)]
        return told | {"value": bound.value(c), "missing": None, "unmet": unmet}
    except ConfigError as missing:
        return told | {"value": None, "missing": str(missing).split(" is missing")[0], "unmet": []}
