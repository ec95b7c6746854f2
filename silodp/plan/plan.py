"""The plan of a run: what will be released about each silo, and how much noise it carries.

A plan is made before anything is computed on records, in one place (`make_plan`), and every party holds it: run, sweep,
silos, account, certificate and audit read the same object, or the same JSON. It is a sequence of stages in one budget:
its training, and before it the second moment that whitens the features, where the config asks for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from silodp.algorithms import find
from silodp.algorithms.entry import Case, Entry, Printed, prox_kind
from silodp.algorithms.theory import Choice
from silodp.channels import Channel, Wishes
from silodp.config import Config, parse_config
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.facts import Declared, Facts, Stream
from silodp.models import Model, model_of
from silodp.plan.auto import chosen_config
from silodp.plan.calibrate import Noise, Part, noise_of, stream_shares
from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import Spent
from silodp.registry import AUTO, LINEAR
from silodp.registry import find as find_part
from silodp.releases import Vector
from silodp.whiten import STREAM as MOMENT
from silodp.whiten import Moment, Whitening

TRAINING, WHITENING = "train", "whiten"
GUESSES = 30  # of the step size, where the split of the budget and the step depend on each other


@dataclass(frozen=True)
class Stage:
    """What one stage releases and the noise in the channel, by line of the account and silo."""

    name: str
    share: float  # of mu^2
    algorithm: Algorithm
    declared: Declared
    multipliers: Noise

    @property
    def facts(self) -> Facts:
        return self.declared.facts


@dataclass(frozen=True)
class Plan:
    """The promise: a checked config, public facts, and for every stage its streams and noise.

    `silodp.plan.plan.make_plan(config, facts)` makes one; `to_json` and `Plan.from_json` carry it to other parties.

    Args:
        config, facts: what was asked for, and what everybody knows. entry, algorithm, channel: the parts they name.
        stages: what is released and with how much noise. chosen: options that the config leaves to the theorem.

    Example:
        >>> import silodp
        >>> from silodp.plan.plan import make_plan
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

    def whitening(self, moment: Vector) -> Whitening:
        """What the released moment makes of the features: every party computes it for itself."""
        asked = self.at(WHITENING).algorithm
        assert isinstance(asked, Moment)
        return Whitening.of(moment, self.std_of_average(MOMENT) * float(asked.clip) ** 2, float(asked.scale))

    def releases(self, silo: int) -> tuple[Stream, ...]:
        return self.declared.streams[silo]

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
        noise = {line: jnp.asarray(np.asarray(m) * (1 + 2e-7), jnp.float32) for line, m in self.multipliers.items()}
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
        """What the run costs a silo: as planned, or for the releases that were counted."""
        releases = [r for stage in self.stages for r in self._accounted(stage, silo, counted)]
        return [Spent(each, float(self.protecting(each.stream)[silo])) for each in releases if each.count]

    def _accounted(self, stage: Stage, silo: int, counted: Sequence[Stream] | None) -> list[Any]:
        own = stage.declared.streams[silo]
        if counted is not None:
            names = {stream.name for stream in own}
            own = tuple(stream for stream in counted if stream.name in names)
        return self.channel.accounted(stage.declared, silo, own)

    def epsilon(self, silo: int, delta: float | None = None) -> float:
        return accountant.epsilon(self.spent(silo), self.config.privacy.delta if delta is None else delta)

    @property
    def theorem(self) -> str | None:
        """The theorem that covers the run's utility; None: unproved (the guarantee does not depend on it)."""
        options = self.config.algorithm
        compressor = getattr(self.channel, "compressor", None)
        compression = "none" if compressor is None else "unbiased" if compressor.unbiased else "biased"
        batches = options.batch is None or self.entry.sampling is not None
        alike = options.weights == "equal" or self.channel.weighs_by_size
        usual = batches and options.participation is None and alike
        return self.entry.theorem(self.channel.name, prox_kind(options.prox), compression, usual=usual)

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


# --- from a config to a plan ---------------------------------------------------------------------------------


