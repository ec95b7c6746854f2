"""The accountants against dp-accounting, Monte Carlo, their own monotonicity, and seeded mistakes."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import (
    Disjoint,
    FixedSize,
    Full,
    Masked,
    Poisson,
    Releases,
    Sampling,
    Spent,
    TwoLevel,
)  # fmt: skip
from silodp.privacy.mixture import mirrored
from silodp.privacy.selection import Trials, selection_epsilon

REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
DRAWS = 1_000_000


def spent(sampling: Sampling, multiplier: float, count: int = 1, stream: str = "value") -> Spent:
    return Spent(Releases(stream, count, sampling), multiplier)


# ---- agreement with dp-accounting -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "multiplier", "count"), [(0.01, 0.6, 2000), (0.2, 1.5, 50), (1.0, 3.0, 20)])
def test_poisson_agrees_with_dp_accounting(rate, multiplier, count):
    library = PLDAccountant(REPLACE, value_discretization_interval=1e-4)
    event = dp_accounting.GaussianDpEvent(2 * multiplier)  # its multiplier is in units of C, not 2C
    library.compose(dp_accounting.PoissonSampledDpEvent(rate, event), count)
    ours = accountant.epsilon([spent(Poisson(rate), multiplier, count)], 1e-6)
    assert ours == pytest.approx(library.get_epsilon(1e-6), rel=1e-3)


def test_replace_one_trap():
    """The same event means two things in dp-accounting; ours is the RDP accountant's meaning."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(10.0), 100)
    by_pld = PLDAccountant(REPLACE).compose(event).get_epsilon(1e-5)
    by_rdp = RdpAccountant(neighboring_relation=REPLACE).compose(event).get_epsilon(1e-5)
    ours = accountant.epsilon([spent(Full(), 10.0, 100)], 1e-5)
    assert by_pld > 1.8 * by_rdp
    assert ours < by_rdp < 1.1 * ours
    assert accountant.epsilon([spent(Full(), 5.0, 100)], 1e-5) == pytest.approx(by_pld, rel=1e-3)


def test_fixed_size_is_below_dp_accountings_renyi_bound():
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 30, dp_accounting.GaussianDpEvent(1.0))
    bound = RdpAccountant(neighboring_relation=REPLACE).compose(event, 200).get_epsilon(1e-5)
    assert accountant.epsilon([spent(FixedSize(30, 1000), 1.0, 200)], 1e-5) < bound


def test_fixed_size_agrees_with_connected_profile():
    """Second construction: delta of Theorem 11 on a grid, turned into a distribution by dp-accounting."""
    rate, multiplier, interval, reach = 0.05, 1.2, 0.004, 1500
    shift = 1 / multiplier

    def profile(epsilon: float) -> float:
        if epsilon < 0:  # the mirrored half
            return 1 - math.exp(epsilon) * (1 - profile(-epsilon))
        x = (math.log((math.exp(epsilon) - 1 + rate) / rate) + shift**2 / 2) / shift
        return (1 - rate) * norm.sf(x) + rate * norm.sf(x - shift) - math.exp(epsilon) * norm.sf(x)

    deltas = [profile(i * interval) for i in range(-reach, reach + 1)]
    one = create_pmf_pessimistic_connect_dots_fixed_gap(interval, -reach, reach, deltas)
    second = one.self_compose(100).get_epsilon_for_delta(1e-6)
    assert accountant.epsilon([spent(FixedSize(50, 1000), multiplier, 100)], 1e-6) == pytest.approx(second, rel=1e-3)


def test_convolution_agrees_with_closed_form():
    """A Gaussian stream forced through the convolution, 60,000 times, also at small delta.

    There the bare convolution may end below the truth by its rounding, which depends on the machine's FFT; the
    accountant's allowance for it must keep the answer above.
    """
    pair = mirrored((1.0,), (1 / 600,))
    composed = pair.pld(pair.loss_scale / 60).self_compose(60_000)
    exact = lambda delta: gaussian.epsilon_of(delta, math.sqrt(60_000) / 300)
    for delta in (1e-3, 1e-6):
        assert exact(delta) <= composed.get_epsilon_for_delta(delta) <= exact(delta) * 1.0002
    for delta in (1e-3, 1e-6, 1e-9):
        answer = accountant._epsilon_of_mixed((spent(Poisson(1.0), 300.0, 60_000),), delta)
        assert exact(delta) <= answer <= exact(delta) * 1.0002


