"""Records with several arrays, integer tokens and several targets: kept as they are, from the data to every mode."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp import gradients
from silodp.data import FederatedData, SiloData, load_data
from silodp.deploy.links import SiloProcess
from silodp.deploy.pipes import joined
from silodp.deploy.silo import SiloServer
from silodp.doubles import highs
from silodp.errors import ConfigError, Refused
from silodp.facts import Facts
from silodp.gradients import conv2d, dense, embed
from silodp.parse import parse_config
from silodp.plan.plan import Plan
from silodp.records import Kind, fitting
from silodp.run import runner
from silodp.run.prepare import prepare
from silodp.run.runner import train
from silodp.run.sweep import sweep

MODEL = "tests.test_data_pytrees:token_model"
WORDS, LENGTH, WIDTH = 11, 4, 3
RECORD = (
    {"tokens": f"int32[{LENGTH}]", "seen": ("float32[2]", "bool[]")},
    {"ill": "int32[]", "days": "float32[]"},
)

clipped_sum = lambda *given, **named: highs(gradients.clipped_sum(*given, **named))


def records(n: int, seed: int):
    """Patients: words of a letter, two measurements, a yes or no; whether they fell ill, and for how long."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, WORDS, (n, LENGTH))
    measured, smokes = rng.normal(size=(n, 2)), rng.random(n) < 0.5
    ill = (tokens.sum(axis=1) + 4 * measured[:, 0] + 3 * smokes > 21).astype(np.int64)
    days = measured @ [0.5, -1.0] + 0.1 * tokens[:, 0]
    return {"tokens": tokens, "seen": (measured, smokes)}, {"ill": ill, "days": days}


def patients(sizes=(12, 20, 16)) -> FederatedData:
    silos = {f"hospital {i}": records(n, i) for i, n in enumerate(sizes)}
    return FederatedData.of(silos, test=records(10, 99))


def token_model(facts: Facts) -> silodp.Model:
    """Embedded words and measurements into one hidden layer, and two heads."""
    assert facts.record == RECORD

    def init(key):
        keys = jax.random.split(key, 3)
        draw = lambda key, *shape: 0.3 * jax.random.normal(key, shape)
        return {"words": draw(keys[0], WORDS, WIDTH), "hidden": draw(keys[1], 5, WIDTH + 3), "out": draw(keys[2], 2, 5)}

    def outputs(params, features):
        assert features["tokens"].dtype == jnp.int32 and features["seen"][1].dtype == jnp.bool_
        words = embed(params["words"], features["tokens"]).mean(axis=0)
        seen = jnp.concatenate([words, features["seen"][0], features["seen"][1].astype(jnp.float32)[None]])
        return dense(params["out"], None, jnp.tanh(dense(params["hidden"], None, seen)))

    def loss(params, record):
        features, targets = record
        assert targets["ill"].dtype == jnp.int32
        score, days = outputs(params, features)
        return jax.nn.softplus(jnp.where(targets["ill"] > 0, -score, score)) + (days - targets["days"]) ** 2

    def scores(params, features):
        score, days = outputs(params, features)
        return {"ill": jax.nn.sigmoid(score), "days": days}

    return silodp.from_loss(loss, init, scores=scores, metric="mse", name="tokens")


def plain_model(facts: Facts) -> silodp.Model:
    """The same loss without the library's layers, for the general engine."""
    model = token_model(facts)

    def loss(params, record):
        words = params["words"][record[0]["tokens"]].mean(axis=0)
        seen = jnp.concatenate([words, record[0]["seen"][0], record[0]["seen"][1].astype(jnp.float32)[None]])
        score, days = params["out"] @ jnp.tanh(params["hidden"] @ seen)
        return jax.nn.softplus(jnp.where(record[1]["ill"] > 0, -score, score)) + (days - record[1]["days"]) ** 2

    return silodp.from_loss(loss, model.init, name="plain")


