"""Tails of the normal law for one number at a time, from the error function of Python's own.

scipy.special takes longer to import than all calibrations of a Gaussian run; tests compare the two to 14 digits, and
with many more. What they differ by is far below what calibrations leave for rounding (accountant.SAFE).
"""

from __future__ import annotations

import math

SQRT2, SQRT_PI = math.sqrt(2.0), math.sqrt(math.pi)
FAR = 26.0  # beyond, erfc is hardly a number any more, and seven terms of its expansion are enough
TAIL = 5.0


def erfcx(x: float) -> float:
    """exp(x^2) erfc(x), for x >= 0."""
    if x < FAR:
        # x^2 to twice the digits: the square of its first bits is exact.
        first = math.floor(x * 2.0**20) * 2.0**-20
        return math.exp(first * first) * math.exp((x - first) * (x + first)) * math.erfc(x)
    total = term = 1.0
    for k in range(1, 8):
        term *= (1 - 2 * k) / (2 * x) / x
        total += term
    return total / (x * SQRT_PI)


def log_ndtr(x: float) -> float:
    """The logarithm of the chance that a standard normal number is below x."""
    if x > 0:
        return math.log1p(-math.erfc(x / SQRT2) / 2)
    if x > -TAIL:
        return math.log(math.erfc(-x / SQRT2) / 2)
    return math.log(erfcx(-x / SQRT2) / 2) - x * x / 2
