"""The two sources of randomness: right laws, independent draws, usable in compiled code."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from silodp import randomness
from silodp.randomness import Randomness, SeededRandomness, SystemRandomness, fold

SOURCES = [SeededRandomness(jax.random.key(3)), SystemRandomness()]
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
    np.testing.assert_allclose(source.normal("noise", shape, 3), jax.random.normal(key, shape), rtol=2e-7)
    assert jax.random.key_data(fold(key, 9)).tolist() == jax.random.key_data(jax.random.fold_in(key, 9)).tolist()
    stacked = jax.vmap(lambda seed: SeededRandomness(jax.random.key(seed)).bits("noise", shape, 3))(jnp.arange(3, 7))
    np.testing.assert_array_equal(stacked[2], source.bits("noise", shape, 3))
