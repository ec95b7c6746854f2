"""The price of trying several settings on private data and keeping the best.

Releasing the best of K runs costs more than one run. If K is itself random, with a truncated
negative binomial or Poisson law fixed beforehand, and only the best run is released, the cost
grows only logarithmically with the mean of K (Papernot and Steinke 2022, Theorems 2 and 6; as
dp-accounting's RepeatAndSelectDpEvent, here for every release that has a Renyi bound). A fixed
number of trials, or a look at the runs that lost, is not covered: then all runs add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from silodp.later import Later
from silodp.privacy.accountant import ORDERS, check_delta, left_out, rdp
from silodp.privacy.kinds import Spent
from silodp.privacy.roots import root

renyi_dp = Later("dp_accounting.rdp.rdp_privacy_accountant")


@dataclass(frozen=True)
class Trials:
    """Law of the number of runs: truncated negative binomial with this mean and shape
    (1: geometric, 0: logarithmic), or Poisson for shape = inf (may run nothing at all)."""

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"mean = {self.mean}: the mean number of trials must be at least 1")
        if not self.shape >= 0:
            raise ValueError(f"shape = {self.shape}: must be >= 0 (inf for Poisson)")

    def draw(self, generator: np.random.Generator) -> int:
        """How many runs to make. Draw once, before the first run."""
        if math.isinf(self.shape):
            return int(generator.poisson(self.mean))
        stop = self.stopping
        if stop == 1:
            return 1
        if self.shape == 0:
            return int(generator.logseries(1 - stop))
        while (count := int(generator.negative_binomial(self.shape, stop))) == 0:
            continue
        return count

    @property
    def stopping(self) -> float:
        """The law's parameter gamma in (0, 1]: small means many trials."""
        if self.mean == 1:
            return 1.0
        excess = lambda log_gamma: math.log(self._mean_at(math.exp(log_gamma)) / self.mean)
        return math.exp(root(excess, -60.0, -1e-12, xtol=1e-13))

    def _mean_at(self, gamma: float) -> float:
        odds = (1 - gamma) / gamma
        if self.shape == 0:
            return odds / -math.log(gamma)
        return self.shape * odds / -math.expm1(self.shape * math.log(gamma))


def selection_epsilon(spent: Sequence[Spent], delta: float, trials: Trials) -> float:
    """Epsilon of releasing the best of a random number of runs, each of which spends `spent`."""
    return mixed_selection_epsilon([spent], delta, trials)


def mixed_selection_epsilon(settings: Sequence[Sequence[Spent]], delta: float, trials: Trials) -> float:
    """As `selection_epsilon`, of runs each of which takes one of several settings at random.

    Settings that spend differently have their largest Renyi divergence at every order: the largest of their epsilons
    would be too small, since each is taken at the order that is best for one setting alone. What their costs leave out
    makes a run another one that seldom; in any trial, for either neighbour.
    """
    check_delta(delta)
    other = trials.mean * max(left_out(spent) for spent in settings)
    one_run = np.max([rdp(spent, ORDERS) for spent in settings], axis=0)
    total = _poisson(one_run, trials) if math.isinf(trials.shape) else _binomial(one_run, trials)
    ideal = lambda delta: float(renyi_dp.compute_epsilon(ORDERS, total, delta)[0])
    rest = delta - (1 + math.exp(min(ideal(delta / 2), 700.0))) * other
    return ideal(rest) if rest >= delta / 2 else math.inf


def _binomial(one_run: np.ndarray, trials: Trials) -> np.ndarray:
    log_gamma = math.log(trials.stopping)
    again = (1 + trials.shape) * np.min((1 - 1 / ORDERS) * one_run - log_gamma / ORDERS)
    return one_run + again + math.log(trials.mean) / (ORDERS - 1)


def _poisson(one_run: np.ndarray, trials: Trials) -> np.ndarray:
    thresholds = np.log1p(1 / (ORDERS - 1))
    beyond = np.array([renyi_dp.compute_delta(ORDERS, one_run, float(t))[0] for t in thresholds])
    return one_run + trials.mean * beyond + math.log(trials.mean) / (ORDERS - 1)
