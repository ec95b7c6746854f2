"""Bundles: what is in one, a new process that predicts the same bits, and every reason not to load."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

import silodp
from silodp.errors import ConfigError
from silodp.front import bundle
from silodp.front.report import persons
from silodp.plan import identity
from silodp.plan.identity import fingerprint
from silodp.report.files import digest_of, story_of
from silodp.report.html import Html, page
from silodp.run.prepare import prepare
from tests.conftest import made_data
from tests.pages import problems
from tests.patients import fitted, raw

ROOT = Path(silodp.__file__).resolve().parents[1]
FRESH = raw(seed=2).drop(columns=["outcome", "hospital"])
ORDER = ["age", "sex", "creatinine", "pain", "smoker"]  # of the features
FILES = {"bundle.json", "model.safetensors", "certificate.txt", "report.txt", "report.html"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return fitted().save(tmp_path_factory.mktemp("bundles") / "model")


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


NEW_PROCESS = """
import sys, numpy as np, pandas as pd, silodp
rows = pd.read_csv(sys.argv[2], dtype=str, keep_default_na=False)
clf = silodp.load(sys.argv[1])
np.savez(sys.argv[3], proba=clf.predict_proba(rows), labels=clf.predict(rows), margin=clf.decision_function(rows))
print("JAX" if "jax" in sys.modules else "no JAX")
"""


def in_a_new_process(*arguments: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NEW_PROCESS, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_new_process_predicts_the_same_bits_from_untidy_rows(saved, tmp_path):
    """Shuffled columns, unknown categories and missing cells included; no JAX is needed for a linear model."""
    rows = FRESH[FRESH.columns[::-1]].copy()
    rows.loc[:20, "sex"], rows.loc[10:40, "age"], rows.loc[30:50, "pain"] = "neither", "", "NA"
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert in_a_new_process(saved, tmp_path / "rows.csv", tmp_path / "told.npz") == "no JAX"
    told, clf = np.load(tmp_path / "told.npz"), fitted()
    for name, expected in (
        ("proba", clf.predict_proba(rows)), ("labels", clf.predict(rows)), ("margin", clf.decision_function(rows)),
    ):  # fmt: skip
        assert told[name].tobytes() == np.ascontiguousarray(expected).tobytes(), name
    assert len(set(told["labels"])) == 2


def test_a_loaded_estimator_is_the_one_that_was_saved(saved, tmp_path):
    clf, back = fitted(), silodp.load(saved)
    assert isinstance(back, silodp.SiloClassifier)
    assert (back.report_, back.certificate_, back.plan_fingerprint_) == (
        clf.report_, json.loads(json.dumps(clf.certificate_)), clf.plan_fingerprint_
    )  # fmt: skip
    assert back.held_out_ == clf.held_out_
    assert back.get_params() == clf.get_params() | {"random_state": None}
    assert back.score(raw(), "outcome") == clf.score(raw(), "outcome")
    np.testing.assert_array_equal(back.to_sklearn().coef_, clf.to_sklearn().coef_)
    np.testing.assert_array_equal(back.feature_names_in_, clf.feature_names_in_)
    again = back.save(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_what_a_notebook_shows_of_an_estimator(saved):
    for clf, went in ((fitted(), True), (silodp.load(saved), False)):
        shown = clf._repr_mimebundle_()["text/html"]
        own = shown[shown.index('<div class="silodp">') :]
        assert problems(page("In a notebook", Html(own))) == []
        assert "sk-estimator" in shown and "at most" in own and "protects nobody" in own
        assert ("How it went" in own) == went  # no bundle holds a history
        assert "at most" in clf.certificate_._repr_html_()
    assert 'class="silodp"' not in silodp.SiloClassifier()._repr_mimebundle_()["text/html"]


def test_what_a_bundle_holds_and_what_it_does_not(saved):
    assert {path.name for path in saved.iterdir()} == FILES
    assert problems((saved / "report.html").read_text(encoding="utf-8")) == []
    told = json.loads((saved / "bundle.json").read_text())
    assert told["format"] == bundle.FORMAT and told["classes"] == ["ill", "well"]
    assert told["files"] == {n: hashlib.sha256((saved / n).read_bytes()).hexdigest() for n in FILES - {"bundle.json"}}
    assert {"params/dense1/weight", "centre", "whitening"} == set(load_file(saved / "model.safetensors"))
    everything = b"".join((saved / name).read_bytes() for name in FILES)
    for secret in (b'history"', b"random_state", b'seed":', b"P000", b"unknown"):
        assert secret not in everything, secret
    assert b"not private" in (saved / "certificate.txt").read_bytes()
    assert silodp.Schema.read(told["schema"]).feature_names == fitted().encoded_feature_names_


def test_the_fingerprint_is_the_plans_and_tells_no_seed():
    def of(seed: int, epsilon: float) -> str:
        tree = {"privacy": {"epsilon": epsilon}, "algorithm": {"name": "auto"}, "run": {"seed": seed}}
        return fingerprint(prepare(silodp.Config.model_validate(tree), made_data()).plan)

    assert of(1, 2.0) == of(2, 2.0) != of(1, 2.1)


def test_a_plan_whose_words_mean_other_releases_is_another_plan(monkeypatch):
    plan = prepare(
        silodp.Config.model_validate({"privacy": {"epsilon": 2.0}, "algorithm": {"name": "auto"}}), made_data()
    )
    old = fingerprint(plan.plan)
    monkeypatch.setattr(identity, "MECHANISM", identity.MECHANISM + 1)
    assert fingerprint(plan.plan) != old


def rewritten(directory: Path, **changes: object) -> None:
    """By somebody who knows how a bundle is made."""
    path = directory / "bundle.json"
    told = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(told | {"digest": digest_of(told)}))


def edited(directory: Path, old: str, new: str) -> None:
    """By hand."""
    path = directory / "bundle.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("100.0", "120.0"),  # of the range of age: all else fits together
        ('"scale": 0.5', '"scale": 0.6'),
        ('"epsilon": 3.0', '"epsilon": 1.0'),
        ('"missing": 60.0', '"missing": 50.0'),
        ('"female"', '"Female"'),
    ],
)
def test_an_edit_by_hand_is_noticed_though_it_is_plausible(copied, old, new):
    edited(copied, old, new)
    for read in (silodp.load, story_of):
        with pytest.raises(ConfigError, match=r"bundle\.json: changed since it was saved \(its digest differs\); take"):
            read(copied)


@pytest.mark.parametrize("name", sorted(FILES - {"bundle.json"}))
def test_a_changed_or_missing_file_is_told(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[-2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: changed since it was saved"):
        silodp.load(copied)
    (copied / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}: is not there; copy the whole directory"):
        silodp.load(copied)


def test_a_later_format_says_which_version_reads_it(copied):
    rewritten(copied, format=bundle.FORMAT + 1, versions={"silodp": "9.1"})
    with pytest.raises(ConfigError, match=r"format 3 of silodp 9\.1, this version reads up to 2; install a later one"):
        silodp.load(copied)


def test_broken_lines_of_an_older_version_are_not_taken_for_those_of_today(copied):
    told = json.loads((copied / "bundle.json").read_text())
    assert any(column.get("pieces") for column in told["schema"]["columns"].values())  # that `auto` took
    rewritten(copied, format=1)
    with pytest.raises(ConfigError, match=r"bundle\.json: saved by an older silodp.*; fit it again"):
        silodp.load(copied)
    for column in told["schema"]["columns"].values():
        column.pop("pieces", None)
    assert not any(map(bundle.has_pieces, (told, {}, {"schema": []}, {"schema": {"columns": [1]}})))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "one"}, "format = 'one': not known"),
        ({"format": True}, "format = True: not known"),
        ({"format": 3, "versions": None}, "format 3 of silodp unknown"),
        ({"versions": None}, "versions: must be an object"),
        ({"estimator": "SiloOracle"}, "estimator 'SiloOracle' is not known"),
        ({"estimator": ["SiloClassifier"]}, "estimator: must be a valid string"),
        ({"estimator": "SiloRegressor"}, "options: 'class_weight' is no option of a SiloRegressor"),
        ({"estimator": "SiloRegressor", "options": {}}, "classes: a SiloRegressor has none"),
        ({"options": [1]}, "options: must be an object"),
        ({"options": {"other": 1}}, "options: 'other' is no option of a SiloClassifier"),
        ({"options": {"class_weight": [["ill", 1, 2]]}}, "options.class_weight.0: too many"),
        ({"model": "logistic"}, "model: must be an object"),
        ({"model": {}}, "model.kind: no model of the library"),
        ({"model": {"kind": "os:system"}}, "model.kind: no model of the library"),
        ({"model": {"kind": "softmax"}}, "weight' has shape"),
        ({"model": {"kind": "linear"}}, "'linear' has not 2 outputs"),
        ({"model": {"kind": "mlp"}}, "no such model: model.hidden"),
        ({"model": {"kind": "mlp", "hidden": [3]}}, "'centre' has shape"),
        ({"schema": "schema.toml"}, "schema: must be an object"),
        ({"schema": {}}, "schema: target: is missing"),
        ({"schema": None}, "features: 5 are counted, 5 named, inputs = "),
        ({"features": None}, "features: must be an object"),
        ({"features": {"count": 10**9, "names": ORDER}}, "features: names and count are not those"),
        ({"features": {"count": 5, "names": [*ORDER[:4], "patient_id"]}}, "features: names and count are not those"),
        ({"inputs": 10**12}, "inputs = 1000000000000: the schema's columns give"),
        ({"classes": None}, "classes: a SiloClassifier has two or more"),
        ({"classes": ["ill"]}, "classes: too few"),
        ({"classes": ["ill", "ill"]}, "classes: they occur twice"),
        ({"classes": ["well", "ill"]}, "classes: not those of the schema's target"),
        ({"classes_type": "<U999999999"}, "classes_type: no type of labels"),
        ({"classes_type": "<i8"}, "classes: they occur twice, or are not of classes_type"),
        ({"classes_type": None}, "classes: they occur twice, or are not of classes_type"),
        ({"certificate": "private"}, "certificate: must be an object"),
        ({"certificate": None}, "certificate: null, though an epsilon was given"),
        ({"certificate": {}}, "certificate.made: is missing"),
        ({"plan": "0"}, "certificate.made.plan: the certificate is of another plan"),
        ({"files": {}}, "certificate is of another model"),
        ({"files": ["model.safetensors"]}, "files: must be an object"),
        ({"files": None}, "files: must be an object"),
    ],
)  # fmt: skip
def test_an_index_that_is_not_ours_is_told(copied, changes, match):
    rewritten(copied, **changes)
    with pytest.raises(ConfigError, match=rf"bundle\.json: .*{match}|model\.safetensors: .*{match}"):
        silodp.load(copied)


@pytest.mark.parametrize(
    "key", ["options", "model", "schema", "features", "inputs", "plan", "certificate", "files", "digest"]
)
def test_a_key_that_is_missing_is_named(copied, key):
    path = copied / "bundle.json"
    path.write_text(json.dumps({name: part for name, part in json.loads(path.read_text()).items() if name != key}))
    with pytest.raises(ConfigError, match=f"{key}: is missing; take the original"):
        silodp.load(copied)


def test_the_order_of_keys_means_nothing(copied, saved):
    """JSON has none, and many tools sort them: the list of features says what the model was trained on."""
    path = copied / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert list(json.loads(path.read_text())["schema"]["columns"]) != list(silodp.load(saved).schema_.columns)
    clf, back = silodp.load(saved), silodp.load(copied)
    assert back.predict_proba(FRESH).tobytes() == clf.predict_proba(FRESH).tobytes()
    assert list(back.schema_.used) == list(back.feature_names_in_) == ORDER


def with_arrays(directory: Path, change: Callable[[dict[str, np.ndarray]], object], certified: bool = True) -> None:
    """Another model in the bundle, with its hash, and the certificate's own too unless it is left."""
    told, arrays = json.loads((directory / "bundle.json").read_text()), load_file(directory / "model.safetensors")
    change(arrays)
    content = save(arrays)
    (directory / "model.safetensors").write_bytes(content)
    told["files"]["model.safetensors"] = hashlib.sha256(content).hexdigest()
    if certified:
        told["certificate"]["made"]["model"] = told["files"]["model.safetensors"]
    rewritten(directory, **told)


