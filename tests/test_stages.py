"""Stages beside training: held-out records and their metrics, private ranges, and what all of them cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

import silodp
from silodp.data import FederatedData, SiloData
from silodp.errors import ConfigError
from silodp.models import build_model
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.objects import facts_of
from silodp.run.evaluation import evaluated
from silodp.run.prepare import asked_stage, prepare
from silodp.stages.evaluate import BINS, Metrics
from silodp.stages.figures import area, figures, held_out_figures
from silodp.stages.held_out import divided
from silodp.stages.scale import Ranges, bins, scaling_of
from tests.conftest import made_data

DATA = made_data((60, 35, 45))


def case(**changes):
    tree = {
        "privacy": {"epsilon": 4.0, "trust": "untrusted"},
        "algorithm": {"name": "dp-gd", "rounds": 4, "step_size": 2.0, "clip": 0.5},
        "evaluate": {"held_out": 0.3},
    }
    return parse_config(tree | changes)


# --- held-out records ---------------------------------------------------------------------------------------------


def test_a_record_is_trained_on_or_held_out_and_never_both():
    for size, held in ((10, 2), (101, 30)):
        train, rest = divided(size, held, 0, 3)
        assert sorted([*train, *rest]) == list(range(size)) and len(rest) == held
        assert not np.array_equal(rest, divided(size, held, 1, 3)[1])
    prepared = prepare(case(), DATA)
    assert prepared.plan.facts.sizes == (42, 25, 31) and prepared.plan.facts.held_out == (18, 10, 14)
    ground = prepared.ground
    for i, silo in enumerate(DATA.silos):
        own = [ground.records[0][i, : (42, 25, 31)[i]], ground.held_out[0][i, : (18, 10, 14)[i]]]
        rows = {row.tobytes() for row in silo.features}
        found = [row.tobytes() for part in own for row in np.asarray(part)]
        assert len(found) == len(set(found)) == len(rows) and set(found) == rows


def test_the_silo_divides_its_records_as_the_simulation_does():
    from silodp.deploy.silo import SiloServer

    prepared = prepare(case(run={"mode": "messages"}), DATA)
    setup = {"plan": prepared.plan.to_json(), "index": 2, "seed": None, "shuffler": None}
    server = SiloServer(setup, DATA.silos[2].named())
    np.testing.assert_array_equal(server.populations[0][0], prepared.ground.records[0][2, :31])
    np.testing.assert_array_equal(server.populations[1][0], prepared.ground.held_out[0][2, :14])


@pytest.mark.parametrize("trust", ["trusted", "untrusted", "aggregated"])
def test_each_part_of_the_records_has_the_whole_budget_and_no_more(trust):
    plan = make_plan(case(privacy={"epsilon": 4.0, "trust": trust}, whiten={}), facts_of(DATA, 6))
    for silo in range(3):
        trained, held_out = plan.apart(plan.spent(silo))
        assert [s.releases.stream for s in trained] == ["centre", "moment", "value"]
        assert [s.releases.stream for s in held_out] == ["metric"]
        alone = silodp.account(epsilon=4.0, algorithm={"name": "dp-gd", "rounds": 1}, data={"silos": 1, "records": 9})
        assert held_out[0].multiplier == pytest.approx(alone["silos"][0]["releases"][0]["multiplier"], rel=1e-6)
    assert max(plan.epsilon(i) for i in range(3)) == pytest.approx(4.0, rel=1e-6)


def test_if_others_collude_held_out_records_keep_what_their_own_silo_added():
    plan = make_plan(case(privacy={"epsilon": 4.0, "trust": "aggregated", "colluding": 1}), facts_of(DATA, 6))
    left = plan.if_others_collude(0, plan.spent(0), plan.config.privacy.delta)
    assert left is not None
    nobody, _, all_others = left.values()
    assert nobody == pytest.approx(4.0, rel=1e-6), "held-out records: their noise is the silo's alone"
    assert all_others > 4.1, "records that are trained on lean on the others' noise"


def test_given_noise_is_that_of_its_own_stream():
    given = {"value": 3.0, "metric": 2.0}
    plan = make_plan(case(privacy={"multipliers": given}), facts_of(DATA, 6))
    assert {line: noise[0] for line, noise in plan.multipliers.items()} == given
    with pytest.raises(ConfigError, match=r"privacy\.multipliers\.other: no such stream"):
        make_plan(case(privacy={"multipliers": given | {"other": 1.0}}), facts_of(DATA, 6))


def test_a_run_that_did_not_look_at_held_out_records_is_not_settled():
    prepared = prepare(case(), DATA)
    _, account = evaluated(prepared, prepared.setting.x0, prepare(case(), DATA).before or empty())
    assert account.tallies["metric"].count.tolist() == [1, 1, 1]
    with pytest.raises(KeyError, match="value"):
        prepared.settled(account)


def empty():
    from silodp.releases import Account

    return Account.empty([], (3,))


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_a_records_numbers_are_never_longer_than_their_clip(classes):
    asked = Metrics.of(4.0, 3, classes)
    rng = np.random.default_rng(0)
    kind = {1: "linear", 2: "logistic", 4: "softmax"}[classes]
    model = build_model(kind, inputs=3, outputs=max(1, classes), bias=False)
    for size in (1.0, 1e3, 1e19, np.inf):
        drawn = lambda leaf, size=size: size * rng.normal(size=leaf.shape)
        params = jax.tree.map(drawn, model.init(jax.random.key(0)))
        for _ in range(20):
            target = jnp.float32(100 * rng.normal()) if classes == 1 else jnp.int32(rng.integers(classes))
            row = asked.numbers(model, params, (jnp.asarray(rng.normal(size=3), jnp.float32), target))
            assert row.shape == (asked.size,) and float(jnp.linalg.norm(row)) <= asked.clip * (1 + 1e-6)


def test_without_noise_the_figures_are_those_of_scikit_learn():
    config = case(privacy={}, algorithm={"name": "gd", "rounds": 30, "step_size": 2.0})
    prepared = prepare(config, DATA)
    x = jnp.asarray(np.random.default_rng(1).normal(size=prepared.setting.x0.shape), jnp.float32)
    table, _ = asked_stage(prepared.ground, prepared.plan.evaluation, prepared.ground.held_out, x)
    told = held_out_figures(prepared.plan, table)
    for i, (own, n) in enumerate(zip(told["silos"], (18, 10, 14), strict=True)):
        features, truth = (np.asarray(part[i, :n]) for part in prepared.ground.held_out)
        scores = np.asarray(
            jax.vmap(lambda f: prepared.ground.model.scores(prepared.ground.objective.unravel(x), f))(features)
        )
        assert own["accuracy"]["value"] == pytest.approx(accuracy_score(truth, scores > 0), abs=1e-5)
        assert own["log_loss"]["value"] == pytest.approx(log_loss(truth, 1 / (1 + np.exp(-scores))), rel=1e-4)
        assert own["auc"]["value"] == pytest.approx(roc_auc_score(truth, scores), abs=0.03)
        assert own["majority"]["value"] == pytest.approx(max(truth.mean(), 1 - truth.mean()), abs=1e-5)


def test_numbers_get_r2_and_the_error_bars_cover_the_noise():
    asked = Metrics.of(4.0, 1, 1)
    rng = np.random.default_rng(0)
    truth = rng.uniform(-1, 1, 5000)
    error = 0.2 * rng.normal(size=5000)
    row = np.array([np.mean(error**2) / 4 - 0.5, truth.mean(), np.mean(truth**2)])
    exact = figures(asked, row, 0.0, 5000)
    assert exact["r2"].value == pytest.approx(1 - np.mean(error**2) / truth.var(), rel=1e-6)
    drawn = [figures(asked, row + 0.01 * rng.normal(size=3), 0.01, 5000) for _ in range(400)]
    for name in ("mse", "r2"):
        off = np.array([(each[name].value - exact[name].value) / each[name].error for each in drawn])
        assert 0.3 < off.std() < 1.3


def test_the_error_bar_of_an_area_is_that_of_its_noise():
    rng = np.random.default_rng(0)
    counts = rng.dirichlet(np.ones(2 * BINS)).reshape(2, BINS)
    counts[1] = np.sort(counts[1])
    row = np.concatenate([[0.3, -0.4], counts.ravel() / 2])
    asked = Metrics.of(4.0, 1, 2)
    noisy = [figures(asked, row + 0.01 * rng.normal(size=row.size), 0.01, 10**6)["auc"] for _ in range(200)]
    assert np.std([each.value for each in noisy]) == pytest.approx(np.mean([each.error for each in noisy]), rel=0.35)
    assert area(counts) == pytest.approx(figures(asked, row, 0.0, 10**6)["auc"].value)


# --- private ranges -----------------------------------------------------------------------------------------------


def test_bins_are_powers_of_two_and_one_for_each_column():
    rows = bins(jnp.array([0.0, 3.0, -1e30, 1e-30])).reshape(4, -1)
    assert rows.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert rows.argmax(axis=1).tolist() == [0, 24 + 2, 64, 0]


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_private_ranges_find_centre_and_scale(epsilon):
    rng = np.random.default_rng(0)
    centre, scale = np.array([0.0, 1000.0, -3.0, 1e-3]), np.array([1.0, 200.0, 0.4, 2e-3])
    silos = tuple(
        SiloData(name, (centre + scale * rng.normal(size=(n, 4))).astype(np.float32), rng.integers(0, 2, n))
        for name, n in (("a", 9000), ("b", 6000))
    )
    data = FederatedData("made", silos, None, "classification", ("0", "1"), ())
    privacy = {} if epsilon is None else {"privacy": {"epsilon": epsilon, "trust": "untrusted"}}
    algorithm = {"name": "dp-gd" if epsilon else "gd", "rounds": 1, "step_size": 1.0} | (
        {"clip": 1.0} if epsilon else {}
    )
    config = parse_config({"algorithm": algorithm, "scale": {"columns": [0, 1, 2]}, **privacy})
    made = prepare(config, data).ground.maps[0]
    np.testing.assert_allclose((made.centre - centre)[:3] / scale[:3], 0, atol=0.1 if epsilon is None else 0.6)
    np.testing.assert_allclose(made.scale[:3] / scale[:3], 1.0, rtol=0.35)
    assert (made.centre[3], made.scale[3], made.limit[3]) == (0, 1, np.inf)


def test_columns_that_cannot_be_told_from_noise_stay_finite():
    asked = Ranges.of([0, 1])
    made = scaling_of(jnp.zeros(4), asked.columns, 2)
    assert made.limit.tolist() == [4, 4]
    with pytest.raises(ConfigError, match=r"scale\.columns: 7 is none of the 5 features, which count from 0"):
        prepare(case(scale={"columns": [0, 7]}), DATA)


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"evaluate": {"held_out": 1.0}}, "evaluate.held_out = 1.0: must be a finite number greater than 0 and less"),
        ({"evaluate": {"held_out": 0.97}}, "evaluate.held_out = 0.97: too much of a silo of 35 records; give less"),
        ({"evaluate": {"share": 0.1}}, r"evaluate.share: unknown key; known: held_out, loss_bound"),
        (
            {"scale": {"share": 0.5}, "whiten": {"share": 0.5}},
            "scale 0.5, centre 0.05, whiten 0.5 leave nothing of",
        ),
        ({"privacy": {"epsilon": 1.0, "trust": "shuffled"}}, "evaluate: not under trust 'shuffled'"),
        (
            {"privacy": {"epsilon": 1.0, "trust": "aggregated", "colluding": 0, "missing": 1}},
            "evaluate: not with privacy.missing = 1: nobody answers for the held-out records of a missing silo",
        ),
        ({"scale": {"columns": []}}, r"scale.columns = \[\]"),
    ],
)
def test_what_cannot_be_done_is_told(changes, match):
    with pytest.raises(ConfigError, match=match):
        prepare(case(**changes), DATA)


def test_a_model_without_scores_is_not_evaluated():
    model = silodp.from_loss(lambda params, record: jnp.square(record[0] @ params), lambda key: jnp.zeros(5))
    with pytest.raises(ConfigError, match="evaluate: model 'user' has no scores of one target; leave it out"):
        prepare(case(), DATA, model)
