"""What a server makes of private estimates: optimisers, shorter steps, averages; and the sums of a prox and a set."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from silodp.algorithms import REGISTRY
from silodp.core import averaged
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.plan.parts import built, settled_facts
from silodp.prox import build_prox, build_sum
from silodp.run.runner import resume, train
from silodp.run.steps import stays_above
from silodp.server import Averaging, Optimiser, agree, build_average, build_decay, build_optimiser
from tests.cases import case
from tests.conftest import made_data
from tests.test_algorithms import ran

V = [np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.1, -4.0]), np.array([-1.0, 0.0, 2.0])]


def directions(optimiser: Optimiser | None) -> list[np.ndarray]:
    assert optimiser is not None
    kept, found = optimiser.open(jnp.zeros(3)), []
    for v in V:
        direction, kept = optimiser(jnp.asarray(v, jnp.float32), kept)
        found.append(np.asarray(direction))
    return found


def test_optimisers_do_what_they_are_named_after():
    m = np.zeros(3)
    balls, ahead = (
        directions(build_optimiser({"kind": "heavy-ball", "momentum": 0.8})),
        directions(build_optimiser({"kind": "nesterov", "momentum": 0.8})),
    )
    for v, ball, look in zip(V, balls, ahead, strict=True):
        m = 0.8 * m + v
        np.testing.assert_allclose(ball, m, rtol=1e-6)
        np.testing.assert_allclose(look, 0.8 * m + v, rtol=1e-6)
    first, second = np.zeros(3), np.zeros(3)
    for t, (v, found) in enumerate(zip(V, directions(build_optimiser("adam")), strict=True), start=1):
        first, second = 0.9 * first + 0.1 * v, 0.999 * second + 0.001 * v**2
        expected = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(found, expected, rtol=2e-4)


def grown(signal: float, rounds: int, seed: int = 0) -> list[float]:
    """How much longer the directions are than Nesterov's, where every v is a signal beside noise."""
    rng, kept, plain = np.random.default_rng(seed), None, None
    growing, nesterov = (
        build_optimiser({"kind": "growing", "momentum": 0.5}),
        build_optimiser({"kind": "nesterov", "momentum": 0.5}),
    )
    assert growing is not None and nesterov is not None
    kept, plain, found = growing.open(jnp.zeros(20)), nesterov.open(jnp.zeros(20)), []
    for _ in range(rounds):
        v = jnp.asarray(signal + rng.normal(size=20), jnp.float32)
        (longer, kept), (direction, plain) = growing(v, kept), nesterov(v, plain)
        np.testing.assert_allclose(longer, longer[0] / direction[0] * direction, rtol=1e-4)
        found.append(float(longer[0] / direction[0]))
    return found


def test_steps_grow_while_releases_agree_and_not_by_noise():
    found = grown(1.0, 30)
    np.testing.assert_allclose(found[:9], [1, 1, 1, 1, 1, 1, 1.3, 1.3**2, 1.3**3], rtol=1e-4)
    np.testing.assert_allclose(found[12:], 4.0, rtol=1e-4)  # the most
    assert np.mean([grown(0.0, 20, seed)[-1] for seed in range(10)]) < 2.0  # by luck, now and then
    late = grown(0.0, 60)
    assert late[19] == pytest.approx(late[-1])  # luck adds up in many rounds: only the first count


