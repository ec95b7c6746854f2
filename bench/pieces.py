"""Part `profile`: where a round's time goes in the runs that miss their targets, and in Soteria-SGD.

A piece is repeated by itself in a compiled loop, with the shapes of the run; whole rounds come from whole runs. All on
one core: what XLA's threads lose to each other would hide the rest. Pieces need not add up to the round: alone, a piece
is not fused with its neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bench.cases import Case, diff2, mu2, soteria
from bench.runs import begun_parts
from bench.simulated import Ready
from bench.timing import interleaved
from silodp.gradients.softplus import slope, slope_change, softplus, softplus_change
from silodp.gradients.structure import find_structure
from silodp.gradients.structured import block_size
from silodp.prox import Ball
from silodp.randomness import SeededRandomness, fold, random_words
from silodp.run.group import Group
from silodp.run.measure import measure
from silodp.run.runner import Prepared
from silodp.run.sweep import variant
from silodp.sampling import BLOCK, places_of

SETTINGS = 16
Micros = dict[str, float]  # CPU microseconds of a round, by piece


class Piece(NamedTuple):
    """`step(i, state, *given)` gives the next state; a round does it `each` times."""

    step: Callable[..., Any]
    state: Any
    each: float = 1.0
    given: tuple[Any, ...] = ()  # large arrays: closed over, they would be constants of the program


class Drawer(NamedTuple):
    """As much of a silo as a batch rule looks at."""

    records: Any
    size: Any
    round: Any
    randomness: SeededRandomness


def profile(quick: bool) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before JAX first computes: it then has one thread
    return {"mu2": mu2_round(quick), "sweep": sweep_round(quick), "soteria": soteria_round(quick)}


def micros(
    pieces: Mapping[str, Piece], runs: Mapping[str, tuple[Callable[[], Any], int]], quick: bool, loop: int
) -> Micros:
    """Of every piece (in a loop of so many steps) and of a round of every run, measured in turns."""
    programs: dict[str, Callable[[], Any]] = {name: repeated(piece, loop) for name, piece in pieces.items()}
    steps = {name: loop / piece.each for name, piece in pieces.items()}
    for name, (run, rounds) in runs.items():
        programs[name], steps[name] = run, rounds
        run()
    found = interleaved(programs, 3 if quick else 9, 3.0 if quick else 12.0)
    cost = {name: 1e6 * float(np.median(list(own.cpu.values()))) / steps[name] for name, own in found.items()}
    for name, value in cost.items():
        print(f"    {name:58}{value:10.2f} us CPU", flush=True)
    return cost


def repeated(piece: Piece, loop: int) -> Callable[[], Any]:
    def steps(state: Any, given: tuple[Any, ...]) -> Any:
        return lax.fori_loop(0, loop, lambda i, state: piece.step(i, state, *given), state)

    program: Any = jax.jit(steps).lower(piece.state, piece.given).compile()
    run = lambda: jax.block_until_ready(program(piece.state, piece.given))
    run()
    return run


@cache
def key() -> Any:
    return jax.random.key(5)


def nudge(i: Any) -> Any:
    """A number near 0 that differs from step to step, so that nothing is computed once for all steps."""
    return 1e-9 * i.astype(jnp.float32)


def whole(case: Case, rounds: int, **changes: Any) -> tuple[Callable[[], Any], int]:
    return Ready(case.prepared(rounds=rounds, **changes)), rounds


def mu2_round(quick: bool) -> dict[str, Any]:
    print("  mu2, M = 1", flush=True)
    case, rounds = mu2(1), 3_000 if quick else 60_000
    prepared = case.prepared(rounds=rounds)
    objective, d = prepared.problem.objective, prepared.problem.objective.parameters
    records = jax.tree.map(lambda leaf: leaf[0], prepared.problem.silos.records)
    x, spread = 1e-3 * jax.random.normal(key(), (d,)), jax.random.uniform(key(), (d,), minval=-0.999, maxval=0.999)

    def gradient(i: Any, q: Any, records: Any) -> Any:
        one = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i, 1), records)
        t = i.astype(jnp.float32) + 1
        return q + objective.clipped_sum([x + nudge(i), x], [t, 1 - t], one, jnp.ones(1), 1.0)

    def steps(i: Any, state: Any) -> Any:
        w, ahead = state
        w = Ball(0.05)(w - 0.01 * (w + nudge(i)), 0.01)
        return w, ahead + 2 / (i.astype(jnp.float32) + 3) * (w - ahead)

    folded = lambda i, word: word ^ jax.random.key_data(fold(fold(fold(key(), i), 1), 2))[0]
    zeros = jnp.zeros(d)
    pieces = {
        "words: Threefry": Piece(lambda i, sum: sum ^ random_words(fold(key(), i), (d,)), jnp.zeros(d, jnp.uint32)),
        "inverse error function": Piece(lambda i, sum: sum + lax.erf_inv(spread - nudge(i)), zeros),
        "normal numbers: both, fused": Piece(lambda i, sum: sum + normals(i, (d,)), zeros),
        "clipped combination of one record at two points": Piece(gradient, zeros, given=(records,)),
        "steps and projection onto the ball": Piece(steps, (x, x)),
        "the loop and a round's keys": Piece(folded, jnp.uint32(0)),
    }
    runs = {
        "a round": whole(case, rounds),
        "a round without noise": whole(case, rounds, noise=False),
        "as many normal numbers from torch.randn": (lambda: [torch.randn(d) for _ in range(500)], 500),
        "as many normal numbers from numpy, float32": (numpy_normals(d), 500),
    }
    return {"micros": micros(pieces, runs, quick, 2_000), "numbers": d}


def normals(i: Any, shape: tuple[int, ...]) -> Any:
    return SeededRandomness(fold(key(), i)).normal("noise", shape)


def numpy_normals(d: int) -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    return lambda: [rng.standard_normal(d, np.float32) for _ in range(500)]


def sweep_round(quick: bool) -> dict[str, Any]:
    """Every piece for one setting, and for 16 as a sweep on two cores stacks them: eight and eight."""
    print("  16 settings of DIFF2-GD", flush=True)
    case, rounds = diff2(), 50 if quick else 200
    prepared = case.prepared(rounds=rounds)
    members = [variant(prepared, case.config(rounds=rounds, step_size=0.1 * 0.9**i), None) for i in range(SETTINGS)]
    group = Group(members, SETTINGS // 2)
    together = begun_parts(group)
    pieces, sizes = {}, {"one": 1, "stacked": group.size}
    for kind, size in sizes.items():
        parts = len(group.starts) if kind == "stacked" else 1
        own = {f"{name}, {kind}": piece for name, piece in diff2_pieces(prepared, size).items()}
        pieces |= {name: piece._replace(each=piece.each * parts) for name, piece in own.items()}
    runs = {
        "a round, one": whole(case, rounds),
        "a round without noise, one": whole(case, rounds, noise=False),
        "a round, stacked": (together, rounds),
    }
    cost = micros(pieces, runs, quick, 20)
    return {"micros": cost, "settings": SETTINGS, "parts": len(group.starts), "rounds": rounds}


def diff2_pieces(prepared: Prepared, settings: int) -> dict[str, Piece]:
    problem, setting, d = prepared.problem, prepared.setting, prepared.problem.objective.parameters
    points = setting.x0 + 0.01 * jax.random.normal(key(), (settings, 2, d))
    silos, size = jax.tree.leaves(problem.silos.records)[0].shape[:2]
    block = min(size, block_of(prepared))
    hidden = 3 * jax.random.normal(key(), (settings, 10, block))

    def difference(pair: Any, silos: Any) -> Any:
        own = lambda records, weights: problem.objective.clipped_sum(list(pair), [1.0, -1.0], records, weights, 0.01)
        return jnp.mean(jax.vmap(own)(silos.records, jnp.ones((len(silos), size))), axis=0)

    def measured(pair: Any, silos: Any) -> Any:
        row = measure(problem.objective, silos, problem.test, setting.algorithm, pair[0])
        return sum(row.values(), jnp.zeros(()))

    def moved(by: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """One setting as a run computes it, several as a sweep does."""
        if settings == 1:
            return lambda i, points, silos: points + nudge(i) * by(points[0], silos)
        every = jax.vmap(by, in_axes=(0, None))
        return lambda i, points, silos: points + nudge(i) * every(points, silos).reshape(settings, 1, -1)

    def activations(i: Any, v: Any) -> Any:
        """softplus and its slope at one point, and their changes to the other: what the engine computes of them."""
        step = 0.01 + nudge(i)
        changes = softplus_change(v, step, None) + slope_change(v, step, None)
        return v + nudge(i) * (softplus(v) + slope(v) + changes)

    return {
        "clipped difference, all silos": Piece(moved(difference), points, given=(problem.silos,)),
        "of it softplus, its slope, and their changes": Piece(activations, hidden, silos * size / block),
        "noise": Piece(lambda i, sum: sum + normals(i, (settings, d)), jnp.zeros((settings, d))),
        "measurement, once a run": Piece(moved(measured), points, 1 / problem.rounds, (problem.silos,)),
    }


def block_of(prepared: Prepared) -> int:
    """Records of a block of differences in the structured engine."""
    objective, silos = prepared.problem.objective, prepared.problem.silos
    record = jax.tree.map(lambda leaf: leaf[0, 0], silos.records)
    return block_size(find_structure(objective.model.loss, objective.unravel(prepared.setting.x0), record), 2)


def soteria_round(quick: bool) -> dict[str, Any]:
    print("  Soteria-SGD", flush=True)
    case, rounds = soteria(), 100 if quick else 1_000
    prepared = case.prepared(rounds=rounds)
    problem, setting = prepared.problem, prepared.setting
    objective, d, silos = problem.objective, problem.objective.parameters, len(problem.silos)
    rule: Any = setting.algorithm
    channel: Any = setting.channel
    each = jax.vmap(SeededRandomness)
    sources = lambda i: each(jax.vmap(lambda silo: fold(fold(key(), i), silo))(jnp.arange(silos)))
    length = jax.tree.leaves(problem.silos.records)[0].shape[1]
    blocks = -(-length // BLOCK) * BLOCK

    def drawn(i: Any, data: Any) -> Any:
        draw = lambda records, size, source: rule.batch.draw(Drawer(records, size, i, source), "value")
        return jax.vmap(draw)(data.records, data.sizes, sources(i))

    def taken(i: Any, total: Any, data: Any) -> Any:
        return total + sum(jnp.sum(leaf.reshape(silos, -1)[:, :1]) for leaf in jax.tree.leaves(drawn(i, data).records))

    def sums(i: Any, total: Any, batch: Any) -> Any:
        x = jnp.mean(total, axis=0) + nudge(i)
        own = lambda own: objective.clipped_sum([x], [1.0], own.records, own.weights, 0.5)
        return total + jax.vmap(own)(batch)

    batch = jax.jit(drawn)(jnp.int32(0), problem.silos)
    coins = lambda i: jax.vmap(lambda source: source.bits("batch/value", (blocks,)))(sources(i))

    def places(coins: Any, size: Any) -> Any:
        joins = (coins < (rule.batch.batch / size * 2.0**32).astype(jnp.uint32)) & (jnp.arange(blocks) < size)
        return places_of(joins, batch.weights.shape[1], length)

    chosen = lambda i, sizes: jax.vmap(places)(coins(i), sizes)
    noise = lambda i: jax.vmap(lambda source: source.normal("noise", (d,)))(sources(i))
    compress = lambda i, v: jax.vmap(lambda v, source: channel.compressor(v, source))(v, sources(i))
    zeros, words = jnp.zeros((silos, d)), jnp.zeros((silos, blocks), jnp.uint32)
    pieces = {
        "drawing the batches: coins, places, records": Piece(taken, jnp.zeros(()), given=(problem.silos,)),
        "of it coins": Piece(lambda i, sum: sum ^ coins(i), words),
        "of it coins and places": Piece(
            lambda i, n, sizes: n + jnp.sum(chosen(i, sizes)), jnp.int32(0), given=(problem.silos.sizes,)
        ),
        "clipped sums of the batches": Piece(sums, zeros, given=(batch,)),
        "noise": Piece(lambda i, sum: sum + noise(i), zeros),
        "rand-k of every silo": Piece(lambda i, v: v + nudge(i) * compress(i, v), zeros),
    }
    runs = {"a round": whole(case, rounds), "a round without noise": whole(case, rounds, noise=False)}
    return {"micros": micros(pieces, runs, quick, 200)}