WEIGHT = "params/dense1/weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda arrays: arrays[WEIGHT].fill(np.nan), "weight' holds NaN, infinity or no numbers"),
        (lambda arrays: arrays["centre"].fill(np.inf), "'centre' holds NaN, infinity or no numbers"),
        (lambda arrays: arrays.update({WEIGHT: arrays[WEIGHT].astype(np.int32)}), "weight' holds NaN, infinity or no"),
        (lambda arrays: arrays.update({WEIGHT: np.repeat(arrays[WEIGHT], 3, axis=0)}), r"weight' has shape \(3, "),
        (lambda arrays: arrays.update({WEIGHT: arrays[WEIGHT][:, 1:]}), r"weight' has shape \(1, "),
        (lambda arrays: arrays.update({WEIGHT: arrays[WEIGHT][0]}), r"weight' has shape \(\d+,\), "),
        (lambda arrays: arrays.update(whitening=arrays["whitening"][:-1]), "'whitening' has shape"),
        (lambda arrays: arrays.pop(WEIGHT), "weight' has shape None"),
        (lambda arrays: arrays.update(more=np.zeros(1)), r"'more' has shape \(1,\), the model's has None"),
    ],
)
def test_a_model_is_loaded_only_with_the_shapes_it_has_and_finite(copied, change, match):
    with_arrays(copied, change)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{match}"):
        silodp.load(copied)


