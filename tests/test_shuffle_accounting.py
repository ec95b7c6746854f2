"""Shuffled accounting: golden values, exact small cases, sampling, collusion, the paper's constants."""

import math
from dataclasses import replace
from functools import reduce
from itertools import product

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from silodp.algorithms.entry import Case
from silodp.algorithms.psgm import printed_level
from silodp.config import AlgorithmConfig
from silodp.errors import Inadmissible
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.privacy import accountant
from silodp.privacy.clones import Losses, Messages, Shuffled, shuffled_pair
from silodp.privacy.kinds import Full, Releases, Spent


def messages(round: Shuffled, rounds: int, first: Shuffled | None = None) -> Releases:
    """A record's messages over all rounds, and one of a first round of its own."""
    count = rounds * round.together + (first is not None)
    return Releases("message", count, Messages(round, first=first))


def epsilon(releases: Releases, eps0: float, delta: float, *others: Spent) -> float:
    return accountant.epsilon([Spent(releases, 1 / eps0), *others], delta)


def calibrated_eps0(target: float, delta: float, releases: Releases, *already: Spent) -> float:
    return 1 / accountant.calibrate([releases], target, delta, already=already)["message"]


def local_epsilon(eps0: float, count: int, delta: float) -> float:
    """Optimal composition of eps0-LDP messages of one record (Kairouz, Oh, Viswanath 2015), as a sum over heads."""
    truths = np.arange(count + 1)
    loss, mass = (2 * truths - count) * eps0, binom.pmf(truths, count, 1 / (1 + math.exp(-eps0)))
    excess = lambda level: float(np.sum(mass * -np.expm1(np.minimum(level - loss, 0)))) - delta
    return float(brentq(excess, 0.0, count * eps0))


@pytest.mark.parametrize(
    ("randomizer", "target", "releases", "golden"),
    [
        ("duchi", 0.4, 999, 0.4251),
        ("duchi", 1.6, 999, 1.2538),
        ("clones", 0.4, 999, 0.392),
        ("clones", 1.6, 999, 1.069),
        ("duchi", 0.4, 500, 0.580),
        ("duchi", 1.6, 500, 1.635),
    ],
)
def test_golden_levels(randomizer, target, releases, golden):
    eps0 = calibrated_eps0(target, 1e-5, messages(Shuffled(16_510, 1651, randomizer), releases))
    assert eps0 == pytest.approx(golden, rel=0.005)


@pytest.mark.parametrize(("target", "golden"), [(0.4, 0.4250), (1.6, 1.2534)])
def test_golden_levels_of_a_plan(target, golden):
    """500 values and 499 differences of one record: to four digits, through the plan that a run holds."""
    options = {"name": "mb-psgm", "rounds": 500, "clip": 1.0, "clip_difference": 1.0, "momentum": 0.1}
    plan = _plan(options | {"step_size": 0.1}, epsilon=target)
    (spent,) = plan.spent(0)
    assert (spent.releases.stream, spent.releases.count) == ("message", 999)
    assert 1 / spent.multiplier == pytest.approx(golden, abs=6e-5)


def _plan(options: dict, **privacy):
    tree = {"privacy": {"trust": "shuffled", "delta": 1e-5} | privacy, "algorithm": options | {"weights": "size"}}
    return make_plan(parse_config(tree), Facts((1651,) * 10, tuple("abcdefghij"), parameters=101))


def test_golden_clones():
    assert 0.1675 <= epsilon(messages(Shuffled(100_000, 1, "clones"), 1), 4.0, 1e-6) <= 0.1728


def test_calibration_spends_the_budget_and_not_more():
    parts = messages(Shuffled(5000, 500, rate=0.2, together=2), 60, first=Shuffled(5000, 500))
    eps0 = calibrated_eps0(1.0, 1e-5, parts)
    assert 0.998 < epsilon(parts, eps0, 1e-5) <= 1.0
    later = messages(Shuffled(5000, 500, rate=0.2, together=2), 60)
    assert epsilon(later, eps0, 1e-5) < 0.99, "the first round is part of it"


