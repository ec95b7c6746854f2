"""What P_vec reveals: fair-coin noise against the Gaussian it behaves like.

Replacing one record moves the integer sum by a vector of norm at most levels + 2 sqrt(d): levels
for the vectors themselves, sqrt(d) for each of the two roundings. Let u(t) be the normal quantile
of P(X < t) for X the centred number of heads. Thresholds are the optimal tests between X and X + k
(the ratio of their laws is monotone), and the one at t has normal distance u(t) - u(t - k) <= k *
max slope. So X is at least as private, for every shift at once, as Gaussian noise of std 1/(max
slope), except in the far tail, where X counts as shown (`beyond`): trade-off functions compose, hence
so does this, over coordinates (in quadrature) and rounds. Mixtures of shifts (a Poisson share of the
records) follow from their pairs (docs/privacy.md). For a million coins the std is sqrt(bits)/2 to 1e-4.
P_vec is therefore accounted as a Gaussian release, sampled or not, with `gaussian_multiplier` as noise
multiplier, and the accountant adds to delta what lies beyond (`Releases.coins`, `lost`).

The coins are never tossed: the number of heads among `bits` fair coins, minus bits/2, is looked up in its
distribution function, which is tabulated in whole numbers of 2^-128. A rounded Gaussian is not the same: its
tails are heavier and no accountant covers it.
"""

import math
from itertools import accumulate

import numpy as np

from silodp.later import Later

special = Later("scipy.special")

FEWEST_BITS = 2_000
TAIL = 12.5  # deviations up to which the slope is taken; at least REACH as a normal quantile, for so many coins
REACH = 12.45
WORD, GUARD = 128, 192  # bits of a table's entries, and of what they are computed in
# Of one coordinate of one silo's coins, that the tabulated law is another than the real one: below 2^23 masses, each
# off by at most 2^-129, in either of two neighbours.
ROUNDED = 2.0**-105


def dominating_gaussian(bits: int) -> float:
    """Std (in grid units) of the Gaussian noise that `bits` fair coins are at least as private as, per coordinate and
    but for `beyond`."""
    if bits < FEWEST_BITS:
        raise ValueError(f"bits must be at least {FEWEST_BITS} for a tight bound, not {bits}")
    below = np.cumsum(centred_probabilities(bits, TAIL + 4))
    middle = below.size // 2
    first = max(0, middle - math.ceil(TAIL * math.sqrt(bits) / 2))
    return 1 / float(np.max(np.diff(special.ndtri_exp(np.log(below[first : middle + 1])))))


def beyond(moved: float) -> float:
    """Probability with which a coordinate counts as shown if it moves by at most so many stds of its Gaussian."""
    return math.exp(float(special.log_ndtr(moved - REACH)))


def sensitivity(levels: float, dimension: int) -> float:
    """Largest l2 change of the integer sum when one record is replaced: by `levels` before the rounding."""
    return levels + 2 * math.sqrt(dimension)


def gaussian_multiplier(bits: int, levels: float, dimension: int) -> float:
    """Noise std over sensitivity of the Gaussian release that stands for one P_vec sum."""
    return dominating_gaussian(bits) / sensitivity(levels, dimension)


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


def cumulative_words(bits: int) -> np.ndarray:
    """2^128 times the distribution function at -r..r-1, in four words of 32 bits, the highest first (at r it is 2^128).

    Whole numbers throughout: a mass follows from its neighbour by a ratio, rounded down in the last of 192 bits.
    """
    if bits < 2 or bits % 2:
        raise ValueError(f"bits must be even and at least 2, not {bits}")
    half, above = bits // 2, [1 << GUARD]
    while len(above) <= half and above[-1] >> (GUARD - WORD - 2):
        step = len(above)
        above.append(above[-1] * (half - step + 1) // (half + step))
    total = 2 * sum(above) - above[0]
    masses = [((mass << (WORD + 1)) // total + 1) // 2 for mass in above]
    masses = [mass for mass in masses if mass]
    masses[0] -= masses[0] + 2 * sum(masses[1:]) - 2**WORD
    below = accumulate([*reversed(masses[1:]), *masses[:-1]])
    return np.frombuffer(b"".join(word.to_bytes(WORD // 8, "big") for word in below), ">u4").reshape(-1, WORD // 32)
