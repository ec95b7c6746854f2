"""Compressors: unbiased with the stated variance, real bytes, exact round trips, refusals."""

import math
from functools import partial

import equinox as eqx
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from silodp.compressors import (
    QSGD,
    Compressor,
    Identity,
    Natural,
    RandK,
    _smallest,
    build_compressor,
    random_mask,
    shift_rate,
)
from silodp.randomness import SeededRandomness, SystemRandomness

COMPRESSORS = {
    "identity": Identity(),
    "rand-k": RandK(3),
    "rand-all": RandK(10),
    "qsgd-1": QSGD(1),
    "qsgd-4": QSGD(4),
    "qsgd-255": QSGD(255),
    "natural": Natural(),
}
D, DRAWS = 10, 20_000
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS.keys())
# Larger numbers overflow and are refused; what is as small as this XLA may flush to zero or not.
finite = st.floats(-(2.0**120), 2.0**120, width=32).map(lambda x: x if abs(x) > 2.0**-100 else 0.0)
vectors = hnp.arrays(np.float32, D, elements=finite)
seeds = st.integers(0, 2**32 - 1)


def seeded(seed: int) -> SeededRandomness:
    return SeededRandomness(jax.random.key(seed))


@eqx.filter_jit
def compiled(compressor: Compressor, v: np.ndarray, randomness: SeededRandomness) -> jax.Array:
    return compressor(jnp.asarray(v), randomness)


def draws_of(compressor, v: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    return np.asarray(compress_often(compressor, jnp.asarray(v), draws), np.float64)


@eqx.filter_jit
def compress_often(compressor, v: jax.Array, draws: int) -> jax.Array:
    keys = jax.random.split(jax.random.key(11), draws)
    return jax.vmap(lambda key: compressor(v, SeededRandomness(key)))(keys)


def worst_bias(draws: np.ndarray, v: np.ndarray) -> float:
    """The largest bias over the coordinates, in standard errors (plus float32 rounding)."""
    error = np.abs(draws.mean(0) - v)
    return float(np.max(error / (draws.std(0) / math.sqrt(len(draws)) + 1e-6 * np.abs(v) + 1e-37)))


def variance_over_omega(draws: np.ndarray, v: np.ndarray, omega: float) -> tuple[float, float]:
    """E|C(v) - v|^2 / (omega |v|^2) and its standard error."""
    ratios = ((draws - v) ** 2).sum(1) / (omega * (v**2).sum())
    return float(ratios.mean()), float(ratios.std() / math.sqrt(len(ratios)))


VECTORS = {
    "normal": np.random.default_rng(0).normal(size=D).astype(np.float32),
    "uneven": np.array([30, -1, 0.1, 0, 0, 3, -10, 2, 1.5, -0.75], np.float32),
    "equal": np.full(D, -4.0 / 3.0, np.float32),
}
every_vector = pytest.mark.parametrize("v", VECTORS.values(), ids=VECTORS.keys())


@every_compressor
@every_vector
def test_unbiased_with_the_stated_variance(compressor, v):
    draws, omega = draws_of(compressor, v), compressor.omega(D)
    assert worst_bias(draws, v) < 5.0
    if omega == 0.0:
        np.testing.assert_array_equal(draws, np.tile(v, (DRAWS, 1)))
        return
    ratio, error = variance_over_omega(draws, v, omega)
    slack = 5.0 * error + 1e-5  # 1e-5: rounding, when every draw is equally far away
    assert ratio < 1.0 + slack
    if isinstance(compressor, RandK):
        assert ratio > 1.0 - slack


def test_natural_reaches_its_omega():
    # 4/3 is the worst point between two powers of two, so 1/8 is not a loose bound.
    draws = draws_of(Natural(), VECTORS["equal"])
    assert variance_over_omega(draws, VECTORS["equal"], 0.125)[0] == pytest.approx(1.0, abs=0.02)


def test_natural_keeps_powers_of_two_whatever_the_dice():
    class LowestWord(SeededRandomness):
        def bits(self, purpose, shape, step=0):
            return jnp.zeros(shape, jnp.uint32)

    powers = jnp.array([0.0, 1.0, -0.5, 1024.0])
    np.testing.assert_array_equal(Natural()(powers, LowestWord(jax.random.key(0))), powers)


def test_rand_k_without_its_factor_is_caught():
    mutant = lambda v, randomness: RandK(3)(v, randomness) * (3 / D)
    assert worst_bias(draws_of(mutant, VECTORS["normal"]), VECTORS["normal"]) > 20.0


def test_rounding_without_dice_is_caught():
    class Half(SeededRandomness):
        def uniform(self, purpose, shape, step=0):
            return jnp.full(shape, 0.5)

    mutant = lambda v, randomness: QSGD(4)(v, Half(randomness.key))
    assert worst_bias(draws_of(mutant, VECTORS["normal"]), VECTORS["normal"]) > 20.0


@every_compressor
@given(v=vectors, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_bytes_carry_exactly_what_the_simulation_computes(compressor, v, seed):
    data = compressor.encode(jnp.asarray(v), seeded(seed))
    assert 8 * len(data) == compressor.bits(D)
    decoded = compressor.decode(data, D)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, compressor(jnp.asarray(v), seeded(seed)))
    np.testing.assert_array_equal(decoded, compiled(compressor, v, seeded(seed)))


@pytest.mark.parametrize("d", [1, 7, 64, 50_890])
@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (Identity(), lambda d: 32 * d),
        (RandK(1), lambda d: 64 + 32),
        (QSGD(1), lambda d: 32 + 2 * d),
        (QSGD(4), lambda d: 32 + 4 * d),
        (QSGD(7), lambda d: 32 + 4 * d),
        (QSGD(255), lambda d: 32 + 9 * d),
        (Natural(), lambda d: 9 * d),
    ],
)
def test_bits_are_those_on_the_wire(compressor, bits, d):
    v = np.random.default_rng(d).normal(size=d).astype(np.float32)
    data = compressor.encode(v, seeded(d))
    assert compressor.bits(d) == 8 * len(data) == 8 * math.ceil(bits(d) / 8)
    np.testing.assert_array_equal(compressor.decode(data, d), compressor(v, seeded(d)))


