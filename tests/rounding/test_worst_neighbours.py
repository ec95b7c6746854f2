"""SVRG and SAGA on their worst neighbours: a record whose gradient turns round between the anchor and the point.

Then all three gradients of an estimate pull one way (here - there + the mean of there), and the bound is reached.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.algorithms.soteria import SVRG
from silodp.audit.neighbours import measured_sensitivity
from silodp.channels import Untrusted
from silodp.core import Silo, Site
from silodp.data import FederatedData, SiloData
from silodp.doubles import exact
from silodp.gradients import SLACK
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.prox import NoProx
from silodp.randomness import SeededRandomness
from silodp.releases import Account
from silodp.run.prepare import prepare
from silodp.sampling import Recomputed, TwoLevel
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


# A gradient that SVRG computes twice does not turn here, which its bound allows for.
@pytest.mark.parametrize(("name", "reached"), [("ldp-svrg", (2 / 2 - 1 / 6) / (2 / 2 + 1 / 6)), ("soteria-saga", 1.0)])
def test_the_bound_is_reached_and_never_exceeded(name, reached):
    one, other = (np.array([1.0], np.float32), np.float32(0)), (np.array([-1.0], np.float32), np.float32(0))
    moved = measured_sensitivity(prepared_run(name), ROUNDS, one, other)
    assert reached - 3 * SLACK < moved.worst["value"] <= reached


@pytest.mark.parametrize(("batch", "records"), [(1, 1), (3, 6), (8, 40), (40, 40)])
def test_the_noise_is_scaled_to_the_bound_that_is_accounted(batch, records):
    """Written out: new and old gradient in the batch's mean, the old one in the full mean, each sum with its slack."""
    rule = TwoLevel(batch)
    undrawn = 2 * (1 + SLACK) / records
    drawn = 4 * (1 + SLACK) / batch + 2 * (SLACK - 1) / records
    assert rule.bound_over_clip(records) == pytest.approx(drawn)
    assert rule.sampling(records).ratio == pytest.approx(undrawn / drawn)
    twice, drawn = Recomputed(batch), 2 * (1 + SLACK) * (2 / batch + 1 / records)
    undrawn = 2 * (1 + SLACK) / records
    assert twice.bound_over_clip(records) == pytest.approx(drawn)
    assert twice.sampling(records).ratio == pytest.approx(undrawn / drawn)


@pytest.mark.parametrize("engine", ["structured", "general"])
def test_a_gradient_that_rounding_turns_does_not_exceed_the_bound_of_svrg(engine):
    """Records whose products cancel at the anchor: the batch's program and the full mean's add up in two orders, and
    the two gradients there point to opposite sides."""
    n, batch, d = 301, 250, 10
    objective = build_objective(
        build_model("linear", inputs=d, outputs=1, bias=False), (jnp.zeros(d), jnp.zeros(())), engine
    )
    algorithm = SVRG(jnp.float32(1), NoProx(), jnp.float32(1), TwoLevel(batch), jnp.float32(0), 1)

    @jax.jit
    def estimated(features, targets, x, anchor):
        site = Site(objective, Untrusted(), (features, targets), jnp.int32(n), jnp.int32(0), alone=True)
        silo = Silo(site, jnp.int32(0), SeededRandomness(jax.random.key(2)), (), Account.empty(["value"]))
        silo.memory = algorithm.remember(silo, x)
        return algorithm.estimate(silo, x, anchor, jnp.bool_(True)), algorithm.batch.draw(silo, "value").rows

    rng = np.random.default_rng(1)
    anchor, along, across = np.float32(rng.normal(size=d)), *np.linalg.qr(rng.normal(size=(d, 2)))[0].T
    x = np.float32(anchor + along)
    nothing = np.zeros((n, d), np.float32), np.zeros(n, np.float32)
    rows = np.asarray(estimated(*nothing, x, anchor)[1])
    place, found = rows[rows < n][-2], []
    for side in [1, -1] * 60:
        # At x the gradient is along `side`; at the anchor the residual is what rounding makes it.
        record = np.float32(rng.uniform(1e3, 1.3e3) * (0.03 * along + side * across) + 3 * rng.normal(size=d))
        middle = np.float32(record.astype(np.float64) @ anchor)
        for target in (middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, np.float32(-1e9))):
            features, targets = nothing[0].copy(), nothing[1].copy()
            features[place], targets[place] = record, target
            release = estimated(features, targets, x, anchor)[0]
            found.append(exact(release.exact) / float(release.bound))
    reached = np.array(found) @ across
    assert np.linalg.norm(found[reached.argmax()] - found[reached.argmin()]) <= 1
