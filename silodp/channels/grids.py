"""The grid of a sum under masks: how fine, how many bits, and who adds how much of the noise. Public numbers only.

All lengths are in clip norms, so that they are known before a run; a silo multiplies them by the clip of the question.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int

from silodp.errors import ConfigError, Refused, Undecided
from silodp.facts import Declared
from silodp.privacy.sums import ROUNDING, STEPS_MOVED, fewest_steps
from silodp.releases import Vector

MOST_STEPS = 2.0**48  # of a silo's own number: float64 then errs by less than a sixteenth of a step
MOST_SHARE = 2.0**30  # of a share's std, in steps: what is drawn exactly (silodp.discrete)
TAIL = (
    12.0  # stds that a sum's noise keeps within, but for a chance of 1e-31 a number; a wrapped sum is wrong, not open
)
CLOSE = 1 - 2.0**-10  # what float32 and BORDER may add to a step, or take from it
BORDER = 2.0**-12  # so near to a power of two, relative to it, two silos' float32 may lie on either side


class Grid(NamedTuple):
    """Of one stream. step: the grid's, at most and at least half of it. width: bits of a sum. longest: of each silo's
    mean, which is cut to it. shares: std of each silo's noise, on its weighted mean."""

    step: float
    width: int
    longest: np.ndarray
    shares: np.ndarray


class Lattice(eqx.Module):
    """What the program knows of a stream's grid, in clip norms."""

    over_clip: Float[Array, " silos"]  # how far a record moves each silo's mean
    step: Float[Array, ""]
    width: Int[Array, ""]
    hidden: Float[Array, " silos"]  # the multiplier that protects each silo's records


class Part(eqx.Module):
    """A silo's part of a sum before it is rounded, noised and masked: it does not leave the silo like this."""

    value: Vector
    bound: Float[Array, ""]
    rest: Vector | None
    std: Float[Array, ""]  # of this silo's share of the noise, before it is weighted
    step: Float[Array, ""]  # of the grid: the coarsest, and once that is settled a power of two
    round: Int[Array, ""]
    stream: str = eqx.field(static=True)


NEVER = Grid(1.0, 8, np.ones(1), np.zeros(1))  # of a stream that no silo releases


def moves_of(name: str, declared: Declared) -> np.ndarray:
    """How far a record of each silo moves the weighted sum."""
    return np.asarray(declared.facts.weights) * declared.bounds_over_clip(name)


def shares_for(needed: np.ndarray, honest: int) -> np.ndarray:
    """Each silo's share of the noise (std), so that any `honest` shares with its own have the std that it needs.

    Everybody adds u at least, a silo that needs more the rest: max(u, need - (honest - 1) u), as variances. Their sum
    is least at the u below. All alike: need / honest. One honest silo: everybody its own need, as without masks.
    """
    wanted = np.sort(needed**2)[::-1]
    common = wanted[math.ceil(len(wanted) / honest) - 1] / honest
    return np.sqrt(np.maximum(common, needed**2 - (honest - 1) * common))


def hidden_by(shares: np.ndarray, honest: int) -> np.ndarray:
    """Std of the noise that surely hides each silo's records: its own share and the smallest of honest others."""
    squares = shares**2
    others = [np.sort(np.delete(squares, i))[: honest - 1].sum() for i in range(len(squares))]
    return np.sqrt(squares + others)


def exponent_of(coarsest: float, told: int | None) -> int:
    """Of the grid's step: the largest power of two that is not above the coarsest step.

    Silos compute that from the question's clip norm, each on its own processor. Near a border they might differ, and
    parts on two grids do not add up: there a silo asks, and takes the one it is told if it is one of the two.
    """
    if not (math.isfinite(coarsest) and coarsest > 0):
        raise Refused("a question without a grid; nothing was sent")
    below, above = (math.frexp(coarsest * factor)[1] - 1 for factor in (1 - BORDER, 1 + BORDER))
    if told is None and below != above:
        raise Undecided((below, above))
    if told is not None and told not in (below, above):
        raise Refused("the grid that was told is not that of the question; nothing was sent")
    return below if told is None else told


def planned_grid(name: str, nominal: np.ndarray, declared: Declared, size: int) -> Grid:
    """The coarsest grid on which rounding and discreteness cost no more than is accounted.

    No sum wraps around: a silo cuts its mean to `longest`, which no clipped mean exceeds, and weights sum to 1; the
    noise of all silos together keeps within TAIL stds.
    """
    moves = moves_of(name, declared)
    shares = nominal * moves
    some = shares[shares > 0]
    step = ROUNDING * moves.min() / (STEPS_MOVED * math.sqrt(size))
    if some.size:
        step = min(step, some.min() / fewest_steps(size))
    step *= CLOSE
    longest = np.array([stream.batch.longest_over_clip() for stream in declared.each(name)])
    # Sums, products and roots that every processor rounds alike: silos must come to the same grid.
    reach = float(longest.max()) + TAIL * math.sqrt(math.fsum(shares**2))
    finest = CLOSE * step / 2
    steps = reach / finest + declared.facts.silos + 2
    if longest.max() / finest > MOST_STEPS or shares.max() / finest > MOST_SHARE or steps > 2.0**62:
        raise ConfigError(
            f"privacy.trust = 'aggregated': sums of stream {name!r} would need {math.log2(steps) + 1:.0f} bits: "
            f"records of silos count too differently, or {size} numbers are too many; set "
            "algorithm.weights = 'size', or take fewer parameters"
        )
    return Grid(step, 1 + (math.ceil(steps) - 1).bit_length(), longest, shares)
