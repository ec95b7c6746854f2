"""The primitive under all algorithms: a weighted sum of clipped per-record combinations of gradients.

    clipped_sum(loss, points, coefficients, records, weights, clip)
        = sum_j weights[j] * clip(sum_k coefficients[k] * grad loss(points[k], records[j]), clip)

Two engines compute it. *structured* takes losses in which most parameters are weights of layers (`dense`, `conv2d`,
`embed`, or a plain product with one vector) and builds per-record gradients only of the others; *general* takes any
differentiable loss, in microbatches.

Formal guarantee: a record's contribution has norm at most weight * clip; it is 0 if its gradient (or the square of its
norm) is not finite. Sums are doubles. Replacing one record of weight 1 moves the sum by at most 2 * clip * (1 + SLACK)
in float32 arithmetic, whatever the records (silodp.gradients.blocks; docs/privacy.md has the proof). Clip norms below
1e-30, whose parts float32 flushes to 0, have no such bound; configs have none below 1e-18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.gradients import general, structured
from silodp.gradients.blocks import RUN, SLACK, computed_once, sum_in_blocks, weighted_rows
from silodp.gradients.difference import Combination, difference
from silodp.gradients.factors import Factors, as_computed, records_first
from silodp.gradients.layers import avg_pool, conv2d, dense, embed, max_pool
from silodp.gradients.structure import Layer, Loss, NotStructured, Structure, find_structure

SUMS_BYTES = 4_000_000  # of the sums of runs that are in memory at one time
ENGINES = ("auto", "structured", "general")
SHOWN = 3  # parameters that a reason names
MOST_POINTS = 3  # that a record's vector combines: each more has its own rounding, and SLACK has room for these
Scalar = Float[Array, ""] | float


class Regularised(eqx.Module):
    """loss(params, record) + penalty(params): the penalty's gradient is part of every record's, before clipping."""

    loss: Loss
    penalty: Callable[[PyTree], Array]

    def __call__(self, params: PyTree, record: PyTree) -> Array:
        return self.loss(params, record) + self.penalty(params)


class LayerFactors(eqx.Module):
    """Clipped per-record gradients as factors of each layer, records first."""

    factors: list[Factors]
    layers: tuple[Layer, ...] = eqx.field(static=True)


class RecordGradients(eqx.Module):
    """Clipped per-record gradients as they are, records first."""

    gradients: PyTree


def engine_for(loss: Loss, params: PyTree, record: PyTree) -> tuple[str, str]:
    """The engine that "auto" uses for this loss, and why, in one line."""
    found = _structure(loss, params, record)
    if isinstance(found, str):
        return "general", found
    leaves = len(found.leaves)
    layers = len(found.layers) - leaves
    words = f"the loss is a network of {layers} layer{'s' if layers != 1 else ''}"
    if leaves:
        more = f" and {leaves - SHOWN} more" if leaves > SHOWN else ""
        words += f"; per-record gradients where {', '.join(found.why[:SHOWN])}{more}"
    return "structured", words


def leaf_methods(loss: Loss, params: PyTree, record: PyTree) -> dict[str, str]:
    """What the engine does with each parameter, by its name, and why."""
    names = [jax.tree_util.keystr(path) or "x" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = _structure(loss, params, record)
    if isinstance(found, str):
        return dict.fromkeys(names, f"per-record gradient: {found}")
    told = dict.fromkeys(names, "not used")
    for layer in found.layers:
        for place in (layer.weight, layer.bias):
            if place is not None:
                told[names[place]] = f"factors of a {layer.kind.removeprefix('silodp_')} layer"
    for leaf, why in zip(found.leaves, found.why, strict=True):
        told[names[leaf.weight]] = f"per-record gradient: {why}"
    return told


def clipped_sum(
    loss: Loss,
    points: Sequence[PyTree],
    coefficients: Sequence[Scalar],
    records: PyTree,
    weights: Float[Array, " n"],
    clip: Scalar,
    *,
    engine: str = "auto",
    microbatch: int | None = None,
) -> PyTree:
    """sum_j weights[j] * clip(sum_k coefficients[k] * grad loss(points[k], records[j]), clip).

    A record of weight 0 is padding and contributes nothing whatever it holds. `microbatch`: records at one time
    (memory grows with it, not with the number of records). All arrays and scalars may be traced.
    """
    _check(points, coefficients, weights, engine, microbatch)
    combination, bound = Combination.of(coefficients), jnp.asarray(clip, jnp.float32)
    found = _choose(loss, points[0], records, engine)
    if found is None:
        return general.clipped_sum(loss, points, combination, records, weights, bound, microbatch)
    penalty = None
    if isinstance(loss, Regularised):
        at = loss.penalty
        penalty = computed_once(general.combined_gradient(lambda params, _: at(params), points, combination, ()))
    return structured.clipped_sum(found, points, combination, records, weights, bound, penalty, microbatch)


def per_record(
    loss: Loss, points: Sequence[PyTree], coefficients: Sequence[Scalar], records: PyTree, clip: Scalar
) -> PyTree:
    """Each record's clipped combination, on a leading axis. Memory: records x parameters, so call it on few."""
    combination = Combination.of(coefficients)
    return general.clipped_gradients(loss, points, combination, records, jnp.asarray(clip, jnp.float32))


