"""Whole runs on crafted neighbours, whose float32 sums would grow apart: differences, local steps, tables, memories."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.data import FederatedData, SiloData
from silodp.run.prepare import prepare
from silodp.run.simulate import Setting
from tests.cases import case
from tests.rounding.test_arithmetic import crafted
from tests.test_sensitivity_runs import TwinChannel, room

N, CLIP = 9500, 1.001  # above the crafted numbers, which keep their bits at the start


def loss(params: Any, record: Any) -> Any:
    """Its gradient is the record at 0, and its differences are multiples of the record anywhere."""
    return record[0][0] * (params[0] + params[0] ** 2 / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local-sgd", {"sampling": "full", "batch": None}),
        ("diff2-bvr-l-sgd", {"batch_local": N - 1}),
        ("ce-psgm", {"batch": N - 1, "local_steps": 2, "batch_local": N - 1}),
        ("soteria-saga", {"compressor": "identity", "keep": None, "batch": N // 2}),
        ("mu2", {}),
        ("spider", {}),
    ],
)
def test_crafted_neighbours_move_no_release_of_a_run_beyond_its_bound(name, options):
    one, other = (np.float32(numbers)[:, None] for numbers in crafted(N, 0, 12))
    ones = np.ones((N, 1), np.float32)
    silos = tuple(SiloData(f"silo {i}", each, np.zeros(N)) for i, each in enumerate((one, ones)))
    data = FederatedData("crafted", silos, None, "regression", (), ())
    config = case(name, "untrusted", rounds=3, **{"prox": "none", "step_size": 1e-3, "clip": CLIP} | options)
    prepared = prepare(config, data, silodp.from_loss(loss, lambda key: jnp.zeros(1)))
    setting = prepared.setting
    features = jnp.asarray(np.stack([np.stack([first, ones]) for first in (one, other)])[None])
    twins = Setting(setting.algorithm, TwinChannel(), setting.key, setting.x0)
    found = room(prepared.problem, twins, (features, jnp.zeros(features.shape[:-1])))
    least = {stream: float(np.min(own)) for stream, own in found.items()}
    assert all(room >= 1 for room in least.values()), least
    assert min(least.values()) < 4, f"these neighbours do not test the bound: {least}"
