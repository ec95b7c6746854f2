"""P_vec: a private sum of vectors from rounded integers and fair coins.

Cheu et al. 2021; Lowy et al. 2023, Algorithms 4 and 5. Every record shifts its vector of norm at
most `clip` to [0, 2 clip] per coordinate, rounds it at random to a grid of `levels` steps, and adds
Binomial(bits_per_record, 1/2). Only the sum over all records and coordinates leaves the shuffler,
so its noise is one Binomial(records * bits_per_record, 1/2) per coordinate; the analyser re-centres
and rescales. The paper's analyser subtracts p b n where the number of messages belongs and adds
back L where N L belongs (errata, E18); all integers here are centred, so no count enters at all.

A silo draws the coins of all its records at once, one binomial per coordinate, and the silos' coins
sum to that one binomial. The law is exact (`silodp.shuffle.coins`), by inversion of 64 random bits.

Formal guarantee: `silodp.privacy.binomial`, for whoever sees the sums over all silos. The certificate
does NOT cover a server that sees a silo's part of them: either the integers are sent as single,
shuffled bits as in the papers (`bits_sent`), or the silos' parts are masked (`silodp.shuffle.masks`).
"""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from silodp.randomness import Randomness, Shape, Step
from silodp.shuffle.coins import cumulative_words

_LARGEST_TABLE_BITS = 2**38  # a table of 5 million entries


class CoinTables(eqx.Module):
    """Draws heads - bits/2 for several numbers of fair coins, by inverting their distribution functions."""

    high: UInt32[Array, " entries"]  # all tables one after the other
    low: UInt32[Array, " entries"]
    starts: Int[Array, " tables"]
    sizes: Int[Array, " tables"]
    halvings: int = eqx.field(static=True)

    def __init__(self, bits: Sequence[int]):
        if max(bits) > _LARGEST_TABLE_BITS:
            raise ValueError(f"bits must be at most {_LARGEST_TABLE_BITS}, not {max(bits)}: lower `levels`")
        tables = [cumulative_words(each) for each in bits]
        sizes, words = [table.size for table in tables], np.concatenate(tables)
        self.high = jnp.asarray((words >> np.uint64(32)).astype(np.uint32))
        self.low = jnp.asarray(words.astype(np.uint32))
        self.starts = jnp.asarray(np.cumsum([0, *sizes[:-1]]), jnp.int32)
        self.sizes = jnp.asarray(sizes, jnp.int32)
        self.halvings = max(sizes).bit_length()

    @property
    def reach(self) -> Int[np.ndarray, " tables"]:
        """The largest absolute value of each table's draws."""
        return (np.asarray(self.sizes) + 1) // 2

    def draw(self, random: Randomness, shape: Shape, table: int | Array = 0, step: Step = 0) -> Int[Array, "..."]:
        """The number of the table's words not above a random 64-bit word, minus the central one."""
        high, low = random.bits("coins", (2, *shape), step)
        start, size = self.starts[table], self.sizes[table]

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

        bracket = (jnp.broadcast_to(start, shape), jnp.broadcast_to(start + size, shape))
        found, _ = jax.lax.fori_loop(0, self.halvings, halve, bracket)
        return found - start - size // 2


class PVec(eqx.Module):
    """The protocol when silo i sends for `sent[i]` records; holds tables, so build it outside jit."""

    levels: int = eqx.field(static=True)
    bits_per_record: int = eqx.field(static=True)
    sent: tuple[int, ...] = eqx.field(static=True)
    tables: CoinTables  # one for each number of records that a silo sends for
    table_of: Int[Array, " silos"]

    def __init__(self, levels: int, bits_per_record: int, sent: Sequence[int]):
        if levels < 2 or levels % 2:
            raise ValueError(f"levels must be even and at least 2, not {levels}")
        self.levels, self.bits_per_record, self.sent = levels, bits_per_record, tuple(sent)
        counts, table_of = np.unique(sent, return_inverse=True)
        self.tables = CoinTables([bits_per_record * int(count) for count in counts])
        self.table_of = jnp.asarray(table_of, jnp.int32)
        largest = sum(sent) * levels // 2 + int(self.tables.reach[table_of].sum())
        if largest >= 2**31:
            raise ValueError(f"levels = {levels}: sums up to {largest} do not fit into 32 bits; lower it")

    def round(
        self, vectors: Float[Array, "n d"], clip: float | Array, random: Randomness, step: Step = 0
    ) -> Int[Array, "n d"]:
        """Vectors in units of 2 clip/levels, rounded at random to keep the mean; zeros when there is no clip norm."""
        usable = jnp.isfinite(clip) & (jnp.asarray(clip) > 0)
        scaled = jnp.where(usable, vectors * (self.levels / 2) / jnp.where(usable, clip, 1.0), 0.0)
        scaled = jnp.clip(scaled, -self.levels / 2, self.levels / 2)
        below = jnp.floor(scaled)
        up = random.uniform("rounding", vectors.shape, step) < scaled - below
        return below.astype(jnp.int32) + up

    def coins(self, random: Randomness, silo: int | Array, dimension: int) -> Int[Array, " d"]:
        """The coins of all records that a silo sends for, to be added to the sum of their rounded vectors."""
        return self.tables.draw(random, (dimension,), self.table_of[silo])

    def decode(self, total: Int[Array, " d"], clip: float | Array) -> Float[Array, " d"]:
        """The estimate of the sum of the vectors from the sum of all integers."""
        return total * (2 * clip / self.levels)

    def noise_std(self, clip: float) -> float:
        """Std of all silos' coins in one coordinate of the decoded sum (without the rounding's)."""
        return math.sqrt(self.bits_per_record * sum(self.sent)) / 2 * (2 * clip / self.levels)

    def bits_sent(self, dimension: int) -> int:
        """Bits a record sends when each message is one labelled bit, as in the paper."""
        label = math.ceil(math.log2(dimension)) if dimension > 1 else 0
        return dimension * (self.levels + self.bits_per_record) * (1 + label)
