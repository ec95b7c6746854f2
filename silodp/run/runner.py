"""From a config to a finished run directory, with progress, checkpoints and resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from silodp.algorithms import find
from silodp.algorithms.options import prox_kind
from silodp.algorithms.theory import choose, with_options
from silodp.build import Assembled, Facts, assemble, initial_point, model_of, stacked
from silodp.channels import ShuffledServer
from silodp.config import Config, ConfigError, load_config, parse_config
from silodp.core import Account
from silodp.data import FederatedData, load_data
from silodp.models import Model
from silodp.objective import parameter_count
from silodp.planning import claim_of, plan_of, within_budget
from silodp.plots import history_figure
from silodp.privacy.certificate import SIMULATED, Context, as_text, certificate, settle
from silodp.privacy.plan import Plan
from silodp.run.directory import RunDirectory, versions
from silodp.run.measure import measure
from silodp.run.messages import MessageFederation, SiloProcess, set_up
from silodp.run.progress import Progress, silent
from silodp.run.shuffling import ShufflerProcess, agreed_terms
from silodp.run.simulate import (
    Chunk,
    Problem,
    Setting,
    begin,
    compile_run,
    drawn_round,
    simulate,
)

HISTORY_ROWS = 100  # by default


@dataclass
class Prepared:
    """Everything checked and built, nothing written yet."""

    config: Config
    data: FederatedData
    parts: Assembled
    plan: Plan | None
    problem: Problem
    setting: Setting
    chosen: dict[str, Any]  # options that the config leaves to the theorem

    @property
    def streams(self) -> tuple[str, ...]:
        return self.problem.streams


@dataclass
class Run:
    """A finished run: its files, its history, and the trained parameters."""

    directory: Path
    config: Config
    history: list[dict[str, float]]
    params: PyTree
    drawn: PyTree
    summary: dict[str, Any]
    model: Model

    def predict(self, features: Any) -> jax.Array:
        return self.model.predict(self.params, jnp.asarray(features))


def read_data(config: Config) -> FederatedData:
    options = config.data
    if options.source is None:
        raise ConfigError("data.source is missing: name a dataset or a file, or pass data to silodp.run")
    given = options.model_dump(exclude={"source", "silos", "partition"}, exclude_none=True)
    try:
        return load_data(options.source, options.silos, options.partition, **given)
    except (ValueError, OSError) as error:
        raise ConfigError(f"data: {error}") from None


def prepare(config: Config, data: FederatedData | None = None, model: Model | None = None) -> Prepared:
    """Load, check, calibrate and build. Every mistake in the config is reported from here."""
    data = data if data is not None else read_data(config)
    facts = Facts.of(data)
    silos = stacked(data, config.algorithm.weights)
    model = model or model_of(config.model, facts)
    chosen = choose(config, facts.sizes, parameter_count(model))
    config = within_budget(with_options(config, chosen), facts.sizes, facts.names, parameter_count(model))
    plan = plan_of(config, facts.sizes, facts.names, parameter_count(model))
    parts = assemble(config, facts, {} if plan is None else plan.multipliers, model)
    problem = Problem(
        objective=parts.objective,
        silos=silos,
        test=None if data.test is None else (jnp.asarray(data.test.features), jnp.asarray(data.test.targets)),
        rounds=config.algorithm.performed,
        every=config.run.every or max(1, config.algorithm.performed // HISTORY_ROWS),
        streams=tuple(stream.name for stream in parts.releases(0)),
        participation=config.algorithm.participation,
    )
    return Prepared(config, data, parts, plan, problem, setting_of(parts, config.run.seed), chosen)


def setting_of(parts: Assembled, seed: int) -> Setting:
    return Setting(parts.algorithm, parts.channel, jax.random.key(seed), initial_point(parts.objective, seed))


def train(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
    out: Path | str | None = None,
    progress: Progress = silent,
) -> Run:
    """Train as the config says; `data` and `model` may be given as objects instead."""
    parsed = as_config(config)
    prepared = prepare(parsed, data, model)
    if parsed.run.mode == "messages" and model is not None:
        raise ConfigError(
            "run.mode = 'messages': a model given as an object cannot be sent; use model.kind = 'MODULE:FUNCTION'"
        )
    directory = RunDirectory.create(out, parsed, f"{parsed.algorithm.name}-{source_name(prepared.data)}")
    if parsed.run.mode == "messages":
        return run_messages(prepared, directory, progress)
    return run_simulation(prepared, directory, progress)


def resume(
    path: Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
    progress: Progress = silent,
) -> Run:
    """Continue a stopped simulation from its last checkpoint; the result is that of an unbroken run."""
    directory = RunDirectory.open(path)
    if directory.complete:
        raise ConfigError(f"{str(path)!r} is complete; nothing to resume")
    config = directory.config
    if config.run.mode == "messages":
        raise ConfigError(f"{str(path)!r} ran in message mode: its silos' state is gone; start a new run")
    return run_simulation(prepare(config, data, model), directory, progress)


def as_config(config: Config | Mapping[str, Any] | Path | str) -> Config:
    if isinstance(config, Config):
        return config
    return load_config(config) if isinstance(config, str | Path) else parse_config(dict(config))


def run_simulation(prepared: Prepared, directory: RunDirectory, progress: Progress) -> Run:
    problem, setting = prepared.problem, prepared.setting
    carry, first = begin(problem, setting, sweep=False)
    saved = directory.load_checkpoint(carry)
    history = History(directory)
    if saved is None:
        directory.cut_history(0)
        history.add(rows_of(first))
    else:
        carry, rows = saved
        directory.cut_history(rows)
        history.reload()
    with progress(problem.rounds, int(carry.round), described(prepared)) as bar:
        compiled = compile_run(problem, setting, carry, sweep=False)
        spent = 0.0

        def on_chunk(chunk: Chunk) -> None:
            nonlocal spent
            spent += chunk.seconds
            history.add(rows_of(chunk.rows))
            directory.save_checkpoint(chunk.carry, len(history.rows))
            bar(chunk.round, history.rows[-1])

        carry = simulate(problem, setting, carry, compiled, on_chunk)
    timing = {"compile_seconds": compiled.seconds, "run_seconds": spent}
    return finish(prepared, directory, history.rows, carry.state.x, carry.drawn, carry.ends.accounts, timing)


def run_messages(prepared: Prepared, directory: RunDirectory, progress: Progress) -> Run:
    """The same run with every silo in its own process; seeded only when the config asks for a test."""
    config, parts, problem = prepared.config, prepared.parts, prepared.problem
    seed = config.run.seed if config.run.test_seed else None
    multipliers = {} if prepared.plan is None else {k: list(v) for k, v in prepared.plan.multipliers.items()}
    history, began = History(directory), time.perf_counter()
    measured = measurement(prepared)
    with ExitStack() as stack, progress(problem.rounds, 0, described(prepared)) as bar:
        processes = [stack.enter_context(SiloProcess()) for _ in prepared.data.silos]
        shuffler = None
        if isinstance(parts.channel, ShuffledServer):
            shuffler = stack.enter_context(ShufflerProcess(len(processes), agreed_terms(parts)))
        set_up(processes, parts, multipliers, prepared.data, seed, shuffler)
        fed = MessageFederation(parts, processes, np.asarray(problem.silos.weights), seed, config.run.seed, shuffler)
        x0 = prepared.setting.x0
        fed.start(x0)
        state, drawn = parts.algorithm.init(x0), x0
        chosen = int(drawn_round(prepared.setting.key, problem.rounds))
        history.add([{"round": 0.0} | measured(x0) | fed.take_costs()])
        for r in range(problem.rounds):
            fed.begin_round(r)
            state = parts.algorithm.round(state, fed)
            drawn = state.x if r == chosen else drawn
            if (r + 1) % problem.every == 0 or r + 1 == problem.rounds:
                history.add([{"round": r + 1.0} | measured(state.x) | fed.take_costs()])
                bar(r + 1, history.rows[-1])
        account = fed.final_accounts()
    timing = {"run_seconds": time.perf_counter() - began}
    return finish(prepared, directory, history.rows, state.x, drawn, account, timing)


def measurement(prepared: Prepared) -> Callable[[jax.Array], dict[str, float]]:
    problem = prepared.problem
    compiled = jax.jit(lambda x: measure(problem.objective, problem.silos, problem.test, prepared.parts.algorithm, x))
    return lambda x: {name: float(value) for name, value in compiled(x).items()}


def finish(
    prepared: Prepared,
    directory: RunDirectory,
    history: list[dict[str, float]],
    last: jax.Array,
    drawn: jax.Array,
    account: Account,
    timing: dict[str, float],
) -> Run:
    """Settle the account first: a run that released more than planned gets no model and no certificate."""
    config, parts = prepared.config, prepared.parts
    statement = None
    if prepared.plan is not None:
        spent = settle(prepared.plan, account)
        statement = certificate(prepared.plan, spent, context_of(prepared))
        directory.write_json("certificate.json", statement)
        directory.write_text("certificate.txt", as_text(statement))
    params, drawn_params = parts.objective.unravel(last), parts.objective.unravel(drawn)
    directory.save_model(params, drawn_params)
    history_figure(directory.path / "figures" / "history.png", {config.algorithm.name: history})
    summary = {
        "algorithm": config.algorithm.name,
        "trust": config.privacy.trust,
        "private": prepared.plan is not None,
        "stamp": None if statement is None else statement["stamp"],
        "epsilon": None if statement is None else max(s["epsilon"] for s in statement["silos"]),
        "delta": config.privacy.delta if statement else None,
        "final": history[-1],
        "drawn_round": int(drawn_round(prepared.setting.key, prepared.problem.rounds)) + 1,
        "silos": [{"silo": n, "records": s} for n, s in zip(parts.facts.names, parts.facts.sizes, strict=True)],
        "parameters": parts.objective.parameters,
        "theorem": theorem_of(config),
        "chosen_by_theory": prepared.chosen,
        "engine": parts.objective.engine,
        "engine_reason": parts.objective.engine_reason,
        "classes": list(prepared.data.classes),
        "preprocessing": list(prepared.data.notes),
        "timing": timing,
        "versions": versions(),
    }
    directory.write_json("summary.json", summary)
    directory.forget_checkpoint()
    return Run(directory.path, config, history, params, drawn_params, summary, parts.objective.model)


def theorem_of(config: Config) -> str | None:
    """The theorem that covers the run's utility; None: unproved (the guarantee does not depend on it)."""
    options = config.algorithm
    entry, trust = find(options.name), config.privacy.trust
    batches = options.batch is None or entry.sampling is not None
    usual = batches and options.participation is None and (options.weights == "equal" or trust == "shuffled")
    return entry.theorem(trust, prox_kind(options.prox), options.compressor, usual=usual)


