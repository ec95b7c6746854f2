"""The counter-based generator of simulations (Salmon, Moraes, Dror, Shaw 2011), and numbers made of its words.

JAX rolls Threefry's steps into a loop, which writes every step to memory; written out, XLA makes one vectorised pass of
them and of what follows.
"""

from __future__ import annotations

from functools import partial
from math import factorial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

STEPS, FEWER_STEPS = 20, 13  # jax.random's, and the fewest in which the authors know of no statistical flaw
NORMALS = "box-muller"  # how normal numbers are made: another way is another result of the same seed
TURNS = (13, 15, 26, 6, 17, 29, 16, 24)


@partial(jax.jit, static_argnums=3)  # a round draws many keys: traced once for each shape
def threefry(
    key: PRNGKeyArray, left: UInt32[Array, "..."], right: UInt32[Array, "..."], steps: int = STEPS
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32 of counters (left, right)."""
    first, second = jax.random.key_data(key)
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    left, right = left + keys[0], right + keys[1]
    for step in range(steps):
        turn = TURNS[step % len(TURNS)]
        left = left + right
        right = left ^ ((right << turn) | (right >> (32 - turn)))
        if step % 4 == 3:
            group = step // 4 + 1
            left = left + keys[group % 3]
            right = right + keys[(group + 1) % 3] + jnp.uint32(group)
    return left, right


def words(key: PRNGKeyArray, count: int) -> UInt32[Array, " n"]:
    """Those of jax.random.bits, bit for bit."""
    left, right = threefry(key, jnp.uint32(0), jnp.arange(count, dtype=jnp.uint32))
    return left ^ right


def unit(drawn: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Words as numbers in [0, 1): their upper 23 bits."""
    one_to_two = jax.lax.bitcast_convert_type((drawn >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return one_to_two - 1


def normals(key: PRNGKeyArray, count: int) -> Float[Array, " n"]:
    """Standard normal numbers by Box-Muller: neighbours share a radius, and their angles are a quarter of a turn apart.

    Both take all steps for their words: one pass over the numbers is quicker than two with words kept in between.
    """
    places = jnp.arange(count, dtype=jnp.uint32)
    left, right = threefry(key, jnp.uint32(0), places >> 1, FEWER_STEPS)
    # With the barrier these are the same numbers wherever they are used: XLA simplifies nothing across it.
    return jax.lax.optimization_barrier(radius(left) * cosine(right + ((places & 1) << 30)))


def radius(drawn: UInt32[Array, " n"]) -> Float[Array, " n"]:
    """The length of a normal vector in the plane, at most 6.66."""
    # 31 bits, which a signed integer holds: CPUs turn that into a float in one instruction. The float may be 2**31.
    halves = (drawn >> 1).astype(jnp.int32).astype(jnp.float32) + np.float32(0.5)
    return jnp.sqrt(-2 * jnp.log(halves * np.nextafter(np.float32(2**-31), np.float32(0))))  # of numbers in (0, 1)


def cosine(angle: UInt32[Array, " n"]) -> Float[Array, " n"]:
    """Of angles of which 2**32 are a turn: the sine of what is missing to a quarter, by its series.

    A polynomial, since XLA calls the C library for every cosine. It is off by 6e-8 at most, as the next power says.
    """
    missing = jnp.int32(1 << 30) - jnp.abs(angle.astype(jnp.int32))
    quarters = missing.astype(jnp.float32) * np.float32(2**-30)  # in [-1, 1]
    series = jnp.zeros_like(quarters)
    for power in (11, 9, 7, 5, 3, 1):
        series = series * quarters**2 + np.float32((-1) ** (power // 2) * (np.pi / 2) ** power / factorial(power))
    return quarters * series
