"""The two sources of randomness: right laws, independent draws, usable in compiled code."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from silodp import randomness, threefry
from silodp.randomness import Randomness, SeededRandomness, SystemRandomness, fold

SOURCES = [SeededRandomness(jax.random.key(3)), SystemRandomness()]
LAST = 2**32 - 1  # the largest word
KINDS = ["normal", "uniform", "bits"]
# A false alarm of a test on the system's entropy once in a million runs.
IMPROBABLE = 1e-6


def draw(source: Randomness, kind: str, *arguments, **options) -> np.ndarray:
    return np.asarray(getattr(source, kind)(*arguments, **options))


def uncorrelated(a: np.ndarray, b: np.ndarray) -> bool:
    correlation = np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]
    return bool(2 * stats.norm.sf(abs(correlation) * np.sqrt(len(a))) > IMPROBABLE)


@pytest.mark.parametrize("source", SOURCES, ids=["seeded", "system"])
@pytest.mark.parametrize("kind", KINDS)
def test_distribution(source, kind):
    values = draw(source, kind, "noise", (200_001,))
    law = {"normal": "norm", "uniform": "uniform", "bits": stats.uniform(0, 2.0**32).cdf}[kind]
    assert stats.kstest(values.astype(np.float64), law).pvalue > IMPROBABLE


@pytest.mark.parametrize("source", SOURCES, ids=["seeded", "system"])
def test_neighbouring_normals_are_uncorrelated(source):
    # Box-Muller makes them in pairs from one radius: neither they nor their squares may correlate.
    values = draw(source, "normal", "noise", (200_000,)).reshape(2, -1)
    assert uncorrelated(values[0], values[1])
    assert uncorrelated(values[0] ** 2, values[1] ** 2)


@pytest.mark.parametrize("source", SOURCES, ids=["seeded", "system"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_shapes_and_dtypes(source, kind, shape):
    values = draw(source, kind, "noise", shape)
    assert values.shape == shape
    assert values.dtype == (np.uint32 if kind == "bits" else np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_draws_are_independent_across_purposes_steps_rounds_and_silos(kind):
    key, n = jax.random.key(0), (50_000,)
    sources = [SeededRandomness(jax.random.fold_in(jax.random.fold_in(key, r), s)) for r in range(2) for s in range(2)]
    draws = [
        draw(source, kind, purpose, n, step=step)
        for source in sources
        for purpose in ("noise", "batch")
        for step in (0, 1)
    ]
    pairs = [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
    assert all(uncorrelated(a, b) for a, b in pairs)


def test_seeded_draws_repeat_also_with_a_traced_step():
    source = SeededRandomness(jax.random.key(1))
    traced = jax.jit(lambda s, step: s.normal("noise", (4,), step))
    np.testing.assert_array_equal(traced(source, 7), source.normal("noise", (4,), 7))


def test_seeded_draws_are_the_same_in_every_process():
    # hash() of a string changes from process to process; these words must not.
    words = SeededRandomness(jax.random.key(1)).bits("noise", (2,), 5)
    np.testing.assert_array_equal(words, np.array([3494539898, 2521735013], np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_system_draws_never_repeat(kind):
    source = SystemRandomness()

    @jax.jit
    def program():
        def step(carry, i):
            here = getattr(source, kind)("noise", (8,), i)
            there = jax.lax.cond(
                i % 2 == 0,
                lambda: getattr(source, kind)("noise", (8,), i),
                lambda: getattr(source, kind)("noise", (8,), i) + here,
            )
            return carry, jnp.stack([here, there])

        twice = [getattr(source, kind)("noise", (8,)) for _ in range(2)]
        scanned = jax.lax.scan(step, 0, jnp.arange(4))[1]
        return jnp.concatenate([jnp.stack(twice), scanned.reshape(8, 8)])

    eager = [draw(source, kind, "noise", (8,)) for _ in range(2)]
    draws = np.concatenate([program(), program(), eager])
    assert len(np.unique(draws, axis=0)) == len(draws) == 22


def test_system_normal_survives_the_extreme_words(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(randomness.os, "urandom", lambda n, byte=byte: byte * n)
        assert np.isfinite(draw(SystemRandomness(), "normal", "noise", (3,))).all()
        assert (draw(SystemRandomness(), "uniform", "noise", (3,)) < 1.0).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1001)])
def test_seeded_numbers_are_those_of_jax_random(shape):
    """The faster form of Threefry is the same generator: words bit for bit, numbers made of them to the last digit."""
    source = SeededRandomness(jax.random.key(5))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), zlib.crc32(b"noise")), 3)
    np.testing.assert_array_equal(source.bits("noise", shape, 3), jax.random.bits(key, shape, jnp.uint32))
    np.testing.assert_allclose(source.uniform("noise", shape, 3), jax.random.uniform(key, shape), rtol=0, atol=0)
    assert jax.random.key_data(fold(key, 9)).tolist() == jax.random.key_data(jax.random.fold_in(key, 9)).tolist()
    stacked = jax.vmap(lambda seed: SeededRandomness(jax.random.key(seed)).bits("noise", shape, 3))(jnp.arange(3, 7))
    np.testing.assert_array_equal(stacked[2], source.bits("noise", shape, 3))


@pytest.mark.parametrize(
    ("steps", "counter", "key", "expected"),
    [
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (LAST, LAST), (LAST, LAST), (0xFD36D048, 0x2D17272C)),
        (13, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_words_that_its_authors_print(steps, counter, key, expected):
    """Known answers of Random123, for both numbers of steps."""
    keyed = jax.random.wrap_key_data(jnp.array(key, jnp.uint32), impl="threefry2x32")
    found = threefry.threefry(keyed, *(jnp.uint32(word) for word in counter), steps)
    assert tuple(int(word) for word in found) == expected


def test_normals_of_a_seed_are_these_in_every_version():
    """A seeded result is another one when these change: CHANGELOG.md must say so."""
    expected = [0.53676778, -0.49923271, 1.61095536, -0.15672445, 2.32993221]
    np.testing.assert_allclose(SeededRandomness(jax.random.key(1)).normal("noise", (5,), 5), expected, rtol=1e-6)


def around(word: int) -> list[int]:
    return [(word + i) % 2**32 for i in (-65, -64, -2, -1, 0, 1, 2, 63, 64)]


SOME_WORDS = [
    *np.random.default_rng(0).integers(0, 2**32, 100_000).tolist(),
    *around(0),
    *around(2**31),
    2,
    3,
    255,
    256,
]


def test_a_radius_is_that_of_its_word_for_every_word():
    words = np.array(SOME_WORDS, np.uint32)
    found = np.asarray(threefry.radius(jnp.asarray(words)))
    expected = np.sqrt(-2 * np.log((words // 2 + 0.5) / 2**31))
    # A radius near zero comes of a float32 near one, where there are few.
    assert (np.abs(found - expected) < 1e-6 + 1e-7 / expected).all()
    assert found.min() > 0 and 6.6 < found.max() < 6.7


def test_a_cosine_is_that_of_its_word_for_every_word():
    words = np.array([*SOME_WORDS, *(word for eighth in range(8) for word in around(eighth << 29))], np.uint32)
    found = threefry.cosine(jnp.asarray(words))
    np.testing.assert_allclose(found, np.cos(words * (np.pi / 2**31)), rtol=0, atol=3e-7)


MANY = 4_000_000


@pytest.fixture(scope="module")
def halves():
    """Two numbers of the same words are a column."""
    return draw(SeededRandomness(jax.random.key(7)), "normal", "noise", (MANY // 2, 2)).astype(np.float64).T


@pytest.mark.parametrize("half", [0, 1])
def test_seeded_normals_have_the_moments_and_the_tails_of_the_law(halves, half):
    values = halves[half]
    assert stats.kstest(values, "norm").pvalue > 1e-3
    for power, moment in enumerate((0, 1, 0, 3, 0, 15), 1):
        spread = np.sqrt(np.mean(values ** (2 * power)) / len(values))
        assert abs(np.mean(values**power) - moment) < 4 * spread
    for sigmas in np.arange(0.5, 5.5, 0.5):
        for side in (values > sigmas, values < -sigmas):
            expected = stats.norm.sf(sigmas) * len(values)
            assert abs(side.sum() - expected) < 4 * np.sqrt(expected) + 2


def test_the_two_numbers_of_a_pair_are_independent(halves):
    first, second = halves
    for one in (first, first**2, np.abs(first), np.abs(first) > 2.5):
        for other in (second, second**2, np.abs(second), np.abs(second) > 2.5):
            assert uncorrelated(one, other)
    assert uncorrelated(first[1:], first[:-1]) and uncorrelated(first[1:], second[:-1])
    angles = np.arctan2(second, first)
    assert stats.kstest(angles, stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > 1e-3
    assert stats.kstest(first**2 + second**2, "chi2", (2,)).pvalue > 1e-3


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_any_number_of_normals_may_be_asked_for(count):
    source = SeededRandomness(jax.random.key(2))
    found = draw(source, "normal", "noise", (count,))
    assert found.shape == (count,) and len(np.unique(found)) == count
    stacked = jax.vmap(lambda seed: SeededRandomness(jax.random.key(seed)).normal("noise", (count,)))(jnp.arange(4))
    np.testing.assert_array_equal(stacked[2], found)
    steps = jax.jit(lambda: jax.lax.scan(lambda _, i: (0, source.normal("noise", (count,), i)), 0, jnp.arange(3))[1])
    np.testing.assert_array_equal(steps()[0], found)
