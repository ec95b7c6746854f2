"""Numbers as features: scaled by public constants, and as broken lines."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

WIDEST = 4.0  # scaled by a centre and a scale, a number is clipped to this
FARTHEST = 2.5  # where the outermost knots of a broken line lie, in deviations
KNOTS = (3, 5, 9, 17, 33, 65)  # that broken lines have: each has the pieces of the one before, halved


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


class Bend(NamedTuple):
    """A part of a broken line, in deviations: 1 at the place, 0 from `reach` on, in between a line."""

    place: float
    reach: float

    def of(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """How near values are to the place, less what is usual."""
        return self.nearness(values) - self.usual().mean

    def nearness(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        return np.maximum(0, 1 - np.abs(np.clip(values, -FARTHEST, FARTHEST) - self.place) / self.reach)

    def usual(self) -> Usual:
        """Of a number with a normal law: a public constant, whatever the records are."""
        return usual_of(self)


class Usual(NamedTuple):
    mean: float
    variance: float


@cache
def usual_of(bend: Bend) -> Usual:
    law, count = NormalDist(), 1000
    near = bend.nearness(np.array([law.inv_cdf((i + 0.5) / count) for i in range(count)]))
    return Usual(float(np.mean(near)), float(np.var(near)))


def bends(knots: int) -> list[Bend]:
    """What makes a line of a number a broken one: a coarse bend first, then ever finer ones between those before.

    With the line itself and a constant they span all broken lines of these knots, and no feature is told twice: noise
    grows with features. Where noise hides the fine bends, the coarse ones are still told.
    """
    found, pieces = list[Bend](), 2
    while pieces < knots:
        reach = 2 * FARTHEST / pieces
        found += [Bend(reach * i - FARTHEST, reach) for i in range(1, pieces, 2)]
        pieces *= 2
    return found
