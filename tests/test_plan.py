"""The plan: facts and a config in, what is released and its noise out, and JSON that another party believes or not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.algorithms.gradient import GradientDescent
from silodp.channels import Channel, Compressed, Shuffled, Summed, Trusted, Untrusted
from silodp.compressors import RandK
from silodp.config import Config, PrivacyConfig
from silodp.errors import ConfigError
from silodp.facts import Facts, Stream, turns
from silodp.parse import parse_config
from silodp.plan.account import account
from silodp.plan.calibrate import Part, noise_of
from silodp.plan.make import make_plan, resolved
from silodp.plan.parts import settled_facts
from silodp.plan.plan import Plan, channel_lines
from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import Full as Gaussian
from silodp.privacy.kinds import Masked, Spent
from silodp.prox import build_prox
from silodp.sampling import MOVES, BatchRule, Full
from tests.cases import CASES, case

FACTS = Facts((40, 25, 31), ("a", "b", "c"), parameters=6)
EPSILON, DELTA = 4.0, 1e-4  # of tests.cases
MU = gaussian.mu_of(EPSILON, DELTA)


def planned(name: str, trust: str, **changes: Any) -> Plan:
    return make_plan(case(name, trust, **changes), FACTS)


# --- what a plan is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trust", "changes", "channel"),
    [
        ("dp-gd", "trusted", {}, Trusted),
        ("dp-gd", "untrusted", {}, Untrusted),
        ("dp-gd", "shuffled", {}, Shuffled),
        ("dp-gd", "shuffled", {"randomizer": "pvec"}, Summed),
        ("soteria-gd", "untrusted", {}, Compressed),
    ],
)
def test_every_silo_gets_the_target_and_no_more(name, trust, changes, channel):
    plan = planned(name, trust, **changes)
    assert type(plan.channel) is type(plan.noised) is channel
    assert not plan.channel.multipliers and plan.noised.multipliers.keys() == plan.multipliers.keys()
    assert [stage.name for stage in plan.stages] == ["train"] and plan.stages[0].share == 1.0
    assert plan.streams == ("value",) and plan.releases(0)[0].count == 6
    epsilons = [plan.epsilon(i) for i in range(3)]
    assert max(epsilons) == pytest.approx(EPSILON, rel=1e-4)
    for line, noise in plan.noised.multipliers.items():  # float32 must not make less of it
        assert (np.asarray(noise, np.float64) >= np.asarray(plan.multipliers[line])).all()


def test_untrusted_noise_is_each_silos_own():
    plan = planned("dp-gd", "untrusted")
    assert plan.multipliers["value"] == pytest.approx([math.sqrt(6) / MU] * 3)
    np.testing.assert_allclose(plan.std_over_clip("value"), math.sqrt(6) / MU * MOVES / np.array(FACTS.sizes))


@pytest.mark.parametrize(("weights", "worst"), [("equal", (1,)), ("size", (0, 1, 2))])
def test_trusted_noise_serves_the_worst_silo(weights, worst):
    """Weighted alike, a record of the smallest silo moves the average most; weighted by size, all move it alike."""
    plan = planned("dp-gd", "trusted", weights=weights)
    protecting = plan.protecting("value")
    needed = math.sqrt(6) / MU
    assert plan.multipliers["value"] == pytest.approx([needed] * 3)
    for i, size in enumerate(FACTS.sizes):
        more = 1.0 if i in worst else size / 25
        assert protecting[i] == pytest.approx(needed * more)
        assert plan.epsilon(i) == pytest.approx(EPSILON) if i in worst else plan.epsilon(i) < 0.9 * EPSILON
    moves = max(w * MOVES / n for w, n in zip(plan.facts.weights, FACTS.sizes, strict=True))
    np.testing.assert_allclose(plan.std_over_clip("value"), needed * moves)


BOUNDS = {"smoothness": 0.1, "gradient_bound": 1.0, "diameter": 5.0}


@pytest.mark.parametrize(
    ("name", "trust", "changes", "privacy", "weights"),
    [
        ("dp-gd", "untrusted", {}, {}, "size"),
        ("dp-sgd", "trusted", {}, {}, "size"),
        ("mu2", "untrusted", {}, {}, "size"),
        ("mu2", "untrusted", BOUNDS | {"theory": True}, {}, "equal"),
        ("mu2", "untrusted", BOUNDS | {"theory": True, "weights": "size"}, {}, "size"),
        ("spider", "untrusted", {}, {"calibration": "paper"}, "equal"),
        ("dp-gd", "trusted", {}, {"unit": "user"}, "equal"),  # a silo's weight is what it can move
        ("dp-gd", "shuffled", {}, {}, "size"),
        ("dp-gd", "shuffled", {}, {"calibration": "paper"}, "size"),
        ("dp-sgd", "shuffled", {"sampling": "fixed"}, {}, "equal"),  # as many messages from every silo
        ("auto", "trusted", {}, {}, "size"),
    ],
)
def test_silos_count_by_their_size_unless_a_paper_or_a_shuffler_asks_for_more(name, trust, changes, privacy, weights):
    tree = case("dp-gd" if name == "auto" else name, trust, **changes).model_dump(exclude_unset=True)
    tree["algorithm"] = {"name": "auto"} if name == "auto" else tree["algorithm"]
    tree["privacy"] |= privacy
    found = resolved(parse_config(tree), FACTS)
    assert found.algorithm.weights == weights
    share = np.array(FACTS.sizes) / sum(FACTS.sizes) if weights == "size" else np.full(3, 1 / 3)
    np.testing.assert_allclose(settled_facts(found, FACTS).weights, share)
    assert resolved(found, FACTS).algorithm.weights == weights  # what a plan says is taken as it is


def test_a_papers_noise_is_judged_with_the_papers_weights():
    """Of a run by size its claim would be somebody else's."""
    options = {"name": "dp-sgd", "rounds": 20, "batch": 5, "sampling": "fixed", "step_size": 0.1, "clip": 1.0}
    tree = {"data": {"sizes": [400, 100, 50]}, "privacy": {"trust": "trusted", "epsilon": 2.0}, "algorithm": options}
    printed = tree | {"privacy": tree["privacy"] | {"calibration": "paper"}}
    beside, alone = account(tree)["paper"], account(printed)["paper"]
    assert beside["true_epsilon"] == pytest.approx(alone["true_epsilon"])
    by_size = {"algorithm": options | {"weights": "size"}}
    assert account(tree | by_size)["paper"]["reasons"] == [
        "papers weigh silos alike, whatever their sizes; leave algorithm.weights out"
    ]
    with pytest.raises(ConfigError, match=r"calibration = 'paper': .* papers weigh silos alike"):
        account(printed | by_size)


