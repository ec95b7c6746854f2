"""Randomizers: unbiased, variance as stated, level exactly eps0, odd inputs."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from silodp import noise
from silodp.audit.shuffled import local_level, on_side
from silodp.channels.randomizers import Duchi, PrivUnitG, Randomizer, _truths
from silodp.privacy import halfspace
from silodp.randomness import SeededRandomness, SystemRandomness
from tests.repeatable import GivenWords, RepeatableEntropy

RANDOMIZERS = [Duchi(0.8), Duchi(2.5), PrivUnitG(0.8), PrivUnitG(2.5)]


@eqx.filter_jit
def _messages(randomizer: Randomizer, vectors, clip, seed):
    return randomizer.randomize(vectors, clip, SeededRandomness(jax.random.key(seed)))


def _draws(randomizer: Randomizer, vector: np.ndarray, clip: float, count: int, seed: int = 0):
    vectors = jnp.broadcast_to(jnp.asarray(vector, jnp.float32), (count, vector.size))
    return np.asarray(_messages(randomizer, vectors, clip, seed), np.float64)


def _direction(dimension: int) -> np.ndarray:
    vector = np.random.default_rng(7).normal(size=dimension)
    return vector / np.linalg.norm(vector)


def _bias_in_errors(messages: np.ndarray, vector: np.ndarray) -> float:
    """Bias along the vector, in standard errors."""
    along = messages @ vector / np.linalg.norm(vector)
    return (along.mean() - np.linalg.norm(vector)) / (along.std() / math.sqrt(along.size))


@pytest.mark.parametrize("randomizer", RANDOMIZERS)
@pytest.mark.parametrize(("dimension", "norm"), [(1, 1.0), (5, 0.3), (101, 2.0)])
def test_unbiased_with_the_stated_variance(randomizer, dimension, norm):
    clip, count = 2.0, 100_000
    vector = norm * _direction(dimension)
    messages = _draws(randomizer, vector, clip, count)
    assert abs(_bias_in_errors(messages, vector)) < 4.5
    across = messages - np.outer(messages @ vector, vector) / norm**2
    # As many directions as are across: their mean square is 1, and above this once in 10,000 draws.
    usual = np.sqrt(stats.chi2.isf(1e-4, max(1, dimension - 1)) / max(1, dimension - 1))
    assert np.linalg.norm(across.mean(axis=0)) < usual * np.sqrt(np.sum(across.var(axis=0)) / count) + 1e-6
    expected = randomizer.variance(dimension, clip) + clip**2 - norm**2
    measured = np.mean(np.sum((messages - vector) ** 2, axis=1))
    assert measured == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("randomizer", RANDOMIZERS)
def test_halved_scale_is_caught_by_the_unbiasedness_test(randomizer):
    vector = 2.0 * _direction(101)
    assert abs(_bias_in_errors(_draws(randomizer, vector, 2.0, 100_000) / 2, vector)) > 4.5


@pytest.mark.parametrize("randomizer", RANDOMIZERS)
def test_level_is_eps0_and_not_less(randomizer):
    vector = _direction(20)
    plus, minus = (_draws(randomizer, s * vector, 1.0, 200_000, seed) for s, seed in ((1, 1), (-1, 2)))
    cut = 0.0
    if isinstance(randomizer, PrivUnitG):
        threshold = halfspace.best_threshold(randomizer.eps0, 20)
        cut = threshold / halfspace.mean_component(randomizer.eps0, threshold)
    reading = local_level(plus @ vector > cut, minus @ vector > cut)
    assert reading.least <= float(randomizer.eps0)
    assert reading.mu > float(randomizer.eps0) - 4 * reading.error


def test_privunit_law_has_two_densities_with_ratio_exp_eps0():
    # Within a side the component is an untouched normal: check the quartiles of both sides.
    eps0, count = 2.0, 400_000
    vector = _direction(30)
    threshold = halfspace.best_threshold(eps0, 30)
    component = _draws(PrivUnitG(eps0), vector, 1.0, count) @ vector
    component *= halfspace.mean_component(eps0, threshold)
    normals = np.random.default_rng(0).normal(size=4 * count)
    for side in (lambda x: x >= threshold, lambda x: x < threshold):
        ours, theirs = component[side(component)], normals[side(normals)]
        assert np.quantile(ours, [0.25, 0.5, 0.75]) == pytest.approx(np.quantile(theirs, [0.25, 0.5, 0.75]), abs=0.012)


@pytest.mark.parametrize("dimension", [10, 101, 50_890])
@pytest.mark.parametrize("eps0", [1.1, 2.0, 4.0, 8.0])
def test_privunit_beats_duchi_above_one(eps0, dimension):
    assert PrivUnitG(eps0).variance(dimension, 1.0) < Duchi(eps0).variance(dimension, 1.0)


@pytest.mark.parametrize("eps0", [0.5, 2.0, 6.0])
def test_best_threshold_is_a_minimum(eps0):
    best = halfspace.best_threshold(eps0, 101)
    at_best = halfspace.second_moment(eps0, best, 101)
    assert all(halfspace.second_moment(eps0, c, 101) >= at_best * (1 - 1e-9) for c in np.linspace(0, 6, 200))


@pytest.mark.parametrize("randomizer", [Duchi(1.0), PrivUnitG(1.0)])
def test_zero_vector_zero_clip_and_tiny_vectors(randomizer):
    zero = _draws(randomizer, np.zeros(7), 1.0, 50_000)
    assert np.isfinite(zero).all()
    assert np.abs(zero.mean(axis=0)).max() < 5 * zero.std() / math.sqrt(50_000)
    assert np.array_equal(_draws(randomizer, np.zeros(7), 0.0, 3), np.zeros((3, 7)))
    tiny = 1e-25 * _direction(7)
    assert abs(_bias_in_errors(_draws(randomizer, tiny * 1.0, 1e-25, 50_000) * 1e25, tiny * 1e25)) < 4.5


def test_traced_level_one_call_for_all_records_and_system_randomness():
    vectors = jnp.ones((16_510, 101)) / math.sqrt(101)

    @jax.jit
    def run(eps0, key):
        return Duchi(eps0).randomize(vectors, 1.0, SeededRandomness(key))

    radius = np.linalg.norm(run(jnp.float32(1.0), jax.random.key(0)), axis=1)
    assert radius == pytest.approx(math.sqrt(Duchi(1.0).variance(101, 1.0) + 1), rel=1e-5)
    real = Duchi(1.0).randomize(vectors[:50], 1.0, SystemRandomness())
    assert np.isfinite(real).all()
    assert on_side(np.asarray(real), np.ones(101)).any()


class Asked(SeededRandomness):
    """Writes down which numbers were asked for, and of which step."""

    asked: list

    def bits(self, purpose, shape, step=0):
        self.asked.append((purpose, step))
        return super().bits(purpose, shape, step)


@pytest.mark.parametrize("randomizer", [Duchi(1.0), PrivUnitG(1.0)], ids=lambda r: type(r).__name__)
def test_every_number_of_a_microbatch_is_its_own(randomizer):
    """A side, a length or a direction that two records have in common tells one from the other."""
    random = Asked(jax.random.key(0), [])
    randomizer.randomize(jnp.ones((4, 9)) / 3, 1.0, random, 7)
    purposes = [purpose for purpose, _ in random.asked]
    assert len(set(purposes)) == len(purposes) >= 3
    assert {step for _, step in random.asked} == {7}


def test_microbatches_do_not_share_their_draws():
    vectors, random = jnp.ones((4, 9)) / 3, SeededRandomness(jax.random.key(0))
    first, second = (Duchi(1.0).randomize(vectors, 1.0, random, step) for step in (0, 1))
    assert not np.allclose(first, second)


def test_real_messages_of_privunit_lie_on_a_grid_and_point_as_often_along_the_input():
    vector, eps0, count = np.float32(_direction(5)), 2.0, 40_000
    real = np.asarray(PrivUnitG(eps0).randomize(jnp.tile(vector, (count, 1)), 1.0, SystemRandomness()), np.float64)
    threshold = halfspace.best_threshold(eps0, 5)
    steps = real * halfspace.mean_component(eps0, threshold) * noise.TILTED_STEPS
    assert np.abs(steps - np.rint(steps)).max() < 1e-5  # the scale is a float32 number
    assert abs(_bias_in_errors(real, vector)) < 5.5
    share = halfspace.raised_share(threshold)
    above = math.exp(eps0) * share * halfspace.blanket(eps0, share)
    along = steps / noise.TILTED_STEPS @ vector
    # Rounding blurs the threshold by half a step or less.
    assert np.mean(along > threshold + 0.3) < above + 4 / math.sqrt(count)
    assert np.mean(along > threshold - 0.3) > above - 4 / math.sqrt(count)
    assert real.var(axis=0).sum() == pytest.approx(PrivUnitG(eps0).variance(5, 1.0), rel=0.05)


@pytest.mark.parametrize("threshold", [0.0, 2.7, 6.8])
def test_the_component_along_a_record_follows_its_law_on_either_side(threshold):
    """Given its side, the tail probability of the component is uniform."""
    drawn = noise._along(100_000, threshold, 0.3, RepeatableEntropy(5))
    upper, lower = drawn[drawn >= threshold], drawn[drawn < threshold]
    assert abs(upper.size - 30_000) < 5 * math.sqrt(21_000)
    assert stats.kstest(stats.norm.sf(upper) / stats.norm.sf(threshold), "uniform").pvalue > 1e-4
    assert stats.kstest(stats.norm.cdf(lower) / stats.norm.cdf(threshold), "uniform").pvalue > 1e-4


def test_far_out_a_component_has_as_many_values_as_anywhere():
    """Of 52 bits hardly one would be left beside a threshold of 6.8, or far beyond it."""
    count, tail = 50, int(2**64 * stats.norm.sf(6.5))
    words = np.arange(tail, tail + count)
    sides, more = np.full(count, -1), np.zeros(count, np.int64)
    below = noise._along(count, 6.8, 0.0, GivenWords(np.concatenate([sides, more, more, words, more])))
    assert len(np.unique(below)) == count and np.all((below > 6.4) & (below < 6.6))
    small = np.arange(1, count + 1)
    above = noise._along(count, 6.8, 1.0, GivenWords(np.concatenate([more, more, small, words, more])))
    assert len(np.unique(above)) == count and above.max() > 11


def test_rows_near_a_boundary_are_drawn_again(monkeypatch):
    monkeypatch.setattr(noise, "TILTED_ERROR", 0.2)  # of five rows with one number two are kept
    unit, entropy = np.ones((1000, 1)), RepeatableEntropy(3)
    rows = noise.tilted(unit, 0.0, 0.5, entropy) * noise.TILTED_STEPS
    assert np.array_equal(rows, np.rint(rows)) and len(set(rows.ravel().tolist())) > 10
    _, sure = noise._tilted(unit, 0.0, 0.5, entropy)
    assert 0.4 < sure.mean() < 0.8
    answers = iter([(np.zeros((3, 1)), np.array([True, False, True])), (np.ones((1, 1)), np.array([True]))])
    monkeypatch.setattr(noise, "_tilted", lambda *_: next(answers))
    assert (noise.tilted(unit[:3], 0.0, 0.5, entropy) * noise.TILTED_STEPS).ravel().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("eps0", [0.1, 1.0, 8.0, 15.0])
def test_truths_are_at_most_so_many_times_the_lies(eps0):
    truths = int(_truths(eps0))
    assert truths / (2**32 - truths) <= math.exp(eps0)
    assert truths / (2**32 - truths) >= math.exp(eps0) * (1 - 1e-4) - 1e-3 * math.exp(eps0) * (eps0 > 10)


def test_both_signs_of_a_message_have_the_same_bits():
    """Duchi: whatever the records, the message is one of +m and -m, and m is the direction's alone."""
    one, other = _direction(33), _direction(33)[::-1]
    random = SeededRandomness(jax.random.key(4))
    sent = [np.asarray(Duchi(1.0).randomize(jnp.asarray([v] * 500), 1.0, random)) for v in (one, 0.3 * other)]
    assert np.array_equal(np.abs(sent[0]), np.abs(sent[1]))
    assert (sent[0] != sent[1]).any()
    assert np.array_equal(np.abs(sent[0] / sent[1]), np.ones_like(sent[0]))