def test_steps_that_grow_are_those_of_messages_and_of_a_run_that_was_stopped(tmp_path):
    def asked(run: dict[str, Any], kind: str = "growing") -> dict[str, Any]:
        options = {"rounds": 12, "step_size": 0.02, "clip": 1.0, "optimiser": {"kind": kind, "momentum": 0.5}}
        privacy = {"epsilon": 300.0, "delta": 1e-4}
        return {"privacy": privacy, "algorithm": {"name": "dp-gd", **options}, "run": run | {"every": 3}}

    flat = lambda run: np.asarray(ravel_pytree(run.params)[0])
    data = made_data()
    whole = flat(train(asked({}), data=data, out=tmp_path / "whole"))
    told = flat(train(asked({"mode": "messages", "test_seed": True}), data=data, out=tmp_path / "messages"))
    np.testing.assert_allclose(whole, told, rtol=1e-4, atol=1e-5)
    plain = flat(train(asked({}, "nesterov"), data=data, out=tmp_path / "plain"))
    assert np.linalg.norm(whole) > 1.5 * np.linalg.norm(plain)  # they did grow

    def stop(x: Any, row: dict[str, float]) -> None:
        if row["round"] == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(asked({}), data=data, out=tmp_path / "stopped", on_round=stop)
    np.testing.assert_array_equal(flat(resume(tmp_path / "stopped", data=data)), whole)


def test_what_agrees_is_told_by_the_pairs_of_estimates():
    rng = np.random.default_rng(3)
    seen = []
    for shift in np.linspace(0, 0.6, 40):
        window = rng.normal(size=(5, 12)) + shift
        pairs = [window[i] @ window[j] for i in range(5) for j in range(i)]
        apart = np.sum(np.var(window, axis=0, ddof=1))
        seen.append(np.mean(pairs) > (0.04 + np.sqrt(2 / (20 * 12))) * apart)
        assert bool(agree(jnp.asarray(window, jnp.float32))) == seen[-1]
    assert 0 < sum(seen) < 40
    assert not bool(agree(jnp.zeros((5, 12)))) and bool(agree(jnp.ones((5, 12))))


@pytest.mark.parametrize("name", ["spider", "soteria-svrg"])
def test_an_optimiser_changes_the_path_and_not_the_cost(name):
    """The releases are those of the plan, whatever the server makes of them."""
    options: dict[str, Any] = {"optimiser": {"kind": "heavy-ball", "momentum": 0.5}, "step_decay": "linear"}
    (plain, before), (with_one, after) = ran(case(name, "untrusted")), ran(case(name, "untrusted", **options))
    assert plain.plan.multipliers == with_one.plan.multipliers
    for stream, tally in before.ends.accounts.tallies.items():
        np.testing.assert_array_equal(tally.count, after.ends.accounts.tallies[stream].count)
    assert np.abs(np.asarray(before.state.x - after.state.x)).max() > 1e-3


def test_every_estimator_but_mu2s_takes_an_optimiser():
    """DIFF2, Alg. 1, line 17: what the server makes of an estimate is its own affair."""
    facts = Facts((40, 40, 40), ("a", "b", "c"), parameters=6)
    for name, entry in REGISTRY.items():
        config = case(name, (entry.trusts or ("untrusted",))[0], optimiser="nesterov", weights="size")
        if name == "mu2":
            with pytest.raises(ConfigError, match="a momentum of its own"):
                built(config, settled_facts(config, facts))
        else:
            algorithm = built(config, settled_facts(config, facts))[2]
            assert algorithm.optimiser is not None and algorithm.optimiser.kind == "nesterov", name


def test_steps_shrink_as_asked():
    for given, expected in (
        ("linear", [1.0, 0.75, 0.5]),
        ({"kind": "polynomial", "power": 1.0}, [1.0, 0.5, 1 / 3]),
        ({"kind": "exponential", "factor": 0.9}, [1.0, 0.9, 0.81]),
        ([0.5, 3.0, 0.25, 1.0], [0.5, 3.0, 0.25]),
    ):
        decay = build_decay(given, 4)
        assert decay is not None and build_decay(decay.told, 4) == decay
        np.testing.assert_allclose([float(decay(t)) for t in range(3)], expected, rtol=1e-6)


