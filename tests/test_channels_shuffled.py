"""The shuffle model end to end: accounts with the known figures, certificates, refusals, runs and their tuner."""

from __future__ import annotations

import json
import math
from functools import reduce
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from silodp import sweep
from silodp.algorithms import find
from silodp.algorithms.entry import Case
from silodp.channels import Summed
from silodp.config import AlgorithmConfig, Config
from silodp.core import Silo, Site
from silodp.data import FederatedData, SiloData
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.account import account, draw_curves
from silodp.plan.certificate import Context, certificate
from silodp.plan.make import make_plan
from silodp.privacy import gaussian
from silodp.privacy.clones import Shuffled
from silodp.privacy.coins import dominating_gaussian, gaussian_multiplier, sensitivity
from silodp.randomness import SeededRandomness, party_key
from silodp.releases import Account
from silodp.run import group as machinery
from silodp.run.prepare import prepare
from silodp.run.runner import train as run
from silodp.run.steps import NOT_PRIVATE, keeps_rising, search_step_size
from silodp.run.sweep import with_values
from tests.cases import case

SILOS, RECORDS, ROUNDS = 10, 1651, 500  # the paper's experiment


def paper_setting(target: float, name: str = "mb-psgm-fg", **options: Any) -> Config:
    return parse_config(
        {
            "data": {"silos": SILOS, "records": RECORDS},
            "model": {"parameters": 101},
            "privacy": {"trust": "shuffled", "epsilon": target},
            "algorithm": {"name": name, "rounds": ROUNDS} | options,
        }
    )


def messages(config: Config) -> dict[str, Any]:
    return account(config)["silos"][0]["releases"][0]


def composed_epsilon(parts: list[tuple[Shuffled, int]], eps0: float, delta: float) -> float:
    """Of so many rounds of each part, composed here and not by the accountant."""
    interval = min(part.losses(eps0).scale for part, _ in parts) / 24
    laws = [part.pld(eps0, count, interval) for part, count in parts]
    return float(reduce(lambda one, other: one.compose(other), laws).get_epsilon_for_delta(delta))


def coins_epsilon(bits: int, levels: int, dimension: int, rounds: int, delta: float) -> float:
    """Of so many sums with so many coins in each coordinate."""
    shift = sensitivity(levels, dimension)
    return gaussian.epsilon_of(delta, math.sqrt(rounds) * shift / dominating_gaussian(bits))


@pytest.mark.parametrize(
    ("target", "fused", "golden"), [(0.4, False, 0.4251), (1.6, False, 1.2538), (0.4, True, 0.580), (1.6, True, 1.635)]
)
def test_golden_levels_of_the_papers_experiment(target, fused, golden):
    release = messages(paper_setting(target, fused=fused))
    assert release["eps0"] == pytest.approx(golden, rel=5e-3)
    assert release["count"] == (ROUNDS if fused else 2 * ROUNDS - 1)
    assert messages(paper_setting(target, "mb-psgm", fused=fused)) == release  # without a batch it is the same


def test_golden_noise_of_pvec():
    release = messages(paper_setting(0.8, "dp-gd", randomizer="pvec", grid=200))
    of_the_sum = release["std_over_clip"] * SILOS * RECORDS
    assert of_the_sum == pytest.approx(225.05, rel=5e-3)
    assert of_the_sum < 245


def test_what_a_silos_own_coins_leave_of_pvec():
    config = paper_setting(0.8, "dp-gd", randomizer="pvec", grid=200, step_size=0.1, clip=1.0, weights="size")
    facts = Facts((RECORDS,) * SILOS, tuple(map(str, range(SILOS))), parameters=101)
    plan = make_plan(config, facts)
    statement = certificate(plan, [plan.spent(i) for i in range(SILOS)], Context())["silos"][0]
    per_record = 122_710
    together, alone = (
        coins_epsilon(per_record * count, 200, 101, ROUNDS, config.privacy.delta)
        for count in (SILOS * RECORDS, RECORDS)
    )
    assert statement["epsilon"] == pytest.approx(together, rel=2e-3)
    assert statement["collusion"]["other_silos_collude"] == pytest.approx(alone, rel=2e-3)
    assert statement["collusion"]["masks_are_broken"] == statement["collusion"]["other_silos_collude"]


