"""Sums over records, a block at a time, so that memory does not grow with the number of records.

Formal guarantee (docs/privacy.md has the proof): records are added in float32 in runs of at most RUN, by position, runs
pairwise up to PAIRED records, and what that gives in doubles. Replacing one record changes the sum of its own run and
of the pairs that it is in, so a sum of vectors of norm at most C over up to MOST_RECORDS records moves by at most
2 C (1 + SLACK), all rounding included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, PyTree

from silodp.doubles import Double, normal, rounded, two_sum
from silodp.errors import ConfigError

T = TypeVar("T")

RUN = 256
PAIRED = 8 * RUN
SLACK = 2.0**-7
MOST_RECORDS = 1 << 22
# Where one clip norm has both neighbours' roundings beside it (batches with and without a record), where what is added
# is longer (penalties inside the clip), or where blocks are smaller than SMALLEST_BLOCK, and then fewer still.
MOST_OF_FEWER = MOST_RECORDS // 4
SMALLEST_BLOCK = 32
FEW_BLOCKS = 64  # whose sums need not be normal on the way
SETTINGS = "settings"  # the axis along which a sweep stacks them
UNIT = 2.0**-24  # the largest relative error of one rounding in float32


def settings() -> int:
    """How many of them a sweep has stacked around what is being traced."""
    try:
        return lax.axis_size(SETTINGS)
    except NameError:  # there is no such axis: not a sweep
        return 1


def run_count(n: int, run: int = RUN) -> int:
    """Of equally long runs of at most `run`: so many that they are n records and no more, if that is not twice as many
    as needed. Filling up the last run would copy all features."""
    fewest = -(-n // run)
    return next((runs for runs in range(fewest, 2 * fewest) if n % runs == 0), fewest)


def whole_runs(n: int, run: int = RUN) -> int:
    """n, or the next larger number that can be cut into equally long runs of at most `run`."""
    runs = run_count(n, run)
    return runs * -(-n // runs) if n else 0


def in_runs(leaf: Array, axis: int, run: int = RUN) -> Array:
    """Records along `axis` as (runs, records of a run), with zeros behind the last."""
    n = leaf.shape[axis]
    whole, runs = whole_runs(n, run), run_count(n, run)
    if whole != n:
        leaf = jnp.pad(leaf, [(0, whole - n if i == axis else 0) for i in range(leaf.ndim)])
    return leaf.reshape(*leaf.shape[:axis], runs, whole // runs, *leaf.shape[axis + 1 :])


def weighted_rows(weights: Float[Array, " n"], rows: Float[Array, "n ..."], run: int = RUN) -> Float[Array, "runs ..."]:
    """sum_j weights[j] rows[j] of every run."""
    if rows.shape[0] <= run:
        return jnp.tensordot(weights, rows, 1)[None]
    return jnp.einsum("rj,rj...->r...", in_runs(weights, 0, run), in_runs(rows, 0, run))


def paired(sums: Float[Array, "runs ..."], run: int = RUN) -> Float[Array, "sums ..."]:
    """Sums of runs, halves added to halves in float32 as long as no sum is of more than PAIRED records.

    Unlike records within a run these are few additions, in an order of ours: what they round is a tenth of what a run
    rounds, and a sum in doubles costs five times as many passes.
    """
    times = min(max(1, PAIRED // run).bit_length() - 1, (len(sums) - 1).bit_length())
    sums = jnp.pad(rounded(sums), [(0, -len(sums) % 2**times), *[(0, 0)] * (sums.ndim - 1)])
    for _ in range(times):
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums


def sum_in_blocks(
    run_sums: Callable[[PyTree, Float[Array, " b"]], PyTree],
    records: PyTree,
    weights: Float[Array, " n"],
    size: int,
    run: int = RUN,
) -> PyTree:
    """Doubles: the sum over all runs of run_sums(records, weights), asked of blocks of at most `size` records."""
    n = weights.shape[0]
    if size >= n:
        return jax.tree.map(Double.sum_of, run_sums(records, weights))
    if size < SMALLEST_BLOCK:
        check_length(n, math.isqrt(MOST_OF_FEWER**2 * size // SMALLEST_BLOCK), "of so many numbers")
    blocks = -(-n // size)
    size = whole_runs(-(-n // blocks), run)

    def step(totals: list[Array], block: Array) -> tuple[list[Array], None]:
        # The last block starts early so that all have one shape; what was counted before gets weight 0.
        start = jnp.minimum(block * size, n - size)
        take = lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size)
        fresh = start + jnp.arange(size) >= block * size
        sums = run_sums(jax.tree.map(take, records), jnp.where(fresh, take(weights), 0))
        add = added_loosely if blocks <= FEW_BLOCKS else Double.plus
        added = [add(Double(*total), part) for total, part in zip(totals, jax.tree.leaves(sums), strict=True)]
        return [jnp.stack([d.high, d.low]) for d in added], None

    shapes = jax.eval_shape(run_sums, jax.tree.map(lambda leaf: leaf[:size], records), weights[:size])
    # Both halves in one array: a loop then passes over them once.
    zeros = [jnp.zeros((2, *s.shape[1:]), s.dtype) for s in jax.tree.leaves(shapes)]
    totals = lax.scan(step, zeros, jnp.arange(blocks))[0]
    return jax.tree.unflatten(jax.tree.structure(shapes), [normal(*total) for total in totals])


def check_length(records: int, most: int, what: str) -> None:
    """Refuse a sum of more records than its rounding is proven for."""
    if records > most:
        raise ConfigError(
            f"data: a sum of {records} records {what}: its rounding is proven up to {most}; give algorithm.batch, or "
            "split the silo"
        )


def added_loosely(total: Double, parts: Float[Array, "parts ..."]) -> Double:
    """total + parts, whose low half keeps all that rounding took away so far: for few additions, then `normal`."""
    if parts.shape[0] > 1:
        return total.plus(parts)
    high, rest = two_sum(total.high, rounded(parts[0]))
    return Double(high, total.low + rest)


def sum_in_groups(
    group_sums: Callable[[PyTree, Float[Array, " n"], int], PyTree],
    silo_sum: Callable[[PyTree, Float[Array, " n"]], PyTree],
    records: PyTree,
    weights: Float[Array, "silos n"],
    size: int,
) -> PyTree:
    """Every silo's sum; silos much smaller than a block share one, so that each product is a large one."""
    silos, n = weights.shape
    if 4 * n > size:
        return lax.map(lambda own: silo_sum(*own), (records, weights))
    groups = -(-silos * n // size)
    group = -(-silos // groups)

    def sums(start: Array | int) -> PyTree:
        take = lambda leaf: lax.dynamic_slice_in_dim(leaf, start, group).reshape(-1, *leaf.shape[2:])
        return group_sums(jax.tree.map(take, records), take(weights), group)

    if groups == 1:
        return sums(0)

    def step(i: Array, done: PyTree) -> PyTree:
        # The last group starts early so that all have one shape; some silos are then summed twice, alike.
        start = jnp.minimum(i * group, silos - group)
        put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0)
        return jax.tree.map(put, done, sums(start))

    empty = jax.tree.map(lambda s: jnp.zeros((silos, *s.shape[1:]), s.dtype), jax.eval_shape(sums, 0))
    return lax.fori_loop(0, -(-silos // group), step, empty)


def stackable(one: Callable[..., PyTree], many: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """one(question, records, weights), which under a vmap over records and weights alone becomes `many`."""
    stacking = custom_vmap(one)

    @stacking.def_vmap
    def stacked(size: int, batched: Any, question: Any, records: Any, weights: Any) -> tuple[PyTree, PyTree]:
        asked, *own = batched
        if any(jax.tree.leaves(asked)) or not all(jax.tree.leaves(own)):
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
            result = jax.vmap(one, in_axes=axes, axis_size=size)(question, records, weights)
        else:
            result = many(question, records, weights)
        return result, jax.tree.map(lambda _: True, result)

    return stacking


def rarely(needed: Bool[Array, ""], rare: Callable[[T], PyTree], usual: Callable[[T], PyTree], given: T) -> PyTree:
    """`rare(given)` where it is needed; it must be right, if slow, where it is not.

    Under vmap an ordinary cond runs both. Here one branch runs, the rare one for all if any needs it.
    """

    @custom_vmap
    def choose(needed: Array, given: Any) -> PyTree:
        return lax.cond(needed, rare, usual, given)

    @choose.def_vmap
    def stacked(size: int, batched: Sequence[Any], needed: Array, given: Any) -> tuple[PyTree, PyTree]:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched[1])
        each = lambda function: jax.vmap(function, in_axes=(axes,), axis_size=size)
        result = rarely(jnp.any(needed), each(rare), each(usual), given)
        return result, jax.tree.map(lambda _: True, result)

    return choose(needed, given)


def computed_once(vectors: T) -> T:
    """Records' vectors (float arrays), the same bits for their norms and for their sum.

    A compiler computes an expression wherever it is used. In one place it may contract a product into an addition, in
    the other round it, and where the addition cancels these are two vectors: the norm of one would clip the other. What
    comes out of a loop is computed once. This one hardly ever turns, which no compiler can know, and changes nothing.
    All arrays are asked: one of them alone may be constants, and a loop that never turns is removed.
    """
    firsts = jnp.concatenate([jnp.ravel(leaf)[:1] for leaf in jax.tree.leaves(vectors)])
    turns = jnp.isnan(firsts).any().astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, kept: jax.tree.map(rounded, kept), vectors)


SMALLEST_SQUARE = 1e-30


def clip_factor(square_norms: Float[Array, " n"], clip: Any, addends: int) -> Float[Array, " n"]:
    """At most min(1, clip / norm); no norm counts as 0, so that neither clip = 0 nor clip = inf needs a special case.

    addends: of the longest sum behind a square. Its rounding, and that of scaling, is counted against the record.
    """
    # Squares lost to underflow count as the largest they may have been: clipping then errs on the safe side. Nothing
    # here is a choice: of a root or a quotient that is chosen a compiler makes a branch, record by record.
    norms = jnp.sqrt(jnp.maximum(square_norms, SMALLEST_SQUARE)) * (1 + (addends / 2 + 8) * UNIT)
    factors = jnp.minimum(1, clip / norms)
    # Points so far apart that their distance is no number give no bound: nothing usable may come out.
    return jnp.where(jnp.isnan(clip), jnp.nan, factors)
