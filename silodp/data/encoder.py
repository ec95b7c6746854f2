"""Public features of images, or of any records, by an encoder that the user brings: code, or filters in a file.

`encoder:MODULE:FUNCTION` calls function(records) -> features, records first, on this machine. `encoder:FILE.npz` needs
no code: `filters` (k, channels, rows, columns) and maybe `bias` (k,); each filter slides over the image, numbers below
0 become 0, and means around the cells of a GRID x GRID grid are kept (Coates, Ng, Lee 2011). Every record ends with
length 1.

Such features are public only if the encoder was not made from the silos' records, which nobody can check, and if it
maps every record by itself. That is tried: some records are encoded again, alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from silodp import registry
from silodp.data.images import channels_first, in_parts, nearness, unit_rows
from silodp.data.tables import load_npz

GRID = 4
TRIED = 3  # records that are encoded again alone
CLOSE = 1e-3  # of their lengths: a batch may be computed in another order

Encode = Callable[[np.ndarray], np.ndarray]


def encoder_of(argument: str) -> Encode:
    """A function from records to features, as it is named after `encoder:`."""
    if argument.endswith(".npz"):
        return Filters.read(Path(argument))
    if ":" not in argument:
        raise ValueError("name MODULE:FUNCTION, or an npz file with filters")
    return registry.function("data.preprocess encoder", argument)


def encoded(encode: Encode, records: Float32[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n d"]:
    features = in_parts(lambda part: _checked(encode(part), len(part)), records, threads=1)
    for row in range(min(TRIED, len(records) - 1)):
        alone = _checked(encode(records[row : row + 1]), 1)[0]
        if np.linalg.norm(alone - features[row]) > CLOSE * np.linalg.norm(alone):
            raise ValueError("a record's features change with the records beside it; they must be its own")
    return unit_rows(features)


def _checked(given: np.ndarray, records: int) -> Float32[np.ndarray, "n d"]:
    features = np.asarray(given)
    if features.ndim < 2 or len(features) != records or features.dtype.kind not in "fiu":
        shape = f"{features.dtype} of shape {features.shape}"
        raise ValueError(f"the encoder gives {shape} for {records} record(s); give numbers, a row for each")
    flat = features.reshape(records, -1).astype(np.float32)
    if not np.isfinite(flat).all():
        raise ValueError("the encoder gives features that are not finite")
    return flat


class Filters:
    """One layer of filters, and means over a grid."""

    def __init__(self, filters: Float32[np.ndarray, "k c h w"], bias: Float32[np.ndarray, " k"]):
        self.filters, self.bias = filters, bias

    @staticmethod
    def read(path: Path) -> Filters:
        if not path.is_file():
            raise ValueError("no such file; need an npz file with an array filters")
        arrays = load_npz(path)
        filters = arrays.get("filters", np.empty(0))
        bias = arrays.get("bias", np.zeros(len(filters)))
        if filters.ndim != 4 or bias.shape != (len(filters),) or not all(np.isfinite(a).all() for a in (filters, bias)):
            raise ValueError("need finite filters (k, channels, rows, columns), and bias (k,) where there is one")
        return Filters(filters.astype(np.float32), bias.astype(np.float32))

    def __call__(self, images: Float32[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n d"]:
        layers = channels_first(images)
        _, channels, *size = self.filters.shape
        places = [side - own + 1 for side, own in zip(layers.shape[2:], size, strict=True)]
        if layers.shape[1] != channels or min(places) < GRID:
            raise ValueError(
                f"filters of shape {self.filters.shape[1:]} do not fit images of shape {layers.shape[1:]}: they need "
                f"the same channels, and {GRID} x {GRID} places at least"
            )
        windows = np.lib.stride_tricks.sliding_window_view(layers, size, axis=(2, 3))  # n c places places h w
        seen = np.maximum(
            np.einsum("ncxyhw,kchw->nkxy", windows, self.filters, optimize=True) + self.bias[:, None, None], 0
        )
        rows, columns = (nearness(length, length // GRID) for length in places)
        return (rows @ np.maximum(seen, 0) @ columns.T).reshape(len(layers), -1)
