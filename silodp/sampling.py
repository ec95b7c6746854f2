"""Which records of a silo answer in a round: full, Poisson, fixed-size, or one pass over the data.

A rule draws a `Batch` (gathered records, 0/1 weights for padding, and the public number the sum is divided by) and
states, for a silo of a given size, how the accountant has to treat it. Sampling with replacement is not offered: the
published guarantees for it are false.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from silodp.gradients.blocks import MOST_OF_FEWER, MOST_RECORDS, SLACK, UNIT, whole_runs
from silodp.privacy import kinds
from silodp.randomness import Randomness

# A running sum of T means of b records each is off by 2u^2 T^2 clips, to be held against SLACK clips / b: T^2 b stays
# so small that this is an eighth of the slack at most, which the sums of two terms' differences leave unused.
MOST_ADDED = int(SLACK / 16 / UNIT**2)

# How far a sum of clipped vectors moves, in clip norms, when one record is replaced: rounding included.
MOVES = 2 * (1 + SLACK)
# The same for a sum of squares v v^T, in squared clip norms: <v v^T, w w^T> >= 0, so two of them are closer than that.
SQUARES_MOVE = 2**0.5 + 2 * SLACK


def farthest(moves: float, *, drawn: bool) -> float:
    """How far a sum moves, in clip norms, when one record is replaced: two vectors are `moves` apart at most.

    A drawn batch is also compared with one that lacks the record, half as far away: there squares are no nearer to each
    other than other vectors.
    """
    return MOVES if drawn else moves


class Batch(eqx.Module):
    """Records that answer, `weights` 1 for real ones and 0 for padding, and the public `divisor` of their sum."""

    records: PyTree[Array]
    weights: Float[Array, " b"]
    divisor: Float[Array, ""]
    rows: Int[Array, " b"]  # where the records stand in the silo; padding points behind the last row
    drawn: bool = eqx.field(static=True, default=False)


@runtime_checkable
class Drawer(Protocol):
    """What a batch rule may look at: one silo's records, its public size, the round and the silo's coins."""

    records: PyTree[Array]
    size: Int[Array, ""]
    round: Int[Array, ""]
    randomness: Randomness


class BatchRule(eqx.Module):
    """How a round's records are chosen, and what that choice costs."""

    drawn: ClassVar[bool] = False  # by coins: a batch is then also compared with itself without a record

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        raise NotImplementedError

    def divisor(self, records: int) -> float:
        """The public number that a silo of this many records divides its sum by."""
        raise NotImplementedError

    def sampling(self, records: int) -> kinds.Sampling:
        """How the accountant sees one record of a silo with this many."""
        raise NotImplementedError

    def bound_over_clip(self, records: int, moves: float = MOVES) -> float:
        """How far the mean moves, in clip norms, when one record is replaced by another that is `moves` away."""
        return farthest(moves, drawn=self.drawn) / self.divisor(records)

    def longest_over_clip(self) -> float:
        """How long a released mean can be, in clip norms."""
        return 1 + SLACK

    def most(self, records: Any) -> int:
        """The most records that a batch can hold."""
        return math.ceil(self.divisor(records))

    def check(self, name: str, records: int) -> None:
        """Refuse a silo that is too small for this rule."""


class Full(BatchRule):
    """Every record in every round."""

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        length = capacity(silo.records)
        weights = (jnp.arange(length) < silo.size).astype(jnp.float32)
        return Batch(silo.records, weights, silo.size.astype(jnp.float32), jnp.arange(length))

    def divisor(self, records: int) -> float:
        return float(records)

    def sampling(self, records: int) -> kinds.Sampling:
        return kinds.Full()

    def check(self, name: str, records: int) -> None:
        _check_sum(name, records)


BLOCK = 64
MOST_COMPARED = 1 << 18  # beyond, a binary search for every slot is quicker


