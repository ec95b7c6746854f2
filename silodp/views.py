"""Several public views of every record: mirrored, or moved by some pixels (De et al. 2022, augmentation multiplicity).

    loss of a record = mean over its views of the model's loss
    what is clipped  = the gradient of that: the mean of the views' gradients, clipped once

A record has as many gradients as it has views, and one clipped vector. So the bound on how far a sum moves, and the
noise, are those of one view. The views are the same list for all records and rounds: an estimator that compares two
points sees the same ones at both. Predictions are those of the record as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.networks import channels_last

if TYPE_CHECKING:
    from silodp.models import Model

View = tuple[bool, int, int]  # mirrored; pixels down and to the right
MOST_PIXELS = 16


def read_views(texts: Sequence[str]) -> tuple[View, ...]:
    """From `["flip", "shift:2"]` to the list of views: every combination, the record as it is first."""
    mirrored, moves = (False,), ((0, 0),)
    for text in texts:
        name, _, argument = text.partition(":")
        if name == "flip" and not argument:
            mirrored = (False, True)
        elif name == "shift" and argument.isdecimal() and 1 <= int(argument) <= MOST_PIXELS:
            by = int(argument)
            moves = ((0, 0), (0, by), (0, -by), (by, 0), (-by, 0))
        else:
            raise ValueError(f"views: {text!r} is unknown; possible: flip, shift:PIXELS (1 to {MOST_PIXELS})")
    return tuple((flip, *move) for flip, move in product(mirrored, moves))


def with_views(model: Model, texts: Sequence[str], shape: tuple[int, ...]) -> Model:
    """The model whose record's loss is the mean over its views; `shape`: of one image."""
    views = read_views(texts)
    if len(views) == 1:
        return model
    if len(shape) not in (2, 3):
        raise ValueError(f"views: {list(texts)} are of images, the records have shape {shape}")
    return replace(model, loss=partial(_mean_loss, model.loss, views, shape))


def _mean_loss(
    loss: Callable[[PyTree, PyTree], Array],
    views: tuple[View, ...],
    shape: tuple[int, ...],
    params: PyTree,
    record: PyTree,
) -> Float[Array, ""]:
    features, target = record
    image = features.reshape(shape)
    seen = jnp.stack([viewed(image, view).reshape(features.shape) for view in views])
    return jnp.mean(jax.vmap(lambda x: loss(params, (x, target)))(seen))


def viewed(image: Float[Array, "..."], view: View) -> Float[Array, "..."]:
    """One view; what moves in repeats the border."""
    flip, down, right = view
    rows, columns = (0, 1) if image.ndim == 2 or channels_last(image.shape) else (1, 2)
    image = jnp.flip(image, columns) if flip else image
    for axis, by in ((rows, down), (columns, right)):
        places = jnp.clip(jnp.arange(image.shape[axis]) - by, 0, image.shape[axis] - 1)
        image = jnp.take(image, places, axis=axis) if by else image
    return image
