"""P_vec: coins drawn from the exact law, unbiased sums, and what they reveal."""

import math
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtri_exp
from scipy.stats import binom, chi2, norm

from silodp.channels.pvec import CoinTables, PVec
from silodp.facts import Facts
from silodp.gradients.blocks import clip_factor
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.privacy import accountant, gaussian
from silodp.privacy.coins import (
    FEWEST_BITS,
    REACH,
    ROUNDED,
    TAIL,
    beyond,
    centred_probabilities,
    cumulative_words,
    dominating_gaussian,
    gaussian_multiplier,
    sensitivity,
)
from silodp.privacy.kinds import Full, Poisson, Releases, Spent
from silodp.randomness import SeededRandomness, SystemRandomness

ROUNDS, RECORDS, DELTA = 500, 16_510, 1e-5


def _plan(**privacy):
    """500 sums of 101 numbers over 10 silos of 1,651 records, on a grid of 200 levels."""
    options = {"name": "dp-gd", "randomizer": "pvec", "grid": 200, "rounds": ROUNDS, "clip": 1.0, "step_size": 0.1}
    tree = {"privacy": {"trust": "shuffled", "delta": DELTA} | privacy, "algorithm": options | {"weights": "size"}}
    return make_plan(parse_config(tree), Facts((1651,) * 10, tuple("abcdefghij"), parameters=101))


def _epsilon(bits: int) -> float:
    """Of all rounds with so many coins per coordinate in each."""
    return accountant.epsilon([Spent(Releases("value", ROUNDS, Full()), gaussian_multiplier(bits, 200, 101))], DELTA)


def _random(seed: int) -> SeededRandomness:
    return SeededRandomness(jax.random.key(seed))