@pytest.mark.parametrize("sampling", [Poisson(1.0), Poisson(0.1), FixedSize(10, 100), TwoLevel(10, 100, 0.2)])
def test_discretisation_lies_above_the_truth_and_touches_it_on_the_grid(sampling):
    """On a grid so coarse that rounding the wrong way would show (on the default grid it would not)."""
    pair = sampling.pair(0.8)
    interval = pair.loss_scale
    coarse = pair.pld(interval)
    x = np.linspace(pair.centre, 15, 400_001)
    density = lambda means: sum(w * norm.pdf(x - m) for w, m in zip(pair.weights, means, strict=True))
    p, q = density(pair.up), density(pair.down)
    truth = lambda epsilon: float(np.trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x))
    for cell in range(4):
        on_grid, between = cell * interval, (cell + 0.5) * interval
        assert coarse.get_delta_for_epsilon(on_grid) == pytest.approx(truth(on_grid), rel=1e-4)
        assert coarse.get_delta_for_epsilon(between) > 1.002 * truth(between)
    composed = coarse.self_compose(20).get_epsilon_for_delta(1e-4)
    assert composed > pair.pld(interval / 60).self_compose(20).get_epsilon_for_delta(1e-4)


def test_selection_agrees_with_dp_accounting():
    run = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(20.0), 50)
    for mean, shape in ((10.0, 1.0), (30.0, 0.0), (5.0, 2.5), (20.0, math.inf)):
        event = dp_accounting.dp_event.RepeatAndSelectDpEvent(run, mean, shape)
        orders = list(accountant.ORDERS)
        library = RdpAccountant(orders, REPLACE).compose(event).get_epsilon(1e-5)
        ours = selection_epsilon([spent(Full(), 20.0, 50)], 1e-5, Trials(mean, shape))
        assert ours == pytest.approx(library, rel=1e-6)


@pytest.mark.parametrize("kind", [Poisson(0.01), TwoLevel(10, 1000, 0.1)])
def test_batches_that_are_too_large_for_their_slots_are_part_of_delta(kind):
    hardly_anything = [spent(kind, 1e6, 10**6)]
    assert 1e-12 <= accountant.delta(hardly_anything, 30.0) < 1.1e-12
    assert accountant.epsilon(hardly_anything, 0.9e-12) == math.inf
    assert selection_epsilon(hardly_anything, 1e-12, Trials(8)) == math.inf
    assert accountant.delta([spent(FixedSize(10, 1000), 1e6, 10**6)], 30.0) < 1e-15


def test_a_delta_that_overflowing_batches_use_up_is_refused():
    releases = [Releases("value", 1000, Poisson(0.01))]
    with pytest.raises(ValueError, match=r"delta = 1e-15: 1e-15 of it is the chance that a Poisson batch overflows"):
        accountant.calibrate(releases, 1.0, 1e-15)
    assert accountant.calibrate(releases, 1.0, 1e-14)["value"] > 1


def test_selection_of_sampled_runs_costs_more_than_one_and_less_than_all():
    run = [spent(Poisson(0.01), 1.0, 500)]
    one, best = accountant.epsilon(run, 1e-5), selection_epsilon(run, 1e-5, Trials(50))
    everything = accountant.epsilon([spent(Poisson(0.01), 1.0, 500 * 50)], 1e-5)
    assert one < best < everything


