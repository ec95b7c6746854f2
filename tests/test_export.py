"""Models elsewhere: scikit-learn on raw columns, ONNX."""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

import silodp
from silodp.errors import ConfigError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import onnx
        import onnxruntime
except ImportError:
    onnx = None

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": RNG.integers(20, 90, 300).astype(float), "dose": RNG.uniform(0, 5, 300)})
CLASSES = np.where(FRAME["age"] + 9 * FRAME["dose"] + RNG.normal(0, 9, 300) > 75, "ill", "well")
COLUMNS = {"age": {"kind": "number", "range": [0, 120]}, "dose": {"kind": "number", "range": [0, 5]}}
SCHEMA = {"target": {"name": "outcome", "classes": ["well", "ill"]}, "columns": COLUMNS}


@pytest.fixture(scope="module")
def classifier():
    rows = FRAME.assign(outcome=CLASSES)
    return silodp.SiloClassifier(epsilon=3.0, random_state=0, model="logistic").fit(rows, schema=SCHEMA)


def test_a_classifier_on_raw_columns(classifier):
    raw = classifier.to_sklearn(raw=True)
    assert raw.coef_.shape == (1, 2)
    assert raw.predict_proba(FRAME.to_numpy()) == pytest.approx(classifier.predict_proba(FRAME), abs=1e-6)
    assert (raw.predict(FRAME.to_numpy()) == classifier.predict(FRAME)).all()


@pytest.mark.slow
def test_a_regressor_on_raw_columns_and_a_column_that_is_no_number():
    target = {"name": "days", "range": [0, 100]}
    rows = FRAME.assign(days=FRAME["age"] / 2 + FRAME["dose"], sex=RNG.choice(["f", "m"], 300))
    schema = {"target": target, "columns": COLUMNS}
    linear = silodp.SiloRegressor(epsilon=3.0, random_state=0, model="linear")
    model = linear.fit(rows.drop(columns="sex"), schema=schema)
    assert model.to_sklearn(raw=True).predict(FRAME.to_numpy()) == pytest.approx(model.predict(FRAME), abs=1e-4)
    mixed = {"target": target, "columns": COLUMNS | {"sex": {"kind": "category", "values": ["f", "m"]}}}
    with pytest.raises(ConfigError, match=r"raw = True: 'sex.*is no plain number"):
        linear.fit(rows, schema=mixed).to_sklearn(raw=True)


def test_without_onnx_the_error_says_what_to_install(classifier, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"to_onnx: needs onnx; pip install 'silodp\[onnx\]'"):
        classifier.to_onnx(tmp_path / "model.onnx")


needs_onnx = pytest.mark.skipif(onnx is None, reason="onnx and onnxruntime are not installed")


def elsewhere(path, features) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"features": np.asarray(features, np.float32)})[0]


@needs_onnx
def test_onnx_gives_the_same_probabilities(classifier, tmp_path):
    path = classifier.to_onnx(tmp_path / "model.onnx")
    found = elsewhere(path, classifier.schema_.features(FRAME))
    assert found == pytest.approx(classifier.predict_proba(FRAME), abs=1e-5)
    words = {each.key: each.value for each in onnx.load(str(path)).metadata_props}
    assert json.loads(words["classes"]) == ["ill", "well"] and json.loads(words["features"]) == ["age", "dose"]
    assert "differentially private" in words["promise"] and "not private" in words["stamp"]
    with pytest.raises(ConfigError, match="exists; give another path"):
        classifier.to_onnx(path)


@needs_onnx
@pytest.mark.slow
def test_onnx_of_three_classes_of_a_network_and_of_a_number(tmp_path):
    features = RNG.normal(size=(200, 3)).astype(np.float32)
    labels = RNG.integers(0, 3, 200)
    three = silodp.SiloClassifier(epsilon=3.0, random_state=0).fit(features, labels)
    options = {"name": "dp-gd", "rounds": 5, "clip": 1.0, "step_size": 0.5}
    model = {"kind": "mlp", "hidden": [4], "activation": "tanh"}
    network = silodp.SiloClassifier(epsilon=3.0, algorithm=options, model=model, random_state=0).fit(features, labels)
    for name, each in (("three", three), ("network", network)):
        found = elsewhere(each.to_onnx(tmp_path / name), features)
        assert found == pytest.approx(each.predict_proba(features), abs=1e-5)
    number = silodp.SiloRegressor(epsilon=3.0, target_range=(-3, 3), random_state=0).fit(features, features[:, 0])
    found = elsewhere(number.to_onnx(tmp_path / "number"), features)[:, 0]
    assert found == pytest.approx(number.predict(features), abs=1e-5)
