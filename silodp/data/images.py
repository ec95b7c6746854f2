"""Public features of images: histograms of oriented gradients (Dalal, Triggs 2005).

    g(p)    = gradient of the brightness at pixel p, in the channel where it is longest
    h[i, o] = sum over pixels of |g(p)| * (how near p is to the middle of cell i) * (how near g's angle is to o)
    record  = sqrt(h) / |sqrt(h)|

Nearness falls linearly, to zero at the next cell and the next angle, so that a small shift changes little. A record is
mapped by itself, with no constant from the data: nothing is learned from records, and every row has length 1.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

AT_A_TIME = 1000  # images, to bound memory
MOST_CHANNELS = 4  # an axis of so few numbers holds colours


def channels_first(images: Float32[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n c h w"]:
    """Images of any usual layout: without channels, channels first, channels last."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] <= MOST_CHANNELS:
        return np.moveaxis(images, 3, 1)
    if images.ndim == 4 and images.shape[1] <= MOST_CHANNELS:
        return images
    raise ValueError(f"needs images, with at most {MOST_CHANNELS} channels; the records have shape {images.shape[1:]}")


def oriented_gradients(
    images: Float32[np.ndarray, "n ..."], cell: int, orientations: int
) -> Float32[np.ndarray, "n features"]:
    layers = channels_first(images)
    rows, columns = nearness(layers.shape[2], cell), nearness(layers.shape[3], cell)
    parts = [
        pooled(layers[start : start + AT_A_TIME], rows, columns, orientations)
        for start in range(0, len(layers), AT_A_TIME)
    ]
    return np.concatenate(parts) if parts else np.zeros((0, orientations * len(rows) * len(columns)), np.float32)


def nearness(length: int, cell: int) -> Float32[np.ndarray, "cells length"]:
    """How near each pixel of a side is to the middle of each cell."""
    middles = (np.arange(length // cell) + 0.5) * cell - 0.5
    return np.maximum(0, 1 - np.abs(np.arange(length) - middles[:, None]) / cell).astype(np.float32)


def pooled(
    layers: Float32[np.ndarray, "n c h w"], rows: np.ndarray, columns: np.ndarray, orientations: int
) -> Float32[np.ndarray, "n features"]:
    length, angle = strongest_gradient(layers)
    turn = angle * np.float32(orientations / (2 * np.pi))
    histograms = np.empty((len(layers), orientations, len(rows), len(columns)), np.float32)
    for o in range(orientations):
        away = np.abs(np.mod(turn - o + orientations / 2, orientations) - orientations / 2)
        histograms[:, o] = rows @ (length * np.maximum(0, 1 - away)) @ columns.T
    flat = np.sqrt(histograms).reshape(len(layers), -1)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    return (flat / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def strongest_gradient(
    layers: Float32[np.ndarray, "n c h w"],
) -> tuple[Float32[np.ndarray, "n h w"], Float32[np.ndarray, "n h w"]]:
    """Length and angle of the gradient in the channel where it is longest; none at the border."""
    across, down = np.zeros_like(layers), np.zeros_like(layers)
    across[..., 1:-1] = layers[..., 2:] - layers[..., :-2]
    down[..., 1:-1, :] = layers[..., 2:, :] - layers[..., :-2, :]
    channel = np.argmax(across**2 + down**2, axis=1)[:, None]
    across, down = (np.take_along_axis(each, channel, axis=1)[:, 0] for each in (across, down))
    return np.hypot(across, down), np.arctan2(down, across)