@pytest.mark.parametrize("given", [{"diameter": 4.0}, {"prox": {"kind": "ball", "radius": 2.0}}])
def test_an_account_counts_silos_as_the_run_does(given):
    """Numbers that an account may do without, and puts in itself, do not ask for a theorem."""
    options = {
        "name": "mu2",
        "rounds": 5,
        "step_size": 0.1,
        "clip": 1.0,
        "smoothness": 0.1,
        "gradient_bound": 1.0,
    } | given
    tree = {"data": {"sizes": [400, 100, 50]}, "privacy": {"trust": "trusted", "epsilon": 2.0}, "algorithm": options}
    run = make_plan(parse_config(tree), Facts((400, 100, 50), ("a", "b", "c"), parameters=6))
    assert [silo["epsilon"] for silo in account(tree)["silos"]] == pytest.approx([run.epsilon(i) for i in range(3)])


def test_a_trust_model_that_is_no_channel_is_refused():
    tree = {"privacy": {"epsilon": 1.0, "trust": "silodp.sampling:Full"}, "algorithm": {"name": "dp-sgd", "batch": 4}}
    with pytest.raises(ConfigError, match=r"is no subclass of silodp\.Channel"):
        make_plan(parse_config(tree), FACTS)


def test_trusted_noise_does_not_count_on_absent_silos():
    """With some silos absent the average weighs others more: nobody is promised more than the nominal noise."""
    plan = planned("dp-gd", "trusted", participation=2)
    np.testing.assert_array_equal(plan.protecting("value"), plan.multipliers["value"])
    assert plan.facts.answering == 2


