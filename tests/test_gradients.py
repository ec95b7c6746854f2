"""The clipped sum: both engines against a float64 reference, and the guarantee that privacy rests on."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from silodp import gradients
from silodp.doubles import highs
from silodp.gradients import (
    Regularised,
    avg_pool,
    conv2d,
    dense,
    difference,
    embed,
    engine_for,
    max_pool,
    per_record,
    record_factors,
)
from silodp.gradients.difference import Combination
from silodp.gradients.factors import COMPARED, DenseFactors, Term, added_by_row
from silodp.gradients.softplus import slope, slope_change, softplus, softplus_change

ENGINES = ("general", "structured")
N = 23
clipped_sum = lambda *given, **named: highs(gradients.clipped_sum(*given, **named))
sum_factors = lambda *given: highs(gradients.sum_factors(*given))
jitted = jax.jit(clipped_sum, static_argnums=0, static_argnames=("engine", "microbatch"))
draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@cache
def record_gradients(loss):
    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def reference(loss, points, coefficients, records, weights, clip=None):
    """Straight from the definition, in float64; without a clip, half of the records are clipped. Also says the clip."""
    with jax.enable_x64(True):
        double = lambda leaf: np.asarray(leaf, np.float64 if np.asarray(leaf).dtype.kind == "f" else None)
        widen = partial(jax.tree.map, double)
        total = 0.0
        for c, point in zip(coefficients, map(widen, points), strict=True):
            gradients = record_gradients(loss)(point, widen(records))
            total = total + c * np.concatenate([g.reshape(len(g), -1) for g in jax.tree.leaves(gradients)], 1)
    norms = np.linalg.norm(total, axis=1)
    clip = np.median(norms) if clip is None else clip
    factor = np.where(norms > clip, clip / np.where(norms > 0, norms, 1), 1)
    return (np.asarray(weights, np.float64) * factor) @ total, clip


def mlp_loss(activation, params, record):
    features, label = record
    h = activation(dense(params["w1"], params["b1"], features))
    z = dense(params["w2"], params["b2"], h)
    return jax.nn.logsumexp(z) - z[label]


def mlp_params(seed=0):
    return {
        "w1": draw(seed, 7, 6) / 3,
        "b1": draw(seed + 1, 7),
        "w2": draw(seed + 2, 4, 7) / 3,
        "b2": draw(seed + 3, 4),
    }


def conv_loss(pool, params, record):
    image, label = record
    h = pool(jnp.tanh(conv2d(params["k1"], params["b1"], image)))
    h = jax.nn.softplus(conv2d(params["k2"], None, h, stride=2))
    z = dense(params["w"], params["b"], h.reshape(-1))
    return jax.nn.logsumexp(z) - z[label]


def conv_params():
    return {
        "k1": draw(0, 3, 2, 3, 3) / 4,
        "b1": draw(1, 3),
        "k2": draw(2, 4, 3, 2, 2) / 3,
        "w": draw(3, 3, 16) / 4,
        "b": draw(4, 3),
    }


def words_loss(params, record):
    words, label = record
    h = jnp.tanh(embed(params["table"], words).mean(axis=0))
    z = dense(params["w"], None, h)
    return jax.nn.logsumexp(z) - z[label]


def logistic_loss(params, record):
    features, label = record
    return jax.nn.softplus(-label * dense(params["w"], params["b"], features)[0])


def bounded(params):
    return 0.3 * sum(jnp.sum(x * x / (1 + x * x)) for x in jax.tree.leaves(params))


labels = lambda k: jax.random.randint(jax.random.key(9), (N,), 0, k)
LOGISTIC = ({"w": draw(0, 1, 6), "b": draw(1, 1)}, (draw(5, N, 6), jnp.sign(draw(6, N))))
CASES = {
    "tanh": (partial(mlp_loss, jnp.tanh), mlp_params(), (draw(5, N, 6), labels(4))),
    "softplus": (partial(mlp_loss, jax.nn.softplus), mlp_params(), (draw(5, N, 6), labels(4))),
    "sigmoid": (partial(mlp_loss, jax.nn.sigmoid), mlp_params(), (draw(5, N, 6), labels(4))),
    "relu": (partial(mlp_loss, jax.nn.relu), mlp_params(), (draw(5, N, 6), labels(4))),
    "gelu": (partial(mlp_loss, jax.nn.gelu), mlp_params(), (draw(5, N, 6), labels(4))),
    "max pool": (partial(conv_loss, max_pool), conv_params(), (draw(5, N, 2, 11, 11), labels(3))),
    "average pool": (partial(conv_loss, avg_pool), conv_params(), (draw(5, N, 2, 11, 11), labels(3))),
    "embedding": (
        words_loss,
        {"table": draw(0, 5, 3), "w": draw(1, 4, 3)},
        (jax.random.randint(jax.random.key(8), (N, 6), 0, 5), labels(4)),
    ),
    "logistic": (logistic_loss, *LOGISTIC),
    "regularised": (Regularised(logistic_loss, bounded), *LOGISTIC),
    "regularised mlp": (Regularised(partial(mlp_loss, jnp.tanh), bounded), mlp_params(), (draw(5, N, 6), labels(4))),
}


def apart(params, distance):
    step = jax.tree.map(lambda leaf: draw(leaf.size, *leaf.shape), params)
    scale = distance / np.linalg.norm(flat(step))
    return jax.tree.map(lambda a, b: a + scale * b, params, step)


def relative(got, want):
    return np.linalg.norm(flat(got) - flat(want)) / np.linalg.norm(flat(want))


SLOW = ("average pool", "sigmoid", "gelu", "regularised mlp")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, -1.0), (1.4, -0.4)])
def test_both_engines_equal_the_float64_definition_near_and_far(case, coefficients):
    loss, y, records = CASES[case]
    weights = jnp.abs(draw(7, N))
    for distance in (1e-6, 1e-3, 1.0):
        points = [apart(y, distance), y][: len(coefficients)]
        want, clip = reference(loss, points, coefficients, records, weights)
        for engine in ENGINES:
            got = jitted(loss, points, coefficients, records, weights, clip, engine=engine, microbatch=10)
            assert relative(got, want) < 1e-5, (engine, distance)


def test_three_points():
    loss, y, records = CASES["tanh"]
    points, coefficients = [apart(y, 1e-5), apart(y, 0.3), y], (1.0, 0.5, -1.2)
    want, _ = reference(loss, points, coefficients, records, np.ones(N), 0.5)
    for engine in ENGINES:
        assert relative(jitted(loss, points, coefficients, records, jnp.ones(N), 0.5, engine=engine), want) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("coefficients", [(1.0, -1.0), (2.0, -0.5), (2.0, -1, -1.0)])
def test_coefficients_that_are_known_give_what_others_give(engine, coefficients):
    """Where they add up to 0 the last point's own gradient is not computed at all."""
    loss, y, records = CASES["regularised"]
    points = [apart(y, 0.3), apart(y, 1e-3), y][-len(coefficients) :]
    known = jax.jit(lambda *given: clipped_sum(loss, points, coefficients, *given, engine=engine))
    want = jitted(loss, points, coefficients, records, jnp.ones(N), 0.1, engine=engine)
    assert relative(known(records, jnp.ones(N), 0.1), want) < 1e-6
    dirty = records[0].at[3].set(jnp.nan).at[5].set(jnp.inf)
    clean = known(records, jnp.ones(N).at[jnp.array([3, 5])].set(0), 0.1)
    assert relative(known((dirty, records[1]), jnp.ones(N), 0.1), clean) < 1e-6
    assert (Combination.of(coefficients).whole is None) == (sum(coefficients) == 0)


