"""How a budget is divided: between the stages of a plan, between the streams of a stage, and what each then needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from silodp.channels import Channel
from silodp.config import PrivacyConfig
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.facts import Declared, Facts
from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import Releases, Spent

TRAINING, EVALUATION = "train", "evaluate"
VALUE_SHARE = 0.8  # of mu^2, when there are other streams: the exact counterpart of DIFF2's u = 1.25

Lines = Sequence[Sequence[Releases]]  # of the account, for each silo
Noise = dict[str, tuple[float, ...]]  # by line of the account, a multiplier for each silo


@dataclass(frozen=True)
class Part:
    """One part of the budget: an algorithm's releases and its share of mu^2."""

    name: str
    share: float
    algorithm: Algorithm
    declared: Declared
    held_out: bool = False  # it asks about records that no other part asks about

    @staticmethod
    def of(name: str, share: float, algorithm: Algorithm, facts: Facts, held_out: bool = False) -> Part:
        releases = algorithm.releases  # once: equinox makes an object of a method whenever it is named
        streams = tuple(tuple(releases(i, facts.sizes, facts.rounds_of(i))) for i in range(facts.silos))
        return Part(name, share, algorithm, Declared(facts, streams, algorithm.together), held_out)

    def accounted(self, channel: Channel, silo: int) -> list[Releases]:
        streams = self.declared.streams[silo]
        lines = channel.accounted(self.declared, silo, streams)
        named = channel.accounted_as
        left_out = {named(stream) for stream in streams} - {line.stream for line in lines}
        if left_out:
            raise ConfigError(
                f"privacy.trust: {type(channel).__name__} does not account {', '.join(sorted(left_out))}; `accounted` "
                "must give a line for every stream"
            )
        return lines

    def shares(self, lines: Lines, split: float | str | None) -> dict[str, float] | None:
        """Each line's part of what the stage has; None: equal parts."""
        # A stream that nobody uses takes no part of the budget: one local step must cost what none costs.
        used = list(dict.fromkeys(release.stream for own in lines for release in own if release.count))
        return stream_shares(self.algorithm, used, lines[0][0].stream, split, self.declared.facts.rounds)


def stream_shares(
    algorithm: Algorithm, used: Sequence[str], leading: str, split: float | str | None, rounds: int
) -> dict[str, float] | None:
    """The split to the leading stream (the first declared), the rest to the others in equal parts."""
    others = [name for name in used if name != leading]
    if not others or leading not in used:
        return None
    if split == "optimal":
        shares = algorithm.optimal_shares(rounds)
        if shares is None:
            raise ValueError("privacy.split = 'optimal': not known for this algorithm; give a share of mu^2")
        return shares
    value = VALUE_SHARE if split is None else float(split)
    return {leading: value} | {name: (1 - value) / len(others) for name in others}


def noise_of_all(parts: Sequence[Part], channel: Channel, privacy: PrivacyConfig) -> list[Noise]:
    """The noise of parts about the records that are trained on, and of those about the records that are held out.

    No record is in both: each of the two has the whole target for itself.
    """
    noise: dict[str, Noise] = {}
    for held_out in (False, True):
        own = [part for part in parts if part.held_out == held_out]
        noise |= dict(zip((p.name for p in own), noise_of(own, channel, given_to(own, parts, privacy)), strict=True))
    return [noise[part.name] for part in parts]


def given_to(own: Sequence[Part], parts: Sequence[Part], privacy: PrivacyConfig) -> PrivacyConfig:
    """The target without the multipliers that were given for the streams of other parts."""
    if privacy.multipliers is None:
        return privacy
    others = {stream.name for part in parts if part not in own for stream in part.declared.streams[0]}
    return replace_target(privacy, {name: m for name, m in privacy.multipliers.items() if name not in others})