ALGORITHMS = {
    "dp-gd": ("trusted", {"clip": 1.0}),
    "spider": ("untrusted", {"clip": 1.0, "clip_difference": 0.7, "restart": 2}),
    "mb-psgm": ("shuffled", {"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3, "weights": "size"}),
}


def settings(name: str = "spider", kind: str = MODEL, **run) -> dict:
    trust, options = ALGORITHMS[name]
    return {
        "model": {"kind": kind},
        "privacy": {"trust": trust, "epsilon": 4.0, "delta": 1e-3},
        "algorithm": {"name": name, "rounds": 4, "step_size": 0.2} | options,
        "run": {"seed": 3, "every": 2} | run,
    }


# --- what is kept ------------------------------------------------------------------------------


def test_types_and_structure_are_kept():
    data = patients()
    assert data.record == RECORD
    assert data.sizes == (12, 20, 16)
    given = records(12, 0)
    own = data.silos[0]
    np.testing.assert_array_equal(own.features["tokens"], given[0]["tokens"])
    np.testing.assert_array_equal(own.features["seen"][1], given[0]["seen"][1])
    np.testing.assert_array_equal(own.targets["ill"], given[1]["ill"])
    assert list(own.named()) == ["features/tokens", "features/seen/0", "features/seen/1", "targets/ill", "targets/days"]
    with pytest.raises(ValueError, match="not one array"):
        _ = data.input_shape


def test_stack_pads_every_array():
    data = patients()
    features, targets, sizes = data.stack()
    assert features["tokens"].shape == (3, 20, LENGTH) and features["tokens"].dtype == np.int32
    assert features["seen"][1].dtype == bool and targets["days"].shape == (3, 20)
    np.testing.assert_array_equal(sizes, [12, 20, 16])
    for i, silo in enumerate(data.silos):
        np.testing.assert_array_equal(features["seen"][0][i, : len(silo)], silo.features["seen"][0])
        np.testing.assert_array_equal(targets["ill"][i, : len(silo)], silo.targets["ill"])
        assert not any(leaf[i, len(silo) :].any() for leaf in jax.tree.leaves((features, targets)))


def test_a_float32_array_is_not_copied():
    x = np.ones((4, 2), np.float32)
    assert SiloData("a", x, np.zeros(4, np.int32)).features is x


def test_data_needs_no_jax():
    code = "import sys, silodp.data, silodp.records; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_value_of_a_record_is_shown():
    silo = SiloData("a", np.full((3, 1), 1234.5), np.full(3, 777))
    assert "1234" not in repr(silo) and "777" not in repr(silo)


def test_facts_survive_json():
    facts = Facts((12, 20, 16), ("a", "b", "c"), RECORD)
    back = Facts.from_json(json.loads(json.dumps(facts.to_json())))
    assert back == facts
    assert back.kinds["features/seen/0"] == Kind("float32", (2,))
    with pytest.raises(ValueError, match="input_shape: the features are not one array"):
        _ = back.input_shape
    assert Facts((2,), ("a",), ("float32[3,4]", "int32[]")).input_shape == (3, 4)


@pytest.mark.parametrize(
    "record",
    ["float32[5]", ["float32[5]"], ["float32[5]", "object[]"], ["float32[-1]", "int32[]"], [{}, []], [3, "int32[]"]],
)
def test_facts_that_describe_no_record_are_refused(record):
    with pytest.raises((ValueError, TypeError)):
        Facts.from_json(Facts((2,), ("a",)).to_json() | {"record": record})


# --- what is refused ---------------------------------------------------------------------------


def changed(days=None, **parts):
    """Five records with other features, or without those that are None."""
    features, targets = records(5, 0)
    kept = {name: part for name, part in (features | parts).items() if part is not None}
    return kept, targets if days is None else targets | {"days": days}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (changed(tokens=np.zeros((6, 4), int)), ": features/seen/0: 5 records, but features/tokens has 6"),
        (changed(tokens=np.zeros((5, 9), int)), r": features/tokens: int32\[9\], but silo 'a' has int32\[4\]"),
        (changed(tokens=np.full((5, 4), 0.77)), r": features/tokens: float32\[4\], but silo 'a' has int32\[4\]"),
        (changed(seen=None), ": features/seen/0 is missing; silo 'a' has it"),
        (changed(more=np.zeros(5)), ": features/more: silo 'a' has no such array"),
        (changed(seen={"0": np.zeros((5, 2)), "1": np.zeros(5, bool)}), ": nested differently than silo 'a'"),
        (changed(tokens=np.full((5, 4), 77 << 40)), ": features/tokens: whole numbers beyond int32"),
        (changed(tokens=np.full((5, 4), "77")), ": features/tokens: type <U2"),
        (changed(tokens=[[77, 77], [77], [], [], []]), ": features/tokens: rows of different lengths"),
        (changed(tokens=77), ": features/tokens: a single number"),
        (changed(**{"a/b": np.zeros(5)}), ": features: the key 'a/b' cannot name an array"),
        (changed(seen=Kind("77", (1,))), ": features/seen: a Kind cannot be kept"),
        (changed(days=np.full(5, np.nan)), ": targets/days holds missing or infinite values"),
        (changed(days=np.full(5, 1e77)), ": targets/days holds .* beyond float32"),
        (({}, np.zeros(5)), ": features: no arrays"),
        ((np.zeros((1, 2)), np.zeros(1)), r" has 1 record\(s\); needs 2"),
        (np.zeros((5, 2)), ": a ndarray; need a pair"),
    ],
)
def test_errors_name_silo_and_array_and_no_value(other, told):
    with pytest.raises(ValueError, match=f"^silo 'b'{told}") as refusal:
        FederatedData.of({"a": records(5, 0), "b": other})
    assert "77" not in str(refusal.value)


