"""The plan of a run: what will be released about each silo, and how much noise it carries.

A plan is made before anything is computed on records; every silo holds it. Under `untrusted` silo i adds noise of std
multiplier_i * bound_i itself. Under `trusted` the server adds it once to the weighted average, scaled to the record
that moves the average most; a silo whose records move it less is protected by more (`protecting`). Under `shuffled`
all randomised messages of a record form one stream, `message`, with multiplier 1/eps0; P_vec's sums are accounted as
the Gaussian releases they are no worse than.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from silodp.core import FIRST, Algorithm, Stream
from silodp.privacy import accountant
from silodp.privacy.binomial import sensitivity
from silodp.privacy.events import Disjoint, Full, Masked, Releases, Sampling, Spent
from silodp.privacy.messages import Messages
from silodp.privacy.shuffled import Shuffled
from silodp.sampling import BatchRule
from silodp.shuffle.randomizers import Duchi, PrivUnitG

VALUE_SHARE = 0.8  # of mu^2, when there are other streams: the exact counterpart of DIFF2's u = 1.25
MESSAGE = "message"  # all that a record sends through a shuffler
LOCAL = "local"  # the stream whose noise a silo adds itself under every trust model


@dataclass(frozen=True)
class Target:
    """What is asked for: (epsilon, delta), or mu, or given multipliers."""

    delta: float
    epsilon: float | None = None
    gdp: float | None = None
    multipliers: Mapping[str, float] | None = None
    split: float | str | None = None


@dataclass(frozen=True)
class Shuffle:
    """How a record's vector is hidden before the shuffler: duchi, privunit, or pvec with `levels` grid steps."""

    randomizer: str
    parameters: int
    levels: int


@dataclass(frozen=True)
class Federates:
    """The public facts a plan rests on: sizes and weights of the silos, who is trusted, who comes when."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    trust: str
    rounds: int
    participation: int | None = None
    attendance: tuple[tuple[int, ...], ...] | None = None  # the rounds of each silo, if fixed beforehand
    mask: tuple[int, int] | None = None  # rand-k's (keep, parameters), when accounted as hiding the rest
    shuffle: Shuffle | None = None
    together: int = 1  # streams that are released in the same round

    def rounds_of(self, silo: int) -> Sequence[int]:
        return range(self.rounds) if self.attendance is None else self.attendance[silo]

    @property
    def everyone(self) -> bool:
        return self.participation is None or self.participation == len(self.sizes)


@dataclass(frozen=True)
class Plan:
    """For every silo its streams, the multiplier in the channel, and the one that protects its records."""

    federates: Federates
    target: Target
    streams: tuple[tuple[Stream, ...], ...]
    multipliers: dict[str, tuple[float, ...]]

    def protecting(self, stream: str) -> np.ndarray:
        """The multiplier that a release of this stream has for each silo's own records, at least."""
        nominal = np.asarray(self.multipliers[stream])
        if self.federates.trust != "trusted" or stream == LOCAL or not self.federates.everyone:
            return nominal
        return nominal / moves(self.federates, self.streams, stream)

    def spent(self, silo: int) -> list[Spent]:
        releases = planned(self.streams[silo], silo, self.federates)
        return [Spent(each, float(self.protecting(each.stream)[silo])) for each in releases if each.count]

    def epsilon(self, silo: int, delta: float | None = None) -> float:
        return accountant.epsilon(self.spent(silo), self.target.delta if delta is None else delta)

    def std_over_clip(self, stream: str) -> np.ndarray:
        """Std of the noise on the released mean, in clip norms: per silo, or on the average of all silos."""
        if self.federates.shuffle is not None and stream != LOCAL:
            return np.asarray(self.multipliers[stream]) * 0 + self._shuffled_std(stream)
        bounds = bounds_over_clip(self.federates, self.streams, stream)
        nominal = np.asarray(self.multipliers[stream])
        if self.federates.trust != "trusted" or stream == LOCAL:
            return nominal * bounds
        weights = np.asarray(self.federates.weights)
        if not self.federates.everyone:
            weights = weights / np.sort(weights)[: self.federates.participation].sum()
        return nominal * np.max(weights * bounds)

    def _shuffled_std(self, stream: str) -> float:
        shuffle, multiplier = self.federates.shuffle, self.multipliers[stream][0]
        assert shuffle is not None
        each = divisors(self.streams, self.federates, "value" if stream == MESSAGE else stream)
        sent = sum(sorted(each)[: self.federates.participation])  # at least so many records answer
        if shuffle.randomizer == "pvec":
            return multiplier * sensitivity(shuffle.levels, shuffle.parameters) * 2 / shuffle.levels / sent
        device = (Duchi if shuffle.randomizer == "duchi" else PrivUnitG)(1 / multiplier)
        return math.sqrt(device.variance(shuffle.parameters, 1.0) / shuffle.parameters / sent)


