"""A grid of settings, run together: settings that differ in traced numbers share one compiled program.

Settings that differ in something that shapes the program (rounds, batch, the algorithm itself) are grouped, one
program a group.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from silodp.config import Config
from silodp.data import FederatedData, read_data
from silodp.errors import ConfigError
from silodp.models import Model
from silodp.parse import parse_config
from silodp.plan.advice import warn_of_run
from silodp.plan.certificate import SIMULATED
from silodp.plan.objects import DataLike, Described, ModelLike, Objects, asked
from silodp.privacy.kinds import Spent
from silodp.releases import Account
from silodp.report.files import write_report
from silodp.run.baselines import baselines
from silodp.run.directory import RunDirectory, versions
from silodp.run.evaluation import evaluated
from silodp.run.group import Group, Ran, part_size
from silodp.run.measure import Metric
from silodp.run.prepare import Ground, Prepared, prepared_on
from silodp.run.progress import Progress, silent
from silodp.run.runner import source_name
from silodp.stages.figures import held_out_figures

if TYPE_CHECKING:
    import pandas as pd

    from silodp.run.selection import Chosen

SWEPT = ("algorithm", "privacy", "run")
HELD_OUT = "held_out_"  # begins a column of what is released about held-out records
Value = float | bool | str


@dataclass
class Outcome:
    """One setting of the grid and its history."""

    prepared: Prepared = field(repr=False)  # with all records
    values: dict[str, Value]
    history: list[dict[str, float]]
    epsilon: float | None
    x: np.ndarray
    spent: list[list[Spent]] | None = None
    held_out: dict[str, Any] | None = None  # what was released about held-out records


class Sweep(list[Outcome]):
    """The outcomes of a sweep, in the order of its grid; of a private selection the winner alone.

    selection: of a private selection its price, its certificate and its parameters.
    """

    selection: Chosen | None = None

    def to_pandas(self, *, histories: bool = False) -> pd.DataFrame:
        """A row for each setting: its values, its epsilon, its last measurements; or all of them, row by row."""
        import pandas as pd

        rows = [(outcome, row) for outcome in self for row in (outcome.history if histories else outcome.history[-1:])]
        return pd.DataFrame([{**outcome.values, "epsilon": outcome.epsilon, **row} for outcome, row in rows])


def grid_of(config: Config) -> list[dict[str, Value]]:
    """Every combination of the grid's values, by key."""
    grid = config.sweep.grid
    if not grid:
        raise ConfigError('sweep.grid is empty: give e.g. grid = {"algorithm.step_size" = [0.1, 1.0]}')
    for key, values in grid.items():
        section, _, name = key.partition(".")
        if section not in SWEPT or not name:
            raise ConfigError(f"sweep.grid.{key!r}: only {', '.join(SWEPT)} keys can be swept, as section.key")
        if not values:
            raise ConfigError(f"sweep.grid.{key!r} = []: give at least one value")
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    tree = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        whole = isinstance(value, float) and value.is_integer() and is_integer_field(section, name)
        tree.setdefault(section, {})[name] = int(value) if whole else value
    return parse_config(tree)


def is_integer_field(section: str, name: str) -> bool:
    model = Config.model_fields[section].annotation
    field = model.model_fields.get(name) if model is not None else None  # type: ignore[union-attr]
    return field is not None and "int" in str(field.annotation)