def test_the_coins_of_any_silos_that_may_meet_in_a_round_suffice(data):
    """Absent silos' coins are not in the sum, so the two smallest silos have to have enough of them."""
    prepared = prepare(case("sdp-spider", "shuffled", participation=2), data)
    channel, parameters = prepared.plan.noised, prepared.plan.facts.parameters
    assert isinstance(channel, Summed) and parameters is not None

    def multiplier(stream: str, silos: tuple[int, ...]) -> float:
        protocol = channel.protocols[stream]
        coins = protocol.bits_per_record * sum(protocol.sent[i] for i in silos)
        return gaussian_multiplier(coins, channel.grid, parameters)

    for stream, planned in prepared.plan.multipliers.items():
        pairs = [multiplier(stream, pair) for pair in combinations(range(3), 2)]
        assert min(pairs) >= max(planned)
        assert min(pairs) < 1.01 * max(planned)  # and no more than that
        assert multiplier(stream, (1,)) < max(planned)  # one silo alone has too few


def test_a_silos_part_of_a_sum_has_its_coins(data):
    """Records at rest: all that is in a part are coins, as many as the silo has records to send for."""
    prepared = prepare(case("sdp-spider", "shuffled"), data)
    channel, silos = prepared.plan.noised, prepared.problem.silos
    assert isinstance(channel, Summed)
    for i, size in enumerate(data.sizes):
        records = jax.tree.map(lambda leaf, i=i: jnp.zeros_like(leaf[i]), silos.records)
        site = Site(prepared.ground.objective, channel, records, silos.sizes[i], jnp.int32(i))
        coins = SeededRandomness(jax.random.key(i))
        silo = Silo(site, jnp.int32(0), coins, (), Account.empty(prepared.plan.streams))
        mean = silo.statistic(lambda record: jnp.tile(record[0], 60), jnp.float32(1.0), "value")
        part, _ = channel.send(mean, silo, ())
        expected = math.sqrt(channel.protocols["value"].bits_per_record * size) / 2
        assert np.asarray(part.total).std() == pytest.approx(expected, rel=0.2)  # 300 draws
        assert int(silo.account.tallies["value"].count) == 1


def test_the_messages_of_a_sampled_record_are_accounted_as_one_pair():
    batch, target, delta = 165, 1.6, 1e-5
    once = Shuffled(SILOS * batch, batch, rate=batch / RECORDS)
    pair = Shuffled(SILOS * batch, batch, rate=batch / RECORDS, together=2)
    planned = messages(paper_setting(target, "mb-psgm", batch=batch, sampling="fixed"))["eps0"]
    parts = [(pair, ROUNDS - 1), (once, 1)]
    # The planned level is within a thousandth of the largest that these parts admit.
    assert composed_epsilon(parts, planned / 1.001, delta) <= target <= composed_epsilon(parts, planned * 1.001, delta)
    # Messages sampled one by one would admit more than a hundredth more.
    assert composed_epsilon([(once, 2 * ROUNDS - 1)], planned / 0.99, delta) < target