def context_of(prepared: Prepared) -> Context:
    run = prepared.config.run
    real = run.mode == "messages" and not run.test_seed
    return Context(
        prepared.config.algorithm.name,
        prepared.parts.facts.names,
        tuple(prepared.data.notes),
        None if real else SIMULATED,
        versions(),
        prepared.config.privacy.calibration,
        claim_of(prepared.config) if prepared.config.privacy.calibration == "paper" else None,
    )


class History:
    """Rows with running totals of what was sent and computed; kept on disk as they come."""

    TOTALS = ("bits_up", "bits_down", "record_gradients")

    def __init__(self, directory: RunDirectory):
        self.directory = directory
        self.rows: list[dict[str, float]] = []

    def reload(self) -> None:
        self.rows = self.directory.history()

    def add(self, rows: list[dict[str, float]]) -> None:
        for row in rows:
            before = self.rows[-1] if self.rows else dict.fromkeys(self.TOTALS, 0.0)
            self.rows.append(row | {name: before[name] + row[name] for name in self.TOTALS})
        self.directory.append_history(self.rows[len(self.rows) - len(rows) :])


def rows_of(columns: dict[str, np.ndarray]) -> list[dict[str, float]]:
    names = list(columns)
    length = len(next(iter(columns.values())))
    return [{name: float(columns[name][i]) for name in names} for i in range(length)]


def source_name(data: FederatedData) -> str:
    stem = Path(data.source).stem or "data"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)[:40]


def described(prepared: Prepared) -> str:
    objective = prepared.parts.objective
    return f"{prepared.config.algorithm.name} ({objective.engine} engine: {objective.engine_reason})"