def record_factors(
    loss: Loss, point: PyTree, records: PyTree, weights: Float[Array, " n"], clip: Scalar, *, engine: str = "auto"
) -> LayerFactors | RecordGradients:
    """The clipped gradient of every record in a form that is cheap to keep (SAGA's table), records first.

    Records of weight 0 get zeros. A regularised loss is kept as plain gradients: its penalty belongs to the point at
    which each record was last seen, so it does not factor.
    """
    _check([point], [1.0], weights, engine, None)
    bound = jnp.asarray(clip, jnp.float32)
    if isinstance(loss, Regularised):
        if engine == "structured":
            raise ValueError("engine: structured keeps no factors of a regularised loss; use general")
        engine = "general"
    found = _choose(loss, point, records, engine)
    one = Combination.of([1.0])
    if found is None:
        return RecordGradients(general.clipped_gradients(loss, [point], one, records, bound, weights > 0))
    block = structured.clip_block(found, structured.Question([point], one, bound, None), records, weights > 0)
    scaled = [layer.scaled(block.factor(bound)) for layer in block.masked().layers]
    return LayerFactors([records_first(layer) for layer in scaled], found.layers)


def sum_factors(
    params_like: PyTree, factors: LayerFactors | RecordGradients, weights: Float[Array, " n"], run: int = RUN
) -> PyTree:
    """sum_j weights[j] * (the clipped gradient kept for record j); at most `run` of them are added in float32."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params_like))
    size = run * max(1, SUMS_BYTES // (4 * parameters))
    return sum_in_blocks(partial(_run_sums, params_like, run), factors, weights, size, run)


def _run_sums(like: PyTree, run: int, factors: LayerFactors | RecordGradients, weights: Float[Array, " n"]) -> PyTree:
    if isinstance(factors, RecordGradients):
        return jax.tree.map(lambda g: weighted_rows(weights, g, run), factors.gradients)
    computed = [as_computed(layer) for layer in factors.factors]
    summed = structured.sum_layers(factors.layers, computed, weights, like, run)
    return jax.tree.unflatten(jax.tree.structure(like), summed)


def _structure(loss: Loss, params: PyTree, record: PyTree) -> Structure | str:
    plain = loss.loss if isinstance(loss, Regularised) else loss
    try:
        return find_structure(plain, params, record)
    except NotStructured as reason:
        return str(reason)


def _choose(loss: Loss, params: PyTree, records: PyTree, engine: str) -> Structure | None:
    if engine == "general":
        return None
    record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), records)
    found = _structure(loss, params, record)
    if isinstance(found, Structure):
        return found
    if engine == "structured":
        raise ValueError(f"engine: structured cannot take this loss ({found}); use auto or general")
    return None


def _check(
    points: Sequence[Any], coefficients: Sequence[Any], weights: Array, engine: str, microbatch: int | None
) -> None:
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} is not one of {', '.join(ENGINES)}")
    if not points or len(points) != len(coefficients):
        raise ValueError(f"coefficients: {len(coefficients)} given for {len(points)} points; one each is needed")
    if len(points) > MOST_POINTS:
        raise ValueError(f"points: {len(points)} given; the rounding of sums is proven for {MOST_POINTS}")
    if microbatch is not None and microbatch < 1:
        raise ValueError(f"microbatch: {microbatch} records; at least 1 is needed")
    if weights.ndim != 1:
        raise ValueError(f"weights: shape {weights.shape}; one number per record is needed")


__all__ = [
    "SLACK",
    "LayerFactors",
    "RecordGradients",
    "Regularised",
    "avg_pool",
    "clipped_sum",
    "conv2d",
    "dense",
    "difference",
    "embed",
    "engine_for",
    "leaf_methods",
    "max_pool",
    "per_record",
    "record_factors",
    "sum_factors",
]
