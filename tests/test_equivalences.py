"""Methods that must be one another: the same numbers, to the bit where the same operations are done."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jaxtyping import Array

from silodp.data import FederatedData
from silodp.parse import parse_config
from silodp.run import federation
from silodp.run.prepare import prepare
from silodp.run.simulate import Problem, Setting, one_round, start
from tests.conftest import made_data

BALANCED = made_data((30, 30, 30))
ROUNDS = 5


def trained(
    data: FederatedData = BALANCED,
    trust: str = "untrusted",
    multipliers: dict[str, float] | None = None,
    **options: Any,
) -> np.ndarray:
    """The last iterate. Multipliers are given, so that two methods can be given the same noise."""
    tree = {
        "privacy": {"trust": trust, "multipliers": multipliers or {"value": 2.0}},
        "algorithm": {"rounds": ROUNDS, "step_size": 0.4, "clip": 1.0} | options,
        "run": {"seed": 5, "every": ROUNDS},
    }
    prepared = prepare(parse_config(tree), data)
    return np.asarray(all_rounds(prepared.problem, prepared.setting))


@eqx.filter_jit
def all_rounds(problem: Problem, setting: Setting) -> Array:
    step = lambda _, carry: one_round(problem, setting, carry)
    return jax.lax.fori_loop(0, problem.rounds, step, start(problem, setting)).state.x


@pytest.fixture(scope="module")
def dp_gd() -> np.ndarray:
    return trained(name="dp-gd")


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_diff2_that_restarts_every_round_is_dp_gd(trust):
    unbalanced = made_data()
    restarted = trained(unbalanced, trust, name="diff2-gd", clip_difference=0.7, restart=1)
    np.testing.assert_array_equal(restarted, trained(unbalanced, trust, name="dp-gd"))


def test_spider_under_a_trusted_server_without_prox_is_diff2():
    both: dict[str, Any] = {"clip_difference": 0.7, "restart": 3, "multipliers": {"value": 2.0, "difference": 3.0}}
    diff2 = trained(made_data(), "trusted", name="diff2-gd", **both)
    np.testing.assert_array_equal(diff2, trained(made_data(), "trusted", name="spider", capped=False, **both))
    # DIFF2's own form has no cap; where the cap does not bind it changes nothing.
    np.testing.assert_allclose(diff2, trained(made_data(), "trusted", name="spider", **both), rtol=1e-6)
    bound: dict[str, Any] = both | {"clip_difference": 100.0}
    capped = trained(made_data(), "trusted", name="spider", **bound)
    assert np.abs(capped - trained(made_data(), "trusted", name="diff2-gd", **bound)).max() > 1e-3


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_batch_of_all_records_is_full_batch(dp_gd, sampling):
    batched = trained(name="dp-sgd", batch=30, sampling=sampling)
    np.testing.assert_allclose(batched, dp_gd, rtol=1e-5, atol=1e-6)
    fewer = trained(name="dp-sgd", batch=10, sampling=sampling)
    assert np.abs(fewer - dp_gd).max() > 1e-3


def test_weights_by_size_are_equal_weights_when_silos_are_balanced(dp_gd):
    np.testing.assert_array_equal(trained(name="dp-gd", weights="equal"), dp_gd)
    unbalanced = made_data()
    apart = trained(unbalanced, name="dp-gd", weights="size") - trained(unbalanced, name="dp-gd", weights="equal")
    assert np.abs(apart).max() > 1e-3


def test_participation_of_all_silos_is_no_participation_at_all(dp_gd):
    np.testing.assert_array_equal(trained(name="dp-gd", participation=3), dp_gd)
    assert np.abs(trained(name="dp-gd", participation=2) - dp_gd).max() > 1e-3


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_silos_that_are_asked_a_few_at_a_time_give_the_same_mean_accounts_and_bits(trust, monkeypatch):
    """Five silos two at a time, the last one alone. A silo left out, or a weight of another's, moves the point."""
    options = {"name": "dp-gd", "rounds": 2, "step_size": 0.4, "clip": 1.0, "weights": "size"}
    tree = {"privacy": {"trust": trust, "multipliers": {"value": 2.0}}, "algorithm": options, "run": {"every": 2}}
    prepared = prepare(parse_config(tree), made_data((30, 24, 17, 12, 5)))

    def after() -> Any:
        step = lambda _, carry: one_round(prepared.problem, prepared.setting, carry)
        begun = start(prepared.problem, prepared.setting)
        return jax.jit(lambda: jax.lax.fori_loop(0, 2, step, begun))()

    whole = after()
    parameters = prepared.ground.objective.parameters
    monkeypatch.setattr(federation, "MESSAGES_BYTES", 2 * 4 * parameters)
    parts = after()
    np.testing.assert_allclose(parts.state.x, whole.state.x, rtol=1e-5, atol=1e-6)
    for own, other in zip(jax.tree.leaves(parts.ends), jax.tree.leaves(whole.ends), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)
