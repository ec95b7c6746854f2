"""The compiled run: rounds in a loop inside one XLA program, called again and again for a chunk of rounds.

The program is compiled once for a run, or once for a whole sweep (its settings are vmapped). Every key is derived from
the seed and the round, so a run that is stopped after any chunk and resumed is the same run, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from silodp.channels import Channel
from silodp.compiler import OPTIONS
from silodp.core import Algorithm, Door, averaged
from silodp.facts import Participation
from silodp.gradients.blocks import SETTINGS
from silodp.objective import ModelObjective
from silodp.randomness import SERVER, SeededRandomness, party_key
from silodp.releases import Account, Vector
from silodp.run.federation import Ends, Silos, SimulatedFederation, opening
from silodp.run.measure import Wanted, measure
from silodp.server import Averaging

ROWS = 64  # history rows that one call of the compiled program can return
SECONDS_PER_CALL = 1.0  # progress is shown and a checkpoint taken about this often
LITTLE = 2**22  # rounds x records x parameters: a run of less is over before a better program would be compiled


class Problem(eqx.Module):
    """What all settings of a sweep share: the data, the model, and everything that shapes the program."""

    objective: ModelObjective
    silos: Silos
    test: PyTree | None
    rounds: int = eqx.field(static=True)
    every: int = eqx.field(static=True)
    streams: tuple[tuple[str, int], ...] = eqx.field(static=True)  # with the numbers in a release, 0: stays in the silo
    participation: Participation = eqx.field(static=True, default=None)
    same_silos: int = eqx.field(static=True, default=1)  # rounds through which the same ones answer
    wanted: Wanted | None = eqx.field(static=True, default=None)  # columns beside the usual ones
    average: int | Averaging = eqx.field(static=True, default=1)  # last iterates whose mean is the result, or of all


class Setting(eqx.Module):
    """What a sweep may vary: the algorithm's numbers, the noise, the seed and the start."""

    algorithm: Algorithm
    channel: Channel
    key: Key[Array, ""]
    x0: Vector


class Carry(eqx.Module):
    """A run between two rounds: all that a checkpoint holds."""

    round: Int[Array, ""]
    state: PyTree
    ends: Ends
    drawn: Vector  # what the theorem speaks of: an iterate of a round drawn uniformly beforehand, or the last one
    output: Vector  # the result so far


def start(problem: Problem, setting: Setting) -> Carry:
    ends = opening(
        problem.objective,
        setting.algorithm,
        setting.channel,
        problem.silos,
        setting.x0,
        [name for name, _ in problem.streams],
        {name: size for name, size in problem.streams if size},
        setting.key,
    )
    state = setting.algorithm.init(setting.x0)
    first = setting.algorithm.result(state)
    return Carry(jnp.int32(0), state, ends, first, first)


def one_round(problem: Problem, setting: Setting, carry: Carry) -> Carry:
    algorithm = setting.algorithm
    state, ends = asked_once(problem, setting, carry.round, carry.state, carry.ends)
    drawn = shown(algorithm, carry.state, state, carry.drawn, carry.round == drawn_round(setting.key, problem.rounds))
    output = averaged(carry.output, algorithm.result(state), carry.round + 1, problem.rounds, problem.average)
    return Carry(carry.round + 1, state, ends, drawn, output)


def asked_once(problem: Problem, setting: Setting, round: Any, state: PyTree, ends: Ends) -> tuple[PyTree, Ends]:
    """What an algorithm and both ends are after one round."""
    fed = SimulatedFederation(
        problem.objective,
        setting.channel,
        problem.silos,
        problem.participation,
        setting.key,
        round,
        ends,
        problem.same_silos,
    )
    state = setting.algorithm.round(state, Door(fed, setting.algorithm, problem.objective.parameters))
    return state, fed.ends


def shown(algorithm: Algorithm, before: Any, after: Any, drawn: Vector, chosen: Any) -> Vector:
    """The iterate that the theorem speaks of, after this round; `chosen`: whether this is the round that was drawn."""
    if algorithm.output == "last":
        return algorithm.result(after)
    return jnp.where(chosen, algorithm.candidate(before, after), drawn)


