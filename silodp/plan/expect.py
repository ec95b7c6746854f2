"""`silodp plan`: what will be run, how long its noise is beside its signal, and what other trust models would buy."""

from __future__ import annotations

import math
from typing import Any

from silodp import registry
from silodp.config import Config
from silodp.data import read_data
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.objective import parameter_count
from silodp.parse import parse_config
from silodp.plan.account import sizes_of
from silodp.plan.advice import warn_of_run
from silodp.plan.make import make_plan, reasons, resolved
from silodp.plan.objects import facts_of
from silodp.plan.parts import trained_model
from silodp.plan.plan import Plan

SHOWN = (
    "name", "rounds", "step_size", "clip", "average", "optimiser", "weights", "batch", "clip_difference", "restart",
)  # fmt: skip
WHITENING = ("moment", "share", "centre", "clip")


def expectations(config: Config, facts: Facts | None = None) -> dict[str, Any]:
    """From public facts alone; of data only sizes and shapes are looked at."""
    if not config.privacy.private:
        raise ConfigError("privacy.epsilon is missing: give a target; without noise there is nothing to expect")
    facts = facts or known_facts(config)
    plan = make_plan(config, facts)
    warn_of_run(plan.config, plan.facts.sizes)
    algorithm, whiten = plan.config.algorithm, plan.config.whiten
    return {
        "silos": plan.facts.silos,
        "records": sum(plan.facts.sizes),
        "parameters": plan.facts.parameters,
        "chosen": {key: getattr(algorithm, key) for key in SHOWN if getattr(algorithm, key) is not None},
        "why": reasons(config, facts),
        "whiten": None if whiten is None else {key: getattr(whiten, key) for key in WHITENING},
        "noise": noise_rows(plan),
        "trust": trust_rows(config, facts),
    }


def known_facts(config: Config) -> Facts:
    if config.data.source is None:
        sizes = sizes_of(config)
        return Facts.of_sizes(sizes, parameters=config.model.parameters)
    data = read_data(config.data)
    raw = facts_of(data)
    return facts_of(data, parameter_count(trained_model(resolved(config, raw), raw)))


def noise_rows(plan: Plan) -> list[dict[str, Any]]:
    """By stream: the noise of one release on the average of all silos, as a multiple of the clip norm."""
    streams = [stream for stream in plan.releases(0) if stream.count and not stream.local]
    return [
        {"stream": stream.name, "releases": stream.count, "length": length(plan, stream.name)}
        for stream in streams
        if plan.channel.accounted_as(stream) == stream.name
    ]


def length(plan: Plan, stream: str) -> float | None:
    size = plan.declared.dimension(stream)
    return None if size is None else math.sqrt(size) * plan.std_of_average(stream)


def trust_rows(config: Config, facts: Facts) -> list[dict[str, Any]]:
    """The noise under every trust model that the algorithm runs under, relative to the config's own."""
    noise = {trust: noise_under(config, facts, trust) for trust in registry.names("channel")}
    own = noise[config.privacy.trust]
    return [
        {"trust": trust, "noise": told, "relative": None if told is None or not own else told / own}
        for trust, told in noise.items()
    ]


def noise_under(config: Config, facts: Facts, trust: str) -> float | None:
    """Std of the last stream's noise on the average, in clip norms; None where there is no such plan."""
    tree = config.model_dump(exclude_unset=True)
    try:
        plan = make_plan(parse_config(tree | {"privacy": tree["privacy"] | {"trust": trust}}), facts)
    except ConfigError:
        return None
    rows = noise_rows(plan)
    return plan.std_of_average(rows[-1]["stream"]) if rows else None
