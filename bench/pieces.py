"""What the pieces of a clipped mean cost: `python -m bench.pieces NAME [points]`, over ONE plain JAX gradient.

Each row is the same program with one piece left out. None of them is private: they are for timing only. The last rows
are the two products of a first layer, the second one also in runs, as the proof of a sum's rounding needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.peer import Peer
from bench.peers_jax import PEERS, compiled, engine
from bench.targets import PLAIN
from bench.timing import interleaved
from bench.workloads import Workload, dense_workloads
from silodp.doubles import Double
from silodp.gradients import blocks, factors, structured
from silodp.gradients.blocks import in_runs

Patch = tuple[Any, str, Any]
TURNS, SECONDS = 24, 2.0  # and seconds for each program


def unmeasured(self: Any, s: Any, t: Any) -> Any:
    return jnp.ones_like(s.constant) if self.on_record else jnp.sum(s.inputs * t.inputs, axis=0)


def in_float32(parts: Any) -> Double:
    return Double(parts.sum(0), jnp.zeros(parts.shape[1:]))


PIECES: dict[str, tuple[Patch, ...]] = {
    "norms of features": ((factors.DenseFactors, "_dot", unmeasured),),
    "vectors computed once": ((structured, "computed_once", lambda vectors: vectors),),
    "a branch for what is not finite": ((structured, "rarely", lambda needed, rare, usual, given: usual(given)),),
    "sums in doubles": (
        (blocks, "added_loosely", lambda total, parts: Double(total.high + parts.sum(0), total.low)),
        (Double, "sum_of", staticmethod(in_float32)),
    ),
}


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    kept = [vars(owner)[name] for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    yield
    for (owner, name, _), value in zip(patches, kept, strict=True):
        setattr(owner, name, value)


def without(patches: Sequence[Patch], work: Workload, points: int) -> Peer:
    with patched(patches):
        made = engine("auto", work, points)
    assert made is not None
    return made


def products(work: Workload) -> dict[str, Peer]:
    """Of the first layer, forwards and for the sum."""
    weight = next(leaf for leaf in jax.tree.leaves(work.point(0)) if leaf.ndim == 2 and leaf.shape[1:] == work.shape)
    back = jnp.asarray(np.random.default_rng(5).normal(size=(len(weight), work.records)), jnp.float32)
    summed = lambda x: jnp.einsum("orj,rji->roi", in_runs(back, 1), in_runs(x, 0))
    each: dict[str, Callable[[Any], Any]] = {
        "product forwards": lambda x: weight @ x.T, "product of the sum": lambda x: back @ x,
        "product of the sum, in runs": summed,
    }  # fmt: skip
    return {name: compiled(work, 1, lambda at, records, run=run: run(records[0])) for name, run in each.items()}


def main(name: str, points: int = 1) -> None:
    work = next(each for each in dense_workloads() if name in each.name)
    plain = PEERS[PLAIN](work, points)
    assert plain is not None
    all_of_them = [patch for patches in PIECES.values() for patch in patches]
    peers = {PLAIN: plain, "silodp": without((), work, points)}
    peers |= {f"without {piece}": without(patches, work, points) for piece, patches in PIECES.items()}
    peers |= {"without all of these": without(all_of_them, work, points)} | products(work)
    for peer in peers.values():
        peer.run()
    samples = interleaved({each: peer.run for each, peer in peers.items()}, TURNS, SECONDS * len(peers), PLAIN)
    print(f"{work.name}, {points} point{'s'[: points - 1]}")
    for each, own in samples.items():
        over = own.over(samples[PLAIN])
        print(f"  {each:45}{over['cpu'][1]:6.2f}x CPU {over['wall'][1]:6.2f}x wall", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
