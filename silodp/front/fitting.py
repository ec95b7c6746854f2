"""One fit in memory: a simulation of all silos on this machine, settled and certified, nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from silodp import registry
from silodp.front.predictor import PARAMS, SCALING, Own, Predictor, predictor_of

if TYPE_CHECKING:
    from silodp.config import Config
    from silodp.data.types import FederatedData
    from silodp.models import Model
    from silodp.run.prepare import Prepared
    from silodp.run.progress import Progress


@dataclass(frozen=True)
class Fitted:
    """What is left of a fit: parameters (with the whitening map), how it went, and what it spent."""

    arrays: dict[str, np.ndarray]
    predictor: Predictor
    section: dict[str, Any]  # of the model
    history: list[dict[str, float]]
    certificate: dict[str, Any] | None
    fingerprint: str
    algorithm: str
    ranges: list[tuple[float, float]]  # centre and scale of columns that had no public range, in their order
    held_out: dict[str, Any] | None  # what was released about held-out records


def fitted(config: Config, data: FederatedData, model: Model | None, progress: Progress) -> Fitted:
    # Here, not above: a model that was loaded predicts without JAX.
    from silodp.plan.certificate import certificate
    from silodp.plan.identity import fingerprint, identity
    from silodp.run.evaluation import evaluated
    from silodp.run.prepare import prepare
    from silodp.run.runner import context_of
    from silodp.stages.figures import held_out_figures

    prepared = prepare(config, data, model)
    history, x, account = simulated(prepared, progress)
    table, account = evaluated(prepared, x, account)
    spent = prepared.settled(account) if prepared.plan.private else None
    held_out = None if table is None else held_out_figures(prepared.plan, table)
    ground, section = prepared.ground, prepared.config.model.model_dump(mode="json", exclude_unset=True)
    params = ground.objective.unravel(x)
    own = model is not None or not registry.is_own("model", section["kind"])
    arrays = {} if own else arrays_of(prepared, params)
    predictor = Own(ground.model, params) if own else predicting(section, arrays, data)
    statement = None
    if spent is not None:
        made = identity(prepared.plan, as_file(arrays_of(prepared, params)))
        statement = certificate(prepared.plan, spent, replace(context_of(prepared), made=made))
    name = prepared.config.algorithm.name
    ranges = ranges_of(prepared)
    return Fitted(arrays, predictor, section, history, statement, fingerprint(prepared.plan), name, ranges, held_out)


def simulated(prepared: Prepared, progress: Progress) -> tuple[list[dict[str, float]], Any, Any]:
    """History, parameters and what was counted."""
    from silodp.run.history import rows_of, with_totals
    from silodp.run.simulate import Chunk, begin, compile_run, simulate

    problem, setting = prepared.problem, prepared.setting
    carry, first = begin(problem, setting, sweep=False)
    rows = rows_of(first)
    with progress(problem.rounds, 0, f"{prepared.config.algorithm.name}, {prepared.plan.facts.silos} silos") as bar:

        def on_chunk(chunk: Chunk) -> None:
            rows.extend(rows_of(chunk.rows))
            bar(chunk.round, rows[-1])

        carry = simulate(problem, setting, carry, compile_run(problem, setting, carry, sweep=False), on_chunk)
    return with_totals(rows), carry.output, carry.ends.accounts


def arrays_of(prepared: Prepared, params: Any) -> dict[str, np.ndarray]:
    from silodp.run.directory import named_leaves

    arrays = {PARAMS + path.lstrip("/"): np.asarray(leaf) for path, leaf in named_leaves(params)}
    maps = {name: np.asarray(array) for made in prepared.ground.maps for name, array in made.arrays.items()}
    maps.pop(SCALING, None)  # the fitted schema has it
    return arrays | maps


def ranges_of(prepared: Prepared) -> list[tuple[float, float]]:
    asked = prepared.config.scale
    if asked is None:
        return []
    centre, scale, _ = prepared.ground.maps[0].arrays[SCALING]
    return [(float(centre[i]), float(scale[i])) for i in asked.columns or range(len(centre))]


def predicting(section: Mapping[str, Any], arrays: Mapping[str, np.ndarray], data: FederatedData) -> Predictor:
    return predictor_of(section, arrays, data.input_shape[0], max(1, len(data.classes)))


def as_file(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A bundle's model.safetensors."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})
