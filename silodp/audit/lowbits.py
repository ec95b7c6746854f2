"""Which float32 numbers can a naive noise reach?

A program that adds noise as y = fl32(v + fl32(s z)) for a float32 z reaches only some y from a given v. Of two known
data sets the one from which an answer cannot be reached is excluded with certainty, whatever epsilon was promised.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float32

NEAR = 3  # float32 numbers to either side that are tried


def reached(answer: Float[np.ndarray, " d"], value: Float32[np.ndarray, " d"], std: np.float32) -> int:
    """How many coordinates of the answer naive noise makes of the value; a program adds all of them in one way."""
    return max(int(reachable(answer, value, std, fused).sum()) for fused in (True, False))


def reachable(
    answer: Float[np.ndarray, " d"], value: Float32[np.ndarray, " d"], std: np.float32, fused: bool
) -> Bool[np.ndarray, " d"]:
    """Coordinates of the answer that some float32 z turns the value into, by an addition that is rounded twice, as
    float32 does, or once, together with the product."""
    wanted = answer.astype(np.float32)
    added = lambda z: value.astype(np.float64) + np.float64(std) * z if fused else value + std * z
    near = neighbours(((answer - value) / float(std)).astype(np.float32))
    return np.any([added(z).astype(np.float32) == wanted for z in near], axis=0)


def neighbours(z: Float32[np.ndarray, " d"]) -> list[Float32[np.ndarray, " d"]]:
    """The float32 numbers nearest to z, itself among them."""
    up, down, found = z, z, [z]
    for _ in range(NEAR):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
        found += [up, down]
    return found
