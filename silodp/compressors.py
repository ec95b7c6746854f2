"""Unbiased compressors of a silo's noised message (SoteriaFL, Definition 2).

A compressor C has E C(v) = v and E|C(v) - v|^2 <= omega |v|^2. It works on a message that is
already private, so it costs no privacy. Calling it simulates the compression inside compiled code;
`encode` and `decode` make and read the real bytes, and `decode(encode(v, r), d)` equals `C(v, r)`
for the same seeded randomness `r`. `bits(d)` is the exact length of the encoding.

What travels (all numbers little-endian):

    identity  d float32
    rand-k    a 64-bit seed, from which both ends derive the mask, and k float32
    qsgd      |v| as a float32; for each coordinate a sign and a level, packed
    natural   for each coordinate sign and exponent of its float32, 9 bits, packed

One `randomness` serves one message: two messages of a silo in one round need two of them, otherwise
they share their mask.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from silodp import registry
from silodp.errors import ConfigError
from silodp.randomness import Randomness, random_words

_MOST_LEVELS = 2**16 - 1  # beyond, float32 leaves too few bits for the random rounding
_WORD_BYTES = 4


def shift_rate(omega: float) -> float:
    """gamma of shifted compression, as SoteriaFL's Theorem 3 has it."""
    return math.sqrt((1.0 + 2.0 * omega) / (2.0 * (1.0 + omega) ** 3))


class Compressor(eqx.Module):
    """A map of R^d that needs fewer bits than d float32: unbiased and random, or else a contraction.

    A biased one sets `unbiased` to False and need not define `omega`; the channel then feeds its error back. A
    subclass's fields are the options of a config.

    Example:
        >>> import silodp
        >>> from silodp.compressors import RandK
        >>> isinstance(RandK(keep=5), silodp.Compressor), RandK(keep=5).bits(100), RandK(keep=5).omega(100)
        (True, 224, 19.0)
    """

    unbiased: ClassVar[bool] = True

    def omega(self, d: int) -> float:
        """The variance: E|C(v) - v|^2 <= omega |v|^2."""
        raise NotImplementedError

    def check(self, d: int) -> None:
        """ValueError, `field = value ...`, when messages of d coordinates cannot be compressed."""
        self.bits(d)

    @abc.abstractmethod
    def bits(self, d: int) -> int:
        """Length of the encoding of d coordinates, in bits."""

    @abc.abstractmethod
    def __call__(self, v: Float[Array, " d"], randomness: Randomness) -> Float[Array, " d"]:
        """The vector that the receiver decodes; non-finite input makes non-finite output."""

    @abc.abstractmethod
    def encode(self, v: Float[Array, " d"], randomness: Randomness) -> bytes:
        """The bytes on the wire; ValueError when `v` is not finite."""

    @abc.abstractmethod
    def decode(self, data: bytes, d: int) -> Float32[np.ndarray, " d"]:
        """The vector in these bytes; ValueError when they are not an encoding of d coordinates."""


class Identity(Compressor):
    """No compression: omega = 0."""

    def omega(self, d: int) -> float:
        return 0.0

    def bits(self, d: int) -> int:
        return 32 * d

    def __call__(self, v: Float[Array, " d"], randomness: Randomness) -> Float[Array, " d"]:
        return v

    def encode(self, v: Float[Array, " d"], randomness: Randomness) -> bytes:
        return _float_bytes(_finite(v))

    def decode(self, data: bytes, d: int) -> Float32[np.ndarray, " d"]:
        _check_length(data, self.bits(d))
        return _read_floats(data)


class RandK(Compressor):
    """Keeps `keep` coordinates, drawn uniformly, times d/keep: omega = d/keep - 1."""

    keep: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"keep = {self.keep!r} must be an integer of at least 1")

    def omega(self, d: int) -> float:
        return self._factor(d) - 1.0

    def bits(self, d: int) -> int:
        self._factor(d)
        return 64 + 32 * self.keep

    def __call__(self, v: Float[Array, " d"], randomness: Randomness) -> Float[Array, " d"]:
        factor = self._factor(v.size)
        # A dropped nan would make a diverged message look healthy.
        kept = random_mask(_mask_seed(randomness), v.size, self.keep) | ~jnp.isfinite(v)
        return jnp.where(kept, v * factor, 0.0)

    def encode(self, v: Float[Array, " d"], randomness: Randomness) -> bytes:
        factor = self._factor(v.size)
        seed = _mask_seed(randomness)
        scaled = _finite(jnp.asarray(v) * factor)
        kept = scaled[np.asarray(random_mask(seed, v.size, self.keep))]
        return np.asarray(seed).astype("<u4").tobytes() + _float_bytes(kept)

    def decode(self, data: bytes, d: int) -> Float32[np.ndarray, " d"]:
        _check_length(data, self.bits(d))
        seed = np.frombuffer(data, "<u4", 2).astype(np.uint32)
        vector = np.zeros(d, np.float32)
        vector[np.asarray(random_mask(jnp.asarray(seed), d, self.keep))] = _read_floats(data[8:])
        return vector

    def _factor(self, d: int) -> float:
        if self.keep > d:
            raise ValueError(f"keep = {self.keep} must be at most the dimension {d}")
        return d / self.keep