def make_plan(config: Config, facts: Facts, calibration: str | None = None) -> Plan:
    """Check, let the theorem choose, keep the budget, calibrate. `facts` may know the data and the parameters only."""
    config = resolved(config, facts)
    chosen = choose(config, settled_facts(config, facts))
    config = within_budget(with_options(config, chosen), facts)
    return replace(calibrated_plan(config, facts, calibration), chosen=chosen)


def resolved(config: Config, facts: Facts) -> Config:
    """The config without `auto`."""
    if config.algorithm.name != AUTO:
        return config
    return chosen_config(config, facts, lambda trial: calibrated_plan(trial, facts).std_of_average("value"))


def calibrated_plan(config: Config, facts: Facts, calibration: str | None = None) -> Plan:
    """The plan of a config that leaves nothing to choose."""
    facts = settled_facts(config, facts)
    entry, channel, algorithm = built(config, facts)
    parts = parts_of(config, facts, algorithm)
    noise: list[Noise] = [{} for _ in parts]
    if config.privacy.private:
        if not any(stream.count for own in parts[-1].declared.streams for stream in own):
            raise ConfigError(f"algorithm.name = {config.algorithm.name!r}: asks for records but declares no release")
        noise = calibrated_noise(config, facts, entry, channel, parts, calibration)
    return Plan(config, facts, entry, algorithm, channel, stages_of(parts, noise))


def stages_of(parts: Sequence[Part], noise: Sequence[Noise]) -> tuple[Stage, ...]:
    pairs = zip(parts, noise, strict=True)
    return tuple(Stage(part.name, part.share, part.algorithm, part.declared, own) for part, own in pairs)


def parts_of(config: Config, facts: Facts, algorithm: Algorithm) -> list[Part]:
    """The stages of a config, each with its part of the budget: training is the last."""
    if config.whiten is None:
        return [Part.of(TRAINING, 1.0, algorithm, facts)]
    share = config.whiten.share
    features = 1 if facts.record is None else whitened_features(facts)
    moment = Moment.of(config.whiten.clip, features, config.whiten.scale)
    first = replace(facts, rounds=1, participation=None, scheduled=False, parameters=moment.size)
    return [Part.of(WHITENING, share, moment, first), Part.of(TRAINING, 1 - share, algorithm, facts)]


def whitened_features(facts: Facts) -> int:
    """How many features a record has after whitening: a constant comes in."""
    if len(facts.input_shape) != 1:
        raise ConfigError(f"whiten: features of shape {facts.input_shape}; it needs a table (flatten them)")
    return facts.input_shape[0] + 1


def trained_on(config: Config, facts: Facts) -> Facts:
    """The facts with what a record is where the model sees it."""
    if config.whiten is None or facts.record is None:
        return facts
    return replace(facts, record=(f"float32[{whitened_features(facts)}]", facts.record[1]))


def trained_model(config: Config, facts: Facts) -> Model:
    """The config's model for the records that it is trained on. Whitened features hold a constant: no bias beside."""
    section = config.model
    if config.whiten is not None and section.kind in LINEAR:
        section = section.model_copy(update={"bias": False})
    return model_of(section, trained_on(config, facts))


def calibrated_noise(
    config: Config, facts: Facts, entry: Entry, channel: Channel, parts: Sequence[Part], calibration: str | None
) -> list[Noise]:
    """The noise; what the accountant refuses is the config's privacy section's mistake."""
    try:
        paper = (calibration or config.privacy.calibration) == "paper"
        if paper and len(parts) > 1:
            raise ConfigError("whiten: no paper prints its noise; leave calibration = 'paper' out")
        printed = printed_noise(config, facts, entry) if paper else None
        return noise_of(parts, channel, config.privacy, printed)
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("privacy") else f"privacy.{text}") from None


def settled_facts(config: Config, facts: Facts) -> Facts:
    """The facts with what the config says about rounds, weights and who takes part."""
    options = config.algorithm
    share = np.asarray(facts.sizes, np.float64) if options.weights == "size" else np.ones(facts.silos)
    return replace(
        facts,
        weights=tuple((share / share.sum()).tolist()),
        rounds=options.performed,
        participation=options.participation,
        seed=config.run.seed,
        scheduled=options.schedule == "fixed" and options.participation is not None,
    )