def test_a_first_batch_of_its_own_is_accounted_with_its_own_rate():
    batch, first, target, delta = 20, 1500, 1.6, 1e-5
    options: dict[str, Any] = {"name": "mb-psgm", "batch": batch, "sampling": "fixed", "batch_first": first}
    planned = account(paper_setting(target, **options))["silos"][0]
    assert [r["count"] for r in planned["releases"]] == [2 * ROUNDS - 1]
    eps0 = planned["releases"][0]["eps0"]
    later = (Shuffled(SILOS * batch, batch, rate=batch / RECORDS, together=2), ROUNDS - 1)
    own = (Shuffled(SILOS * first, first, rate=first / RECORDS), 1)
    assert composed_epsilon([later, own], eps0, delta) == pytest.approx(target, rel=2e-3)
    assert composed_epsilon([later], eps0, delta) < 0.995 * target  # the first round is not forgotten
    assert planned["epsilon"] <= target * (1 + 1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_record_of_one_pass_may_be_in_the_first_batch_too(fused):
    batch, first, target, delta = 3, 20, 1.6, 1e-5
    options: dict[str, Any] = {"name": "mb-psgm", "batch": batch, "sampling": "one-pass", "batch_first": first}
    planned = account(paper_setting(target, fused=fused, **options))["silos"][0]
    eps0 = planned["releases"][0]["eps0"]
    later = (Shuffled(SILOS * batch, batch, together=1 if fused else 2), 1)
    own = (Shuffled(SILOS * first, first, rate=first / RECORDS), 1)
    assert composed_epsilon([later, own], eps0, delta) <= target * (1 + 2e-3)


@pytest.mark.slow
def test_a_first_batch_in_message_mode_is_that_of_the_simulation(data, tmp_path):
    base = case("mb-psgm", "shuffled", batch=4, sampling="fixed", batch_first=12, weights="equal")
    sent = with_values(base, {"run.mode": "messages", "run.test_seed": True})
    simulated, _ = trained(base, data, tmp_path / "simulated")
    told, _ = trained(sent, data, tmp_path / "told")
    np.testing.assert_allclose(told, simulated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", [1.6, 4.0])
def test_privunit_has_less_noise_than_duchi_above_level_one(target):
    duchi, privunit = (messages(paper_setting(target, randomizer=name)) for name in ("duchi", "privunit"))
    assert duchi["eps0"] > 1 and privunit["eps0"] > 1
    assert privunit["std_over_clip"] < 0.92 * duchi["std_over_clip"]


def test_the_papers_conditions_admit_no_level_and_say_why(tmp_path):
    config = paper_setting(1.6)
    paper = account(config)["paper"]
    assert (paper["admissible"], paper["true_epsilon"], paper["claimed_epsilon"]) == (False, None, 1.6)
    assert any("sampling rate 1 is above 0.1" in reason for reason in paper["reasons"])
    assert any("eps0 <= -11.4" in reason for reason in paper["reasons"])
    with pytest.raises(ConfigError, match=r"no noise is admissible.*Lemma A.8 needs eps0 >= 1"):
        account(with_values(config, {"privacy.calibration": "paper"}))
    draw_curves(config, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_where_the_papers_conditions_hold_its_level_is_taken_unless_local_steps_need_noise():
    formula = find("ce-psgm").printed_for("shuffled")
    assert formula is not None

    def printed(local_steps: int) -> dict[str, float]:
        options = AlgorithmConfig(name="ce-psgm", rounds=2, batch=10_000, sampling="fixed", local_steps=local_steps)
        return formula.noise(Case(options, 1.0, 1e-5, 1_000_000, 100))

    order = 1 + 2 * np.log(1e5)  # Lemma A.9's bound on it is the narrowest condition here
    assert 1 / printed(1)["message"] == pytest.approx(np.log(1e6 * np.log(100) / (4 * 1536 * order)))
    with pytest.raises(ConfigError, match="only up to a constant"):
        printed(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "equal"}, "every message counts alike"),
        ({"batch": 8, "sampling": "poisson", "weights": "equal"}, "agreed number of messages"),
        ({"batch_first": 8}, "every message counts alike"),  # full batches differ in size, first ones do not
        ({"name": "mb-psgm-fg", "batch": 8, "weights": "equal"}, "uses all records"),
        ({"name": "mb-psgm-fg", "batch_first": 8}, "does not use it"),
        ({"local_steps": 2}, "does not use it"),
        (
            {"batch": 8, "batch_first": 30, "weights": "equal", "sampling": "fixed"},
            r"^algorithm.batch_first = 30 exceeds the 25 records",
        ),
    ],
)
def test_refusals(data, options, words, tmp_path):
    name = options.get("name", "mb-psgm")
    with pytest.raises(ConfigError, match=words):
        config = with_values(case(name, "shuffled"), {f"algorithm.{key}": value for key, value in options.items()})
        run(config, data=data, out=tmp_path / "run")


# Runs.


def trained(config: Config, data: FederatedData, out: Any) -> tuple[np.ndarray, dict[str, Any]]:
    finished = run(config, data=data, out=out)
    flat = np.asarray(ravel_pytree(finished.params)[0])
    return flat, json.loads((out / "certificate.json").read_text())