@every_compressor
def test_zero_vector_stays_zero(compressor):
    zero = jnp.zeros(D)
    np.testing.assert_array_equal(compressor(zero, seeded(0)), zero)
    np.testing.assert_array_equal(compressor.decode(compressor.encode(zero, seeded(0)), D), zero)


@pytest.mark.parametrize("scale", [1e-30, 1e30], ids=["squares underflow", "squares overflow"])
def test_qsgd_norm_of_extreme_vectors(scale):
    v = VECTORS["normal"] * np.float32(scale)
    draws = draws_of(QSGD(4), v, 2_000)
    assert worst_bias(draws, v.astype(np.float64)) < 5.0


@every_compressor
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values(compressor, bad):
    v = VECTORS["normal"].copy()
    v[4] = bad
    with pytest.raises(ValueError, match="finite"):
        compressor.encode(v, seeded(0))
    for seed in range(5):  # also when rand-k drops the coordinate
        assert not jnp.isfinite(compiled(compressor, v, seeded(seed))).all()


@pytest.mark.parametrize("compressor", [RandK(1), QSGD(2), Natural()])
def test_encode_refuses_what_would_overflow(compressor):
    v = np.full(D, 3.4e38, np.float32)
    with pytest.raises(ValueError, match="finite"):
        compressor.encode(v, seeded(0))


@every_compressor
def test_decode_refuses_wrong_lengths(compressor):
    data = compressor.encode(VECTORS["normal"], seeded(0))
    for wrong in (b"", data[:-1], data + b"\x00"):
        with pytest.raises(ValueError, match="bytes received"):
            compressor.decode(wrong, D)


NAN = np.float32(np.nan).tobytes()


@pytest.mark.parametrize(
    ("compressor", "d", "data"),
    [
        (Identity(), 1, NAN),
        (RandK(1), 2, bytes(8) + NAN),
        (QSGD(4), 2, NAN + bytes(1)),
        (QSGD(4), 2, np.float32(-1.0).tobytes() + bytes(1)),
        (QSGD(4), 2, np.float32(1.0).tobytes() + bytes([5 << 1])),
        (QSGD(4), 1, np.float32(1.0).tobytes() + bytes([1 << 4])),
        (Natural(), 1, bytes([0xFF, 0x00])),
        (Natural(), 1, bytes([0x00, 0x02])),
    ],
    ids=["nan", "nan value", "nan norm", "norm < 0", "level 5 of 4", "tail", "exponent", "tail 9"],
)
def test_decode_refuses_malformed_bytes(compressor, d, data):
    with pytest.raises(ValueError, match="message: "):
        compressor.decode(data, d)


