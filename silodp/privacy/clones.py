"""What shuffled eps0-LDP messages reveal: dominating pairs, sampling, and the kind `Messages` (multiplier 1/eps0).

One shuffled release of n messages, one of which belongs to the replaced record, is dominated by a
coin hidden among clones: Cl ~ Bin(n-1, clone), A ~ Bin(Cl, 1/2), D ~ Bern(e^eps0/(1+e^eps0)),

    P: (a, b) = (A + D, Cl - A + 1 - D),   Q: (b, a),   loss = log (e^eps0 a + b)/(a + e^eps0 b),

and, with probability 1 - active, nothing at all. The randomizer decides `clone` and `active`:

 - duchi: every message is uniform on the sphere with probability 2/(e^eps0+1); active 1. Against
   this blanket the log-likelihood terms of any two inputs are a mean-preserving contraction of
   those of two antipodal ones, so antipodal inputs are the worst.
 - privunit: with share s of the space raised the blanket is w = 1/(1+(e^eps0-1)s); the same
   contraction makes disjoint half-spaces the worst. Whoever is told whether the record's message
   fell into one of the two sees clone = 2 s w and active = (e^eps0+1) s w. (Duchi is s = 1/2.)
 - clones: any eps0-LDP randomizer, clone = e^-eps0 (Feldman, McMillan, Talwar 2021).

n = 1 leaves randomized response: the level without a shuffler. Fixed-size sampling at rate q turns
a pair (P, Q) into (1-q) Q + q P against Q where the loss is positive, mirrored (Zhu, Dong, Wang
2022, Theorem 11); messages computed on the same batch are composed before they are sampled. Every
approximation (tails, clones dropped, loss grid) is on the pessimistic side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from silodp.later import Later
from silodp.privacy import halfspace
from silodp.privacy.kinds import Sampling

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

laws = Later("dp_accounting.pld.pld_pmf")
losses = Later("dp_accounting.pld.privacy_loss_distribution")
special = Later("scipy.special")
stats = Later("scipy.stats")

RandomizerName = Literal["duchi", "privunit", "clones"]

_TAIL = 9.0  # deviations kept; the mass beyond counts as a total loss of privacy
_CLONE_LEVELS = 128
_CELLS = 24  # grid cells per root mean square loss of one release
LARGEST_EPS0 = 20.0  # beyond, a message counts as the record itself


class Losses(NamedTuple):
    """A privacy loss law: probabilities `mass` at `loss`, and `infinite` where Q has none."""

    loss: np.ndarray
    mass: np.ndarray
    infinite: float

    @property
    def scale(self) -> float:
        """Root mean square loss."""
        return math.sqrt(float(np.sum(self.mass * self.loss**2)))

    def on_grid(self, interval: float) -> tuple[int, np.ndarray]:
        """First grid index, and masses: the two ends of a cell share what lies in it.

        The shares keep the mass under P and under Q (connect the dots), so the new law dominates.
        """
        cell = np.floor(self.loss / interval).astype(np.int64)
        upper = self.mass * np.expm1(cell * interval - self.loss) / math.expm1(-interval)
        first = int(cell.min())
        grid = np.bincount(cell - first, self.mass - upper, int(np.ptp(cell)) + 2)
        grid[1:] += np.bincount(cell - first, upper, int(np.ptp(cell)) + 1)
        return first, grid

    def repeated(self, times: int) -> "Losses":
        """The law of `times` independent releases, on a grid of its own."""
        if times == 1:
            return self
        interval = self.scale / _CELLS
        first, grid = self.on_grid(interval)
        total = grid
        for _ in range(times - 1):
            total = np.convolve(total, grid)
        loss = (first * times + np.arange(total.size)) * interval
        return Losses(loss, total, -math.expm1(times * math.log1p(-self.infinite)))

    def sampled(self, rate: float) -> "Losses":
        """The release with the record in a fixed-size batch with probability `rate`.

        Needs a symmetric law. The positive losses of the mixture are mirrored, the rest is at 0.
        """
        if rate == 1:
            return self
        loss, mass = self.loss[self.loss > 0], self.mass[self.loss > 0]
        mixture = mass * (rate + (1 - rate) * np.exp(-loss))
        loss = np.log1p(rate * np.expm1(loss))
        mirrored = mixture * np.exp(-loss)
        infinite = rate * self.infinite
        rest = max(0.0, 1.0 - float(mixture.sum() + mirrored.sum()) - infinite)
        return Losses(
            np.concatenate([-loss, [0.0], loss]),
            np.concatenate([mirrored, [rest], mixture]),
            infinite,
        )

    def pld(self, interval: float) -> PrivacyLossDistribution:
        first, grid = self.on_grid(interval)
        return losses.PrivacyLossDistribution(laws.DensePLDPmf(interval, first, grid, self.infinite, True))


@dataclass(frozen=True)
class Shuffled:
    """One round: `messages` in each shuffle, `own` of them from the record's silo.

    `together` messages of a record are computed on the same batch, drawn at `rate` from its silo.
    """

    messages: int
    own: int
    randomizer: RandomizerName = "duchi"
    dimension: int | None = None
    rate: float = 1.0
    together: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.own <= self.messages:
            raise ValueError(f"own must be between 1 and messages={self.messages}, not {self.own}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], not {self.rate}")
        if self.together < 1:
            raise ValueError(f"together must be at least 1, not {self.together}")
        if self.randomizer == "privunit" and self.dimension is None:
            raise ValueError("dimension must be given for randomizer 'privunit', not None")

    def losses(self, eps0: float) -> Losses:
        """The law of the privacy loss of one round."""
        clone, active = self._hiding(eps0)
        pair = shuffled_pair(self.messages, eps0, clone, active)
        return pair.repeated(self.together).sampled(self.rate)

    def pld(self, eps0: float, count: int, interval: float | None = None) -> PrivacyLossDistribution:
        """`count` rounds composed; PLDs that are to be composed further need a common interval."""
        losses = self.losses(eps0)
        return losses.pld(interval or losses.scale / _CELLS).self_compose(count)

    def without_other_silos(self) -> "Shuffled":
        """The others tell the server which messages are theirs: only the own ones hide."""
        return replace(self, messages=self.own)

    def without_shuffler(self) -> "Shuffled":
        """Every message can be traced to its record, also whether the record was sampled."""
        return replace(self, messages=1, own=1, rate=1.0, randomizer="duchi")

    def _hiding(self, eps0: float) -> tuple[float, float]:
        if self.randomizer == "clones":
            return math.exp(-eps0), 1.0
        if self.randomizer == "duchi":
            return 2 / (math.exp(eps0) + 1), 1.0
        assert self.dimension is not None
        share = halfspace.raised_share(halfspace.best_threshold(eps0, self.dimension))
        raised = share * halfspace.blanket(eps0, share)
        return 2 * raised, min(1.0, (math.exp(eps0) + 1) * raised)


def shuffled_pair(messages: int, eps0: float, clone: float, active: float) -> Losses:
    """Loss law of one shuffle; numbers of clones are rounded down to a few (fewer hide less)."""
    levels, weights, lost = _clone_levels(messages - 1, clone)
    total = (levels + 1)[:, None]  # the record's message and its clones
    reach = _TAIL * math.sqrt(float(levels[-1]) + 1) / 2 + 2
    a = np.floor(total / 2) + np.arange(-math.ceil(reach), math.ceil(reach) + 1)
    b = total - a
    valid = (a >= 0) & (b >= 0)
    a, b = np.where(valid, a, 0.0), np.where(valid, b, 0.0)
    gammaln = special.gammaln
    log_coins = gammaln(total + 1) - gammaln(a + 1) - gammaln(b + 1) - total * math.log(2)
    truth = 1 / (1 + math.exp(-eps0))
    log_coins = np.where(valid, log_coins, -np.inf)
    law = np.exp(log_coins) * 2 * (truth * a + (1 - truth) * b) / total
    mass = active * weights[:, None] * law
    gain = math.expm1(eps0) * (a - b)
    loss = np.log1p(gain / (a + math.exp(eps0) * b + (~valid)))
    keep = mass > 0
    mass, loss = np.append(mass[keep], 1 - active), np.append(loss[keep], 0.0)
    return Losses(loss, mass, max(lost, 1.0 - float(mass.sum()), 0.0))


def _clone_levels(others: int, clone: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Numbers of clones, their probabilities, and the probability of fewer than all of these."""
    mean, deviation = others * clone, math.sqrt(others * clone * (1 - clone))
    low = max(0, math.floor(mean - _TAIL * deviation - 9))
    high = min(others, math.ceil(mean + _TAIL * deviation + 9))
    levels = np.unique(np.linspace(low, high, _CLONE_LEVELS).astype(np.int64))
    below = stats.binom.cdf(levels - 1, others, clone)
    weights = np.append(np.diff(below), stats.binom.sf(levels[-1] - 1, others, clone))
    return levels.astype(np.float64), weights, float(below[0])


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
    def words(self) -> str:
        return f"{self.round.messages} shuffled messages, {self.round.own} of this silo, {self.round.randomizer}"

    def level(self, multiplier: float) -> dict[str, float]:
        return {"eps0": 1 / multiplier}

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
            return losses.PrivacyLossDistribution(laws.DensePLDPmf(interval, 0, np.array([1e-9]), 1 - 1e-9, True))
        first = [] if self.first is None else [(self.first, 1)]
        # A record of a one-pass run is in one later round at most, whether or not it was in the first one.
        later = count - len(first)
        rounds, rest = divmod(min(later, self.round.together) if self.once else later, self.round.together)
        parts = [(self.round, rounds), (self._single(), rest), *first]
        composed = [_losses(part, eps0).pld(interval).self_compose(n) for part, n in parts if n]
        return reduce(lambda one, other: one.compose(other), composed)

    def changed(self, change: Callable[[Shuffled], Shuffled]) -> "Messages":
        """The same messages hidden by less: `Shuffled.without_other_silos`, `Shuffled.without_shuffler`."""
        first = None if self.first is None else change(self.first)
        return replace(self, round=change(self.round), first=first)

    def _single(self) -> Shuffled:
        return replace(self.round, together=1)


def _eps0(multiplier: float) -> float:
    return min(1 / multiplier, LARGEST_EPS0)


@lru_cache(maxsize=64)
def _losses(part: Shuffled, eps0: float) -> Losses:
    return part.losses(eps0)