@pytest.mark.parametrize("trials", [Trials(8), Trials(8, 0.0), Trials(8, 3.0), Trials(8, math.inf), Trials(1)])
def test_trials_have_the_stated_mean(trials):
    generator = np.random.default_rng(0)
    drawn = [trials.draw(generator) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(trials.mean, rel=0.05)


# ---- Monte Carlo of the privacy loss, written from the mechanisms' definitions ------------------------------------


def simulated_delta(weights, up, down, std, count, epsilon, rng) -> tuple[float, float]:
    """delta(epsilon) of `count` draws of a mixture around `up` against the one around `down`, and its error."""
    total = np.zeros(DRAWS)
    for _ in range(count):
        x = rng.choice(up, DRAWS, p=weights) + std * rng.standard_normal(DRAWS)
        density = lambda means, x=x: sum(w * norm.pdf(x, m, std) for w, m in zip(weights, means, strict=True))
        total += np.log(density(up)) - np.log(density(down))
    gain = np.maximum(0.0, -np.expm1(epsilon - total))
    return float(gain.mean()), float(gain.std() / math.sqrt(DRAWS))


CLIP, BATCH, RECORDS = 0.7, 20, 100
LOW, HIGH = CLIP / RECORDS, 2 * CLIP / BATCH - CLIP / RECORDS  # two-level: not drawn, drawn
MONTE_CARLO = {
    "full": (Full(), 2.0, (1.0,), (CLIP / BATCH,), 2 * CLIP / BATCH, 2.0),
    "poisson": (Poisson(0.2), 0.6, (0.8, 0.2), (0.0, CLIP / BATCH), 2 * CLIP / BATCH, 1.5),
    "two_level": (TwoLevel(BATCH, RECORDS, LOW / HIGH), 0.6, (0.8, 0.2), (LOW, HIGH), 2 * HIGH, 2.0),
}


@pytest.mark.parametrize("case", MONTE_CARLO)
def test_monte_carlo(case):
    sampling, multiplier, weights, shifts, bound, epsilon = MONTE_CARLO[case]
    mirror = tuple(-s for s in shifts)
    rng = np.random.default_rng(1)
    estimate, error = simulated_delta(weights, shifts, mirror, multiplier * bound, 6, epsilon, rng)
    ours = accountant.delta([spent(sampling, multiplier, 6)], epsilon)
    assert 1e-3 < ours < 0.3
    assert abs(ours - estimate) < 4 * error


def test_two_level_is_not_a_subsampled_gaussian():
    """The tempting mutant undercounts: the simulation shows a delta it denies."""
    sampling, multiplier, weights, shifts, bound, epsilon = MONTE_CARLO["two_level"]
    mirror = tuple(-s for s in shifts)
    rng = np.random.default_rng(2)
    estimate, error = simulated_delta(weights, shifts, mirror, multiplier * bound, 6, epsilon, rng)
    assert accountant.delta([spent(Poisson(0.2), multiplier, 6)], epsilon) < estimate - 4 * error
    assert accountant.delta([spent(sampling, multiplier, 6)], epsilon) > estimate - 4 * error


def test_fixed_size_covers_the_real_attack_and_the_mirrored_pair_does_not():
    """All other records equal the replacing one: a drawn record moves the mean by the whole bound."""
    rng = np.random.default_rng(3)
    estimate, error = simulated_delta((0.8, 0.2), (0.0, 1.0), (0.0, 0.0), 0.9, 6, 1.5, rng)
    assert estimate - 4 * error < accountant.delta([spent(FixedSize(20, 100), 0.9, 6)], 1.5) < 1.25 * estimate
    assert accountant.delta([spent(Poisson(0.2), 0.9, 6)], 1.5) < estimate - 4 * error


@pytest.mark.parametrize("spread", [1, 5, 40])
def test_masked_covers_every_spread(spread):
    """Delta of norm 1 on `spread` of 40 coordinates, 8 kept, 10 rounds."""
    rng, multiplier, count = np.random.default_rng(4), 1.0, 10
    kept = rng.hypergeometric(spread, 40 - spread, 8, (count, DRAWS))
    mu2 = (kept / spread).sum(axis=0) / multiplier**2  # given the masks the loss is Gaussian
    loss = mu2 / 2 + np.sqrt(mu2) * rng.standard_normal(DRAWS)
    for epsilon in (1.0, 4.0):
        estimate = float(np.maximum(0.0, -np.expm1(epsilon - loss)).mean())
        assert accountant.delta([spent(Masked(8, 40), multiplier, count)], epsilon) > estimate


def test_masked_renyi_value_is_attained_on_one_coordinate():
    rng, multiplier, order = np.random.default_rng(5), 2.0, 3.0
    shift = rng.random(DRAWS) < 8 / 40
    loss = shift * (1 / (2 * multiplier**2) + rng.standard_normal(DRAWS) / multiplier)
    estimate = math.log(np.exp((order - 1) * loss).mean()) / (order - 1)
    ours = Masked(8, 40).rdp(multiplier, 1, np.array([order]))[0]
    assert ours == pytest.approx(estimate, rel=0.02)
    spread_evenly = order * (8 / 40) / (2 * multiplier**2)
    assert ours > spread_evenly


def test_masking_everything_is_no_masking():
    assert accountant.epsilon([spent(Masked(9, 9), 3.0, 20)], 1e-5) == accountant.epsilon(
        [spent(Full(), 3.0, 20)], 1e-5
    )


# ---- composition, routes and caches ------------------------------------------------------------------------------


def test_mixed_composition_lies_between_its_parts_and_their_sum():
    parts = [spent(Full(), 20.0, 100), spent(Poisson(0.01), 0.8, 500, "local"), spent(FixedSize(5, 100), 2.0, 40, "x")]
    each = [accountant.epsilon([part], 1e-6 / 3) for part in parts]
    assert max(each) < accountant.epsilon(parts, 1e-6) < sum(each)


def test_mixed_composition_of_gaussians_by_convolution_is_the_closed_form():
    """A rate-1 stream is Gaussian; hide that fact and compare."""

    class Opaque(Full):
        def gdp(self, multiplier: float, count: int) -> None:  # type: ignore[override]
            return None

        def pld(self, multiplier: float, count: int, interval: float):
            return Full().pld(multiplier, count, interval)

    parts = [spent(Full(), 30.0, 300), spent(Opaque(), 5.0, 20, "other")]
    exact = gaussian.epsilon_of(1e-6, math.hypot(math.sqrt(300) / 30, math.sqrt(20) / 5))
    assert exact <= accountant.epsilon(parts, 1e-6) <= exact * 1.001


def test_counting_one_by_one_is_counting_together():
    one_by_one = [spent(Poisson(0.1), 1.0) for _ in range(30)]
    assert accountant.epsilon(one_by_one, 1e-5) == accountant.epsilon([spent(Poisson(0.1), 1.0, 30)], 1e-5)


def test_one_pass_counts_its_least_noisy_release():
    rounds = [spent(Disjoint(), m) for m in (3.0, 1.5, 2.0)]
    assert accountant.gdp(rounds) == pytest.approx(1 / 1.5)


def test_epsilon_and_delta_are_inverse():
    for parts in ([spent(TwoLevel(10, 100, 0.1), 1.0, 50)], [spent(Full(), 9.0, 30)], [spent(Masked(2, 50), 1.5, 30)]):
        value = accountant.epsilon(parts, 1e-6)
        assert accountant.delta(parts, value) == pytest.approx(1e-6, rel=1e-3)
        assert accountant.curve(parts, [value / 2, value])[0] > 1e-6


def test_tiny_delta_takes_the_renyi_route_and_stays_above_the_larger_delta():
    parts = [spent(FixedSize(10, 1000), 1.0, 1000)]
    values = [accountant.epsilon(parts, delta) for delta in (1e-6, 1e-9, 1e-20, 1e-200)]
    assert values == sorted(values)
    assert math.isfinite(values[-1])


@pytest.mark.parametrize("epsilon", [1e-4, 1.0, 500.0])
@pytest.mark.parametrize("delta", [0.3, 1e-10, 1e-300])
def test_gaussian_range(epsilon, delta):
    mu = gaussian.mu_of(epsilon, delta)
    assert gaussian.epsilon_of(delta, mu) == pytest.approx(epsilon, rel=1e-9)


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [Full(), Poisson(0.02), FixedSize(20, 1000), TwoLevel(20, 1000, 0.01), Masked(5, 100)]
)
def test_calibration_meets_the_target_and_wastes_nothing(sampling):
    releases = [Releases("value", 400, sampling), Releases("difference", 30, Full())]
    noise = accountant.calibrate(releases, 2.0, 1e-5, {"value": 0.7, "difference": 0.3})
    used = [Spent(release, noise[release.stream]) for release in releases]
    assert 2.0 * (1 - 1e-4) < accountant.epsilon(used, 1e-5) <= 2.0 * (1 + 1e-9)


