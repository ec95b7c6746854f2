"""Where every random number comes from: a seed for simulation, the operating system for real.

The two classes answer the same questions (`noised`, `normal`, `uniform`, `bits`), so an algorithm
cannot tell them apart. Simulations and tests use `SeededRandomness`: the run can be repeated,
therefore whoever knows the seed can subtract the noise, and nothing made with it is private.
Whatever leaves a silo for real uses `SystemRandomness`.

`purpose` names what the numbers are for ("noise", "batch", "compress"): different purposes, and
different steps of one purpose, give independent numbers.
"""

import os
import zlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.scipy.special import ndtri
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from silodp import noise, threefry
from silodp.doubles import Double
from silodp.later import Later

special = Later("scipy.special")

Shape = tuple[int, ...]
Step = int | Int[Array, ""]

GRID_STEPS = 256  # of real noise in a standard deviation, at least
SMALLEST = 2.0**-60  # of numbers that are put on a grid

SERVER = -1  # the server's place among the silos, for its keys


@runtime_checkable
class Randomness(Protocol):
    """A source of random numbers that can be drawn from inside compiled code."""

    def step_of(self, noised: Float[Array, " d"], std: Float[Array, ""]) -> Float[Array, ""]:
        """A power of two of which the noised numbers are (nearly, if a seed made them) multiples."""
        ...

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        """value + std * (standard normal numbers), float32."""
        ...

    def tilted(
        self, purpose: str, unit: Float[Array, "n d"], threshold: float, above: float, step: Step = 0
    ) -> Float[Array, "n d"]:
        """Normal vectors whose component along each unit row lies above the threshold with probability `above`."""
        ...

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        """Standard normal numbers, float32."""
        ...

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        """Uniform numbers in [0, 1), float32."""
        ...

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        """Uniform 32-bit words."""
        ...

    def scattered(self, purpose: str, rows: Int[Array, " n"], step: Step = 0) -> Int[Array, " n"]:
        """The rows in a uniformly random order; a simulation, which it would change nothing but rounding in, keeps its
        own."""
        ...


class SeededRandomness(eqx.Module):
    """Repeatable numbers, a function of (key, purpose, step): for simulation and tests only.

    The caller folds the round and the silo into `key`; asking twice for the same purpose and step
    gives the same numbers.
    """

    key: PRNGKeyArray

    def step_of(self, noised: Float[Array, " d"], std: Float[Array, ""]) -> Float[Array, ""]:
        return power_of_two(jnp.maximum(jnp.max(jnp.abs(noised)), SMALLEST)) * 2.0**-29

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        return value.high + std * self.normal(purpose, value.high.shape, step)

    def tilted(
        self, purpose: str, unit: Float[Array, "n d"], threshold: float, above: float, step: Step = 0
    ) -> Float[Array, "n d"]:
        count, share = unit.shape[0], float(special.ndtr(-threshold))
        is_above = self.uniform(f"{purpose} side", (count,), step) < above
        place = 1.0 - self.uniform(f"{purpose} component", (count,), step)  # in (0, 1]
        # Inverse of the normal law from the nearer tail; the smallest argument stays off zero.
        along = jnp.where(is_above, -ndtri(place * share), ndtri(place * (1.0 - share)))
        across = self.normal(f"{purpose} direction", unit.shape, step)
        across = across - jnp.sum(across * unit, axis=1, keepdims=True) * unit
        return along[:, None] * unit + across

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return threefry.normals(self._key(purpose, step), _count(shape)).reshape(shape)

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return threefry.unit(self.bits(purpose, shape, step))

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        return random_words(self._key(purpose, step), shape)

    def scattered(self, purpose: str, rows: Int[Array, " n"], step: Step = 0) -> Int[Array, " n"]:
        return rows

    def _key(self, purpose: str, step: Step) -> PRNGKeyArray:
        # crc32 and not hash(): every process must derive the same key from the same name.
        return fold(fold(self.key, zlib.crc32(purpose.encode())), step)


class SystemRandomness(eqx.Module):
    """Numbers from the operating system's entropy: what a silo uses for what it really sends.

    No two draws are related, whatever their purpose and step. Works under jit, scan and cond, but
    not under vmap: a silo in its own process has nobody to be stacked with.

    Noise is exact: `noised` gives a real Gaussian around the value, rounded to a public grid, and `tilted` rounds as
    well (silodp.noise): the lowest bits say nothing. `normal` is for directions that depend on no record.
    """

    def step_of(self, noised: Float[Array, " d"], std: Float[Array, ""]) -> Float[Array, ""]:
        return power_of_two(std) / GRID_STEPS

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        del purpose, step
        shape = jax.ShapeDtypeStruct(value.high.shape, jnp.float32)
        grid = self.step_of(value.high, std)
        return io_callback(_system_noised, shape, value.high, value.low, std, grid, ordered=True)

    def tilted(
        self, purpose: str, unit: Float[Array, "n d"], threshold: float, above: float, step: Step = 0
    ) -> Float[Array, "n d"]:
        del purpose, step
        draw = lambda rows: noise.tilted(np.asarray(rows), threshold, above, _ENTROPY).astype(np.float32)
        return io_callback(draw, jax.ShapeDtypeStruct(unit.shape, jnp.float32), unit, ordered=True)

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        del purpose, step
        return _draw(_system_normal, shape, jnp.float32)

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        del purpose, step
        return _draw(_system_uniform, shape, jnp.float32)

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        del purpose, step
        return _draw(_system_bits, shape, jnp.uint32)

    def scattered(self, purpose: str, rows: Int[Array, " n"], step: Step = 0) -> Int[Array, " n"]:
        del purpose, step
        return rows[_draw(_system_order, rows.shape, jnp.int32)]