def test_a_stream_that_nobody_uses_gets_infinite_noise():
    plan = planned("diff2-gd", "untrusted", restart=1)
    assert [stream.count for stream in plan.releases(0)] == [6, 0]
    assert plan.multipliers["difference"] == (math.inf,) * 3
    assert plan.multipliers["value"] == planned("dp-gd", "untrusted").multipliers["value"]  # it costs nothing
    assert np.isinf(np.asarray(plan.noised.multipliers["difference"])).all()
    assert plan.to_json()["stages"][0]["multipliers"]["difference"] == [None] * 3


def test_a_run_without_a_target_has_no_noise():
    plan = planned("dp-gd", "untrusted", private=False)
    assert not plan.private and plan.multipliers == {} and plan.noised.multipliers == {}


@pytest.mark.parametrize(
    ("name", "trust"), [("ce-psgm", "trusted"), ("diff2-bvr-l-sgd", "trusted"), ("ce-psgm", "shuffled")]
)
def test_local_noise_takes_what_shared_noise_leaves(name, trust):
    """Shared noise serves the silo that needs most of it: the others may spend the rest on their own steps."""
    weights = "size" if trust == "shuffled" else "equal"
    plan, alone = (planned(name, each, weights=weights) for each in (trust, "untrusted"))
    epsilons = [plan.epsilon(i) for i in range(3)]
    assert epsilons == pytest.approx([EPSILON] * 3, rel=1e-4) and max(epsilons) <= EPSILON
    less = np.array(plan.multipliers["local"]) < 0.999 * np.array(alone.multipliers["local"])
    assert less.tolist() == ([True, False, True] if trust == "trusted" else [False, True, True])


def test_running_sums_are_charged_in_every_round():
    """mu2 uses a record once, but its sums keep it: the record of the first round is in all six releases."""
    plan = planned("mu2", "untrusted")
    assert plan.multipliers["value"] == pytest.approx([math.sqrt(6) / MU] * 3)


def test_a_gdp_target_is_shared_in_the_same_way():
    config = case("ce-psgm", "trusted", batch_local=None).model_dump(exclude_unset=True)
    config["privacy"] = {"trust": "trusted", "gdp": 1.5}
    plan = make_plan(parse_config(config), FACTS)
    assert [accountant.gdp(plan.spent(i)) for i in range(3)] == pytest.approx([1.5] * 3)


# --- the facts ----------------------------------------------------------------------------------------------


def some_of(scheduled: bool) -> Facts:
    return Facts((40, 25, 31, 10), tuple("abcd"), rounds=20, participation=2, seed=5, scheduled=scheduled)


def test_who_is_present_is_a_public_draw():
    facts = some_of(scheduled=True)
    rounds = [facts.present(r) for r in range(20)]
    assert all(len(set(present)) == 2 and present == sorted(present) for present in rounds)
    assert len({tuple(present) for present in rounds}) >= 4  # of 6 pairs
    assert rounds[:3] == [some_of(scheduled=False).present(r) for r in range(3)]
    for silo in range(4):
        assert list(facts.rounds_of(silo)) == [r for r in range(20) if silo in rounds[r]]


def test_how_many_are_present_may_be_a_public_draw_too():
    """Lowy et al., Assumption 6; a plan counts on the fewest."""
    facts = replace(some_of(scheduled=True), participation=(1, 3), rounds=60)
    rounds = [facts.present(r) for r in range(60)]
    assert all(present == sorted(set(present)) for present in rounds)
    counts = [len(present) for present in rounds]
    assert min(counts.count(m) for m in (1, 2, 3)) >= 10 and sum(counts.count(m) for m in (1, 2, 3)) == 60
    for silo in range(4):
        assert list(facts.rounds_of(silo)) == [r for r in range(60) if silo in rounds[r]]
    assert facts.fewest(facts.sizes) == 10 and not facts.everyone
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("trust", "participation", "words"),
    [
        ("trusted", (1, 3), "a random number of silos goes with trust 'untrusted'"),
        ("untrusted", (1, 4), "exceeds the 3 silos"),
        ("untrusted", (3, 2), "give a smaller and a larger number, or one"),
    ],
)
def test_a_random_number_of_silos_that_cannot_be_is_refused(trust, participation, words):
    with pytest.raises(ConfigError, match=words):
        planned("dp-gd", trust, participation=participation)


