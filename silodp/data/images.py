"""Public features of images: histograms of oriented gradients (Dalal, Triggs 2005).

    g(p)    = gradient of the brightness at pixel p, in the channel where it is longest
    h[i, o] = sum over pixels of |g(p)| * (how near p is to the middle of cell i) * (how near g's angle is to o)
    record  = sqrt(h) / |sqrt(h)|

Nearness falls linearly, to zero at the next cell and the next angle, so that a small shift changes little. A record is
mapped by itself, with no constant from the data: nothing is learned from records, and every row has length 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

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
    return in_parts(lambda part: pooled(part, rows, columns, orientations), layers)


def in_parts(
    features: Callable[[Float32[np.ndarray, "n ..."]], Float32[np.ndarray, "n d"]],
    images: Float32[np.ndarray, "n ..."],
    at_a_time: int = AT_A_TIME,
    threads: int | None = None,
) -> Float32[np.ndarray, "n d"]:
    """The features of all images, computed of few at a time: what is in between is larger. A terminal is told.

    threads: as many as there are cores when left out; NumPy lets them compute side by side.
    """
    from concurrent.futures import ThreadPoolExecutor

    first = features(images[:at_a_time])
    whole = np.empty((len(images), first.shape[1]), np.float32)
    whole[:at_a_time] = first

    def fill(start: int) -> None:
        part = slice(start, start + at_a_time)
        whole[part] = features(images[part])

    starts = range(at_a_time, len(images), at_a_time)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in _told(pool.map(fill, starts), len(starts)):
            pass  # an error of a part is raised here
    return whole


def _told(parts: Iterable[None], count: int) -> Iterable[None]:
    if not count or not sys.stderr.isatty():
        return parts
    from rich.console import Console
    from rich.progress import track

    return track(parts, "features", total=count, console=Console(stderr=True), transient=True)


def with_colours(
    images: Float32[np.ndarray, "n ..."], cell: int, orientations: int
) -> Float32[np.ndarray, "n features"]:
    """Oriented gradients; every cell's brightness and colours; the colours' own gradients, in cells of twice the side.

    All with equal weight. Those of colours bring more than finer cells or more orientations do, for fewer features.
    """
    layers = channels_first(images)
    apart, twice = colours_apart(layers), min(2 * cell, *layers.shape[2:])
    parts = [oriented_gradients(layers, cell, orientations), cell_colours(layers, cell)]
    parts += [oriented_gradients(apart[:, [colour]], twice, orientations) for colour in range(1, apart.shape[1])]
    return (np.concatenate(parts, axis=1) / np.sqrt(np.float32(len(parts)))).astype(np.float32)


def cell_colours(images: Float32[np.ndarray, "n ..."], cell: int) -> Float32[np.ndarray, "n features"]:
    layers = colours_apart(channels_first(images))
    rows, columns = (near / near.sum(axis=1, keepdims=True) for near in (nearness(s, cell) for s in layers.shape[2:]))
    cells = rows @ layers @ columns.T
    cells[:, 0] -= cells[:, 0].mean(axis=(1, 2), keepdims=True)  # how bright a whole image is says little
    deviations = np.sqrt(np.mean(np.square(cells), axis=(2, 3), keepdims=True))
    return unit_rows((cells / np.where(deviations > 0, deviations, 1)).reshape(len(cells), -1))


def colours_apart(layers: Float32[np.ndarray, "n c h w"]) -> Float32[np.ndarray, "n c h w"]:
    """Of red, green and blue: brightness, and two differences. Other layers stay as they are."""
    if layers.shape[1] != 3:
        return layers
    red, green, blue = np.moveaxis(layers, 1, 0)
    return np.stack([(red + green + blue) / 3, (red - blue) / 2, (2 * green - red - blue) / 4], axis=1)


def unit_rows(rows: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Each to length 1; zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


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
    return unit_rows(flat).astype(np.float32)


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