def channel_of(config: Config, entry: Entry) -> Channel:
    """The channel that a config asks for, without noise."""
    trust = config.privacy.trust
    found = find_part("channel", trust)
    if not (isinstance(found, type) and issubclass(found, Channel)):
        raise ConfigError(f"privacy.trust = {trust!r}: is no subclass of silodp.Channel")
    fields = {f for f in found.__dataclass_fields__ if f != "multipliers"}
    for key, value in config.privacy.own.items():
        if key not in fields:
            raise ConfigError(f"privacy.{key} = {value!r}: unknown key; {trust} takes {', '.join(sorted(fields))}")
    try:
        return found.of(Wishes(config.algorithm, config.privacy, entry, config.privacy.own))
    except TypeError as error:
        raise ConfigError(f"privacy.trust = {trust!r}: {error}") from None


def check_wishes(config: Config, entry: Entry) -> None:
    """Refuse what can be refused without any facts."""
    options = config.algorithm
    if not entry.runs_under(config.privacy.trust):
        raise ConfigError(
            f"privacy.trust = {config.privacy.trust!r}: {options.name} runs under {' or '.join(entry.trusts or ())}"
        )
    if config.privacy.private and not entry.private:
        raise ConfigError(
            f"privacy.epsilon: {options.name} adds no noise; leave the target out or use a private algorithm"
        )


def built(config: Config, facts: Facts) -> tuple[Entry, Channel, Algorithm]:
    """Entry, channel and algorithm, after everything that can be refused without data has been."""
    options, entry = config.algorithm, find(config.algorithm.name)
    check_wishes(config, entry)
    if options.participation is not None and options.participation > facts.silos:
        raise ConfigError(f"algorithm.participation = {options.participation} exceeds the {facts.silos} silos")
    if not facts.everyone and entry.everyone:
        raise ConfigError(
            f"algorithm.participation = {options.participation}: {options.name} needs all {facts.silos} silos "
            "in every round; leave it out"
        )
    channel = channel_of(config, entry)
    try:
        algorithm = entry.algorithm(options, channel, facts.silos, private=config.privacy.private)
        check_batches(algorithm, facts, options.rounds)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.whiten is not None and not channel.gaussian:
        raise ConfigError(
            f"whiten: not under trust {config.privacy.trust!r}, which hides record by record; leave it out"
        )
    channel.check(Part.of(TRAINING, 1.0, algorithm, facts).declared, options)
    return entry, channel, algorithm


def check_batches(algorithm: Algorithm, facts: Facts, rounds: int) -> None:
    """The smallest silo first: what it allows, all do."""
    names = [s.name for s in algorithm.releases(0, facts.sizes, range(rounds))]
    for i in sorted(range(facts.silos), key=lambda i: facts.sizes[i]):
        streams = algorithm.releases(i, facts.sizes, range(rounds))
        if [s.name for s in streams] != names or len(set(names)) != len(names):
            raise ValueError(f"releases(): streams {names} of silo 0; give each once, and the same for every silo")
        for stream in streams:
            stream.batch.check(facts.names[i], facts.sizes[i])
            if stream.batch.sampling(facts.sizes[i]).one_pass and stream.count > rounds:
                raise ValueError(
                    f"stream {stream.name!r}: one pass over the data is in one release a round, but {stream.count} are "
                    f"declared for {rounds} rounds; use batches of another kind, or a stream for each question"
                )


def within_budget(config: Config, facts: Facts) -> Config:
    """With given noise and a budget: the filter. The run ends after the last round that the budget admits."""
    budget = config.privacy.budget
    if budget is None:
        return config

    def ending(rounds: int) -> Config:
        return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"stop_after": rounds})})

    def admits(rounds: int) -> bool:
        plan = calibrated_plan(ending(rounds), facts)
        return all(plan.epsilon(i) <= budget for i in range(facts.silos))

    low, high = 0, config.algorithm.performed + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    if low == 0:
        raise ConfigError(
            f"privacy.budget = {budget}: the first round already exceeds it with these multipliers; give more noise"
        )
    return ending(low)


