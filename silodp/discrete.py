"""Discrete Gaussian noise, exactly: whole numbers x with probability proportional to exp(-x^2 / (2 std^2)).

Silos whose sums alone are seen add these: a sum of discrete Gaussians is nearly one of them, while a sum of rounded
Gaussians is no post-processing of a Gaussian (docs/privacy.md, "Sums under masks").

How. A proposal X = round(std Z) is drawn in exactly its distribution (silodp.noise): P(X = x) is the Gaussian's mass of
[x - 1/2, x + 1/2]. Relative to exp(-x^2 / (2 std^2)) that mass is I(x) = the integral over |u| < 1/2 of
exp(-x u / std^2 - u^2 / (2 std^2)), which is least at x = 0. So a proposal is kept with probability I(0) / I(x), and
what is kept is a discrete Gaussian, for every tail.

    1 - I(0) / I(x) <= x^2 / (24 std^4)

as I(x) / I(0) is a mean of cosh(x u / std^2) over u in [-1/2, 1/2], no larger than the uniform one, sinh(y) / y with
y = x / (2 std^2), which is at most exp(y^2 / 6). A 32-bit word decides by this bound nearly always; what it leaves open
is decided with mpmath, with as many further bits as that takes. Rejections are as rare as 1 / (24 std^2).
"""

from fractions import Fraction
from typing import Any

import numpy as np
from mpmath.libmp import (
    fone,
    from_rational,
    mpf_div,
    mpf_erf,
    mpf_erfc,
    mpf_exp,
    mpf_mul,
    mpf_shift,
    mpf_sqrt,
    mpf_sub,
    to_int,
)

from silodp.noise import BLOCK, WORD, Entropy, rounded_gaussian

LEAST_STD, MOST_STD = 0.5, 2.0**30
HALF = WORD // 2
ROUNDED_UP = 1 + 2.0**-40  # what float64 may take from the bound


def discrete_gaussian(count: int, std: float, entropy: Entropy) -> np.ndarray:
    """So many independent discrete Gaussians of parameter `std`: int64, in exactly that distribution.

    Example:
        >>> from silodp.discrete import discrete_gaussian
        >>> from silodp.noise import Entropy
        >>> discrete_gaussian(1000, 2.0**16, Entropy()).dtype
        dtype('int64')
    """
    if not LEAST_STD <= std <= MOST_STD:
        raise ValueError(f"std = {std!r}: must be between {LEAST_STD} and 2^30 steps")
    drawn = np.empty(count, np.int64)
    for begin in range(0, count, BLOCK):
        _fill(drawn[begin : begin + BLOCK], std, entropy)
    return drawn


def _fill(drawn: np.ndarray, std: float, entropy: Entropy) -> None:
    open_ = np.arange(drawn.size)
    while open_.size:
        proposed = rounded_gaussian(np.zeros(open_.size), std, 1.0, entropy)
        drawn[open_] = proposed
        open_ = open_[_rejected(proposed, std, entropy)]


def _rejected(proposed: np.ndarray, std: float, entropy: Entropy) -> np.ndarray:
    """Which proposals a coin V, uniform in (0, 1), rejects: those with V < 1 - I(0) / I(x)."""
    words = entropy.words(-(-proposed.size // 2)).view(np.uint32)[: proposed.size]
    squares = np.square(proposed, dtype=np.float64)
    squares *= 2.0**HALF * ROUNDED_UP / (24 * std**4)
    unsure = np.flatnonzero(words <= squares)
    rejects = [i for i in unsure if _rejects(int(words[i]), abs(int(proposed[i])), std, entropy)]
    return np.array(rejects, np.int64)


def _rejects(word: int, size: int, std: float, entropy: Entropy) -> bool:
    """The coin's first bits are those of the word; more are drawn as they are needed."""
    bits = HALF
    while True:
        limit = _scaled_rejection(size, Fraction(std), bits)
        if word + 1 < limit:
            return True
        if word > limit + 1:
            return False
        word = word << WORD | int(entropy.words(1)[0]) % 2**WORD
        bits += WORD


def _scaled_rejection(size: int, std: Fraction, bits: int) -> Any:
    """2^bits (1 - I(0) / I(size)) as an integer, off by less than one.

    I(x) = std sqrt(pi / 2) exp(x^2 / (2 std^2)) (erfc((x - 1/2) / (std sqrt 2)) - erfc((x + 1/2) / (std sqrt 2))). The
    difference takes as many digits as std and the tail have; the precision has them and 64 more.
    """
    exponent = Fraction(size * size) / (2 * std * std)
    lost = int(exponent * 3 / 2) + 2 * max(0, int(std).bit_length()) + 16
    precision = bits + WORD + lost
    place = lambda halves: _over_root(Fraction(halves) / (2 * std), precision)
    mass = mpf_sub(mpf_erfc(place(2 * size - 1), precision), mpf_erfc(place(2 * size + 1), precision), precision)
    weight = mpf_exp(from_rational(exponent.numerator, exponent.denominator, precision), precision)
    centre = mpf_shift(mpf_erf(place(1), precision), 1)
    kept = mpf_div(centre, mpf_mul(weight, mass, precision), precision)
    return to_int(mpf_shift(mpf_sub(fone, kept, precision), bits))


def _over_root(value: Fraction, precision: int) -> Any:
    """value / sqrt(2)."""
    square = value * value / 2
    root = mpf_sqrt(from_rational(square.numerator, square.denominator, precision), precision)
    return root if value >= 0 else mpf_sub(from_rational(0, 1, precision), root, precision)