class Scoped(eqx.Module):
    """The same source under a name: two users of one source must not share their purposes."""

    source: Randomness
    scope: str = eqx.field(static=True)

    def step_of(self, noised: Float[Array, " d"], std: Float[Array, ""]) -> Float[Array, ""]:
        return self.source.step_of(noised, std)

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        return self.source.noised(f"{self.scope}/{purpose}", value, std, step)

    def tilted(
        self, purpose: str, unit: Float[Array, "n d"], threshold: float, above: float, step: Step = 0
    ) -> Float[Array, "n d"]:
        return self.source.tilted(f"{self.scope}/{purpose}", unit, threshold, above, step)

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return self.source.normal(f"{self.scope}/{purpose}", shape, step)

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return self.source.uniform(f"{self.scope}/{purpose}", shape, step)

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        return self.source.bits(f"{self.scope}/{purpose}", shape, step)

    def scattered(self, purpose: str, rows: Int[Array, " n"], step: Step = 0) -> Int[Array, " n"]:
        return self.source.scattered(f"{self.scope}/{purpose}", rows, step)


class SharedBatch(eqx.Module):
    """A source whose batches of one name are drawn from a key of their own, fresh in every round: two questions of a
    round then get the same records, which a source that never repeats itself could not give."""

    source: Randomness
    key: PRNGKeyArray
    name: str = eqx.field(static=True)

    def step_of(self, noised: Float[Array, " d"], std: Float[Array, ""]) -> Float[Array, ""]:
        return self.source.step_of(noised, std)

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        return self.source.noised(purpose, value, std, step)

    def tilted(
        self, purpose: str, unit: Float[Array, "n d"], threshold: float, above: float, step: Step = 0
    ) -> Float[Array, "n d"]:
        return self.source.tilted(purpose, unit, threshold, above, step)

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return self.source.normal(purpose, shape, step)

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        return self._of(purpose).uniform(purpose, shape, step)

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        return self._of(purpose).bits(purpose, shape, step)

    def scattered(self, purpose: str, rows: Int[Array, " n"], step: Step = 0) -> Int[Array, " n"]:
        return self.source.scattered(purpose, rows, step)  # the same records, wherever they stand

    def _of(self, purpose: str) -> Randomness:
        return SeededRandomness(self.key) if purpose == self.name else self.source


def power_of_two(x: Float[Array, ""]) -> Float[Array, ""]:
    """The largest that is not above x > 0: x without the bits behind its first."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)


def random_words(key: PRNGKeyArray, shape: Shape) -> UInt32[Array, "..."]:
    """jax.random.bits, bit for bit, several times faster on a CPU."""
    return threefry.words(key, _count(shape)).reshape(shape)


def fold(key: PRNGKeyArray, number: Step) -> PRNGKeyArray:
    """jax.random.fold_in, bit for bit, without its loop."""
    pair = threefry.threefry(key, jnp.uint32(0), jnp.asarray(number, jnp.uint32))
    # Without the barrier XLA merges a chain of keys into the pass that uses them, which takes seconds to compile.
    return jax.random.wrap_key_data(jax.lax.optimization_barrier(jnp.stack(pair)), impl="threefry2x32")


def seeded(seed: int) -> PRNGKeyArray:
    """jax.random.key, bit for bit, without compiling a program."""
    return jax.random.wrap_key_data(jax.device_put(np.array([0, seed % 2**32], np.uint32)), impl="threefry2x32")


@jax.jit  # in a message run, outside any program: one of its own instead of six
def party_key(key: PRNGKeyArray, round: Any, index: Any) -> PRNGKeyArray:
    """The seed of one party (a silo's index, or SERVER) in one round of a simulation; round -1 is before the first."""
    return fold(fold(key, round + 1), index + 1)


def _draw(source: Callable[[Shape], np.ndarray], shape: Shape, dtype: Any) -> Array:
    # Ordered: XLA may merge or move an unordered call, and then two draws could be one.
    return io_callback(lambda: source(shape), jax.ShapeDtypeStruct(shape, dtype), ordered=True)


_ENTROPY = noise.Entropy()


def _system_noised(high: np.ndarray, low: np.ndarray, std: np.ndarray, grid: np.ndarray) -> np.ndarray:
    # Float32 may not hold all multiples of the grid; rounding to one that it holds comes after the noise.
    value = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    steps = noise.rounded_gaussian(value, float(std), float(grid), _ENTROPY)
    return (steps * float(grid)).astype(np.float32)


def _system_bits(shape: Shape) -> np.ndarray:
    return np.frombuffer(os.urandom(4 * _count(shape)), np.uint32).reshape(shape)


def _system_order(shape: Shape) -> np.ndarray:
    """Of so many places, each order with the same chance: exactly, since words that tie are all drawn again."""
    while True:
        words = np.frombuffer(os.urandom(8 * _count(shape)), np.uint64)
        order = np.argsort(words)
        if (np.diff(words[order]) > 0).all():
            return order.astype(np.int32)


def _system_uniform(shape: Shape) -> np.ndarray:
    # 24 bits, what float32 holds exactly: rounding more of them could give 1.
    return (_system_bits(shape) >> 8).astype(np.float32) * np.float32(2**-24)


def _system_normal(shape: Shape) -> np.ndarray:
    """Box-Muller in float64: two Gaussians from two uniforms."""
    pairs = (_count(shape) + 1) // 2
    drawn = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
    # In (0, 1]: the logarithm never sees zero.
    uniforms = (drawn.astype(np.float64) + 1.0) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniforms[0])), 2.0 * np.pi * uniforms[1]
    gaussians = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return gaussians[: _count(shape)].astype(np.float32).reshape(shape)


def _count(shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64))
