"""A step size by trial, as the papers of PSGM and DIFF2 find theirs. NOT PRIVATE: it looks at the loss on the records.

Start with a large step; look at the loss every `every` rounds; when it rises `patience` times, halve the step and start
again. The first step size that reaches the last round is taken. The two papers mean different things by rising:

    against = "previous"  PSGM, patience 3: above `tolerance` times the value before, that often in a row
    against = "minimum"   DIFF2, patience 5: above `tolerance` times the smallest so far; a new minimum starts anew

Both check every 20 rounds. Works for every algorithm, channel and model; all
trials share one compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from silodp.config import Config
from silodp.data import FederatedData
from silodp.errors import ConfigError
from silodp.models import Model
from silodp.plan.objects import as_config
from silodp.run.history import rows_of
from silodp.run.prepare import Ground, Prepared, prepared_on
from silodp.run.progress import Progress, Update, silent
from silodp.run.simulate import Compiled, begin, compile_run
from silodp.run.sweep import with_values

NOT_PRIVATE = "not private: selected on private data"
HALVINGS = 40


@dataclass
class Search:
    """The run with the step size found, and how it was found. Costs in the history are per row, not totals."""

    history: list[dict[str, float]]
    x: np.ndarray
    tried: list[float]
    selection: str = NOT_PRIVATE


def search_step_size(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
    start: float = 0.5,
    every: int = 20,
    patience: int = 3,
    tolerance: float = 1.05,
    against: Literal["previous", "minimum"] = "previous",
    progress: Progress = silent,
) -> tuple[float, Search]:
    """The largest of start, start/2, start/4, ... with which the loss does not keep rising."""
    base = as_config(config)
    trial = lambda step: with_values(base, {"algorithm.step_size": step, "run.every": every})
    ground = Ground.of(trial(start), data, model)
    compiled: dict[Any, Compiled] = {}
    tried: list[float] = []
    for halvings in range(HALVINGS):
        tried.append(start / 2**halvings)
        member = prepared_on(ground, trial(tried[-1]))
        with progress(member.problem.rounds, 0, f"step size {tried[-1]:g}, {NOT_PRIVATE}") as bar:
            run = attempt(member, compiled, partial(RISES[against], patience=patience, tolerance=tolerance), bar)
        if run is not None:
            return tried[-1], Search(*run, tried)
    raise ConfigError(f"search_step_size: the loss rises with every step size from {start:g} to {tried[-1]:g}")


def attempt(
    member: Prepared, programs: dict[Any, Compiled], rises: Callable[[Sequence[float]], bool], bar: Update
) -> tuple[list[dict[str, float]], np.ndarray] | None:
    """The run's history and last point; None as soon as its loss keeps rising."""
    problem, setting = member.problem, member.setting
    carry, first = begin(problem, setting, sweep=False)
    shape = jax.tree.structure(setting)  # the same for all step sizes, unless the noise is built into the program
    if shape not in programs:
        programs[shape] = compile_run(problem, setting, carry, sweep=False)
    history = rows_of(first)
    while history[-1]["round"] < problem.rounds:
        carry, rows = programs[shape].advance(problem, setting, carry, jnp.int32(1))
        history += rows_of({name: np.asarray(leaf)[:1] for name, leaf in rows.items()})
        if rises([row["objective"] for row in history]):
            return None
        bar(int(history[-1]["round"]), history[-1])
    return history, np.asarray(carry.output)


def keeps_rising(losses: Sequence[float], patience: int, tolerance: float) -> bool:
    """Whether each of the last `patience` losses exceeded `tolerance` times the one before, or one has overflowed."""
    recent = np.array(losses[-patience - 1 :])
    if not np.isfinite(recent).all():
        return True
    return recent.size > patience and bool(np.all(recent[1:] > tolerance * recent[:-1]))


def stays_above(losses: Sequence[float], patience: int, tolerance: float) -> bool:
    """Whether `patience` losses since the last minimum exceeded `tolerance` times it, or one has overflowed."""
    smallest, count = math.inf, 0
    for loss in losses:
        if not math.isfinite(loss):
            return True
        count = 0 if loss < smallest else count + (loss > tolerance * smallest)
        smallest = min(smallest, loss)
        if count >= patience:
            return True
    return False


RISES = {"previous": keeps_rising, "minimum": stays_above}
