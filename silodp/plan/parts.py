"""What a config and public facts make together, before there is any noise.

Its algorithm and channel, checked, its stages with their shares of the budget, and the model that is trained on what
the stages before the training make of a record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from silodp import registry
from silodp.algorithms import find
from silodp.algorithms.entry import Entry
from silodp.channels import Channel, Wishes
from silodp.config import Config
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.facts import Facts, limits
from silodp.models import Model, model_of
from silodp.plan.calibrate import EVALUATION, TRAINING, Part
from silodp.stages.held_out import held_out_size
from silodp.stages.kinds import before, leaves_of, metrics_of


def built(config: Config, facts: Facts) -> tuple[Entry, Channel, Algorithm]:
    """Entry, channel and algorithm, after everything that can be refused without data has been."""
    options, entry = config.algorithm, find(config.algorithm.name)
    check_wishes(config, entry)
    if limits(options.participation, facts.silos)[1] > facts.silos:
        raise ConfigError(f"algorithm.participation = {options.participation} exceeds the {facts.silos} silos")
    for name in config.privacy.silo_targets or ():
        if name not in facts.names:
            known = ", ".join(facts.names[:10])
            raise ConfigError(f"privacy.silo_targets.{name}: there is no such silo; known: {known}")
    if not facts.everyone and entry.everyone:
        raise ConfigError(
            f"algorithm.participation = {options.participation}: {options.name} needs all {facts.silos} silos "
            "in every round; leave it out"
        )
    channel = channel_of(config, entry)
    if isinstance(options.participation, tuple) and not channel.alone_is_private:
        raise ConfigError(
            f"algorithm.participation = {list(options.participation)}: a random number of silos goes with trust "
            "'untrusted', where each silo's noise is its own; give one number"
        )
    try:
        algorithm = entry.algorithm(options, channel, facts.silos, private=config.privacy.private)
        check_batches(algorithm, facts, options.rounds)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    asked = [kind.name for kind, _ in before(config)] + ([] if config.evaluate is None else [EVALUATION])
    if asked and not channel.sums:
        raise ConfigError(
            f"{asked[-1]}: not under trust {config.privacy.trust!r}, which hides record by record; leave it out, or "
            "set algorithm.randomizer = 'pvec'"
        )
    channel.check(Part.of(TRAINING, 1.0, algorithm, facts).declared, options)
    return entry, channel, algorithm


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


def channel_of(config: Config, entry: Entry) -> Channel:
    """The channel that a config asks for, without noise."""
    trust = config.privacy.trust
    found = registry.find("channel", trust)
    if not (isinstance(found, type) and issubclass(found, Channel)):
        raise ConfigError(f"privacy.trust = {trust!r}: is no subclass of silodp.Channel")
    fields = {name: f for name, f in found.__dataclass_fields__.items() if name != "multipliers"}
    for key in ("colluding", "missing"):
        if getattr(config.privacy, key) is not None and key not in fields:
            raise ConfigError(f"privacy.{key} = {getattr(config.privacy, key)}: has no effect under trust {trust!r}")
    for key, value in config.privacy.own.items():
        if key not in fields:
            raise ConfigError(f"privacy.{key} = {value!r}: unknown key; {trust} takes {', '.join(sorted(fields))}")
        registry.check_option(f"privacy.{key}", value, fields[key].type)
    try:
        return found.of(Wishes(config.algorithm, config.privacy, entry, config.privacy.own))
    except TypeError as error:
        raise ConfigError(f"privacy.trust = {trust!r}: {error}") from None


def check_batches(algorithm: Algorithm, facts: Facts, rounds: int) -> None:
    """The smallest silo first: what it allows, all do."""
    releases = algorithm.releases
    names = [s.name for s in releases(0, facts.sizes, range(rounds))]
    for i in sorted(range(facts.silos), key=lambda i: facts.sizes[i]):
        streams = releases(i, facts.sizes, range(rounds))
        if [s.name for s in streams] != names or len(set(names)) != len(names):
            raise ValueError(f"releases(): streams {names} of silo 0; give each once, and the same for every silo")
        for stream in streams:
            rule = type(
                stream.batch
            )  # equinox makes an object of a method whenever an object's is named: silos are many
            rule.check(stream.batch, facts.names[i], facts.sizes[i])
            if rule.sampling(stream.batch, facts.sizes[i]).one_pass and stream.count > rounds:
                raise ValueError(
                    f"stream {stream.name!r}: one pass over the data is in one release a round, but {stream.count} are "
                    f"declared for {rounds} rounds; use batches of another kind, or a stream for each question"
                )


def settled_facts(config: Config, facts: Facts) -> Facts:
    """The facts with what the config says about rounds, weights, who takes part and what is held out."""
    options, facts = config.algorithm, divided_facts(config, facts)
    share = np.asarray(facts.sizes, np.float64) if weights_of(config) == "size" else np.ones(facts.silos)
    return replace(
        facts,
        weights=tuple((share / share.sum()).tolist()),
        rounds=options.performed,
        participation=options.participation,
        seed=config.run.seed,
        scheduled=options.schedule == "fixed" and options.participation is not None,
        same_silos=getattr(options, find(options.name).same_silos or "", None) or 1,
    )


def weights_of(config: Config) -> Literal["equal", "size"]:
    """How silos count. Where nothing is said: a record counts alike in every silo, unless papers, or users of whom each
    is a silo, ask for silos that do. Messages to a shuffler count alike: so do silos when all send as many."""
    options, privacy = config.algorithm, config.privacy
    if options.weights is not None:
        return options.weights
    if getattr(registry.find("channel", privacy.trust), "weighs_by_size", False):
        return "size" if options.batch is None else "equal"
    return "equal" if options.theory or privacy.calibration == "paper" or privacy.unit == "user" else "size"


def with_weights(config: Config) -> Config:
    """The config with the weights that it leaves out."""
    weighed = config.algorithm.model_copy(update={"weights": weights_of(config)})
    return config.model_copy(update={"algorithm": weighed})


def divided_facts(config: Config, facts: Facts) -> Facts:
    """The facts with the sizes of what is trained on and of what is held out."""
    whole = [sum(pair) for pair in zip(facts.sizes, facts.held_out or (0,) * facts.silos, strict=True)]
    held = () if config.evaluate is None else tuple(held_out_size(n, config.evaluate.held_out) for n in whole)
    left = tuple(n - h for n, h in zip(whole, held or (0,) * facts.silos, strict=True))
    return replace(facts, sizes=left, held_out=held)


def parts_of(config: Config, facts: Facts, algorithm: Algorithm) -> list[Part]:
    """The stages of a config, each with its part of the budget, in their order."""
    parts, seen = [], replace(facts, rounds=1, participation=None, scheduled=False)
    for kind, share in before(config):
        seen = replace(seen, rounds=kind.rounds(seen))
        parts.append(Part.of(kind.name, share, kind.algorithm(config, seen), seen))
        seen = seen if seen.record is None else kind.leaves(seen)
    left = 1 - sum(part.share for part in parts)
    if not left > 0:
        shares = ", ".join(f"{part.name} {part.share:g}" for part in parts)
        raise ConfigError(f"share: {shares} leave nothing of the budget for the training; give less")
    if config.evaluate is not None and config.privacy.unit != "record":
        # Several records that change together may lie in both parts, and each part has the whole budget.
        raise ConfigError(f"evaluate: not with privacy.unit = {config.privacy.unit!r}; leave one of them out")
    for section, what in (("evaluate", "held-out records"), ("intercepts", "label rates")):
        if getattr(config, section) is not None and config.privacy.missing:
            raise ConfigError(
                f"{section}: not with privacy.missing = {config.privacy.missing}: nobody answers for the {what} "
                "of a missing silo; leave one of them out"
            )
    parts.append(Part.of(TRAINING, left if parts else 1.0, algorithm, facts))
    return parts if config.evaluate is None else [*parts, evaluation(config, facts)]


def evaluation(config: Config, facts: Facts) -> Part:
    """Of held-out records, which nothing else is asked about: they have the whole budget for it."""
    share = np.asarray(facts.held_out, np.float64)
    asked = replace(
        facts, sizes=facts.held_out, held_out=(), weights=tuple((share / share.sum()).tolist()), rounds=facts.silos,
        participation=None, scheduled=False,
    )  # fmt: skip
    return Part.of(EVALUATION, 1.0, metrics_of(config, asked), asked, held_out=True)


def trained_on(config: Config, facts: Facts) -> Facts:
    """The facts with what a record is where the model sees it."""
    return leaves_of(config, facts)


def trained_model(config: Config, facts: Facts) -> Model:
    """The config's model for the records that it is trained on. Whitened features hold a constant: no bias beside."""
    section = config.model
    if config.whiten is not None and section.kind in registry.LINEAR:
        section = section.model_copy(update={"bias": False})
    return model_of(section, trained_on(config, facts))
