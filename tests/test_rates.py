"""Intercepts of silos: what is released about label rates, what is made of it, and predictions for a silo's rows."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import silodp
from silodp.data import FederatedData, SiloData
from silodp.deploy.certify import verified
from silodp.deploy.server import drive
from silodp.deploy.wire import decode
from silodp.errors import ConfigError, Refused
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.objects import facts_of
from silodp.records import target_of, with_offset, with_weight
from silodp.releases import Statistic
from silodp.report.files import digest_of
from silodp.run.prepare import prepare
from silodp.sampling import MOVES
from silodp.stages.maps import Offsets
from silodp.stages.rates import Rates, offsets_of
from silodp.weights import weighted
from tests.guards import config_of

RATES, SIZE = (0.05, 0.3, 0.7, 0.95), 500
NAMES = ["north", "south", "lake", "hill"]


def skewed(seed=0, size=SIZE):
    """Records of a class are alike in all silos; only its rate differs."""
    rng = np.random.default_rng(seed)
    labels = [(rng.random(size) < rate).astype(np.int32) for rate in RATES]
    return [((0.4 * (2 * y - 1)[:, None] + rng.normal(size=(size, 4))).astype(np.float32), y) for y in labels]


def data(seed=0, size=SIZE):
    silos = tuple(SiloData(name, *pair) for name, pair in zip(NAMES, skewed(seed, size), strict=True))
    return FederatedData("skewed", silos, None, "classification", ("0", "1"), ())


DATA = data()


def case(**changes):
    tree = {
        "intercepts": {},
        "privacy": {"epsilon": 4.0, "trust": "untrusted"},
        "algorithm": {"name": "dp-gd", "rounds": 3, "step_size": 2.0, "clip": 0.5, "weights": "size"},
    }
    return parse_config(tree | changes)


def margins(made: Any) -> np.ndarray:
    assert isinstance(made, Offsets)
    return made.rows[:, 1] - made.rows[:, 0]


# --- what is released ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_silos_rates_move_by_at_most_their_bound(classes):
    """Whatever the new label is, one that is no class included."""
    asked, n = Rates.of(3, classes), 40
    labels = np.random.default_rng(0).integers(0, classes, n).astype(np.int32)
    of = Statistic(asked.numbers, classes)
    total = lambda y: np.asarray(of.clipped_sum((jnp.zeros(n), jnp.asarray(y)), jnp.ones(n), asked.clip).high, float)
    found = {}
    for label in (*range(classes), -1, classes, 2**31 - 1, -(2**31)):
        changed = labels.copy()
        changed[0] = label
        found[label] = total(changed)
    moved = max(np.linalg.norm(one - other) for one in found.values() for other in found.values()) / asked.clip
    assert moved <= MOVES * (1 + 1e-6)
    assert moved == pytest.approx(np.sqrt(2 / (1 - 1 / classes)), rel=1e-5)  # of two classes: all of the bound
    told = jnp.asarray(np.tile(total(labels) / n, 3), jnp.float32)
    np.testing.assert_allclose(asked.table(told)[0], np.bincount(labels) / n, atol=1e-6)


@pytest.mark.parametrize("trust", ["trusted", "untrusted", "aggregated", "shuffled"])
def test_a_silos_rates_have_noise_of_the_silos_own_under_every_trust_model(trust):
    options = {"randomizer": "pvec"} if trust == "shuffled" else {"weights": "equal"}  # silos move the mean unequally
    algorithm = case().algorithm.model_dump(exclude_unset=True) | options
    silos = (*DATA.silos[:3], SiloData("few", *(part[:60] for part in skewed()[3])))
    uneven = FederatedData("uneven", silos, None, "classification", ("0", "1"), ())
    plan = make_plan(case(privacy={"epsilon": 4.0, "trust": trust}, algorithm=algorithm), facts_of(uneven, 5))
    assert [(stage.name, stage.share) for stage in plan.stages] == [("intercepts", 0.05), ("train", 0.95)]
    assert plan.streams == ("rates", "value")
    assert all(plan.epsilon(i) <= 4.0 * (1 + 1e-6) for i in range(4))
    assert max(plan.epsilon(i) for i in range(4)) == pytest.approx(4.0, rel=1e-3)
    line = np.asarray(plan.multipliers["rates"])
    np.testing.assert_allclose(plan.protecting("rates"), line)  # nobody else's noise is counted
    np.testing.assert_allclose(plan.std_over_clip("rates"), MOVES * line / np.array([500, 500, 500, 60]), rtol=1e-5)


def test_rates_are_counted_in_the_certificate_and_fully_noised(tmp_path):
    prepared = prepare(case(), DATA)
    assert prepared.before is not None and prepared.before.tallies["rates"].count.tolist() == [1, 1, 1, 1]
    assert set(prepared.bounds.values()) == {"computed by the library"}
    run = silodp.train(case(), data=DATA, out=tmp_path / "run")
    text = (run.directory / "certificate.txt").read_text()
    assert text.count("1 x rates: noise") == 4 and run.summary["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert "how often each class occurs in the silo" in (run.directory / "report.html").read_text()
    seeds = [case(run={"seed": seed}) for seed in range(12)]
    rows = np.array([margins(prepare(config, data(size=60)).ground.maps[0]) for config in seeds])
    assert rows.std(axis=0).min() > 0.05  # of silos of 60 records the noise is seen


def test_a_silo_tells_its_rates_once():
    from silodp.deploy.silo import SiloServer

    plan = prepare(case(run={"mode": "messages"}), DATA).plan
    setup = {"plan": plan.to_json(), "index": 2, "seed": None, "shuffler": None}
    server = SiloServer(setup, DATA.silos[2].named())
    with pytest.raises(Refused, match="was not asked about intercepts yet"):
        server.leave("intercepts", jnp.zeros(8))
    server.answer("local", "rates", 2, [])
    with pytest.raises(Refused, match="one more would exceed this silo's budget"):
        server.answer("local", "rates", 3, [])
    with pytest.raises(Refused, match="not finite"):
        server.leave("intercepts", jnp.full(8, jnp.nan))
    server.leave("intercepts", jnp.asarray([0.4, -0.4, 0.2, -0.2, -0.4, 0.4, -0.3, 0.3]))
    added = np.asarray(server.site.records[1]["silo offset"])
    assert added.shape == (SIZE, 2) and np.isfinite(added).all() and np.abs(added).max() < 10
    assert (added == added[0]).all() and added[0, 1] > 0


def test_a_plan_that_does_not_ask_for_them_is_the_one_that_it_was():
    plain = parse_config(case().model_dump(exclude_unset=True, exclude={"intercepts"}))
    assert "intercepts" not in make_plan(plain, facts_of(DATA, 5)).to_json()["config"]
    told = make_plan(case(), facts_of(DATA, 5)).to_json()
    assert told["config"]["intercepts"] == {"share": 0.05}
    assert silodp.Plan.from_json(told).to_json() == told


# --- what is made of it -------------------------------------------------------------------------------------------


def offsets(rates, stds, sizes, seed=None):
    rates, stds = np.asarray(rates, float), np.broadcast_to(np.asarray(stds, float), len(rates))
    table = np.column_stack([1 - rates, rates])
    if seed is not None:
        noise = stds[:, None] * np.random.default_rng(seed).normal(size=table.shape)
        table = Rates.of(len(rates), 2).table(jnp.asarray((table - 0.5 + noise).ravel(), jnp.float32))
    return offsets_of(table, stds, sizes, [1 / len(rates)] * len(rates))


def test_without_noise_an_offset_is_the_difference_of_log_odds():
    rates = np.array([0.2, 0.3, 0.45, 0.6])
    odds = lambda p: np.log(p / (1 - p))
    np.testing.assert_allclose(margins(offsets(rates, 0.0, [10**6] * 4)), odds(rates) - odds(rates.mean()), atol=0.01)
    three = offsets_of(np.array([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3]]), np.zeros(2), [10**6] * 2, [0.5, 0.5])
    np.testing.assert_allclose(np.diff(three.rows[0]), np.diff(np.log([0.2 / 0.3, 0.3 / 0.3, 0.5 / 0.4])), atol=0.01)
    np.testing.assert_allclose(three.rows.sum(axis=1), 0, atol=1e-5)


def test_silos_that_are_alike_or_lost_in_noise_have_no_offset():
    assert not margins(offsets([0.3, 0.31, 0.29], 0.05, [500] * 3)).any()
    lost = np.array([margins(offsets([0.2, 0.4, 0.3], 0.6, [40] * 3, seed)) for seed in range(100)])
    assert np.median(np.abs(lost)) == 0 and np.abs(lost).max() < 1.3
    clear = np.array([margins(offsets([0.2, 0.4, 0.3], 0.01, [4000] * 3, seed)) for seed in range(20)])
    assert (clear[:, 0] < -0.3).all() and (clear[:, 1] > 0.2).all()


def test_a_large_silo_does_not_hide_that_a_small_one_differs():
    found = margins(offsets([0.3, 0.31, 0.8], [0.001, 0.001, 0.05], [20_000, 20_000, 400]))
    assert found[2] > 0.8


def test_an_offset_is_finite_whatever_was_released():
    for table in ([[0.0, 1.0], [1.0, 0.0]], [[-1e30, 1e30], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]):
        for std in (0.0, 0.1, 100.0):
            assert np.isfinite(offsets_of(np.array(table), np.full(2, std), [5, 9], [0.5, 0.5]).rows).all()


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "classes"), [("logistic", 2), ("softmax", 3), ("mlp", 2)])
@pytest.mark.parametrize("own_weights", [False, True])
def test_the_loss_is_that_of_scores_with_the_offset(kind, classes, own_weights):
    rng = np.random.default_rng(0)
    model = weighted(
        build_model(kind, inputs=4, outputs=classes, hidden=(3,) if kind == "mlp" else ()), None, own_weights
    )
    x, y = rng.normal(size=(50, 4)).astype(np.float32), rng.integers(0, classes, 50).astype(np.int32)
    added = rng.normal(size=(50, classes)).astype(np.float32)
    targets = with_offset(with_weight(y, np.full(50, 0.5, np.float32)) if own_weights else y, added)
    one = jax.tree.map(lambda leaf: leaf[0], (x, targets))
    engines = [build_objective(model, one, engine) for engine in ("structured", "general")]
    point = jnp.asarray(rng.normal(size=engines[0].parameters), jnp.float32)
    sums = [of.clipped_sum([point], [1.0], (x, targets), jnp.ones(50), 0.3).high for of in engines]
    np.testing.assert_allclose(*sums, rtol=1e-4, atol=1e-5)
    params = engines[0].unravel(point)
    scores = model.scores
    assert scores is not None
    score = np.asarray(jax.vmap(lambda row: scores(params, row))(x)).reshape(50, -1)
    score = np.hstack([np.zeros((50, 1)), score])[:, -classes:] if kind == "logistic" else score
    score = score + added
    wanted = np.log(np.exp(score).sum(axis=1)) - score[np.arange(50), y]
    losses = np.asarray(engines[0].losses(point, (x, targets)))
    np.testing.assert_allclose(losses, wanted * (0.5 if own_weights else 1.0), rtol=1e-4, atol=1e-5)
    assert float(model.evaluate(params, x, targets)) == pytest.approx(np.mean(score.argmax(axis=1) == y))
    assert target_of(targets) is y


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"privacy": {"epsilon": 1.0, "trust": "shuffled"}}, "intercepts: not under trust 'shuffled', which hides"),
        ({"intercepts": {"share": 1.0}}, "intercepts.share = 1.0: must be a finite number greater than 0 and less"),
        (
            {"privacy": {"epsilon": 1.0, "trust": "aggregated", "colluding": 0, "missing": 1}},
            "intercepts: not with privacy.missing = 1: nobody answers for the label rates of a missing silo",
        ),
        ({"privacy": {"epsilon": 1.0, "calibration": "paper"}}, "intercepts: no paper prints its noise"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told(changes, match):
    with pytest.raises(ConfigError, match=match):
        prepare(case(**changes), DATA)


def test_a_number_one_silo_and_a_model_of_ones_own_have_no_intercepts():
    numbers = FederatedData.of({name: (x, y.astype(np.float32)) for name, (x, y) in zip(NAMES, skewed(), strict=True)})
    with pytest.raises(ConfigError, match="intercepts: are made of label rates, and the target is a number"):
        prepare(case(model={"kind": "linear"}), numbers)
    alone = FederatedData("one", DATA.silos[:1], None, "classification", ("0", "1"), ())
    with pytest.raises(ConfigError, match="intercepts: there is one silo, and nothing that it differs from"):
        prepare(case(), alone)
    with pytest.raises(ConfigError, match="intercepts: not with a model of your own"):
        prepare(case(), DATA, build_model("logistic", inputs=4))


def test_messages_are_the_simulation(tmp_path):
    """Of silos that differ: what each is told about itself decides its gradients."""
    config = case(evaluate={"held_out": 0.2}, run={"per_silo": True})
    one = silodp.train(config, data=DATA, out=tmp_path / "one")
    tree = config.model_dump(exclude_unset=True) | {"run": {"mode": "messages", "test_seed": True}}
    other = silodp.train(parse_config(tree), data=DATA, out=tmp_path / "other")
    for left, right in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)
    figures = [run.summary["held_out"]["accuracy"]["value"] for run in (one, other)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-4) and figures[0] > 0.75
    assert one.history[-1]["accuracy/north"] > 0.9  # of records with their silo's intercept


def test_guards_charge_and_certify_rates(sites, tmp_path):
    """Each is asked once, in a round of its own; one that starts again gives the same bytes and is charged once."""
    document = sites.document(config_of(algorithm={"rounds": 2}, intercepts={}))
    rounds = {}

    def restarted(site: str, sent: bytes) -> bytes:
        header, answer = decode(sent)[0], sites.rpc(site, sent)
        if header.get("query") == "rates":
            rounds[site] = header["round"]
            sites.end(site)
            assert sites.rpc(site, sent) == answer
        return answer

    certificates = drive(document, sites.approve(document), restarted, tmp_path / "run")
    assert rounds == {"north": 0, "south": 1} and len(verified(certificates, document)) == 2
    for each in certificates:
        assert {line["stream"]: line["count"] for line in each["body"]["releases"]}["rates"] == 1
    assert load_file(tmp_path / "run" / "model.safetensors")["offsets"].shape == (2, 2)


# --- predictions --------------------------------------------------------------------------------------------------

COLUMNS = ["p", "q", "r", "s"]


def frame(seed):
    tables = [pd.DataFrame(x, columns=COLUMNS).assign(site=n, y=np.where(y, "ill", "well"))
              for n, (x, y) in zip(NAMES, skewed(seed), strict=True)]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


NEW = frame(1)
ROWS = NEW[COLUMNS]


@cache
def fitted():
    """One fit for all tests below."""
    return silodp.SiloClassifier(epsilon=2.0, random_state=0, silo_intercepts=True).fit(frame(0), "y", silo="site")


def test_rows_of_a_silo_are_predicted_with_its_intercept():
    clf = fitted()
    common, own = clf.score(NEW, "y"), clf.score(NEW, "y", silo="site")
    assert own > common + 0.05 and own > 0.85
    assert clf.score(ROWS, NEW["y"], silo=NEW["site"]) == own
    added = clf.decision_function(ROWS, silo="hill") - clf.decision_function(ROWS)
    np.testing.assert_allclose(added, added[0], atol=1e-9)
    assert added[0] < -1 and (clf.predict_proba(ROWS, silo="north") < clf.predict_proba(ROWS))[:, 0].all()
    by_column = clf.predict_proba(NEW[[*COLUMNS, "site"]], silo="site")
    np.testing.assert_array_equal(by_column, clf.predict_proba(ROWS, silo=NEW["site"].to_numpy()))


def test_a_bundle_keeps_the_intercepts(tmp_path):
    clf = fitted()
    back = silodp.load(clf.save(tmp_path / "model"))
    assert isinstance(back, silodp.SiloClassifier)
    np.testing.assert_array_equal(back.predict_proba(ROWS, silo="lake"), clf.predict_proba(ROWS, silo="lake"))
    np.testing.assert_array_equal(back.predict(ROWS), clf.predict(ROWS))
    assert back.get_params()["silo_intercepts"] is True
    np.testing.assert_allclose(clf.to_sklearn().predict_proba(ROWS.to_numpy()), clf.predict_proba(ROWS), atol=1e-6)


def test_a_bundle_with_the_intercepts_of_other_silos_is_refused(tmp_path):
    path = fitted().save(tmp_path / "model") / "bundle.json"
    told = json.loads(path.read_text())
    for names, match in ((NAMES[:3], "'offsets' has shape"), (["lake"] * 4, "silos: one occurs twice")):
        other = told | {"silos": names}
        path.write_text(json.dumps(other | {"digest": digest_of(other)}))
        with pytest.raises(ConfigError, match=match):
            silodp.load(tmp_path / "model")


def test_a_silo_that_the_model_does_not_know_is_told_without_its_label():
    clf, match = fitted(), "silo: 2000 of 2000 rows are of no silo of the fit, which had hill, lake, north, south;"
    for silo in ("Qx7Zebra", ["Qx7Zebra"] * len(ROWS), pd.Series([None] * len(ROWS))):
        with pytest.raises(ConfigError, match=match) as caught:
            clf.predict(ROWS, silo=silo)
        assert "Zebra" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"silo: shape \(3,\) beside 2000 rows; give one for each row"):
        clf.predict(ROWS, silo=["north"] * 3)


def test_a_model_without_intercepts_predicts_for_no_silo():
    plain = {"name": "dp-gd", "rounds": 2, "step_size": 1.0, "clip": 1.0}
    clf = silodp.SiloClassifier(epsilon=2.0, algorithm=plain, random_state=0).fit(frame(0), "y", silo="site")
    with pytest.raises(ConfigError, match="silo: this model has no intercepts of silos; leave it out, or fit with"):
        clf.predict(ROWS, silo="north")
    assert clf.certificate_ is not None
    assert "rates" not in [line["stream"] for line in clf.certificate_["silos"][0]["releases"]]