# --- what the theorem chooses --------------------------------------------------------------------------------


def choose(config: Config, facts: Facts) -> dict[str, Any]:
    """The options that the theorem of the config's algorithm chooses: {} when nobody asks it."""
    options, entry = config.algorithm, find(config.algorithm.name)
    told = bool(entry.asked_by) and all(getattr(options, name) is not None for name in entry.asked_by)
    if not (options.theory or (told and facts.parameters is not None)):
        return {}
    if entry.theory is None:
        raise ConfigError(f"algorithm.theory = true: no theorem is known for {options.name}; leave it out")
    channel = channel_of(config, entry)
    theorem = entry.theory

    def chosen_at(step: float) -> dict[str, Any]:
        asked = lambda stream, changes: share_of(config, entry, channel, facts, stream, changes, step)
        choice = Choice(options, config.privacy, facts, channel, asked)
        theorem(choice)
        return choice.chosen

    step = 0.5 / (options.smoothness or 1.0)
    chosen = chosen_at(step)
    if config.privacy.split == "optimal":
        for _ in range(GUESSES):
            step, chosen = chosen.get("step_size", step), chosen_at(chosen.get("step_size", step))
    return chosen


def share_of(
    config: Config, entry: Entry, channel: Channel, facts: Facts, stream: str, changes: dict[str, Any], step: float
) -> tuple[int, float]:
    """How often a stream is released, and its part of mu^2, in the plan of these options."""
    given = {"step_size": step} | config.algorithm.model_dump(exclude_unset=True, exclude_none=True) | changes
    options = entry.with_placeholders(config.algorithm.model_validate(given))
    algorithm = entry.algorithm(options, channel, facts.silos, private=True)
    each = [algorithm.releases(i, facts.sizes, range(options.rounds)) for i in range(facts.silos)]
    used = list(dict.fromkeys(s.name for own in each for s in own if s.count))
    shares = stream_shares(algorithm, used, each[0][0].name, config.privacy.split, options.rounds)
    count = max(s.count for own in each for s in own if s.name == stream)
    return count, 1.0 if shares is None else shares.get(stream, 1.0)


def with_options(config: Config, chosen: Mapping[str, Any]) -> Config:
    """The config with the theorem's choices in the place of what it leaves out."""
    if not chosen:
        return config
    tree = config.model_dump(exclude_unset=True)
    return parse_config(tree | {"algorithm": tree["algorithm"] | chosen})


# --- a paper's own calibration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A paper's own calibration: what it says the epsilon is."""

    epsilon: float
    formula: str

    def verdict(self, true: float) -> dict[str, Any]:
        """The claim beside the epsilon that the noise really gives."""
        return {
            "formula": self.formula,
            "claimed_epsilon": self.epsilon,
            "true_epsilon": true,
            "violated": bool(true > self.epsilon * (1 + 1e-6)),
        }


def claim_of(config: Config) -> Claim | None:
    """What the paper says the epsilon is; None when it prints no calibration for this algorithm and target."""
    printed = find(config.algorithm.name).printed_for(config.privacy.trust)
    claimed = claimed_epsilon(config, printed) if printed is not None else None
    return None if printed is None or claimed is None else Claim(claimed, printed.formula)


def claimed_epsilon(config: Config, printed: Printed) -> float | None:
    privacy = config.privacy
    if privacy.epsilon is None and privacy.gdp is not None and printed.claims_gdp:
        return gaussian.epsilon_of(privacy.delta, privacy.gdp)
    return privacy.epsilon


def printed_noise(config: Config, facts: Facts, entry: Entry) -> list[dict[str, float]]:
    """The paper's multipliers for each silo."""
    privacy, name = config.privacy, config.algorithm.name
    printed, claim = entry.printed_for(privacy.trust), claim_of(config)
    if claim is None or printed is None:
        reason = "no paper prints one" if printed is None else "it needs privacy.epsilon"
        raise ValueError(f"calibration = 'paper': not available for {name}: {reason}")
    case = lambda records: Case(config.algorithm, claim.epsilon, privacy.delta, records, facts.silos, privacy.gdp)
    return [printed.noise(case(records)) for records in facts.sizes]
