"""Sums of fair coins as exact tables, without ever tossing the coins.

The number of heads among `bits` fair coins, minus bits/2, has probabilities that follow from its
central one by ratios of small numbers, accurate to about 1e-13 relative even for billions of coins
(log-gamma loses six digits there). A rounded Gaussian is not the same: its tails are heavier and no
accountant covers it.
"""

import math

import numpy as np


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
