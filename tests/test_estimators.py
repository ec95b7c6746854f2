"""The estimators: raw rows in, predictions out, scikit-learn's contract, warnings, and mistakes in one line."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import get_scorer
from sklearn.model_selection import StratifiedKFold, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import silodp
from silodp.data import FederatedData
from silodp.data.numbers import bends
from silodp.errors import ConfigError
from silodp.front import records
from silodp.front.asked import config_of, seed_of
from silodp.front.predictor import Linear, margins, probabilities, product
from tests.patients import SCHEMA, SIZES, fitted, raw

FRESH = raw(seed=1)


def changed(**changes: Any) -> dict[str, Any]:
    tree = copy.deepcopy(SCHEMA)
    for name, column in changes.items():
        tree["columns"][name] = column
    return tree


def many(rows: int = 6000) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"income": np.exp(rng.normal(10, 0.5, rows)), "age": rng.integers(20, 90, rows)})
    noisy = 0.05 * (frame["age"] - 55) + 2 * (np.log(frame["income"]) - 10) + rng.normal(0, 0.5, rows)
    return frame.assign(outcome=np.where(noisy > 0, "ill", "well"), hospital=rng.choice(["north", "south"], rows))


PRIVATE_RANGE = {
    "target": {"name": "outcome", "classes": ["well", "ill"]},
    "columns": {"income": {"kind": "number", "range": "private"}, "age": {"kind": "number", "range": [0, 120]}},
}


def test_a_range_is_found_privately_and_a_tenth_is_held_out_for_a_private_look(tmp_path):
    rows = many()
    clf = silodp.SiloClassifier(epsilon=3.0, random_state=0)
    clf.fit(rows, "outcome", silo="hospital", schema=PRIVATE_RANGE)
    income = clf.schema_.to_dict()["columns"]["income"]
    assert set(income) == {"kind", "centre", "scale"} and 1e4 < income["centre"] < 4e4 and 4e3 < income["scale"] < 3e4
    streams = [line["stream"] for line in clf.certificate_["silos"][0]["releases"]]
    assert streams == ["magnitude", "middle", "spread", "centre", "moment", "value", "metric"]
    assert max(silo["epsilon"] for silo in clf.certificate_["silos"]) == pytest.approx(3.0, rel=1e-6)
    told = clf.held_out_["accuracy"]
    assert abs(told["value"] - clf.score(rows, "outcome")) < 4 * told["error"] < 0.1
    assert "Measured on 600 records that were held out, with noise of their own" in clf.report_
    same = silodp.load(clf.save(tmp_path / "model"))
    np.testing.assert_array_equal(same.predict_proba(rows), clf.predict_proba(rows))


def test_few_records_are_all_trained_on_unless_a_look_is_asked_for():
    assert fitted().held_out_ is None and "No accuracy is reported" in fitted().report_
    clf = silodp.SiloClassifier(epsilon=3.0, random_state=0, held_out=0.25)
    clf.fit(raw(seed=0), "outcome", silo="hospital", schema=SCHEMA)
    assert clf.held_out_["records"] == sum(round(0.25 * n) for n in SIZES.values())


# --- the five lines ------------------------------------------------------------------------------------------


def test_epsilon_in_model_out():
    clf = fitted()
    majority = (FRESH["outcome"] == "ill").mean()
    assert 0.4 < majority < 0.6 and clf.score(FRESH, "outcome") > 0.8
    assert clf.classes_.tolist() == ["ill", "well"] and set(clf.predict(FRESH)) == {"ill", "well"}
    assert clf.n_features_in_ == 5 and clf.feature_names_in_.tolist() == ["age", "sex", "creatinine", "pain", "smoker"]
    assert [silo["silo"] for silo in clf.certificate_["silos"]] == ["lake", "north", "south"]
    assert max(silo["epsilon"] for silo in clf.certificate_["silos"]) == pytest.approx(3.0, rel=1e-6)
    assert {line["stream"] for line in clf.certificate_["silos"][0]["releases"]} == {"centre", "moment", "value"}
    assert clf.history_[-1]["round"] == 20 and clf.history_[-1]["objective"] < clf.history_[0]["objective"]


def test_a_fit_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silodp.SiloClassifier(epsilon=3.0, random_state=0).fit(raw(), "outcome", silo="hospital", schema=SCHEMA)
    assert list(tmp_path.iterdir()) == []


def test_the_report_says_what_is_promised_and_what_is_not():
    text = fitted().report_
    assert text.splitlines()[2].startswith("This was a simulation on one machine.")
    assert "delta 1e-05, chosen as min(1e-5, 1/(10 n))" in text
    for name, size in SIZES.items():
        assert any(line.split()[:3] == [name, str(size), "3"] for line in text.splitlines())
    assert "1 x moment, 20 x value" in text and "the history (objective, gradient norm)" in text
    assert "a 1 % suspicion" not in text and "at most 16.9 % sure" in text  # e^3 / 99 / (1 + e^3 / 99)
    assert "accuracy is reported" in text


def test_probabilities_and_scores_are_those_of_the_classes():
    clf = fitted()
    probability, margin = clf.predict_proba(FRESH), clf.decision_function(FRESH)
    assert probability.shape == (600, 2) and margin.shape == (600,)
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    np.testing.assert_array_equal(clf.predict(FRESH) == "well", margin > 0)
    np.testing.assert_allclose(probability[:, 1], 1 / (1 + np.exp(-margin)))
    truth = FRESH["outcome"].str.lower().to_numpy()
    assert get_scorer("roc_auc")(clf, FRESH, truth) > 0.85  # wrong order of classes: below 0.15
    assert get_scorer("neg_log_loss")(clf, FRESH, truth) > -0.6


def test_a_row_has_the_same_score_in_every_batch():
    clf, rows = fitted(), FRESH.sample(40, random_state=0)
    alone = np.concatenate([clf.decision_function(rows.iloc[[i]]) for i in range(40)])
    whole = clf.decision_function(FRESH)[rows.index]
    np.testing.assert_array_equal(alone, whole)


def test_order_of_columns_unknown_categories_and_missing_cells_do_not_matter():
    clf = fitted()
    rows = FRESH.head(30).drop(columns=["outcome", "hospital", "patient_id"])
    expected = clf.predict_proba(rows)
    np.testing.assert_array_equal(clf.predict_proba(rows[rows.columns[::-1]].assign(more="x")), expected)
    np.testing.assert_array_equal(
        clf.predict_proba(rows.assign(sex="martian")), clf.predict_proba(rows.assign(sex=np.nan))
    )
    known, missing = rows.assign(age="60", creatinine="1"), rows.assign(age=None, creatinine="NA")
    assert not np.array_equal(clf.predict_proba(known), clf.predict_proba(missing))  # there is an indicator
    assert np.isfinite(clf.predict_proba(missing)).all()


def test_the_seed_decides_and_a_fresh_one_is_drawn():
    again = silodp.SiloClassifier(epsilon=3.0, random_state=0)
    again.fit(raw().drop(columns="outcome"), raw()["outcome"], silo="hospital", schema=SCHEMA)
    np.testing.assert_array_equal(again.predict_proba(FRESH), fitted().predict_proba(FRESH))
    labels = raw()["hospital"]
    fresh = silodp.SiloClassifier(epsilon=3.0)
    fresh.fit(raw().drop(columns="hospital"), silo=labels, schema=silodp.Schema.read(SCHEMA))
    assert not np.array_equal(fresh.predict_proba(FRESH), fitted().predict_proba(FRESH))
    assert seed_of(7) == seed_of(np.int64(7)) == 7 and seed_of(None) != seed_of(None)
    assert seed_of(np.random.RandomState(0)) == seed_of(np.random.RandomState(0))


# --- arrays --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
X = RNG.normal(size=(600, 3))
THREE = np.array(["c", "a", "b"])[(X @ np.array([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]])).argmax(axis=1)]
SILO = np.repeat([0, 1], 300)


def test_labels_come_back_as_given_and_there_may_be_more_than_two():
    clf = silodp.SiloClassifier(epsilon=8.0, random_state=0).fit(X, THREE, silo=SILO)
    assert clf.classes_.tolist() == ["a", "b", "c"] and clf.score(X, THREE) > 0.8
    assert clf.decision_function(X).shape == clf.predict_proba(X).shape == (600, 3)
    np.testing.assert_array_equal(clf.predict(X), clf.classes_[clf.predict_proba(X).argmax(axis=1)])
    same = clf.to_sklearn()
    np.testing.assert_array_equal(same.predict(X), clf.predict(X))
    np.testing.assert_allclose(same.predict_proba(X), clf.predict_proba(X), rtol=1e-12)
    assert list(clf.raw_coefficients().columns) == ["a", "b", "c"]
    assert "features are used as given" in clf.report_ and "3 labels" in str(clf.certificate_["public_preprocessing"])


def test_without_epsilon_nothing_is_promised():
    y = X[:, 0] > 0
    clf = silodp.SiloClassifier(epsilon=None).fit(
        pd.DataFrame(X, columns=list("abc")).assign(y=y, s=SILO), "y", silo="s"
    )
    assert clf.certificate_ is None and "not private" in clf.report_
    assert clf.classes_.dtype == bool and clf.score(pd.DataFrame(X, columns=list("abc")).assign(y=y), "y") > 0.97
    assert clf.encoded_feature_names_ == ("a", "b", "c")


def regression(**changes: Any) -> silodp.SiloRegressor:
    return silodp.SiloRegressor(**({"epsilon": 5.0, "trust": "trusted", "random_state": 0} | changes))


def test_numbers_come_back_in_their_own_unit():
    y = 50 + 8 * X[:, 0] + RNG.normal(size=600)
    model = regression(target_range=(0, 100)).fit(X, y)
    assert model.score(X, y) > 0.9 and abs(model.predict(X).mean() - 50) < 2
    with pytest.raises(ConfigError, match="y: holds text where numbers are needed; give numbers"):
        model.score(X, ["text"] * 600)
    same = model.to_sklearn()
    np.testing.assert_allclose(same.predict(X), model.predict(X), rtol=1e-12)
    table = model.raw_coefficients()["coefficient"]
    assert table["x0"] == pytest.approx(8, abs=1.5) and table["intercept"] == pytest.approx(50, abs=2)
    frame = pd.DataFrame(X, columns=["p", "q", "r"]).assign(stay=y)
    column = {"kind": "number", "centre": 0.0, "scale": 1.0}
    schema = {"target": {"name": "stay", "range": [0, 100]}, "columns": dict.fromkeys("pqr", column)}
    described = regression().fit(frame, schema=schema)
    assert described.score(frame) > 0.9 and described.predict(frame)[:3].shape == (3,)


# --- coefficients --------------------------------------------------------------------------------------------


def test_scikit_learn_predicts_the_same_from_encoded_columns():
    clf = fitted()
    features = clf.schema_.features(FRESH)
    same = clf.to_sklearn()
    assert same.coef_.shape == (1, len(clf.encoded_feature_names_))
    np.testing.assert_array_equal(same.predict(features), clf.predict(FRESH))
    np.testing.assert_allclose(same.predict_proba(features), clf.predict_proba(FRESH), rtol=1e-9)


def test_coefficients_on_raw_columns_give_the_same_scores():
    clf = fitted()
    rows = FRESH[(FRESH["age"] != "") & (FRESH["creatinine"] != "")]
    table = clf.raw_coefficients()["well"]
    features = pd.DataFrame(clf.schema_.features(rows), columns=list(clf.encoded_feature_names_))
    for name in ("age", "creatinine"):
        features[name] = rows[name].astype(float).to_numpy()
    inside = (features["creatinine"] - 1).abs() < 2
    scores = features[inside] @ table.drop("intercept") + table["intercept"]
    np.testing.assert_allclose(scores, clf.decision_function(rows)[inside], rtol=1e-4, atol=1e-5)


def test_a_fit_that_fails_leaves_nothing_to_predict_with():
    clf = copy.copy(fitted())
    with pytest.raises(ConfigError, match="'bmi'"):
        clf.fit(raw().assign(bmi=1), silo="hospital", schema=SCHEMA)
    with pytest.raises(NotFittedError):
        clf.predict(FRESH)
    assert fitted().predict(FRESH).shape == (600,)


def test_a_product_is_the_product():
    left, right = RNG.normal(size=(7, 5)), RNG.normal(size=(5, 2))
    np.testing.assert_allclose(product(left, right), left @ right, rtol=1e-13)
    whitened = Linear.of({"params/dense1/weight": right.T[:, :4], "whitening": left[:4]})
    x = RNG.normal(size=(3, 4))
    np.testing.assert_allclose(whitened.scores(x), (x @ left[:4, :-1].T + left[:4, -1]) @ right[:4], rtol=1e-12)
    two = RNG.normal(size=(6, 2))
    np.testing.assert_allclose(probabilities(margins(two)), np.exp(two) / np.exp(two).sum(1, keepdims=True))


# --- what may be chosen --------------------------------------------------------------------------------------


def asked(**options: Any) -> silodp.Config:
    estimator = silodp.SiloClassifier(**options)
    estimator.schema_ = silodp.Schema.read(SCHEMA)
    features = np.resize(X, (600, len(estimator.schema_.feature_names))).astype(np.float32)
    data = FederatedData.of({"a": (features, THREE == "a")}, classes=["x", "y"])
    return config_of(estimator, data, 1e-6)[0]


def test_every_choice_reaches_the_config():
    plain = asked(random_state=5)
    assert (plain.algorithm.name, plain.model.kind, plain.algorithm.weights) == ("auto", "logistic", None)
    assert (plain.privacy.epsilon, plain.privacy.delta, plain.run.seed) == (1.0, 1e-6, 5)
    assert plain.whiten is not None and isinstance(plain.whiten.scale, list)
    assert plain.whiten.scale[0] == pytest.approx((1 / 9 + 1 + 1 + 1 / 3 + 0.5) ** -0.5)
    spider = silodp.algorithms.Spider(rounds=4, restart=2, step_size=0.3, clip=1.0, clip_difference=0.5)
    other = asked(algorithm=spider, model={"kind": "mlp", "hidden": [4]}, trust="trusted", weights="equal")
    assert (other.algorithm.name, other.algorithm.restart, other.algorithm.weights) == ("spider", 2, "equal")
    assert (other.model.hidden, other.privacy.trust, other.whiten) == ([4], "trusted", None)
    assert asked(algorithm={"name": "auto", "rounds": 5, "weights": "equal"}).algorithm.weights == "equal"


@pytest.mark.parametrize("trust", ["untrusted", "aggregated"])
def test_by_default_a_tenth_is_held_out_where_that_is_enough_for_a_look_that_says_something(trust):
    assert asked(epsilon=50.0, trust=trust).evaluate is not None


DPGD = silodp.algorithms.DPGD(rounds=5, step_size=1.0, clip=1.0)


def test_numbers_become_broken_lines_where_that_pays_and_nothing_else_is_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.uniform(0, 10, 4000), "site": np.repeat(["a", "b"], 2000)})
    table["y"] = np.abs(table["x"] - 5) + rng.normal(0, 0.1, 4000)
    number = {"kind": "number", "range": [0, 10]}
    schema = {"target": {"name": "y", "range": [0, 6]}, "columns": {"x": number}}
    fit = lambda epsilon, **more: silodp.SiloRegressor(epsilon=epsilon, random_state=0, **more).fit(
        table, silo="site", schema=schema
    )
    broken = fit(3.0)
    assert broken.score(table) > 0.9 and len(broken.encoded_feature_names_) == 8
    assert "a broken line of 7 knots" in broken.report_
    again = silodp.load(broken.save(tmp_path / "model"))
    assert (again.predict(table) == broken.predict(table)).all()
    assert fit(3.0, model="linear").score(table) < 0.1  # who names a model gets that model
    plain = fit(0.01)
    assert plain.encoded_feature_names_ == ("x",) and "broken" not in plain.report_  # too little is told for more
    schema["columns"]["x"] = number | {"pieces": 0}
    assert fit(3.0).encoded_feature_names_ == ("x",)


def test_a_model_of_ones_own_trains_and_predicts(tmp_path):
    scores = lambda params, features: features @ params
    own = silodp.from_loss(
        lambda params, record: jnp.log1p(jnp.exp((1 - 2 * record[1]) * scores(params, record[0]))),
        lambda key: jnp.zeros(3), scores=scores, metric="accuracy", name="mine",
    )  # fmt: skip
    clf = silodp.SiloClassifier(epsilon=5.0, algorithm=DPGD, model=own, random_state=0).fit(X, X[:, 0] > 0)
    assert clf.score(X, X[:, 0] > 0) > 0.9 and "mine model by dp-gd" in clf.report_
    with pytest.raises(ConfigError, match="model: one of your own cannot be saved"):
        clf.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="only linear, ridge, logistic and softmax have coefficients"):
        clf.to_sklearn()


# --- scikit-learn's habits -----------------------------------------------------------------------------------


def test_clone_pipeline_and_cross_validation_with_silos():
    frame = pd.DataFrame(X, columns=["p", "q", "r"])
    clf = silodp.SiloClassifier(epsilon=5.0, random_state=0)
    copied = clone(clf)
    assert copied.get_params() == clf.get_params() and not hasattr(copied, "classes_")
    with pytest.raises(NotFittedError):
        copied.predict(frame)
    y = X[:, 0] > 0
    pipeline = make_pipeline(StandardScaler(), clf).fit(X, y, siloclassifier__silo=SILO)
    assert pipeline.score(X, y) > 0.85 and len(pipeline[-1].certificate_["silos"]) == 2
    folds = StratifiedKFold(2, shuffle=True, random_state=0)
    scores = cross_val_score(clf, frame, y, cv=folds, params={"silo": SILO}, error_score="raise")
    with config_context(enable_metadata_routing=True):
        routed = make_pipeline(StandardScaler(), clone(clf).set_fit_request(silo=True))
        both = cross_validate(routed, frame, y, cv=folds, params={"silo": SILO}, return_estimator=True)
    assert scores.min() > 0.8 and both["test_score"].min() > 0.8
    assert [len(each[-1].certificate_["silos"]) for each in both["estimator"]] == [2, 2]


def test_no_value_of_a_record_in_a_repr():
    shown = repr(fitted()) + fitted()._repr_html_() + str(fitted().get_params())
    assert "P00" not in shown and "SiloClassifier(epsilon=3.0, random_state=0)" in shown


EASY = {"epsilon": 200.0, "trust": "trusted", "random_state": 0}  # the checks have 10 to 300 records
CHECKED = [silodp.SiloClassifier(**EASY), silodp.SiloRegressor(**EASY, target_range=(-4, 4))]


# A record of weight 0 counts among the public number of records, and noise is drawn for that number.
NOT_MET = {"check_sample_weight_equivalence_on_dense_data": "leaving a record out is not the same as weight 0"}


@pytest.mark.slow
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda _: NOT_MET)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


QUICK = (
    "unfitted", "repr", "cloneable", "tag_types", "set_params", "mixin", "sparse", "empty", "y_no_nan", "complex",
    "one_label", "regression_target", "default_constructible", "1sample",
)  # fmt: skip


def quick_checks() -> list[Any]:
    """Those that fit nothing, or only in vain."""
    pairs = [pair for each in CHECKED for pair in estimator_checks_generator(each)]
    named = [(f"{type(each).__name__}-{getattr(check, 'func', check).__name__}", each, check) for each, check in pairs]
    return [pytest.param(e, c, id=name) for name, e, c in named if any(word in name for word in QUICK)]


@pytest.mark.parametrize(("estimator", "check"), quick_checks())
def test_scikit_learns_checks_that_fit_nothing(estimator, check):
    check(estimator)


# --- mistakes ------------------------------------------------------------------------------------------------

CELL = "Qx7" + "Zebra"
ROWS = raw().assign(patient_id=[f"{CELL}{i}" for i in range(600)])
HOMELESS = ROWS.drop(columns="hospital")
REGRESSION = {"target": {"name": "outcome", "range": [0, 1]}, "columns": SCHEMA["columns"]}
NUMBERS = pd.DataFrame(X, columns=["p", "q", "r"]).assign(y=THREE)


def fit(X: Any = ROWS, y: Any = "outcome", silo: Any = "hospital", schema: Any = SCHEMA, **options: Any) -> Callable:
    return lambda: silodp.SiloClassifier(**options).fit(X, y, silo=silo, schema=schema)


def plain(X: Any = NUMBERS, y: Any = "y", silo: Any = None, **options: Any) -> Callable:
    return fit(X, y, silo, None, **options)


def on_numbers() -> silodp.SiloClassifier:
    """As if fitted on a frame of numbers: what its columns are called is checked first."""
    model = silodp.SiloClassifier()
    model.schema_, model.n_features_in_, model._predictor = None, X.shape[1], None
    model.feature_names_in_ = np.array([f"p{i}" for i in range(X.shape[1])], dtype=object)
    return model


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a schema that is not there": (fit(schema="none.toml"), "schema 'none.toml': no such file"),
    "a schema that is its text": (
        fit(schema=silodp.Schema.read(SCHEMA).to_toml() * 99), "schema: a text of several lines; give the path"),
    "images in the place of the step": (
        lambda: silodp.ImageFeatures(np.array([CELL])).fit(X), "ImageFeatures: step: a ndarray: give one of hog"),  # type: ignore
    "a schema that is a frame": (fit(schema=ROWS), "schema: a DataFrame; give the path of a TOML file, or a dict"),
    "another target": (fit(y="sex"), "y = 'sex': the schema's target is 'outcome'; give this one"),
    "a number as target": (fit(schema=REGRESSION), "target 'outcome' has a range; use SiloRegressor"),
    "classes as target": (
        lambda: silodp.SiloRegressor().fit(ROWS, schema=SCHEMA, silo="hospital"), "has classes; use SiloClassifier"),
    "nothing left to train on": (fit(held_out=1.0), "evaluate.held_out = 1.0: must be a finite number"),
    "held out in words": (fit(held_out="some"), "held_out = 'some': must be a number, and is a text"),
    "too much held out": (fit(held_out=0.999), "evaluate.held_out = 0.999: too much of a silo of"),
    "the silo among the columns": (
        fit(schema=changed(hospital={"kind": "ignore"})), "columns.hospital: it is the silo; leave it out"),
    "a silo that is not there": (fit(ROWS.drop(columns="hospital")), "column 'hospital' is not there; add it"),
    "two silos": (fit(schema=SCHEMA | {"silo": "ward"}), "silo: the schema has silo = 'ward'; leave one of them out"),
    "a column too many": (fit(ROWS.assign(bmi=1)), "not in the schema: 'bmi'; add each"),
    "a column too few": (fit(ROWS.drop(columns="age")), "column 'age' is not there; add it"),
    "a column twice": (fit(pd.concat([ROWS, ROWS[["age"]]], axis=1)), "column 'age' occurs twice"),
    "text in a number": (fit(ROWS.assign(age=CELL)), "column 'age': about 600 rows cannot be read; allowed: a number"),
    "an unknown class": (fit(ROWS.assign(outcome=CELL)), "target 'outcome': about 600 rows cannot be read; allowed"),
    "a missing class": (fit(ROWS.assign(outcome="")), "target 'outcome': about 600 rows are empty"),
    "an array for a schema": (fit(ROWS.to_numpy(), None, None), "rows: a ndarray; give a pandas DataFrame"),
    "labels too short": (fit(HOMELESS, silo=np.array([CELL])), "silo: shape (1,) beside 600 rows; give one"),
    "targets too short": (fit(y=np.array([CELL])), "y: shape (1,) beside 600 rows; give one for each row"),
    "labels with holes": (fit(HOMELESS, silo=[None, *[CELL] * 599]), "silo: some records have none"),
    "a silo for each record": (fit(HOMELESS, silo=ROWS["patient_id"]), "silo: 600 of 600 have 1 sample only; name"),
    "no schema for text": (plain(ROWS.drop(columns="patient_id"), "outcome", "hospital"), "'creatinine'"),
    "no schema for identifiers": (plain(ROWS, "outcome", "hospital"), "columns 'patient_id': named like identifiers"),
    "no schema for missing cells": (
        plain(NUMBERS.assign(p=np.nan)), "columns 'p': missing cells; give schema= with missing"),
    "an identifier beside a target": (
        plain(pd.DataFrame(X).assign(patient_id=range(600)), THREE), "columns 'patient_id': named like identifiers"),
    "a date beside a target": (
        plain(pd.DataFrame({"a": X[:, 0], "seen": pd.Timestamp("2020-01-01")}), THREE), "columns 'seen': not numbers"),
    "a first line of cells": (
        plain(pd.DataFrame({CELL: ["x"] * 600, "7.5": ["x"] * 600}), THREE), "2 columns, not named because the first"),
    "other columns to predict": (
        lambda: on_numbers().predict(pd.DataFrame(X, columns=[CELL, *map(str, range(1, X.shape[1]))])),
        "X: other columns than at fit, not named"),
    "a label with a line break": (plain(X, THREE, np.array([f"{CELL}\nx", "y"] * 300)), "silo: a control character"),
    "missing numbers as target": (
        lambda: silodp.SiloRegressor(target_range=(0, 1)).fit(X, np.array([None, *X[1:, 0]], object)),
        "y: some are missing; fill in or drop these records"),
    "missing labels": (plain(X, np.array([None, *[CELL] * 599], object)), "y: some are missing; fill in or drop"),
    "texts beside numbers as labels": (
        plain(X, np.array([1, CELL, 2] * 200, object)), "y: texts beside numbers; give labels of one kind"),
    "a list of labels with holes": (plain(X, THREE, [float("nan"), *[CELL] * 599]), "silo: some records have none"),
    "a column of numbers twice": (
        plain(pd.concat([NUMBERS, NUMBERS[["p"]]], axis=1)), "columns 'p': each occurs twice; give every column"),
    "a range of words": (
        lambda: silodp.SiloRegressor(target_range=("a", "b")).fit(X, X[:, 0]), "target_range: give two finite numbers"),
    "text in an array": (plain(np.array([[CELL]] * 600), THREE), "X or y: holds text where numbers are needed"),
    "text among numbers": (plain(np.array([[CELL, 1]] * 600, object), THREE), "X or y: holds text where numbers are"),
    "text as numbers": (
        lambda: silodp.SiloRegressor(target_range=(0, 1)).fit(X, np.array([CELL] * 600, object)), "X or y: holds text"),
    "text as numbers, given as a list": (
        lambda: silodp.SiloRegressor(target_range=(0, 1)).fit(X, [CELL] * 600), "y: holds text where numbers are"),
    "a frame as seed": (fit(random_state=ROWS), "random_state: a DataFrame; give a whole number"),
    "a frame as model": (fit(model=ROWS), "model: a DataFrame; give a name"),
    "a frame held out": (fit(held_out=ROWS), "evaluate.held_out: a DataFrame: must be"),
    "no such target": (plain(y="z"), "y = 'z': is not a column of the frame; name one that is"),
    "no such silo": (plain(silo="z"), "silo = 'z': is not a column of the frame; name one that is"),
    "the target as silo": (plain(silo="y"), "silo = 'y' is the target too; name another column"),
    "a column of an array": (plain(X), "y = 'y': a column, but X is a ndarray; give a DataFrame or an array"),
    "no target": (plain(X, None), "requires y to be passed"),
    "one class": (plain(X, [CELL] * 600), "y: one class only; give records of two or more classes"),
    "a negative epsilon": (plain(epsilon=-1.0), "privacy.epsilon = -1.0: must be"),
    "an epsilon that no noise is left of": (plain(epsilon=1e9), "privacy.epsilon = 1e+09: its noise, less than 0.001"),
    "an epsilon in quotes": (plain(epsilon="1"), "epsilon = '1': must be a number, and is a text"),
    "a delta by a rule": (plain(delta="1/n^2"), "delta = '1/n^2': must be a number, and is a text"),
    "a part in quotes": (plain(held_out="0.2"), "held_out = '0.2': must be a number, and is a text"),
    "no trust": (plain(trust=None), "trust = None: give the name of a trust model, e.g. 'untrusted'"),
    "a large delta": (plain(delta=1.5), "privacy.delta = 1.5: must be"),
    "an unknown trust": (plain(trust="blind"), "privacy.trust = 'blind': unknown"),
    "a network by auto for shuffled messages": (
        plain(trust="shuffled", model="mlp"), "algorithm.name = 'auto': not under trust 'shuffled'"),
    "an unknown algorithm": (plain(algorithm="spidr"), "algorithm.name = 'spidr': unknown (did you mean spider?)"),
    "an algorithm that is a class": (plain(algorithm=3), "algorithm: a int; give a name, or a dict"),
    "a model that is none": (plain(model=3), "model: a int; give a name, or a dict of the model section"),
    "unknown weights": (plain(weights="records"), "algorithm.weights = 'records': must be"),
    "two outputs for three classes": (plain(model="logistic"), "'logistic' has two classes, the data 3; use softmax"),
    "a negative seed": (plain(random_state=-1), "run.seed = -1: must be"),
    "no range": (lambda: silodp.SiloRegressor().fit(X, X[:, 0]), "target_range is missing: give the lowest"),
    "a range too wide": (
        lambda: silodp.SiloRegressor(target_range=(-1e308, 1e308)).fit(X, X[:, 0]), "target_range: give two finite"),
    "a range upside down": (
        lambda: silodp.SiloRegressor(target_range=(1, 0)).fit(X, X[:, 0]), "target_range: give two finite numbers"),
    "a wrong frame": (lambda: fitted().predict(FRESH.drop(columns="age")), "frame: column 'age' is not there; add it"),
    "a wrong cell": (lambda: fitted().predict(FRESH.assign(age=CELL)), "column 'age': about 600 rows cannot be read"),
    "predict of an array": (lambda: fitted().predict(X), "rows: a ndarray; give a pandas DataFrame"),
    "score of another target": (lambda: fitted().score(FRESH, "sex"), "y = 'sex': the schema's target is 'outcome'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy_and_without_a_cell(case):
    action, message = MISTAKES[case]
    with pytest.raises(ValueError) as caught:
        action()
    text = str(caught.value)
    assert message in text, text
    assert len(text.split("\nadd to the schema")[0].splitlines()) == 1
    assert CELL.casefold() not in "".join(traceback.format_exception(caught.value)).casefold()
    assert CELL not in str(caught.value.__context__)  # which `from None` hides, and keeps


def test_no_score_quotes_a_label():
    """scikit-learn does, where texts meet numbers."""
    clf = silodp.SiloClassifier(epsilon=5.0, random_state=0).fit(X, (X[:, 0] > 0).astype(int))
    for labels in ([CELL] * 600, np.array([CELL, 1, 0] * 200, object)):
        with pytest.raises(ValueError, match="y: texts where fit had numbers, or the other way round; give") as caught:
            clf.score(X, labels)
        assert CELL not in "".join(traceback.format_exception(caught.value))
    assert clf.score(X, pd.Series(X[:, 0] > 0, dtype=object).astype(int)) > 0.9


def test_there_are_enough_mistakes():
    assert len(MISTAKES) >= 40


def test_a_scale_is_taken_from_the_kinds_alone():
    number = {"kind": "number", "range": [0, 1]}
    tree = {"target": SCHEMA["target"], "columns": {"a": number, "b": number, "c": number}}
    assert records.public_scale(silodp.Schema.read(tree)) == pytest.approx([3**0.5] * 3)
    tree["columns"]["a"] = number | {"missing": 0.5, "pieces": 3}
    line, *bent, missing, b, c = records.public_scale(silodp.Schema.read(tree))
    (bend,) = bends(3)
    assert line == b == c == pytest.approx((3 / 9 + 4 / 9 * bend.usual().variance) ** -0.5)
    assert bent == pytest.approx([line * 2 / 3]) and missing == pytest.approx(line / 4)
    assert jax.config.jax_enable_x64 is False and Path.cwd()  # the estimators change no setting of JAX