def noise_of(
    parts: Sequence[Part],
    channel: Channel,
    privacy: PrivacyConfig,
    printed: Sequence[Mapping[str, float]] | None = None,
) -> list[Noise]:
    """Calibrate every stream of every silo to the target, all parts together; or take a paper's `printed` noise.

    Noise that silos share serves the one that needs most of it; what this leaves the others of their budgets goes to
    the noise of their own. Returns the channel's multipliers, a dictionary for each part.
    """
    if not parts:
        return []
    silos = range(parts[0].declared.facts.silos)
    lines = [[part.accounted(channel, i) for i in silos] for part in parts]
    each = [tuple(release for own in lines for release in own[i]) for i in silos]
    shares = joint_shares(parts, lines, privacy.split)
    facts = parts[0].declared.facts
    targets = [record_target(each[i], privacy.of_silo(facts.names[i]), facts.sizes[i]) for i in silos]
    if printed is not None:
        targets = [replace_target(privacy, printed[i]) for i in silos]
    needed = [own_noise(own, target, shares) for own, target in zip(each, targets, strict=True)]
    noise = [joint(channel, part, needed) for part in parts]
    if printed is not None or privacy.multipliers is not None:
        return noise
    local = {stream.name for part in parts for stream in part.declared.streams[0] if stream.local}
    protected = protection(parts, channel, noise)
    needed = [with_rest(each[i], needed[i], protected[i], local, targets[i], shares) for i in silos]
    noise = [joint(channel, part, needed) for part in parts]
    refuse_less(channel, needed, protection(parts, channel, noise))
    return noise


def refuse_less(
    channel: Channel, needed: Sequence[Mapping[str, float]], protected: Sequence[Mapping[str, float]]
) -> None:
    """A trust model may add more noise than a target asks for, never less."""
    for own, found in zip(needed, protected, strict=True):
        for line, multiplier in own.items():
            if found[line] < multiplier * (1 - 1e-6):
                raise ConfigError(
                    f"privacy.trust: {type(channel).__name__} protects {line!r} with noise multiplier "
                    f"{found[line]:.4g}, and the target needs {multiplier:.4g}; its `joint` must not give less"
                )


def joint(channel: Channel, part: Part, needed: Sequence[Mapping[str, float]]) -> Noise:
    """The channel's multipliers of a part's lines."""
    noise: Noise = {}
    for line in (release.stream for release in part.accounted(channel, 0)):
        own = np.array([multipliers[line] for multipliers in needed])
        noise[line] = tuple(float(m) for m in channel.joint(line, own, part.declared))
    return noise


def protection(parts: Sequence[Part], channel: Channel, noise: Sequence[Noise]) -> list[dict[str, float]]:
    """The multiplier that each line has for the records of each silo."""
    of_all = {
        line: channel.protecting(line, np.asarray(own), part.declared)
        for part, lines in zip(parts, noise, strict=True)
        for line, own in lines.items()
    }
    silos = range(parts[0].declared.facts.silos)
    return [{line: float(own[i]) for line, own in of_all.items()} for i in silos]


def with_rest(
    releases: Sequence[Releases],
    needed: dict[str, float],
    protected: Mapping[str, float],
    local: set[str],
    privacy: PrivacyConfig,
    shares: Mapping[str, float] | None,
) -> dict[str, float]:
    """What one silo needs once the noise that it shares is fixed: as before, but for its local streams."""
    shared = tuple(Spent(r, protected[r.stream]) for r in releases if r.count and r.stream not in local)
    own = tuple(r for r in releases if r.count and r.stream in local)
    spare = any(spent.multiplier > needed[spent.releases.stream] * (1 + 1e-9) for spent in shared)
    return needed | own_noise(own, privacy, shares, shared) if own and spare else needed


