"""One fit in memory: a simulation of all silos on this machine, settled and certified, nothing written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp import registry
from silodp.front.predictor import PARAMS, WHITENING, Own, Predictor, predictor_of

if TYPE_CHECKING:
    from silodp.config import Config
    from silodp.data.types import FederatedData
    from silodp.models import Model
    from silodp.plan.plan import Plan
    from silodp.run.progress import Progress
    from silodp.run.runner import Prepared


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


def fitted(config: Config, data: FederatedData, model: Model | None, progress: Progress) -> Fitted:
    # Here, not above: a model that was loaded predicts without JAX.
    from silodp.plan.certificate import certificate
    from silodp.run.runner import context_of, prepare

    prepared = prepare(config, data, model)
    history, x, account = simulated(prepared, progress)
    statement = None
    if prepared.plan.private:
        statement = certificate(prepared.plan, prepared.settled(account), context_of(prepared))
    ground, section = prepared.ground, prepared.config.model.model_dump(mode="json", exclude_unset=True)
    params = ground.objective.unravel(x)
    own = model is not None or not registry.is_own("model", section["kind"])
    arrays = {} if own else arrays_of(prepared, params)
    predictor = Own(ground.model, params) if own else predicting(section, arrays, data)
    name = prepared.config.algorithm.name
    return Fitted(arrays, predictor, section, history, statement, fingerprint(prepared.plan), name)


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
    whitening = prepared.ground.whitening
    return arrays if whitening is None else arrays | {WHITENING: np.asarray(whitening.matrix)}


def predicting(section: Mapping[str, Any], arrays: Mapping[str, np.ndarray], data: FederatedData) -> Predictor:
    return predictor_of(section, arrays, data.input_shape[0], max(1, len(data.classes)))


def fingerprint(plan: Plan) -> str:
    """SHA-256 of the plan's JSON without its seed: from that, all noise could be found by trying."""
    tree = plan.to_json()
    tree["config"]["run"].pop("seed", None)
    tree["facts"].pop("seed", None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
