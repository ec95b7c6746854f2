"""What P_vec reveals: fair-coin noise against the Gaussian it behaves like.

Replacing one record moves the integer sum by a vector of norm at most levels + 2 sqrt(d): levels
for the vectors themselves, sqrt(d) for each of the two roundings. Let u(t) be the normal quantile
of P(X < t) for X the centred number of heads. Thresholds are the optimal tests between X and X + k
(the ratio of their laws is monotone), and the one at t has normal distance u(t) - u(t - k) <= k *
max slope. So X is at least as private, for every shift at once, as Gaussian noise of std 1/(max
slope), except on an event of the far tail: trade-off functions compose, hence so does this, over
coordinates (in quadrature) and rounds. Mixtures of shifts (a Poisson share of the records) follow from
their pairs (docs/privacy.md). For a million coins the std is sqrt(bits)/2 to 1e-4. P_vec is therefore
accounted as a Gaussian release, sampled or not, with `gaussian_multiplier` as noise multiplier.

The coins are never tossed: the number of heads among `bits` fair coins, minus bits/2, has
probabilities that follow from its central one by ratios of small numbers, accurate to about 1e-13
relative even for billions of coins (log-gamma loses six digits there). A rounded Gaussian is not the
same: its tails are heavier and no accountant covers it.
"""

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

# Deviations up to which the slope is taken, by the random bits of a draw: further out a draw of so few bits never gets.
# Few coins (a large epsilon) are told apart further out, and are drawn with more bits.
TAILS = {64: 9.0, 128: 12.5}
_TAIL = TAILS[64]
FEWEST_BITS = 2_000


class Dominating(NamedTuple):
    """Gaussian std (in grid units) no more private than the coins but for a mass of `lost`."""

    std: float
    lost: float


def dominating_gaussian(bits: int, largest_shift: float, tail: float = _TAIL) -> Dominating:
    """The Gaussian noise that `bits` fair coins are at least as private as, per coordinate.

    tail: deviations beyond which nothing is promised; what may happen there is `lost`.
    """
    if bits < FEWEST_BITS:
        raise ValueError(f"bits must be at least {FEWEST_BITS} for a tight bound, not {bits}")
    below = np.cumsum(centred_probabilities(bits, tail + 4))
    middle = below.size // 2
    first = max(0, middle - math.ceil(tail * math.sqrt(bits) / 2))
    quantiles = ndtri_exp(np.log(below[first : middle + 1]))
    std = 1 / float(np.max(np.diff(quantiles)))
    return Dominating(std, math.exp(float(log_ndtr(largest_shift / std - tail))))


def sensitivity(levels: int, dimension: int) -> float:
    """Largest l2 change of the integer sum when one record is replaced."""
    return levels + 2 * math.sqrt(dimension)


def gaussian_multiplier(bits: int, levels: int, dimension: int, tail: float = _TAIL) -> float:
    """Noise std over sensitivity of the Gaussian release that stands for one P_vec sum."""
    shift = sensitivity(levels, dimension)
    return dominating_gaussian(bits, shift, tail).std / shift


def centred_probabilities(bits: int, deviations: float) -> np.ndarray:
    """Probabilities of -r..r for heads - bits/2, r = `deviations` standard deviations (or all)."""
    if bits < 2 or bits % 2:
        raise ValueError(f"bits must be even and at least 2, not {bits}")
    half = bits // 2
    reach = min(half, math.ceil(deviations * math.sqrt(bits) / 2))
    steps = np.arange(reach, dtype=np.float64)
    # P(j+1)/P(j) = (half - j)/(half + j + 1)
    above = np.exp(np.cumsum(np.log1p(-(2 * steps + 1) / (half + steps + 1))))
    relative = np.concatenate([above[::-1], [1.0], above])
    return relative / relative.sum()


def cumulative_words(bits: int, deviations: float = 12.0) -> np.ndarray:
    """2^64 times the distribution function at -r..r-1, as 64-bit words (at r it is 2^64).

    Masses are rounded one by one, which keeps the relative accuracy of the tails.
    """
    masses = centred_probabilities(bits, deviations)
    words = np.rint(np.ldexp(masses, 64)).astype(np.uint64)
    words = words[words > 0]  # nothing may follow the word at which the sum reaches 2^64
    excess = int(words.sum(dtype=object)) - 2**64
    words[words.size // 2] = np.uint64(int(words[words.size // 2]) - excess)
    return np.cumsum(words)[:-1]


def fine_words(bits: int) -> np.ndarray:
    """The same with 128 bits, for few coins: the law is right as far out as 12.5 deviations."""
    masses = [int(mass) for mass in np.rint(np.ldexp(centred_probabilities(bits, 15.0), 128))]
    masses = [mass for mass in masses if mass]
    masses[len(masses) // 2] -= sum(masses) - 2**128
    return np.array(list(accumulate(masses))[:-1], object)