def test_a_certificate_of_another_model_is_refused(copied):
    with_arrays(copied, lambda arrays: arrays.update({WEIGHT: arrays[WEIGHT] + 1}), certified=False)
    with pytest.raises(ConfigError, match=r"certificate\.made\.model: the certificate is of another model"):
        silodp.load(copied)


def test_a_column_that_a_model_needs_cannot_be_left_out(saved):
    with pytest.raises(ConfigError, match="column 'age' is not there; add it: the model needs it"):
        silodp.load(saved).predict(FRESH.drop(columns="age"))


def test_files_outside_the_bundle_are_never_read(copied):
    files = json.loads((copied / "bundle.json").read_text())["files"]
    for outside in ("../secret", "../report.txt"):
        rewritten(copied, files=files | {outside: "0"})
        with pytest.raises(ConfigError, match="no file of a bundle"):
            silodp.load(copied)
    rewritten(copied, files={name: files[name] for name in files if name != "report.txt"})
    with pytest.raises(ConfigError, match=r"files: report\.txt is missing"):
        silodp.load(copied)


def test_what_is_no_bundle_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no model is saved here"):
        silodp.load(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "bundle.json").write_text(text)
        with pytest.raises(ConfigError, match="save the model again"):
            silodp.load(tmp_path)


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    clf = copy.copy(fitted())
    clf.classes_ = np.array(["2020-01-01", "2021-01-01"], "datetime64[D]")
    with pytest.raises(ConfigError, match="a class or an option is a date, which JSON cannot hold"):
        clf.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(saved, tmp_path):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ConfigError, match="exists and is not an empty directory; give a new one"):
        fitted().save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not an empty directory"):
        fitted().save(tmp_path / "file")