def joint_shares(parts: Sequence[Part], lines: Sequence[Lines], split: float | str | None) -> dict[str, float] | None:
    """Each line's part of the whole budget; None: one part, in equal parts."""
    if len(parts) == 1:
        return parts[0].shares(lines[0], split)
    shares: dict[str, float] = {}
    taken: set[str] = set()
    for part, own in zip(parts, lines, strict=True):
        releases = [release for silo in own for release in silo]
        clash = {release.stream for release in releases} & taken
        if clash:
            raise ValueError(f"stage {part.name!r}: stream {min(clash)!r} stands in another stage too; rename it")
        taken |= {release.stream for release in releases}
        used = dict.fromkeys(release.stream for release in releases if release.count)
        # What a config says about the split is meant for its algorithm.
        asked = part.shares(own, split) if part.name == TRAINING else None
        within = asked or dict.fromkeys(used, 1 / max(1, len(used)))
        shares |= {line: part.share * share for line, share in within.items()}
    return shares


def replace_target(privacy: PrivacyConfig, multipliers: Mapping[str, float]) -> PrivacyConfig:
    return privacy.model_copy(update={"epsilon": None, "gdp": None, "multipliers": dict(multipliers)})


def group_of(privacy: PrivacyConfig, records: int) -> int:
    """How many records of a silo with so many the target protects together."""
    unit = privacy.unit
    return records if unit == "user" else 1 if unit == "record" else min(int(unit), records)


def record_target(releases: Sequence[Releases], privacy: PrivacyConfig, records: int) -> PrivacyConfig:
    """The target for one record that keeps the one for the group (Lowy et al., App. B; a k-th of mu for Gaussians)."""
    k = group_of(privacy, records)
    if k == 1 or privacy.multipliers is not None:
        return privacy
    if privacy.gdp is not None:
        return privacy.model_copy(update={"gdp": privacy.gdp / k})
    assert privacy.epsilon is not None
    if accountant.gdp([Spent(release, 1.0) for release in releases if release.count]) is not None:
        mu = gaussian.mu_of(privacy.epsilon, privacy.delta)
        return privacy.model_copy(update={"epsilon": None, "gdp": mu / k})
    own = privacy.epsilon / k
    return privacy.model_copy(update={"epsilon": own, "delta": privacy.delta / (k * math.exp((k - 1) * own))})


def own_noise(
    releases: Sequence[Releases],
    privacy: PrivacyConfig,
    shares: Mapping[str, float] | None,
    already: tuple[Spent, ...] = (),
) -> dict[str, float]:
    """What one silo's records need, beside what is spent already. A stream that the plan never uses gets infinite
    noise: a release that should not happen would then show nothing."""
    used = tuple(release for release in releases if release.count)
    unused = {release.stream: math.inf for release in releases if not release.count}
    if privacy.multipliers is not None:
        return given_noise(releases, privacy.multipliers) | unused
    if privacy.gdp is not None:
        return accountant.calibrate_gdp(used, privacy.gdp, shares, already) | unused
    assert privacy.epsilon is not None
    target = privacy.epsilon, privacy.delta
    return calibrated(used, *target, None if shares is None else tuple(shares.items()), already) | unused


@lru_cache(maxsize=1024)  # silos, and the settings of a sweep, often release alike
def calibrated(
    releases: tuple[Releases, ...],
    epsilon: float,
    delta: float,
    shares: tuple[tuple[str, float], ...] | None,
    already: tuple[Spent, ...] = (),
) -> dict[str, float]:
    return accountant.calibrate(releases, epsilon, delta, None if shares is None else dict(shares), already)


def given_noise(releases: Sequence[Releases], given: Mapping[str, float]) -> dict[str, float]:
    declared = [release.stream for release in releases]
    streams = [release.stream for release in releases if release.count]
    for name in given:
        if name not in declared:
            raise ValueError(f"privacy.multipliers.{name}: no such stream; this run releases {', '.join(streams)}")
    for name in streams:
        if name not in given:
            raise ValueError(f"privacy.multipliers: {name} is missing; this run releases {', '.join(streams)}")
    return {name: given[name] for name in streams}