def test_what_one_point_alone_is_multiplied_by_is_never_left_out():
    assert Combination.of([0.0]).whole == 0 and Combination.of([jnp.float32(1), jnp.float32(-1)]).whole == 0


def test_a_gradient_that_no_point_changes_has_no_difference():
    loss = lambda w, r: dense(w, None, r)[0]
    for engine in ENGINES:
        got = clipped_sum(
            loss, [jnp.ones((1, 3)), jnp.zeros((1, 3))], [1.0, -1.0], draw(0, N, 3), jnp.ones(N), 1.0, engine=engine
        )
        assert not np.any(got)


def test_plain_subtraction_would_fail_where_the_difference_does_not():
    """The reason for difference.py: the same comparison with grad(x) - grad(y) is off by far more than 1e-5."""
    loss, y, records = CASES["tanh"]
    x = apart(y, 1e-6)
    want, _ = reference(loss, [x, y], (1.0, -1.0), records, np.ones(N), np.inf)
    total = lambda p: jnp.sum(jax.vmap(partial(loss, p))(records))
    assert relative(jax.tree.map(jnp.subtract, jax.grad(total)(x), jax.grad(total)(y)), want) > 1e-3


@pytest.mark.parametrize(
    "function",
    [jnp.exp, jnp.log, jnp.sqrt, jnp.square, jnp.sin, jnp.cos, jnp.log1p, jnp.abs, jax.nn.gelu, jax.nn.silu, jnp.max,
     lambda x: x**3, lambda x: x**-2, lambda x: x**2.5, lambda x: jnp.sort(x)[1], jax.scipy.special.erf, jnp.arctan,
     lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "VALID"), lambda x: jnp.cumsum(x) / x,
     lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v), x), jnp.linalg.norm, lambda x: jnp.stack([x, x * x]),
     # loops: rows, results of every turn, backwards; what moves only after some turns, and a choice by what is counted
     lambda x: lax.scan(lambda h, v: (jnp.tanh(h + v) * v, h * v), 0.3, x, reverse=True)[1],
     lambda x: sum(lax.fori_loop(0, 3, lambda i, h: (h[1], h[2] * x[i], x[i + 1] ** 2), (1.0, 2.0, 3.0))),
     lambda x: lax.scan(lambda k, v: (k + (v > 1), v * x[k]), 0, x)[1],
     jax.grad(lambda x: lax.scan(lambda h, v: (jnp.tanh(h * v), None), 0.3, x)[0])],
)  # fmt: skip
def test_difference_of_any_function(function):
    y = jnp.array([0.7, 1.9, 0.31, 2.6])
    run, exact = jax.jit(partial(difference, function)), jax.jit(function)
    for distance in (1e-6, 1e-2, 0.5):
        x = y + distance * jnp.array([0.3, 1.0, -0.5, 0.2])
        with jax.enable_x64(True):
            want = np.asarray(exact(np.asarray(x, np.float64)) - exact(np.asarray(y, np.float64)))
        base, delta = run(x, y)
        np.testing.assert_allclose(base, exact(y), rtol=1e-6)
        # Functions without an identity of their own reach what tangents and subtraction can.
        np.testing.assert_allclose(delta, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["relu", pytest.param("max pool", marks=pytest.mark.slow), "embedding", "regularised"])