def test_without_a_schedule_a_silo_may_be_asked_in_every_round():
    facts = some_of(scheduled=False)
    assert list(facts.rounds_of(2)) == list(range(20))
    assert not facts.counts_exactly and some_of(scheduled=True).counts_exactly
    everyone = Facts((3, 4), ("a", "b"), rounds=2, scheduled=True)
    assert list(everyone.rounds_of(1)) == [0, 1] and everyone.present(1) == [0, 1] and everyone.everyone


def test_the_fewest_that_can_answer():
    facts = some_of(scheduled=False)
    assert facts.fewest(facts.sizes) == 10 + 25
    assert facts.fewest_beside(0, facts.sizes) == 10
    assert facts.fewest_beside(3, facts.sizes) == 25  # itself is not beside itself
    assert FACTS.fewest(FACTS.sizes) == 96 and FACTS.fewest_beside(0, FACTS.sizes) == 56


def test_a_schedule_is_charged_and_nothing_else():
    fixed = planned("dp-gd", "untrusted", participation=2, schedule="fixed")
    counts = [fixed.releases(i)[0].count for i in range(3)]
    assert counts == [len(fixed.facts.rounds_of(i)) for i in range(3)] and sum(counts) == 2 * 6
    assert fixed.multipliers["value"] == pytest.approx([math.sqrt(count) / MU for count in counts])


# --- JSON ---------------------------------------------------------------------------------------------------


def with_given_noise(config: Config) -> Config:
    """The same run with noise that need not be searched for."""
    if not config.privacy.private:
        return config
    tree = config.model_dump(exclude_unset=True)
    bare = {key: value for key, value in tree["privacy"].items() if key != "epsilon"}
    open_plan = make_plan(parse_config(tree | {"privacy": bare}), FACTS)
    lines = sorted(channel_lines(open_plan.channel, open_plan.declared))
    noise = {line: 2.0 + 0.3 * k for k, line in enumerate(lines)}
    return parse_config(tree | {"privacy": bare | {"multipliers": noise}})


def written(plan: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(plan.to_json(), allow_nan=False))


@pytest.mark.parametrize(("name", "trust"), CASES)
def test_json_brings_the_same_plan(name, trust):
    plan = make_plan(with_given_noise(case(name, trust)), FACTS)
    assert Plan.from_json(written(plan)) == plan


@pytest.fixture(scope="module")
def told() -> str:
    return json.dumps(written(planned("diff2-gd", "untrusted", participation=2)))