def places_of(joins: Bool[Array, " n"], slots: int, beyond: int) -> Int[Array, " slots"]:
    """Where the first `slots` True of whole blocks stand; `beyond` where there are no more.

    jnp.nonzero, several times faster on a CPU: a running count within each block by one product, then each slot looks
    up its block and its place there.
    """
    within_blocks = joins.reshape(-1, BLOCK).astype(jnp.float32) @ jnp.triu(jnp.ones((BLOCK, BLOCK), jnp.float32))
    counts = within_blocks.astype(jnp.int32)
    upto = jnp.cumsum(counts[:, -1])
    order = jnp.arange(1, slots + 1)
    method = "compare_all" if slots * upto.size < MOST_COMPARED else "scan"
    block = jnp.minimum(jnp.searchsorted(upto, order, method=method), upto.size - 1)
    within = order - (upto - counts[:, -1])[block]
    place = (counts[block] < within[:, None]).sum(axis=1)
    return jnp.where(order <= upto[-1], block * BLOCK + place, beyond).astype(jnp.int32)


class Sampled(BatchRule):
    """Records that are drawn by coins. Each takes a slot at random: side by side, one that is drawn or not would move
    all behind it, and both a record's gradient and the sum are rounded differently in another slot."""

    drawn: ClassVar[bool] = True

    def batch_of(self, silo: Drawer, rows: Int[Array, " b"], divisor: Any, purpose: str, step: Any) -> Batch:
        rows = silo.randomness.scattered(f"batch/{purpose}", rows, step)
        weights = (rows < capacity(silo.records)).astype(jnp.float32)
        return Batch(take(silo.records, rows), weights, jnp.float32(divisor), rows, drawn=self.drawn)