def test_padding_and_non_finite_records_contribute_nothing(engine, case):
    loss, params, (features, targets) = CASES[case]
    weights = jnp.ones(N).at[3].set(0).at[N - 1].set(0)
    clean = jitted(loss, [params], [1.0], (features, targets), weights.at[5].set(0), 0.7, engine=engine)
    if features.dtype == jnp.int32:
        dirty = features.at[3].set(10**6).at[N - 1].set(-7)
        weights = weights.at[5].set(0)
    else:
        dirty = features.at[3].set(jnp.nan).at[N - 1].set(jnp.inf).at[5].set(jnp.nan)
    for points, coefficients in (([params], [1.0]), ([params, apart(params, 1e-3)], [1.0, 0.0])):
        got = jitted(loss, points, coefficients, (dirty, targets), weights, 0.7, engine=engine, microbatch=8)
        assert np.isfinite(flat(got)).all()
        assert relative(got, clean) < 2e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_overflow_inside_the_loss_is_a_non_finite_record(engine):
    loss = lambda p, r: jnp.exp(dense(p, None, r)[0])
    records = jnp.array([[0.1], [1e3], [0.2]])
    got = jitted(loss, [jnp.ones((1, 1))], [1.0], records, jnp.ones(3), jnp.inf, engine=engine)
    np.testing.assert_allclose(got, 0.1 * np.exp(0.1) + 0.2 * np.exp(0.2), rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_clip_zero_infinite_and_zero_gradients(engine):
    loss, params, records = CASES["tanh"]
    run = partial(jitted, loss, [params], [1.0], records, jnp.ones(N), engine=engine)
    assert not flat(run(0.0)).any()
    want, _ = reference(loss, [params], [1.0], records, np.ones(N), np.inf)
    assert relative(run(jnp.inf), want) < 1e-5
    for clip in (0.0, 1.0, jnp.inf):
        same = jitted(loss, [params, params], [1.0, -1.0], records, jnp.ones(N), clip, engine=engine)
        assert not flat(same).any()


# Silos one after the other, two groups that overlap, all in one group.
@pytest.mark.parametrize(("engine", "microbatch"), [("general", 9), *(("structured", m) for m in (9, 2 * N, 3 * N))])
def test_vmap_over_silos_and_settings_inside_a_compiled_loop(engine, microbatch):
    loss, y, records = CASES["softplus"]
    x = apart(y, 0.1)
    silos = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1], jnp.roll(leaf, 3, 0)]), records)
    weights = jnp.abs(draw(3, 3, N))
    one = partial(clipped_sum, loss, engine=engine, microbatch=microbatch)

    @jax.jit
    def run(clips):
        def body(_, total):
            answer = lambda clip: jax.vmap(lambda r, w: one([x, y], [1.0, -1.0], r, w, clip))(silos, weights)
            return lax.cond(total["b2"].sum() >= -1e9, lambda: jax.vmap(answer)(clips), lambda: total)

        return lax.fori_loop(0, 1, body, jax.tree.map(lambda leaf: jnp.zeros((2, 3, *leaf.shape)), y))

    got = run(jnp.array([0.01, 0.2]))
    for i, clip in enumerate((0.01, 0.2)):
        for j in range(3):
            silo = jax.tree.map(lambda leaf, j=j: leaf[j], silos)
            want, _ = reference(loss, [x, y], [1.0, -1.0], silo, weights[j], clip)
            assert relative(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], got), want) < 1e-5