def test_one_local_step_is_the_minibatch_method_and_the_certificate_has_three_levels(data, tmp_path):
    local = case("ce-psgm", "shuffled", local_steps=1, clip_local=None, batch_local=None)
    one, _ = trained(local, data, tmp_path / "ce")
    other, certificate = trained(case("mb-psgm", "shuffled"), data, tmp_path / "mb")
    np.testing.assert_array_equal(one, other)
    assert np.all(np.isfinite(one)) and np.any(one != 0)
    for silo in certificate["silos"]:
        left = silo["collusion"]
        assert silo["epsilon"] < left["other_silos_collude"] < left["shuffler_colludes"]
    assert max(silo["epsilon"] for silo in certificate["silos"]) == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(("trust", "fused"), [("shuffled", False), ("untrusted", True)])
def test_a_first_batch_is_released_once_and_settled(data, trust, fused, tmp_path):
    options: dict[str, Any] = {"batch": 4, "sampling": "fixed", "batch_first": 20, "weights": "equal", "fused": fused}
    _, certificate = trained(case("mb-psgm", trust, **options), data, tmp_path / "run")
    counts = {release["stream"]: release["count"] for release in certificate["silos"][0]["releases"]}
    assert counts == ({"message": 11} if trust == "shuffled" else {"value": 5, "first": 1})


def test_a_sweep_over_epsilon_is_one_program_with_the_noise_of_each(data, monkeypatch, tmp_path):
    programs = []
    original = machinery.compile_run
    monkeypatch.setattr(machinery, "compile_run", lambda *a, **k: programs.append(1) or original(*a, **k))
    base = case("mb-psgm", "shuffled")
    tree = base.model_dump(exclude_unset=True) | {"sweep": {"grid": {"privacy.epsilon": [1.0, 4.0, 16.0]}}}
    outcomes = sweep(parse_config(tree), data=data)
    assert len(programs) == 1
    assert [o.epsilon for o in outcomes] == pytest.approx([1.0, 4.0, 16.0], rel=1e-3)
    moved = [float(np.linalg.norm(o.x)) for o in outcomes]
    assert moved[0] > moved[1] > moved[2]  # less privacy, less noise
    single, _ = trained(base, data, tmp_path / "single")
    np.testing.assert_allclose(outcomes[1].x, single, rtol=1e-4, atol=1e-5)


# The tuner.


@pytest.mark.parametrize(
    ("losses", "rises"),
    [([1, 2, 4], False), ([1, 2, 4, 8], True), ([1, 2, 4, 4.1], False), ([9, 1, 2, 4, 8], True),
     ([1, 1.04, 1.08, 1.12], False), ([1, np.nan], True), ([1, np.inf], True), ([1], False)],
)  # fmt: skip
def test_three_rises_in_a_row_are_too_many(losses, rises):
    assert keeps_rising(losses, 3, 1.05) == rises


def steep_data() -> FederatedData:
    """A quadratic whose descent diverges above a step of about 2 / 25."""
    rng = np.random.default_rng(0)

    def silo(i: int) -> SiloData:
        x = 5 * rng.choice([-1.0, 1.0], (30, 3)).astype(np.float32)
        return SiloData(f"silo {i}", x, x @ np.ones(3, np.float32))

    return FederatedData("steep", (silo(0), silo(1)), None, "regression", (), ())


def test_the_search_takes_the_first_step_size_that_does_not_diverge(data):
    config = parse_config({"model": {"kind": "linear"}, "algorithm": {"name": "gd", "rounds": 12}})
    steps, found = search_step_size(config, data=steep_data(), every=2)
    assert found.tried == [0.5 / 2**k for k in range(len(found.tried))]
    assert steps == found.tried[-1] and len(found.tried) > 2
    assert found.selection == NOT_PRIVATE == "not private: selected on private data"
    grid = {"algorithm.step_size": [steps, 2 * steps]}
    base = with_values(config, {"run.every": 2}).model_dump(exclude_unset=True)
    good, bad = sweep(parse_config(base | {"sweep": {"grid": grid}}), data=steep_data())
    assert [row["round"] for row in found.history] == [row["round"] for row in good.history]
    np.testing.assert_allclose(found.x, good.x, rtol=1e-4)
    assert found.history[-1]["objective"] < found.history[0]["objective"]
    losses = [row["objective"] for row in bad.history]
    assert any(keeps_rising(losses[: t + 1], 3, 1.05) for t in range(len(losses)))