def _delta(law: Losses, level: float) -> float:
    positive = np.maximum(law.loss, level)
    return law.infinite + float(np.sum(law.mass * -np.expm1(level - positive)))


def _exact_shuffled_response_delta(others: list[int], eps0: float, level: float) -> float:
    """delta of shuffled randomized response, by enumeration: the view is the number of ones."""
    truth = 1 / (1 + math.exp(-eps0))
    laws = []
    for mine in (1, 0):
        law = np.zeros(len(others) + 2)
        for flips in product((0, 1), repeat=len(others) + 1):
            ones = sum(x ^ f for x, f in zip([mine, *others], flips, strict=True))
            law[ones] += math.prod(1 - truth if f else truth for f in flips)
        laws.append(law)
    return float(np.sum(np.maximum(laws[0] - math.exp(level) * laws[1], 0)))


@pytest.mark.parametrize("eps0", [0.5, 2.0])
@pytest.mark.parametrize("level", [0.0, 0.2, 0.7, 1.5])
def test_pair_dominates_exact_shuffled_response(eps0, level):
    # Duchi in one dimension is randomized response.
    for others in ([0] * 6, [1] * 6, [0, 1] * 3):
        exact = _exact_shuffled_response_delta(others, eps0, level)
        bound = _delta(Shuffled(7, 7).losses(eps0), level)
        assert exact <= bound + 1e-12
        assert bound <= _delta(Shuffled(7, 7, "clones").losses(eps0), level) + 1e-12


def _exact_privunit_delta(messages: int, eps0: float, share: float, level: float) -> float:
    """Disjoint half-spaces against the blanket, the record's message not pointed out: enumeration."""
    raised = math.expm1(eps0)
    blanket, total = 1 / (1 + raised * share), 0.0
    for clones in range(messages):
        size = clones + 1
        chance = math.comb(messages - 1, clones) * blanket**clones * (1 - blanket) ** (messages - size)
        for a in range(size + 1):
            for b in range(size + 1 - a):
                c = size - a - b
                ways = math.factorial(size) / (math.factorial(a) * math.factorial(b) * math.factorial(c))
                reference = ways * share ** (a + b) * (1 - 2 * share) ** c
                p, q = (blanket * (size + raised * x) / size for x in (a, b))
                total += chance * reference * max(0.0, p - math.exp(level) * q)
    return total


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5, 1.2])
def test_privunit_pair_dominates_the_exact_one(level):
    from silodp.privacy import halfspace

    eps0, messages = 2.0, 12
    law = Shuffled(messages, messages, "privunit", dimension=50).losses(eps0)
    share = halfspace.raised_share(halfspace.best_threshold(eps0, 50))
    exact = _exact_privunit_delta(messages, eps0, share, level)
    assert exact <= _delta(law, level) + 1e-12
    assert _delta(law, level) <= _delta(Shuffled(messages, messages, "clones").losses(eps0), level)
    # At share 1/2 the two analyses are Duchi's and agree.
    duchi = _exact_privunit_delta(messages, eps0, 0.5, level)
    assert duchi == pytest.approx(_delta(Shuffled(messages, messages).losses(eps0), level), abs=1e-12)


def test_grid_is_pessimistic_and_close():
    law = Shuffled(2000, 200).losses(1.0)
    first, grid = law.on_grid(law.scale / 24)
    on_grid = Losses((first + np.arange(grid.size)) * law.scale / 24, grid, law.infinite)
    assert grid.sum() == pytest.approx(law.mass.sum(), abs=1e-12)
    for level in np.linspace(0, 4 * law.scale, 37):
        assert _delta(on_grid, level) - _delta(law, level) + 1e-14 >= 0
        assert _delta(on_grid, level) == pytest.approx(_delta(law, level), rel=0.02, abs=1e-7)


def _gaussian(shift: float) -> Losses:
    edges = np.linspace(-12, 12 + shift, 40_001)
    middle = (edges[1:] + edges[:-1]) / 2
    return Losses(shift * middle - shift**2 / 2, np.diff(norm.cdf(edges - shift)), 0.0)


