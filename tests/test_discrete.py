"""Discrete Gaussians: exactly their distribution, against theory, a slow exact reference, and an integral."""

from __future__ import annotations

import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from silodp import discrete
from silodp.discrete import discrete_gaussian
from silodp.noise import rounded_gaussian
from tests.repeatable import GivenWords, RepeatableEntropy


def chances(std: float) -> tuple[np.ndarray, np.ndarray]:
    reach = int(12 * std) + 2
    places = np.arange(-reach, reach + 1)
    weights = np.exp(-(places**2) / (2 * std**2))
    return places, weights / weights.sum()


def p_value(found: np.ndarray, std: float) -> float:
    """Of a chi-square test over cells in which at least ten are expected."""
    places, chance = chances(std)
    width = max(1, int(std // 16))
    cells, cell_of = np.unique(places // width, return_inverse=True)
    expected = np.bincount(cell_of, chance) * found.size
    counts = np.array([np.count_nonzero(found // width == cell) for cell in cells])
    full = expected >= 10
    counts, expected = (np.append(each[full], each[~full].sum()) for each in (counts, expected))
    return float(stats.chi2.sf(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), len(counts) - 1))


@pytest.mark.parametrize("std", [0.75, 4.0, 16.3, 1024.0])
def test_draws_follow_the_discrete_gaussian(std):
    found = discrete_gaussian(40_000 if std < 1 else 300_000, std, RepeatableEntropy(3))
    assert p_value(found, std) > 1e-3


def test_proposals_that_are_all_kept_would_be_noticed():
    """Rounded Gaussians are no discrete ones: their variance is larger by 1/12."""
    assert p_value(rounded_gaussian(np.zeros(300_000), 1.0, 1.0, RepeatableEntropy(3)), 1.0) < 1e-6


def test_the_sum_of_many_has_their_variance():
    for std in (2.0**16, 2.0**20, 2.0**24):
        found = discrete_gaussian(200_000, std, RepeatableEntropy(4)).astype(float)
        assert np.var(found) == pytest.approx(std**2, rel=0.02)
        assert stats.kstest(found / std, "norm").pvalue > 1e-3


# --- against a slow exact sampler ----------------------------------------------------------------------------------


def is_true(chance: Fraction, rng: random.Random) -> bool:
    return rng.randrange(chance.denominator) < chance.numerator


def lives(exponent: Fraction, rng: random.Random) -> bool:
    """True with probability exp(-exponent), by whole numbers alone (Canonne, Kamath, Steinke 2020, Algorithm 1)."""
    while exponent > 1:
        if not lives(Fraction(1), rng):
            return False
        exponent -= 1
    k = 1
    while is_true(exponent / k, rng):
        k += 1
    return k % 2 == 1


def slow(std: Fraction, rng: random.Random) -> int:
    """Their Algorithm 3: a discrete Laplace number, kept with the right probability."""
    scale = int(std) + 1
    while True:
        place = rng.randrange(scale)
        if not lives(Fraction(place, scale), rng):
            continue
        blocks = 0
        while lives(Fraction(1), rng):
            blocks += 1
        size, negative = place + scale * blocks, is_true(Fraction(1, 2), rng)
        if negative and size == 0:
            continue
        if lives((size - std * std / scale) ** 2 / (2 * std * std), rng):
            return -size if negative else size


@pytest.mark.parametrize("std", [1.5, 5.0])
def test_draws_are_like_those_of_a_slow_exact_sampler(std):
    rng = random.Random(7)
    reference = np.array([slow(Fraction(std), rng) for _ in range(6000)])
    found = discrete_gaussian(60_000, std, RepeatableEntropy(8))
    reach = int(2.5 * std)
    table = [np.bincount(np.clip(each, -reach, reach) + reach, minlength=2 * reach + 1) for each in (reference, found)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


# --- what the bound leaves open --------------------------------------------------------------------------------------


def rejection(x: int, std: float) -> mpmath.mpf:
    """1 - I(0) / I(x), by integration."""
    with mpmath.workdps(60):
        square = mpmath.mpf(std) ** 2
        mass = lambda x: mpmath.quad(lambda u: mpmath.exp(-x * u / square - u * u / (2 * square)), [-0.5, 0, 0.5])
        return 1 - mass(0) / mass(x)


@pytest.mark.parametrize(("std", "x"), [(0.5, 1), (2.5, 0), (2.5, 17), (8.0, 3), (1000.0, 8000), (2.0**20, 3_000_000)])
def test_a_rejection_has_the_integrals_probability_and_stays_below_the_bound(std, x):
    with mpmath.workdps(60):
        exact = rejection(x, std)
        assert abs(discrete._scaled_rejection(x, Fraction(std), 96) - exact * 2**96) < 1
        assert exact <= mpmath.mpf(x) ** 2 / (24 * mpmath.mpf(std) ** 4)


def test_a_coin_on_the_boundary_takes_more_bits():
    limit = int(discrete._scaled_rejection(17, Fraction(2.5), 96))
    word, rest = limit >> 64, limit % 2**64
    signed = lambda word: word - 2**64 if word >= 2**63 else word
    for further, rejects in ((rest - 5, True), (rest + 5, False)):
        assert discrete._rejects(word, 17, 2.5, GivenWords([signed(further)])) is rejects


@pytest.mark.parametrize("std", [0.0, 0.4, 2.0**31, float("nan"), float("inf")])
def test_a_std_beyond_what_is_exact_is_refused(std):
    with pytest.raises(ValueError, match="must be between"):
        discrete_gaussian(3, std, RepeatableEntropy(0))
