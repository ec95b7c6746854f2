"""Exact guarantee of composed Gaussian releases (Gaussian DP; Dong, Roth and Su 2022).

Release r with l2 sensitivity D_r and noise std s_r is (D_r/s_r)-GDP, and any adaptive composition
is mu-GDP with mu^2 = sum_r (D_r/s_r)^2. The bound is attained, so nothing tighter exists. Then

    delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)          (Balle and Wang 2018).

Everything is computed as log delta, so that eps up to several hundred and delta down to 1e-300
neither overflow nor cancel.
"""

import math

from silodp.privacy.roots import root
from silodp.privacy.tails import SQRT2, erfcx, log_ndtr

PRECISELY = (1e-15, 1e-13, 500)  # tolerances and steps of the solvers


def log_delta(epsilon: float, mu: float) -> float:
    """log of the exact delta(epsilon) of a mu-GDP mechanism."""
    if mu == 0:
        return -math.inf
    if math.isinf(mu):
        return 0.0
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if near < 0:
        ratio = math.exp(epsilon + log_ndtr(-far) - log_ndtr(-near))
        return log_ndtr(-near) + math.log1p(-ratio)
    # both terms share the factor e^{-near^2/2}; without it the difference keeps its digits
    gap = (erfcx(near / SQRT2) - erfcx(far / SQRT2)) / 2
    return -(near**2) / 2 + math.log(gap) if gap > 0 else -math.inf


def delta_of(epsilon: float, mu: float) -> float:
    """Smallest delta for which a mu-GDP mechanism is (epsilon, delta)-DP."""
    return math.exp(log_delta(epsilon, mu))


def epsilon_of(delta: float, mu: float) -> float:
    """Smallest epsilon >= 0 for which a mu-GDP mechanism is (epsilon, delta)-DP."""
    if log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    if math.isinf(mu):
        return math.inf
    largest = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-12
    return root(lambda epsilon: log_delta(epsilon, mu) - math.log(delta), 0.0, largest, *PRECISELY)


def mu_of(epsilon: float, delta: float) -> float:
    """Largest mu for which every mu-GDP mechanism is (epsilon, delta)-DP."""
    excess = lambda log_mu: max(log_delta(epsilon, math.exp(log_mu)), -1e6) - math.log(delta)
    low, high = 0.0, 0.0
    while excess(low) > 0:
        low -= 1.0
    while excess(high) < 0:
        high += 1.0
    return math.exp(root(excess, low, high, *PRECISELY))
