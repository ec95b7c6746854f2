"""Private selection: the best of a random number of runs, at a price that is known beforehand.

The number of trials is drawn from a geometric law with the mean `sweep.private_trials`, every trial takes a setting of
the grid at random and noise of its own, and only the best one is kept (Papernot, Steinke 2022; see
silodp.privacy.selection). Trials are judged by what they release about held-out records (`[evaluate]`, columns
held_out_...), or on test records that are public (columns test_...).

Formal guarantee: a trial releases its model and its score. A record that is trained on is in the model's releases
only, a held-out one in the score's only. The price is the larger of what the theorem says of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from silodp.config import Config
from silodp.data import FederatedData
from silodp.digits import known
from silodp.errors import ConfigError
from silodp.models import Model
from silodp.plan.certificate import SIMULATED, as_text, certificate
from silodp.plan.identity import identity
from silodp.plan.objects import as_config
from silodp.plan.plan import Plan
from silodp.privacy.accountant import gdp
from silodp.privacy.selection import Trials, mixed_selection_epsilon
from silodp.randomness import seeded
from silodp.report.files import write_report
from silodp.run.directory import RunDirectory, model_bytes, versions
from silodp.run.prepare import Ground, plan_on
from silodp.run.result import summary_of
from silodp.run.runner import context_of, maps_of
from silodp.run.sweep import HELD_OUT, Outcome, Value, best_of, grid_of, run_points, with_values

LARGEST_SEED = 2**31 - 1
JUDGED = ("test_", HELD_OUT)  # begin columns that a trial may be judged by
RELEASED = (*JUDGED, "round", "bits_")  # and those that nobody's records are in


@dataclass
class Chosen:
    """The winner, by which column, and the epsilon of having chosen it: of the silo that pays most, and of each."""

    outcome: Outcome
    column: str
    epsilon: float
    delta: float
    mean_trials: float
    certificate: dict[str, Any]

    @property
    def params(self) -> Any:
        return self.outcome.prepared.ground.objective.unravel(jnp.asarray(self.outcome.x))

    @property
    def released(self) -> dict[str, float]:
        """What was measured of the winner without looking at private records."""
        return {name: value for name, value in self.outcome.history[-1].items() if name.startswith(JUDGED)}


def select_privately(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
) -> Chosen:
    """Draw the number of trials, run them, keep the best. Losing trials are neither returned nor saved.

    No progress is shown: it would tell how many trials there are.
    """
    base = as_config(config)
    check(base)
    trials = Trials(base.sweep.private_trials or 1.0)
    generator = np.random.default_rng([base.run.seed, 7])
    grid = grid_of(base)
    plans = plans_of(base, grid, data, model)
    prices = [price_of(plans, silo, trials) for silo in range(plans[0].facts.silos)]
    picks = generator.integers(len(grid), size=trials.draw(generator))
    # A seed of its own for each trial: two trials of one setting must not share their noise. Drawn, not counted: which
    # trial it was would tell how many there were.
    seeds = generator.choice(LARGEST_SEED, len(picks), replace=False)
    points = [grid[i] | {"run.seed": float(seed)} for i, seed in zip(picks, seeds, strict=True)]
    outcomes = run_points(base, points, data, model)
    best = best_of(outcomes, base.sweep.select)
    outcome = released_of(outcomes[best], plans[picks[best]])
    statement = certified(outcome, plans, prices, trials)
    price, delta = statement["selection"]["price"], plans[0].config.privacy.delta
    return Chosen(outcome, base.sweep.select, price, delta, trials.mean, statement)


def released_of(outcome: Outcome, plan: Plan) -> Outcome:
    """Of a winner what the price covers: the end of its history without private records, no seed of its own.

    plan: of its setting, by the seed that all trials are drawn from.
    """
    setting = replace(outcome.prepared.setting, key=seeded(plan.config.run.seed))
    last = {name: value for name, value in outcome.history[-1].items() if name.startswith(RELEASED)}
    values = {name: value for name, value in outcome.values.items() if name != "run.seed"}
    prepared = replace(outcome.prepared, plan=plan, setting=setting)
    return replace(outcome, prepared=prepared, values=values, history=[last])


def plans_of(base: Config, grid: list[dict[str, Value]], data: FederatedData | None, model: Model | None) -> list[Plan]:
    """Of every setting of the grid; nothing is asked of records."""
    configs = [with_values(base, point) for point in grid]
    ground = Ground.of(configs[0], data, model)
    return [plan_on(ground, config) for config in configs]


def price_of(plans: list[Plan], silo: int, trials: Trials, records: int = 1) -> float:
    """What choosing among the plans costs a silo's record; fixed before anything is run.

    records: that change at once, where all releases are Gaussian.
    """
    apart = zip(*(plan.apart(plan.spent(silo)) for plan in plans), strict=True)
    several = lambda spent: [replace(each, multiplier=each.multiplier / records) for each in spent]
    delta = plans[0].config.privacy.delta
    return max(mixed_selection_epsilon([several(spent) for spent in part], delta, trials) for part in apart)


def certified(outcome: Outcome, plans: list[Plan], prices: list[float], trials: Trials) -> dict[str, Any]:
    """The winner's certificate, with the price of having chosen it in the place of what one run costs."""
    plan, delta = outcome.prepared.plan, outcome.prepared.config.privacy.delta
    assert outcome.spent is not None
    made, dearest = identity(plan, model_of(outcome)), max(prices)
    tree = certificate(plan, outcome.spent, replace(context_of(outcome.prepared), chosen=dearest, made=made))
    for i, (silo, price) in enumerate(zip(tree["silos"], prices, strict=True)):
        gaussian = all(gdp(each.spent(i)) is not None for each in plans)
        groups = [
            {"records": k, "epsilon": known(price_of(plans, i, trials, k)), "delta": delta} for k in (2, 5) if gaussian
        ]
        silo |= {
            "epsilon_of_one_run": silo["epsilon"], "epsilon": price, "gdp_mu": None, "curve": [], "collusion": None,
            "several_records_of_one_person": groups,
        }  # fmt: skip
    return tree | {"selection": {"mean_trials": trials.mean, "price": dearest, "delta": delta}}


