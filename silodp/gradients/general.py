"""The general engine: any differentiable loss, per-record gradients a microbatch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from silodp.gradients.blocks import clip_factor, computed_once, paired, sum_in_blocks, weighted_rows
from silodp.gradients.difference import Combination, difference
from silodp.gradients.structure import Loss

# Per-record gradients alive at one time, unless a microbatch is given.
GRADIENT_BYTES = 8_000_000


def combined_gradient(loss: Loss, points: Sequence[PyTree], combination: Combination, record: PyTree) -> PyTree:
    """sum_k c_k grad loss(x_k; record), from the gradient at the last point and exact differences to it."""
    gradient, last = jax.grad(loss), points[-1]
    if len(points) == 1:
        return jax.tree.map(lambda g: combination.add(g, []), gradient(last, record))
    pairs = [difference(gradient, point, last, record) for point in points[:-1]]
    bases, tree = jax.tree.flatten(pairs[0][0])
    changes = zip(*(tree.flatten_up_to(delta) for _, delta in pairs), strict=True)
    return jax.tree.unflatten(tree, [combination.add(*each) for each in zip(bases, changes, strict=True)])


def clip_records(
    loss: Loss,
    points: Sequence[PyTree],
    combination: Combination,
    records: PyTree,
    clip: Float[Array, ""],
    kept: Array | None,
) -> tuple[PyTree, Float[Array, " n"]]:
    """Every record's combination, stacked on a leading axis and finite, and what clips it: 0 if not finite or kept."""
    gradients = computed_once(jax.vmap(lambda record: combined_gradient(loss, points, combination, record))(records))
    leaves = jax.tree.leaves(gradients)
    square_norms = sum((jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in leaves), jnp.zeros(()))
    good = jnp.isfinite(square_norms) if kept is None else jnp.isfinite(square_norms) & kept
    addends = sum(g[0].size for g in leaves)
    factor = clip_factor(jnp.where(good, square_norms, 0), clip, addends)
    # A pass over all gradients that hardly ever is needed: a loop of one turn or none leaves them where they are, and
    # what follows is one program for both.
    turns = jnp.any(~jnp.isfinite(square_norms)).astype(jnp.int32)
    zeroed = lambda g: jnp.where(_along(good, g), g, 0)
    finite = lax.fori_loop(0, turns, lambda _, held: jax.tree.map(zeroed, held), gradients)
    return finite, jnp.where(good, factor, 0)


def clipped_gradients(
    loss: Loss,
    points: Sequence[PyTree],
    combination: Combination,
    records: PyTree,
    clip: Float[Array, ""],
    kept: Array | None = None,
) -> PyTree:
    """Every record's clipped combination, stacked on a leading axis; zero where not finite or not kept."""
    gradients, factor = clip_records(loss, points, combination, records, clip, kept)
    return jax.tree.map(lambda g: g * _along(factor, g), gradients)


def _along(values: Array, gradient: Array) -> Array:
    return values.reshape(-1, *(1,) * (gradient.ndim - 1))


def clipped_sum(
    loss: Loss,
    points: Sequence[PyTree],
    combination: Combination,
    records: PyTree,
    weights: Float[Array, " n"],
    clip: Float[Array, ""],
    microbatch: int | None,
) -> PyTree:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(points[0]))
    size = microbatch or max(1, GRADIENT_BYTES // (4 * parameters * len(points)))

    def block_sum(block: PyTree, block_weights: Array) -> PyTree:
        gradients, factor = clip_records(loss, points, combination, block, clip, block_weights > 0)
        return jax.tree.map(lambda g: paired(weighted_rows(block_weights * factor, g)), gradients)

    return sum_in_blocks(block_sum, records, weights, size)
