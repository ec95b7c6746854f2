"""Families against one another, mixed with each other's channels and prox, and refused where they make no sense."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.algorithms import REGISTRY
from silodp.algorithms.soteria import Table
from silodp.config import Config
from silodp.deploy.pipes import joined
from silodp.errors import ConfigError
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.parse import parse_config
from silodp.plan.certificate import settle
from silodp.run import measure
from silodp.run.federation import Silos
from silodp.run.prepare import Prepared, prepare
from silodp.run.simulate import Carry, Problem, Setting, one_round, start
from silodp.sampling import Full, Recomputed, TwoLevel
from tests.cases import ROUNDS, case, with_test_seed
from tests.conftest import made_data
from tests.test_equivalences import trained

DATA = made_data()
BOTH: dict[str, Any] = {"clip_difference": 0.7, "multipliers": {"value": 2.0, "difference": 3.0}}
EVERYONE = [name for name, entry in REGISTRY.items() if entry.everyone]


@eqx.filter_jit
def all_rounds(problem: Problem, setting: Setting) -> Carry:
    return jax.lax.fori_loop(0, problem.rounds, lambda _, c: one_round(problem, setting, c), start(problem, setting))


def ran(config: Config) -> tuple[Prepared, Carry]:
    prepared = prepare(config, DATA)
    return prepared, all_rounds(prepared.problem, prepared.setting)


def test_soteria_with_the_identity_is_ldp_sgd():
    options: dict[str, Any] = {"batch": 8, "data": DATA}
    plain = trained(name="ldp-sgd", **options)
    np.testing.assert_array_equal(trained(name="cdp-sgd", compressor="identity", **options), plain)
    # The shift moves, but what it takes away in the silo the server adds: only rounding is left.
    shifted = trained(name="soteria-sgd", compressor="identity", **options)
    np.testing.assert_allclose(shifted, plain, rtol=1e-5, atol=1e-6)
    compressed = trained(name="soteria-sgd", compressor="rand-k", keep=3, **options)
    assert np.abs(compressed - plain).max() > 1e-2


def test_variance_reduction_on_all_records_is_gd_with_the_same_noise():
    # The same noise is not the same multiplier: three sums are rounded, not one.
    cases = (("soteria-saga", TwoLevel(30), {}), ("soteria-svrg", Recomputed(30), {"snapshot_probability": 0.4}))
    for name, rule, own in cases:
        relative = rule.bound_over_clip(30) / Full().bound_over_clip(30)
        gd = trained(name="soteria-gd", compressor="identity", multipliers={"value": 2.0 * relative})
        options: dict[str, Any] = {"batch": 30, "compressor": "identity"} | own
        np.testing.assert_allclose(trained(name=name, **options), gd, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_bvr_with_one_local_step_is_diff2(trust):
    local = trained(DATA, trust, name="diff2-bvr-l-sgd", local_steps=1, restart=3, **BOTH)
    np.testing.assert_array_equal(local, trained(DATA, trust, name="diff2-gd", restart=3, **BOTH))


@pytest.mark.parametrize(("local", "other"), [("diff2-bvr-l-sgd", "diff2-gd"), ("ce-psgm", "mb-psgm")])
def test_local_steps_that_are_not_taken_cost_no_budget(local, other):
    alone: dict[str, Any] = {"local_steps": 1, "clip_local": None, "batch_local": None}
    plans = [prepare(case(local, "untrusted", **alone), DATA).plan, prepare(case(other, "untrusted"), DATA).plan]
    for stream in ("value", "difference"):
        assert plans[0].multipliers[stream] == plans[1].multipliers[stream]
    shares = plans[1].multipliers["value"][0] ** -2 * 6, plans[1].multipliers["difference"][0] ** -2 * 5
    if other == "mb-psgm":
        assert shares[0] / sum(shares) == pytest.approx(0.8, rel=1e-6)


def test_ce_psgm_with_one_local_step_is_mb_psgm():
    local = trained(DATA, name="ce-psgm", local_steps=1, momentum=0.3, **BOTH)
    np.testing.assert_array_equal(local, trained(DATA, name="mb-psgm", momentum=0.3, **BOTH))


def test_momentum_one_is_gd():
    free = trained(DATA, name="mb-psgm", momentum=1.0, **BOTH)
    np.testing.assert_allclose(free, trained(DATA, name="dp-gd"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in EVERYONE])
def test_some_silos_may_be_absent(name):
    """The round with two of three silos can be built (conformance runs some of them)."""
    prepared = prepare(case(name, REGISTRY[name].trusts[0], participation=2), DATA)
    first = eqx.filter_eval_shape(start, prepared.problem, prepared.setting)
    later = eqx.filter_eval_shape(one_round, prepared.problem, prepared.setting, first)
    assert later.state.x.shape == (6,)


@pytest.mark.parametrize(("name", "trust"), [("mb-psgm", "untrusted"), ("prox-pl-svrg", "trusted")])
def test_absent_silos_are_not_charged(name, trust):
    prepared, carry = ran(case(name, trust, participation=2))
    settle(prepared.plan, carry.ends.accounts)
    assert int(carry.ends.accounts.tallies["value"].count.sum()) == 2 * sum(
        r % (prepared.config.algorithm.restart or 1) == 0 for r in range(ROUNDS)
    )


def test_a_random_number_of_silos_answers_and_pays():
    """Whoever is not among them is neither charged nor heard, though the program makes room for the most."""
    prepared, carry = ran(case("soteria-svrg", "untrusted", participation=(1, 3)))
    settle(prepared.plan, carry.ends.accounts)
    rounds = [prepared.plan.facts.present(r) for r in range(ROUNDS)]
    assert len({len(present) for present in rounds}) > 1
    attended = [sum(i in present for present in rounds) for i in range(3)]
    np.testing.assert_array_equal(np.asarray(carry.ends.accounts.tallies["value"].count), attended)
    _, alone = ran(case("soteria-svrg", "untrusted", participation=1))
    each = float(alone.ends.bits[0]) / ROUNDS
    assert float(carry.ends.bits[0]) == pytest.approx(each * sum(attended))


@pytest.mark.parametrize("name", ["mu2", "diff2-bvr-l-sgd", "ce-psgm"])
def test_methods_that_need_every_silo_say_so(name):
    with pytest.raises(ConfigError, match=f"participation = 2: {name} needs all 3 silos in every round"):
        prepare(case(name, "untrusted", participation=2), DATA)
    prepare(case(name, "untrusted", participation=3), DATA)


MIXED = [
    ("mb-psgm", {"compressor": "rand-k", "keep": 3}),
    ("diff2-gd", {"compressor": "rand-k", "keep": 3, "shifted": True}),
    ("mu2", {"prox": {"kind": "l1", "strength": 0.02}}),
    ("dp-gd", {"compressor": "qsgd", "levels": 4, "prox": {"kind": "box", "low": -0.2, "high": 0.2}}),
]


@pytest.mark.parametrize(("name", "options"), MIXED)
def test_estimators_channels_compressors_and_prox_mix(name, options):
    """Private whatever the mix: the releases are as planned; and the parts do what they are for."""
    prepared, carry = ran(case(name, "untrusted", **options))
    x = np.asarray(carry.state.x)
    settle(prepared.plan, carry.ends.accounts)
    assert np.isfinite(x).all()
    assert np.abs(x).max() > 0
    without: dict[str, Any] = dict.fromkeys(options)
    _, plain = ran(case(name, "untrusted", **without))
    assert np.abs(x - np.asarray(plain.state.x)).max() > 1e-3
    compressed = "compressor" in options
    assert (carry.ends.bits[0] < plain.ends.bits[0]) == compressed
    if name == "dp-gd":
        assert np.abs(x).max() <= 0.2 + 1e-6


@pytest.mark.slow
def test_a_mix_of_two_shifted_streams_is_the_same_message_by_message(silo_processes):
    name, options = MIXED[1]
    prepared, carry = ran(case(name, "untrusted", **options))
    plan = with_test_seed(prepared.plan)
    records = [{"features": silo.features, "targets": silo.targets} for silo in DATA.silos]
    with joined(plan, silo_processes, records, plan.config.run.seed) as fed:
        fed.start(prepared.setting.x0)
        state = plan.algorithm.init(prepared.setting.x0)
        for r in range(ROUNDS):
            fed.begin_round(r)
            state = plan.algorithm.round(state, fed)
        np.testing.assert_allclose(np.asarray(state.x), np.asarray(carry.state.x), rtol=1e-5, atol=1e-5)
        assert fed.take_costs()["bits_up"] == float(carry.ends.bits[0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("soteria-gd", {"keep": 7}, r"algorithm.keep = 7.*6"),
        ("soteria-svrg", {"snapshot_probability": 0.0}, r"snapshot_probability = 0.0: .*greater than 0 and at most 1"),
        ("ldp-svrg", {"snapshot_probability": 1.5}, r"snapshot_probability = 1.5: .*greater than 0 and at most 1"),
        ("prox-sgd", {"rounds": 26}, r"algorithm.rounds = 26: .*silo 'silo 1' has 25 records.*at most 25 rounds"),
        ("mu2", {"rounds": 13}, r"algorithm.rounds = 13: .*has 25 records and 26 are needed; use at most 12 rounds"),
        ("mu2", {"diameter": 0.0}, r"algorithm.diameter = 0.0: .*greater than 0"),
        ("mu2", {"diameter": -1.0}, r"algorithm.diameter = -1.0: .*greater than 0"),
        ("soteria-saga", {"batch": 26}, r"algorithm.batch = 26 exceeds the 25 records of silo 'silo 1'"),
        ("soteria-gd", {"compressor": None, "keep": None}, r"algorithm.compressor is missing: soteria-gd needs one"),
        ("ce-psgm", {"clip_local": None}, r"algorithm.clip_local is missing: local steps release differences"),
        ("diff2-bvr-l-sgd", {"clip_local": None}, r"algorithm.clip_local is missing: local steps release differences"),
        ("ldp-sgd", {"compressor": "natural"}, r"algorithm.compressor = 'natural': ldp-sgd sends uncompressed"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(name, options, message):
    with pytest.raises(ConfigError, match=message):
        prepare(case(name, "untrusted", **options), DATA)


def test_sagas_table_keeps_factors_not_gradients():
    """Each layer's gradient is an outer product: its two factors are stored, m * (inputs + outputs) numbers."""
    wide = made_data((40, 25, 31), features=200)
    tree = case("soteria-saga", "untrusted").model_dump(exclude_unset=True)
    layers = {"kind": "mlp", "hidden": [64], "activation": "sigmoid"}
    prepared = prepare(parse_config(tree | {"model": layers}), wide)
    assert prepared.ground.objective.engine == "structured"
    carry = eqx.filter_eval_shape(start, prepared.problem, prepared.setting)
    table = carry.ends.memory
    assert isinstance(table, Table)
    stored = sum(leaf.size for leaf in jax.tree.leaves(table.gradients))
    records = 3 * 40  # padded
    whole = records * prepared.ground.objective.parameters
    assert stored <= records * (200 + 64 + 64 + 2 + 4)
    assert stored < whole / 30