def model_of(outcome: Outcome) -> bytes:
    """The winner's model.safetensors."""
    params = outcome.prepared.ground.objective.unravel(jnp.asarray(outcome.x))
    return model_bytes(params, params, maps_of(outcome.prepared))


def check(config: Config) -> None:
    """Refuse what the theorem does not cover."""
    column = config.sweep.select
    if not config.privacy.private:
        raise ConfigError("sweep.private_trials: needs a private run; give privacy.epsilon")
    if config.privacy.unit != "record":  # a price is one record's
        raise ConfigError(
            f"sweep.private_trials: not with privacy.unit = {config.privacy.unit!r}; leave one of them out"
        )
    if column.startswith(HELD_OUT) and config.evaluate is None:
        raise ConfigError(f"sweep.select = {column!r}: nothing is held out; add [evaluate]")
    if not column.startswith(JUDGED):
        raise ConfigError(
            f"sweep.select = {column!r}: measured on private records; choose by a held-out column with [evaluate], "
            "e.g. held_out_accuracy, or by a test column, e.g. test_accuracy"
        )
    for key in config.sweep.grid:
        if key.startswith(("privacy.", "run.")):
            raise ConfigError(f"sweep.grid.{key!r}: every trial must cost the same; sweep algorithm keys only")


def judged(column: str) -> str:
    how = "what was released about held-out records" if column.startswith(HELD_OUT) else "public test records"
    return f"private: best of a random number of trials, judged on {how}"


def save_selection(config: Config, chosen: Chosen, data: str, out: Path | str | None) -> RunDirectory:
    """The winner's model, its certificate with the price, and what was released about it; nothing of the others."""
    directory = RunDirectory.create(out, config, f"selection-{config.algorithm.name}-{data}")
    prepared = chosen.outcome.prepared
    directory.write_json("certificate.json", chosen.certificate)
    directory.write_text("certificate.txt", as_text(chosen.certificate))
    directory.save_model(model_of(chosen.outcome))
    final = chosen.outcome.history[-1]
    summary = summary_of(prepared, chosen.certificate, final, {}, {}, chosen.outcome.held_out)
    directory.write_json("summary.json", summary | {"baselines": {}, "drawn_round": None})
    write_report(directory.path)
    directory.write_json(
        "sweep.json",
        {
            "selection": judged(chosen.column),
            "stamp": SIMULATED,
            "selected_by": chosen.column,
            "best": chosen.outcome.values,
            "final": chosen.released,
            "mean_trials": chosen.mean_trials,
            "epsilon_of_one_run": chosen.outcome.epsilon,
            "epsilon": chosen.epsilon,
            "delta": chosen.delta,
            "versions": versions(),
        },
    )
    return directory
