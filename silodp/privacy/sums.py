"""What a sum of discrete Gaussians on a grid costs beside the real Gaussian that the accountant composes.

Silos add integers: round(v / h) and a discrete Gaussian each. The sum of honest shares has S steps of std in it. Three
things part it from a real Gaussian around v (proofs: docs/privacy.md, "Sums under masks").

1. Rounding v first: a record moves each coordinate by up to one step more. The grid is so fine that all coordinates
   together add at most ROUNDING of what a record moves; every sensitivity counts with it.
2. The sum of discrete Gaussians is one discrete Gaussian but for a factor e^(5 d k exp(-pi^2 S1^2)) over k shares of at
   least S1 steps each, which is 1 for all that follows: S1 is in the tens of thousands.
3. One discrete Gaussian p beside the rounded real one q: -|x|^2 / (24 S^4) <= log(p / q) <= d / (23 S^2). The upper
   bound always holds; the lower one is at least -(d + 2 sqrt(d L) + 2 L) 1.001 / (24 S^2) but for a probability e^-L.

A rounded Gaussian around grid points is a post-processing of the real one. So a release is within e^LOSS and LOST of a
Gaussian mechanism at its multiplier, from every point; that is kept by mixtures (batches) and adds up over releases.
"""

import math
from collections.abc import Sequence

from silodp.privacy.kinds import Spent

ROUNDING = 2.0**-8  # of what a record moves, at most: below 0.5 %
STEPS_MOVED = 1.125  # of a coordinate, beyond what a record moves: one by rounding, the rest by float64
LOSS = 2.0**-30  # of epsilon, for a release
LOST = 1e-300  # of delta, before it is multiplied by e^epsilon, for a release
TAIL = 690.78  # at least -log(LOST); written out, as parties must not round it differently


def fewest_steps(dimension: int) -> float:
    """Least std of a sum of this many coordinates, in steps of the grid, for which LOSS and LOST hold."""
    above = dimension / 23
    below = 1.001 * (dimension + 2 * math.sqrt(dimension * TAIL) + 2 * TAIL) / 24
    return math.sqrt((above + below) / LOSS)


def apart(spent: Sequence[Spent]) -> tuple[float, float]:
    """How far all releases together are from those that are composed: a factor e^loss, and a probability."""
    real = [part.releases for part in spent if 0 < part.multiplier < math.inf]
    return sum(r.count * r.loss for r in real), sum(r.count * r.lost for r in real)


def within(delta: float, epsilon: float, loss: float, lost: float) -> float:
    """The delta that the composed releases may have at `epsilon`, so that the real ones have `delta` at epsilon + loss.

    P <= e^a Q, Q <= e^epsilon Q' + rest, Q' <= e^b P' + lost, a + b = loss: so P <= e^(epsilon + loss) P' + delta.
    """
    return delta * math.exp(-loss) - math.exp(min(epsilon, 700.0)) * lost
