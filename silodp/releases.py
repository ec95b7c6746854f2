"""From records to releases: clipped vectors of records, their mean, how far it moves, and how often it was released.

A `RecordMean` is the only door from records to messages. Evaluated, it is a `Release`: a vector with its own
sensitivity. `Public` is what a silo has privatised before. `Account` counts what was really released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, Shaped

from silodp.doubles import Double
from silodp.gradients.blocks import RUN, clip_factor, computed_once, in_runs, sum_in_blocks, weighted_rows
from silodp.sampling import MOVES, SQUARES_MOVE, Batch, farthest

if TYPE_CHECKING:
    from silodp.objective import Objective

Change = Callable[[Any, Any], Any]  # (vectors of a microbatch, its number) -> as many vectors
MICROBATCH_FLOATS = 1 << 22  # numbers of per-record vectors in memory at a time

Vector = Float[Array, " d"]
Scalar = Float[Array, ""]


class Release(eqx.Module):
    """A vector made from private records that moves by at most `bound` (l2) when one of them is replaced.

    Whoever makes one by hand states the bound; the library computes it for a `RecordMean` only (`stated` is False).

    Args:
        value: the vector. bound: how far it may move. stream: the line of `releases()` that it belongs to.
        rest: what `value` has lost by rounding to float32, where it is known: noise is added to both.

    Example:
        >>> import jax.numpy as jnp, silodp
        >>> silodp.Release(jnp.ones(3), jnp.float32(0.5), "value").stated
        True
    """

    value: Vector
    bound: Scalar
    stream: str = eqx.field(static=True)
    stated: bool = eqx.field(static=True, default=True)
    rest: Vector | None = None

    @property
    def exact(self) -> Double:
        return Double.of(self.value) if self.rest is None else Double(self.value, self.rest)


class Public(eqx.Module):
    """A vector that only depends on what the silo has privatised already: it needs no further noise.

    The claim is checked: silodp.flow follows the records through the query that returns it.

    Args:
        value: the vector, made of what `silo.privatise(...)` gave and of public arguments.

    Example:
        >>> import jax.numpy as jnp, silodp
        >>> silodp.Public(jnp.zeros(3)).value.shape
        (3,)
    """

    value: Vector


class Gradients(eqx.Module):
    """A record's vector: sum_k c_k grad f(x_k; z)."""

    moves: ClassVar[float] = MOVES  # of their sum when one record is replaced, in clip norms

    objective: Objective
    points: tuple[Vector, ...]
    coefficients: tuple[Any, ...]

    @property
    def size(self) -> int:
        return self.points[0].size

    def clipped_sum(self, records: PyTree, weights: Array, clip: Any) -> Double:
        return self.objective.clipped_sum(self.points, self.coefficients, records, weights, clip)

    def clipped(self, records: PyTree, clip: Any) -> Float[Array, "m d"]:
        return self.objective.per_record(self.points, self.coefficients, records, clip)