@pytest.mark.parametrize("case", ["relu", "regularised", "embedding"])
@pytest.mark.parametrize("microbatch", [9, 2 * N, 3 * N])
def test_stacked_silos_equal_silos_on_their_own_also_beside_non_finite_records(case, microbatch):
    loss, params, (features, targets) = CASES[case]
    silos = jnp.stack([features, features[::-1], jnp.roll(features, 3, 0)])
    if features.dtype != jnp.int32:
        silos = silos.at[1, 4].set(jnp.nan)
    weights = jnp.abs(draw(3, 3, N)).at[2, 7].set(0)
    one = jax.jit(lambda f, w: clipped_sum(loss, [params], [1.0], (f, targets), w, 0.7, microbatch=microbatch))
    got = jax.jit(jax.vmap(one))(silos, weights)
    for j in range(3):
        assert relative(jax.tree.map(lambda leaf, j=j: leaf[j], got), flat(one(silos[j], weights[j]))) < 2e-6


def clip_of_the_mean(loss, points, coefficients, records, weights, clip, **_):
    """The classical bug: n times the clipped mean moves by far more than one record may."""
    total = jitted(loss, points, coefficients, records, weights, jnp.inf)
    size = np.linalg.norm(flat(total)) / N
    return jax.tree.map(lambda leaf: leaf * min(1.0, clip / size), total)


def largest_move(primitive, case, seed, log_clip, scale, engine, two_points):
    """|change of the sum| / clip when one record is replaced by an outlier."""
    loss, params, (features, targets) = CASES[case]
    clip = float(10.0**log_clip)
    j = seed % N
    other = features.at[j].set(scale * draw(seed, *features.shape[1:]))
    points, coefficients = ([params, apart(params, 1e-2)], [1.0, -1.0]) if two_points else ([params], [1.0])
    run = lambda f: flat(primitive(loss, points, coefficients, (f, targets), jnp.ones(N), clip, engine=engine))
    return np.linalg.norm(run(other) - run(features)) / clip


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(["relu", "logistic", "regularised"]),
    seed=st.integers(0, 10_000),
    log_clip=st.floats(-4, 0),
    scale=st.floats(0.01, 1e4),
    engine=st.sampled_from(ENGINES),
    two_points=st.booleans(),
)
def test_one_record_moves_the_sum_by_at_most_twice_the_clip(case, seed, log_clip, scale, engine, two_points):
    assert largest_move(jitted, case, seed, log_clip, scale, engine, two_points) <= 2 * (1 + 1e-3)


def test_the_sensitivity_property_catches_a_clip_of_the_mean():
    assert largest_move(clip_of_the_mean, "relu", 4, -0.3, 1e3, "general", False) > 2 * (1 + 1e-3)


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(["relu", "regularised mlp", "logistic"]),
    seed=st.integers(0, 10_000),
    log_clip=st.floats(-6, 1),
    log_distance=st.floats(-7, 0),
    engine=st.sampled_from(ENGINES),
)
def test_one_clipped_contribution_is_at_most_the_clip(case, seed, log_clip, log_distance, engine):
    loss, params, records = CASES[case]
    one = jax.tree.map(lambda leaf: leaf[seed % N][None], records)
    points, clip = [apart(params, 10.0**log_distance), params], 10.0**log_clip
    got = jitted(loss, points, [1.0, -1.0], one, jnp.ones(1), clip, engine=engine)
    assert np.linalg.norm(flat(got)) <= clip * (1 + 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_penalty_is_part_of_what_is_clipped(engine):
    """However long the regulariser's gradient is, a record contributes its clip norm and no more."""
    params, records = LOGISTIC
    loss = Regularised(logistic_loss, lambda p: sum(jnp.sum(100.0 * leaf) for leaf in jax.tree.leaves(p)))
    for j in range(3):
        one = jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], records)
        got = clipped_sum(loss, [params], [1.0], one, jnp.ones(1), 0.5, engine=engine)
        assert np.linalg.norm(flat(got)) == pytest.approx(0.5, rel=1e-4)


