"""The networks of `silodp.models`: shapes of their layers, and a record's scores.

`norm = "group"` normalises what a hidden layer gives, group by group (Wu, He 2018), without parameters of its own: each
record by itself, so that its gradient stays its own, and one step size suits all layers. Batch statistics would not do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from silodp.gradients import conv2d, dense, max_pool

Params = dict[str, dict[str, Array]]
Shapes = dict[str, tuple[int, ...]]
Hidden = Callable[[Array], Array]  # what happens between two layers
GROUPS, SMALL = 4, 1e-5
NORMS = ("none", "group")


def between(activation: Callable[[Array], Array], norm: str) -> Hidden:
    """An activation, of normalised numbers where `norm` says so."""
    return (lambda h: activation(group_norm(h))) if norm == "group" else activation


def group_norm(h: Float[Array, "channels ..."]) -> Float[Array, "channels ..."]:
    """Mean 0 and deviation 1 in each of at most GROUPS groups of channels; of a vector, over all of it."""
    groups = gcd(h.shape[0], GROUPS) if h.ndim > 1 else 1
    rows = h.reshape(groups, -1)
    rows = rows - jnp.mean(rows, axis=1, keepdims=True)
    return (rows * jax.lax.rsqrt(jnp.mean(jnp.square(rows), axis=1, keepdims=True) + SMALL)).reshape(h.shape)


def dense_shapes(inputs: int, hidden: tuple[int, ...], outputs: int) -> Shapes:
    widths = (inputs, *hidden, outputs)
    return {f"dense{i + 1}": (widths[i + 1], widths[i]) for i in range(len(widths) - 1)}


def dense_scores(hidden: Hidden, depth: int, params: Params, features: Array) -> Array:
    h = features.reshape(-1)
    for i in range(1, depth + 1):
        layer = params[f"dense{i}"]
        h = dense(layer["weight"], layer.get("bias"), h)
        h = hidden(h) if i < depth else h
    return h[0] if h.shape == (1,) else h


def channels_last(shape: tuple[int, ...]) -> bool:
    """Images as most files hold them: (height, width, 1 or 3)."""
    return len(shape) == 3 and shape[-1] in (1, 3) and shape[0] not in (1, 3)


def cnn_shapes(shape: tuple[int, ...], outputs: int) -> Shapes:
    if len(shape) != 3:
        raise ValueError(f"kind: 'cnn' needs images of shape (channels, height, width), the records have {shape}")
    channels, *sides = (shape[2], *shape[:2]) if channels_last(shape) else shape
    height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
    if min(height, width) < 1:
        raise ValueError(f"kind: 'cnn' needs images of at least 16 x 16, the records have {tuple(sides)}")
    return {
        "conv1": (6, channels, 5, 5),
        "conv2": (16, 6, 5, 5),
        "dense1": (120, 16 * height * width),
        "dense2": (84, 120),
        "dense3": (outputs, 84),
    }


def cnn_scores(hidden: Hidden, shape: tuple[int, ...], params: Params, features: Array) -> Array:
    h = features.reshape(shape)
    h = jnp.moveaxis(h, -1, 0) if channels_last(shape) else h
    for name in ("conv1", "conv2"):
        h = max_pool(hidden(conv2d(params[name]["weight"], params[name].get("bias"), h)))
    dense_layers = {name: layer for name, layer in params.items() if name.startswith("dense")}
    return dense_scores(hidden, 3, dense_layers, h)