@eqx.filter_jit
def whole_stage(problem: Problem, setting: Setting) -> tuple[Vector, Account]:
    """All rounds of a stage beside training: what it released, and what was counted."""
    begun = start(problem, setting)
    step = lambda round, packed: asked_once(problem, setting, jnp.int32(round), *packed)
    state, ends = jax.lax.fori_loop(0, problem.rounds, step, (begun.state, begun.ends))
    return state.x, ends.accounts


def compiler_options(problem: Problem) -> dict[str, str | bool] | None:
    """How hard XLA shall try for a simulation; None: as it likes. What leaves a silo for real is compiled elsewhere."""
    silos, records = jax.tree.leaves(problem.silos.records)[0].shape[:2]
    return OPTIONS if problem.rounds * silos * records * problem.objective.parameters <= LITTLE else None


def drawn_round(key: Key[Array, ""], rounds: int) -> Int[Array, ""]:
    """A uniformly drawn round: its iterate is the one that the theorems for nonconvex losses bound."""
    word = SeededRandomness(party_key(key, -1, SERVER)).bits("drawn", ())
    return (word % rounds).astype(jnp.int32)


chosen_round = jax.jit(drawn_round, static_argnums=1, compiler_options=OPTIONS)  # the same, outside a program


def block(problem: Problem, setting: Setting, carry: Carry) -> tuple[Carry, dict[str, Array]]:
    """`every` rounds (fewer at the end) and the history row after them."""
    last = jnp.minimum((carry.round // problem.every + 1) * problem.every, problem.rounds)
    carry = jax.lax.fori_loop(carry.round, last, lambda _, c: one_round(problem, setting, c), carry)
    return reset_meters(carry), history_row(problem, setting, carry)


def measured(problem: Problem, algorithm: Algorithm, x: Vector) -> dict[str, Array]:
    return measure(problem.objective, problem.silos, problem.test, algorithm, x, problem.wanted)


measure_point = eqx.filter_jit(measured)  # one program for all runs of the same shapes, traced once for all its uses
measure_quickly = cast(Any, eqx.filter_jit)(lambda *asked: measure_point(*asked), compiler_options=OPTIONS)


def history_row(problem: Problem, setting: Setting, carry: Carry) -> dict[str, Array]:
    row = measure_point(problem, setting.algorithm, carry.output)
    spent = {
        "bits_up": carry.ends.bits[0],
        "bits_down": carry.ends.bits[1],
        "record_gradients": carry.ends.accounts.gradients.sum(),
    }
    return {"round": carry.round} | row | spent


def reset_meters(carry: Carry) -> Carry:
    # Costs are summed on the host: a float32 total of a long run would lose the small addends.
    cleared = (jnp.zeros_like(carry.ends.bits), jnp.zeros_like(carry.ends.accounts.gradients))
    return eqx.tree_at(lambda c: (c.ends.bits, c.ends.accounts.gradients), carry, cleared)


def advance(
    problem: Problem, setting: Setting, carry: Carry, blocks: Int[Array, ""]
) -> tuple[Carry, dict[str, Float[Array, " rows"]]]:
    """So many blocks; their rows come first in the returned buffers."""
    shapes = jax.eval_shape(lambda c: history_row(problem, setting, c), carry)
    rows = jax.tree.map(lambda leaf: jnp.zeros((ROWS, *leaf.shape), leaf.dtype), shapes)

    def step(i: Array, packed: tuple[Carry, Any]) -> tuple[Carry, Any]:
        carry, row = block(problem, setting, packed[0])
        return carry, jax.tree.map(lambda buffer, leaf: buffer.at[i].set(leaf), packed[1], row)

    return jax.lax.fori_loop(0, blocks, step, (carry, rows))


@dataclass
class Chunk:
    """What one call of the program brought: the run so far and the new history rows (per setting, when swept)."""

    carry: Carry
    rows: dict[str, np.ndarray]
    seconds: float
    round: int


@dataclass
class Compiled:
    """A program ready to run: `advance`, how long compiling took, and whether a sweep's program calls LAPACK."""

    advance: Callable[..., Any]
    seconds: float
    lapack: bool = False


def compile_run(problem: Problem, setting: Setting, carry: Carry, *, sweep: bool) -> Compiled:
    began = time.perf_counter()
    program: Any = advance
    if sweep:
        carries = carry_axes(carry)
        program = over_settings(advance, setting, (None, eqx.if_array(0), carries, None), carries)
    lowered = cast(Any, eqx.filter_jit(program)).lower(problem, setting, carry, np.int32(1))
    lapack = sweep and "lapack_" in lowered.as_text()
    return Compiled(lowered.compile(None if sweep else compiler_options(problem)), time.perf_counter() - began, lapack)


def carry_axes(carry: Carry) -> Carry:
    """Settings are stacked, but their round is one: what depends on it alone (a restart) is decided for all."""
    return eqx.tree_at(lambda c: c.round, jax.tree.map(lambda _: 0, carry), None)


def over_settings(program: Callable[..., Any], stack: Setting, axes: tuple[Any, ...], carries: Carry) -> Any:
    """A program of one setting and its run, for a stack of them. Nothing is stacked where there is one alone: products
    of a stack of one are slow in XLA."""
    if len(stack.x0) > 1:
        return eqx.filter_vmap(program, in_axes=axes, out_axes=(carries, 0), axis_name=SETTINGS)

    def of_the_only(problem: Problem, *stacked: Any) -> tuple[Carry, dict[str, Array]]:
        carry, rows = program(problem, *map(the_only, stacked))
        carry, rows = jax.tree.map(lambda leaf: leaf[None], (carry, rows))
        return eqx.tree_at(lambda c: c.round, carry, carry.round[0]), rows

    return of_the_only


def the_only(stack: Any) -> Any:
    """Of a stack of one; a round is not stacked."""
    return jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) and leaf.ndim else leaf, stack)