def test_a_penalty_that_nearly_cancels_the_gradient_is_still_clipped():
    """|g|^2 + 2 g.r + |r|^2 in float32 may come out as 0 when g = -r up to rounding; the clip must hold anyway."""
    params, (features, targets) = LOGISTIC

    @jax.jit
    def contribution(record):
        gradient = jax.grad(logistic_loss)(params, record)
        opposite = lambda p: -(1 + 1e-4) * sum(jnp.vdot(g, p[k]) for k, g in gradient.items())
        one = jax.tree.map(lambda leaf: leaf[None], record)
        loss = Regularised(logistic_loss, opposite)
        return clipped_sum(loss, [params], [1.0], one, jnp.ones(1), 1e-7, engine="structured")

    for j in range(N):
        assert 0 < np.linalg.norm(flat(contribution((features[j], targets[j])))) <= 1e-7 * (1 + 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["tanh", "max pool", "embedding"])
def test_factors_sum_to_the_clipped_sum_and_can_be_replaced_one_by_one(engine, case):
    loss, params, records = CASES[case]
    weights = jnp.abs(draw(7, N)).at[2].set(0)
    other = apart(params, 0.5)
    keep = jax.jit(partial(record_factors, loss, engine=engine))
    table = keep(params, records, weights, 0.4)
    assert all(leaf.shape[0] == N for leaf in jax.tree.leaves(table))
    assert relative(sum_factors(params, table, weights), jitted(loss, [params], [1.0], records, weights, 0.4)) < 1e-5
    few = jax.tree.map(lambda leaf: leaf[4:9], records)
    fresh = keep(other, few, weights[4:9], 0.4)
    table = jax.tree.map(lambda old, new: old.at[4:9].set(new), table, fresh)
    seen = jnp.zeros(N).at[4:9].set(1.0)
    want = jitted(loss, [other], [1.0], records, weights * seen, 0.4)
    want = jax.tree.map(jnp.add, want, jitted(loss, [params], [1.0], records, weights * (1 - seen), 0.4))
    assert relative(sum_factors(params, table, weights), want) < 1e-5


def test_factors_of_a_regularised_loss_are_plain_gradients():
    loss, params, records = CASES["regularised"]
    table = record_factors(loss, params, records, jnp.ones(N), 0.4)
    assert (
        relative(sum_factors(params, table, jnp.ones(N)), jitted(loss, [params], [1.0], records, jnp.ones(N), 0.4))
        < 1e-5
    )
    with pytest.raises(ValueError, match="engine: structured"):
        record_factors(loss, params, records, jnp.ones(N), 0.4, engine="structured")


def test_per_record_vectors_add_up():
    loss, y, records = CASES["sigmoid"]
    x = apart(y, 1e-3)
    each = jax.jit(partial(per_record, loss))([x, y], [1.4, -0.4], records, 0.3)
    assert (
        relative(jax.tree.map(lambda g: g.sum(0), each), jitted(loss, [x, y], [1.4, -0.4], records, jnp.ones(N), 0.3))
        < 1e-5
    )
    norms = np.linalg.norm([flat(jax.tree.map(lambda g, j=j: g[j], each)) for j in range(N)], axis=1)
    assert norms.max() <= 0.3 * (1 + 1e-5)


def shared_weight(p, r):
    return jnp.sum(dense(p["w"], None, jnp.tanh(dense(p["w"], None, r))))


def weight_outside(p, r):
    return jnp.sum(dense(p["w"], None, r)) * jnp.sum(p["w"])


def jitted_inside(p, r):
    return jax.jit(lambda w, x: jnp.sum(jnp.tanh(dense(w, None, x))))(p["w"], r)


def looked_up_beyond(p, r):
    """A row that is not in the table is zero, and has no gradient."""
    rows = jnp.take(p["w"], jnp.int32(4 * r), axis=0, mode="fill", fill_value=0)
    return jnp.sum(jnp.tanh(rows.sum(axis=0)))


