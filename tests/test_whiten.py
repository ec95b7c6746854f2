"""Features whitened by a private second moment: the bound of squares, the map, stages in one budget, messages."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import silodp
from silodp.channels.pvec import Summed
from silodp.config import DataConfig, WhitenConfig
from silodp.errors import ConfigError, Refused
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.auto import CLASSES, NOISE_OF_STEPS, RIDGE, SHARE, SHORTEST, SQUARES
from silodp.plan.certificate import settle
from silodp.plan.make import knots_that_pay, make_plan, reasons, resolved
from silodp.plan.plan import Plan
from silodp.randomness import SeededRandomness
from silodp.releases import Account, Squares, packed, unpacked
from silodp.run.prepare import prepare
from silodp.run.sweep import run_configs
from silodp.sampling import SQUARES_MOVE
from silodp.stages.blocks import Blocks
from silodp.stages.kinds import kind_of
from silodp.stages.maps import Whitening
from silodp.stages.whiten import (
    CONSTANT,
    Diagonal,
    Moment,
    reach_of,
    rescaling_of,
    shift_of,
    shortened,
    told_from_noise,
    whitening_of,
)
from tests.conftest import made_data

DATA = made_data((60, 35, 45))
FACTS = Facts((60, 35, 45), ("a", "b", "c"), ("float32[5]", "int32[]"))
SUMS = {"name": "dp-gd", "rounds": 4, "step_size": 2.0, "clip": 0.5, "weights": "size", "randomizer": "pvec"}


def case(**changes):
    tree = {
        "whiten": {"share": 0.3, "centre": 0.1, "clip": 1.2},
        "privacy": {"epsilon": 4.0, "trust": "untrusted"},
        "algorithm": {"name": "dp-gd", "rounds": 4, "step_size": 2.0, "clip": 0.5, "average": 2},
    }
    return parse_config(tree | changes)


def test_packing_keeps_the_norm_and_comes_back():
    matrix = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    matrix = matrix + matrix.T
    assert float(jnp.linalg.norm(packed(jnp.asarray(matrix)))) == pytest.approx(np.linalg.norm(matrix), rel=1e-6)
    np.testing.assert_allclose(unpacked(packed(jnp.asarray(matrix))), matrix, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 255, 256, 700])
def test_squares_are_clipped_sums_and_move_by_at_most_their_bound(n):
    """The worst neighbours are orthogonal and as long as allowed: the bound is nearly reached, never exceeded."""
    rng = np.random.default_rng(n)
    rows = rng.normal(size=(n, 4)).astype(np.float32)
    squares, clip = Squares(lambda record: record, 4), 2.25
    total = lambda rows: np.asarray(squares.clipped_sum(jnp.asarray(rows), jnp.ones(n), clip).high, np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    cut = rows * np.minimum(1, 1.5 / lengths)
    np.testing.assert_allclose(unpacked(jnp.asarray(total(rows), jnp.float32)), cut.T @ cut, rtol=2e-5, atol=2e-4)
    one, other = rows.copy(), rows.copy()
    one[1], other[1] = (100, 0, 0, 0), (0, 100, 0, 0)
    moved = np.linalg.norm(total(one) - total(other)) / clip
    assert 1.414 < moved <= SQUARES_MOVE
    np.testing.assert_allclose(squares.clipped(jnp.asarray(rows), clip).sum(0), total(rows), rtol=1e-4, atol=1e-3)


def test_whitened_features_have_length_one_and_no_preferred_direction():
    rng = np.random.default_rng(1)
    features = (rng.normal(size=(4000, 3)) @ np.array([[2.0, 1, 0], [0, 0.5, 0], [0, 0, 0.1]])).astype(np.float32)
    moment = packed(jnp.asarray(0.25 * features.T @ features / 4000, jnp.float32))
    whitening = whitening_of([moment], [range(3)], 1e-9, 0.5)
    mapped = np.asarray(whitening.features(jnp.asarray(features)))
    assert whitening.directions == pytest.approx(4, rel=1e-3)
    np.testing.assert_allclose(np.cov(mapped[:, :3].T, bias=True), np.eye(3) / 4, atol=2e-3)
    np.testing.assert_allclose(mapped[:, 3], CONSTANT / 2, atol=2e-3)  # the constant, which nobody was asked about


def test_noise_in_the_moment_shrinks_what_cannot_be_told_from_it():
    moment = packed(jnp.diag(jnp.array([1.0, 1.0, 1e-4])))
    rough = whitening_of([moment], [range(3)], 0.01, 1.0)
    assert rough.directions == pytest.approx(3 / (1 + 0.02), rel=0.01)  # two of them, and the constant
    blind = whitening_of([moment], [range(3)], 1.0, 1.0)  # no direction is preferred, not by noise either
    np.testing.assert_allclose(blind.matrix[:3, :3], blind.matrix[0, 0] * np.eye(3), atol=1e-6)


def test_a_ridge_leaves_short_directions_short():
    squares, ridge = np.array([0.5, 0.3, 0.001]), 0.1
    moment = packed(jnp.diag(jnp.asarray(squares, jnp.float32)))
    blocks = Blocks.of(1e3, [0, 1, 2], 1.0)
    left = squares / (squares + ridge)  # mean squares of whitened features, in directions
    for made, last in (
        (Moment.of(1e3, 3, 1.0).whitening(moment, 1e-9, ridge), 1.0),
        (blocks.whitening(jnp.asarray(squares, jnp.float32), 1e-9, ridge), 1.0),
        (Diagonal.of(1e3, 3, 1.0).whitening(jnp.asarray(squares, jnp.float32), 1e-9, ridge), 1.0),
    ):
        matrix = np.diag(made.matrix) if made.matrix.ndim == 1 else made.matrix
        np.testing.assert_allclose(np.diag(matrix)[:3] ** 2 * squares, left / (left.sum() + last), rtol=1e-3)
    stage = make_plan(case(whiten={"ridge": ridge}), FACTS).at("whiten")
    without = make_plan(case(whiten={"ridge": 0.0}), FACTS).at("whiten")
    released = packed(jnp.eye(5) / 5)
    assert stage_map(stage, released).directions < stage_map(without, released).directions
    assert "ridge" not in make_plan(case(), FACTS).to_json()["config"]["whiten"]


def test_steps_grow_with_the_directions_up_to_a_limit():
    made = Whitening(np.eye(3, dtype=np.float32), 20.0)
    assert (made.longer, replace(made, lengthen=5.0).longer, replace(made, lengthen=50.0).longer) == (20, 5, 20)
    plan = make_plan(case(whiten={"lengthen": 1.5}), FACTS)
    stage = plan.at("whiten")
    released = packed(jnp.eye(5) / 5)
    assert (
        stage_map(stage, released).longer
        == 1.5
        < stage_map(make_plan(case(), plan.facts).at("whiten"), released).longer
    )
    assert "lengthen" not in make_plan(case(), plan.facts).to_json()["config"]["whiten"]


def stage_map(stage, released):
    return kind_of("whiten").derived(stage, released)


def test_features_that_are_scaled_by_themselves():
    features = np.random.default_rng(1).normal(size=(4000, 3)).astype(np.float32) * np.float32([2, 0.5, 0.1])
    squares = np.mean((0.5 * features) ** 2, axis=0)
    made = rescaling_of(jnp.asarray(squares, jnp.float32), 1e-9, 0.5)
    mapped = np.asarray(made.features(jnp.asarray(features)))
    np.testing.assert_allclose(np.mean(mapped**2, axis=0), [1 / 4, 1 / 4, 1 / 4, CONSTANT**2 / 4], rtol=2e-3)
    assert made.directions == pytest.approx(4, rel=1e-3)
    blind = rescaling_of(jnp.asarray(squares, jnp.float32), 1.0, 0.5)  # noise prefers no feature
    np.testing.assert_allclose(blind.matrix[:3], blind.matrix[0])


def test_what_is_too_long_is_shortened_and_nothing_else_changes():
    rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    plain = Whitening(np.eye(3, dtype=np.float32), 2.0)
    short = replace(plain, reach=1.0)
    np.testing.assert_allclose(short.features(rows)[:, :2], [[0.6, 0.8], [0.3, 0.4], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(plain.features(rows)[:, :2], rows)
    assert set(short.arrays) == {"whitening", "reach"} and set(plain.arrays) == {"whitening"}
    assert reach_of(1.5) == pytest.approx(np.sqrt(1.25))


def test_eigenvalues_without_their_noise():
    rng = np.random.default_rng(0)
    noise = np.triu(rng.normal(size=(200, 200)), 1) / np.sqrt(2)
    noisy = np.diag([40.0, 30.0] + [1.0] * 198) + noise + noise.T + np.diag(rng.normal(size=200))
    found = told_from_noise(np.linalg.eigvalsh(noisy), np.sqrt(2 * 200))
    np.testing.assert_allclose(found[-2:], [31, 41], atol=1.5)  # eigenvalues of the rest lie under all of them
    np.testing.assert_allclose(found[:-2], 1.0, atol=0.1)


def test_a_centre_is_as_far_away_as_its_noise_allows():
    mean = jnp.array([3.0, 4.0])
    np.testing.assert_allclose(shift_of(mean, 0.0, 0.5).centre, [6, 8])
    np.testing.assert_allclose(shift_of(mean, 1.0, 0.5).centre, [6 * 23 / 25, 8 * 23 / 25], rtol=1e-6)
    np.testing.assert_array_equal(shift_of(mean, 5.0, 0.5).centre, [0, 0])


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_both_stages_share_the_budget_and_are_settled_together(trust):
    prepared = prepare(case(privacy={"epsilon": 4.0, "trust": trust}), DATA)
    plan = prepared.plan
    assert [(stage.name, stage.share) for stage in plan.stages] == [
        ("centre", 0.1),
        ("whiten", 0.3),
        ("train", 1 - 0.4),
    ]
    assert plan.streams == ("centre", "moment", "value")
    worst = max(plan.epsilon(i) for i in range(3))
    assert worst == pytest.approx(4.0, rel=1e-6) and worst <= 4.0
    shares = [s.releases.count / s.multiplier**2 for s in plan.spent(int(np.argmin(plan.facts.sizes)))]
    if trust == "untrusted":
        assert [share / sum(shares) for share in shares] == pytest.approx([0.1, 0.3, 0.6], rel=1e-6)
    assert set(prepared.bounds.values()) == {"computed by the library"}
    assert prepared.before is not None and prepared.before.tallies["moment"].count.tolist() == [1, 1, 1]
    outcome = run_configs([plan.config], DATA)[0]
    assert outcome.epsilon == pytest.approx(4.0, rel=1e-6)


def test_a_run_without_its_first_stage_is_not_settled():
    prepared = prepare(case(), DATA)
    with pytest.raises(KeyError, match="centre"):
        settle(prepared.plan, Account.empty(["value"], (3,)))


def test_the_noise_that_the_map_counts_with_is_that_of_the_average():
    plan = make_plan(case(), Facts((60, 35, 45), ("a", "b", "c"), ("float32[5]", "int32[]")))
    stds = plan.std_over_clip("moment")
    assert plan.std_of_average("moment") == pytest.approx(np.linalg.norm(stds * plan.training.facts.weights))
    trusted = make_plan(case(privacy={"epsilon": 4.0, "trust": "trusted"}), plan.facts)
    assert trusted.std_of_average("moment") == pytest.approx(trusted.std_over_clip("moment")[0])
    diagonal = make_plan(case(whiten={"moment": "diagonal"}), plan.facts).at("whiten")
    assert diagonal.releases(0)[0].dimension == 5 and diagonal.algorithm.unit == pytest.approx(3 / np.sqrt(5))
    noise = Moment.of(1.2, 6, None)
    assert noise.releases(0, (60,), range(1))[0].bound_over_clip(60) == pytest.approx(SQUARES_MOVE / 60)


def test_a_told_plan_must_have_its_configs_stages():
    plan = prepare(case(), DATA).plan
    tree = plan.to_json()
    assert Plan.from_json(tree).multipliers == plan.multipliers
    with pytest.raises(ConfigError, match=r"stages \['whiten', 'train'\]; its config has"):
        Plan.from_json(tree | {"stages": tree["stages"][1:]})


AGGREGATED = pytest.param("aggregated", "full", marks=pytest.mark.slow)
SHUFFLED = pytest.param("shuffled", "full", marks=pytest.mark.slow)


@pytest.mark.parametrize(("trust", "moment"), [("trusted", "full"), ("untrusted", "diagonal"), AGGREGATED, SHUFFLED])
def test_messages_are_the_simulation(trust, moment, tmp_path):
    """With every stage that there is."""
    stages = {
        "scale": {"columns": [0, 3]},
        "evaluate": {"held_out": 0.3},
        "whiten": {"moment": moment},
        "intercepts": {},
    }
    tree = case(privacy={"epsilon": 4.0, "trust": trust}, **stages).model_dump(exclude_unset=True)
    tree["algorithm"] |= {"randomizer": "pvec", "weights": "size"} if trust == "shuffled" else {}
    one = silodp.train(parse_config(tree), data=DATA, out=tmp_path / "one")
    run = {"mode": "messages", "test_seed": True}
    other = silodp.train(parse_config(tree | {"run": run}), data=DATA, out=tmp_path / "other")
    for left, right in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)
    assert one.summary["epsilon"] == other.summary["epsilon"]
    np.testing.assert_array_equal(one.predict(DATA.test.features), other.predict(DATA.test.features))
    told, same = (run.summary["held_out"] for run in (one, other))
    assert told["accuracy"]["value"] == pytest.approx(same["accuracy"]["value"], abs=1e-4)
    text = (tmp_path / "other" / "certificate.txt").read_text()
    assert all(f"1 x {stream}" in text for stream in ("moment", "rates", "metric")) and "18 of them held out" in text
    offsets = [load_file(run.directory / "model.safetensors")["offsets"] for run in (one, other)]
    np.testing.assert_allclose(*offsets, atol=1e-4)
    assert np.abs(offsets[0]).max() > 0


def test_a_silo_goes_through_its_stages_once_and_in_order():
    from silodp.deploy.silo import SiloServer

    plan = prepare(case(run={"mode": "messages"}, evaluate={"held_out": 0.25}), DATA).plan
    setup = {"plan": plan.to_json(), "index": 0, "seed": None, "shuffler": None}
    server = SiloServer(setup, DATA.silos[0].named())
    with pytest.raises(Refused, match="the agreed algorithm asks only"):
        server.answer("ask", "moment", 0, [])
    with pytest.raises(Refused, match="was not asked about centre yet"):
        server.leave("centre", jnp.zeros(5))
    server.answer("ask", "centre", 0, [])
    server.leave("centre", jnp.zeros(5))
    with pytest.raises(Refused, match="'centre' is not the stage that is under way"):
        server.leave("centre", jnp.zeros(5))
    size = plan.sizes["moment"]
    server.answer("ask", "moment", 0, [])
    with pytest.raises(Refused, match="answered already"):
        server.answer("ask", "moment", 0, [])
    wrong = ((jnp.zeros(3), "shapes"), (jnp.full(size, jnp.nan), "not finite"), (None, "released is missing"))
    for told, match in wrong:
        with pytest.raises(Refused, match=f"leave: .*{match}"):
            server.leave("whiten", told)
    server.leave("whiten", packed(jnp.eye(5)))
    with pytest.raises(Refused, match="nothing is made of what train released"):
        server.leave("train", packed(jnp.eye(5)))
    with pytest.raises(Refused, match="the agreed algorithm asks only"):
        server.answer("ask", "moment", 1, [])
    server.start(jnp.zeros(6))
    server.answer("ask", "value", 0, [jnp.zeros(6)])
    server.leave("train", None)
    with pytest.raises(Refused, match="the agreed algorithm asks only"):
        server.answer("ask", "value", 1, [jnp.zeros(6)])
    server.answer("local", "metric", 0, [jnp.zeros(6)])
    with pytest.raises(Refused, match="one more would exceed this silo's budget"):
        server.answer("local", "metric", 1, [jnp.zeros(6)])
    with pytest.raises(Refused, match="evaluate is the last stage"):
        server.leave("evaluate", None)
    counts = {name: int(tally.count) for name, tally in server.account.tallies.items()}
    assert counts == {"centre": 1, "metric": 1, "moment": 1, "value": 1}


def test_the_average_of_the_last_iterates_is_the_result(tmp_path):
    points = []
    base = case(privacy={}, algorithm={"name": "gd", "rounds": 4, "step_size": 1.0}, run={"every": 1})
    silodp.train(base, data=DATA, out=tmp_path / "a", on_round=lambda x, row: points.append(np.asarray(x)))
    averaged = base.model_copy(update={"algorithm": base.algorithm.model_copy(update={"average": 3})})
    run = silodp.train(averaged, data=DATA, out=tmp_path / "b")
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.params)])
    np.testing.assert_allclose(flat, np.mean(points[-3:], axis=0), rtol=1e-5, atol=1e-6)


def test_a_run_keeps_the_map_that_its_parameters_belong_to(tmp_path):
    run = silodp.train(case(), data=DATA, out=tmp_path / "run")
    saved = load_file(run.directory / "model.safetensors")
    moved = DATA.test.features - saved["centre"]
    moved *= np.minimum(1, saved["reach"] / np.linalg.norm(moved, axis=1, keepdims=True))
    rows = np.hstack([moved, np.ones((len(moved), 1))])
    scores = rows @ saved["whitening"].T @ saved["last/dense1/weight"].T
    np.testing.assert_array_equal(np.ravel(scores) > 0, run.predict(DATA.test.features))


def test_settings_with_and_without_whitening_are_not_swept_together():
    both = {"algorithm.name": ["auto", "dp-gd"]}
    options = {"name": "dp-gd", "rounds": 2, "step_size": 1.0, "clip": 1.0}
    with pytest.raises(ConfigError, match="some settings whiten the features and some do not"):
        silodp.sweep(algorithm=options, epsilon=2.0, data=DATA, grid=both)


def test_a_model_of_ones_own_must_take_the_constant():
    model = silodp.build_model("logistic", inputs=5)
    with pytest.raises(ConfigError, match="whiten: the model does not take 6 features"):
        prepare(case(), DATA, model)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"privacy": {"epsilon": 1.0, "trust": "shuffled"}}, "whiten: not under trust 'shuffled'"),
        ({"whiten": {"share": 1.0}}, r"whiten.share = 1.0: must be a finite number greater than 0 and less than 1"),
        ({"privacy": {"epsilon": 1.0, "calibration": "paper"}}, "centre: no paper prints its noise"),
        (
            {"algorithm": {"name": "auto"}, "model": {"kind": "a:b"}},
            "no recipe for model.kind = 'a:b'; known: logistic",
        ),
    ],
)
def test_what_cannot_be_whitened_is_told(changes, match):
    with pytest.raises(ConfigError, match=match):
        prepare(case(**changes), DATA)


@pytest.mark.parametrize("moment", ["full", "diagonal"])
def test_a_scale_for_each_feature_is_that_of_features_scaled_before(moment):
    factors = np.linspace(0.2, 1.0, DATA.input_shape[0]).astype(np.float32)
    silos = {silo.name: (silo.features * factors, silo.targets) for silo in DATA.silos}
    before = silodp.FederatedData.of(silos, classes=DATA.classes)
    given = {"moment": moment, "shorten": False, "clip": 1.2}
    one = prepare(case(whiten=given | {"scale": factors.tolist()}), DATA).ground
    other = prepare(case(whiten=given | {"scale": 1.0}), before).ground
    np.testing.assert_allclose(one.records[0], other.records[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"scale": [0.5, 0.5], "shorten": False}, "whiten.scale: 2 numbers for 5 features; give one, or one for each"),
        ({"scale": [0.5] * 5}, "not with a scale for each feature; set shorten = false"),
        ({"scale": [0.5, 0.5, 0.5, 0.5, 0.0], "shorten": False}, "whiten.scale: give a positive number, or one"),
    ],
)
def test_a_scale_for_each_feature_has_one_for_each(section, match):
    with pytest.raises(ConfigError, match=match):
        prepare(case(whiten=section), DATA)


def test_auto_is_its_recipe_and_keeps_what_is_given():
    auto = {"name": "auto", "rounds": 6}
    prepared = prepare(parse_config({"privacy": {"epsilon": 2.0}, "algorithm": auto}), DATA)
    options = prepared.plan.config.algorithm
    assert (options.name, options.rounds, options.average, options.weights) == ("dp-gd", 6, 10, "size")
    assert prepared.plan.config.whiten is not None and 0 < options.clip < 0.5
    assert prepared.problem.average == 6
    chosen = lambda kind, epsilon: resolved(
        parse_config({"model": {"kind": kind}, "privacy": {"epsilon": epsilon}, "algorithm": auto}),
        Facts((90, 80), ("a", "b"), ("float32[3]", "float32[]" if kind == "linear" else "int32[]")),
    ).algorithm.optimiser["kind"]
    assert [chosen("linear", 2.0), chosen("linear", None), chosen("logistic", 2.0)] == [
        "growing",
        "nesterov",
        "nesterov",
    ]


def test_auto_releases_sums_under_a_shuffler_with_hardly_more_noise_than_a_trusted_servers():
    plans = [
        prepare(parse_config({"privacy": {"epsilon": 2.0, "trust": t}, "algorithm": {"name": "auto"}}), DATA).plan
        for t in ("trusted", "shuffled")
    ]
    assert isinstance(plans[1].channel, Summed) and plans[1].before == plans[0].before
    for stage, stream in (("centre", "centre"), ("whiten", "moment"), ("train", "value")):
        one, other = (plan.training if stage == "train" else plan.at(stage) for plan in plans)
        assert 1 < other.std_of_average(stream) / one.std_of_average(stream) < 1.2


def test_rounded_squares_move_by_no_more_than_the_coins_are_counted_for():
    """Orthogonal neighbours, as long as allowed: the worst there are."""
    plan = prepare(case(privacy={"epsilon": 4.0, "trust": "shuffled"}, algorithm=SUMS), DATA).plan
    stage = plan.at("whiten")
    channel, asked = stage.noised, stage.algorithm
    assert isinstance(channel, Summed) and isinstance(asked, Moment)
    protocol, rounds = channel.protocols["moment"], jax.random.split(jax.random.key(0), (50, 2))
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(50, asked.features, asked.features)))[0][:, :2]
    squares = [Squares(lambda record: record, asked.features).clipped(jnp.asarray(9 * r), asked.unit) for r in rows]
    rounded = [
        [protocol.round(v[i : i + 1], asked.unit, SeededRandomness(keys[i]))[0] for i in (0, 1)]
        for v, keys in zip(squares, rounds, strict=True)
    ]
    moved = max(np.linalg.norm(np.asarray(one - other)) for one, other in rounded)
    before = max(float(jnp.linalg.norm(v[0] - v[1])) for v in squares) * channel.grid / 2 / asked.unit
    assert moved <= channel._shift(stage.declared, "moment")
    assert before == pytest.approx(channel.grid / np.sqrt(2), rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "features", "epsilon", "trust", "moment"),
    [
        ((3900,) * 10, 123, 1.0, "untrusted", "full"),
        ((114,) * 4, 30, 0.25, "trusted", "full"),
        ((114,) * 4, 30, 8.0, "shuffled", "full"),
        ((100_000,) * 4, 2500, 8.0, "trusted", "diagonal"),
    ],
)
def test_auto_asks_for_a_full_moment_unless_it_has_too_many_numbers(sizes, features, epsilon, trust, moment):
    facts = Facts(sizes, tuple(map(str, range(len(sizes)))), (f"float32[{features}]", "int32[]"))
    config = parse_config({"privacy": {"epsilon": epsilon, "trust": trust}, "algorithm": {"name": "auto"}})
    found = resolved(config, facts).whiten
    assert found is not None and (found.moment, found.share) == (moment, SHARE)
    assert ("pairs count" if moment == "full" else "too many numbers") in reasons(config, facts)[0]
    made = config.model_copy(update={"data": DataConfig(preprocess=["hog"])})  # records are 1 long already
    assert found.scale is None and getattr(resolved(made, facts).whiten, "scale", None) == 1.0
    assert found.ridge == (RIDGE / sum(sizes) if moment == "full" else None)
    assert any("stay short" in reason for reason in reasons(config, facts)) == (moment == "full")
    plain = resolved(parse_config({"algorithm": {"name": "auto"}}), facts).whiten  # no noise: nothing to be smoothed
    assert plain is not None and (plain.ridge, plain.lengthen) == (None, None)
    own = config.model_copy(update={"whiten": WhitenConfig(ridge=0.3)})
    assert not any("stay short" in reason for reason in reasons(own, facts))  # it was not `auto` that chose it
    given = config.model_copy(update={"whiten": WhitenConfig(moment="full", share=0.2, ridge=0.3)})
    kept = resolved(given, facts).whiten
    assert kept is not None and (kept.moment, kept.share, kept.ridge) == ("full", 0.2, 0.3)


def test_steps_are_shorter_the_more_noise_there_is_and_the_fewer_records():
    def lengthen(size, epsilon, features=30, kind="logistic", **whiten):
        target = "float32[]" if kind == "linear" else "int32[]"
        facts = Facts((size,) * 4, tuple("abcd"), (f"float32[{features}]", target))
        tree = {"privacy": {"epsilon": epsilon}, "algorithm": {"name": "auto"}, "whiten": whiten}
        tree |= {"model": {"kind": kind}}
        found = resolved(parse_config(tree), facts)
        return found.whiten.lengthen, found.algorithm.clip

    assert lengthen(114, 0.1)[0] == SHORTEST < lengthen(114, 8.0)[0] < lengthen(1140, 8.0)[0]
    few, many = (lengthen(size, 8.0)[0] for size in (100, 1000))
    longest = NOISE_OF_STEPS * 400 / (CLASSES.luck * np.sqrt(31))  # of 400 records, however little noise there is
    assert few < longest < many
    enough = 8e4  # hides the noise, and leaves what is peculiar to few records
    for recipe, kind in ((CLASSES, "logistic"), (SQUARES, "linear")):
        nu = recipe.luck * np.sqrt(31) / 400
        assert lengthen(100, enough, kind=kind)[0] == pytest.approx(max(SHORTEST, NOISE_OF_STEPS / nu), rel=0.05)
    short = [1.0] * 30 + [0.25] * 30  # flags of missing cells
    assert lengthen(1140, 1.0, 30) > lengthen(1140, 1.0, 60, scale=short, shorten=False) > lengthen(1140, 1.0, 60)
    assert lengthen(1140, 1.0, 60, scale=[0.1] * 60, shorten=False) == lengthen(1140, 1.0, 60)


def test_broken_lines_want_little_noise_and_records_for_each_feature():
    config = parse_config({"privacy": {"epsilon": 8.0, "trust": "trusted"}, "algorithm": {"name": "auto"}})

    def knots(records, features, epsilon=8.0):
        facts = Facts((records,), ("a",), (f"float32[{features}]", "int32[]"))
        asked = parse_config(config.model_dump(exclude_unset=True) | {"privacy": {"epsilon": epsilon}})
        return knots_that_pay(asked, facts, lambda each: (each - 1) * features)

    assert knots(CLASSES.records * 2 * 3, 3, 1e4) == 3  # no noise to speak of: records decide
    assert knots(CLASSES.records * 2 * 3 - 1, 3, 1e4) == 0
    assert knots(CLASSES.records * 8 * 3, 3, 1e4) == 9
    found = [knots(10_000, 10, epsilon) for epsilon in (0.01, 0.1, 8.0)]  # noise decides
    assert found == [0, 3, 9]
    config = parse_config(config.model_dump(exclude_unset=True) | {"model": {"kind": "mlp"}})
    assert knots(10_000, 10) == 0  # a network bends by itself
    config = parse_config(config.model_dump(exclude_unset=True) | {"model": {"kind": "linear"}})
    between = next(epsilon for epsilon in np.geomspace(8.0, 0.1, 60) if knots(10_000, 10, epsilon) < 9)
    config = parse_config(config.model_dump(exclude_unset=True) | {"model": {"kind": "logistic"}})
    assert knots(10_000, 10, between) == 9  # classes bear more noise in a moment
    config = parse_config(config.model_dump(exclude_unset=True) | {"model": {"kind": "linear"}})
    assert knots(SQUARES.records * 2 * 3, 3, 1e4) == 3 and knots(SQUARES.records * 2 * 3 - 1, 3, 1e4) == 0


def test_directions_that_noise_does_not_hide_are_no_longer_than_one():
    long = np.ones(9) / 3
    moment = 0.5 * np.eye(9) + 3.5 * np.outer(long, long)
    short = np.eye(9) - 0.5 * np.outer(long, long)
    np.testing.assert_allclose(shortened(np.eye(9), moment, 1e-9), short, atol=1e-6)
    np.testing.assert_allclose(shortened(np.eye(9), moment, 1.0), np.eye(9), atol=1e-6)  # noise could have made it
