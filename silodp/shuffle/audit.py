"""Audits of the shuffle model: what an attacker can tell, against what is claimed.

Each attack yields a yes/no event per trial under two neighbouring inputs. Any such event bounds the
guarantee from below: the log ratio of its probabilities cannot exceed the local eps0, and the
difference of its probabilities cannot exceed delta(0), the total variation, of the shuffled
release. A reading that lies above the claim by more than three standard errors convicts the
implementation.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float


class Reading(NamedTuple):
    """A measured lower bound on a privacy parameter, with its standard error."""

    estimate: float
    error: float

    def exceeds(self, claim: float) -> bool:
        """Whether the claim is refuted at three standard errors."""
        return self.estimate - 3 * self.error > claim


def local_level(event: Bool[np.ndarray, " t"], opposite: Bool[np.ndarray, " t"]) -> Reading:
    """log P(event)/Q(event) from trials under an input and under the opposite one (claim: eps0)."""
    p, q = float(np.mean(event)), float(np.mean(opposite))
    if p == 0 or q == 0:
        return Reading(math.inf if p > 0 else 0.0, 0.0)
    error = math.sqrt((1 - p) / (p * event.size) + (1 - q) / (q * opposite.size))
    return Reading(math.log(p / q), error)


def advantage(event: Bool[np.ndarray, " t"], opposite: Bool[np.ndarray, " t"]) -> Reading:
    """P(event) - Q(event) (claim: delta(0) of the release)."""
    p, q = float(np.mean(event)), float(np.mean(opposite))
    return Reading(p - q, math.sqrt(p * (1 - p) / event.size + q * (1 - q) / opposite.size))


def on_side(messages: Float[np.ndarray, "*t d"], direction: Float[np.ndarray, " d"]) -> Bool[np.ndarray, "*t"]:
    """Sign attack: does a message point to the side of `direction`?"""
    return messages @ direction > 0


def many_on_side(released: Float[np.ndarray, "t n d"], direction: Float[np.ndarray, " d"]) -> Bool[np.ndarray, " t"]:
    """Count attack on a shuffled batch: are more than half of its messages on that side?"""
    return on_side(released, direction).sum(axis=1) * 2 > released.shape[1]


def first_on_side(released: Float[np.ndarray, "t n d"], direction: Float[np.ndarray, " d"]) -> Bool[np.ndarray, " t"]:
    """Position attack: the first message is a known sender's if nobody shuffles; its side?"""
    return on_side(released[:, 0], direction)