@pytest.mark.parametrize(
    ("loss", "engine", "reason"),
    [
        (shared_weight, "general", "['w'] is used by two layers"),
        (weight_outside, "general", "['w'] is used outside"),
        (lambda p, r: jnp.sum(jnp.tanh(p["w"] @ r)), "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(jnp.tanh(r @ p["w"])), "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(p["w"].T @ jnp.tanh(r)), "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(dense(2 * p["w"], None, r)), "general", "['w'] is used outside"),
        (lambda p, r: jnp.sum(jax.vmap(lambda x: dense(p["w"], None, x))(jnp.stack([r, r]))), "general", "stack"),
        (jitted_inside, "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(jnp.tanh(p["w"][jnp.int32(2 * r)]).sum(axis=0) ** 3), "structured", "network of 1 layer"),
        (looked_up_beyond, "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(jnp.tanh(p["w"][jnp.int32(2 * r[0])])), "structured", "network of 1 layer"),
        (lambda p, r: jnp.sum(jnp.tanh(p["w"].T[jnp.int32(r)])), "general", "['w'] is turned before it is used"),
        (
            lambda p, r: jnp.sum(dense(jnp.ones((2, 3)), None, jnp.tanh(dense(p["w"], None, r)))),
            "structured",
            "1 layer",
        ),
    ],
)
def test_engine_is_chosen_with_a_reason_and_agrees_with_the_general_one(loss, engine, reason):
    params, records = {"w": draw(0, 3, 3)}, draw(1, 5, 3)
    chosen, why = engine_for(loss, params, records[0])
    assert chosen == engine
    assert reason in why
    want, _ = reference(loss, [params], [1.0], records, np.ones(5), 1.0)
    assert relative(clipped_sum(loss, [params], [1.0], records, jnp.ones(5), 1.0), want) < 1e-5
    if engine == "general":
        with pytest.raises(ValueError, match="engine: structured cannot take this loss"):
            clipped_sum(loss, [params], [1.0], records, jnp.ones(5), 1.0, engine="structured")


# --- parameters that no layer has to itself -------------------------------------------------------------------------


def normalised(x, scale, shift):
    centred = x - x.mean()
    return scale * centred * jax.lax.rsqrt(jnp.mean(centred**2) + 1e-5) + shift


def norm_loss(p, record):
    """Layers with a norm between them, whose scale and shift are used twice."""
    h = jnp.tanh(normalised(dense(p["w1"], p["b1"], record[0]), p["scale"], p["shift"]))
    z = dense(p["w2"], p["b2"], normalised(h, p["scale"], p["shift"]))
    return jax.nn.logsumexp(z) - z[record[1]]


def hand_loss(p, record):
    """As one writes it with JAX alone: weights on either side, biases added, a residual, a tied pair, a gain."""
    h = jnp.tanh(record[0] @ p["w1"] + p["b1"])
    h = h + jnp.tanh(p["tied"].T @ (p["tied"] @ h))
    z = p["w2"].T @ h * p["gain"]
    return jax.nn.logsumexp(z) - z[record[1]]


MIXED = {
    "norm": (norm_loss, {"w1": (7, 6), "b1": (7,), "scale": (7,), "shift": (7,), "w2": (4, 7), "b2": (4,)},
             {"scale": "used outside", "shift": "used outside"}),
    "by hand": (hand_loss, {"w1": (6, 9), "b1": (9,), "tied": (3, 9), "w2": (9, 4), "gain": (1,)},
                {"b1": "used outside", "tied": "used by two layers", "gain": "used outside"}),
}  # fmt: skip


def mixed(name):
    loss, shapes, kept = MIXED[name]
    params = {leaf: draw(i, *shape) / 2 for i, (leaf, shape) in enumerate(shapes.items())}
    return loss, params, (draw(5, N, 6), labels(4)), kept


@pytest.mark.parametrize("name", MIXED)
def test_each_parameter_is_told_what_is_done_with_it(name):
    loss, params, records, kept = mixed(name)
    told = gradients.leaf_methods(loss, params, jax.tree.map(lambda leaf: leaf[0], records))
    assert told.keys() == {f"['{leaf}']" for leaf in params}
    for leaf in params:
        method = told[f"['{leaf}']"]
        assert method.startswith("per-record gradient") if leaf in kept else method == "factors of a dense layer"
        assert kept.get(leaf, "") in method
    assert "per-record gradients where" in engine_for(loss, params, jax.tree.map(lambda leaf: leaf[0], records))[1]


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("points", ["value", "difference", "penalty"])
def test_parameters_of_no_layer_are_clipped_with_the_others(name, points):
    """A norm that left them out, or a sum that took them unclipped, would differ by more than a tenth."""
    loss, params, records, _ = mixed(name)
    loss = Regularised(loss, bounded) if points == "penalty" else loss
    at = ([apart(params, 1e-3), params], [1.0, -1.0]) if points == "difference" else ([params], [1.0])
    weights = jnp.arange(N) % 3 * 1.0
    want, clip = reference(loss, *at, records, weights)
    assert relative(jitted(loss, *at, records, weights, clip, engine="structured", microbatch=9), want) < 1e-5


def test_mostly_kept_parameters_are_left_to_the_general_engine():
    """In one piece, records first, per-record gradients are computed quicker than between factors."""
    loss = lambda p, r: jnp.sum(p["out"] @ jnp.tanh(r.reshape(2, 3) @ p["w"]).sum(axis=0))
    small, large = {"w": draw(0, 3, 9), "out": draw(1, 2, 9)}, {"w": draw(0, 3, 9), "out": draw(1, 4, 9)}
    assert engine_for(loss, small, draw(2, 6)) == ("general", "['w'] is applied to a stack of inputs, not to one")
    assert engine_for(loss, large, draw(2, 6))[0] == "structured"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("engine", {"engine": "fast"}),
        ("coefficients", {"coefficients": [1.0, 2.0]}),
        ("microbatch", {"microbatch": 0}),
        ("weights", {"weights": jnp.ones((N, 1))}),
    ],
)
def test_bad_input_is_named(field, bad):
    loss, params, records = CASES["tanh"]
    options = {"points": [params], "coefficients": [1.0], "records": records, "weights": jnp.ones(N), "clip": 1.0}
    with pytest.raises(ValueError, match=f"^{field}:"):
        clipped_sum(loss, **{**options, **bad})


@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, -1.0)])
def test_memory_does_not_grow_with_records_times_parameters(coefficients):
    n = 4000
    params = {"w1": jnp.zeros((64, 100)), "b1": jnp.zeros(64), "w2": jnp.zeros((4, 64)), "b2": jnp.zeros(4)}
    records = (jax.ShapeDtypeStruct((n, 100), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32))
    loss = partial(mlp_loss, jnp.tanh)
    points = [params] * len(coefficients)

    def temporary(engine, microbatch=None):
        run = partial(clipped_sum, loss, coefficients=coefficients, clip=1.0, engine=engine, microbatch=microbatch)
        lowered = jax.jit(lambda p, r, w: run(points=p, records=r, weights=w)).lower(points, records, jnp.ones(n))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    gradients = 4 * n * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert temporary("structured") < gradients / 10
    assert temporary("general") < gradients / 1.5
    assert temporary("general", microbatch=n) > gradients / 1.5  # the check can fail


