"""The structured engine: large parameters as factors of layers, without per-record gradients (see factors.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Bool, Float, PyTree

from silodp.doubles import Double
from silodp.gradients.blocks import (
    MOST_OF_FEWER,
    RUN,
    SMALLEST_BLOCK,
    UNIT,
    check_length,
    clip_factor,
    computed_once,
    paired,
    rarely,
    settings,
    stackable,
    sum_in_blocks,
    sum_in_groups,
    weighted_rows,
)
from silodp.gradients.difference import Combination, difference
from silodp.gradients.factors import Factors, computed, keep_only, make_factors, of_silos, turn_features
from silodp.gradients.layers import CONV, LEAF
from silodp.gradients.structure import Layer, Structure

# Larger blocks have larger products and fewer sums in doubles, until what they compute or read leaves the caches.
# Gradients of leaves are kept for a block, with those at the other points.
BLOCK_BYTES, FEATURE_BYTES, LEAF_BYTES = 6_500_000, 4_200_000, 8_000_000
# XLA gives an operation on more numbers than these to all its threads, which costs small models more than it brings: so
# blocks of records that are narrow enough are smaller.
ON_ONE_THREAD, NARROW = 1 << 15, 8 * RUN
# Gradient and penalty are summed apart, so where they cancel their sum may be small and both be large. A norm then
# counts as at least this part of theirs, and runs are shorter: their rounding stays within the proof's.
CANCELLED, PENALISED_RUN = 1 / 4, RUN // 4
# A record that is not finite makes its block take another branch, in which all its runs may be rounded differently.
# Such a record adds nothing, so one clip norm of the bound is left for that: enough for so many records.
MOST_IN_BLOCK = 24 * RUN


class Clipped(NamedTuple):
    """A block of records: their factors, their squared norms (infinite where they do not count), and if all are finite.

    Factors of a record that does not count may hold anything: `masked` before they are summed, unless `finite`.
    """

    layers: list[Factors]
    square_norms: Float[Array, " n"]
    finite: Bool[Array, ""]

    @property
    def kept(self) -> Bool[Array, " n"]:
        return jnp.isfinite(self.square_norms)

    def masked(self) -> Clipped:
        return self._replace(layers=[keep_only(layer, self.kept) for layer in self.layers])

    def factor(self, clip: Float[Array, ""]) -> Float[Array, " n"]:
        """What clips each."""
        return clip_factor(jnp.where(self.kept, self.square_norms, 0), clip, _addends(self.layers))


class Question(NamedTuple):
    """What all records are asked. `penalty`: a gradient (as leaves) that is added to every record's before clipping.

    `closed_over`: what the loss itself closes over. It is passed on like the points, because it may be stacked as well.
    """

    points: Sequence[PyTree]
    combination: Combination
    clip: Float[Array, ""]
    penalty: list[Array] | None
    closed_over: Sequence[Any] | None = None


def clipped_sum(
    structure: Structure,
    points: Sequence[PyTree],
    combination: Combination,
    records: PyTree,
    weights: Float[Array, " n"],
    clip: Float[Array, ""],
    penalty: PyTree | None,
    microbatch: int | None,
) -> PyTree:
    """`penalty`: a gradient that is added to every record's before clipping. Silos stacked by vmap share products."""
    size = microbatch or block_size(structure, len(points), settings())
    if penalty is not None:
        check_length(weights.shape[-1], MOST_OF_FEWER, "with a penalty inside the clip")
    added = None if penalty is None else jax.tree.leaves(penalty)
    question = Question(points, combination, clip, added, structure.traced.consts)
    run = RUN if penalty is None else PENALISED_RUN
    one = lambda question, records, weights: sum_in_blocks(
        lambda *block: [leaf[0] for leaf in run_sums(structure, question, run, *block)], records, weights, size, run
    )
    many = lambda question, records, weights: sum_in_groups(
        lambda *group: [jax.vmap(Double.sum_of)(leaf) for leaf in run_sums(structure, question, run, *group)],
        partial(one, question), records, weights, size,
    )  # fmt: skip
    summed = stackable(one, many)(question, records, weights)
    if added is not None:
        *summed, weight = summed
        # Not finite where no record counts: 0 * inf would spoil the sum.
        finite = [jnp.where(weight.high == 0, 0, r) for r in added]
        summed = [leaf + weight * r for leaf, r in zip(summed, finite, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(points[0]), summed)


def run_sums(
    structure: Structure, question: Question, run: int, records: PyTree, weights: Float[Array, " n"], silos: int = 1
) -> list[Float[Array, "silos runs ..."]]:
    """Leaves of the sums over runs of each of `silos` that have equally many of the block's records; where there is a
    penalty, last of all the sums of what it is multiplied by."""
    clipped = clip_block(structure, question, records, weights > 0)

    def total(layers: list[Factors], scale: Array) -> list[Array]:
        sums = sum_layers(structure.layers, layers, scale, question.points[0], run)
        weight = [] if question.penalty is None else [weighted_rows(scale, jnp.ones_like(scale), run)]
        return [paired(leaf, run) for leaf in (*sums, *weight)]

    def add(clipped: Clipped, weights: Array, clip: Array) -> list[Array]:
        layers, scale = clipped.layers, jnp.where(clipped.kept, weights * clipped.factor(clip), 0)
        if silos == 1:
            return [leaf[None] for leaf in total(layers, scale)]
        apart = [of_silos(layer, silos) for layer in layers]
        axes = [0 if layer.axis == 0 else -2 for layer in layers], 0
        return jax.vmap(total, in_axes=axes)(apart, scale.reshape(silos, -1))

    # Masking copies all features. Weight 0 does as well, unless a record's numbers are not finite. What clips is
    # computed here and not with the norms: of both in one loop over the records XLA makes a task for each core.
    return rarely(
        ~clipped.finite,
        lambda given: add(turned(given[0]).masked(), *given[1:]),
        lambda given: add(turned(given[0]), *given[1:]),
        (turned(clipped), weights, question.clip),
    )


def clip_block(structure: Structure, question: Question, records: PyTree, kept: Bool[Array, " n"]) -> Clipped:
    if question.closed_over is not None:
        structure = structure._replace(traced=ClosedJaxpr(structure.traced.jaxpr, question.closed_over))
    layers = _combine(structure, question.points, question.combination, records)
    numbers, given = eqx.partition(layers, [computed(*each) for each in zip(structure.layers, layers, strict=True)])
    # Nothing that an empty slot makes a loss compute may have a say. What came with it is zeros.
    layers = eqx.combine(computed_once([keep_only(layer, kept) for layer in numbers]), given)
    square_norms = sum((layer.square_norms() for layer in layers), jnp.zeros(()))
    finite = jnp.all(jnp.isfinite(square_norms))
    if question.penalty is not None:
        square_norms = _shifted_norms(structure, layers, square_norms, question.penalty)
    return Clipped(layers, jnp.where(kept, square_norms, jnp.inf), finite)


def turned(clipped: Clipped) -> Clipped:
    """Features records first (as they are stored), or back: what passes a branch keeps its layout only that way."""
    return clipped._replace(layers=[turn_features(layer) for layer in clipped.layers])


def sum_layers(
    layers: Sequence[Layer], factors: Sequence[Factors], scale: Array, like: PyTree, run: int = RUN
) -> list[Float[Array, "runs ..."]]:
    """The scaled sums over runs of records, as flat leaves; parameters that no layer uses have gradient 0."""
    summed = [jnp.zeros((1, *leaf.shape)) for leaf in jax.tree.leaves(like)]
    for layer, kept in zip(layers, factors, strict=True):
        weight, bias = kept.run_sums(scale, run)
        summed[layer.weight] = weight.swapaxes(1, 2) if layer.turned else weight
        if layer.bias is not None and bias is not None:
            summed[layer.bias] = bias
    return summed


def block_size(structure: Structure, points: int, settings: int = 1) -> int:
    """Records per block: what fits the caches, whole runs where features allow it, and few for convolutions, which are
    faster in small chunks. Each of `settings` that are stacked has activations of its own: one run is enough then."""
    layers = [layer for layer in structure.layers if layer.kind != LEAF]
    kept = sum(prod(leaf.output) for leaf in structure.leaves)
    most = max(1, LEAF_BYTES // (4 * max(1, kept) * points))
    if any(layer.kind == CONV for layer in layers):
        return min(50, most)
    features = sum(prod(layer.inputs) for layer in layers if layer.on_record)
    computed = kept + sum(2 * prod(layer.output) + (0 if layer.on_record else prod(layer.inputs)) for layer in layers)
    passing = FEATURE_BYTES // (4 * max(1, features))
    fitting = min(BLOCK_BYTES // (4 * computed * points), passing)
    if fitting >= RUN:
        widest = max((prod(shape) for layer in layers for shape in (layer.inputs, layer.output)), default=1)
        alone, deep = ON_ONE_THREAD // widest, any(not layer.on_record for layer in layers)
        largest = min(alone, NARROW) if alone >= NARROW // 2 else MOST_IN_BLOCK
        return min(RUN if deep and settings > 1 else min(fitting, largest) // RUN * RUN, most)
    # Less than a run: sums pass through memory as often as there are blocks, and a product of fewer records costs more
    # than a cache that is too small.
    return min(max(SMALLEST_BLOCK, min(RUN, passing)), most)


def _combine(
    structure: Structure, points: Sequence[PyTree], combination: Combination, records: PyTree
) -> list[Factors]:
    leaves, last = jax.tree.leaves(points[0]), points[-1]
    if len(points) == 1:
        base, deltas = structure.taps(last, records), []
    else:
        pairs = [difference(structure.taps, point, last, records) for point in points[:-1]]
        base, deltas = pairs[0][0], [delta for _, delta in pairs]
    layers = []
    for i, layer in enumerate(structure.layers):  # of a leaf the input is nothing, and never changes
        changes = [(delta.inputs[i], delta.cotangents[i]) for delta in deltas]
        terms = _terms(base.inputs[i], base.cotangents[i], changes, combination)
        layers.append(make_factors(layer, leaves[layer.weight], terms))
    return layers


def _terms(
    inputs: Array, cotangents: Array, changes: list[tuple[Array | None, Array | None]], combination: Combination
) -> list[tuple[Array, Array]]:
    others = []
    for coefficient, (input_change, change) in zip(combination.others, changes, strict=True):
        if input_change is not None:
            moved = cotangents if change is None else cotangents + change
            others.append((input_change, coefficient * moved))
    return [(inputs, combination.add(cotangents, [change for _, change in changes])), *others]


def _addends(layers: Sequence[Factors]) -> int:
    """Of the longest sum behind a squared norm."""
    return max(layer.addends for layer in layers) + len(layers)


def _shifted_norms(
    structure: Structure, layers: Sequence[Factors], square_norms: Array, penalty: Sequence[Array]
) -> Array:
    inner = jnp.zeros(())  # twice the inner product
    for layer, factors in zip(structure.layers, layers, strict=True):
        weight = penalty[layer.weight].T if layer.turned else penalty[layer.weight]
        inner += factors.inner(2 * weight, None if layer.bias is None else 2 * penalty[layer.bias])
    shift = sum((jnp.vdot(r, r) for r in penalty), jnp.zeros(()))
    apart = square_norms + shift
    expanded = (1 + 2 * (_addends(layers) + 8) * UNIT) * apart + inner
    return jnp.maximum(expanded, CANCELLED**2 * apart)
