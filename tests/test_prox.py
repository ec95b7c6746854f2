"""Proximal operators: optimality, closed forms, projections, errors."""

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from silodp.prox import Prox, Simplex, build_prox

SMOOTH = {
    "none": build_prox("none"),
    "l1": build_prox("l1", strength=0.7),
    "l2": build_prox("l2", strength=0.7),
    "elastic-net": build_prox("elastic-net", l1=0.5, l2=2.0),
}
PROJECTIONS = {
    "ball": build_prox("ball", radius=1.5),
    "box": build_prox("box", low=-0.5, high=2.0),
    "simplex": build_prox("simplex", scale=2.0),
}
ALL = SMOOTH | PROJECTIONS

numbers = st.floats(-100, 100, width=32)
sizes = st.sampled_from([1, 2, 9])  # few, because each one compiles
vectors = sizes.flatmap(lambda d: hnp.arrays(np.float32, d, elements=numbers))
pairs = sizes.flatmap(lambda d: hnp.arrays(np.float32, (2, d), elements=numbers))
step_sizes = st.floats(0, 10, width=32)
every_prox = pytest.mark.parametrize("prox", ALL.values(), ids=ALL.keys())
every_projection = pytest.mark.parametrize("prox", PROJECTIONS.values(), ids=PROJECTIONS.keys())


@eqx.filter_jit
def apply(prox: Prox, y, step_size) -> jax.Array:
    return prox(y, step_size)


def optimality_gap(prox: Prox, y: np.ndarray, step_size: float, other: np.ndarray) -> float:
    """How far `prox(y)` is from <y - p, u - p> <= step_size (psi(u) - psi(p)), p optimal, all u.

    This is y - p being a step_size-subgradient of psi at p: it holds for every u in the domain of
    psi exactly when p is the argmin.
    """
    p = np.asarray(apply(prox, y, step_size), np.float64)
    u = other.astype(np.float64)
    psi = lambda x: float(prox.penalty(jnp.asarray(x, jnp.float32)))
    difference = 0.0 if step_size == 0 else step_size * (psi(u) - psi(p))
    return float((y - p) @ (u - p)) - difference


def in_domain(prox: Prox, point: np.ndarray) -> np.ndarray:
    """Some point of the set, found without the projection under test; for smooth psi the point."""
    if prox is PROJECTIONS["ball"]:
        return 1.5 * point / max(np.linalg.norm(point), 1.0)
    if prox is PROJECTIONS["box"]:
        return -0.5 + 2.5 * np.abs(np.sin(point))
    if prox is PROJECTIONS["simplex"]:
        weights = np.abs(point) + 1e-3
        return 2.0 * weights / weights.sum()
    return point


def tolerance(y: np.ndarray, u: np.ndarray) -> float:
    y_norm, u_norm = float(np.linalg.norm(y)), float(np.linalg.norm(u))
    return 2e-5 * (1.0 + y_norm) * (1.0 + y_norm + u_norm)


@every_prox
@given(points=pairs, step_size=step_sizes)
@settings(max_examples=40, deadline=None)
def test_optimal_against_every_other_point(prox, points, step_size):
    y, u = points[0], in_domain(prox, points[1])
    assert optimality_gap(prox, y, step_size, u) <= 10 * tolerance(y, u)


@every_prox
@given(points=pairs, step_size=step_sizes)
@settings(max_examples=40, deadline=None)
def test_firmly_non_expansive(prox, points, step_size):
    p, q = (np.asarray(apply(prox, y, step_size), np.float64) for y in points)
    moved, distance = p - q, points[0].astype(np.float64) - points[1]
    assert moved @ moved <= moved @ distance + tolerance(*points)


