"""PyTorch's layers and functions for one record, without the batch axis: what `silodp.torch_in` puts together.

Torch's classes are known by their names: nothing here imports PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from silodp.errors import ConfigError
from silodp.gradients import avg_pool, conv2d, dense, embed, max_pool
from silodp.gradients.softplus import softplus

Weights = Mapping[str, Array]
Step = Callable[..., Array]  # (weights, array) -> array, of one record
INSTEAD = "freeze it as an encoder and train a head on what it gives, or write the loss in JAX (silodp.from_loss)"


def refused(path: str, layer: Any, why: str) -> ConfigError:
    return ConfigError(f"from_torch: layer {path!r} ({type(layer).__name__}) {why}")


def layer_step(path: str, layer: Any) -> Step:
    make = LAYERS.get(type(layer).__name__)
    if make is None:
        raise refused(path, layer, f"has no form here; {INSTEAD}")
    return make(path, layer)


def plain(function: Callable[[Array], Array]) -> Callable[[str, Any], Step]:
    """A layer without weights."""
    return lambda path, layer: lambda weights, x: function(x)


def linear(path: str, layer: Any) -> Step:
    def step(weights: Weights, x: Array) -> Array:
        weight, bias = weights[f"{path}.weight"], weights.get(f"{path}.bias")
        if x.ndim == 1 and isinstance(weight, jax.Array):
            return dense(weight, bias, x)
        out = x @ weight.T
        return out if bias is None else out + bias

    return step


def convolution(path: str, layer: Any) -> Step:
    fixed = {
        "groups": layer.groups == 1,
        "dilation": set(layer.dilation) == {1},
        "padding_mode": layer.padding_mode == "zeros",
        "padding": not isinstance(layer.padding, str),
        "stride": len(set(layer.stride)) == 1,
    }
    wrong = [name for name, right in fixed.items() if not right]
    if wrong:
        raise refused(path, layer, f"has {wrong[0]} = {getattr(layer, wrong[0])!r}, which has no form here; {INSTEAD}")
    (top, side), stride = layer.padding, layer.stride[0]

    def step(weights: Weights, x: Array) -> Array:
        kernel, bias = weights[f"{path}.weight"], weights.get(f"{path}.bias")
        padded = jnp.pad(x, ((0, 0), (top, top), (side, side)))
        if isinstance(kernel, jax.Array):
            return conv2d(kernel, bias, padded, stride)
        out = lax.conv_general_dilated(padded[None], jnp.asarray(kernel), (stride, stride), "VALID")[0]
        return out if bias is None else out + bias[:, None, None]

    return step


def pooling(pool: Callable[[Array, int], Array]) -> Callable[[str, Any], Step]:
    def make(path: str, layer: Any) -> Step:
        dilated = set(pair(getattr(layer, "dilation", 1))) != {1}
        odd = dilated or layer.ceil_mode or getattr(layer, "divisor_override", None) is not None
        where = f"layer {path!r} ({type(layer).__name__})"
        return pooled(pool, where, layer.kernel_size, layer.stride, layer.padding, odd)

    return make


def pooled(pool: Callable, where: str, size: Any, stride: Any, padding: Any, odd: bool) -> Step:
    sizes, strides = pair(size), pair(stride if stride is not None else size)
    if odd or sizes != strides or len(set(sizes)) > 1 or set(pair(padding)) != {0}:
        raise ConfigError(
            f"from_torch: {where}: windows must be square, side by side, without padding; take a convolution with a "
            "stride instead"
        )
    return lambda weights, x: pool(x, sizes[0])


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def whole_pool(path: str, layer: Any) -> Step:
    if set(pair(layer.output_size)) != {1}:
        raise refused(path, layer, "must have output size 1; take AvgPool2d for others")
    return lambda weights, x: x.mean(axis=(1, 2), keepdims=True)


def embedding(path: str, layer: Any) -> Step:
    if layer.padding_idx is not None or layer.max_norm is not None:
        raise refused(path, layer, "with padding_idx or max_norm has no form here; leave them out")
    return lambda weights, x: embed(jnp.asarray(weights[f"{path}.weight"]), x.astype(jnp.int32))


def layer_norm(path: str, layer: Any) -> Step:
    axes, eps = tuple(range(-len(layer.normalized_shape), 0)), layer.eps

    def step(weights: Weights, x: Array) -> Array:
        out = normalised(x, axes, eps)
        out = out * weights[f"{path}.weight"] if f"{path}.weight" in weights else out
        return out + weights[f"{path}.bias"] if f"{path}.bias" in weights else out

    return step


def group_norm(path: str, layer: Any) -> Step:
    groups, eps = layer.num_groups, layer.eps

    def step(weights: Weights, x: Array) -> Array:
        out = normalised(x.reshape(groups, -1), (1,), eps).reshape(x.shape)
        per_channel = (x.shape[0], *(1,) * (x.ndim - 1))
        if f"{path}.weight" not in weights:
            return out
        return out * weights[f"{path}.weight"].reshape(per_channel) + weights[f"{path}.bias"].reshape(per_channel)

    return step


def normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axis=axes, keepdims=True) + eps)


def gelu(path: str, layer: Any) -> Step:
    near = layer.approximate == "tanh"
    return lambda weights, x: jax.nn.gelu(x, approximate=near)


def soft_plus(path: str, layer: Any) -> Step:
    beta = float(layer.beta)
    return lambda weights, x: softplus(beta * x) / beta


def flatten(path: str, layer: Any) -> Step:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise refused(path, layer, "must flatten all of a record: start_dim 1, end_dim -1")
    return lambda weights, x: x.reshape(-1)


same = plain(lambda x: x)
LAYERS: dict[str, Callable[[str, Any], Step]] = {
    "Linear": linear, "Conv2d": convolution, "Embedding": embedding, "LayerNorm": layer_norm, "GroupNorm": group_norm,
    "MaxPool2d": pooling(max_pool), "AvgPool2d": pooling(avg_pool), "AdaptiveAvgPool2d": whole_pool,
    "ReLU": plain(jax.nn.relu), "SiLU": plain(jax.nn.silu), "Tanh": plain(jnp.tanh), "Sigmoid": plain(jax.nn.sigmoid),
    "GELU": gelu, "Softplus": soft_plus, "Flatten": flatten, "Dropout": same, "Dropout2d": same, "Identity": same,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu, "silu": jax.nn.silu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid,
    "dropout": lambda x: x, "contiguous": lambda x: x,
}  # fmt: skip
POOLS = {"max_pool2d": max_pool, "avg_pool2d": avg_pool}
SHAPES = ("flatten", "view", "reshape")


def function_step(torch: Any, node: Any) -> Step:
    """Of a function or method in a module's forward."""
    own = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = pool_name(torch, node.target) or own
    if name in FUNCTIONS:
        return lambda weights, x: FUNCTIONS[name](x)
    if name == "gelu":
        near = node.kwargs.get("approximate") == "tanh"
        return lambda weights, x: jax.nn.gelu(x, approximate=near)
    if name in SHAPES:
        shape = record_shape(name, node)
        return lambda weights, x: x.reshape(shape)
    if name in POOLS:
        given = dict(zip(("kernel_size", "stride", "padding"), node.args[1:], strict=False)) | node.kwargs
        odd = bool(set(given) - {"kernel_size", "stride", "padding"} - {k for k, v in given.items() if v in (1, False)})
        return pooled(POOLS[name], node.name, given["kernel_size"], given.get("stride"), given.get("padding", 0), odd)
    raise ConfigError(f"from_torch: {node.name}: {name} has no form here; {INSTEAD}")


