"""Words that can be repeated: whoever knows them can subtract the noise, so they exist for tests alone."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import numpy as np

from silodp.noise import Entropy


class RepeatableEntropy(Entropy):
    """The words of a seed."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.keys = seed, 0

    def _fresh_key(self) -> bytes:
        self.keys += 1
        return sha256(f"{self.seed}/{self.keys}".encode()).digest()


class GivenWords(Entropy):
    """The words of a list, each once."""

    def __init__(self, words):
        super().__init__()
        self.left = np.asarray(words, np.int64)

    def words(self, count: int) -> np.ndarray:
        assert count <= len(self.left), "the given words are used up"
        first, self.left = self.left[:count], self.left[count:]
        return first


def once_in_two(passes: Callable[[], bool]) -> bool:
    """For a test on the system's entropy that fails by chance: only failing twice is a failure, and the chance of that
    is the square."""
    return passes() or passes()
