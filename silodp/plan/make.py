"""From a config to its plan: what is left open is chosen, the budget is kept, the noise is calibrated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from silodp.algorithms import find
from silodp.algorithms.bounds import bounds, setting
from silodp.algorithms.entry import Entry
from silodp.algorithms.theory import Choice
from silodp.channels import Channel
from silodp.config import Config
from silodp.errors import ConfigError, Inadmissible
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan import auto
from silodp.plan.auto import chosen_config, explained
from silodp.plan.calibrate import TRAINING, Noise, Part, noise_of, noise_of_all, stream_shares
from silodp.plan.claim import printed_noise
from silodp.plan.parts import built, channel_of, parts_of, settled_facts, with_weights
from silodp.plan.plan import Plan, stages_of
from silodp.privacy import accountant
from silodp.registry import AUTO

GUESSES = 30  # of the step size, where the split of the budget and the step depend on each other


def make_plan(config: Config, facts: Facts) -> Plan:
    """Check, let the theorem choose, keep the budget, calibrate. `facts` may know the data and the parameters only."""
    config = resolved(config, facts)
    chosen = choose(config, settled_facts(config, facts))
    config = within_budget(with_options(config, chosen), facts)
    plan = replace(calibrated_plan(config, facts), chosen=chosen)
    refuse_uncounted(plan)
    return plan


def refuse_uncounted(plan: Plan) -> None:
    """Noise so little that it counts as none, or that hides no group: no certificate could tell an epsilon."""
    epsilon, unit = plan.config.privacy.epsilon, plan.config.privacy.unit
    calibrated = epsilon is not None and plan.config.privacy.calibration == "exact"
    hidden = lambda: all(math.isfinite(plan.epsilon(silo)) for silo in range(plan.facts.silos))
    if plan.private and unit != "record" and not calibrated and not hidden():
        raise ConfigError(
            f"privacy.unit = {unit!r}: no epsilon holds for so many records together, with noise that is given or a "
            "paper's; let privacy.epsilon set it (calibration = 'exact'), or take unit = 'record'"
        )
    if epsilon is None:
        return
    little = any(spent.releases.count and spent.multiplier < accountant.NO_NOISE for spent in plan.spent(0))
    if little and math.isinf(plan.epsilon(0)):
        raise ConfigError(
            f"privacy.epsilon = {epsilon:g}: its noise, less than {accountant.NO_NOISE:g} of the sensitivity, counts "
            "as none; take less, or leave it out for a run without privacy"
        )


def resolved(config: Config, facts: Facts) -> Config:
    """The config without `auto`, with the number that its delta is and with the weights of silos."""
    config = with_delta(config, facts)
    if config.algorithm.name == AUTO:
        config = chosen_config(config, facts, noise_among(facts))
    return with_weights(config)


def noise_among(facts: Facts) -> Callable[[Config], float]:
    """Of a config: the std of the noise on the average gradient, in clip norms."""
    known = facts if facts.parameters else replace(facts, parameters=auto.features_of(facts) + 1)
    return lambda trial: calibrated_plan(with_weights(trial), known).std_of_average("value")


def reasons(config: Config, facts: Facts) -> list[str]:
    """Why `auto` chooses what it chooses; nothing where the config leaves nothing to it."""
    config = with_delta(config, facts)
    return explained(config, facts, noise_among(facts)) if config.algorithm.name == AUTO else []


def knots_that_pay(config: Config, facts: Facts, features: Callable[[int], int]) -> int:
    """Of broken lines in the place of numbers; 0: none. features(knots): how many features they would make."""
    return auto.knots_that_pay(with_delta(config, facts), facts, features, noise_among(facts))


def with_delta(config: Config, facts: Facts) -> Config:
    """A delta that follows from the sizes, as a number: no silo's is above its own 1/n^2."""
    if config.privacy.delta_rule is None:
        return config
    privacy = config.privacy.model_copy(update={"delta": max(facts.sizes) ** -2.0, "delta_rule": None})
    return config.model_copy(update={"privacy": privacy})


def calibrated_plan(config: Config, facts: Facts) -> Plan:
    """The plan of a config that leaves nothing to choose."""
    facts = settled_facts(config, facts)
    entry, channel, algorithm = built(config, facts)
    parts = parts_of(config, facts, algorithm)
    noise: list[Noise] = [{} for _ in parts]
    if config.privacy.private:
        training = next(part for part in parts if part.name == TRAINING)
        if not any(stream.count for own in training.declared.streams for stream in own):
            raise ConfigError(f"algorithm.name = {config.algorithm.name!r}: asks for records but declares no release")
        noise = calibrated_noise(config, facts, entry, channel, parts)
    return Plan(config, facts, entry, algorithm, channel, stages_of(parts, noise))


def calibrated_noise(
    config: Config, facts: Facts, entry: Entry, channel: Channel, parts: Sequence[Part]
) -> list[Noise]:
    """The noise; what the accountant refuses is the config's privacy section's mistake."""
    try:
        if config.privacy.calibration != "paper":
            return noise_of_all(parts, channel, config.privacy)
        if len(parts) > 1:
            other = next(part.name for part in parts if part.name != TRAINING)
            raise ConfigError(f"{other}: no paper prints its noise; leave calibration = 'paper' out")
        if not (facts.alike or channel.weighs_by_size):
            raise Inadmissible(("papers weigh silos alike, whatever their sizes; leave algorithm.weights out",))
        return noise_of(parts, channel, config.privacy, printed_noise(config, facts, entry))
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("privacy") else f"privacy.{text}") from None


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


def paper_bounds(config: Config, facts: Facts) -> dict[str, Any]:
    """The papers' bounds for the setting of a config, and that setting."""
    config = with_delta(config, facts)
    entry = find(config.algorithm.name)
    unasked = lambda stream, options: (0, 1.0)
    settled, channel = settled_facts(config, facts), channel_of(config, entry)
    choice = Choice(config.algorithm, config.privacy, settled, channel, unasked)
    return {"setting": setting(choice), "bounds": bounds(choice)}


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