def test_calibration_splits_mu_squared_as_told():
    releases = [Releases("value", 10, Full()), Releases("difference", 90, Full())]
    noise = accountant.calibrate(releases, 1.0, 1e-5, {"value": 0.8, "difference": 0.2})
    parts = {r.stream: r.count / noise[r.stream] ** 2 for r in releases}
    assert parts["value"] / sum(parts.values()) == pytest.approx(0.8)


def test_calibration_on_top_of_what_is_spent():
    before = [spent(Full(), 10.0, 10)]
    noise = accountant.calibrate([Releases("more", 50, Poisson(0.1))], 2.0, 1e-5, already=before)
    assert accountant.epsilon([*before, spent(Poisson(0.1), noise["more"], 50, "more")], 1e-5) <= 2.0
    exact = accountant.calibrate([Releases("more", 50, Full())], 4.0, 1e-5, already=before)
    assert accountant.epsilon([*before, spent(Full(), exact["more"], 50, "more")], 1e-5) == pytest.approx(4.0)
    for sampling in (Full(), Poisson(0.1)):
        with pytest.raises(ValueError, match=r"out of reach.*already spent is"):
            accountant.calibrate([Releases("more", 50, sampling)], 0.5, 1e-5, already=before)


def test_a_release_that_may_be_bare_takes_its_probability_from_delta():
    """With probability 0.9e-5 the record is seen as it is; only the rest of delta is left for the noisy release."""
    both = [spent(Poisson(0.9e-5), 0.0, 1, "bare"), spent(Full(), 1.0, 1, "noisy")]
    left = (1e-5 - 0.9e-5) / (1 - 0.9e-5)
    assert accountant.epsilon(both, 1e-5) == pytest.approx(gaussian.epsilon_of(left, 1.0))
    assert accountant.delta(both, accountant.epsilon(both, 1e-5)) == pytest.approx(1e-5)
    assert accountant.epsilon(both, 0.9e-5) == math.inf