Start = Callable[[Problem, Setting], tuple[Carry, dict[str, Array]]]


def start_program(problem: Problem, setting: Setting, *, sweep: bool) -> Start:
    """What `begin` runs; keep it to begin several times with one compilation."""

    def first(problem: Problem, setting: Setting) -> tuple[Carry, dict[str, Array]]:
        carry = start(problem, setting)
        return reset_meters(carry), history_row(problem, setting, carry)

    mapped = first
    if sweep:
        carries = carry_axes(jax.eval_shape(start, problem, the_only(setting)))
        mapped = over_settings(first, setting, (None, eqx.if_array(0)), carries)
    program = cast(Any, eqx.filter_jit(mapped))
    return program if sweep else program.lower(problem, setting).compile(compiler_options(problem))


def begin(
    problem: Problem, setting: Setting, *, sweep: bool, program: Start | None = None
) -> tuple[Carry, dict[str, np.ndarray]]:
    """The run before its first round and the history row of its start."""
    carry, row = (program or start_program(problem, setting, sweep=sweep))(problem, setting)
    axis = 1 if sweep else 0
    return carry, {name: np.expand_dims(np.asarray(leaf), axis) for name, leaf in row.items()}


def simulate(
    problem: Problem,
    setting: Setting,
    carry: Carry,
    compiled: Compiled,
    on_chunk: Callable[[Chunk], None],
    *,
    sweep: bool = False,
    most: int = ROWS,
) -> Carry:
    """Run to the last round, handing over the rows of each chunk as they come; at most so many in a chunk."""
    done = int(np.max(np.asarray(carry.round)))
    blocks = 1
    while done < problem.rounds:
        left = -(-problem.rounds // problem.every) - done // problem.every
        blocks = min(blocks, left, most)
        began = time.perf_counter()
        carry, rows = compiled.advance(problem, setting, carry, np.int32(blocks))
        carry = jax.block_until_ready(carry)
        seconds = time.perf_counter() - began
        done = int(np.max(np.asarray(carry.round)))
        cut = (slice(None), slice(0, blocks)) if sweep else slice(0, blocks)
        kept = {name: np.asarray(leaf)[cut] for name, leaf in rows.items()}
        on_chunk(Chunk(carry, kept, seconds, done))
        blocks = max(1, int(blocks * SECONDS_PER_CALL / max(seconds, 1e-3)))
    return carry