def test_softplus_and_its_changes_hold_everywhere():
    """Near and far points, on one side of zero and across it, against float64."""
    v = np.concatenate([np.linspace(-120, 120, 97), np.linspace(-1, 1, 41), [0.0, 1e-7, -1e-7, 3e-4, -3e-4]])
    d = np.concatenate([s * 10.0 ** np.arange(-9, 2.3, 0.25) for s in (1, -1)] + [[0.0]])
    v, d = (np.float32(m).reshape(-1) for m in np.meshgrid(v, d))
    at = lambda z: np.logaddexp(0, np.float64(z))
    slope_at = lambda z: 1 / (1 + np.exp(-np.float64(z)))
    u = np.float64(v) + np.float64(d)
    # softplus(u) - softplus(v) and the slopes' difference, by mpmath-free forms that do not cancel in float64
    wanted = np.where(np.abs(d) < 1e-3, d * slope_at(v + np.float64(d) / 2), at(u) - at(v))
    np.testing.assert_allclose(softplus(jnp.asarray(v)), at(v), rtol=3e-6, atol=1e-38)
    np.testing.assert_allclose(slope(jnp.asarray(v)), slope_at(v), rtol=3e-6, atol=1e-38)
    np.testing.assert_allclose(softplus_change(v, d, None), wanted, rtol=1e-5, atol=1e-37)
    slopes = np.tanh(np.float64(d) / 2) * (slope_at(v) * slope_at(-u) + slope_at(u) * slope_at(-v))
    np.testing.assert_allclose(slope_change(v, d, None), slopes, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(jax.vmap(jax.grad(softplus))(v), slope_at(v), rtol=3e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("size", "cotangent", "clip"), [(1e18, 1e-19, 1e-4), (1e-19, 1e18, 1e-4), (1e15, 1e-25, 1e-12)]
)
def test_a_record_whose_factors_underflow_apart_is_clipped_all_the_same(size, cotangent, clip):
    """|a|^2 or |delta|^2 alone may be lost in float32 while the gradient a delta^T is not."""
    loss = lambda params, record: jnp.sum(dense(params["w"], None, record[0])) * record[1]
    params = {"w": jnp.zeros((1, 1))}
    record = (jnp.full((1, 1), size), jnp.full(1, cotangent))
    total = clipped_sum(loss, [params], [1.0], record, jnp.ones(1), clip, engine="structured")["w"]
    assert float(jnp.abs(total).max()) <= clip * 1.001


@pytest.mark.parametrize("rows", [3, 40, 1 << 28])
@pytest.mark.parametrize("positions", [12, COMPARED + 1])
def test_repeated_lookups_are_added_where_a_record_has_the_first(positions, rows):
    """Compared or sorted, also where row and position do not fit one number."""
    rng = np.random.default_rng(0)
    index, cotangents = rng.integers(0, rows, (9, positions)), rng.normal(size=(9, positions, 2)).astype(np.float32)
    index[:, 7] = index[:, 2]
    want = np.zeros_like(cotangents)
    for record, row in np.ndindex(index.shape):
        want[record, list(index[record]).index(index[record, row])] += cotangents[record, row]
    found = added_by_row(jnp.asarray(index, jnp.int32), jnp.asarray(cotangents), rows)
    np.testing.assert_array_equal(found, want)


def test_nearly_opposite_lookups_of_one_row_are_clipped_by_their_sum():
    """The norm of a sum of large cotangents that cancel must not be lost in their products."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        v = np.float32(rng.normal(size=4) * 1e6)
        w = -v + np.float32(rng.normal(size=4))
        loss = lambda table, record, v=v, w=w: jnp.sum(embed(table, record) * jnp.stack([v, w]))
        table = jnp.zeros((3, 4))
        total = clipped_sum(loss, [table], [1.0], jnp.array([[1, 1]]), jnp.ones(1), 1.0, engine="structured")
        assert float(jnp.linalg.norm(total)) <= 1.1


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_may_close_over_what_is_stacked(count):
    """Settings that differ in a number inside the loss, over silos that share the products of a block."""
    points = [{"w": draw(seed, 1, 3), "b": draw(seed, 1)} for seed in (30, 31)][:count]
    records, weights = draw(32, 2, N, 3), jnp.ones((2, N))

    def summed(engine, scale, own, counted):
        loss = lambda p, r: scale * jnp.tanh(dense(p["w"], p["b"], r)[0]) ** 2
        return clipped_sum(loss, points, [1.0, -1.0][:count], own, counted, 0.2, engine=engine)

    def every(engine):
        silos = lambda scale: jax.vmap(partial(summed, engine, scale))(records, weights)
        return jax.vmap(silos)(jnp.array([0.5, 1.0, 2.0]))

    np.testing.assert_allclose(flat(every("structured")), flat(every("general")), rtol=1e-5, atol=1e-6)


def test_a_norm_covers_its_terms_where_they_are_parallel_and_their_difference_is_rounding():
    """A layer without bias whose inputs at two points are parallel: what is left of the second is rounding, not
    orthogonal to the first, and may weigh as much when the cotangents along the first cancel."""
    rng = np.random.default_rng(0)
    records = 20_000
    for width in (1, 3):
        first = rng.normal(size=(width, records)).astype(np.float32)
        second = (rng.uniform(0.5, 2, records).astype(np.float32) * first).astype(np.float32)
        share = (first * second).sum(0, dtype=np.float32) / (first * first).sum(0, dtype=np.float32)
        cotangents = np.float32(1e7) * rng.normal(size=(1, records)).astype(np.float32)
        cancelling = -share * cotangents + rng.normal(size=(1, records)).astype(np.float32)
        terms = (Term(first, np.zeros(records), cancelling), Term(second, np.zeros(records), cotangents))
        factors = DenseFactors(tuple(Term(*map(jnp.asarray, t)) for t in terms), False, False).orthogonal()
        exactly = lambda leaf: np.asarray(leaf, np.float64)
        parts = [exactly(t.cotangents)[:, None] * exactly(t.inputs) for t in factors.terms]
        true = np.sqrt((sum(parts) ** 2).sum((0, 1)))
        assert (np.sqrt(exactly(factors.square_norms())) >= true * (1 - 1e-5)).all()
