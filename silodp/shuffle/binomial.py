"""P_vec: a private sum of vectors from rounded integers and fair coins.

Cheu et al. 2021; Lowy et al. 2023, Algorithms 4 and 5. Every record shifts its vector of norm at
most `clip` to [0, 2 clip] per coordinate, rounds it at random to a grid of `levels` steps, and adds
Binomial(bits_per_record, 1/2). Only the sum over all records and coordinates leaves the shuffler,
so its noise is one Binomial(records * bits_per_record, 1/2) per coordinate; the analyser re-centres
and rescales. The paper's analyser subtracts p b n where the number of messages belongs and adds
back L where N L belongs (errata, E18); all integers here are centred, so no count enters at all.

Simulation draws that one binomial; messages draw one per record and coordinate. Both use the exact
law (`silodp.shuffle.coins`) by inversion of 64 random bits.

Formal guarantee: `silodp.privacy.binomial`, for whoever sees the sums. The certificate does NOT
cover a server that sees the records' integers one by one: either the integers are sent as single
bits (`bits_sent`), or something the server does not control adds them up.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from silodp.randomness import Randomness, Shape, Step
from silodp.shuffle.coins import cumulative_words

_LARGEST_TABLE_BITS = 2**38  # a table of 12 million entries


class CoinTable(eqx.Module):
    """Draws heads - bits/2 for `bits` fair coins by inverting the distribution function."""

    high: UInt32[Array, " size"]
    low: UInt32[Array, " size"]

    def __init__(self, bits: int):
        if bits > _LARGEST_TABLE_BITS:
            raise ValueError(f"bits must be at most {_LARGEST_TABLE_BITS}, not {bits}: lower `levels`")
        words = cumulative_words(bits)
        self.high = jnp.asarray((words >> np.uint64(32)).astype(np.uint32))
        self.low = jnp.asarray(words.astype(np.uint32))

    def draw(self, random: Randomness, shape: Shape, step: Step = 0) -> Int[Array, "..."]:
        """The number of table words not above a random 64-bit word, minus the central one."""
        high, low = random.bits("coins", (2, *shape), step)

        def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            left, right = bracket
            middle = (left + right) // 2
            at_high, at_low = self.high[middle], self.low[middle]
            passed = (at_high < high) | ((at_high == high) & (at_low <= low))
            open_ = left < right
            return (
                jnp.where(open_ & passed, middle + 1, left),
                jnp.where(open_ & ~passed, middle, right),
            )

        size = self.high.size
        start = (jnp.zeros(shape, jnp.int32), jnp.full(shape, size, jnp.int32))
        found, _ = jax.lax.fori_loop(0, size.bit_length(), halve, start)
        return found - size // 2


class PVec(eqx.Module):
    """The protocol for `records` senders in all; holds tables, so build it outside jit."""

    levels: int = eqx.field(static=True)
    bits_per_record: int = eqx.field(static=True)
    records: int = eqx.field(static=True)
    total_coins: CoinTable
    record_coins: CoinTable

    def __init__(self, levels: int, bits_per_record: int, records: int):
        if levels < 2 or levels % 2:
            raise ValueError(f"levels must be even and at least 2, not {levels}")
        self.levels, self.bits_per_record, self.records = levels, bits_per_record, records
        self.total_coins = CoinTable(bits_per_record * records)
        self.record_coins = CoinTable(bits_per_record)

    def round(
        self, vectors: Float[Array, "n d"], clip: float | Array, random: Randomness, step: Step = 0
    ) -> Int[Array, "n d"]:
        """Vectors in units of 2 clip/levels, rounded up or down at random to keep the mean."""
        scaled = vectors * (self.levels / 2) / jnp.where(jnp.asarray(clip) > 0, clip, 1.0)
        scaled = jnp.clip(scaled, -self.levels / 2, self.levels / 2)
        below = jnp.floor(scaled)
        up = random.uniform("rounding", vectors.shape, step) < scaled - below
        return below.astype(jnp.int32) + up

    def messages(
        self, vectors: Float[Array, "n d"], clip: float | Array, random: Randomness, step: Step = 0
    ) -> Int[Array, "n d"]:
        """What the records send: integers in 0..levels + bits_per_record."""
        noise = self.record_coins.draw(random, vectors.shape, step)
        rounded = self.round(vectors, clip, random, step)
        return rounded + noise + (self.levels + self.bits_per_record) // 2

    def add(self, messages: Int[Array, "n d"]) -> Int[Array, " d"]:
        """The centred sum of messages: what leaves the shuffler."""
        return jnp.sum(messages - (self.levels + self.bits_per_record) // 2, axis=0)

    def noise(self, random: Randomness, dimension: int, step: Step = 0) -> Int[Array, " d"]:
        """The coins of all records at once, to be added to the sum of all rounded vectors."""
        return self.total_coins.draw(random, (dimension,), step)

    def decode(self, total: Int[Array, " d"], clip: float | Array) -> Float[Array, " d"]:
        """The estimate of the sum of the vectors from the centred sum of the messages."""
        return total * (2 * clip / self.levels)

    def noise_std(self, clip: float) -> float:
        """Std of the coins in one coordinate of the decoded sum (without the rounding's)."""
        return math.sqrt(self.bits_per_record * self.records) / 2 * (2 * clip / self.levels)

    def bits_sent(self, dimension: int) -> int:
        """Bits a record sends when each message is one labelled bit, as in the paper."""
        label = math.ceil(math.log2(dimension)) if dimension > 1 else 0
        return dimension * (self.levels + self.bits_per_record) * (1 + label)

    def integer_bits(self, dimension: int) -> int:
        """Bits a record sends when each coordinate is one integer (needs a trusted adder)."""
        return dimension * (self.levels + self.bits_per_record).bit_length()
