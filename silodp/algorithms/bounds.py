"""The papers' bounds as numbers for one setting: what `silodp bounds CONFIG` prints.

Every bound is evaluated as it is printed, with the constants that O(.) and Omega(.) hide set to 1, F(x0) - min F set to
1 and the logarithms that the statement shows (a tilde hides the rest). So numbers of one column compare rates, not
runs. n is the smallest silo, N the silos of a round. What no config tells is taken at its largest: mu2's variances (G
and L bound them) and its gradient at the optimum (G bounds it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def psgm_server(c: Choice) -> float:
    reach = c.silos * c.n * c.epsilon
    return (c.d * GAP * c.L * c.G) ** (2 / 3) / reach ** (4 / 3) + c.d * c.G**2 / reach**2


def psgm_local(c: Choice) -> float:
    """Thm A.2 at R = rounds, K = local_steps, b = batch_local."""
    K, b, R = c.steps, c.options.batch_local or c.n, c.options.rounds
    exact = heterogeneity(c) / R + c.L / (R * K) + c.L / (R * math.sqrt(K * b))
    noisy = (
        c.L * math.sqrt(c.d) * (1 / (R * math.sqrt(K * c.epsilon) * b) + 1 / (math.sqrt(R * c.silos) * c.n * c.epsilon))
    )
    return GAP * (exact + noisy) + psgm_server(c)


LOWY, DIFF2, SOTERIA, MU2, PSGM = "Lowy et al.", "DIFF2", "SoteriaFL", "mu2", "PSGM"
UPPER = [
    Bound(LOWY, "spider, Thm 3.1", "untrusted", GRADIENT, "(G L d ln(1/delta))^(2/3) / (eps n sqrt(N))^(4/3) + ...",
          lambda c: (c.G * c.L * GAP * silos_noise(c)) ** (2 / 3) + c.G**2 * silos_noise(c)),
    Bound(LOWY, "sdp-spider, Thm 3.2", "shuffled", GRADIENT, "(G L d ln(1/delta))^(2/3) / (eps n N)^(4/3) + ...",
          lambda c: (c.G * c.L * GAP * all_noise(c)) ** (2 / 3) + c.G**2 * all_noise(c)),
    Bound(LOWY, "prox-sgd, Thm 2.1", "untrusted", EXCESS,
          "G^2/mu (kappa^2 d ln(1/delta) / (eps n)^2 N + kappa / (N n))",
          lambda c: c.G**2 / c.constant("pl_constant")
          * (condition(c) ** 2 * silos_noise(c) + condition(c) / (c.silos * c.n))),
    Bound(LOWY, "prox-pl-svrg, Thm 2.2", "untrusted", EXCESS, "kappa G^2 d ln(1/delta) / (mu eps^2 n^2 N)",
          lambda c: condition(c) * c.G**2 * silos_noise(c) / c.constant("pl_constant")),
    Bound(LOWY, "sdp-prox-pl-svrg, Thm 2.2", "shuffled", EXCESS, "kappa G^2 d ln(1/delta) / (mu (eps n N)^2)",
          lambda c: condition(c) * c.G**2 * all_noise(c) / c.constant("pl_constant")),
    Bound(DIFF2, "diff2-gd, Thm 4.3", "trusted", GRADIENT, "(L G d)^(2/3) / (n N eps)^(4/3)", diff2_optimum),
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
          lambda c: GAP * c.L / c.options.rounds + psgm_server(c)),
    Bound(PSGM, "ce-psgm-fg, Thm A.2", "shuffled", GRADIENT, "tau/R + L/(R K) + ... as A.4", psgm_local),
]  # fmt: skip
LOWER = [
    Bound(LOWY, "any, Thm 3.3 and F.3", "untrusted", GRADIENT, "G^2 min(1, d ln(1/delta) / (eps^2 n^2 N))",
          lambda c: c.G**2 * min(1.0, silos_noise(c)), lower=True),
    Bound(LOWY, "any, Thm 3.3", "shuffled", GRADIENT, "G^2 min(1, d ln(1/delta) / (eps n N)^2)",
          lambda c: c.G**2 * min(1.0, all_noise(c)), lower=True),
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
        return told | {"value": bound.value(c), "missing": None}
    except ConfigError as missing:
        return told | {"value": None, "missing": str(missing).split(" is missing")[0]}