def test_sampling_reproduces_the_gaussian_golden_value():
    # 1,800 fixed-size steps, 16 of 1651, std 1.972 on the sum at clip 1: epsilon 3.
    law = _gaussian(2 / 1.972).sampled(16 / 1651)
    spent = law.pld(law.scale / 24).self_compose(1800).get_epsilon_for_delta(1e-5)
    assert spent == pytest.approx(3.0, rel=0.005)


def test_sampled_law_is_a_symmetric_probability():
    law = Shuffled(400, 40, together=2, rate=0.1).losses(1.0)
    assert law.mass.sum() + law.infinite == pytest.approx(1.0, abs=1e-9)
    assert (law.mass >= 0).all()
    assert np.sum(law.mass * np.exp(-law.loss)) == pytest.approx(1.0, abs=1e-9)


def test_two_messages_of_one_batch_are_sampled_as_a_pair():
    pair = epsilon(messages(Shuffled(200, 20, rate=0.05, together=2), 100), 2.0, 1e-5)
    split = epsilon(messages(Shuffled(200, 20, rate=0.05), 200), 2.0, 1e-5)
    assert pair > 1.05 * split  # two independent samplings would under-count
    full = epsilon(messages(Shuffled(200, 20, together=2), 100), 2.0, 1e-5)
    assert full == pytest.approx(epsilon(messages(Shuffled(200, 20), 200), 2.0, 1e-5), rel=0.005)


def test_sampling_helps_and_more_messages_help():
    base = epsilon(messages(Shuffled(1000, 100), 50), 1.0, 1e-5)
    assert epsilon(messages(Shuffled(1000, 100, rate=0.1), 50), 1.0, 1e-5) < 0.3 * base
    assert epsilon(messages(Shuffled(4000, 100), 50), 1.0, 1e-5) == pytest.approx(base / 2, rel=0.1)


def test_collusion_levels():
    options = {"name": "dp-gd", "rounds": 999, "clip": 1.0, "step_size": 0.1}
    plan = _plan(options, multipliers={"message": 1 / 0.425})
    assert plan.epsilon(0) == pytest.approx(0.4, rel=0.005)
    left = plan.channel.left_if(plan.spent(0), 0, plan.declared, 1e-5)
    own = epsilon(messages(Shuffled(1651, 1651, dimension=101), 999), 0.425, 1e-5)
    assert left == {
        "other_silos_collude": pytest.approx(own),
        "shuffler_colludes": pytest.approx(local_epsilon(0.425, 999, 1e-5), rel=0.005),
    }
    assert left["shuffler_colludes"] > 100
    assert local_epsilon(0.7, 1, 0.0) == pytest.approx(0.7)


def test_without_a_shuffler_the_pair_is_randomized_response():
    law = Shuffled(50, 5, rate=0.5, together=2).without_shuffler().losses(0.3)
    assert epsilon(messages(Shuffled(1, 1), 40), 0.3, 1e-5) == pytest.approx(local_epsilon(0.3, 40, 1e-5), rel=0.005)
    assert law.loss.max() == pytest.approx(0.6, rel=0.05)


def test_other_releases_are_composed():
    parts, local = messages(Shuffled(2000, 200), 20), Spent(Releases("local", 1, Full()), 1 / 0.3)
    assert epsilon(parts, 1.0, 1e-5, local) > epsilon(parts, 1.0, 1e-5)
    assert calibrated_eps0(2.0, 1e-5, parts, local) < calibrated_eps0(2.0, 1e-5, parts)
    with pytest.raises(ValueError, match="out of reach"):
        calibrated_eps0(0.5, 1e-5, parts, local)


def test_papers_constants_admit_no_level_in_its_own_experiment():
    for target in (0.4, 0.8, 1.6):
        reasons = refused_by_the_paper(psgm_case(target, 10, 1651, 500, None))
        assert any("sampling rate 1 " in reason for reason in reasons)
        assert any("eps0 >= 1" in reason for reason in reasons)
    # Sampling does not save it: the constant alone forbids eps0 >= 1.
    sampled = refused_by_the_paper(psgm_case(1.6, 10, 1651, 500, 165))
    assert any("budget" in reason for reason in sampled)


