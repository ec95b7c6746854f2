"""SVRG and SAGA on their worst neighbours: a record whose gradient turns round between the anchor and the point.

Then all three gradients of an estimate pull one way (here - there + the mean of there), and the bound is reached.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.audit.neighbours import measured_sensitivity
from silodp.data import FederatedData, SiloData
from silodp.gradients import SLACK
from silodp.run.runner import prepare
from silodp.sampling import TwoLevel
from tests.cases import case

NEAR, STEEP = 1e-4, 50.0  # of the starting point; much above the clip norm
ROUNDS = 8


def turning(params: Any, record: Any) -> Any:
    """Gradient +STEEP * sign at the start, -STEEP * sign anywhere else."""
    sign = record[0][0]
    return STEEP * sign * jnp.where(jnp.abs(params) < NEAR, params, 2 * NEAR - params)[0]


def prepared_run(name: str, sizes: tuple[int, ...] = (6, 5), batch: int = 2) -> Any:
    silos = tuple(SiloData(f"silo {i}", np.ones((n, 1), np.float32), np.zeros(n)) for i, n in enumerate(sizes))
    data = FederatedData("turning", silos, None, "regression", (), ())
    plain: dict[str, Any] = {"compressor": "identity", "keep": None} if name.startswith("soteria") else {}
    kept: dict[str, Any] = {"snapshot_probability": 1e-6} if "svrg" in name else {}  # the anchor stays at the start
    config = case(name, "untrusted", rounds=ROUNDS, batch=batch, **plain, **kept)
    return prepare(config, data, silodp.from_loss(turning, lambda key: jnp.zeros(1)))


@pytest.mark.parametrize("name", ["ldp-svrg", "soteria-saga"])
def test_the_bound_is_reached_and_never_exceeded(name):
    one, other = (np.array([1.0], np.float32), np.float32(0)), (np.array([-1.0], np.float32), np.float32(0))
    moved = measured_sensitivity(prepared_run(name), ROUNDS, one, other)
    assert 1 - 3 * SLACK < moved.worst["value"] <= 1


@pytest.mark.parametrize(("batch", "records"), [(1, 1), (3, 6), (8, 40), (40, 40)])
def test_the_noise_is_scaled_to_the_bound_that_is_accounted(batch, records):
    """Written out: new and old gradient in the batch's mean, the old one in the full mean, each sum with its slack."""
    rule = TwoLevel(batch)
    undrawn = 2 * (1 + SLACK) / records
    drawn = 2 * (1 + SLACK) / batch + 2 * (1 / batch - 1 / records) + 2 * SLACK * (1 / batch + 1 / records)
    assert rule.bound_over_clip(records) == pytest.approx(drawn)
    assert rule.sampling(records).ratio == pytest.approx(undrawn / drawn)
