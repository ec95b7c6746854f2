"""Tails of the normal law: scipy's to 14 digits, and many digits of mpmath's."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy import special

from silodp.privacy.tails import FAR, TAIL, erfcx, log_ndtr

AROUND = [0.0, 5e-324, 1e-300, 1e-8, 0.5, 25.999999, FAR, 26.000001, 1e3, 1e8, 1e150, 1e300, math.inf]
DIGITS = 4e-15
SMALL = 1e-20  # beside log delta: below it the logarithm of a law near 1 has fewer digits


def test_erfcx_is_scipys():
    for x in [*AROUND, *np.random.default_rng(0).uniform(0, 40, 5000).tolist()]:
        assert erfcx(x) == pytest.approx(float(special.erfcx(x)), rel=1e-14, abs=0)


def test_erfcx_is_that_of_many_digits():
    with mpmath.workdps(60):
        for x in [*AROUND[:9], *np.random.default_rng(1).uniform(0, 40, 300).tolist()]:
            exact = mpmath.exp(mpmath.mpf(x) ** 2) * mpmath.erfc(mpmath.mpf(x))
            assert abs(erfcx(x) / exact - 1) < DIGITS


def test_the_logarithm_of_the_law_is_scipys():
    places = [-TAIL, TAIL, -37.6, -38.7, 8.3, 40.0, math.inf, *AROUND[:10], *(-x for x in AROUND[:10])]
    for x in [*places, *np.random.default_rng(2).uniform(-50, 12, 5000).tolist()]:
        assert log_ndtr(x) == pytest.approx(float(special.log_ndtr(x)), rel=1e-14, abs=SMALL)


def test_the_logarithm_of_the_law_is_that_of_many_digits():
    with mpmath.workdps(60):
        for x in np.random.default_rng(3).uniform(-60, 8, 300).tolist():
            exact = mpmath.log(mpmath.erfc(-mpmath.mpf(x) / mpmath.sqrt(2)) / 2)
            assert abs(log_ndtr(x) - exact) < DIGITS * abs(exact) + SMALL