def psgm_case(target: float, silos: int, records: int, rounds: int, batch: int | None, **options) -> Case:
    return Case(AlgorithmConfig(name="mb-psgm", rounds=rounds, batch=batch, **options), target, 1e-5, records, silos)


def refused_by_the_paper(case: Case) -> tuple[str, ...]:
    with pytest.raises(Inadmissible, match="no noise is admissible") as none:
        printed_level(case)
    return none.value.reasons


def test_papers_constants_with_astronomic_data():
    (multiplier,) = printed_level(psgm_case(8.0, 1000, 10**8, 10, 10**6)).values()
    assert 1 / multiplier > 1
    assert epsilon(messages(Shuffled(10**6, 10**3, rate=0.01, together=2), 1), 1.0, 1e-5) < 8.0


def test_the_papers_local_steps_and_first_batch_count():
    steps = refused_by_the_paper(psgm_case(8.0, 1000, 10**8, 10, 10**6, local_steps=2))
    assert steps == ("Thm 4.1 gives the noise of local steps only up to a constant",)
    first = refused_by_the_paper(psgm_case(8.0, 1000, 10**8, 10, 10**6, batch_first=10**8))
    assert any("sampling rate 1 " in reason for reason in first)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": 3, "own": 4}, "own"),
        ({"messages": 3, "own": 1, "rate": 0.0}, "rate"),
        ({"messages": 3, "own": 1, "together": 0}, "together"),
        ({"messages": 3, "own": 1, "randomizer": "privunit"}, "dimension"),
    ],
)
def test_bad_settings_are_named(arguments, field):
    with pytest.raises(ValueError, match=field):
        Shuffled(**arguments)


def test_clone_levels_round_down():
    coarse = shuffled_pair(3000, 1.0, 0.5, 1.0)
    exact_mean = sum(
        p * _delta(shuffled_pair(int(k) + 1, 1.0, 1.0, 1.0), 0.0) for k, p in zip(*_binomial(2999, 0.5), strict=True)
    )
    assert exact_mean <= _delta(coarse, 0.0) <= 1.002 * exact_mean


def _binomial(count: int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    values = np.arange(1350, 1650)
    return values, binom.pmf(values, count, chance)


@pytest.mark.parametrize(("count", "rounds", "rest"), [(1, 0, 1), (2, 1, 0), (5, 2, 1), (6, 3, 0), (7, 3, 1)])
@pytest.mark.parametrize("first", [None, Shuffled(60, 12, rate=0.5)], ids=["alike", "first"])
def test_every_message_is_composed(count, rounds, rest, first):
    """Composed by hand: whole rounds of two messages, what is left of one, and the first. Within a hair: one message
    more or less is far outside, where a golden level leaves half a percent."""
    round, eps0, interval = Shuffled(200, 40, rate=0.2, together=2), 1.5, 0.003
    parts = [(round, rounds), (replace(round, together=1), rest), *([] if first is None else [(first, 1)])]
    by_hand = [part.losses(eps0).pld(interval).self_compose(n) for part, n in parts if n]
    expected = reduce(lambda one, other: one.compose(other), by_hand)
    kind = Messages(round, first=first)
    composed = kind.pld(1 / eps0, count + (first is not None), interval)
    for level in (0.05, 0.3, 1.0):
        assert composed.get_delta_for_epsilon(level) == pytest.approx(expected.get_delta_for_epsilon(level), rel=1e-9)
    fewer = kind.pld(1 / eps0, count + (first is not None) - 1, interval) if count > 1 else None
    if fewer is not None:
        assert fewer.get_delta_for_epsilon(0.3) < 0.95 * composed.get_delta_for_epsilon(0.3)


def test_a_record_of_one_pass_sends_in_one_round_only():
    round, interval = Shuffled(200, 40, together=2), 0.003
    deltas = [Messages(round, once=True).pld(1.0, n, interval).get_delta_for_epsilon(0.3) for n in (2, 4, 20)]
    assert deltas == pytest.approx([Messages(round).pld(1.0, 2, interval).get_delta_for_epsilon(0.3)] * 3)