def test_a_search_that_finds_nothing_says_so(monkeypatch):
    monkeypatch.setattr("silodp.run.steps.HALVINGS", 1)
    config = parse_config({"model": {"kind": "linear"}, "algorithm": {"name": "gd", "rounds": 12}})
    with pytest.raises(ConfigError, match="rises with every step size"):
        search_step_size(config, data=steep_data(), start=64.0, every=2)


@pytest.mark.parametrize("name", ["mb-psgm", "sdp-spider", "dp-sgd"])
def test_a_batch_is_fixed_size_unless_stated(name):
    """A shuffler waits for an agreed number of messages, and they are accounted so."""
    facts = Facts((40, 40), ("a", "b"), parameters=6)
    plan = make_plan(case(name, "shuffled", batch=8, weights="equal"), facts)
    assert {type(stream.batch).__name__ for stream in plan.releases(0) if not stream.local} == {"FixedSize"}


def test_messages_of_two_batch_sizes_are_not_accounted_as_one():
    facts = Facts((40, 40), ("a", "b"), parameters=6)
    with pytest.raises(ConfigError, match="share one batch under a shuffler"):
        make_plan(case("spider", "shuffled", batch=4, batch_difference=16, weights="equal"), facts)


UNEQUAL = Facts((400, 250, 310), ("a", "b", "c"), parameters=6)
SHARED: dict[str, Any] = {"batch_share": 0.2, "restart": 5, "rounds": 10, "weights": "size"}


@pytest.mark.parametrize("name", ["sdp-prox-svrg", "sdp-spider"])
def test_sums_take_the_same_part_of_silos_of_different_sizes(name):
    """Alg. 8 with K < n: full batches weigh silos by size, and so must the differences' batches."""
    plan = make_plan(case(name, "shuffled", **SHARED), UNEQUAL)
    difference = next(s for s in plan.releases(1) if s.name == "difference")
    assert difference.batch.sampling(250).rate == pytest.approx(0.2)
    sent = np.array(plan.declared.divisors("difference"))
    assert sent / sent.sum() == pytest.approx(np.array(plan.facts.weights))
    assert all(plan.epsilon(i) <= 4.0 * (1 + 1e-6) for i in range(3))


def test_a_share_is_drawn_at_its_rate_in_every_silo(data):
    config = case("sdp-prox-svrg", "shuffled", batch_share=0.4, weights="size", clip_difference=None, restart=2)
    prepared = prepare(config, data)
    rule = prepared.plan.releases(0)[1].batch
    for silo, size in enumerate(data.sizes):
        records = jnp.zeros((40, 1))

        def drawn(round, size=size, silo=silo, records=records):
            coins = SeededRandomness(party_key(jax.random.key(1), round, silo))
            batch = rule.draw(
                SimpleNamespace(records=records, size=jnp.int32(size), round=round, randomness=coins), "d"
            )
            return batch.weights.sum(), batch.divisor

        counts, divisors = jax.vmap(drawn)(jnp.arange(2000))
        assert float(divisors[0]) == pytest.approx(0.4 * size)
        assert float(counts.mean()) == pytest.approx(0.4 * size, abs=5 * math.sqrt(0.24 * size / 2000))


@pytest.mark.parametrize(
    ("name", "trust", "options", "words"),
    [
        ("spider", "untrusted", {"batch_share": 0.2}, "batches have an agreed size; give batch"),
        ("mb-psgm", "shuffled", {"batch_share": 0.2}, "batches have an agreed size; give batch"),
        ("sdp-spider", "shuffled", SHARED | {"batch_share": 0.001}, "draws less than one of the 250 records"),
        ("sdp-spider", "shuffled", SHARED | {"batch": 8}, "goes without batch and sampling"),
    ],
)
def test_a_share_is_for_sums_of_some_records(name, trust, options, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(case(name, trust, **options), UNEQUAL)