RNG = np.random.default_rng(5)
X = RNG.normal(size=(600, 3))
BATCHES = {"name": "dp-sgd", "batch": 5, "rounds": 30, "clip": 1.0, "step_size": 1.0}


def test_networks_numbers_and_bare_arrays_come_back_too(tmp_path):
    dpgd = {"name": "dp-gd", "rounds": 3, "step_size": 0.5, "clip": 1.0}
    clf = silodp.SiloClassifier(epsilon=5.0, algorithm=dpgd, model={"kind": "mlp", "hidden": [4]}, random_state=0)
    clf.fit(X, np.where(X[:, 0] > 0, 7, 3))
    back = silodp.load(clf.save(tmp_path / "network"))
    assert back.classes_.dtype == clf.classes_.dtype and back.predict(X).tolist() == clf.predict(X).tolist()
    assert back.predict_proba(X).tobytes() == clf.predict_proba(X).tobytes()
    assert pickle.loads(pickle.dumps(clf)).predict_proba(X).tobytes() == clf.predict_proba(X).tobytes()
    number = silodp.SiloRegressor(epsilon=np.float32(5), target_range=np.array([-3, 3]), random_state=0).fit(X, X[:, 0])
    same = silodp.load(number.save(tmp_path / "number"))
    assert same.predict(X).tobytes() == number.predict(X).tobytes() and same.target_range == [-3, 3]
    for model in (number, same):  # what is set now is for the next fit
        before = model.predict(X)
        assert (model.set_params(target_range=(0, 9)).predict(X) == before).all()
        assert (silodp.load(model.save(tmp_path / f"set{model is same}")).predict(X) == before).all()


