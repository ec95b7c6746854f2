"""What P_vec reveals: fair-coin noise against the Gaussian it behaves like.

Replacing one record moves the integer sum by a vector of norm at most levels + 2 sqrt(d): levels
for the vectors themselves, sqrt(d) for each of the two roundings. Let u(t) be the normal quantile
of P(X < t) for X the centred number of heads. Thresholds are the optimal tests between X and X + k
(the ratio of their laws is monotone), and the one at t has normal distance u(t) - u(t - k) <= k *
max slope. So X is at least as private, for every shift at once, as Gaussian noise of std 1/(max
slope), except on an event of the far tail: trade-off functions compose, hence so does this, over
coordinates (in quadrature) and rounds. For a million coins the std is sqrt(bits)/2 to 1e-4. P_vec
is therefore accounted as a Gaussian release, sampled or not, with `gaussian_multiplier` as noise
multiplier.
"""

import math
from typing import NamedTuple

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri_exp

from silodp.privacy.gaussian import epsilon_of, mu_of
from silodp.privacy.shuffled import Levels, local_epsilon
from silodp.shuffle.coins import centred_probabilities

_TAIL = 9.0  # deviations up to which the slope is taken
FEWEST_BITS = 2_000
_ORDERS = np.concatenate([np.linspace(1.05, 12, 400), np.geomspace(12, 4096, 400)])


class Dominating(NamedTuple):
    """Gaussian std (in grid units) no more private than the coins but for a mass of `lost`."""

    std: float
    lost: float


def dominating_gaussian(bits: int, largest_shift: float) -> Dominating:
    """The Gaussian noise that `bits` fair coins are at least as private as, per coordinate."""
    if bits < FEWEST_BITS:
        raise ValueError(f"bits must be at least {FEWEST_BITS} for a tight bound, not {bits}")
    below = np.cumsum(centred_probabilities(bits, _TAIL + 4))
    middle = below.size // 2
    first = max(0, middle - math.ceil(_TAIL * math.sqrt(bits) / 2))
    quantiles = ndtri_exp(np.log(below[first : middle + 1]))
    std = 1 / float(np.max(np.diff(quantiles)))
    return Dominating(std, math.exp(float(log_ndtr(largest_shift / std - _TAIL))))


def sensitivity(levels: int, dimension: int) -> float:
    """Largest l2 change of the integer sum when one record is replaced."""
    return levels + 2 * math.sqrt(dimension)


def gaussian_multiplier(bits: int, levels: int, dimension: int) -> float:
    """Noise std over sensitivity of the Gaussian release that stands for one P_vec sum."""
    shift = sensitivity(levels, dimension)
    return dominating_gaussian(bits, shift).std / shift


def pvec_epsilon(bits: int, levels: int, dimension: int, rounds: int, delta: float) -> float:
    """Epsilon of `rounds` sums with `bits` coins per coordinate in each."""
    shift = sensitivity(levels, dimension)
    noise = dominating_gaussian(bits, shift)
    left = delta - rounds * dimension * noise.lost
    return epsilon_of(left, math.sqrt(rounds) * shift / noise.std) if left > 0 else math.inf


def calibrate_bits(epsilon: float, delta: float, levels: int, dimension: int, rounds: int, records: int) -> int:
    """Fewest coins per record and coordinate (even) for (epsilon, delta)-DP of all rounds."""
    std = math.sqrt(rounds) * sensitivity(levels, dimension) / mu_of(epsilon, delta)
    per_record = max(2, 2 * math.ceil(4 * std**2 / records / 2))
    while pvec_epsilon(per_record * records, levels, dimension, rounds, delta) > epsilon:
        per_record += max(2, 2 * (per_record // 20_000))
    return per_record


def collusion_levels(
    bits_per_record: int,
    records: int,
    own: int,
    levels: int,
    dimension: int,
    rounds: int,
    delta: float,
) -> Levels:
    """The guarantee of all coins, of the own silo's coins, and of the record's own coins."""
    noise = (bits_per_record * count for count in (records, own, 1))
    return Levels(*(pvec_epsilon(bits, levels, dimension, rounds, delta) for bits in noise))


def rdp_std(epsilon: float, delta: float, levels: int, dimension: int, rounds: int, clip: float) -> float:
    """Noise std of the sum if the coins are certified through Renyi divergences (looser)."""
    shift = sensitivity(levels, dimension)

    def excess(log_std: float) -> float:
        rdp = rounds * _ORDERS * (shift / math.exp(log_std)) ** 2 / 2
        return float(rdp_privacy_accountant.compute_epsilon(list(_ORDERS), list(rdp), delta)[0]) - epsilon

    log_std = float(brentq(excess, math.log(shift) - 5, math.log(shift) + 20))  # type: ignore[arg-type]
    return math.exp(log_std) * 2 * clip / levels


def cheu_std(epsilon: float, delta: float, dimension: int, rounds: int, clip: float) -> float:
    """Noise std of the sum with the constants of Cheu et al. 2021, for comparison.

    p = 1/4 and b n = 24e4 g^2 ln(4(d^2+1)/delta_r)^2 / epsilon_r^2 coins, half of delta spent on
    the rounds and epsilon_r from their optimal composition (composed through Renyi divergences it is
    8% more, with the paper's own theorem 2.6 times as much).
    """
    excess = lambda level: local_epsilon(level, rounds, delta / 2) - epsilon
    per_round = float(brentq(excess, epsilon / rounds / 10, epsilon))  # type: ignore[arg-type]
    logarithm = math.log(4 * (dimension**2 + 1) / (delta / 2 / rounds))
    return math.sqrt(24e4 * 3 / 16) * logarithm / per_round * 2 * clip
