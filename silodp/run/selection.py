"""Private selection: the best of a random number of runs, at a price that is known beforehand.

The number of trials is drawn from a geometric law with the mean `sweep.private_trials`, every trial takes a setting of
the grid at random and noise of its own, and only the best one is kept (Papernot, Steinke 2022; see
silodp.privacy.selection). The trials are judged on the test records, which must be public: a score on private records
would be a release too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from silodp.config import Config
from silodp.data import FederatedData
from silodp.errors import ConfigError
from silodp.models import Model
from silodp.plan.certificate import SIMULATED
from silodp.plan.objects import as_config
from silodp.privacy.selection import Trials, mixed_selection_epsilon
from silodp.run.directory import RunDirectory, versions
from silodp.run.progress import Progress, silent
from silodp.run.runner import Ground, prepared_on
from silodp.run.sweep import Outcome, Value, best_of, grid_of, run_points, with_values


@dataclass
class Chosen:
    """The winner, by which column, and the epsilon of having chosen it."""

    outcome: Outcome
    column: str
    epsilon: float
    delta: float
    mean_trials: float


def select_privately(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
    progress: Progress = silent,
) -> Chosen:
    """Draw the number of trials, run them, keep the best. Losing trials are neither returned nor saved."""
    base = as_config(config)
    check(base)
    trials = Trials(base.sweep.private_trials or 1.0)
    generator = np.random.default_rng([base.run.seed, 7])
    grid = grid_of(base)
    price = price_of(base, grid, trials, data, model)
    picks = generator.integers(len(grid), size=trials.draw(generator))
    # A seed of its own for each trial: two trials of one setting must not share their noise.
    points = [grid[i] | {"run.seed": float(base.run.seed + 1 + k)} for k, i in enumerate(picks)]
    outcomes = run_points(base, points, data, model, progress)
    outcome = outcomes[best_of(outcomes, base.sweep.select)]
    # Which trial it was would tell how many there were.
    outcome.values.pop("run.seed")
    return Chosen(outcome, base.sweep.select, price, base.privacy.delta, trials.mean)


def price_of(
    base: Config, grid: list[dict[str, Value]], trials: Trials, data: FederatedData | None, model: Model | None
) -> float:
    """What choosing among the grid costs the silo that pays most; fixed before anything is run."""
    ground = Ground.of(with_values(base, grid[0]), data, model)
    plans = [prepared_on(ground, with_values(base, point)).plan for point in grid]
    each = [[plan.spent(silo) for plan in plans] for silo in range(ground.facts.silos)]
    return max(mixed_selection_epsilon(own, base.privacy.delta, trials) for own in each)


def check(config: Config) -> None:
    """Refuse what the theorem does not cover."""
    if not config.privacy.private:
        raise ConfigError("sweep.private_trials: needs a private run; give privacy.epsilon")
    if not config.sweep.select.startswith("test_"):
        raise ConfigError(
            f"sweep.select = {config.sweep.select!r}: measured on private records; "
            "choose by a test column, e.g. test_accuracy"
        )
    for key in config.sweep.grid:
        if key.startswith(("privacy.", "run.")):
            raise ConfigError(f"sweep.grid.{key!r}: every trial must cost the same; sweep algorithm keys only")


def save_selection(config: Config, chosen: Chosen, data: str, out: Path | str | None) -> RunDirectory:
    directory = RunDirectory.create(out, config, f"selection-{config.algorithm.name}-{data}")
    directory.write_json(
        "sweep.json",
        {
            "selection": "private: best of a random number of trials, judged on public test records",
            "stamp": SIMULATED,
            "selected_by": chosen.column,
            "best": chosen.outcome.values,
            "final": {name: value for name, value in chosen.outcome.history[-1].items() if name.startswith("test_")},
            "mean_trials": chosen.mean_trials,
            "epsilon_of_one_run": chosen.outcome.epsilon,
            "epsilon": chosen.epsilon,
            "delta": chosen.delta,
            "versions": versions(),
        },
    )
    return directory