def sweep(
    config: Described | None = None,
    *,
    data: DataLike | None = None,
    model: ModelLike | None = None,
    progress: Progress = silent,
    metrics: Mapping[str, Metric] | None = None,
    **objects: Unpack[Objects],
) -> Sweep:
    """Run a grid of settings together. Choosing the best by looking at private records is not private.

    Args:
        config, data, model, progress, metrics: as for `train`.
        grid: the values to combine, by section.key (or `sweep.grid` in the config).
        private_trials: mean number of trials of a private selection by `select`, a held-out or test column: the best
            of a random number of trials is all that is returned, with its price in `selection`.
        algorithm, channel, epsilon, ...: as for `train`.

    Returns:
        An `Outcome` for each setting, in the order of the grid: its values, history, epsilon and parameters.
        The list has `to_pandas()`.

    Example:
        >>> import silodp
        >>> outcomes = silodp.sweep(
        ...     algorithm=silodp.algorithms.DPGD(rounds=3, step_size=0.1, clip=1.0),
        ...     epsilon=3.0,
        ...     grid={"algorithm.step_size": [0.1, 1.0]},
        ...     data={"source": "wbcd", "silos": 3, "preprocess": ["standardise"]},
        ... )
        >>> [outcome.values for outcome in outcomes]
        [{'algorithm.step_size': 0.1}, {'algorithm.step_size': 1.0}]
    """
    base, loaded, made = asked(config, data, model, objects)
    loaded = read_data(base.data) if loaded is None else loaded
    if base.sweep.private_trials is not None:
        if metrics:
            raise ConfigError("metrics: a private selection shows what it releases, and nothing else; leave them out")
        chosen = selected(base, loaded, made)
        found = Sweep([chosen.outcome])
        found.selection = chosen
        return found
    warn_of_run(base, loaded.sizes, loaded)
    return Sweep(run_points(base, grid_of(base), loaded, made, progress, metrics))


def selected(base: Config, data: FederatedData, model: Model | None = None) -> Chosen:
    """The winner of a private selection."""
    from silodp.run.selection import select_privately

    warn_of_run(base, data.sizes, data)
    return select_privately(base, data=data, model=model)


def run_points(
    base: Config,
    points: Sequence[Mapping[str, Value]],
    data: FederatedData | None = None,
    model: Model | None = None,
    progress: Progress = silent,
    metrics: Mapping[str, Metric] | None = None,
) -> list[Outcome]:
    """Run the base config with each point's values."""
    configs = [with_values(base, point) for point in points]
    for config in configs:
        check_simulated(config)
    outcomes = run_configs(configs, data, model, progress, metrics=metrics)
    return [dataclasses.replace(outcome, values=dict(point)) for outcome, point in zip(outcomes, points, strict=True)]


def check_simulated(config: Config) -> None:
    """Refuse what a sweep would not do."""
    if config.run.mode != "simulation":
        raise ConfigError(f"run.mode = {config.run.mode!r}: a sweep is a simulation; leave it out")
    if config.run.trajectory:
        raise ConfigError("run.trajectory = true: a sweep keeps no trajectories; train the setting of interest alone")


def run_configs(
    configs: Sequence[Config],
    data: FederatedData | None = None,
    model: Model | None = None,
    progress: Progress = silent,
    *,
    metrics: Mapping[str, Metric] | None = None,
    together: int | None = None,
    stop: int | None = None,
) -> list[Outcome]:
    """Run configs of the same data and model; every run's releases are settled against its plan.

    together: most settings that share a program (memory grows with it). stop: end every run after so many rounds, with
    the noise of the whole; such a run is a look ahead and has no epsilon of its own.
    """
    ground = Ground.of(configs[0], data, model, metrics)
    members = [stopped(prepared_on(ground, config), stop) for config in configs]
    outcomes: dict[int, Outcome] = {}
    for group in grouped(members):
        size = part_size(len(group), together or len(group))
        ran = run_group([members[i] for i in group], progress, size)
        for i, (history, x, account) in zip(group, ran, strict=True):
            outcomes[i] = settled(members[i], history, x, account, whole=stop is None)
    return [outcomes[i] for i in range(len(configs))]