class QSGD(Compressor):
    """Rounds |v_j|/|v| up or down at random to a multiple of 1/levels (QSGD, Alistarh et al. 2017).

    omega <= min(d/levels^2, sqrt(d)/levels).
    """

    levels: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not isinstance(self.levels, int) or not 1 <= self.levels <= _MOST_LEVELS:
            raise ValueError(f"levels = {self.levels!r} must be an integer in 1..{_MOST_LEVELS}")

    def omega(self, d: int) -> float:
        return min(d / self.levels**2, math.sqrt(d) / self.levels)

    def bits(self, d: int) -> int:
        return 32 + _packed_bits(d, self._width)

    def __call__(self, v: Float[Array, " d"], randomness: Randomness) -> Float[Array, " d"]:
        return self._restore(*self._quantise(v, randomness))

    def encode(self, v: Float[Array, " d"], randomness: Randomness) -> bytes:
        norm, signed = self._quantise(jnp.asarray(_finite(v)), randomness)
        signed = np.asarray(signed)
        codes = np.abs(signed).astype(np.uint32) << 1 | np.signbit(signed)
        return _float_bytes(_finite(norm)) + _pack(codes, self._width)

    def decode(self, data: bytes, d: int) -> Float32[np.ndarray, " d"]:
        _check_length(data, self.bits(d))
        norm = _read_floats(data[:_WORD_BYTES])[0]
        codes = _unpack(data[_WORD_BYTES:], d, self._width)
        levels = (codes >> 1).astype(np.float32)
        if norm < 0 or levels.max(initial=0) > self.levels:
            raise ValueError(f"message: norm {norm} or a level is outside 0..{self.levels}")
        return np.asarray(self._restore(norm, jnp.where(codes & 1, -levels, levels)))

    @property
    def _width(self) -> int:
        return self.levels.bit_length() + 1

    @eqx.filter_jit
    def _quantise(self, v: Float[Array, " d"], randomness: Randomness) -> tuple[Float[Array, ""], Float[Array, " d"]]:
        """|v| and the signed levels."""
        # In units of a power of two near the largest coordinate: no square under- or overflows.
        unit, per_unit = _power_of_two_near(jnp.max(jnp.abs(v)))
        relative = jnp.abs(v) * per_unit
        norm = jnp.sqrt(jnp.sum(relative**2))
        exact = relative / jnp.where(norm == 0.0, 1.0, norm) * self.levels
        lower = jnp.floor(exact)
        up = randomness.uniform("compress", v.shape) < exact - lower
        return norm * unit, jnp.copysign(jnp.minimum(lower + up, self.levels), v)

    def _restore(self, norm: Any, signed_levels: Any) -> Any:
        # Products only: XLA may turn a division by a constant into a product when it compiles.
        return norm * np.float32(1.0 / self.levels) * signed_levels


class Natural(Compressor):
    """Rounds every |v_j| at random to one of the two powers of two around it: omega = 1/8.

    Natural compression, Horvath et al. 2019. Magnitudes below 2^-126 become 0 or 2^-126,
    without bias too.
    """

    def omega(self, d: int) -> float:
        return 0.125

    def bits(self, d: int) -> int:
        return _packed_bits(d, 9)

    def __call__(self, v: Float[Array, " d"], randomness: Randomness) -> Float[Array, " d"]:
        rounded = jax.lax.bitcast_convert_type(self._codes(v, randomness) << 23, jnp.float32)
        return jnp.where(jnp.isfinite(v), rounded, v)

    def encode(self, v: Float[Array, " d"], randomness: Randomness) -> bytes:
        codes = np.asarray(self._codes(jnp.asarray(_finite(v)), randomness))
        _finite(_from_natural(codes))
        return _pack(codes, 9)

    def decode(self, data: bytes, d: int) -> Float32[np.ndarray, " d"]:
        _check_length(data, self.bits(d))
        return _finite(_from_natural(_unpack(data, d, 9)))

    @eqx.filter_jit
    def _codes(self, v: Float[Array, " d"], randomness: Randomness) -> UInt32[Array, " d"]:
        """Sign and exponent. The mantissa is the probability of the next exponent, in 2^-23ths."""
        words = jax.lax.bitcast_convert_type(v.astype(jnp.float32), jnp.uint32)
        up = randomness.bits("compress", v.shape) >> 9 < words & 0x7FFFFF
        return (words >> 23) + up


