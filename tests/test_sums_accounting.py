"""What sums of discrete Gaussians cost: by exact convolution in small cases, and against an independent accountant."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

import silodp
from silodp.channels.grids import hidden_by, shares_for
from silodp.facts import Facts
from silodp.plan.certificate import silo_statement
from silodp.plan.make import make_plan
from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import Full, Poisson, Releases, Spent
from silodp.privacy.sums import LOSS, LOST, ROUNDING, fewest_steps


def discrete(std: float, reach: int) -> np.ndarray:
    places = np.arange(-reach, reach + 1)
    weights = np.exp(-(places**2) / (2 * std**2))
    return weights / weights.sum()


def rounded(std: float, reach: int) -> np.ndarray:
    places = np.arange(-reach, reach + 1)
    near, far = (np.abs(places) - 0.5) / std, (np.abs(places) + 0.5) / std
    return norm.sf(near) - norm.sf(far)


def loss_at(std: float, dimension: int) -> float:
    """The loss of a release whose noise has so many steps."""
    return LOSS * (fewest_steps(dimension) / std) ** 2


@pytest.mark.parametrize("std", [2.0, 8.0, 30.0])
def test_one_discrete_gaussian_is_within_the_stated_ratio_of_the_rounded_one(std):
    reach = int(9 * std)
    places = np.arange(-reach, reach + 1)
    ratio = np.log(discrete(std, reach) / rounded(std, reach))
    assert (ratio <= 1 / (23 * std**2)).all()
    assert (ratio >= -(places**2) / (24 * std**4) - 1e-12).all()
    assert ratio.max() > 0.9 / (24 * std**2)  # the bound is no larger than it must be


@pytest.mark.parametrize("shares", [(0.8, 0.8), (0.7, 1.1, 0.9), (1.3, 0.8, 0.8, 2.0)])
def test_a_sum_of_discrete_gaussians_is_within_the_stated_ratio_of_one(shares):
    reach = 60
    total = discrete(shares[0], reach)
    for share in shares[1:]:
        total = np.convolve(total, discrete(share, reach))
    std = math.hypot(*shares)
    middle = total.size // 2
    near = slice(middle - int(5 * std), middle + int(5 * std) + 1)
    one = discrete(std, middle)
    apart = np.abs(np.log(total[near] / one[near])).max()
    assert apart <= 5 * (len(shares) - 1) * math.exp(-(math.pi**2) * min(shares) ** 2)
    assert apart > 1e-6  # small shares do differ


@pytest.mark.parametrize(("steps", "moved"), [(12.0, 3), (80.0, 90), (400.0, 300)])
def test_delta_of_a_small_sum_is_below_the_accountants_and_near_it(steps, moved):
    """Exactly: the hockey-stick divergence between a sum of three discrete Gaussians and itself, moved."""
    share, reach = steps / math.sqrt(3), int(12 * steps)
    total = np.convolve(np.convolve(*[discrete(share, reach)] * 2), discrete(share, reach))
    here, there = np.append(total, np.zeros(moved)), np.append(np.zeros(moved), total)
    spent = [Spent(Releases("value", 1, Full(), loss=loss_at(steps, 1), lost=LOST), steps / moved)]
    for epsilon in (0.3, 1.0, 2.5):
        exact = np.maximum(here - math.exp(epsilon) * there, 0).sum()
        told = accountant.delta(spent, epsilon)
        assert exact <= told
        if loss_at(steps, 1) < 0.01:
            assert told < exact * (1 + 20 * loss_at(steps, 1))


@pytest.mark.parametrize("moved", [(30, 0), (20, 15), (9, 9)])
def test_delta_of_two_numbers_or_of_two_releases_is_below_the_accountants_and_near_it(moved):
    """Exactly, over the plane: two coordinates of one release, or one of two, each the sum of three shares."""
    steps, reach = 40.0, 7 * 40
    share = discrete(steps / math.sqrt(3), reach)
    total = np.convolve(np.convolve(share, share), share)[2 * reach : -2 * reach]
    here = np.outer(*(np.append(total, np.zeros(move)) for move in moved))
    there = np.outer(*(np.append(np.zeros(move), total) for move in moved))
    line = lambda name, by, d: Spent(Releases(name, 1, Full(), loss=loss_at(steps, d), lost=LOST), steps / by)
    together = [line("value", math.hypot(*moved), 2)]
    apart = [line(f"number {i}", move, 1) for i, move in enumerate(moved) if move]
    for epsilon in (0.2, 1.0):
        exact = np.maximum(here - math.exp(epsilon) * there, 0).sum()
        for spent in (together, apart):
            assert exact <= accountant.delta(spent, epsilon)
            plain = [replace(s, releases=replace(s.releases, loss=0.0, lost=0.0)) for s in spent]
            assert accountant.delta(plain, epsilon) == pytest.approx(exact, rel=5e-3)  # the loss apart, it is that


def test_epsilon_and_delta_are_inverse_and_calibration_meets_its_target():
    releases = [Releases("value", 30, Poisson(0.1), LOSS, LOST), Releases("difference", 20, Full(), 1e-4, 1e-30)]
    noise = accountant.calibrate(releases, 1.0, 1e-5)
    spent = [Spent(release, noise[release.stream]) for release in releases]
    found = accountant.epsilon(spent, 1e-5)
    assert 1.0 - 1e-4 < found <= 1.0 + 1e-9
    assert accountant.delta(spent, found) == pytest.approx(1e-5, rel=1e-4)
    plain = [Spent(replace(s.releases, loss=0.0, lost=0.0), s.multiplier) for s in spent]
    assert accountant.epsilon(plain, 1e-5) < found - 20 * 1e-4 * 0.9
    assert accountant.gdp(spent) is None
    assert accountant.group_epsilon(spent, 1e-5, 2) > found


def test_a_group_of_records_costs_what_gaussians_cost_and_the_loss():
    spent = [Spent(Releases("value", 10, Full(), 1e-3, LOST), 20.0)]
    mu = math.sqrt(10) / 20
    found = accountant.group_epsilon(spent, 1e-5, 3)
    assert found == pytest.approx(gaussian.epsilon_of(1e-5 * math.exp(-0.01), 3 * mu) + 0.01, rel=1e-6)


def test_what_is_lost_must_not_eat_delta():
    spent = [Spent(Releases("value", 10, Full(), 1e-3, 1e-6), 20.0)]
    assert accountant.epsilon(spent, 1e-5) == math.inf
    with pytest.raises(ValueError, match="out of reach"):
        accountant.calibrate([Releases("value", 10, Full(), 1.0, LOST)], 1.0, 1e-5)


# --- against dp-accounting's discrete Gaussian -----------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "count"), [(4.0, 10), (26.0, 50), (1.5, 1)])
def test_epsilon_is_that_of_dp_accountings_discrete_gaussian(multiplier, count):
    """On a grid that is coarse for us and fine for them. Their RDP of discrete Gaussians is an upper bound of both."""
    moved = 100
    spent = [Spent(Releases("value", count, Full(), loss_at(multiplier * moved, 1), LOST), multiplier)]
    ours = accountant.epsilon(spent, 1e-5)
    golden = pld.from_discrete_gaussian_mechanism(
        multiplier * moved, sensitivity=moved, value_discretization_interval=1e-4 / math.sqrt(count)
    ).self_compose(count)
    assert ours == pytest.approx(golden.get_epsilon_for_delta(1e-5), rel=5e-3)
    assert ours >= golden.get_epsilon_for_delta(1e-5) - 1e-3
    renyi = RdpAccountant()
    renyi.compose(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(multiplier), count))
    assert ours < renyi.get_epsilon(1e-5)


# --- shares, levels and limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("honest", [1, 2, 3, 5, 7])
def test_any_honest_shares_with_its_own_hide_a_silo_and_no_common_share_is_cheaper(honest):
    rng = np.random.default_rng(honest)
    for _ in range(50):
        needed = rng.lognormal(sigma=1.0, size=7)
        shares = shares_for(needed, honest)
        assert (hidden_by(shares, honest) >= needed * (1 - 1e-12)).all()
        total = np.sum(shares**2)
        assert total <= 7 / honest * needed.max() ** 2 * (1 + 1e-12)
        for common in np.linspace(0, needed.max() ** 2 / honest, 40):
            other = np.maximum(common, needed**2 - (honest - 1) * common)
            assert total <= other.sum() * (1 + 1e-12)


def test_the_smallest_shares_are_counted_on():
    shares = np.array([3.0, 1.0, 2.0, 5.0])
    np.testing.assert_allclose(hidden_by(shares, 2) ** 2, [9 + 1, 1 + 4, 4 + 1, 25 + 1])
    np.testing.assert_allclose(hidden_by(shares, 1), shares)


def planned(trust: str, sizes: tuple[int, ...], weights: str = "equal", **privacy):
    options = {"name": "dp-gd", "rounds": 20, "step_size": 0.1, "clip": 1.0, "weights": weights}
    config = silodp.Config(algorithm=options, privacy={"trust": trust, "epsilon": 1.0} | privacy)
    return make_plan(config, Facts(sizes, tuple(f"silo {i}" for i in range(len(sizes))), parameters=30))


BALANCED, UNBALANCED = (500,) * 6, (100, 200, 500, 500, 900, 4000)


@pytest.mark.parametrize("weights", ["equal", "size"])
@pytest.mark.parametrize("sizes", [BALANCED, UNBALANCED])
def test_limits_are_the_trusted_and_the_untrusted_server(sizes, weights):
    """Nobody colludes: a trusted server's noise. All others do: each silo's own. Rounding costs 0.4 % in both."""
    told = lambda trust, **privacy: planned(trust, sizes, weights, **privacy).std_of_average("value")
    assert told("aggregated", colluding=0) == pytest.approx((1 + ROUNDING) * told("trusted"), rel=1e-5)
    alone = told("aggregated", colluding=len(sizes) - 1)
    assert alone == pytest.approx((1 + ROUNDING) * told("untrusted"), rel=1e-5)
    between = [told("aggregated", colluding=t) for t in range(6)]
    assert between == sorted(between)


def test_half_of_the_silos_may_collude_unless_it_is_said():
    plan, half = planned("aggregated", BALANCED), planned("aggregated", BALANCED, colluding=3)
    assert plan.multipliers == half.multipliers
    ratio = plan.std_of_average("value") / planned("trusted", BALANCED).std_of_average("value")
    assert ratio == pytest.approx(math.sqrt(6 / 3) * (1 + ROUNDING), rel=1e-5)
    assert plan.std_over_clip("value").tolist() == [plan.std_of_average("value")] * 6
    fewer = planned("aggregated", BALANCED, missing=2)  # two openings must share an honest silo
    assert fewer.multipliers == planned("aggregated", BALANCED, missing=2, colluding=1).multipliers


@pytest.mark.parametrize("sizes", [BALANCED, UNBALANCED])
def test_the_certificates_three_levels(sizes):
    plan = planned("aggregated", sizes, colluding=2, missing=1)
    for silo in range(6):
        own = plan.spent(silo)
        assert plan.epsilon(silo) <= 1.0
        left = plan.noised.left_if(own, silo, plan.declared, 1e-5)
        assert list(left) == ["nobody_colludes", "2_of_6_silos_collude", "all_others_collude"]
        nobody, some, all_others = left.values()
        assert nobody < some < all_others or (sizes == UNBALANCED and nobody <= some <= all_others)
        assert some == pytest.approx(plan.epsilon(silo), rel=1e-5)
        alone = plan.multipliers["value"][silo] / (1 + ROUNDING)  # the own share over what an own record moves
        expected = gaussian.epsilon_of(1e-5, math.sqrt(20) / alone)
        assert all_others == pytest.approx(expected, rel=1e-4)
    assert max(plan.epsilon(i) for i in range(6)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("unit", [5, "user"])
def test_the_levels_are_of_as_many_records_as_the_promise(unit):
    plan = planned("aggregated", BALANCED, unit=unit)
    told = silo_statement(plan, 0, plan.spent(0))
    nobody, half, all_others = told["collusion"].values()
    assert half == pytest.approx(told["epsilon"], rel=1e-4) and nobody < half < all_others
    assert half > 5 * told["record_epsilon"]


@pytest.mark.parametrize("weights", ["equal", "size"])
@pytest.mark.parametrize(("colluding", "missing"), [(0, 0), (2, 1), (3, 0), (1, 2), (5, 0)])
def test_the_worst_coalition_leaves_each_silo_what_its_statement_says(colluding, missing, weights):
    """All coalitions one by one, and epsilon by another accountant."""
    plan = planned("aggregated", UNBALANCED, weights, colluding=colluding, missing=missing)
    weight = np.asarray(UNBALANCED) / sum(UNBALANCED) if weights == "size" else np.full(6, 1 / 6)
    record = weight * (2 + 2.0**-7) / np.asarray(UNBALANCED)  # moves the sum so far
    shares = np.asarray(plan.multipliers["value"]) * record
    for silo in range(6):
        others = [i for i in range(6) if i != silo]
        left = [
            np.linalg.norm(np.delete(shares, [*helping, *gone]))
            for helping in combinations(others, colluding)
            for gone in combinations([i for i in others if i not in helping], missing)
        ]
        worst = min(left) / (record[silo] * (1 + ROUNDING))
        golden = pld.from_gaussian_mechanism(worst / math.sqrt(20), value_discretization_interval=1e-4)
        assert plan.epsilon(silo) == pytest.approx(golden.get_epsilon_for_delta(1e-5), rel=2e-3)
        assert plan.epsilon(silo) <= 1.0


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"colluding": 6}, "together at most 5"),
        ({"colluding": 3, "missing": 3}, "together at most 5"),
        ({"colluding": 3, "missing": 2}, "could open two sums of a round; colluding [+] 2 missing must be below 6"),
        ({"epsilon": None, "gdp": 0.5}, "give epsilon and delta instead"),
    ],
)
def test_promises_that_cannot_be_kept_are_refused(privacy, words):
    with pytest.raises(silodp.ConfigError, match=words):
        planned("aggregated", BALANCED, **privacy)


def test_keys_of_this_trust_model_are_for_it_alone():
    for trust in ("trusted", "untrusted", "shuffled"):
        with pytest.raises(silodp.ConfigError, match="missing = 1: has no effect under trust"):
            planned(trust, BALANCED, missing=1)