@pytest.mark.parametrize("told", [{"model": "mlp"}, {"trust": "shuffled"}, {"algorithm": BATCHES}])
def test_what_auto_makes_and_what_no_epsilon_holds_for_is_saved_too(told, tmp_path):
    """A network of `auto` predicts from features as they are; five records of one person may have no epsilon."""
    silo = np.repeat(["a", "b"], [500, 100])
    clf = silodp.SiloClassifier(epsilon=2.0, delta=1e-5, random_state=0, **told).fit(X, X[:, 0] > 0, silo=silo)
    back = silodp.load(clf.save(tmp_path / "model"))
    assert back.predict_proba(X).tobytes() == clf.predict_proba(X).tobytes() and back.score(X, X[:, 0] > 0) > 0.6
    if told.get("algorithm"):
        groups = clf.certificate_["silos"][0]["several_records_of_one_person"]
        assert any(group["epsilon"] is None for group in groups)
        assert persons([{"several_records_of_one_person": groups[1:]}]).endswith("5 records in a silo has epsilon none")


def test_options_that_were_set_after_a_fit_are_not_those_of_the_model(tmp_path):
    """The certificate would say another epsilon than the options, or be missing beside one that was never used."""
    clf = copy.copy(fitted()).set_params(epsilon=0.1, trust="trusted", class_weight={"ill": 2.0})
    again = silodp.load(clf.save(tmp_path / "model"))
    assert (again.epsilon, again.trust, again.class_weight) == (3.0, "untrusted", None)
    open_ = silodp.SiloClassifier(epsilon=None, random_state=0).fit(X, X[:, 0] > 0).set_params(epsilon=1.0)
    assert "seed" not in open_.report_ and "One process read the records of all silos. No epsilon" in open_.report_
    assert silodp.load(open_.save(tmp_path / "open")).epsilon is None


def test_a_place_that_cannot_be_written_to_is_told_first(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "model", tmp_path / "file" / "a" / "model"):
        with pytest.raises(ConfigError, match="file is no directory that you may write to; give another place"):
            bundle.check_free(place)
    bundle.check_free(tmp_path / "new" / "model")
    monkeypatch.setattr(bundle.os, "access", lambda place, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="is no directory that you may write to; give another place"):
        bundle.check_free(tmp_path / "new" / "model")