def make_plan(
    algorithm: Algorithm, federates: Federates, target: Target, printed: Sequence[Mapping[str, float]] | None = None
) -> Plan:
    """Calibrate every stream of every silo to the target, together; or take a paper's `printed` multipliers."""
    streams = tuple(
        tuple(algorithm.releases(i, federates.sizes, federates.rounds_of(i))) for i in range(len(federates.sizes))
    )
    shares = stream_shares(algorithm, streams, target, federates)
    targets = [target if printed is None else replace(target, multipliers=own) for own in printed or streams]
    releases = [tuple(planned(own, i, federates)) for i, own in enumerate(streams)]
    alike: dict[tuple[Releases, ...], dict[str, float]] = {}  # silos that release alike are calibrated once
    needed = []
    for own, goal in zip(releases, targets, strict=True):
        if printed is not None or own not in alike:
            alike[own] = silo_multipliers(list(own), goal, shares)
        needed.append(alike[own])
    names = [release.stream for release in planned(streams[0], 0, federates)]
    return Plan(federates, target, streams, {name: shared(name, needed, federates, streams) for name in names})


def silo_multipliers(releases: list[Releases], target: Target, shares: Mapping[str, float] | None) -> dict[str, float]:
    """What one silo's records need. A stream that the plan never uses gets infinite noise: a release that
    should not happen would then show nothing."""
    used = [release for release in releases if release.count]
    unused = {release.stream: math.inf for release in releases if not release.count}
    if target.multipliers is not None:
        return given_multipliers(releases, target.multipliers) | unused
    if target.gdp is not None:
        return accountant.calibrate_gdp(used, target.gdp, shares) | unused
    assert target.epsilon is not None
    return (
        calibrated(tuple(used), target.epsilon, target.delta, None if shares is None else tuple(shares.items()))
        | unused
    )


@lru_cache(maxsize=1024)  # the settings of a sweep often release alike
def calibrated(
    releases: tuple[Releases, ...], epsilon: float, delta: float, shares: tuple[tuple[str, float], ...] | None
) -> dict[str, float]:
    return accountant.calibrate(releases, epsilon, delta, None if shares is None else dict(shares))


def given_multipliers(releases: list[Releases], given: Mapping[str, float]) -> dict[str, float]:
    declared = [release.stream for release in releases]
    streams = [release.stream for release in releases if release.count]
    for name in given:
        if name not in declared:
            raise ValueError(f"privacy.multipliers.{name}: no such stream; this run releases {', '.join(streams)}")
    for name in streams:
        if name not in given:
            raise ValueError(f"privacy.multipliers: {name} is missing; this run releases {', '.join(streams)}")
    return {name: given[name] for name in streams}


def stream_shares(
    algorithm: Algorithm, streams: tuple[tuple[Stream, ...], ...], target: Target, federates: Federates
) -> dict[str, float] | None:
    """Each stream's part of mu^2: the split to `value`, the rest to the others in equal parts."""
    # A stream that nobody uses takes no part of the budget: one local step must cost what none costs.
    plans = [planned(own, i, federates) for i, own in enumerate(streams)]
    names = list(dict.fromkeys(release.stream for plan in plans for release in plan if release.count))
    first = MESSAGE if MESSAGE in names else "value"
    others = [name for name in names if name != first]
    if not others or first not in names:
        return None
    if target.split == "optimal":
        shares = algorithm.optimal_shares(federates.rounds)
        if shares is None:
            raise ValueError("privacy.split = 'optimal': not known for this algorithm; give a share of mu^2")
        return shares
    value = VALUE_SHARE if target.split is None else float(target.split)
    return {first: value} | {name: (1 - value) / len(others) for name in others}


