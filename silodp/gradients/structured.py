"""The structured engine: networks of dense, conv2d and embed layers, without per-record gradients (see factors.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from silodp.gradients.blocks import clip_factor, sum_in_blocks
from silodp.gradients.difference import difference
from silodp.gradients.factors import Factors, keep_only, make_factors
from silodp.gradients.layers import CONV
from silodp.gradients.structure import Layer, Structure

# A block's layer inputs and cotangents should stay in the second-level cache.
BLOCK_BYTES = 4_000_000
# |g + r|^2 is expanded; what float32 may lose when g and r nearly cancel is added back, so that clipping stays safe.
EXPANSION_SLACK = 8 * float(jnp.finfo(jnp.float32).eps)


class Clipped(NamedTuple):
    """A block of records: their factors, which of them count, and the factor that clips each."""

    layers: list[Factors]
    kept: Bool[Array, " n"]
    factor: Float[Array, " n"]


def clipped_sum(
    structure: Structure,
    points: Sequence[PyTree],
    coefficients: Sequence[Array],
    records: PyTree,
    weights: Float[Array, " n"],
    clip: Float[Array, ""],
    penalty: PyTree | None,
    microbatch: int | None,
) -> PyTree:
    """`penalty`: a gradient that is added to every record's before clipping."""
    size = microbatch or block_size(structure, len(points))
    shared = None if penalty is None else jax.tree.leaves(penalty)

    def block_sum(block: PyTree, block_weights: Array) -> list[Array]:
        clipped = clip_block(structure, points, coefficients, block, block_weights > 0, clip, shared)
        scale = jnp.where(clipped.kept, block_weights * clipped.factor, 0)
        summed = sum_layers(structure.layers, clipped.layers, scale, points[0])
        return summed if shared is None else [s + r * jnp.sum(scale) for s, r in zip(summed, shared, strict=True)]

    summed = sum_in_blocks(block_sum, records, weights, size)
    return jax.tree.unflatten(jax.tree.structure(points[0]), summed)


def clip_block(
    structure: Structure,
    points: Sequence[PyTree],
    coefficients: Sequence[Array],
    records: PyTree,
    kept: Bool[Array, " n"],
    clip: Float[Array, ""],
    penalty: Sequence[Array] | None = None,
) -> Clipped:
    layers = _combine(structure, points, coefficients, records)
    square_norms = sum((layer.square_norms() for layer in layers), jnp.zeros(()))
    if penalty is not None:
        square_norms = _shifted_norms(structure, layers, square_norms, penalty)
    kept = kept & jnp.isfinite(square_norms)
    layers = [keep_only(layer, kept) for layer in layers]
    return Clipped(layers, kept, clip_factor(jnp.where(kept, square_norms, 0), clip))


def sum_layers(layers: Sequence[Layer], factors: Sequence[Factors], scale: Array, like: PyTree) -> list[Array]:
    """The scaled sum over records, as flat leaves; parameters that no layer uses have gradient 0."""
    summed = [jnp.zeros(leaf.shape) for leaf in jax.tree.leaves(like)]
    for layer, kept in zip(layers, factors, strict=True):
        weight, bias = kept.weighted_sum(scale)
        summed[layer.weight] = weight
        if layer.bias is not None and bias is not None:
            summed[layer.bias] = bias
    return summed


def block_size(structure: Structure, points: int) -> int:
    """Records per block: what fits the cache; few for convolutions, which are faster in small chunks."""
    if any(layer.kind == CONV for layer in structure.layers):
        return 50
    size = lambda shape: jnp.zeros(shape).size
    floats = sum(size(layer.inputs) + 2 * size(layer.output) for layer in structure.layers)
    return max(32, BLOCK_BYTES // (4 * floats * points))


def _combine(
    structure: Structure, points: Sequence[PyTree], coefficients: Sequence[Array], records: PyTree
) -> list[Factors]:
    leaves, last = jax.tree.leaves(points[0]), points[-1]
    if len(points) == 1:
        base, deltas = structure.taps(last, records), []
    else:
        pairs = [difference(structure.taps, point, last, records) for point in points[:-1]]
        base, deltas = pairs[0][0], [delta for _, delta in pairs]
    layers = []
    for i, layer in enumerate(structure.layers):
        changes = [(delta.inputs[i], delta.cotangents[i]) for delta in deltas]
        terms = _terms(base.inputs[i], base.cotangents[i], changes, coefficients)
        layers.append(make_factors(layer, leaves[layer.weight], terms))
    return layers


def _terms(
    inputs: Array, cotangents: Array, changes: list[tuple[Array, Array]], coefficients: Sequence[Array]
) -> list[tuple[Array, Array]]:
    first = sum(coefficients[1:], coefficients[0]) * cotangents
    others = []
    for coefficient, (input_change, change) in zip(coefficients, changes, strict=False):
        if change is not None:
            first = first + coefficient * change
        if input_change is not None:
            moved = cotangents if change is None else cotangents + change
            others.append((input_change, coefficient * moved))
    return [(inputs, first), *others]


def _shifted_norms(
    structure: Structure, layers: Sequence[Factors], square_norms: Array, penalty: Sequence[Array]
) -> Array:
    inner = jnp.zeros(())
    for layer, factors in zip(structure.layers, layers, strict=True):
        inner += factors.inner(penalty[layer.weight], None if layer.bias is None else penalty[layer.bias])
    shift = sum((jnp.vdot(r, r) for r in penalty), jnp.zeros(()))
    expanded = square_norms + 2 * inner + shift
    return jnp.maximum(expanded, 0) + EXPANSION_SLACK * (square_norms + shift)
