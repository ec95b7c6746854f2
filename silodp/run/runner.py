"""From a config to a finished run directory, with progress, checkpoints and resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import jax
import numpy as np

from silodp.config import Config
from silodp.data import FederatedData
from silodp.errors import ConfigError
from silodp.models import Model
from silodp.plan.advice import warn_of_run
from silodp.plan.certificate import SIMULATED, Context, as_text, certificate
from silodp.plan.checks import outside_words
from silodp.plan.claim import claim_of
from silodp.plan.identity import fingerprint, identity
from silodp.plan.objects import DataLike, Described, ModelLike, Objects, asked
from silodp.plots import run_figure
from silodp.releases import Account, Vector
from silodp.report.files import write_report
from silodp.run.directory import RunDirectory, is_resumable, model_bytes, versions
from silodp.run.evaluation import evaluated
from silodp.run.history import History, OnRound, rows_of
from silodp.run.measure import COSTS, Metric
from silodp.run.messages import by_messages, measured_at
from silodp.run.prepare import Prepared, prepare
from silodp.run.progress import Progress, silent
from silodp.run.result import Run, summary_of
from silodp.run.simulate import (
    ROWS,
    Chunk,
    begin,
    compile_run,
    simulate,
)
from silodp.stages.figures import held_out_figures


def train(
    config: Described | None = None,
    *,
    data: DataLike | None = None,
    model: ModelLike | None = None,
    out: Path | str | None = None,
    progress: Progress = silent,
    on_round: OnRound | None = None,
    metrics: Mapping[str, Metric] | None = None,
    per_silo: bool = False,
    **objects: Unpack[Objects],
) -> Run:
    """Train, as a config says or as objects say; both are the same run.

    Args:
        config: a `Config`, a dict of its sections, or the path of a TOML file; left out when objects are given.
        data: a `FederatedData` (see `load_data`), or a dict of the data section.
        model: a `Model` (see `build_model`, `from_loss`), a dict of the model section, or the name of a kind.
        out: directory of the results; a new one under runs/ when left out.
        progress: shows how far the run is; `silodp.run.progress.bars(console)` draws bars.
        on_round: called as on_round(x, row) after every history row, with the flat parameters and the row. When it
            raises, the run stops; a simulation keeps its checkpoint, and `resume` goes on from there.
        metrics: functions (params, data) -> number that JAX can trace, measured in every history row under their
            names. `data` has `train`, `test` and `silos` (by name), each with `features` and `targets`.
        per_silo: history columns of every silo, such as "objective/NAME"; the same as run.per_silo. These and `metrics`
            are computed on the records themselves: the guarantee does not cover them.
        algorithm: what `silodp.algorithms.Spider(...)` and the like give, a dict of the algorithm section, or a name.
        channel: `silodp.channels.Untrusted()` and the like, or the name of a trust model (default: untrusted).
        epsilon, delta, gdp: the target for every record; without one the run is not private.
        privacy, run: dicts of further keys of those sections. seed: of the simulation.

    Metrics and silos' columns are computed on the records themselves: the guarantee does not cover them.

    Returns:
        A `Run`: its directory, history, parameters, summary, and `predict`.

    Example:
        >>> import silodp, tempfile
        >>> run = silodp.train(
        ...     algorithm=silodp.algorithms.Spider(rounds=4, restart=2, step_size=0.3, clip=1.0, clip_difference=0.5),
        ...     channel=silodp.channels.Untrusted(),
        ...     epsilon=1.0,
        ...     delta=1e-5,
        ...     data={"source": "wbcd", "silos": 3, "test": 0.2, "preprocess": ["standardise"]},
        ...     out=tempfile.mkdtemp(),
        ... )
        >>> round(run.summary["epsilon"], 3), run.summary["stamp"]
        (1.0, 'simulation: seeded noise, not private')
    """
    parsed, loaded, made = asked(config, data, model, objects)
    parsed = with_silo_columns(parsed) if per_silo else parsed
    prepared = prepare(parsed, loaded, made, metrics)
    refuse_fitted(prepared)
    warn_of_run(prepared.config, prepared.data.sizes, prepared.data)
    if parsed.run.mode == "messages" and made is not None:
        raise ConfigError(
            "run.mode = 'messages': a model given as an object cannot be sent; use model.kind = 'MODULE:FUNCTION'"
        )
    directory = RunDirectory.create(out, parsed, f"{parsed.algorithm.name}-{source_name(prepared.data)}")
    return run_in(directory, prepared, progress, on_round)


def run_in(directory: RunDirectory, prepared: Prepared, progress: Progress, on_round: OnRound | None) -> Run:
    """Begin or go on, whatever the directory holds."""
    run = run_messages if prepared.config.run.mode == "messages" else run_simulation
    directory.plan = fingerprint(prepared.plan)
    with directory.held():
        return run(prepared, directory, progress, on_round)


def refuse_fitted(prepared: Prepared) -> None:
    """With real noise nothing may be learnt from records on the way."""
    run = prepared.config.run
    if run.mode != "messages" or run.test_seed or not prepared.plan.private:
        return
    fitted = [note.fitted for note in prepared.data.notes if note.fitted]
    if fitted:
        raise ConfigError(
            f"data.preprocess: {', '.join(fitted)}: fitted on the records, which no epsilon covers; with run.mode = "
            "'messages' give public constants (standardise:FILE.npz), a schema, or the stage [scale] or [whiten]"
        )


def with_silo_columns(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"per_silo": True})})


def resume(
    path: Path | str,
    *,
    data: FederatedData | None = None,
    model: Model | None = None,
    progress: Progress = silent,
    on_round: OnRound | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Run:
    """Continue a stopped run from its last checkpoint. The result of a simulation is that of an unbroken one.

    In message mode silos answer questions that they were asked before with the same bytes, and nothing is spent twice.

    Args:
        path: the run's directory.
        data, model, metrics: the same objects that the run was started with; they are not saved.
        progress, on_round: as for `train`.

    Returns:
        The finished `Run`.

    Example:
        >>> import silodp, tempfile
        >>> silodp.resume(tempfile.mkdtemp())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        silodp.errors.ConfigError: ... is not a run: it has no config.toml
    """
    directory = RunDirectory.open(path)
    if directory.complete:
        raise ConfigError(f"{str(path)!r} is complete; nothing to resume")
    config = directory.config
    if config.run.mode == "messages" and not is_resumable(directory.path):
        raise ConfigError(f"{str(path)!r} ran in message mode: its silos' state is gone; start a new run")
    return run_in(directory, prepare(config, data, model, metrics), progress, on_round)


def run_simulation(
    prepared: Prepared, directory: RunDirectory, progress: Progress, on_round: OnRound | None = None
) -> Run:
    problem, setting = prepared.problem, prepared.setting
    carry, first = begin(problem, setting, sweep=False)
    saved = directory.load_checkpoint(carry)
    history = History(directory, trajectory=prepared.config.run.trajectory, on_round=on_round)
    if saved is None:
        history.cut(0, setting.x0.size)
        history.add(rows_of(first), carry.output)
        history.tell(carry.output)
    else:
        carry, rows = saved
        history.cut(rows, setting.x0.size)
        history.check_columns(list(first))
    with progress(problem.rounds, int(carry.round), described(prepared)) as bar:
        compiled = compile_run(problem, setting, carry, sweep=False)
        spent = 0.0

        def on_chunk(chunk: Chunk) -> None:
            nonlocal spent
            spent += chunk.seconds
            history.add(rows_of(chunk.rows), chunk.carry.output)
            directory.save_checkpoint(chunk.carry, len(history.rows))
            bar(chunk.round, history.rows[-1])
            history.tell(chunk.carry.output)  # last: what it raises finds everything saved

        carry = simulate(problem, setting, carry, compiled, on_chunk, most=1 if history.one_by_one else ROWS)
    timing = {"compile_seconds": compiled.seconds, "run_seconds": spent}
    table, account = evaluated(prepared, carry.output, carry.ends.accounts)
    return finish(prepared, directory, history.rows, carry.output, carry.drawn, account, timing, table)


def run_messages(
    prepared: Prepared, directory: RunDirectory, progress: Progress, on_round: OnRound | None = None
) -> Run:
    """The same run with every silo in its own process; seeded only when the config asks for a test."""
    history = History(directory, trajectory=prepared.config.run.trajectory, on_round=on_round)
    done = by_messages(prepared, directory, history, lambda total, done: progress(total, done, described(prepared)))
    return finish(done.prepared, directory, history.rows, done.last, done.drawn, done.account, done.timing, done.table)


def finish(
    prepared: Prepared,
    directory: RunDirectory,
    history: list[dict[str, float]],
    last: jax.Array,
    drawn: jax.Array,
    account: Account,
    timing: dict[str, float],
    table: Vector | None = None,
) -> Run:
    """Settle the account first: a run that released more than planned gets no model and no certificate."""
    config, objective = prepared.config, prepared.ground.objective
    spent = prepared.settled(account) if prepared.plan.private else None
    params, drawn_params = objective.unravel(last), objective.unravel(drawn)
    model = directory.save_model(model_bytes(params, drawn_params, maps_of(prepared)))
    statement = None
    if spent is not None:
        context = replace(context_of(prepared), made=identity(prepared.plan, model))
        statement = certificate(prepared.plan, spent, context)
        directory.write_json("certificate.json", statement)
        directory.write_text("certificate.txt", as_text(statement))
    if config.run.trajectory:
        directory.save_trajectory(objective.parameters)
    told = None if table is None else held_out_figures(prepared.plan, table)
    summary = summary_of(prepared, statement, history[-1], at_drawn(prepared, history[-1], last, drawn), timing, told)
    for ending in config.run.figures:
        run_figure(directory.path / "figures" / f"history.{ending}", summary, history)
    directory.write_json("summary.json", summary)
    write_report(directory.path)
    directory.forget_checkpoint()
    return Run(directory.path, config, history, params, drawn_params, summary, prepared.ground.model)


def at_drawn(prepared: Prepared, final: dict[str, float], last: jax.Array, drawn: jax.Array) -> dict[str, float]:
    """What is measured at the iterate that the theorem speaks of; where that is the last one, it is known."""
    if not np.array_equal(last, drawn):
        return measured_at(prepared)(drawn)
    return {name: value for name, value in final.items() if name not in ("round", *COSTS)}


def context_of(prepared: Prepared) -> Context:
    config = prepared.config
    real = config.run.mode == "messages" and not config.run.test_seed
    claim = claim_of(config) if config.privacy.calibration == "paper" else None
    return Context(
        tuple(prepared.data.notes), None if real else SIMULATED, versions(), claim, prepared.bounds,
        tuple(outside_words(prepared.plan)), tested=prepared.data.test is not None,
    )  # fmt: skip


def maps_of(prepared: Prepared) -> dict[str, np.ndarray]:
    """Of the features, as earlier stages have released them."""
    return {name: np.asarray(array) for made in prepared.ground.maps for name, array in made.arrays.items()}


def source_name(data: FederatedData) -> str:
    stem = Path(data.source).stem or "data"
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)[:40]


def described(prepared: Prepared) -> str:
    objective = prepared.ground.objective
    return f"{prepared.config.algorithm.name} ({objective.engine} engine: {objective.engine_reason})"