def stage(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["stages"][0]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "weights": lambda tree: tree["facts"].update(weights=[0.8, 0.1, 0.1]),
    "rounds": lambda tree: tree["facts"].update(rounds=5),
    "participation": lambda tree: tree["facts"].update(participation=None),
    "seed": lambda tree: tree["facts"].update(seed=4),
    "scheduled": lambda tree: tree["facts"].update(scheduled=True),
    "a silo less": lambda tree: tree["facts"].update(sizes=[40, 25], names=["a", "b"], weights=[0.5, 0.5]),
    "a name less": lambda tree: tree["facts"].update(names=["a", "b"]),
    "no records": lambda tree: tree["facts"].update(sizes=[40, 25, 0]),
    "part of a record": lambda tree: tree["facts"].update(sizes=[40, 25, 30.5]),
    "unknown fact": lambda tree: tree["facts"].update(secret=1),
    "unknown key": lambda tree: tree.update(secret=1),
    "unknown key of a stage": lambda tree: stage(tree).update(secret=1),
    "unknown key of the config": lambda tree: tree["config"]["run"].update(secret=1),
    "no chosen": lambda tree: tree.pop("chosen"),
    "no stage": lambda tree: tree.update(stages=[]),
    "two stages": lambda tree: tree["stages"].append(tree["stages"][0]),
    "another stage": lambda tree: stage(tree).update(name="tune"),
    "a share": lambda tree: stage(tree).update(share=0.5),
    "no noise": lambda tree: stage(tree).update(multipliers={}),
    "a stream without noise": lambda tree: stage(tree)["multipliers"].pop("difference"),
    "noise of another stream": lambda tree: stage(tree)["multipliers"].update(other=[1.0] * 3),
    "noise for two silos": lambda tree: stage(tree)["multipliers"].update(value=[1.0] * 2),
    "negative noise": lambda tree: stage(tree)["multipliers"].update(value=[5.0, 5.0, -5.0]),
    "NaN": lambda tree: stage(tree)["multipliers"].update(value=[5.0, 5.0, math.nan]),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_plan_that_does_not_fit_is_refused(told, change):
    tree = json.loads(told)
    assert Plan.from_json(tree).private
    HOSTILE[change](tree)
    with pytest.raises(ValueError, match=r"plan|facts|run\.secret"):
        Plan.from_json(tree)


# --- two stages in one budget -------------------------------------------------------------------------------


class Named(GradientDescent):
    """Descent whose streams have names and counts of the test's choice."""

    counts: tuple[tuple[str, int], ...] = eqx.field(static=True, default=())

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        batch: BatchRule = Full()
        return [Stream(name, count, batch) for name, count in self.counts]


def part(name: str, share: float, **counts: int) -> Part:
    facts = Facts((40, 25), ("a", "b"), parameters=6, weights=(0.5, 0.5), rounds=6)
    return Part.of(name, share, Named(jnp.float32(1.0), build_prox("none"), 1.0, counts=tuple(counts.items())), facts)


def two_stages(one: Part, other: Part, channel: Channel | None = None, **privacy: Any) -> dict[str, float]:
    """Multipliers of the first silo by stream, after checking that all together meet the target."""
    channel, target = channel or Untrusted(), PrivacyConfig(epsilon=EPSILON, delta=DELTA, **privacy)
    noise = noise_of([one, other], channel, target)
    merged = {line: each[0] for stage in noise for line, each in stage.items()}
    releases = [*one.accounted(channel, 0), *other.accounted(channel, 0)]
    spent = [Spent(each, merged[each.stream]) for each in releases if each.count]
    assert accountant.epsilon(spent, DELTA) == pytest.approx(EPSILON, rel=1e-4)
    return merged


def mu_squared(noise: dict[str, float], **counts: int) -> dict[str, float]:
    return {name: count / noise[name] ** 2 / MU**2 for name, count in counts.items()}


def test_two_stages_share_a_budget_as_asked():
    noise = two_stages(part("tune", 0.3, tuned=3), part("train", 0.7, value=20))
    assert mu_squared(noise, tuned=3, value=20) == pytest.approx({"tuned": 0.3, "value": 0.7})


def test_a_stage_divides_its_own_share():
    noise = two_stages(part("tune", 0.3, tuned=3), part("train", 0.7, value=5, difference=15), split=0.5)
    shares = mu_squared(noise, tuned=3, value=5, difference=15)
    assert shares == pytest.approx({"tuned": 0.3, "value": 0.35, "difference": 0.35})


def test_an_unused_stream_takes_nothing_from_its_stage():
    noise = two_stages(part("tune", 0.3, tuned=3), part("train", 0.7, value=6, difference=0))
    assert noise.pop("difference") == math.inf
    assert mu_squared(noise, tuned=3, value=6) == pytest.approx({"tuned": 0.3, "value": 0.7})


def test_masked_stages_meet_the_target_together():
    """Not plainly Gaussian: the shares are a guide, the composed epsilon is the target all the same."""
    channel = Compressed(compressor=RandK(2), mask_amplification=True)
    noise = two_stages(part("tune", 0.3, tuned=3), part("train", 0.7, value=20), channel)
    assert isinstance(part("tune", 0.3, tuned=3).accounted(channel, 0)[0].sampling, Masked)
    assert isinstance(part("tune", 0.3, tuned=3).accounted(Untrusted(), 0)[0].sampling, Gaussian)
    assert noise["value"] < two_stages(part("tune", 0.3, tuned=3), part("train", 0.7, value=20))["value"]


def test_stages_with_a_stream_in_common_are_refused():
    with pytest.raises(ValueError, match="stage 'train': stream 'value' stands in another stage too"):
        two_stages(part("tune", 0.3, value=3), part("train", 0.7, value=20))
    with pytest.raises(ValueError, match="stream 'value' stands in another stage too"):  # used or not
        two_stages(part("tune", 0.3, value=0, tuned=3), part("train", 0.7, value=20))


@pytest.mark.parametrize("rounds", [range(0), range(1), range(17), range(3, 40), (0, 3, 4, 9, 12), ()])
def test_turns_are_counted_without_looking_at_every_round(rounds):
    for period in (1, 2, 3, 7):
        for first in range(period):
            assert turns(rounds, period, first) == sum(r % period == first for r in rounds)
    assert turns(range(10**15), 10) == 10**14
