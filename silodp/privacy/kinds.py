"""What was released: how often, with how much noise, and how a release uses a record.

Neighbours are two inputs in which ONE RECORD OF ONE SILO IS REPLACED. A release moves by at most
its `bound` (l2) when a record is replaced (2C/b for a clipped mean over b); its noise has std
`multiplier * bound`. (dp-accounting's PLDs for REPLACE_ONE take twice this multiplier, its RDP
accountant takes it as it is.)

A sampling kind knows what its releases cost and nothing else; the accountant composes. A new kind
subclasses `Sampling` and defines `pld` with `loss_scale` (and `has_pld`) or `rdp`, or both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Float

from silodp.privacy.mixture import MixturePair, mirrored, without_replacement

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


OVERFLOW = 1e-18  # chance, in a round, that a Poisson batch's other records fill all its slots


class Sampling:
    """How a stream of releases uses a record. Costs default to `not known in this form`."""

    has_pld: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False

    @property
    def words(self) -> str:
        """How a release uses a record, for a certificate."""
        return repr(self)

    def level(self, multiplier: float) -> dict[str, float]:
        """What the multiplier means where it is no noise over sensitivity."""
        return {}

    @property
    def exposure(self) -> float:
        """Largest probability that one release would reveal the record if it had no noise."""
        return 1.0

    @property
    def rate(self) -> float:
        """Fraction of the bound that a release shows on average; only splits budgets."""
        return 1.0

    @property
    def overflow(self) -> float:
        """Chance that one release has no room for the record, for which its cost does not hold."""
        return 0.0

    def gdp(self, multiplier: float, count: int) -> float | None:
        """mu of `count` releases when they are exactly Gaussian."""
        return None

    def loss_scale(self, multiplier: float) -> float:
        """Root mean square loss of one release; sets the grid."""
        raise NotImplementedError(f"{type(self).__name__} has no privacy loss distribution")

    def pld(self, multiplier: float, count: int, interval: float) -> PrivacyLossDistribution:
        """Composed pessimistic privacy loss distribution on multiples of `interval`."""
        raise NotImplementedError(f"{type(self).__name__} has no privacy loss distribution")

    def rdp(self, multiplier: float, count: int, orders: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"] | None:
        """Renyi DP of all releases at each order > 1 (inf where unknown)."""
        return None


class _Gaussian(Sampling):
    """Plain Gaussian releases."""

    has_pld = True

    def gdp(self, multiplier: float, count: int) -> float:
        uses = min(count, 1) if self.one_pass else count
        return math.sqrt(uses) / multiplier if multiplier else math.inf

    def loss_scale(self, multiplier: float) -> float:
        return _gaussian_pair(1 / multiplier).loss_scale

    def pld(self, multiplier: float, count: int, interval: float) -> PrivacyLossDistribution:
        return _gaussian_pair(self.gdp(multiplier, count)).pld(interval)

    def rdp(self, multiplier: float, count: int, orders: np.ndarray) -> np.ndarray:
        return orders * self.gdp(multiplier, count) ** 2 / 2


@dataclass(frozen=True)
class Full(_Gaussian):
    """Every release uses every record."""

    @property
    def words(self) -> str:
        return "all records"


@dataclass(frozen=True)
class Disjoint(_Gaussian):
    """One pass: `count` rounds on disjoint chunks. A record enters one release: all cost one."""

    one_pass = True

    @property
    def words(self) -> str:
        return "one pass: each record in one of them"


class _Mixture(Sampling):
    """A sampled release with a one-dimensional worst pair."""

    has_pld = True

    def pair(self, multiplier: float) -> MixturePair:
        raise NotImplementedError

    def loss_scale(self, multiplier: float) -> float:
        return self.pair(multiplier).loss_scale

    def pld(self, multiplier: float, count: int, interval: float) -> PrivacyLossDistribution:
        one = self.pair(multiplier).pld(interval)
        return one if count == 1 else one.self_compose(count)

    def rdp(self, multiplier: float, count: int, orders: np.ndarray) -> np.ndarray:
        return count * _pair_rdp(self.pair(multiplier), tuple(orders))


@dataclass(frozen=True)
class Poisson(_Mixture):
    """Each record joins a release independently with probability `sampling_rate`."""

    sampling_rate: float

    def __post_init__(self) -> None:
        _check_rate("sampling_rate", self.sampling_rate)

    @property
    def words(self) -> str:
        return f"Poisson batches, rate {self.sampling_rate:.4g}"

    @property
    def exposure(self) -> float:
        return self.sampling_rate

    @property
    def rate(self) -> float:
        return self.sampling_rate

    @property
    def overflow(self) -> float:
        return OVERFLOW if self.sampling_rate < 1 else 0.0

    def gdp(self, multiplier: float, count: int) -> float | None:
        return Full().gdp(multiplier, count) if self.sampling_rate == 1 else None

    def pair(self, multiplier: float) -> MixturePair:
        q = self.sampling_rate
        return mirrored((1 - q, q), (0.0, 1 / (2 * multiplier)))


@dataclass(frozen=True)
class FixedSize(_Mixture):
    """Each release uses `batch` of `records` records, drawn without replacement."""

    batch: int
    records: int

    def __post_init__(self) -> None:
        _check_batch(self.batch, self.records)

    @property
    def words(self) -> str:
        return f"batches of {self.batch} of {self.records} records without replacement"

    @property
    def exposure(self) -> float:
        return self.batch / self.records

    @property
    def rate(self) -> float:
        return self.batch / self.records

    def gdp(self, multiplier: float, count: int) -> float | None:
        return Full().gdp(multiplier, count) if self.batch == self.records else None

    def pair(self, multiplier: float) -> MixturePair:
        if self.batch == self.records:
            return _gaussian_pair(1 / multiplier)
        return without_replacement(self.rate, 1 / multiplier)


@dataclass(frozen=True)
class TwoLevel(_Mixture):
    """SVRG and SAGA: a Poisson batch of differences plus a full mean, released together.

    A record that is not drawn shifts the mean by at most U, a drawn one by at most V; the bound is
    2V and `ratio` = U/V (silodp.sampling.TwoLevel knows both). Not a subsampled Gaussian: U > 0.
    """

    batch: int
    records: int
    ratio: float

    def __post_init__(self) -> None:
        _check_batch(self.batch, self.records)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio = {self.ratio}: U/V must be in (0, 1]")

    @property
    def words(self) -> str:
        return f"Poisson batches of {self.batch} of {self.records} records beside a mean over all"

    @property
    def rate(self) -> float:
        q = self.batch / self.records
        return (1 - q) * self.ratio + q

    @property
    def overflow(self) -> float:
        return OVERFLOW if self.batch < self.records else 0.0

    def gdp(self, multiplier: float, count: int) -> float | None:
        constant = self.batch == self.records or self.ratio == 1
        return Full().gdp(multiplier, count) if constant else None

    def pair(self, multiplier: float) -> MixturePair:
        q = self.batch / self.records
        return mirrored((1 - q, q), (self.ratio / (2 * multiplier), 1 / (2 * multiplier)))


@dataclass(frozen=True)
class Masked(Sampling):
    """Full-batch Gaussian release of `keep` of `parameters` coordinates, the mask drawn by the silo
    independently of its data, after it received the point. The mask is public.

    Given the mask the release is Gaussian with shift |Delta_mask|. E exp(c |Delta_mask|^2) is
    convex in the squared coordinates of Delta, hence largest when Delta sits on one of them. This holds
    for Renyi divergences, NOT for the hockey-stick divergence (at eps = 0 a spread Delta is worse),
    so there is no privacy loss distribution here.
    """

    keep: int
    parameters: int

    def __post_init__(self) -> None:
        _check_batch(self.keep, self.parameters, ("keep", "parameters"))

    @property
    def words(self) -> str:
        return f"all records, {self.keep} of {self.parameters} coordinates under a mask drawn by the silo"

    @property
    def rate(self) -> float:
        return math.sqrt(self.keep / self.parameters)

    def gdp(self, multiplier: float, count: int) -> float | None:
        return Full().gdp(multiplier, count) if self.keep == self.parameters else None

    def rdp(self, multiplier: float, count: int, orders: np.ndarray) -> np.ndarray:
        kept = self.keep / self.parameters
        exponent = orders * (orders - 1) / (2 * multiplier**2)
        # log(1 - kept + kept e^exponent): small exponents keep their digits, large do not overflow
        small = np.log1p(kept * np.expm1(np.minimum(exponent, 30.0)))
        large = math.log(kept) + exponent + np.log1p((1 - kept) / kept * np.exp(-exponent))
        return count * np.where(exponent < 30.0, small, large) / (orders - 1)


@dataclass(frozen=True)
class Releases:
    """`count` releases of one stream, for one record's silo.

    loss, lost: a release is not quite the one that `sampling` costs: from any point, a set has at most e^loss times the
    probability that it has there, plus `lost`, and the other way round (silodp.privacy.sums).
    coins: coordinates whose noise is coins, which are told apart by more than their Gaussian far out (privacy.coins).
    """

    stream: str
    count: int
    sampling: Sampling
    loss: float = 0.0
    lost: float = 0.0
    coins: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "coins"):
            if isinstance(told := getattr(self, name), bool) or not 0 <= told < math.inf:
                raise ValueError(f"{name} = {told}: how many there are cannot be negative")
        for name in ("loss", "lost"):
            if not 0 <= (told := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} = {told}: must be a finite number >= 0")

    @property
    def uses(self) -> int:
        """In how many of the releases one record takes part, at most."""
        return min(self.count, 1) if self.sampling.one_pass else self.count


@dataclass(frozen=True)
class Spent:
    """Releases with the noise multiplier they had (0: no noise; inf: nothing was revealed)."""

    releases: Releases
    multiplier: float

    def __post_init__(self) -> None:
        if not self.multiplier >= 0:
            raise ValueError(f"multiplier = {self.multiplier}: must be a number >= 0")


@lru_cache(maxsize=256)
def _gaussian_pair(mu: float) -> MixturePair:
    return mirrored((1.0,), (mu / 2,))


@lru_cache(maxsize=256)
def _pair_rdp(pair: MixturePair, orders: tuple[float, ...]) -> np.ndarray:
    return pair.rdp(np.array(orders))


def _check_rate(field: str, rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"{field} = {rate}: a sampling rate must be in (0, 1]")


def _check_batch(part: int, whole: int, names: tuple[str, str] = ("batch", "records")) -> None:
    if not 1 <= part <= whole:
        raise ValueError(f"{names[0]} = {part}: must be between 1 and {names[1]} = {whole}")
