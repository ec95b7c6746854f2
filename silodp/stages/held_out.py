"""Which records of a silo are held out: drawn by a public seed from its size alone, the same for every party.

A record is either trained on or held out, never both. What is released about the ones therefore costs the others
nothing, and each has the whole budget of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int

from silodp.errors import ConfigError

Rows = Int[np.ndarray, " _"]
FEWEST = 2  # records on either side


def held_out_size(size: int, share: float) -> int:
    held = max(FEWEST, round(share * size))
    if size - held < FEWEST:
        raise ConfigError(f"evaluate.held_out = {share:g}: too much of a silo of {size} records; give less")
    return held


def divided(size: int, held: int, seed: int, silo: int) -> tuple[Rows, Rows]:
    """Rows to train on and rows held out, both in order."""
    chosen = np.random.default_rng([seed, silo, size]).permutation(size)[:held]
    mark = np.zeros(size, bool)
    mark[chosen] = True
    return np.flatnonzero(~mark), np.flatnonzero(mark)


def taken(rows: Rows, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array)[rows] for name, array in arrays.items()}
