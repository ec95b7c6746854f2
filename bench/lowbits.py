"""`python -m bench.lowbits`: which of two neighbouring data sets does a real answer come from, judged by its low bits?

400 answers of silos without a seed, 100 and 1,000 coordinates, three epsilons (of all rounds together); then the same
attack on float32 noise, which it must see through: otherwise it says nothing about ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from silodp.audit.real import LOW_ROUNDS, low_bits
from silodp.randomness import SystemRandomness

EPSILONS, PARAMETERS = (0.1, 1.0, 8.0), (100, 1000)


@contextmanager
def naive_noise() -> Iterator[None]:
    """value + std z in float32, sent as floats on no grid: what many programs do."""
    exact = SystemRandomness.noised, SystemRandomness.step_of
    naive: Any = lambda self, purpose, value, std, step=0: (
        value.high + std * self.normal(purpose, value.high.shape, step)
    )
    SystemRandomness.noised, SystemRandomness.step_of = naive, lambda *_: jnp.float32(0)  # type: ignore[method-assign]
    try:
        yield
    finally:
        SystemRandomness.noised, SystemRandomness.step_of = exact  # type: ignore[method-assign]


def told(noise: str, parameters: int, epsilon: float) -> None:
    _, scores = low_bits(LOW_ROUNDS, epsilon, parameters)
    right = np.where(scores == 0, 0.5, scores > 0)
    error = math.sqrt(np.square(right - 0.5).mean() / scores.size)  # of somebody who guesses
    away = (right.mean() - 0.5) / error
    print(
        f"{noise:7} {parameters:6,} {epsilon:8g} {scores.size:8} {right.mean():8.3f} {error:8.3f} {away:10.1f}",
        flush=True,
    )


def main() -> None:
    print("noise     d      epsilon  answers    right       se  se from 1/2")
    for parameters in PARAMETERS:
        for epsilon in EPSILONS:
            told("exact", parameters, epsilon)
    with naive_noise():
        for parameters in PARAMETERS:
            for epsilon in EPSILONS:
                told("naive", parameters, epsilon)


if __name__ == "__main__":
    main()