def settled(
    member: Prepared, history: list[dict[str, float]], x: np.ndarray, account: Account, *, whole: bool
) -> Outcome:
    if not whole:
        return Outcome(member, {}, history, None, x)
    table, account = evaluated(member, jnp.asarray(x), account)
    held_out = None if table is None else held_out_figures(member.plan, table)
    history[-1] |= {HELD_OUT + name: told["value"] for name, told in overall(held_out).items()}
    if not member.plan.private:
        return Outcome(member, {}, history, None, x, held_out=held_out)
    spent = member.settled(account)
    alike = {(tuple(own), size): i for i, (own, size) in enumerate(zip(spent, member.plan.facts.sizes, strict=True))}
    worst = max(member.plan.cost(i, own) for (own, _), i in alike.items())
    return Outcome(member, {}, history, worst, x, spent, held_out)


def overall(held_out: dict[str, Any] | None) -> dict[str, Any]:
    return {name: told for name, told in (held_out or {}).items() if isinstance(told, dict)}


def stopped(member: Prepared, stop: int | None) -> Prepared:
    if stop is None or stop >= member.problem.rounds:
        return member
    return dataclasses.replace(member, problem=dataclasses.replace(member.problem, rounds=stop))


def grouped(settings: Sequence[Prepared]) -> list[list[int]]:
    """Indices of settings that one program can run: same tree, same shapes of the program."""
    groups: dict[Any, list[int]] = {}
    for i, member in enumerate(settings):
        problem = member.problem
        key = (
            jax.tree.structure(member.setting),
            tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(member.setting)),
            problem.rounds,
            problem.every,
            problem.participation,
            problem.streams,
            problem.wanted,
            problem.average,
            member.plan.facts.weights,
            id(member.ground),  # a first stage gives every setting records of its own
        )
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def run_group(members: Sequence[Prepared], progress: Progress, size: int) -> list[Ran]:
    """Members of one program, stacked in parts of this size."""
    title = f"{members[0].config.algorithm.name}: sweep of {len(members)} settings"
    with progress(members[0].problem.rounds * len(members), 0, title) as bar:
        group = Group(members, size)
        check_measured(members[0].config.sweep.select, group.measured)
        return group.run(bar)


def check_measured(column: str, measured: Sequence[str]) -> None:
    if column not in measured and not column.startswith(HELD_OUT):  # these come at the end
        raise ConfigError(f"sweep.select = {column!r}: not measured; measured: {', '.join(measured)}")


class Last(Protocol):
    """A setting of a sweep with its history, whoever has run it."""

    values: dict[str, Value]
    epsilon: float | None
    history: list[dict[str, float]]


def best_of(outcomes: Sequence[Last], column: str) -> int:
    """The setting with the best last value of a column: largest for accuracy and the like, smallest otherwise."""
    if column not in outcomes[0].history[-1]:
        raise ConfigError(f"sweep.select = {column!r}: not measured; measured: {', '.join(outcomes[0].history[-1])}")
    last = np.array([outcome.history[-1][column] for outcome in outcomes])
    if not np.isfinite(last).any():
        raise ConfigError(f"sweep.select = {column!r}: every setting diverged; lower algorithm.step_size")
    return int(np.nanargmax(last)) if column.endswith(("accuracy", "auc", "r2")) else int(np.nanargmin(last))


def save_sweep(directory: RunDirectory, config: Config, outcomes: Sequence[Last], ground: Ground) -> None:
    """A table of results and every history."""
    chosen = best_of(outcomes, config.sweep.select)
    results = {
        "stamp": SIMULATED,
        "selected_by": config.sweep.select,
        "selection": "not private: selected on private data",
        "best": outcomes[chosen].values,
        "settings": [{"values": o.values, "epsilon": o.epsilon, "final": o.history[-1]} for o in outcomes],
        "baselines": baselines(ground.data, ground.objective.model.metric, without_privacy=True),
        "versions": versions(),
    }
    lines = [json.dumps({"values": o.values, "history": o.history}) + "\n" for o in outcomes]
    directory.write_text("histories.jsonl", "".join(lines))
    directory.write_json("sweep.json", results)  # last of what counts: a sweep that has it is complete
    write_report(directory.path)


__all__ = ["Outcome", "Sweep", "best_of", "save_sweep", "source_name", "sweep"]
