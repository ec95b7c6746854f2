"""Preprocessing steps that make public features of images; each maps a record by itself and leaves it with length 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from silodp.data.encoder import encoded, encoder_of
from silodp.data.images import channels_first, oriented_gradients, with_colours
from silodp.data.scattering import scattered
from silodp.data.types import Note, Table

if TYPE_CHECKING:
    from silodp.data.preprocess import Step

Fitted = tuple[Callable[[Table], Table], Note]
Features = Callable[[np.ndarray], np.ndarray]
HOG_CELL, HOG_ORIENTATIONS = 4, 8
SCALES, ORIENTATIONS = 2, 8


def hog(step: Step, train: Table) -> Fitted:
    """`hog`, or `hog:CELL`: pixels along the side of a cell."""
    cell = _cell(step, train)
    features = lambda x: oriented_gradients(x, cell, HOG_ORIENTATIONS)
    return _mapped(step, features, "oriented gradients in cells of an image, every record by itself, to unit norm")


def hog_colour(step: Step, train: Table) -> Fitted:
    """`hog-colour`, or `hog-colour:CELL`: oriented gradients, every cell's colours, and the colours' own gradients."""
    features = partial(with_colours, cell=_cell(step, train), orientations=HOG_ORIENTATIONS)
    detail = "oriented gradients and colours in cells of an image, every record by itself, to unit norm"
    return _mapped(step, features, detail)


def scattering(step: Step, train: Table) -> Fitted:
    """`scattering`, or `scattering:SCALES`: wavelets of so many scales, one twice as wide as the one before."""
    given = SCALES if not step.argument else step.numbers(1)[0]
    sides = _sides(step, train)
    most = next(k for k in range(9, -1, -1) if all(side % 2**k == 0 and side > 2**k for side in sides))
    if given not in range(1, most + 1):
        allowed = f"images of {sides} pixels allow 1 to {most}" if most else f"images of {sides} pixels have odd sides"
        raise step.error(f"needs a whole number of scales; {allowed}")
    features = partial(scattered, scales=int(given), orientations=ORIENTATIONS)
    return _mapped(step, features, "wavelets of an image (scattering transform), every record by itself, to unit norm")


def encoder(step: Step, train: Table) -> Fitted:
    """`encoder:MODULE:FUNCTION` or `encoder:FILE.npz`: see silodp.data.encoder."""
    try:
        encode = encoder_of(step.argument)
    except ValueError as error:
        raise step.error(str(error)) from None

    def features(x: np.ndarray) -> np.ndarray:
        try:
            return encoded(encode, x)
        except ValueError as error:
            raise step.error(str(error)) from None

    return _mapped(step, features, "the user's own frozen encoder, every record by itself, to unit norm")


def _mapped(step: Step, features: Features, detail: str) -> Fitted:
    return lambda table: replace(table, features=features(table.features), names=()), step.public(detail)


def _cell(step: Step, train: Table) -> int:
    cell, most = HOG_CELL if not step.argument else step.numbers(1)[0], min(_sides(step, train))
    if cell not in range(1, most + 1):
        raise step.error(f"needs a whole number of pixels from 1 to {most} for the side of a cell")
    return int(cell)


def _sides(step: Step, train: Table) -> tuple[int, int]:
    try:
        return channels_first(train.features).shape[2:]
    except ValueError as error:
        raise step.error(str(error)) from None


STEPS: dict[str, Callable[[Step, Table], Fitted]] = {
    "hog": hog,
    "hog-colour": hog_colour,
    "scattering": scattering,
    "encoder": encoder,
}