class Poisson(Sampled):
    """Each record joins by its own coin with probability batch/n; the sum is divided by the expected size `batch`."""

    batch: int = eqx.field(static=True)
    key: str = eqx.field(static=True, default="batch")  # of the config, for errors

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        length = capacity(silo.records)
        whole = -(-length // BLOCK) * BLOCK  # as `places_of` wants it; the first words stay what they are
        coins = silo.randomness.bits(f"batch/{purpose}", (whole,), step)
        # Rounded down, so that the real rate never exceeds the accounted one.
        rate = self.expected(silo.size) / silo.size.astype(jnp.float32)
        threshold = jnp.minimum(rate * (1 - 1e-6), 1 - 2.0**-24) * 2.0**32
        joins = (coins < threshold.astype(jnp.uint32)) | self.takes_all(silo.size)
        joins = joins & (jnp.arange(whole) < silo.size)
        chosen = places_of(joins, whole_runs(min(length, self.most(length))), length)
        return self.batch_of(silo, chosen, self.expected(silo.size), purpose, step)

    def expected(self, records: Any) -> Any:
        return self.batch

    def takes_all(self, records: Any) -> Any:
        """Whether a silo of so many gives all of them. In float32 a share just below 1 is 1: not told by the rate."""
        return self.batch >= records

    def divisor(self, records: int) -> float:
        return float(self.expected(records))

    def most(self, records: Any) -> int:
        return poisson_capacity(math.ceil(self.expected(records)))

    def sampling(self, records: int) -> kinds.Sampling:
        rate = self.expected(records) / records
        return kinds.Full() if rate == 1 else kinds.Poisson(rate)

    def longest_over_clip(self) -> float:
        return (1 + SLACK) * whole_runs(poisson_capacity(self.batch)) / self.batch

    def check(self, name: str, records: int) -> None:
        _check_size(name, self.batch, records, self.key)


class Share(Poisson):
    """Poisson with one rate everywhere: larger silos send more, as weights by size ask. Only for sums that hide how
    many records are in them."""

    rate: float = eqx.field(static=True, kw_only=True)

    def expected(self, records: Any) -> Any:
        return self.rate * records

    def takes_all(self, records: Any) -> Any:
        return self.rate >= 1

    def longest_over_clip(self) -> float:
        raise NotImplementedError("a share's sums have no noise that is told by its length")

    def check(self, name: str, records: int) -> None:
        _check_sum(name, self.most(records), MOST_OF_FEWER)
        if self.rate * records < 1:
            raise ValueError(
                f"algorithm.batch_share = {self.rate:g}: draws less than one of the {records} records of silo "
                f"{name!r}; give at least {1 / records:.3g}"
            )


class FixedSize(Sampled):
    """Exactly `batch` records, uniformly without replacement."""

    batch: int = eqx.field(static=True)
    key: str = eqx.field(static=True, default="batch")  # of the config, for errors

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        length = capacity(silo.records)
        tickets, again = silo.randomness.uniform(f"batch/{purpose}", (2, length), step)
        tickets = jnp.where(jnp.arange(length) < silo.size, tickets, -1.0)
        # There are 2^24 tickets at most. Who ties for the last place draws again: else the first records are favoured.
        last = jnp.min(jax.lax.top_k(tickets, self.batch)[0])
        tickets = jnp.where(tickets > last, 1.0, jnp.where(tickets == last, again, -1.0))
        chosen = jax.lax.top_k(tickets, self.batch)[1]
        return self.batch_of(silo, chosen, self.batch, purpose, step)

    def divisor(self, records: int) -> float:
        return float(self.batch)

    def sampling(self, records: int) -> kinds.Sampling:
        if self.batch == records:
            return kinds.Full()
        return kinds.FixedSize(self.batch, records)

    def check(self, name: str, records: int) -> None:
        _check_size(name, self.batch, records, self.key)


class OnePass(BatchRule):
    """Disjoint chunks in the order of the data: round r uses chunk r, so each record is used once in the whole run.

    `chunk` records a round in every silo, or, left out, floor(n_i / rounds) of silo i.
    """

    rounds: int = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True, default=None)

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        if not (isinstance(step, int) and step == 0):
            raise ValueError("one pass: a round's chunk is used once; local steps need batches of another kind")
        length = capacity(silo.records)
        slots = self.chunk if self.chunk is not None else length // self.rounds
        chunk = jnp.int32(self.chunk) if self.chunk is not None else silo.size // self.rounds
        positions = silo.round * chunk + jnp.arange(slots)
        real = (jnp.arange(slots) < chunk) & (positions >= 0) & (positions < silo.size)
        rows = jnp.where(real, positions, length)
        return Batch(take(silo.records, rows), real.astype(jnp.float32), chunk.astype(jnp.float32), rows)

    def divisor(self, records: int) -> float:
        return float(self.chunk if self.chunk is not None else records // self.rounds)

    def sampling(self, records: int) -> kinds.Sampling:
        return kinds.Disjoint()

    def check(self, name: str, records: int) -> None:
        _check_sum(name, self.chunk or records // self.rounds)
        needed = self.rounds * (self.chunk or 1)
        if needed > records:
            raise ValueError(
                f"algorithm.rounds = {self.rounds}: one pass uses each record once, but silo {name!r} has {records} "
                f"records and {needed} are needed; use at most {records // (self.chunk or 1)} rounds"
            )


class Cumulative(OnePass):
    """One pass whose chunks stay in every later release (mu2's running sums): a record of the first round is in all.

    Without a `chunk` a silo's records are shared out over all rounds: the first n_i mod rounds chunks have one more.
    """

    def draw(self, silo: Drawer, purpose: str, step: Any = 0) -> Batch:
        if self.chunk is not None:
            return super().draw(silo, purpose, step)
        length = capacity(silo.records)
        slots = jnp.arange(-(-length // self.rounds))
        least, longer = silo.size // self.rounds, silo.size % self.rounds
        own = least + (silo.round < longer)
        positions = silo.round * least + jnp.minimum(silo.round, longer) + slots
        real = (slots < own) & (positions >= 0) & (positions < silo.size)
        rows = jnp.where(real, positions, length)
        return Batch(take(silo.records, rows), real.astype(jnp.float32), own.astype(jnp.float32), rows)

    def least(self, records: Any) -> Any:
        """The smallest chunk of a silo with so many records."""
        return records // self.rounds if self.chunk is None else self.chunk

    def sampling(self, records: int) -> kinds.Sampling:
        return kinds.Full()

    def check(self, name: str, records: int) -> None:
        super().check(name, records)
        chunk = self.chunk or -(-records // self.rounds)  # the largest
        if self.rounds**2 * chunk > MOST_ADDED:
            raise ValueError(
                f"algorithm.rounds = {self.rounds}: the rounding of running sums of {chunk} records each is proven for "
                f"{math.isqrt(MOST_ADDED // chunk)} rounds; use fewer, or a smaller algorithm.batch"
            )

    def longest_over_clip(self) -> float:
        return (1 + SLACK) * self.rounds


MOST_CHANGED = 1 << 17  # records of a round, of whose gradients a table's sum holds the changes


class TwoLevel(Poisson):
    """A Poisson batch of differences of clipped gradients plus a full mean of them, kept in a table (SAGA)."""

    most_drawn: ClassVar[int] = MOST_CHANGED

    def moves(self, records: Any) -> tuple[Any, Any]:
        """How far the estimate moves, in clip norms, when the replaced record is not drawn, and when it is.

        A drawn one has up to three gradients in it: a new and an old one in the batch's mean, which the old one's part
        of the full mean shortens. Each of the three sums has its own rounding.
        """
        in_batch, in_all = 2 / self.batch, 2 / records
        return in_all * (1 + SLACK), 2 * in_batch - in_all + SLACK * (2 * in_batch + in_all)

    def bound_over_clip(self, records: Any, moves: float = MOVES) -> Any:
        return self.moves(records)[1]

    def longest_over_clip(self) -> float:
        return 2 * super().longest_over_clip() + 1 + SLACK

    def check(self, name: str, records: int) -> None:
        super().check(name, records)
        _check_sum(name, records)
        _check_sum(name, self.batch, self.most_drawn)

    def sampling(self, records: int) -> kinds.Sampling:
        undrawn, drawn = self.moves(records)
        return kinds.TwoLevel(self.batch, records, undrawn / drawn)


class Recomputed(TwoLevel):
    """TwoLevel whose old gradients are computed twice, for the full mean and for the batch (SVRG).

    Two programs may add up one product in two orders. A record whose products cancel then has two gradients that point
    anywhere, so the full mean's must not be set off against the batch's.
    """

    most_drawn: ClassVar[int] = MOST_OF_FEWER  # no sum lasts

    def moves(self, records: Any) -> tuple[Any, Any]:
        in_batch, in_all = 2 / self.batch, 2 / records
        return in_all * (1 + SLACK), (2 * in_batch + in_all) * (1 + SLACK)


def build_rule(kind: str | None, batch: int | None, rounds: int, key: str = "batch") -> BatchRule:
    """The rule named in the config; without a `batch` every record answers."""
    if kind in ("one-pass", "cumulative"):
        return (OnePass if kind == "one-pass" else Cumulative)(rounds, batch)
    if batch is None or kind == "full":
        return Full()
    rules = {"poisson": Poisson, "fixed": FixedSize, "two-level": TwoLevel}
    return rules[kind or "poisson"](batch, key)


def capacity(records: PyTree[Array]) -> int:
    """Rows of a silo's padded records."""
    return jax.tree.leaves(records)[0].shape[0]


def take(records: PyTree[Array], rows: Int[Array, " b"]) -> PyTree[Array]:
    """The records of these rows, zeros for padding. It shows no record: one that is not a number turns the sum of its
    block to another program (silodp.gradients.structured), and must have no say in other blocks, or if not drawn."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="fill", fill_value=0), records)


def poisson_capacity(batch: int) -> int:
    """Slots that a Poisson batch of this mean overflows with probability below `kinds.OVERFLOW`, which is part of delta
    (Bernstein)."""
    exponent = -math.log(kinds.OVERFLOW)
    return batch + math.ceil(exponent / 3 + math.sqrt(exponent**2 / 9 + 2 * exponent * batch))


def _check_sum(name: str, records: int, most: int = MOST_RECORDS) -> None:
    if records > most:
        raise ValueError(
            f"data: silo {name!r} has {records} records in a sum; its rounding is proven up to {most}: "
            "give algorithm.batch, or a smaller one, or split the silo"
        )


def _check_size(name: str, batch: int, records: int, key: str = "batch") -> None:
    _check_sum(name, batch, MOST_OF_FEWER)
    if batch > records:
        raise ValueError(
            f"algorithm.{key} = {batch} exceeds the {records} records of silo {name!r}; give at most {records}"
        )