@every_compressor
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_decode_of_arbitrary_bytes_is_finite_or_refused(compressor, data):
    length = compressor.bits(D) // 8
    raw = data.draw(st.binary(min_size=length, max_size=length))
    try:
        decoded = compressor.decode(raw, D)
    except ValueError as error:
        assert str(error).startswith("message: ")
    else:
        assert np.isfinite(decoded).all()
        assert decoded.shape == (D,)


@pytest.mark.parametrize("k", [1, 2_544, 50_889, 50_890])
def test_mask_keeps_exactly_k(k):
    masks = jax.vmap(lambda seed: random_mask(seed, 50_890, k))(jnp.arange(8, dtype=jnp.uint32).reshape(4, 2))
    assert (masks.sum(1) == k).all()
    assert k == 50_890 or len(np.unique(masks, axis=0)) == 4


def test_every_pair_of_coordinates_is_equally_likely():
    d, k, draws = 6, 3, 40_000
    words = jax.random.bits(jax.random.key(5), (draws, 2), jnp.uint32)
    masks = np.asarray(jax.vmap(lambda seed: random_mask(seed, d, k))(words), np.float64)
    together = masks.T @ masks / draws
    expected = np.where(np.eye(d, dtype=bool), k / d, k * (k - 1) / (d * (d - 1)))
    assert np.abs(together - expected).max() < 5 * 0.5 / math.sqrt(draws)


@partial(jax.jit, static_argnums=1)
def smallest_from_every_start(words: jax.Array, k: int) -> jax.Array:
    return jax.vmap(lambda start: _smallest(words, k, start))(jnp.arange(words.size))


@given(
    words=hnp.arrays(np.uint32, 9, elements=st.sampled_from([0, 1, 5, 2**31, 2**32 - 1])),
    k=st.sampled_from([1, 4, 9]),
)
@settings(max_examples=80, deadline=None)
def test_equal_words_are_chosen_without_preference(words, k):
    masks = np.asarray(smallest_from_every_start(jnp.asarray(words), k))
    assert (masks.sum(1) == k).all()
    kth = np.sort(words)[k - 1]
    assert masks[:, words < kth].all()
    assert not masks[:, words > kth].any()
    # Turning the coordinates turns the choice: so a uniform start favours no coordinate.
    turned = np.asarray(smallest_from_every_start(jnp.roll(jnp.asarray(words), 1), k))
    np.testing.assert_array_equal(np.roll(turned, -1, axis=0), np.roll(masks, 1, axis=1))


@every_compressor
def test_system_randomness_compresses_freshly(compressor):
    encodings = {compressor.encode(VECTORS["normal"], SystemRandomness()) for _ in range(20)}
    decoded = [compressor.decode(data, D) for data in encodings]
    assert all(np.isfinite(vector).all() for vector in decoded)
    assert (len(encodings) == 1) == isinstance(compressor, Identity)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandK(0), "keep = 0"),
        (lambda: RandK(2.5), "keep = 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: QSGD(0), "levels = 0"),
        (lambda: QSGD(70_000), "levels = 70000"),
        (lambda: RandK(11).omega(D), "keep = 11"),
        (lambda: RandK(11).bits(D), "keep = 11"),
        (lambda: RandK(11)(jnp.ones(D), seeded(0)), "keep = 11"),
        (lambda: RandK(11).encode(jnp.ones(D), seeded(0)), "keep = 11"),
        (lambda: RandK(11).decode(bytes(52), D), "keep = 11"),
        (lambda: build_compressor("topk", {}), "identity, rand-k, qsgd, natural"),
        (lambda: build_compressor("rand-k", {}), "keep is missing"),
        (lambda: build_compressor("qsgd", {}), "levels is missing"),
        (lambda: build_compressor("natural", {"keep": 3}), "keep = 3"),
        (lambda: build_compressor("rand-k", {"keep": 3, "levels": 2}), "levels = 2"),
    ],
)
def test_errors_name_the_setting(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_build_compressor():
    built: list[Compressor] = [
        build_compressor("identity", {}),
        build_compressor("rand-k", {"keep": 3}),
        build_compressor("qsgd", {"levels": 4}),
        build_compressor("natural", {}),
    ]
    assert built == [Identity(), RandK(3), QSGD(4), Natural()]
    assert [c.omega(100) for c in built] == [0.0, pytest.approx(100 / 3 - 1), 2.5, 0.125]


def test_shift_rate():
    assert shift_rate(0.0) == pytest.approx(math.sqrt(0.5))
    assert shift_rate(19.0) == pytest.approx(math.sqrt(39 / 16_000))