def pool_name(torch: Any, target: Any) -> str:
    """torch.nn.functional.max_pool2d is a dispatcher without a name of its own."""
    functional = torch.nn.functional
    return next((name for name in POOLS if target in (getattr(functional, name), getattr(torch, name, None))), "")


def record_shape(name: str, node: Any) -> tuple[int, ...]:
    """What becomes of one record; a shape that does not begin with the batch is refused."""
    if name == "flatten":
        first = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
        if first == 1 and len(node.args) < 3 and not set(node.kwargs) - {"start_dim"}:
            return (-1,)
    else:
        given = node.args[1:] if len(node.args) != 2 or isinstance(node.args[1], int) else tuple(node.args[1])
        batch = bool(given) and (is_batch_size(given[0]) or (given[0] == -1 and -1 not in given[1:]))
        if batch and all(isinstance(n, int) for n in given[1:]):
            return tuple(given[1:])
    raise ConfigError(f"from_torch: {node.name}: must keep the batch as it is, e.g. torch.flatten(x, 1)")


def is_batch_size(node: Any) -> bool:
    """x.size(0), or x.shape[0]."""
    if getattr(node, "op", "") == "call_method":
        return node.target == "size" and tuple(node.args[1:]) == (0,)
    asked = getattr(node, "op", "") == "call_function" and node.target is operator.getitem and node.args[1] == 0
    return asked and is_shape(node.args[0])


def is_shape(node: Any) -> bool:
    return getattr(node, "op", "") == "call_function" and node.target is getattr and node.args[1] == "shape"
