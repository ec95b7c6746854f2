"""P_vec: coins drawn from the exact law, unbiased sums, and what they reveal."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, chi2, norm

from silodp.channels.pvec import CoinTables, PVec
from silodp.facts import Facts
from silodp.gradients.blocks import clip_factor
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.privacy import accountant, gaussian
from silodp.privacy.coins import (
    TAILS,
    centred_probabilities,
    cumulative_words,
    dominating_gaussian,
    fine_words,
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
    words = cumulative_words(1000)
    offsets = np.arange(words.size) - (words.size + 1) // 2
    assert words.astype(np.float64) / 2.0**64 == pytest.approx(binom.cdf(offsets + 500, 1000, 0.5), rel=1e-9)


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
    lost = ROUNDS * 101 * dominating_gaussian(bits, sensitivity(200, 101)).lost
    assert lost < 1e-6 * DELTA, "what no Gaussian covers does not matter"


@pytest.mark.parametrize(("bits", "shift"), [(5_000, 7), (100_000, 60), (100_000, 1)])
@pytest.mark.parametrize("level", [0.0, 0.05, 0.3])
def test_coins_are_at_least_as_private_as_their_gaussian(bits, shift, level):
    heads = np.arange(bits + shift + 1)
    p, q = binom.pmf(heads, bits, 0.5), binom.pmf(heads - shift, bits, 0.5)
    exact = float(np.sum(np.maximum(q - math.exp(level) * p, 0)))
    noise = dominating_gaussian(bits, shift)
    mu = shift / noise.std
    gaussian = norm.cdf(-level / mu + mu / 2) - math.exp(level) * norm.cdf(-level / mu - mu / 2)
    assert exact <= gaussian + noise.lost + 1e-11
    # and the bound is tight: five percent more Gaussian noise would not cover the coins
    mu *= 0.95
    looser = norm.cdf(-level / mu + mu / 2) - math.exp(level) * norm.cdf(-level / mu - mu / 2)
    assert exact > looser or exact < 1e-12


@pytest.mark.parametrize(("bits", "shift", "level"), [(5_000, 7, 1.0), (5_000, 7, 1.3), (20_000, 40, 3.5)])
def test_the_gaussian_covers_the_tails_of_the_coins_too(bits, shift, level):
    """Coins have lighter tails than a Gaussian of their variance: there a shift shows more, which sets the std."""
    heads = np.arange(bits + shift + 1)
    p, q = binom.logpmf(heads, bits, 0.5), binom.logpmf(heads - shift, bits, 0.5)
    more = q > p + level
    exact = float(np.sum(np.exp(q[more]) * -np.expm1(p[more] + level - q[more])))
    noise = dominating_gaussian(bits, shift)
    assert 1e-12 < exact <= gaussian.delta_of(level, shift / noise.std) + noise.lost
    assert exact > gaussian.delta_of(level, shift / (math.sqrt(bits) / 2)), "these coins do not test the tail"


@pytest.mark.parametrize(("bits", "deviations"), [(24_000, 2.7), (6_000, 3.5), (24_000, 4.0)])
def test_few_coins_are_covered_at_large_epsilons(bits, deviations):
    """What epsilon 15 and more leave of the coins: exact, against the Gaussian that stands for them."""
    shift = round(deviations * math.sqrt(bits) / 2)
    heads = np.arange(bits + shift + 1)
    p, q = binom.logpmf(heads, bits, 0.5), binom.logpmf(heads - shift, bits, 0.5)
    noise = dominating_gaussian(bits, shift, TAILS[128])
    assert noise.lost < 1e-16 < dominating_gaussian(bits, shift).lost
    for level in (5.0, 15.0, 25.0):
        more = q > p + level
        exact = float(np.sum(np.exp(q[more]) * -np.expm1(p[more] + level - q[more])))
        assert exact <= gaussian.delta_of(level, shift / noise.std) + noise.lost


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
    std = dominating_gaussian(bits, 2 * reach).std
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
    words = fine_words(6_000)
    masses = np.diff(np.concatenate([[0], words, [2**128]])).astype(float) / 2.0**128
    reach = len(masses) // 2
    exact = binom.pmf(np.arange(3_000 - reach, 3_001 + reach), 6_000, 0.5)
    inner = np.abs(np.arange(-reach, reach + 1)) < 12.0 * math.sqrt(6_000) / 2
    np.testing.assert_allclose(masses[inner], exact[inner], rtol=1e-3)
    np.testing.assert_allclose(masses[reach - 300 : reach + 300], exact[reach - 300 : reach + 300], rtol=1e-9)
    coarse, fine = (CoinTables([6_000], words) for words in (64, 128))
    draws = [np.asarray(table.draw(_random(4), (100_000,))) for table in (coarse, fine)]
    for each in draws:
        assert each.mean() == pytest.approx(0, abs=0.5) and each.std() == pytest.approx(math.sqrt(6_000) / 2, rel=0.01)


@pytest.mark.parametrize(("name", "options"), [("sdp-prox-sgd", {}), ("sdp-spider", {"restart": 3})])
def test_pvec_reaches_the_papers_largest_epsilon(name, options):
    """Thm D.2 and 2.1 go up to epsilon 15."""
    tree = {
        "privacy": {"trust": "shuffled", "epsilon": 15.0, "delta": 1e-5},
        "algorithm": {"name": name, "rounds": 4, "step_size": 0.5, "clip": 1.0, "weights": "size"} | options,
    }
    plan = make_plan(parse_config(tree), Facts((160, 160, 160), ("a", "b", "c"), parameters=31))
    assert len(plan.noised.protocols["value"].tables.parts) == 4  # type: ignore[attr-defined]
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
        (lambda: dominating_gaussian(100, 1.0), "bits"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(ValueError, match=field):
        build()