@every_projection
@given(y=vectors)
@settings(max_examples=40, deadline=None)
def test_projections_are_feasible_and_idempotent(prox, y):
    once = apply(prox, y, 0.3)
    assert prox.penalty(once) == 0.0
    np.testing.assert_allclose(apply(prox, once, 5.0), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [
        ("l1", lambda y, step: jnp.sign(y) * jnp.maximum(jnp.abs(y) - 0.7, 0.0)),
        ("l2", lambda y, step: y / (1.0 + 2.0 * step * 0.7)),
        ("ball", lambda y, step: 1.5 * y / jnp.linalg.norm(y)),
        ("simplex", lambda y, step: 2.0 * jnp.maximum(y, 0.0) / jnp.sum(jnp.maximum(y, 0.0))),
    ],
)
def test_wrong_operators_are_caught(kind, mutant):
    class Mutant(Prox):
        def __call__(self, y, step_size):
            return mutant(y, step_size)

        def penalty(self, x):
            return ALL[kind].penalty(x)

    rng = np.random.default_rng(0)
    y = np.array([0.9, 0.4, -0.2], np.float32)
    others = [in_domain(ALL[kind], rng.normal(size=3)) for _ in range(200)]
    worst = max(optimality_gap(Mutant(), y, 0.3, u) for u in others)
    assert worst > 100 * tolerance(y, np.ones(3))


Y = np.array([3.0, -0.2, 0.0, -1.0], np.float32)


@pytest.mark.parametrize(
    ("kind", "expected", "penalty"),
    [
        ("none", Y, 0.0),
        ("l1", [2.65, 0.0, 0.0, -0.65], 0.7 * 4.2),
        ("l2", Y / 1.35, 0.35 * 10.04),
        ("elastic-net", [1.375, 0.0, 0.0, -0.375], 0.5 * 4.2 + 10.04),
        ("ball", 1.5 * Y / np.sqrt(10.04), np.inf),
        ("box", [2.0, -0.2, 0.0, -0.5], np.inf),
        ("simplex", [2.0, 0.0, 0.0, 0.0], np.inf),
    ],
)
def test_closed_forms(kind, expected, penalty):
    np.testing.assert_allclose(ALL[kind](jnp.asarray(Y), 0.5), expected, rtol=1e-6)
    np.testing.assert_allclose(ALL[kind].penalty(jnp.asarray(Y)), penalty, rtol=1e-6)


@every_projection
def test_inside_points_stay_exactly(prox):
    inside = jnp.array([0.5, 0.5, 1.0])
    np.testing.assert_array_equal(prox(inside, 1.0), inside)


def test_simplex_of_a_long_and_large_vector():
    y = 1e4 + np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    projected = np.asarray(Simplex(1.0)(jnp.asarray(y), 1.0), np.float64)
    assert projected.min() >= 0.0
    assert projected.sum() == pytest.approx(1.0, abs=1e-5)


@every_prox
def test_vmap_and_traced_strengths_agree_with_single_calls(prox):
    ys = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32)
    np.testing.assert_allclose(jax.vmap(prox, (0, None))(ys, 0.4), [prox(y, 0.4) for y in ys], rtol=1e-6)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf, 3.0 * leaf]), prox)
    swept = jax.vmap(lambda one: one(ys[0], 0.4), axis_size=3)(stacked)
    doubled = jax.tree.map(lambda leaf: 2.0 * leaf, prox)
    np.testing.assert_allclose(swept[1], doubled(ys[0], 0.4), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("lasso", {}, "none, l1, l2, elastic-net, ball, box, simplex"),
        ("l1", {"strength": -1.0}, "strength = -1.0"),
        ("l2", {"strength": float("nan")}, "strength = nan"),
        ("elastic-net", {"l1": 1.0, "l2": -2.0}, "l2 = -2.0"),
        ("ball", {"radius": 0.0}, "radius = 0.0"),
        ("simplex", {"scale": float("inf")}, "scale = inf"),
        ("box", {"low": 2.0, "high": 1.0}, "low = 2.0"),
        ("box", {"low": float("nan"), "high": 1.0}, "low = nan"),
        ("ball", {}, "radius"),
        ("none", {"strength": 1.0}, "strength"),
    ],
)
def test_errors_name_the_option(kind, options, message):
    with pytest.raises(ValueError, match=message):
        build_prox(kind, **options)


def test_half_infinite_box():
    prox = build_prox("box", low=0.0, high=float("inf"))
    np.testing.assert_array_equal(prox(jnp.asarray(Y), 1.0), np.maximum(Y, 0.0))
    assert prox.penalty(jnp.maximum(jnp.asarray(Y), 0.0)) == 0.0
    assert prox.penalty(jnp.asarray(Y)) == jnp.inf
