"""Public features of images: the scattering transform (Mallat 2012; Bruna, Mallat 2013), group by group normalised.

    order 0   x * phi
    order 1   |x * psi[j, o]| * phi
    order 2   ||x * psi[j, o]| * psi[k, p]| * phi,   k > j

psi[j, o] is a Morlet wavelet of scale 2^j that looks along angle o, phi a Gaussian as wide as 2^scales. What phi has
smoothed is kept at every 2^scales-th pixel. Colours are taken apart first (brightness and two differences); order 2 is
made of brightness only, which the eye sees more sharply too.

A classifier on these features wants them on one scale (Tramer, Boneh 2021): the outputs of each order and scale of each
colour are a group, which gets mean 0 and equal length in every record. So every record has length 1. It is mapped by
itself, with constants that no data has a say in: nothing is learned from records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Complex64, Float32

from silodp.data.images import channels_first, colours_apart, in_parts
from silodp.later import Later

fft = Later("scipy.fft")

WIDTH, FREQUENCY = 0.8, 3 * np.pi / 4  # of the finest wavelet, in pixels and radians per pixel
AT_A_TIME = 50  # images: what is computed of them should stay in the cache
SMALL = 1e-6  # a group's deviation counts as no less than this part of the record's largest pixel


@dataclass(frozen=True)
class Scattering:
    """The filters for images of one size. `sides` are multiples of 2^scales."""

    sides: tuple[int, int]
    scales: int = 2
    orientations: int = 8

    @property
    def step(self) -> int:
        return 2**self.scales

    @cached_property
    def padded(self) -> tuple[int, int]:
        """Images are mirrored at their borders: what is left of a wavelet must not come in from the other side."""
        return self.sides[0] + 2 * self.step, self.sides[1] + 2 * self.step

    @cached_property
    def wavelets(self) -> dict[tuple[int, int], Float32[np.ndarray, "h w"]]:
        """Their Fourier transforms, which are real, by scale and orientation."""
        return {(j, o): self._wavelet(j, o) for j in range(self.scales) for o in range(self.orientations)}

    def _wavelet(self, j: int, o: int) -> Float32[np.ndarray, "h w"]:
        width, angle = WIDTH * 2**j, np.pi * o / self.orientations
        rows, columns = (_around_zero(side) for side in self.padded)
        along = columns * np.cos(angle) + rows[:, None] * np.sin(angle)
        across = (rows[:, None] * np.cos(angle) - columns * np.sin(angle)) * (4 / self.orientations)
        bump = np.exp(-(along**2 + across**2) / (2 * width**2))
        wave = np.exp(1j * along * FREQUENCY / 2**j)
        # a Morlet wavelet has no mean: it does not see brightness
        morlet = bump * (wave - (bump * wave).sum() / bump.sum())
        return np.real(fft.fft2(morlet / np.abs(morlet).sum())).astype(np.float32)

    def smoothed(self, layer: Float32[np.ndarray, "n h w"], j: int) -> Float32[np.ndarray, "n rows columns"]:
        """The low-pass phi, at every 2^scales-th pixel within the image, of a layer at every 2^j-th pixel."""
        rows, columns = (_averages(side, self.step, 2**j) for side in self.sides)
        return rows @ layer @ columns.T

    def __call__(
        self, layers: Float32[np.ndarray, "n h w"], second: bool
    ) -> Iterator[Float32[np.ndarray, "n channels rows columns"]]:
        """The groups of one colour: order 0, then by scale order 1 and (`second`) order 2."""
        margin = (self.step, self.step)
        x = np.pad(layers, ((0, 0), margin, margin), mode="symmetric")
        yield self.smoothed(x, 0)[:, None]
        spectrum = fft.fft2(x)
        for j in range(self.scales):
            first = [self._seen(spectrum, (j, o), 0) for o in range(self.orientations)]
            yield np.stack([self.smoothed(u, j) for u in first], axis=1)
            spectra = [fft.fft2(u) for u in first] if second and j + 1 < self.scales else []
            for k in range(j + 1, self.scales) if second else ():
                seen = (self._seen(s, (k, p), j) for s in spectra for p in range(self.orientations))
                yield np.stack([self.smoothed(u, k) for u in seen], axis=1)

    def _seen(
        self, spectrum: Complex64[np.ndarray, "n h w"], wavelet: tuple[int, int], j: int
    ) -> Float32[np.ndarray, "n h w"]:
        """|x * psi| at every 2^scale-th pixel, of x at every 2^j-th."""
        filtered = spectrum * _folded(self.wavelets[wavelet], 2**j)
        return np.abs(fft.ifft2(_folded(filtered, 2 ** (wavelet[0] - j)) / 4 ** (wavelet[0] - j)))


def _around_zero(side: int) -> np.ndarray:
    """Places of a periodic side, its first pixel the origin."""
    return fft.fftfreq(side) * side


def _folded(spectrum: np.ndarray, step: int) -> np.ndarray:
    """The spectrum of every step-th pixel (times step^2)."""
    rows, columns = (side // step for side in spectrum.shape[-2:])
    down = sum((spectrum[..., i * rows : (i + 1) * rows, :] for i in range(1, step)), spectrum[..., :rows, :])
    return sum((down[..., i * columns : (i + 1) * columns] for i in range(1, step)), down[..., :columns])


def _averages(side: int, step: int, coarse: int) -> Float32[np.ndarray, "kept places"]:
    """Weights of a Gaussian around the middle of each step x step square, over the places of a padded, coarse side."""
    middles = (np.arange(side // step) + 0.5) * step - 0.5
    places = np.arange(0, side + 2 * step, coarse) - step
    weights = np.exp(-((places - middles[:, None]) ** 2) / (2 * (WIDTH * step / 2) ** 2))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def scattered(
    images: Float32[np.ndarray, "n ..."], scales: int, orientations: int
) -> Float32[np.ndarray, "n features"]:
    layers = colours_apart(channels_first(images))
    filters = Scattering(layers.shape[2:], scales, orientations)
    return in_parts(lambda part: _normalised(part, filters), layers, AT_A_TIME)


def _normalised(layers: Float32[np.ndarray, "n c h w"], filters: Scattering) -> Float32[np.ndarray, "n features"]:
    largest = np.maximum(np.abs(layers).max(axis=(1, 2, 3)), np.finfo(np.float32).tiny)[:, None]
    groups = []
    for colour in range(layers.shape[1]):
        for group in filters(layers[:, colour] / largest[:, :, None], second=colour == 0):
            flat = group.reshape(len(group), -1)
            flat = flat - flat.mean(axis=1, keepdims=True)
            deviation = np.sqrt(np.mean(np.square(flat), axis=1, keepdims=True))
            groups.append(flat / np.maximum(deviation, SMALL))
    features = np.concatenate(groups, axis=1)
    return features / np.float32(np.sqrt(features.shape[1]))