@pytest.mark.parametrize("chunk", [7, 20, 1000])
def test_measurements_cut_into_pieces_count_every_record_once(monkeypatch, chunk):
    """Uneven pieces overlap: what two of them hold must weigh in one only."""
    monkeypatch.setattr(measure, "CHUNK", chunk)
    records = (jax.random.normal(jax.random.key(0), (3, 20, 4)), jnp.arange(60.0).reshape(3, 20))
    sizes, weights = jnp.array([20, 13, 1]), jnp.array([0.5, 0.3, 0.2])
    silos = Silos(records, sizes, weights)
    objective = build_objective(build_model("linear", inputs=4), (jnp.zeros(4), jnp.zeros(())), "auto")
    x = jnp.linspace(-1, 1, objective.parameters)

    def direct(x):
        losses = [objective.losses(x, jax.tree.map(lambda leaf, i=i: leaf[i, : sizes[i]], records)) for i in range(3)]
        return sum(w * loss.mean() for w, loss in zip(weights, losses, strict=True))

    value, gradient = measure.value_and_gradient(objective, silos, x)
    np.testing.assert_allclose(value, direct(x), rtol=1e-5)
    np.testing.assert_allclose(gradient, jax.grad(direct)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["diff2-bvr-l-sgd", "ce-psgm"])
def test_local_steps_are_declared_one_by_one(name):
    """The silo whose turn it is releases a difference before each of its steps but the first."""
    algorithm = prepare(case(name, "untrusted", local_steps=4), made_data()).plan.algorithm
    counts = [{s.name: s.count for s in algorithm.releases(silo, (40, 25, 31), range(7))}["local"] for silo in range(3)]
    assert counts == [3 * 3, 2 * 3, 2 * 3]  # of rounds 0 to 6