def build_compressor(name: str, given: Mapping[str, Any]) -> Compressor:
    """The compressor of that name; its fields are read from `given`, the options of the config."""
    kind = registry.find("compressor", name)
    if not (isinstance(kind, type) and issubclass(kind, Compressor)):
        raise ConfigError(f"algorithm.compressor = {name!r}: is no silodp.Compressor")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for field in fields.values():
        if field.name not in given and field.default is dataclasses.MISSING:
            raise ValueError(f"{field.name} is missing: compressor {name!r} needs it")
        registry.check_option(f"algorithm.{field.name}", given.get(field.name), field.type)
    for option in OPTIONS:
        if option in given and option not in fields:
            raise ValueError(f"{option} = {given[option]} has no meaning for compressor {name!r}; leave it out")
    return kind(**{name: given[name] for name in fields if name in given})


OPTIONS = ("keep", "levels")  # of the library's own compressors


def _mask_seed(randomness: Randomness) -> UInt32[Array, "2"]:
    return randomness.bits("compress", (2,))


@partial(jax.jit, static_argnums=(1, 2))
def random_mask(seed: UInt32[Array, "2"], d: int, k: int) -> Bool[Array, " d"]:
    """Exactly k of d coordinates, each equally likely: where the k smallest random words are.

    A function of the seed alone, so that the receiver can repeat it.
    """
    words_key, start_key = jax.random.split(jax.random.wrap_key_data(seed, impl="threefry2x32"))
    return _smallest(random_words(words_key, (d,)), k, jax.random.randint(start_key, (), 0, d))


def _smallest(words: UInt32[Array, " d"], k: int, start: int | Int[Array, ""]) -> Bool[Array, " d"]:
    """Where the k smallest words are; of equal words those that come first, cyclically from start.

    The k-th smallest is found bit by bit, from the highest, which for d = 50,890 is ten times
    faster than a sort or `top_k`. The random start is there because equal words, though rare, must
    not favour low coordinates: with it each one is kept with probability exactly k/d.
    """

    def set_bit(i: Array, found: Array) -> Array:
        candidate = found | jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        return jnp.where(jnp.sum(words < candidate) < k, candidate, found)

    kth = jax.lax.fori_loop(0, 32, set_bit, jnp.uint32(0))
    below, equal = words < kth, words == kth
    rank = jnp.cumsum(equal)
    from_start = (rank - rank[start]) % rank[-1]
    return below | (equal & (from_start < k - jnp.sum(below)))


def _power_of_two_near(size: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A power of two within a factor 4 of a normal float32, and its inverse, both normal."""
    exponent = jnp.clip(jax.lax.bitcast_convert_type(size, jnp.uint32) >> 23, 1, 253)
    unit, inverse = (jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 254 - exponent))
    return unit, inverse


def _from_natural(codes: np.ndarray) -> Float32[np.ndarray, " d"]:
    return (codes.astype(np.uint32) << 23).view(np.float32)


def _packed_bits(d: int, width: int) -> int:
    return 8 * math.ceil(d * width / 8)


def _pack(codes: np.ndarray, width: int) -> bytes:
    places = np.arange(width, dtype=np.uint32)
    return np.packbits((codes[:, None] >> places & 1).astype(np.uint8), bitorder="little").tobytes()


def _unpack(data: bytes, d: int, width: int) -> UInt32[np.ndarray, " d"]:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[d * width :].any():
        raise ValueError("message: the bits after the last coordinate must be zero")
    places = np.arange(width, dtype=np.uint32)
    return (bits[: d * width].reshape(d, width).astype(np.uint32) << places).sum(1, dtype=np.uint32)


def _float_bytes(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def _read_floats(data: bytes) -> Float32[np.ndarray, " k"]:
    return _finite(np.frombuffer(data, "<f4").astype(np.float32))


def _finite(values: Any) -> np.ndarray:
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError("message: every number must be finite (and stay so in float32)")
    return values


def _check_length(data: bytes, bits: int) -> None:
    if 8 * len(data) != bits:
        raise ValueError(f"message: {len(data)} bytes received, exactly {bits // 8} expected")