def test_averages_are_the_weighted_means_they_say():
    points = [np.array([float(t), 1.0]) for t in (3, 5, 4, 9)]
    weights = {"exponential": [0.5**3, 0.5**2, 0.5, 1.0], "polynomial": [1.0, 2.0, 3.0, 4.0]}
    for average in (Averaging("exponential", 0.5), Averaging("polynomial", 1.0)):
        output = jnp.zeros(2)
        for t, x in enumerate(points, start=1):
            output = averaged(output, jnp.asarray(x, jnp.float32), t, 4, average)
        np.testing.assert_allclose(output, np.average(points, axis=0, weights=weights[average.kind]), rtol=1e-5)
    assert build_average(7, 5) == 5 and build_average(None, 5) == 1
    named = case("dp-gd", "untrusted", average="exponential").algorithm.average
    assert build_average(named, 5) == build_average({"kind": "exponential"}, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimiser": "sgd"}, "algorithm.optimiser: 'sgd' is unknown"),
        ({"optimiser": {"kind": "adam", "first": 1.0}}, "algorithm.optimiser 'adam': first = 1.0 must be a number"),
        ({"step_decay": {"kind": "linear", "power": 1.0}}, "algorithm.step_decay 'linear': power is unknown"),
        ({"step_decay": [1.0, 0.5]}, "algorithm.step_decay: 2 factors for"),
        ({"compressor": "rand-k", "keep": 3, "shift_rate": 0.2}, "algorithm.shift_rate = 0.2: messages are"),
        ({"average": {"kind": "median"}}, "algorithm.average: 'median' is unknown"),
        ({"prox": [{"kind": "l1", "strength": 0.1}]}, "algorithm.prox: ['l1']: a sum has one penalty and one set"),
    ],
)
def test_mistakes_are_named(options, said):
    with pytest.raises(ConfigError) as caught:
        ran(case("dp-gd", "untrusted", **options))
    assert str(caught.value).startswith(said)


SUMS = [
    [{"kind": "l1", "strength": 0.3}, {"kind": "box", "low": -0.2, "high": 0.5}],
    [{"kind": "ball", "radius": 0.6}, {"kind": "elastic-net", "l1": 0.2, "l2": 0.4}],
    [{"kind": "elastic-net", "l1": 0.2, "l2": 0.4}, {"kind": "simplex", "scale": 1.0}],
    [{"kind": "group-lasso", "strength": 0.2, "size": 2}, {"kind": "ball", "radius": 0.6}],
]


@pytest.mark.parametrize("parts", SUMS)
def test_the_operator_of_a_sum_is_the_minimum_of_the_sum(parts):
    prox, y, step = build_sum(parts), jax.random.normal(jax.random.key(3), (5,)), 0.7
    value = jax.jit(jax.vmap(lambda u: step * prox.penalty(u) + jnp.sum((u - y) ** 2) / 2))
    best = prox(y, step)
    noise = jax.random.normal(jax.random.key(4), (4000, 5)) * jnp.geomspace(1e-3, 1.0, 4000)[:, None]
    others = jax.vmap(prox.feasible)(best + noise)
    assert float(value(best[None])[0]) <= float(jnp.min(value(others))) + 1e-6


def test_group_lasso_shrinks_groups_and_drops_small_ones():
    found = np.asarray(build_prox("group-lasso", strength=1.0, size=2)(jnp.array([3.0, 4.0, 0.3, 0.4, 2.0]), 1.0))
    np.testing.assert_allclose(found, [2.4, 3.2, 0.0, 0.0, 1.0], rtol=1e-6)


def test_diff2s_step_size_rule_counts_against_the_minimum():
    slowly = [1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24]  # never 5 percent above the value before
    assert stays_above(slowly, 5, 1.05)
    assert not stays_above(slowly[:6], 5, 1.05)
    assert not stays_above([1.0, 1.2, 1.2, 0.9, 1.2, 1.2, 1.2], 5, 1.05), "a new minimum starts anew"
    assert stays_above([1.0, float("nan")], 5, 1.05)
