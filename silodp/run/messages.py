"""A run in message mode, round by round, with a checkpoint after each: it goes on from where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from silodp.core import averaged
from silodp.deploy.coordinator import MessageFederation
from silodp.deploy.pipes import message_federation
from silodp.deploy.remote import Remote
from silodp.releases import Account, Vector
from silodp.run.answers import Answers
from silodp.run.directory import RunDirectory
from silodp.run.history import History
from silodp.run.prepare import Prepared, assembled
from silodp.run.simulate import chosen_round, compiler_options, measure_point, measure_quickly, shown

Progress = Callable[[int, int], AbstractContextManager[Callable[[int, dict[str, float]], None]]]


class Done(NamedTuple):
    """What a run came to."""

    prepared: Prepared
    last: Vector
    drawn: Vector
    account: Account
    timing: dict[str, float]
    table: Vector | None


class Carry(NamedTuple):
    """The server's side between two rounds."""

    round: Any
    state: Any
    drawn: Vector
    output: Vector
    accounts: Account
    memory: Any
    costs: Any  # of what was sent and computed since the last row of the history


def measured_at(prepared: Prepared) -> Callable[[jax.Array], dict[str, float]]:
    problem, algorithm = prepared.problem, prepared.plan.algorithm
    program = measure_point if compiler_options(problem) is None else measure_quickly
    return lambda x: {name: float(value) for name, value in program(problem, algorithm, x).items()}


def by_messages(prepared: Prepared, directory: RunDirectory, history: History, progress: Progress) -> Done:
    plan, began = prepared.plan, time.perf_counter()
    seed = plan.config.run.seed if plan.config.run.test_seed else None
    records = [silo.named() for silo in prepared.data.silos]
    kept = Answers(plan, directory) if plan.config.run.answers else None
    with ExitStack() as ending, message_federation(plan, records, seed, directory.path) as fed:
        if kept is not None:
            fed.heard = kept.add
            ending.callback(kept.save)  # however the run ends
        prepared = staged(prepared, fed)
        carry = trained(prepared, fed, directory, history, progress, kept)
        table = None
        if plan.evaluation is not None:
            fed.leave()
            table = fed.stage(carry.output)
        account = fed.final_accounts()
    timing = {"run_seconds": time.perf_counter() - began}
    return Done(prepared, carry.output, carry.drawn, account, timing, table)


def staged(prepared: Prepared, fed: MessageFederation) -> Prepared:
    """The stages before training. No checkpoint covers them: a server that starts again asks for them again."""
    ground, plan = prepared.unmapped, prepared.plan
    for name in plan.before:
        released = fed.stage(jnp.zeros(0))
        fed.leave(released)
        ground = ground.mapped(plan.derived(name, released))
    for link in fed.parties:
        if isinstance(link, Remote):
            link.asked.clear()
    return assembled(ground, plan, prepared.bounds) if plan.before else prepared


def trained(
    prepared: Prepared, fed: MessageFederation, directory: RunDirectory, history: History, progress: Progress,
    kept: Answers | None,
) -> Carry:  # fmt: skip
    problem, algorithm, measured = prepared.problem, prepared.setting.algorithm, measured_at(prepared)
    chosen = int(chosen_round(prepared.setting.key, problem.rounds))
    carry = begun(prepared, fed, directory, history)
    with progress(problem.rounds, int(carry.round)) as bar:
        for r in range(int(carry.round), problem.rounds):
            fed.begin_round(r)
            state = algorithm.round(carry.state, fed)
            drawn = shown(algorithm, carry.state, state, carry.drawn, r == chosen)
            output = averaged(carry.output, algorithm.result(state), r + 1, problem.rounds, problem.average)
            told = (r + 1) % problem.every == 0 or r + 1 == problem.rounds
            if told:
                history.add([{"round": float(r + 1)} | measured(output) | fed.take_costs()], output)
            carry = Carry(r + 1, state, drawn, output, fed.accounts, fed.end.memory, costs_of(fed))
            saved(carry, fed, directory, history, kept)
            if told:
                bar(r + 1, history.rows[-1])
                history.tell(output)  # last: what it raises finds everything saved
    return carry


def begun(prepared: Prepared, fed: MessageFederation, directory: RunDirectory, history: History) -> Carry:
    """Round 0, or where the last checkpoint is. Silos that have started already say so again."""
    algorithm, x0 = prepared.setting.algorithm, prepared.setting.x0
    state = algorithm.init(x0)
    output = algorithm.result(state)
    fresh = Carry(0, state, output, output, fed.accounts, fed.end.memory, costs_of(fed))
    found = directory.load_checkpoint(fresh)
    if found is None:
        history.cut(0, x0.size)
        history.add([{"round": 0.0} | measured_at(prepared)(output) | fed.take_costs()], output)
        history.tell(output)
        fed.start(x0)
        return fresh
    carry, rows = found
    history.cut(rows, x0.size)
    fed.start(x0)
    fed.accounts, fed.end.memory = carry.accounts, carry.memory
    up, down, fed.gradients, fed.end.bits = np.asarray(carry.costs).view(np.float64).tolist()
    fed.bits = np.array([up, down])
    return carry


def costs_of(fed: MessageFederation) -> np.ndarray:
    """As words of 32 bits: JAX would shorten longer ones."""
    return np.array([*fed.bits, fed.gradients, fed.end.bits], np.float64).view(np.uint32)


def saved(
    carry: Carry, fed: MessageFederation, directory: RunDirectory, history: History, kept: Answers | None
) -> None:
    """On the disk before the next question; silos are told with it which bytes nobody will ask for again."""
    if kept is not None:
        kept.save()
    directory.save_checkpoint(carry, len(history.rows))
    for link in fed.parties:
        if isinstance(link, Remote):
            link.covered()
