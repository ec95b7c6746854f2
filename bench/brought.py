"""Networks of the gradient parts as one would write them in JAX without silodp: scores of one record.

Parameters are layers by name, each a weight and perhaps a bias, as in silodp's own models.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from silodp.gradients import conv2d, max_pool

Shapes = dict[str, dict[str, tuple[int, ...]]]
Scores = Callable[[Any, Any], Any]
CLASSES = 10
WORDS, WIDTH = 5000, 64
POSITIONS, FEATURES = 16, 32  # of a sequence
HIDDEN = 64
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus
}  # fmt: skip


def dense(layer: Any, x: Any) -> Any:
    return layer["weight"] @ x + layer["bias"]


def plain_convolution(layer: Any, x: Any) -> Any:
    h = lax.conv_general_dilated(x[None], layer["weight"], (1, 1), "VALID")[0]
    h = jax.nn.relu(h + layer["bias"][:, None, None])
    return lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")


def own_convolution(layer: Any, x: Any) -> Any:
    return max_pool(jax.nn.relu(conv2d(layer["weight"], layer["bias"], x)))


def stack(activation: str, params: Any, h: Any, convolution: Scores = plain_convolution) -> Any:
    """Convolutions, each with a pooling, then dense layers."""
    for name in (n for n in params if n.startswith("conv")):
        h = convolution(params[name], h)
    h = h.reshape(-1)
    names = [n for n in params if n.startswith("dense")]
    for name in names:
        h = dense(params[name], h)
        h = h if name == names[-1] else ACTIVATIONS[activation](h)
    return h


def words(params: Any, record: Any) -> Any:
    return dense(params["dense"], params["embed"]["weight"][record].mean(axis=0))


def normed(params: Any, x: Any) -> Any:
    h = dense(params["dense1"], x)
    scale = lax.rsqrt(jnp.var(h) + 1e-5)
    h = params["norm"]["weight"] * (h - jnp.mean(h)) * scale + params["norm"]["bias"]
    return dense(params["dense2"], jax.nn.relu(h))


def attention(params: Any, x: Any) -> Any:
    query, key, value = (x @ params[n]["weight"].T + params[n]["bias"] for n in ("query", "key", "value"))
    mixed = jax.nn.softmax(query @ key.T / sqrt(FEATURES)) @ value
    h = x + mixed @ params["out"]["weight"].T + params["out"]["bias"]
    return dense(params["dense"], h.mean(axis=0))


def gru(params: Any, x: Any) -> Any:
    def step(h: Any, seen: Any) -> Any:
        update, reset, fresh = jnp.split(dense(params["input"], seen), 3)
        old_update, old_reset, old = jnp.split(dense(params["hidden"], h), 3)
        gate = jax.nn.sigmoid(update + old_update)
        candidate = jnp.tanh(fresh + jax.nn.sigmoid(reset + old_reset) * old)
        return gate * h + (1 - gate) * candidate, None

    return dense(params["dense"], lax.scan(step, jnp.zeros(HIDDEN), x)[0])


def layer(outputs: int, *inputs: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (outputs, *inputs), "bias": (outputs,)}


WRITTEN: dict[str, Scores] = {"words": words, "normed": normed, "attention": attention, "gru": gru}
SHAPES: dict[str, Shapes] = {
    "cnn": {"conv1": layer(16, 1, 5, 5), "conv2": layer(32, 16, 5, 5), "dense1": layer(CLASSES, 512)},
    "words": {"embed": {"weight": (WORDS, WIDTH)}, "dense": layer(CLASSES, WIDTH)},
    "normed": {"dense1": layer(64, 784), "norm": layer(64), "dense2": layer(CLASSES, 64)},
    "attention": {
        **{name: layer(FEATURES, FEATURES) for name in ("query", "key", "value", "out")},
        "dense": layer(CLASSES, FEATURES),
    },
    "gru": {
        "input": layer(3 * HIDDEN, FEATURES), "hidden": layer(3 * HIDDEN, HIDDEN), "dense": layer(CLASSES, HIDDEN),
    },
}  # fmt: skip


def initial(shapes: Shapes, key: Any) -> Any:
    keys = iter(jax.random.split(key, 32))
    draw = lambda shape: jax.random.normal(next(keys), shape) / sqrt(max(1, prod(shape[1:])))
    return {name: {part: draw(shape) for part, shape in own.items()} for name, own in shapes.items()}
