"""`silodp account`: the noise for a target, or the epsilon of given noise, before there is any data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from silodp.algorithms import find
from silodp.config import Config, DataConfig
from silodp.data.types import FederatedData
from silodp.errors import ConfigError, Inadmissible
from silodp.facts import Facts
from silodp.models import Model, model_of
from silodp.objective import parameter_count
from silodp.parse import parse_config
from silodp.plan.advice import warn_of_run
from silodp.plan.certificate import release_line
from silodp.plan.claim import claim_of
from silodp.plan.make import choose, make_plan, resolved, with_delta, with_options
from silodp.plan.objects import DataLike, Described, ModelLike, Objects, asked, facts_of
from silodp.plan.parts import settled_facts
from silodp.plan.plan import Plan
from silodp.plots import curve_figure
from silodp.privacy import accountant


def account(
    config: Described | None = None,
    *,
    data: DataLike | None = None,
    model: ModelLike | None = None,
    **objects: Unpack[Objects],
) -> dict[str, Any]:
    """The noise for a target, or the epsilon of given noise: of every silo, and by the paper's own calibration.

    Args:
        config, algorithm, channel, epsilon, ...: as for `train`; numbers that cost no privacy may be left out.
        data: a `FederatedData`, of which only the sizes are used, or e.g. {"silos": 4, "records": 1000}.
        model: as for `train`; what passes a shuffler depends on the number of parameters.

    Returns:
        What `silodp account --json` prints: for each silo its epsilon and, by stream, releases and noise.

    Example:
        >>> import silodp
        >>> told = silodp.account(
        ...     algorithm=silodp.algorithms.DPGD(rounds=50), epsilon=1.0, data={"silos": 4, "records": 1000}
        ... )
        >>> [(row["stream"], row["count"], round(row["multiplier"], 2)) for row in told["silos"][0]["releases"]]
        [('value', 50, 26.38)]
    """
    config = with_known(*asked(config, data, model, objects))
    plan = planned(config)
    config = with_delta(config, plan.facts)
    warn_of_run(plan.config, plan.facts.sizes)
    return {
        "algorithm": config.algorithm.name,
        "trust": config.privacy.trust,
        "calibration": config.privacy.calibration,
        "delta": config.privacy.delta,
        "chosen_by_theory": plan.chosen,
        "silos": [silo_row(plan, i) for i in range(plan.facts.silos)],
        "paper": paper_row(config),
    } | no_noise_note(plan)


def with_known(config: Config, data: FederatedData | None, model: Model | None) -> Config:
    """The config with the sizes of data, and the parameters of a model, that are given as objects."""
    tree = config.model_dump(exclude_unset=True)
    if data is not None:
        tree["data"] = {"sizes": list(data.sizes)}
        model = model or model_of(config.model, facts_of(data))
    if model is not None:
        tree["model"] = {"kind": config.model.kind, "parameters": parameter_count(model)}
    return parse_config(tree) if data is not None or model is not None else config


def no_noise_note(plan: Plan) -> dict[str, str]:
    """A target so loose that the releases meet it as they are is worth a word."""
    if any(max(multipliers) > 0 for multipliers in plan.multipliers.values()):
        return {}
    return {"note": "no noise is needed: a record is in a release with less probability than delta"}


def planned(config: Config) -> Plan:
    if not config.privacy.private:
        raise ConfigError("privacy.epsilon is missing: give a target (epsilon or gdp), or privacy.multipliers")
    facts = known_facts(config)
    config = resolved(config, facts)
    chosen = choose(config, settled_facts(config, facts))
    plan = make_plan(with_placeholders(with_options(config, chosen)), facts)
    return replace(plan, chosen=chosen)


def known_facts(config: Config) -> Facts:
    """What a config alone tells."""
    sizes = sizes_of(config)
    return Facts.of_sizes(sizes, parameters=config.model.parameters)


def sizes_of(config: Config) -> tuple[int, ...]:
    """Sizes from the config; from the data only when the config names some and gives no sizes."""
    data = config.data
    if data.sizes is not None or (data.silos is not None and data.records is not None):
        return given_sizes(data)
    if data.source is None:
        raise ConfigError("data.silos and data.records are missing: give both, or data.sizes")
    from silodp.data.load import read_data  # here: sizes are mostly given

    return read_data(data).sizes


def given_sizes(data: DataConfig) -> tuple[int, ...]:
    if data.sizes is not None and data.records is not None:
        raise ConfigError(f"data.records = {data.records}: data.sizes says it already; leave one of them out")
    sizes = tuple(data.sizes) if data.sizes is not None else ((data.records or 0),) * (data.silos or 0)
    if not sizes or min(sizes) < 2:
        raise ConfigError(f"data.sizes = {list(sizes)}: every silo needs at least 2 records")
    return sizes


def with_placeholders(config: Config) -> Config:
    """Numbers that do not matter here need not be given; those that a guess of the best split rests on do."""
    if config.privacy.split == "optimal":
        return config
    options = find(config.algorithm.name).with_placeholders(config.algorithm)
    tree = config.model_dump(exclude_unset=True)
    return parse_config(tree | {"algorithm": options.model_dump(exclude_unset=True)})


def silo_row(plan: Plan, silo: int) -> dict[str, Any]:
    return {
        "silo": plan.facts.names[silo],
        "records": plan.facts.sizes[silo],
        "epsilon": plan.epsilon(silo),
        "releases": release_rows(plan, silo),
    }


def release_rows(plan: Plan, silo: int) -> list[dict[str, Any]]:
    return [release_line(s, float(plan.std_over_clip(s.releases.stream)[silo])) for s in plan.spent(silo)]


def paper_row(config: Config) -> dict[str, Any] | None:
    """What the paper's formula adds and really gives, for the silo it protects least. Papers claim it of a record."""
    claim = claim_of(config)
    config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"unit": "record"})})
    if claim is None:
        return None
    try:
        plan = planned(as_printed(config))
    except Inadmissible as none:
        return {
            "formula": claim.formula,
            "claimed_epsilon": claim.epsilon,
            "true_epsilon": None,
            "admissible": False,
            "reasons": list(none.reasons),
        }
    epsilons = [plan.epsilon(i) for i in range(plan.facts.silos)]
    worst = int(np.argmax(epsilons))
    return claim.verdict(epsilons[worst]) | {"admissible": True, "releases": release_rows(plan, worst)}


def as_printed(config: Config) -> Config:
    """The run that the paper calibrates: with its own weights, where none are given."""
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"calibration": "paper"})})


def draw_curves(config: Config, path: Path) -> None:
    """delta(epsilon) of the worst silo, exact and as the paper calibrates."""
    lines = {}
    plans = {config.privacy.calibration: planned(config)}
    if claim_of(config) is not None:
        with suppress(Inadmissible):
            plans["paper"] = planned(as_printed(config))
    for label, plan in plans.items():
        worst = int(np.argmax([plan.epsilon(i) for i in range(plan.facts.silos)]))
        epsilons = np.linspace(0.0, 2 * plan.epsilon(worst), 41)[1:]
        lines[label] = (epsilons.tolist(), accountant.curve(plan.spent(worst), epsilons.tolist()).tolist())
    title = f"{config.algorithm.name}, trust model {config.privacy.trust}: the whole guarantee"
    curve_figure(path, lines, "epsilon", "delta (probability)", title=title, log_y=True)
