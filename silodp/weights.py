"""Weights of records and of classes: how much a record's clipped gradient counts, between 0 and 1.

Formal guarantee: a weight multiplies a vector that is clipped already, and what is multiplied is never above 1
(`bounded`), whatever a record holds. So every bound on how far a sum moves stays as it is (docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.records import WEIGHT, has_weight, target_of, without_weight

if TYPE_CHECKING:
    from silodp.models import Model


def bounded(weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Between 0 and 1; what is no number counts nothing."""
    return jnp.where(weight > 0, jnp.minimum(weight, 1.0), 0.0)


def weighted(model: Model, class_weights: Sequence[float] | None, own: bool) -> Model:
    """The model whose records count by their class, by a weight of their own (`own`), or by both.

    class_weights: of every class, public; the largest counts as 1.
    """
    if class_weights is None and not own:
        return model
    table = None if class_weights is None else tuple(w / max(class_weights) for w in class_weights)
    loss = partial(_loss, model.loss) if own else model.loss
    return replace(model, loss=loss, weight=partial(_weight, table))


def _loss(loss: Callable[[PyTree, PyTree], Array], params: PyTree, record: PyTree) -> Array:
    return loss(params, (record[0], without_weight(record[1])))


def _weight(table: tuple[float, ...] | None, record: PyTree) -> Array:
    own = record[1][WEIGHT] if has_weight(record[1]) else jnp.float32(1.0)
    if table is None:
        return own
    place = jnp.clip(target_of(record[1]), 0, len(table) - 1).astype(jnp.int32)
    return own * jnp.asarray(table, jnp.float32)[place]
