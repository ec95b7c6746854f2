"""`silodp plan` from numbers alone: expected error, and noise beside signal, against epsilon, silos and trust.

    nu = sqrt(parameters) * (std of the noise on the average gradient, in clip norms, were it the only release)

At 1 the noise is as long as the longest gradient can be. `auto` chooses its clip norms by the same number, for one
class.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from silodp import registry
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan import made_up
from silodp.plan.auto import SUMMED
from silodp.plan.made_up import Task, Trial
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
OTHER_SILOS = (2, 10, 50)
AS_LONG = "noise as long as the longest gradient"
ERROR = {
    "logistic": "expected error (share of wrong classes)",
    "linear": "expected error (unexplained share of variance)",
}


def described(
    records: int, silos: int, features: int, epsilon: float, delta: float | None, trust: str, model: str
) -> Config:
    """The config of a task that nobody has data of yet: silos of the same size, everything else left to `auto`."""
    if not 1 <= silos <= records // 2:
        raise ConfigError(f"--silos {silos}: every silo needs at least 2 of the {records} records")
    return parse_config(
        {
            "data": {"sizes": even(records, silos)},
            "model": {"kind": model, "parameters": features + 1},
            "privacy": {"epsilon": epsilon, "trust": trust} | ({} if delta is None else {"delta": delta}),
            "algorithm": {"name": registry.AUTO},
        }
    )


def even(records: int, silos: int) -> list[int]:
    return [records // silos + (i < records % silos) for i in range(silos)]


def lines_of(sizes: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A line for each trust model with the silos there are, and for other numbers of silos."""
    own = len(sizes)
    lines = {f"{trust}, {own} silos": (trust, sizes) for trust in registry.names("channel") if has_one_noise(trust)}
    others = [n for n in OTHER_SILOS if n != own and sum(sizes) // n >= 2]
    return lines | {f"untrusted, {n} silos": ("untrusted", tuple(even(sum(sizes), n))) for n in others}


def landscape(config: Config, sizes: tuple[int, ...], parameters: int) -> dict[str, Any]:
    """nu by epsilon, for every line."""
    lines = lines_of(sizes)
    found = {name: [nu(config, *line, parameters, epsilon) for epsilon in EPSILONS] for name, line in lines.items()}
    return {"epsilons": list(EPSILONS), "nu": {name: row for name, row in found.items() if None not in row}}


def expected_errors(config: Config, task: Task, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What `auto` reaches on a made-up task by epsilon, for every line: mean and deviation over draws of the noise."""
    trial, lines, takes = Trial(task), {}, {}
    for name, (trust, own) in lines_of(sizes).items():
        plans = [auto_plan(config, trust, task.facts(own), epsilon) for epsilon in EPSILONS]
        if None in plans:
            continue
        errors = [trial.errors(plan) for plan in plans if plan is not None]
        lines[name] = [{"mean": float(np.mean(each)), "deviation": float(np.std(each, ddof=1))} for each in errors]
        takes[name] = [taken(plan) for plan in plans if plan is not None]
    free = auto_plan(config, config.privacy.trust, task.facts(sizes), None)
    assert free is not None
    label, chance = task.chance
    levels = {"without privacy": trial.errors(free)[0], label: chance}
    told = {"kind": task.kind, "epsilons": list(EPSILONS), "draws": made_up.DRAWS}
    return told | {"lines": lines, "levels": levels, "takes": takes}


def auto_plan(config: Config, trust: str, facts: Facts, epsilon: float | None) -> Plan | None:
    private = {} if epsilon is None else {"epsilon": epsilon, "delta": config.privacy.asked_delta}
    tree = {"model": {"kind": config.model.kind}, "privacy": {"trust": trust, **private}}
    try:
        return make_plan(parse_config(tree | {"algorithm": {"name": registry.AUTO}}), facts)
    except ConfigError:
        return None


def taken(plan: Plan) -> str:
    """The algorithm that `auto` takes, and what it does to the features first."""
    whiten = plan.config.whiten
    kind = "" if whiten is None else f" on features scaled by a {getattr(whiten, 'moment', 'full')} second moment"
    return plan.config.algorithm.name + kind


def has_one_noise(trust: str) -> bool:
    """What hides record by record has no one noise to show, unless it is asked for sums."""
    return trust in SUMMED or getattr(registry.find("channel", trust), "gaussian", True)


def nu(config: Config, trust: str, sizes: tuple[int, ...], parameters: int, epsilon: float) -> float | None:
    """None where the trust model has no such plan."""
    options = {"name": registry.AUTO_IS, "rounds": 1, "clip": 1.0, "step_size": 1.0}
    tree = {
        "privacy": {"epsilon": epsilon, "delta": config.privacy.asked_delta, "trust": trust},
        "algorithm": options | SUMMED.get(trust, {}),
    }
    facts = Facts.of_sizes(sizes, parameters=parameters)
    try:
        return math.sqrt(parameters) * make_plan(parse_config(tree), facts).std_of_average("value")
    except ConfigError:
        return None


def draw(found: dict[str, Any], records: int, features: int, path: Path) -> None:
    from silodp.plots import curve_figure

    rows, at = found["lines"], found["epsilons"]
    curve_figure(
        path, {name: (at, [each["mean"] for each in row]) for name, row in rows.items()},
        "epsilon of every record (logarithmic)", ERROR[found["kind"]],
        title=f"Made-up task, {records:,} records, {features} features, {found['draws']} draws of the noise",
        errors={name: [each["deviation"] for each in row] for name, row in rows.items()},
        levels=found["levels"], log_x=True, markers=True,
    )  # fmt: skip


def draw_noise(found: dict[str, Any], records: int, parameters: int, path: Path) -> None:
    from silodp.plots import curve_figure

    lines = {name: (found["epsilons"], row) for name, row in found["nu"].items()}
    curve_figure(
        path, lines, "epsilon of every record (logarithmic)", "length of the noise / longest gradient",
        title=f"{records:,} records, {parameters} parameters: whole budget in one release", levels={AS_LONG: 1.0},
        log_x=True, log_y=True, markers=True,
    )  # fmt: skip
