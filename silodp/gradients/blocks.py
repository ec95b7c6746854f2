"""Sums over records, a block at a time, so that memory does not grow with the number of records."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree


def sum_in_blocks(
    block_sum: Callable[[PyTree, Float[Array, " b"]], PyTree],
    records: PyTree,
    weights: Float[Array, " n"],
    size: int,
) -> PyTree:
    """sum of block_sum(records, weights) over blocks of at most `size` records."""
    n = weights.shape[0]
    if size >= n:
        return block_sum(records, weights)
    blocks = -(-n // size)
    size = -(-n // blocks)

    def step(total: PyTree, block: Array) -> tuple[PyTree, None]:
        # The last block starts early so that all have one shape; what was counted before gets weight 0.
        start = jnp.minimum(block * size, n - size)
        take = lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size)
        fresh = start + jnp.arange(size) >= block * size
        part = block_sum(jax.tree.map(take, records), jnp.where(fresh, take(weights), 0))
        return jax.tree.map(jnp.add, total, part), None

    shapes = jax.eval_shape(block_sum, jax.tree.map(lambda leaf: leaf[:size], records), weights[:size])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(step, zeros, jnp.arange(blocks))[0]


SMALLEST_SQUARE, UNDERFLOWN = 1e-30, 1e-15


def clip_factor(square_norms: Float[Array, " n"], clip: Float[Array, ""]) -> Float[Array, " n"]:
    """min(1, clip / norm); 1 for a zero vector, so that neither clip = 0 nor clip = inf needs a special case."""
    # Squares lost to underflow count as the largest they may have been: clipping then errs on the safe side.
    norms = jnp.where(square_norms > SMALLEST_SQUARE, jnp.sqrt(square_norms), UNDERFLOWN)
    return jnp.where(norms > clip, clip / jnp.where(norms > 0, norms, 1), 1)
