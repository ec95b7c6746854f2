"""Where a parameter meets data: dense, conv2d, embed. Ordinary functions of one record, which the engines recognise.

Each layer is a named jit, so that it stays visible as one equation in the traced loss (`structure.py` looks for the
names). The weight always comes first in its product, forwards and (in `apply_weight`, the structured engine's form)
backwards: vmapped over records these are then single matrix products that keep the record axis last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

DENSE, CONV, EMBED = "silodp_dense", "silodp_conv2d", "silodp_embed"
LEAF = "leaf"  # a parameter that no layer has to itself
# Up to this many input values per image row, a convolution is faster as a few products with a band matrix.
BAND_ROW = 512


def dense(
    weight: Float[Array, "outputs inputs"], bias: Float[Array, " outputs"] | None, x: Shaped[Array, " inputs"]
) -> Float[Array, " outputs"]:
    """weight @ x + bias."""
    x = _like(weight, x)
    return _dense(weight, x) if bias is None else _dense(weight, x, bias)


def conv2d(
    kernel: Float[Array, "outputs inputs rows columns"],
    bias: Float[Array, " outputs"] | None,
    x: Shaped[Array, "inputs height width"],
    stride: int = 1,
) -> Float[Array, "outputs out_height out_width"]:
    """Cross-correlation of one image (channels first, no padding) with a kernel, as in PyTorch's conv2d."""
    layer, x = _conv2d(stride), _like(kernel, x)
    return layer(kernel, x) if bias is None else layer(kernel, x, bias)


def embed(table: Float[Array, "rows width"], index: Int[Array, "*positions"]) -> Float[Array, "*positions width"]:
    """Rows of a table. Indices outside it are clamped."""
    return _embed(table, jnp.asarray(index))


def max_pool(x: Float[Array, "channels height width"], size: int = 2) -> Float[Array, "channels h w"]:
    """Largest value of each size x size window; windows do not overlap, a last partial one is dropped."""
    # A plain selection: its derivative is one too, whereas that of jnp.maximum divides ties.
    larger = lambda a, b: jnp.where(a >= b, a, b)
    return _pool(larger, x, size)


def avg_pool(x: Float[Array, "channels height width"], size: int = 2) -> Float[Array, "channels h w"]:
    """Mean of each size x size window; windows do not overlap, a last partial one is dropped."""
    return _pool(jnp.add, x, size) / size**2


def _pool(combine: Callable[[Array, Array], Array], x: Array, size: int) -> Array:
    channels, *sides = x.shape
    if size < 1 or size > min(sides):
        raise ValueError(f"size: {size} is not a pooling window for images of shape {x.shape}")
    height, width = (side // size for side in sides)
    windows = x[:, : height * size, : width * size].reshape(channels, height, size, width, size)
    rows = reduce(combine, [windows[:, :, i] for i in range(size)])
    return reduce(combine, [rows[..., i] for i in range(size)])


def _like(weight: Array, x: Array) -> Array:
    """The input in the weight's type: the squares of whole numbers would overflow in an engine's norms."""
    return jnp.asarray(x, jnp.result_type(weight))


def _named(name: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """A jit that shows up under `name` in a traced loss."""

    def layer(*arrays: Array) -> Array:
        return function(*arrays)

    layer.__name__ = layer.__qualname__ = name
    return jax.jit(layer)


def _plain_dense(weight: Array, x: Array, bias: Array | None = None) -> Array:
    out = weight @ x
    return out if bias is None else out + bias


def _plain_conv2d(kernel: Array, x: Array, bias: Array | None = None, *, stride: int) -> Array:
    apply = band_convolution if x.shape[0] * x.shape[2] <= BAND_ROW else _direct_convolution
    out = apply(kernel, x, stride)
    return out if bias is None else out + bias[:, None, None]


def _plain_embed(table: Array, index: Array) -> Array:
    return jnp.take(table, index, axis=0, mode="clip")


def apply_weight(kind: str, weight: Array, x: Array, stride: int) -> Array:
    """A layer without its bias, differentiable in x only."""
    if kind == DENSE:
        return _weight_first(weight, x)
    if kind == EMBED:
        return _plain_embed(weight, x)
    if x.shape[0] * x.shape[2] <= BAND_ROW:
        return band_convolution(weight, x, stride, _weight_first)
    return _direct_convolution(weight, x, stride)


@jax.custom_vjp
def _weight_first(weight: Array, x: Array) -> Array:
    return weight @ x


def _forwards(weight: Array, x: Array) -> tuple[Array, Array]:
    return weight @ x, weight


def _backwards(weight: Array, cotangent: Array) -> tuple[Array, Array]:
    return jnp.zeros_like(weight), weight.T @ cotangent


_weight_first.defvjp(_forwards, _backwards)


def _direct_convolution(kernel: Array, x: Array, stride: int) -> Array:
    return lax.conv_general_dilated(x[None], kernel, (stride, stride), "VALID")[0]


def band_convolution(
    kernel: Array, x: Array, stride: int, product: Callable[[Array, Array], Array] = jnp.matmul
) -> Array:
    """One product: a band matrix that slides the kernel along the width, times the stacked rows of the image."""
    outputs, _, size, _ = kernel.shape
    band = _band_matrix(kernel, x.shape[2], stride)
    stacked = stacked_rows(x, size, stride)
    rows = stacked.reshape(-1, stacked.shape[-1])
    out = product(band.reshape(-1, rows.shape[0]), rows)
    return out.reshape(outputs, band.shape[1], -1).swapaxes(1, 2)


def _band_matrix(kernel: Array, width: int, stride: int) -> Float[Array, "outputs out_width rows channels width"]:
    columns = kernel.shape[3]
    out_width = (width - columns) // stride + 1
    place = np.zeros((columns, out_width, width), np.float32)
    for column in range(columns):
        place[column, np.arange(out_width), np.arange(out_width) * stride + column] = 1.0
    return jnp.einsum("oikl,lvw->ovkiw", kernel, place)


def stacked_rows(x: Array, size: int, stride: int) -> Float[Array, "rows channels width out_height"]:
    """For each output row, the `size` input rows that it sees; the output row is the last axis."""
    turned = x.swapaxes(1, 2)
    out_height = (x.shape[1] - size) // stride + 1
    last = (out_height - 1) * stride + 1
    return jnp.stack([lax.slice_in_dim(turned, k, k + last, stride, 2) for k in range(size)])


@cache
def _conv2d(stride: int):
    return _named(f"{CONV}_{stride}", partial(_plain_conv2d, stride=stride))


_dense = _named(DENSE, _plain_dense)
_embed = _named(EMBED, _plain_embed)