def shared(
    name: str,
    needed: list[dict[str, float]],
    federates: Federates,
    streams: tuple[tuple[Stream, ...], ...],
) -> tuple[float, ...]:
    """Each silo's own multiplier, or the one of the server's noise that serves every silo."""
    own = np.array([multipliers[name] for multipliers in needed])
    if federates.trust == "untrusted" or name == LOCAL:
        return tuple(own.tolist())
    alike = federates.trust == "shuffled" or not federates.everyone
    relative = np.ones(len(own)) if alike else moves(federates, streams, name)
    used = np.isfinite(own)  # a silo that never uses the stream asks for nothing
    return (float(np.max((own * relative)[used])) if used.any() else math.inf,) * len(own)


def moves(federates: Federates, streams: tuple[tuple[Stream, ...], ...], name: str) -> np.ndarray:
    """How far a record of each silo moves the weighted average, relative to the worst one."""
    moved = np.asarray(federates.weights) * bounds_over_clip(federates, streams, name)
    return moved / moved.max()


def bounds_over_clip(federates: Federates, streams: tuple[tuple[Stream, ...], ...], name: str) -> np.ndarray:
    rules = [next(s.batch for s in own if s.name == name) for own in streams]
    pairs = zip(rules, federates.sizes, strict=True)
    return np.array([rule.bound_over_clip(size) for rule, size in pairs])


def planned(streams: Sequence[Stream], silo: int, federates: Federates) -> list[Releases]:
    """The streams as the accountant sees them from this silo."""
    if federates.shuffle is not None and federates.shuffle.randomizer != "pvec":
        return shuffled(streams, silo, federates, federates.shuffle)
    return [Releases(s.name, s.count, sampling_of(s, silo, federates)) for s in streams]


def sampling_of(stream: Stream, silo: int, federates: Federates) -> Sampling:
    sampling = stream.batch.sampling(federates.sizes[silo])
    if federates.mask is None or stream.name == LOCAL:
        return sampling
    if not isinstance(sampling, Full):
        raise ValueError("privacy.mask_amplification: only known for full batches; leave out algorithm.batch")
    return Masked(*federates.mask)


def shuffled(streams: Sequence[Stream], silo: int, federates: Federates, shuffle: Shuffle) -> list[Releases]:
    """Everything a record sends through the shuffler is one stream; local steps are the silo's own."""
    sent = [stream for stream in streams if stream.name not in (LOCAL, FIRST)]
    first = next((stream for stream in streams if stream.name == FIRST and stream.count), None)
    hiding, once = hidden(sent[0].batch, silo, federates, shuffle)
    # All messages of a round are computed on one batch: composed first, then sampled.
    hiding = replace(hiding, together=federates.together)
    alone = None if first is None else hidden(first.batch, silo, federates, shuffle)[0]
    count = sum(stream.count for stream in sent) + (first is not None)
    messages = Releases(MESSAGE, count, Messages(hiding, once, alone))
    return [messages] + [Releases(s.name, s.count, sampling_of(s, silo, federates)) for s in streams if s.name == LOCAL]


def hidden(rule: BatchRule, silo: int, federates: Federates, shuffle: Shuffle) -> tuple[Shuffled, bool]:
    """What hides this silo's record in a round of such batches, and whether it is in one of them only."""
    size = federates.sizes[silo]
    participants = federates.participation or len(federates.sizes)
    others = sorted(rule.divisor(n) for i, n in enumerate(federates.sizes) if i != silo)[: participants - 1]
    own, once = round(rule.divisor(size)), isinstance(rule.sampling(size), Disjoint)
    hiding = Shuffled(
        messages=round(own + sum(others)),
        own=own,
        randomizer="duchi" if shuffle.randomizer == "duchi" else "privunit",
        dimension=shuffle.parameters,
        rate=1.0 if once else own / size,
    )
    return hiding, once


def divisors(streams: tuple[tuple[Stream, ...], ...], federates: Federates, name: str) -> list[float]:
    """How many records of each silo answer in a round."""
    rules = [next(s.batch for s in own if s.name == name) for own in streams]
    return [rule.divisor(size) for rule, size in zip(rules, federates.sizes, strict=True)]
