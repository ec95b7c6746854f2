"""bench.averages trains `auto` without simulating silos: its maps, steps and noise are those of the library's plan."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench import averages
from bench.averages import Ground, auto_setting
from silodp.releases import packed
from silodp.stages.kinds import kind_of
from silodp.stages.whiten import shift_of


class NoNoise:
    """Draws that a twin and the library then have in common."""

    def normal(self, size):
        return np.zeros(size)


@pytest.mark.parametrize("kind", ["logistic", "linear"])
def test_a_setting_is_what_the_library_makes_of_the_same_releases(monkeypatch, kind):
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(400, 4)) * [0.5, 0.3, 0.2, 0.1] + 0.1).astype(np.float32)
    targets = rng.normal(size=400) if kind == "linear" else rng.integers(2, size=400)
    ground = Ground(kind, (rows, targets), (rows, targets), (200, 200))
    plan = ground.plan(1.0, "untrusted", {"name": "auto"}, {"scale": 1.0})
    monkeypatch.setattr(averages.np.random, "default_rng", lambda seed: NoNoise())
    found = auto_setting(ground, plan, 0)

    asked: Any = plan.at("centre").algorithm
    options: Any = plan.config.algorithm
    std, half = plan.at("centre").std_of_average("centre"), 2.0 if kind == "linear" else 1.0
    centre = kind_of("centre").derived(plan.at("centre"), jnp.asarray(ground.moment[-1, :-1], jnp.float32))
    shift = shift_of(jnp.asarray(ground.moment[-1, :-1], jnp.float32), std * float(asked.clip), np.asarray(asked.scale))
    np.testing.assert_allclose(centre.arrays["centre"], shift.centre)
    left = averages.with_constant(rows, averages.LONGEST)[:, :-1] - shift.centre
    whitening = kind_of("whiten").derived(plan.at("whiten"), packed(jnp.asarray(left.T @ left / 400, jnp.float32)))
    mapped = whitening.features(jnp.asarray(left, jnp.float32))
    twin = averages.with_constant(rows, averages.LONGEST) @ found.matrix.T
    np.testing.assert_allclose(twin, mapped, rtol=1e-4, atol=1e-5)

    assert found.step == pytest.approx(half * options.step_size * whitening.longer, rel=1e-4)
    assert found.clip == pytest.approx(options.clip / half)
    assert found.std == plan.training.std_of_average("value")