def test_no_noise_needed():
    rare = [Releases("value", 10, Poisson(1e-7))]
    assert accountant.needs_no_noise(rare, 1.0, 1e-5)
    assert accountant.calibrate(rare, 1.0, 1e-5) == {"value": 0.0}
    assert accountant.calibrate([Releases("value", 0, Full())], 1.0, 1e-5) == {"value": 0.0}
    assert not accountant.needs_no_noise([Releases("value", 1, Full())], 100.0, 0.9)
    assert accountant.epsilon([spent(Full(), 0.0)], 1e-5) == math.inf
    assert accountant.delta([spent(Poisson(0.1), 0.0, 2)], 3.0) == pytest.approx(0.19)
    assert accountant.gdp([spent(Full(), 0.0)]) == math.inf


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: accountant.calibrate([Releases("v", 1, Full())], 0.0, 1e-5), "epsilon = 0"),
        (lambda: accountant.calibrate([Releases("v", 1, Full())], math.nan, 1e-5), "epsilon = nan"),
        (lambda: accountant.calibrate([Releases("v", 1, Full())], 1.0, 1.0), "delta = 1"),
        (lambda: accountant.epsilon([spent(Full(), 1.0)], 0.0), "delta = 0"),
        (lambda: accountant.delta([spent(Full(), 1.0)], -1.0), "epsilon = -1"),
        (lambda: accountant.calibrate_gdp([Releases("v", 1, Poisson(0.1))], 1.0), "Gaussian"),
        (lambda: accountant.calibrate_gdp([Releases("v", 1, Full())], 0.0), "mu = 0"),
        (lambda: accountant.calibrate([Releases("v", 1, Full())], 1.0, 1e-5, {"w": 1.0}), "shares"),
        (lambda: accountant.group_epsilon([spent(Full(), 1.0)], 1e-5, 0), "records = 0"),
        (lambda: Poisson(1.1), "sampling_rate = 1.1"),
        (lambda: FixedSize(11, 10), "batch = 11"),
        (lambda: TwoLevel(1, 10, 1.5), "ratio = 1.5"),
        (lambda: Masked(0, 10), "keep = 0"),
        (lambda: Releases("v", -1, Full()), "count = -1"),
        (lambda: Releases("v", True, Full()), "count = True"),
        (lambda: Releases("v", 1, Full(), coins=-(10**30)), "coins = -1"),
        (lambda: Releases("v", 1, Full(), loss=math.nan), "loss = nan"),
        (lambda: Releases("v", 1, Full(), lost=-1.0), "lost = -1"),
        (lambda: Releases("v", 1, Full(), lost=math.inf), "lost = inf"),
        (lambda: spent(Full(), math.nan), "multiplier = nan"),
        (lambda: Trials(0.5), "mean = 0.5"),
    ],
)
def test_bad_requests_name_the_field(request_, message):
    with pytest.raises(ValueError, match=message):
        request_()


# ---- weaker forms ----------------------------------------------------------------------------------------------------


