"""The root finder takes the steps of scipy's: calibrations keep their bits."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy.optimize import brentq

from silodp.privacy.roots import root

TOLERANCES = [(2e-12, 4 * 2.0**-52, 100), (1e-15, 1e-13, 500), (2e-6, 4 * 2.0**-52, 100)]


FUNCTIONS = [
    lambda x, a, b, c: math.tanh(a * x + b) + 0.3 * b,
    lambda x, a, b, c: math.exp(a * x) - 2 + b * x,
    lambda x, a, b, c: (x - b) ** 3 + 1e-3 * a,
    lambda x, a, b, c: math.log1p(math.exp(x)) - abs(c) - 0.1,
]


@pytest.mark.parametrize("tolerances", TOLERANCES)
def test_the_same_bits_as_scipy(tolerances):
    compared = 0
    for numbers in np.random.default_rng(0).normal(size=(200, 3)).tolist():
        for function in FUNCTIONS:
            if function(-5.0, *numbers) * function(7.0, *numbers) < 0:
                compared += 1
                xtol, rtol, steps = tolerances
                theirs = brentq(function, -5.0, 7.0, args=tuple(numbers), xtol=xtol, rtol=rtol, maxiter=steps)
                bound = partial(lambda f, n, x: f(x, *n), function, numbers)
                assert root(bound, -5.0, 7.0, *tolerances) == theirs
    assert compared > 400


def test_ends_that_are_roots_and_ends_without_one():
    assert root(lambda x: x, 0.0, 1.0) == 0.0
    assert root(lambda x: x - 1, 0.0, 1.0) == 1.0
    with pytest.raises(ValueError, match="no change of sign"):
        root(lambda x: x + 1, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="no root within 2 steps"):
        root(lambda x: x**3 - 0.3, 0.0, 1.0, steps=2)
