"""Weights of records and classes: they count after the clip, never above 1, and do what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.errors import ConfigError
from silodp.gradients.blocks import SLACK
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.records import target_of, with_weight
from silodp.weights import bounded, weighted
from tests.patients import SCHEMA, fitted, raw

N, D, CLIP = 300, 4, 0.3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
POINT = jnp.asarray(np.random.default_rng(1).normal(size=D + 1), jnp.float32)


def objective(class_weights=None, *, own=True, engine="auto"):
    model = weighted(build_model("logistic", inputs=D), class_weights, own)
    target = jnp.int32(0)
    record = jnp.zeros(D), with_weight(target, jnp.float32(1)) if own else target
    return build_objective(model, record, engine)


def summed(of, records):
    ones = jnp.ones(len(records[0]))
    total = jax.jit(lambda r: of.clipped_sum([POINT], [1.0], r, ones, CLIP))(records)
    return np.asarray(total.high, np.float64) + np.asarray(total.low, np.float64)


@pytest.mark.parametrize("engine", ["structured", "general"])
def test_a_weight_counts_after_the_clip(engine):
    weights = np.linspace(0, 1, N).astype(np.float32)
    plain = objective(own=False, engine=engine)
    rows = np.asarray(plain.per_record([POINT], [1.0], (jnp.asarray(X), jnp.asarray(Y)), CLIP))
    assert (
        np.linalg.norm(rows, axis=1) > 0.999 * CLIP
    ).mean() > 0.5  # most are clipped: before it nothing would change
    table = np.array([1.0, 0.25])[Y]
    records = (X, with_weight(Y, weights))
    want = (weights * table) @ rows
    np.testing.assert_allclose(summed(objective([4.0, 1.0], engine=engine), records), want, atol=1e-4)
    each = objective([4.0, 1.0], engine=engine).per_record([POINT], [1.0], records, CLIP)
    np.testing.assert_allclose(each, (weights * table)[:, None] * rows, atol=1e-6)


@pytest.mark.parametrize("engine", ["structured", "general"])
@pytest.mark.parametrize("weight", [1.0, 1e30, np.inf, -5.0, np.nan])
def test_no_weight_moves_a_sum_beyond_its_bound(engine, weight):
    of = objective([4.0, 1.0], engine=engine)

    def with_first(features, target, weight):
        x, y, w = X * 100, Y.copy(), np.full(N, 0.7, np.float32)
        x[0], y[0], w[0] = features, target, weight
        return x, with_weight(y, w)

    ahead = np.asarray(POINT[1:])  # behind the bias; both records are wrong, in opposite directions
    across = np.array([ahead[1], -ahead[0], ahead[3], -ahead[2]]) * 1e5
    far, other = across + 100 * ahead, 100 * ahead - across
    moved = summed(of, with_first(far, 0, weight)) - summed(of, with_first(other, 0, weight))
    assert np.linalg.norm(moved) <= 2 * CLIP * (1 + SLACK)
    if weight >= 1:
        assert np.linalg.norm(moved) > 1.9 * CLIP  # the test would see more
    rows = of.per_record([POINT], [1.0], with_first(far, 0, weight), CLIP)
    assert np.linalg.norm(rows, axis=1).max() <= CLIP


def test_weights_are_bounded_whatever_they_are():
    given = jnp.asarray([-1.0, 0.0, 0.5, 1.0, 7.0, jnp.inf, -jnp.inf, jnp.nan])
    assert bounded(given).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert target_of({"target": 3, "other": 1}) == {"target": 3, "other": 1}  # a user's own dict stays


def test_a_table_of_gradients_takes_no_weights():
    with pytest.raises(ConfigError, match="table of gradients"):
        objective().record_factors(POINT, (X, with_weight(Y, Y * 1.0)), jnp.ones(N), CLIP)


def test_the_objective_that_is_reported_is_the_weighted_one():
    of = objective()
    plain = objective(own=False).losses(POINT, (X, Y))
    weights = np.linspace(0, 1, N).astype(np.float32)
    np.testing.assert_allclose(of.losses(POINT, (X, with_weight(Y, weights))), weights * plain, rtol=1e-5)


# --- estimators ------------------------------------------------------------------------------------------------


def test_a_class_that_counts_less_is_predicted_less(tmp_path):
    frame = raw(seed=1)
    clf = silodp.SiloClassifier(epsilon=3.0, random_state=0, class_weight={"ill": 1, "well": 0.1})
    clf.fit(raw(), "outcome", silo="hospital", schema=SCHEMA)
    shares = [np.mean(each.predict(frame) == "ill") for each in (fitted(), clf)]
    assert shares[1] > shares[0] + 0.15
    assert clf.certificate_["silos"][0]["epsilon"] == pytest.approx(3.0, rel=1e-6)
    again = silodp.load(clf.save(tmp_path / "model"))
    assert again.get_params()["class_weight"] == {"ill": 1, "well": 0.1}
    np.testing.assert_array_equal(again.predict_proba(frame), clf.predict_proba(frame))


def test_records_of_weight_nothing_teach_nothing():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 2))
    wrong = rng.random(800) < 0.45
    y = (x[:, 0] > 0) ^ wrong
    options = {"epsilon": 3.0, "trust": "trusted", "random_state": 0}
    weighed = silodp.SiloClassifier(**options, largest_weight=5.0).fit(x, y, sample_weight=np.where(wrong, 0, 5))
    assert weighed.score(x, x[:, 0] > 0) > 0.9
    model = silodp.SiloRegressor(**options, target_range=(-3, 3))
    target = np.where(wrong, -x[:, 0], x[:, 0])
    assert model.fit(x, target, sample_weight=np.where(wrong, 0.0, 1.0)).score(x, x[:, 0]) > 0.9


MISTAKES = {
    "class_weight: give {label: weight}": ({"class_weight": "balanced"}, None),
    "class_weight: 1 of its labels": ({"class_weight": {"dead": 2.0}}, None),
    "class_weight: give positive": ({"class_weight": {"ill": 0.0}}, None),
    "sample_weight: some are negative": ({}, -np.ones(600)),
    "sample_weight: must contain at least one non-zero": ({}, np.zeros(600)),
    "sample_weight: shape (3,)": ({}, np.ones(3)),
    "largest_weight: give a positive": ({"largest_weight": 0}, np.ones(600)),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_mistakes_are_one_line(told):
    options, weights = MISTAKES[told]
    with pytest.raises(ConfigError) as found:
        frame = raw()
        silodp.SiloClassifier(**options).fit(
            frame, "outcome", silo="hospital", schema=SCHEMA, sample_weight=None if weights is None else weights
        )
    assert str(found.value).startswith(told) and "\n" not in str(found.value)


def test_class_weights_of_a_config_are_checked():
    data = silodp.FederatedData.of({"a": (X, Y), "b": (X, Y)}, classes=("no", "yes"))
    config = {"algorithm": {"name": "auto"}, "model": {"kind": "logistic", "class_weights": [1.0, 2.0, 3.0]}}
    with pytest.raises(ConfigError, match="class_weights: 3 are given, the data has 2 classes"):
        silodp.train(config | {"privacy": {"epsilon": 1.0}}, data=data)