def test_group_privacy():
    gaussian_run = [spent(Full(), 50.0, 20)]
    larger = accountant.epsilon([spent(Full(), 10.0, 20)], 1e-5)
    assert accountant.group_epsilon(gaussian_run, 1e-5, 5) == pytest.approx(larger)
    sampled = [spent(Poisson(0.01), 2.0, 100)]
    one, three = accountant.epsilon(sampled, 1e-5), accountant.group_epsilon(sampled, 1e-5, 3)
    assert accountant.group_epsilon(sampled, 1e-5, 1) == pytest.approx(one, rel=1e-3)
    assert three > 3 * one  # delta has to shrink too
    assert math.log(3 * accountant.delta(sampled, three / 3)) + 2 * three / 3 <= math.log(1e-5) + 1e-6


@pytest.mark.parametrize("sampling", [Poisson(0.001), FixedSize(1, 1000), Poisson(0.5)])
def test_very_much_noise_at_a_very_small_delta_has_an_epsilon_that_holds(sampling):
    """There the Renyi quadrature rounds to 0, and 0 is what the epsilon was; a group's search then never ended."""
    for multiplier, count, delta in ((1e4, 1, 1e-13), (1e4, 10**5, 1e-9), (1e5, 1000, 1e-12), (1e3, 1, 1e-14)):
        run = [spent(sampling, multiplier, count)]
        epsilon = accountant.epsilon(run, delta)
        assert epsilon > 0 and accountant.delta(run, epsilon) <= delta * 1.05 + 2 * accountant._slack(tuple(run))
    assert (accountant.rdp([spent(sampling, 1e5)], accountant.ORDERS) > 0).all()
    group = accountant.group_epsilon([spent(sampling, 1e5)], 1e-13, 2)
    assert group == math.inf or 0 < group < 1


# ---- monotonicity ----------------------------------------------------------------------------------------------------

kinds = st.one_of(
    st.just(Full()),
    st.builds(Poisson, st.floats(0.001, 0.9)),
    st.builds(FixedSize, st.integers(1, 90), st.just(100)),
    st.builds(TwoLevel, st.integers(1, 90), st.just(100), st.floats(0.01, 0.9)),
    st.builds(Masked, st.integers(1, 90), st.just(100)),
)


@settings(max_examples=25, deadline=None)
@given(kinds, st.floats(0.5, 20), st.integers(1, 300), st.floats(1.05, 3), st.floats(-9, -2))
def test_more_noise_fewer_releases_larger_delta_cost_less(sampling, multiplier, count, factor, exponent):
    cost = lambda m, n, d: accountant.epsilon([spent(sampling, m, n)], d)
    base = cost(multiplier, count, 10**exponent)
    assert cost(multiplier * factor, count, 10**exponent) <= base * (1 + 1e-3) + 1e-9
    assert cost(multiplier, count + 10, 10**exponent) >= base * (1 - 1e-3)
    assert cost(multiplier, count, 10**exponent / factor) >= base


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 98), st.floats(0.5, 10), st.integers(1, 100))
def test_larger_rate_costs_more(batch, multiplier, count):
    pairs = [
        (Poisson(batch / 100), Poisson((batch + 1) / 100)),
        (FixedSize(batch, 100), FixedSize(batch + 1, 100)),
        (TwoLevel(batch, 100, 0.2), TwoLevel(batch + 1, 100, 0.2)),
        (Masked(batch, 100), Masked(batch + 1, 100)),
    ]
    for less, more in pairs:
        cheap, dear = (accountant.epsilon([spent(kind, multiplier, count)], 1e-5) for kind in (less, more))
        assert cheap <= dear * (1 + 1e-3) + 1e-9


@settings(max_examples=5, deadline=None)
@given(st.floats(0.01, 0.9), st.floats(0.5, 5), st.integers(2, 50))
def test_renyi_route_is_above_the_convolution(rate, multiplier, count):
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    for kind in (Poisson(rate), TwoLevel(max(1, int(100 * rate)), 100, 0.3), FixedSize(max(1, int(100 * rate)), 100)):
        part = [spent(kind, multiplier, count)]
        renyi = compute_epsilon(accountant.ORDERS, accountant.rdp(part, accountant.ORDERS), 1e-6)[0]
        assert accountant.epsilon(part, 1e-6) <= renyi * (1 + 1e-3)