@pytest.mark.parametrize("bits", [2, 50, 10_000, 1_000_000])
def test_probabilities_are_binomial(bits):
    ours = centred_probabilities(bits, 12.0)
    offsets = np.arange(ours.size) - ours.size // 2
    assert ours == pytest.approx(binom.pmf(offsets + bits // 2, bits, 0.5), rel=2e-9)


def test_words_are_the_distribution_function():
    whole = whole_words(1000)
    offsets = np.arange(len(whole)) - (len(whole) + 1) // 2
    assert [word / 2**128 for word in whole] == pytest.approx(binom.cdf(offsets + 500, 1000, 0.5), rel=1e-9)


@pytest.mark.parametrize("bits", [2, 4, 30, 1000])
def test_words_are_as_near_to_the_law_as_the_account_says(bits):
    """In whole numbers, against Pascal's triangle."""
    masses = np.diff(np.array([0, *whole_words(bits), 2**128], object))
    reach = len(masses) // 2
    real = [Fraction(math.comb(bits, heads), 2**bits) for heads in range(bits + 1)]
    drawn = [Fraction(0)] * (bits // 2 - reach) + [Fraction(int(mass), 2**128) for mass in masses]
    drawn += [Fraction(0)] * (bits + 1 - len(drawn))
    assert sum(abs(a - b) for a, b in zip(real, drawn, strict=True)) / 2 <= ROUNDED
    assert sum(abs(a - b) for a, b in zip(real, drawn, strict=True)) / 2 <= len(masses) / 2**129 + 2.0**-120


def whole_words(bits: int) -> list[int]:
    return [int.from_bytes(words.tobytes(), "big") for words in cumulative_words(bits)]


def _chi_square_excess(draws: np.ndarray, bits: int) -> float:
    """Probability of a worse fit, over cells of about equal chance."""
    edges = np.unique(binom.ppf(np.linspace(0, 1, 21)[1:-1], bits, 0.5)) - bits // 2 + 0.5
    expected = np.diff(binom.cdf(np.concatenate([[-1], edges + bits // 2, [bits]]), bits, 0.5))
    observed = np.bincount(np.searchsorted(edges, draws), minlength=expected.size)
    statistic = np.sum((observed - draws.size * expected) ** 2 / (draws.size * expected))
    return float(chi2.sf(statistic, expected.size - 1))


@pytest.mark.parametrize("bits", [400, 122_710, 122_710 * 16_510])
def test_draws_follow_the_exact_law(bits):
    draws = np.asarray(CoinTables([bits]).draw(_random(bits % 97), (200_000,)))
    assert _chi_square_excess(draws, bits) > 1e-4
    # five percent more coins would be noticed
    assert _chi_square_excess(draws, 2 * int(bits * 0.525)) < 1e-4


def test_small_coins_match_cell_by_cell():
    draws = np.asarray(CoinTables([4]).draw(_random(0), (160_000,)))
    counts = np.bincount(draws + 2, minlength=5) / 160_000
    assert counts == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], abs=0.005)


def _vectors(count: int, dimension: int) -> np.ndarray:
    vectors = np.random.default_rng(3).normal(size=(count, dimension))
    return 2.0 * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_silos_parts_sum_to_the_vectors_and_all_coins():
    vectors, protocol = _vectors(60, 8), PVec(levels=20, bits_per_record=400, sent=(10, 35, 15))

    @jax.jit
    def both(key):
        own = [SeededRandomness(jax.random.fold_in(key, silo)) for silo in range(3)]
        rounded = protocol.round(jnp.asarray(vectors), 2.0, own[0]).sum(axis=0)
        coins = sum(protocol.coins(random, silo, 8) for silo, random in enumerate(own))
        return protocol.decode(rounded + coins, 2.0), coins

    sums, coins = (np.asarray(x) for x in jax.vmap(both)(jax.random.split(jax.random.key(1), 8000)))
    assert sums.mean(axis=0) == pytest.approx(vectors.sum(axis=0), abs=5 * 16 / math.sqrt(8000))
    rounding = math.sqrt(60) * (2 * 2.0 / 20) / 2
    noise = protocol.noise_std(2.0)
    assert noise * 0.98 < np.mean(sums.std(axis=0)) < 1.02 * math.hypot(noise, rounding)
    assert _chi_square_excess(coins.ravel(), 400 * 60) > 1e-4
    # the coins of three records fewer would be noticed
    assert _chi_square_excess(coins.ravel(), 400 * 57) < 1e-4


def test_each_silo_has_the_coins_of_its_own_records():
    protocol = PVec(levels=20, bits_per_record=400, sent=(10, 35, 10))
    for silo, records in enumerate(protocol.sent):
        draws = np.asarray(jax.vmap(lambda i, silo=silo: protocol.coins(_random(7), i, 50_000))(jnp.array([silo])))
        assert _chi_square_excess(draws.ravel(), 400 * records) > 1e-4
        assert _chi_square_excess(draws.ravel(), 400 * records * 21 // 20) < 1e-4


def test_rounding_keeps_the_mean_and_stays_within_one_level():
    vectors, protocol = jnp.asarray(_vectors(50, 6)), PVec(10, 2, [50])
    draws = jax.vmap(lambda key: protocol.round(vectors, 2.0, SeededRandomness(key)))(
        jax.random.split(jax.random.key(2), 2000)
    )
    exact = np.asarray(vectors) * 5 / 2.0
    assert np.abs(np.asarray(draws) - exact).max() < 1
    assert np.asarray(draws).mean(axis=0) == pytest.approx(exact, abs=5.5 * 0.5 / math.sqrt(2000))


def test_measured_change_stays_within_the_sensitivity():
    protocol, clip = PVec(10, 2, [2]), 2.0
    ones = np.random.default_rng(0).normal(size=(50, 1, 30))
    ones *= clip / np.linalg.norm(ones, axis=-1, keepdims=True)

    @jax.jit
    @jax.vmap
    def moved(one, here, there):
        return protocol.round(one, clip, SeededRandomness(here)) - protocol.round(-one, clip, SeededRandomness(there))

    changes = moved(jnp.asarray(ones), *jax.random.split(jax.random.key(0), (2, 50)))
    assert np.linalg.norm(changes, axis=-1).max() <= sensitivity(10, 30)


def test_zero_clip_and_system_randomness():
    protocol = PVec(10, 100, [3])
    total = protocol.round(jnp.zeros((3, 4)), 0.0, SystemRandomness()).sum(axis=0)
    total += protocol.coins(SystemRandomness(), 0, 4)
    assert np.array_equal(protocol.decode(total, 0.0), np.zeros(4))


@pytest.mark.parametrize("clip", [float("nan"), float("inf"), 0.0])
def test_without_a_clip_norm_nothing_is_sent(clip):
    """Two points of a hostile server may be too far apart for a distance; whatever comes in, zeros go out."""
    vectors = jnp.array([[3e38, -3e38, 1.0], [jnp.nan, 0.5, 0.5]])
    assert not np.asarray(PVec(8, 100, [2]).round(vectors, clip, _random(0))).any()
    assert np.isnan(clip_factor(jnp.ones(3), jnp.float32(jnp.nan), 1)).all()


def test_bits_are_counted():
    assert PVec(200, 122_710, [100]).bits_sent(101) == 101 * (200 + 122_710) * 8


def test_golden_noise():
    plan = _plan(epsilon=0.8)
    protocol = plan.noised.protocols["value"]
    assert protocol.noise_std(1.0) == pytest.approx(225.05, abs=0.01)
    assert plan.std_over_clip("value") * RECORDS == pytest.approx(225.05, abs=0.01)
    bits = protocol.bits_per_record * RECORDS
    assert 0.799 < _epsilon(bits) <= 0.8
    assert _epsilon(bits * 98 // 100 // 2 * 2) > 0.8
    assert plan.spent(0)[0].releases.coins == 101
    assert plan.spent(0)[0].releases.lost == pytest.approx(2 * ROUNDED * 101 * 10)


@pytest.mark.parametrize(("bits", "shift"), [(5_000, 7), (100_000, 60), (100_000, 1)])
@pytest.mark.parametrize("level", [0.0, 0.05, 0.3])
def test_coins_are_at_least_as_private_as_their_gaussian(bits, shift, level):
    heads = np.arange(bits + shift + 1)
    p, q = binom.pmf(heads, bits, 0.5), binom.pmf(heads - shift, bits, 0.5)
    exact = float(np.sum(np.maximum(q - math.exp(level) * p, 0)))
    mu = shift / dominating_gaussian(bits)
    gaussian = norm.cdf(-level / mu + mu / 2) - math.exp(level) * norm.cdf(-level / mu - mu / 2)
    assert exact <= gaussian + 1e-11
    # and the bound is tight: five percent more Gaussian noise would not cover the coins
    mu *= 0.95
    looser = norm.cdf(-level / mu + mu / 2) - math.exp(level) * norm.cdf(-level / mu - mu / 2)
    assert exact > looser or exact < 1e-12


@pytest.mark.parametrize(
    ("bits", "shift", "level"),
    [(5_000, 7, 1.0), (5_000, 7, 1.3), (5_000, 7, 2.0), (20_000, 40, 3.5), (20_000, 40, 6.0)],
)
def test_the_gaussian_covers_the_tails_of_the_coins_too(bits, shift, level):
    """Coins have lighter tails than a Gaussian of their variance: there a shift shows more, which sets the std."""
    heads = np.arange(bits + shift + 1)
    p, q = binom.logpmf(heads, bits, 0.5), binom.logpmf(heads - shift, bits, 0.5)
    more = q > p + level
    exact = float(np.sum(np.exp(q[more]) * -np.expm1(p[more] + level - q[more])))
    assert 1e-26 < exact <= gaussian.delta_of(level, shift / dominating_gaussian(bits))
    assert exact > gaussian.delta_of(level, shift / (math.sqrt(bits) / 2)), "these coins do not test the tail"


@pytest.mark.parametrize(("bits", "deviations"), [(24_000, 2.7), (6_000, 3.5), (24_000, 4.0), (6_000, 8.0)])
def test_few_coins_are_covered_at_large_epsilons(bits, deviations):
    """What epsilon 15 and more leave of the coins: exact, against the Gaussian that stands for them."""
    shift = round(deviations * math.sqrt(bits) / 2)
    heads = np.arange(bits + shift + 1)
    p, q = binom.logpmf(heads, bits, 0.5), binom.logpmf(heads - shift, bits, 0.5)
    moved = shift / dominating_gaussian(bits)
    levels, found = (5.0, 15.0, 25.0, 80.0, 120.0), []
    for level in levels:
        more = q > p + level
        exact = float(np.sum(np.exp(q[more]) * -np.expm1(p[more] + level - q[more])))
        found.append(exact)
        assert exact <= gaussian.delta_of(level, moved) + beyond(moved)
    worse = [exact > gaussian.delta_of(level, moved) for level, exact in zip(levels, found, strict=True)]
    assert any(worse), "what lies beyond is not tested"


@pytest.mark.parametrize("bits", [FEWEST_BITS, FEWEST_BITS + 2, 10_000, 1_000_002, 100_000_000])
def test_the_slope_is_taken_as_far_out_as_the_account_says(bits):
    below = np.cumsum(centred_probabilities(bits, TAIL + 4))
    farthest = below[below.size // 2 - math.ceil(TAIL * math.sqrt(bits) / 2)]
    assert -ndtri_exp(np.log(farthest)) >= REACH


def spent(multiplier: float, coins: int, count: int = 10) -> list[Spent]:
    return [Spent(Releases("value", count, Full(), coins=coins), multiplier)]


def test_what_lies_beyond_is_added_to_delta():
    for multiplier in (0.14, 0.2, 1.0):
        far = 10 * 7 * beyond(1 / multiplier)
        plain, coins = (accountant.delta(spent(multiplier, count), 20.0) for count in (0, 7))
        assert coins == pytest.approx(far + (1 - far) * plain, rel=1e-12)
        level = accountant.epsilon(spent(multiplier, 7), 1e-5)
        assert accountant.delta(spent(multiplier, 7), level) <= 1e-5 * (1 + 1e-9)
        if far < 1e-5:
            assert level == pytest.approx(accountant.epsilon(spent(multiplier, 0), 1e-5 - far), rel=1e-6)
    assert accountant.epsilon(spent(0.1, 7), 1e-5) == math.inf
    assert accountant.group_epsilon(spent(0.3, 7), 1e-5, 2) < accountant.group_epsilon(spent(0.3, 7), 1e-5, 3)
    assert accountant.group_epsilon(spent(0.3, 7), 1e-5, 4) == math.inf  # 13 deviations


@pytest.mark.parametrize("epsilon", [1.0, 15.0, 60.0, 300.0])
@pytest.mark.parametrize("kind", [Full(), Poisson(0.3)], ids=["all", "some"])
def test_noise_is_calibrated_with_what_lies_beyond(epsilon, kind):
    releases = [Releases("value", 10, kind, coins=7)]
    found = accountant.calibrate(releases, epsilon, 1e-5)["value"]
    assert accountant.delta([Spent(releases[0], found)], epsilon) <= 1e-5 * (1 + 1e-9)
    assert accountant.delta([Spent(releases[0], found * 0.999)], epsilon) > 1e-5


def hockey_stick(p: np.ndarray, q: np.ndarray, level: float) -> float:
    return float(np.sum(np.maximum(p - math.exp(level) * q, 0)))


def line_of(rate: float, reach: float, level: float) -> float:
    """The same of (1 - rate) N(0) + rate N(reach) against its mirror image, by a fine grid of half-lines."""
    ends = np.linspace(-12, 12, 200_001)
    beyond = lambda shift: (1 - rate) * norm.sf(ends) + rate * norm.sf(ends - shift)
    return float(np.max(beyond(reach) - math.exp(level) * beyond(-reach)))


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("level", [0.0, 0.1, 1.0])
def test_a_poisson_share_of_coins_is_no_worse_than_a_gaussian_one(rate, level):
    """Exactly, in two coordinates: shifts that point apart, aside, to the same side, and a record that is absent."""
    bits, reach = 2_000, 15
    std = dominating_gaussian(bits)
    steps = np.arange(-9 * 23, 9 * 23 + 1)
    coins = lambda shift: np.outer(*(binom.pmf(steps + bits // 2 - each, bits, 0.5) for each in shift))
    share = lambda shift: (1 - rate) * coins((0, 0)) + rate * coins(shift)
    most = line_of(rate, reach / std, level)
    shifts = [(15, 0), (-15, 0), (0, 15), (9, 12), (-12, -9), (4, 0), (0, 0)]
    found = [hockey_stick(share(a), share(b), level) for a in shifts for b in shifts]
    assert max(found) <= most * (1 + 1e-7) + 1e-12
    assert max(found) > line_of(rate, reach / std / 1.06, level)  # and nothing is given away
    assert Poisson(rate).pair(std / (2 * reach)).pld(1e-4).get_delta_for_epsilon(level) >= most * (1 - 1e-6)


def test_a_colluding_server_faces_the_coins_that_a_silo_really_tosses():
    """A share of 1.4 records sends the coins of one."""
    options = {"name": "sdp-spider", "grid": 200, "rounds": 6, "restart": 3, "clip": 1.0, "step_size": 0.1}
    tree = {
        "privacy": {"trust": "shuffled", "epsilon": 1.0, "delta": DELTA},
        "algorithm": options | {"clip_difference": 1.0, "batch_share": 0.35, "weights": "size"},
    }
    plan = make_plan(parse_config(tree), Facts((4, 40), ("a", "b"), parameters=5))
    own, protocols = plan.spent(0), plan.noised.protocols
    assert protocols["difference"].sent == (1, 14)
    tossed = [protocols[s.releases.stream].bits_per_record * protocols[s.releases.stream].sent[0] for s in own]
    real = [replace(s, multiplier=gaussian_multiplier(n, 200, 5)) for s, n in zip(own, tossed, strict=True)]
    left = accountant.epsilon(real, DELTA)
    assert plan.channel.left_if(own, 0, plan.declared, DELTA)["masks_are_broken"] >= left * (1 - 1e-6)


def test_few_coins_are_drawn_from_their_law_far_out():
    masses = np.diff(np.array([0, *whole_words(6_000), 2**128], object)).astype(float) / 2.0**128
    reach = len(masses) // 2
    exact = binom.pmf(np.arange(3_000 - reach, 3_001 + reach), 6_000, 0.5)
    inner = np.abs(np.arange(-reach, reach + 1)) < 12.0 * math.sqrt(6_000) / 2
    np.testing.assert_allclose(masses[inner], exact[inner], rtol=1e-3)
    np.testing.assert_allclose(masses[reach - 300 : reach + 300], exact[reach - 300 : reach + 300], rtol=1e-9)
    draws = np.asarray(CoinTables([6_000]).draw(_random(4), (100_000,)))
    assert draws.mean() == pytest.approx(0, abs=0.5) and draws.std() == pytest.approx(math.sqrt(6_000) / 2, rel=0.01)


@pytest.mark.parametrize(("name", "options"), [("sdp-prox-sgd", {}), ("sdp-spider", {"restart": 3})])
def test_pvec_reaches_the_papers_largest_epsilon(name, options):
    """Thm D.2 and 2.1 go up to epsilon 15."""
    tree = {
        "privacy": {"trust": "shuffled", "epsilon": 15.0, "delta": 1e-5},
        "algorithm": {"name": name, "rounds": 4, "step_size": 0.5, "clip": 1.0, "weights": "size"} | options,
    }
    plan = make_plan(parse_config(tree), Facts((160, 160, 160), ("a", "b", "c"), parameters=31))
    assert plan.noised.protocols["value"].bits_per_record > 0  # type: ignore[attr-defined]
    assert 14.9 < plan.epsilon(0) <= 15.0


def test_collusion_leaves_less_noise():
    multiplier = gaussian_multiplier(122_710 * 16_510, 200, 101)
    assert multiplier == pytest.approx(math.sqrt(122_710 * 16_510) / 2 / sensitivity(200, 101), rel=1e-6)
    plan = _plan(multipliers={"value": multiplier})
    assert plan.noised.protocols["value"].bits_per_record == pytest.approx(122_710, abs=2)
    assert plan.epsilon(0) == pytest.approx(0.8, rel=0.002)
    left = plan.channel.left_if(plan.spent(0), 0, plan.declared, DELTA)
    assert left["other_silos_collude"] == left["masks_are_broken"] == pytest.approx(_epsilon(122_710 * 1651), rel=1e-4)
    assert plan.epsilon(0) < left["other_silos_collude"] < _epsilon(122_710)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: PVec(7, 100, [3]), "levels"),
        (lambda: PVec(8, 101, [3]), "bits"),
        (lambda: PVec(2**20, 100, [2000, 2096]), "levels"),
        (lambda: CoinTables([2**39]), "bits"),
        (lambda: dominating_gaussian(100), "bits"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(ValueError, match=field):
        build()
