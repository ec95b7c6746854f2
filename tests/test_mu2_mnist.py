"""DP-mu2-FL on MNIST as published: Reshef and Levy 2024, Tables 1 and 2 (test loss at the last query point).

Softmax regression on pixels/255 and a column of ones, d = 7850; the ball of radius D/2 = 0.05 around 0; record
(t-1)M + i is silo i's record of round t; one pass. Step size and clip are the library's defaults for these G, L, D.
The published rho are Gaussian-DP levels: epsilon 24.4, 65.3 and 195.4 at delta 1e-5.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from silodp.data import read_data
from silodp.parse import parse_config
from silodp.run.sweep import Outcome, sweep

MNIST = Path(os.environ.get("SILODP_DATA", "")) / "mnist.npz"
RHO = (4.0, 8.0, 16.0)
RECORDS, INPUTS = 60_000, 785
TOLERANCE = 0.0015
PUBLISHED = {
    ("untrusted", 1): (2.256, 2.253, 2.252),
    ("untrusted", 10): (2.267, 2.259, 2.255),
    ("untrusted", 100): (2.285, 2.274, 2.264),
    ("trusted", 10): (2.256, 2.253, 2.252),
    ("trusted", 100): (2.258, 2.257, 2.256),
}


def outcomes(trust: str, silos: int) -> list[Outcome]:
    rounds = RECORDS // silos
    constants = {"gradient_bound": math.sqrt(2 * INPUTS), "smoothness": INPUTS / 2, "diameter": 0.1}
    tree: dict[str, Any] = {
        "data": {
            "source": "mnist",
            "silos": silos,
            "partition": "round-robin",
            "preprocess": ["flatten", "divide:255", "bias"],
        },
        "model": {"kind": "softmax", "bias": False, "initial": "zeros"},
        "privacy": {"trust": trust, "gdp": RHO[0]},
        "algorithm": {"name": "mu2", "rounds": rounds} | constants,
        "run": {"every": rounds},
        "sweep": {"grid": {"privacy.gdp": list(RHO)}},
    }
    config = parse_config(tree)
    return sweep(config, data=read_data(config.data))


@pytest.mark.skipif(not MNIST.is_file(), reason="needs mnist.npz (SILODP_DATA)")
@pytest.mark.parametrize(
    ("trust", "silos"),
    [case if case == ("trusted", 100) else pytest.param(*case, marks=pytest.mark.slow) for case in PUBLISHED],
)
def test_the_published_losses_are_reproduced(trust, silos):
    results = outcomes(trust, silos)
    losses = [outcome.history[-1]["test_loss"] for outcome in results]
    np.testing.assert_allclose(losses, PUBLISHED[trust, silos], atol=TOLERANCE, rtol=0)
    assert [outcome.epsilon for outcome in results] == pytest.approx([24.38, 65.32, 195.35], abs=0.01)
    for outcome in results:
        assert np.linalg.norm(outcome.x) <= 0.05 + 1e-6