def test_the_test_set_is_checked_too():
    with pytest.raises(ValueError, match=r"silo 'test': features: silo 'a' has no such array"):
        FederatedData.of({"a": records(5, 0)}, test=(np.zeros((4, 2)), np.zeros(4)))


def test_other_mistakes():
    with pytest.raises(ValueError, match="no silos"):
        FederatedData.of({})
    with pytest.raises(ValueError, match="task = 'classification': with 0 classes it is regression"):
        FederatedData.of({"a": records(5, 0)}, task="classification")
    with pytest.raises(ValueError, match=r"use silodp\.FederatedData\.of"):
        load_data({"a": records(5, 0)})


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_kind_of_the_library_does_not_take_several_arrays(kind):
    tree = settings(kind=kind)
    tree["model"] |= {"hidden": [3]} if kind == "mlp" else {}
    with pytest.raises(ConfigError, match=r"model\.kind.*features/tokens int32\[4\].*MODULE:FUNCTION") as refusal:
        prepare(parse_config(tree), patients())
    assert "from_loss" in str(refusal.value)


def test_scores_must_look_like_the_targets():
    model = silodp.from_loss(lambda p, r: p, lambda key: jnp.zeros(()), scores=lambda p, f: p + f, metric="mse")
    with pytest.raises(ValueError, match="same dict or tuple as the targets"):
        model.evaluate(jnp.zeros(()), jnp.ones(4), {"a": jnp.ones(4)})


