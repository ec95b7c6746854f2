"""Numbers as features: scaled by public constants, and as broken lines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

WIDEST = 4.0  # scaled by a centre and a scale, a number is clipped to this
FARTHEST = 2.5  # where the outermost knots of a broken line lie, in deviations


class Constants(NamedTuple):
    """Of a number: (x - centre) / scale is clipped to [-limit, limit]."""

    centre: float
    scale: float
    limit: float = WIDEST


def scaled_to(bounds: tuple[float, float]) -> Constants:
    lowest, highest = bounds
    return Constants((lowest + highest) / 2, (highest - lowest) / 2, 1.0)


def scaled(values: Float[np.ndarray, " n"], to: Constants) -> Float[np.ndarray, " n"]:
    return np.clip((values - to.centre) / to.scale, -to.limit, to.limit)


def tents(values: Float[np.ndarray, "n d"], places: Float[np.ndarray, " k"]) -> list[Float[np.ndarray, "n d"]]:
    """For each place how near the values are to it: 1 there, 0 from the next place on, in between a line.

    Their sum with any weights is a broken line: a linear model of them is additive.
    """
    near = np.clip(values, places[0], places[-1])
    return [np.maximum(0, 1 - np.abs(near - place) / (places[1] - places[0])) for place in places]