class Statistic(eqx.Module):
    """A record's vector: any function of the record."""

    moves: ClassVar[float] = MOVES

    function: Callable[[PyTree], Vector]
    size: int = eqx.field(static=True)

    def clipped_sum(self, records: PyTree, weights: Array, clip: Any) -> Double:
        bound = jnp.inf if clip is None else clip

        def run_sums(records: PyTree, weights: Array) -> Array:
            rows = self.clipped(records, bound)
            return weighted_rows(weights, jnp.where(weights[:, None] > 0, rows, 0))

        return sum_in_blocks(run_sums, records, weights, max(1, MICROBATCH_FLOATS // self.size))

    def clipped(self, records: PyTree, clip: Any) -> Float[Array, "m d"]:
        # As float32: squares of whole numbers wrap around and those of half precision vanish, and then nothing clips.
        rows = computed_once(jax.vmap(self.function)(records).astype(jnp.float32))
        squares = jnp.sum(jnp.square(rows), axis=1)
        good = jnp.isfinite(squares)
        factor = clip_factor(jnp.where(good, squares, 0), jnp.float32(clip), self.size)
        return jnp.where(good[:, None], rows * factor[:, None], 0)


class Squares(eqx.Module):
    """A record's vector: v v^T of any function v of the record, packed (`packed`); its norm is |v|^2."""

    moves: ClassVar[float] = SQUARES_MOVE

    function: Callable[[PyTree], Vector]
    length: int = eqx.field(static=True)  # of v

    @property
    def size(self) -> int:
        return self.length * (self.length + 1) // 2

    def clipped_sum(self, records: PyTree, weights: Array, clip: Any) -> Double:
        def run_sums(records: PyTree, weights: Array) -> Array:
            rows = jnp.where(weights[:, None] > 0, self._rows(records, clip), 0)
            squares = jnp.einsum("rj,rja,rjb->rab", *(in_runs(leaf, 0) for leaf in (weights, rows, rows)))
            return jax.vmap(packed)(squares)

        runs = max(1, MICROBATCH_FLOATS // self.length**2)
        return sum_in_blocks(run_sums, records, weights, runs * RUN)

    def clipped(self, records: PyTree, clip: Any) -> Float[Array, "m d"]:
        return jax.vmap(lambda v: packed(jnp.outer(v, v)))(self._rows(records, clip))

    def _rows(self, records: PyTree, clip: Any) -> Float[Array, "m k"]:
        """v of each record, no longer than the root of the clip norm."""
        longest = jnp.sqrt(jnp.inf if clip is None else jnp.float32(clip))
        return Statistic(self.function, self.length).clipped(records, longest)


def packed(matrix: Float[Array, "k k"]) -> Vector:
    """A symmetric matrix as a vector of the same norm: every entry off the diagonal once, times sqrt(2)."""
    rows, columns = np.triu_indices(matrix.shape[0])
    return matrix[rows, columns] * jnp.asarray(np.where(rows == columns, 1.0, 2**0.5), jnp.float32)


def unpacked(vector: Vector) -> Float[Array, "k k"]:
    """The symmetric matrix again."""
    length = math.isqrt(2 * vector.size)
    rows, columns = np.triu_indices(length)
    entries = vector / jnp.asarray(np.where(rows == columns, 1.0, 2**0.5), jnp.float32)
    upper = jnp.zeros((length, length)).at[rows, columns].set(entries)
    return upper + jnp.triu(upper, 1).T


MOST_DRAWN_POINTS = 2  # with and without a record, one clip norm has the roundings of both beside it


class RecordMean(eqx.Module):
    """mean over a batch of clip(a record's vector, clip): the only door from records to messages.

    It stays unevaluated until a channel asks, because a shuffled channel needs the records one by one.
    """

    vectors: Gradients | Statistic | Squares
    batch: Batch
    clip: Any  # a traced scalar, or None: not clipped, hence not private
    stream: str = eqx.field(static=True)

    def mean(self) -> Double:
        total = self.vectors.clipped_sum(self.batch.records, self.batch.weights, self.clip)
        return total / self.batch.divisor

    def release(self) -> Release:
        self._check_points()
        mean = self.mean()
        # A clip below zero (of a schedule that went too far) bounds nothing: a bound below zero lets nothing out, and
        # the account does not settle.
        clip = jnp.inf if self.clip is None else self.clip
        moves = farthest(self.vectors.moves, drawn=self.batch.drawn)
        bound = moves * clip / self.batch.divisor
        return Release(mean.high, jnp.float32(bound), self.stream, stated=False, rest=mean.low)

    def _check_points(self) -> None:
        points = len(self.vectors.points) if isinstance(self.vectors, Gradients) else 1
        if self.batch.drawn and points > MOST_DRAWN_POINTS:
            raise ValueError(
                f"points: {points} given; the rounding of a drawn batch is proven for {MOST_DRAWN_POINTS}: take all "
                "records, or one pass"
            )

    def summed(self, change: Change) -> Shaped[Array, " k"]:
        """sum over the batch of `change` of each record's clipped vector, a microbatch at a time."""

        def changed(step: Array, records: PyTree) -> Array:
            return change(self.vectors.clipped(records, self.clip), step)

        def add(total: Array, piece: tuple[Array, PyTree, Array]) -> tuple[Array, None]:
            step, records, weights = piece
            return total + jnp.sum(jnp.where(weights[:, None] > 0, changed(step, records), 0), axis=0), None

        pieces = self._pieces()
        step, records, _ = jax.tree.map(lambda leaf: leaf[0], pieces)
        shape = jax.eval_shape(lambda *piece: changed(*piece)[0], step, records)
        return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), pieces)[0]

    def each(self, change: Change) -> Float[Array, "b d"]:
        """`change` of each record's clipped vector; as many rows as the batch has slots."""
        pieces = self._pieces()
        rows = jax.lax.map(lambda piece: change(self.vectors.clipped(piece[1], self.clip), piece[0]), pieces)
        return rows.reshape(-1, rows.shape[-1])[: self.batch.weights.shape[0]]

    def _pieces(self) -> tuple[Array, PyTree, Array]:
        """The batch cut into microbatches of bounded memory: step numbers, records, weights."""
        count = self.batch.weights.shape[0]
        size = max(1, min(count, MICROBATCH_FLOATS // self.vectors.size))
        parts = -(-count // size)
        cut = lambda leaf: jnp.pad(leaf, [(0, parts * size - count)] + [(0, 0)] * (leaf.ndim - 1)).reshape(
            parts, size, *leaf.shape[1:]
        )
        return jnp.arange(parts), jax.tree.map(cut, self.batch.records), cut(self.batch.weights)


Answer = RecordMean | Release | Public


class Tally(eqx.Module):
    """Releases of one stream counted while they happen, with the smallest noise multiplier any of them carried."""

    count: Int[Array, "*silos"]
    multiplier: Float[Array, "*silos"]


class Account(eqx.Module):
    """What a silo (or, stacked, every silo) has really spent: releases by stream, and record gradients evaluated."""

    tallies: dict[str, Tally]
    gradients: Float[Array, "*silos"]

    @staticmethod
    def empty(streams: Sequence[str], shape: tuple[int, ...] = ()) -> Account:
        none = np.zeros(shape, np.int32), np.full(shape, np.inf, np.float32), np.zeros(shape, np.float32)
        count, multiplier, gradients = jax.device_put(none)
        return Account({name: Tally(count, multiplier) for name in sorted(streams)}, gradients)

    def spend(self, stream: str, multiplier: Array) -> Account:
        if stream not in self.tallies:
            raise ValueError(
                f"stream {stream!r} is released but releases() does not declare it; declared: {list(self.tallies)}"
            )
        old = self.tallies[stream]
        new = Tally(old.count + 1, jnp.minimum(old.multiplier, multiplier))
        return Account({**self.tallies, stream: new}, self.gradients)

    def work(self, gradients: Array) -> Account:
        return Account(self.tallies, self.gradients + gradients)

    def joined(self, other: Account) -> Account:
        """With what another stage of the same run has spent; its streams are others."""
        return Account(self.tallies | other.tallies, self.gradients + other.gradients)