@pytest.mark.parametrize("engine", ["structured", "general"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_squares_of_whole_numbers_do_not_overflow_the_norm(engine, dtype):
    """46341 ** 2 is beyond int32: a norm that wraps around would let a record through unclipped."""
    x = jnp.asarray([[46341, 46341, 3], [100_000, 60_000, 70_000], [1, 0, 1]], dtype)
    loss = lambda params, record: dense(params, None, record)[0] ** 2
    weight = jnp.full((1, 3), 0.1)
    for row in x:
        total = clipped_sum(loss, [weight], [1.0], row[None], jnp.ones(1), 0.01, engine=engine)
        assert float(jnp.linalg.norm(total)) == pytest.approx(0.01, rel=1e-4)
        pair = clipped_sum(loss, [2 * weight, weight], [1.0, -1.0], row[None], jnp.ones(1), 0.01, engine=engine)
        assert float(jnp.linalg.norm(pair)) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("side", [4, 300])
def test_images_of_whole_numbers_are_clipped(side):
    """Both forms of a convolution: as a band matrix, and of wide images directly."""
    image = jnp.full((1, 1, side if side < 10 else 4, 2 * side), 100_000)
    loss = lambda kernel, record: jnp.sum(conv2d(kernel, None, record))
    for x in (image, image.astype(jnp.float32)):
        total = clipped_sum(loss, [jnp.ones((1, 1, 2, 2))], [1.0], x, jnp.ones(1), 1.0, engine="structured")
        assert float(jnp.linalg.norm(total)) == pytest.approx(1.0, rel=1e-4)


# --- every mode --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silos():
    """Two silos whose operator has listed the model; a new plan replaces the old one."""
    with SiloProcess([MODEL]) as one, SiloProcess([MODEL]) as other:
        yield one, other


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "dp-gd" else pytest.mark.slow) for n in ALGORITHMS])
def test_messages_are_the_simulation(name, silos, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "message_federation", lambda plan, own, seed: joined(plan, silos, own, seed))
    data = patients((12, 20))
    simulated = train(settings(name), data=data, out=tmp_path / "simulated")
    sent = train(settings(name, mode="messages", test_seed=True), data=data, out=tmp_path / "sent")
    for ours, theirs in zip(jax.tree.leaves(simulated.params), jax.tree.leaves(sent.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert simulated.summary["engine"] == sent.summary["engine"] == "structured"
    assert simulated.summary["epsilon"] == sent.summary["epsilon"]


def test_both_engines_agree(tmp_path):
    data = patients()
    structured = train(settings(), data=data, out=tmp_path / "structured")
    plain = {"model": {"kind": "tests.test_data_pytrees:plain_model", "engine": "general"}}
    general = train(settings() | plain, data=data, out=tmp_path / "general")
    assert (structured.summary["engine"], general.summary["engine"]) == ("structured", "general")
    for ours, theirs in zip(jax.tree.leaves(structured.params), jax.tree.leaves(general.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_sweep_runs_and_predictions_have_the_targets_shape(tmp_path):
    data = patients()
    assert data.test is not None
    grid = {"sweep": {"grid": {"algorithm.step_size": [0.1, 0.2]}, "select": "test_mse"}}
    outcomes = sweep(settings() | grid, data=data)
    run = train(settings(), data=data, out=tmp_path / "run")
    assert outcomes[1].history[-1]["objective"] == pytest.approx(run.history[-1]["objective"], rel=1e-4)
    predicted = run.predict(data.test.features)
    assert {name: leaf.shape for name, leaf in predicted.items()} == {"ill": (10,), "days": (10,)}
    errors = [np.mean((np.asarray(predicted[name]) - data.test.targets[name]) ** 2) for name in predicted]
    assert run.history[-1]["test_mse"] == pytest.approx(np.mean(errors), rel=1e-5)


# --- what a silo accepts -----------------------------------------------------------------------


def shortened(own):
    return {name: array[:-1] for name, array in own.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda own: {"targets/ill": own["targets/ill"]}, "features/tokens is missing; the plan has it"),
        (lambda own: own | {"features/more": np.zeros(12)}, "features/more: the plan has no such array"),
        (lambda own: own | {"features/tokens": np.zeros((12, 4), np.float32)}, "but the plan has int32"),
        (lambda own: own | {"targets/ill": own["targets/ill"][:-1]}, "targets/ill: 11 records"),
        (lambda own: own | {"targets/ill": np.int32(1)}, "targets/ill: a single number"),
        (shortened, "this silo has 11 records, the plan says 12"),
    ],
)
def test_a_silo_refuses_records_that_do_not_fit_the_plan(change, told):
    data = patients()
    plan = prepare(parse_config(settings()), data).plan
    setup = {"plan": json.loads(json.dumps(plan.to_json())), "index": 0, "seed": None, "shuffler": None}
    own = data.silos[0].named()
    SiloServer(setup, own)
    with pytest.raises(Refused, match=told):
        SiloServer(setup, change(own))


def test_a_silo_refuses_a_plan_that_describes_no_record():
    plan = prepare(parse_config(settings()), patients()).plan
    tree = json.loads(json.dumps(plan.to_json()))
    tree["facts"]["record"] = None
    assert Plan.from_json(tree).facts.record is None
    with pytest.raises(Refused, match="does not say what a record is"):
        SiloServer({"plan": tree, "index": 0, "seed": None, "shuffler": None}, patients().silos[0].named())


def test_the_tree_is_rebuilt_from_names():
    own = patients().silos[1]
    rebuilt, given = fitting(RECORD, dict(reversed(own.named().items()))), (own.features, own.targets)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(given)
    assert all(ours is theirs for ours, theirs in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(given), strict=True))
