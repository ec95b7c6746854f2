"""The plan of a run: what will be released about each silo, and how much noise it carries.

A plan is made before anything is computed on records, in one place (silodp.plan.make), and every party holds it: run,
sweep, silos, account, certificate and audit read the same object, or the same JSON. It is a sequence of stages in one
budget: its training, what is asked about records before it, and what is asked about held-out records after it
(silodp.stages), where the config asks for such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from silodp.algorithms.entry import Entry
from silodp.algorithms.proofs import Verdict, verdict
from silodp.algorithms.theory import Choice
from silodp.channels import Channel
from silodp.channels.channel import Levels
from silodp.config import Config
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.facts import Declared, Facts, Stream
from silodp.parse import parse_config
from silodp.plan.calibrate import EVALUATION, TRAINING, Noise, Part, group_of
from silodp.plan.parts import built, parts_of, settled_facts
from silodp.privacy import accountant
from silodp.privacy.kinds import Spent
from silodp.releases import Vector
from silodp.stages.kinds import kind_of
from silodp.stages.maps import Map


@dataclass(frozen=True)
class Stage:
    """What one stage releases and the noise in the channel, by line of the account and silo."""

    name: str
    share: float  # of mu^2
    algorithm: Algorithm
    declared: Declared
    multipliers: Noise
    held_out: bool = False  # whether it asks about held-out records

    @property
    def facts(self) -> Facts:
        return self.declared.facts


@dataclass(frozen=True)
class Plan:
    """The promise: a checked config, public facts, and for every stage its streams and noise.

    `silodp.plan.make.make_plan(config, facts)` makes one; `to_json` and `Plan.from_json` carry it to other parties.

    Args:
        config, facts: what was asked for, and what everybody knows. entry, algorithm, channel: the parts they name.
        stages: what is released and with how much noise. chosen: options that the config leaves to the theorem.

    Example:
        >>> import silodp
        >>> from silodp.plan.make import make_plan
        >>> config = silodp.Config(
        ...     algorithm=silodp.algorithms.DPGD(rounds=10, step_size=0.1, clip=1.0), privacy={"epsilon": 2.0}
        ... )
        >>> plan = make_plan(config, silodp.Facts((400, 250), ("north", "south")))
        >>> round(plan.epsilon(0), 3), plan.streams
        (2.0, ('value',))
        >>> silodp.Plan.from_json(plan.to_json()).multipliers == plan.multipliers
        True
    """

    config: Config
    facts: Facts
    entry: Entry
    algorithm: Algorithm
    channel: Channel  # without noise; `noised` has it
    stages: tuple[Stage, ...]
    chosen: dict[str, Any] = field(default_factory=dict)  # options that the config leaves to the theorem

    @property
    def private(self) -> bool:
        return self.config.privacy.private

    @property
    def declared(self) -> Declared:
        """All that is declared, over all stages."""
        each = range(self.facts.silos)
        streams = tuple(tuple(stream for stage in self.stages for stream in stage.declared.streams[i]) for i in each)
        return Declared(self.facts, streams, self.algorithm.together)

    def at(self, name: str) -> Plan:
        """One stage of the plan, as a plan of its own: what is run, or answered, at a time."""
        stage = next(stage for stage in self.stages if stage.name == name)
        return replace(self, algorithm=stage.algorithm, facts=stage.facts, stages=(stage,))

    @property
    def training(self) -> Plan:
        return self.at(TRAINING)

    @property
    def before(self) -> list[str]:
        """The stages before training."""
        names = [stage.name for stage in self.stages]
        return names[: names.index(TRAINING)]

    @property
    def evaluation(self) -> Plan | None:
        """The stage on held-out records, if there is one."""
        return self.at(EVALUATION) if self.config.evaluate is not None else None

    def apart(self, spent: Sequence[Spent]) -> list[list[Spent]]:
        """What was spent on a record that is trained on, and on one that is held out."""
        of = lambda held_out: [s for s in spent if self.stage_of(s.releases.stream).held_out == held_out]
        return [own for own in (of(False), of(True)) if own]

    def derived(self, name: str, released: Vector) -> Map:
        """What a stage's release makes of the features: every party computes it for itself."""
        return kind_of(name).derived(self.at(name), released)

    def releases(self, silo: int) -> tuple[Stream, ...]:
        return self.declared.streams[silo]

    def released_together(self, silo: int) -> list[str]:
        """Lines of which one answer may have several releases: local steps."""
        return [self.channel.accounted_as(stream) for stream in self.releases(silo) if stream.local]

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(stream.name for stream in self.releases(0))

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers in a release, by stream that passes through the channel."""
        each = {s.name: self.declared.dimension(s.name) for s in self.releases(0) if not s.local}
        return {name: size for name, size in each.items() if size is not None}

    @cached_property
    def multipliers(self) -> Noise:
        return {line: noise for stage in self.stages for line, noise in stage.multipliers.items()}

    @cached_property
    def noised(self) -> Channel:
        """The channel with this plan's noise. Rounded up: float32 must not make less of a multiplier."""
        noise = {line: jax.device_put(np.float32(np.asarray(m) * (1 + 2e-7))) for line, m in self.multipliers.items()}
        return self.channel.ready(self.declared, noise, self.config.privacy.delta)

    def stage_of(self, line: str) -> Stage:
        return next(stage for stage in self.stages if line in stage.multipliers)

    def protecting(self, line: str) -> np.ndarray:
        """The multiplier that a release of this line has for each silo's own records, at least."""
        return self.protection(line)[0]

    def protection(self, line: str) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest such multiplier: who else is present in a round may decide it."""
        stage, channel = self.stage_of(line), self.channel
        nominal = np.asarray(stage.multipliers[line])
        least = channel.protecting(line, nominal, stage.declared)
        return least, channel.protecting_at_most(line, nominal, stage.declared)

    def std_over_clip(self, line: str) -> np.ndarray:
        """Std of the noise on the released mean, in clip norms: per silo, or on the average of all silos."""
        stage = self.stage_of(line)
        return self.channel.std_over_clip(line, np.asarray(stage.multipliers[line]), stage.declared)

    def std_of_average(self, line: str) -> float:
        """Std of the noise on the average over all silos, in clip norms; 0 without privacy."""
        stage = self.stage_of(line) if self.private else None
        if stage is None:
            return 0.0
        return self.channel.std_of_average(line, np.asarray(stage.multipliers[line]), stage.declared)

    def spent(self, silo: int, counted: Sequence[Stream] | None = None) -> list[Spent]:
        """What the run costs a silo: as planned, or for the releases that were counted. See `apart`."""
        releases = [r for stage in self.stages for r in self._accounted(stage, silo, counted)]
        return [Spent(each, float(self.protecting(each.stream)[silo])) for each in releases if each.count]

    def _accounted(self, stage: Stage, silo: int, counted: Sequence[Stream] | None) -> list[Any]:
        own = stage.declared.streams[silo]
        if counted is not None:
            names = {stream.name for stream in own}
            own = tuple(stream for stream in counted if stream.name in names)
        return self.channel.accounted(stage.declared, silo, own)

    def epsilon(self, silo: int, delta: float | None = None) -> float:
        return self.cost(silo, self.spent(silo), delta)

    def cost(self, silo: int, spent: Sequence[Spent], delta: float | None = None) -> float:
        """Epsilon of what was spent about a silo, for as many of its records as the target protects together."""
        delta = self.config.privacy.delta if delta is None else delta
        return cost_of(self.apart(spent), delta, self.together(silo))

    def together(self, silo: int) -> int:
        """How many of a silo's records the target protects together."""
        return group_of(self.config.privacy, self.facts.sizes[silo])

    def if_others_collude(self, silo: int, spent: Sequence[Spent], delta: float, records: int = 1) -> Levels:
        """What is left to a silo's records when others work for the server, by who does; None: nothing changes."""
        levels = [self.noised.left_if(own, silo, self.declared, delta, records) for own in self.apart(spent)]
        told = [each for each in levels if each is not None]
        return {who: max(each[who] for each in told) for who in told[0]} if told else None

    @property
    def theorem(self) -> Verdict:
        """The theorem that covers the run's utility, or why none does (the guarantee does not depend on it)."""

        def nothing(stream: str, options: dict[str, Any]) -> tuple[int, float]:
            raise ValueError(f"stream {stream!r}: a theorem's conditions speak of no stream")

        return verdict(
            self.entry, Choice(self.config.algorithm, self.config.privacy, self.facts, self.channel, nothing)
        )

    def to_json(self) -> dict[str, Any]:
        """All that another party needs to hold the same plan. Infinite noise is written as null."""
        finite = lambda noise: [None if math.isinf(m) else m for m in noise]
        return {
            "config": self.config.model_dump(mode="json"),
            "facts": self.facts.to_json(),
            "stages": [
                {"name": s.name, "share": s.share, "multipliers": {k: finite(v) for k, v in s.multipliers.items()}}
                for s in self.stages
            ],
            "chosen": self.chosen,
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Plan:
        """The plan that was written; its algorithm and channel are built and checked anew."""
        check_keys("plan", tree, {"config", "facts", "stages", "chosen"})
        config = parse_config(dict(tree["config"]))
        facts = Facts.from_json(tree["facts"])
        entry, channel, algorithm = built(config, facts)
        if facts != settled_facts(config, facts):
            raise ConfigError("plan: its facts are not those that its config gives")
        parts = parts_of(config, facts, algorithm)
        noise = [
            {k: tuple(math.inf if m is None else float(m) for m in v) for k, v in told["multipliers"].items()}
            for told in told_stages(tree["stages"], parts)
        ]
        plan = Plan(config, facts, entry, algorithm, channel, stages_of(parts, noise), dict(tree["chosen"]))
        check_noise(plan)
        return plan


def cost_of(apart: Sequence[Sequence[Spent]], delta: float, together: int) -> float:
    """Epsilon of so many records of a silo. `apart`: releases on records to train on, and those on held-out ones.

    One record is the one or the other: it pays for its part. Several may be both, and pay for all.
    """
    if together > 1:
        return accountant.group_epsilon([part for own in apart for part in own], delta, together)
    return max((accountant.epsilon(own, delta) for own in apart), default=0.0)


def check_keys(what: str, tree: Mapping[str, Any], keys: set[str]) -> None:
    if tree.keys() != keys:
        raise ConfigError(f"{what}: has {', '.join(sorted(tree))}; needs {', '.join(sorted(keys))}")


def told_stages(stages: Sequence[Mapping[str, Any]], parts: Sequence[Part]) -> Sequence[Mapping[str, Any]]:
    """A plan without one of its config's stages, or with another beside them, would declare what it does not run."""
    for told in stages:
        check_keys("plan: a stage", told, {"name", "share", "multipliers"})
    if [(told["name"], told["share"]) for told in stages] != [(part.name, part.share) for part in parts]:
        names, own = [told["name"] for told in stages], {part.name: part.share for part in parts}
        raise ConfigError(f"plan: stages {names}; its config has {own} of the budget")
    return stages


def check_noise(plan: Plan) -> None:
    """Noise that was told must be a number >= 0 for every line of the account and every silo."""
    for stage in plan.stages:
        lines = channel_lines(plan.channel, stage.declared) if plan.private else set()
        if stage.multipliers.keys() != lines:
            raise ConfigError(f"plan: multipliers of {sorted(stage.multipliers)}; this run releases {sorted(lines)}")
        for line, noise in stage.multipliers.items():
            if len(noise) != plan.facts.silos or not all(m >= 0 for m in noise):
                raise ConfigError(f"plan: multipliers of {line!r}: one number >= 0 for each silo is needed")


def channel_lines(channel: Channel, declared: Declared) -> set[str]:
    return {release.stream for release in channel.accounted(declared, 0, declared.streams[0])}


def stages_of(parts: Sequence[Part], noise: Sequence[Noise]) -> tuple[Stage, ...]:
    pairs = zip(parts, noise, strict=True)
    return tuple(Stage(part.name, part.share, part.algorithm, part.declared, own, part.held_out) for part, own in pairs)
