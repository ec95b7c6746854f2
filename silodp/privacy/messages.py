"""Shuffled eps0-LDP messages as the accountant sees them. Their multiplier is 1/eps0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import ClassVar

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from silodp.privacy.events import Sampling
from silodp.privacy.shuffled import Losses, Shuffled

LARGEST_EPS0 = 20.0  # beyond, a message counts as the record itself


@dataclass(frozen=True)
class Messages(Sampling):
    """A record's messages over all rounds, `round` saying what hides them in one round.

    `round.together` messages of a record are computed on the same batch: they are composed first and then sampled. In
    a one-pass run a record sends in one round only. `first` hides the one message of a first round of its own.
    """

    round: Shuffled
    once: bool = False
    first: Shuffled | None = None

    has_pld: ClassVar[bool] = True

    @property
    def exposure(self) -> float:
        return self.round.rate

    @property
    def rate(self) -> float:
        """A shuffled message behaves like a Gaussian release of multiplier sqrt(messages)/eps0; only splits budgets."""
        return self.round.rate / math.sqrt(self.round.messages)

    def loss_scale(self, multiplier: float) -> float:
        parts = [self._single()] if self.first is None else [self._single(), self.first]
        return min(_losses(part, _eps0(multiplier)).scale for part in parts)

    def pld(self, multiplier: float, count: int, interval: float) -> PrivacyLossDistribution:
        eps0 = _eps0(multiplier)
        if 1 / multiplier > LARGEST_EPS0:
            # Nothing is promised; a law without any finite part could not be composed.
            return PrivacyLossDistribution(DensePLDPmf(interval, 0, np.array([1e-9]), 1 - 1e-9, True))
        first = [] if self.first is None else [(self.first, 1)]
        # A record of a one-pass run is in one later round at most, whether or not it was in the first one.
        later = count - len(first)
        rounds, rest = divmod(min(later, self.round.together) if self.once else later, self.round.together)
        parts = [(self.round, rounds), (self._single(), rest), *first]
        composed = [_losses(part, eps0).pld(interval).self_compose(n) for part, n in parts if n]
        return reduce(lambda one, other: one.compose(other), composed)

    def without_other_silos(self) -> Messages:
        return self._changed(Shuffled.without_other_silos)

    def without_shuffler(self) -> Messages:
        return self._changed(Shuffled.without_shuffler)

    def _changed(self, change: Callable[[Shuffled], Shuffled]) -> Messages:
        first = None if self.first is None else change(self.first)
        return replace(self, round=change(self.round), first=first)

    def _single(self) -> Shuffled:
        return replace(self.round, together=1)


def _eps0(multiplier: float) -> float:
    return min(1 / multiplier, LARGEST_EPS0)


@lru_cache(maxsize=64)
def _losses(part: Shuffled, eps0: float) -> Losses:
    return part.losses(eps0)
