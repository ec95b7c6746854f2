"""What shuffled eps0-LDP messages reveal: dominating pairs, sampling, composition, calibration.

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

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import binom

from silodp.shuffle import halfspace

RandomizerName = Literal["duchi", "privunit", "clones"]
Extra = Callable[[float], PrivacyLossDistribution]  # from a grid interval, for other releases

_TAIL = 9.0  # deviations kept; the mass beyond counts as a total loss of privacy
_CLONE_LEVELS = 128
_CELLS = 24  # grid cells per root mean square loss of one release
_LARGEST_EPS0 = 20.0


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
        return PrivacyLossDistribution(DensePLDPmf(interval, first, grid, self.infinite, True))


@dataclasses.dataclass(frozen=True)
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
        return dataclasses.replace(self, messages=self.own)

    def without_shuffler(self) -> "Shuffled":
        """Every message can be traced to its record, also whether the record was sampled."""
        return dataclasses.replace(self, messages=1, own=1, rate=1.0, randomizer="duchi")

    def _hiding(self, eps0: float) -> tuple[float, float]:
        if self.randomizer == "clones":
            return math.exp(-eps0), 1.0
        if self.randomizer == "duchi":
            return 2 / (math.exp(eps0) + 1), 1.0
        assert self.dimension is not None
        share = halfspace.raised_share(halfspace.best_threshold(eps0, self.dimension))
        raised = share * halfspace.blanket(eps0, share)
        return 2 * raised, min(1.0, (math.exp(eps0) + 1) * raised)


Part = tuple[Shuffled, int]  # what happens in a round, and in how many rounds


def shuffled_pair(messages: int, eps0: float, clone: float, active: float) -> Losses:
    """Loss law of one shuffle; numbers of clones are rounded down to a few (fewer hide less)."""
    levels, weights, lost = _clone_levels(messages - 1, clone)
    total = (levels + 1)[:, None]  # the record's message and its clones
    reach = _TAIL * math.sqrt(float(levels[-1]) + 1) / 2 + 2
    a = np.floor(total / 2) + np.arange(-math.ceil(reach), math.ceil(reach) + 1)
    b = total - a
    valid = (a >= 0) & (b >= 0)
    a, b = np.where(valid, a, 0.0), np.where(valid, b, 0.0)
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


def epsilon(parts: Sequence[Part], eps0: float, delta: float, extra: Extra | None = None) -> float:
    """Central epsilon of all rounds; `extra` adds the other releases about the same record."""
    laws = [(part.losses(eps0), count) for part, count in parts]
    interval = min(law.scale for law, _ in laws) / _CELLS
    composed = [law.pld(interval).self_compose(count) for law, count in laws]
    if extra is not None:
        composed.append(extra(interval))
    total = composed[0]
    for other in composed[1:]:
        total = total.compose(other)
    return float(total.get_epsilon_for_delta(delta))


def calibrate_eps0(target: float, delta: float, parts: Sequence[Part], extra: Extra | None = None) -> float:
    """The largest eps0 (to 0.01%) with which all rounds together are (target, delta)-DP."""
    excess = lambda log_eps0: epsilon(parts, math.exp(log_eps0), delta, extra) - target
    low, high = math.log(target / sum(count for _, count in parts)) - 1, math.log(_LARGEST_EPS0)
    if excess(high) <= 0:
        return _LARGEST_EPS0
    if excess(low) > 0:
        raise ValueError(f"epsilon={target} is out of reach at delta={delta}: the other releases spend it")
    root = float(brentq(excess, low, high, xtol=3e-5))  # type: ignore[arg-type]
    while excess(root) > 0:
        root -= 5e-5
    return math.exp(root)


class Levels(NamedTuple):
    """Central epsilon under growing collusion."""

    shuffled: float
    other_silos_collude: float
    shuffler_colludes: float


def collusion_levels(parts: Sequence[Part], eps0: float, delta: float) -> Levels:
    """What the same messages guarantee if the other silos, or the shuffler, work for the server."""
    own = [(part.without_other_silos(), count) for part, count in parts]
    releases = sum(part.together * count for part, count in parts)
    return Levels(epsilon(parts, eps0, delta), epsilon(own, eps0, delta), local_epsilon(eps0, releases, delta))


def local_epsilon(eps0: float, releases: int, delta: float) -> float:
    """Optimal composition of eps0-LDP messages of one record (Kairouz, Oh, Viswanath 2015)."""
    truths = np.arange(releases + 1)
    loss = (2 * truths - releases) * eps0
    mass = binom.pmf(truths, releases, 1 / (1 + math.exp(-eps0)))

    def excess(candidate: float) -> float:
        return float(np.sum(mass * -np.expm1(np.minimum(candidate - loss, 0)))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, releases * eps0))  # type: ignore[arg-type]


class PaperAnswer(NamedTuple):
    """The eps0 that the paper's Theorem 4.1 allows, or None and the conditions that forbid one."""

    eps0: float | None
    reasons: tuple[str, ...]


def paper_eps0(
    target: float, delta: float, silos: int, records: int, rounds: int, first_batch: int, batch: int
) -> PaperAnswer:
    """eps0 from the printed conditions of Lemma A.9 and the budget of Theorem 4.1 (constant 1536).

    All of them bound e^eps0 from above, but Lemma A.8 is stated for eps0 >= 1 only.
    """
    constant, order = 1536, 1 + 2 * math.log(1 / delta) / target
    limits, reasons = [], []
    for size in sorted({first_batch, batch}):
        rate, sent = size / records, silos * size
        hidden = math.log(1 / rate)
        if rate > 0.1:
            reasons.append(f"Lemma A.9 (i): sampling rate {rate:g} is above 0.1")
        limits += [
            ("Lemma A.9 (i), 1536 e^eps0 / (M B) <= 0.1", 0.1 * sent / constant),
            ("Lemma A.9 (iii), 6 * 1536 e^eps0 <= M B ln(1/rate)", sent * hidden / (6 * constant)),
            ("Lemma A.9 (ii), 1536 >= 16 eps0 ln(1/rate)", math.exp(min(96 / max(hidden, 1), 96))),
            (
                f"Lemma A.9, order {order:.1f} <= M B ln(1/rate) / (4 * 1536 e^eps0)",
                sent * hidden / (4 * constant * order),
            ),
        ]
    sampled = first_batch + rounds * batch  # n (gamma_0 + R gamma_1)
    spent = 52 * constant * sampled * order / (silos * records**2)
    limits.append((f"budget: {spent:.3g} e^eps0 <= epsilon/4", target / 4 / spent))
    for condition, largest in limits:
        if largest < math.e:
            allowed = f"eps0 <= {math.log(largest):.2f}" if largest > 0 else "no eps0"
            reasons.append(f"{condition}: allows {allowed}, but Lemma A.8 needs eps0 >= 1")
    eps0 = math.log(max(min(largest for _, largest in limits), 1e-300))
    return PaperAnswer(None if reasons else eps0, tuple(reasons))


def _clone_levels(others: int, clone: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Numbers of clones, their probabilities, and the probability of fewer than all of these."""
    mean, deviation = others * clone, math.sqrt(others * clone * (1 - clone))
    low = max(0, math.floor(mean - _TAIL * deviation - 9))
    high = min(others, math.ceil(mean + _TAIL * deviation + 9))
    levels = np.unique(np.linspace(low, high, _CLONE_LEVELS).astype(np.int64))
    below = binom.cdf(levels - 1, others, clone)
    weights = np.append(np.diff(below), binom.sf(levels[-1] - 1, others, clone))
    return levels.astype(np.float64), weights, float(below[0])
