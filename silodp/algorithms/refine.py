"""Local steps of ONE silo a round that carry the server's estimate on by the silo's own private differences.

    w_1 = prox(x - step_size * v);  silo r mod N, for k = 1..K-1:
        v = v + private(clip(grad f(w_k; z) - grad f(w_{k-1}; z), clip_local * |w_k - w_{k-1}|))
        w_{k+1} = prox(w_k - step_size * v)

Shared by DIFF2-BVR-L-SGD and CE-PSGM. Every step is a release `local`, noised in the silo whatever the trust model, and
charged to that silo alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import equinox as eqx

from silodp.core import Federation, Public, Silo, Stream, Vector, distance
from silodp.prox import Prox
from silodp.sampling import BatchRule


class State(eqx.Module):
    x: Vector
    previous: Vector
    v: Vector


class Refining(Protocol):
    step_size: Any
    prox: Prox
    clip_local: Any
    local_steps: int
    batch_local: BatchRule

    def refine(self, silo: Silo, x: Vector, y: Vector, v: Vector) -> Public: ...


def advance(algorithm: Refining, x: Vector, v: Vector, fed: Federation) -> State:
    """A step along v, and the local steps of the silo whose turn it is."""
    first = algorithm.prox(x - algorithm.step_size * v, algorithm.step_size)
    if algorithm.local_steps == 1:
        return State(first, x, v)
    return State(fed.local(fed.round % fed.silos, algorithm.refine, first, x, v), x, v)


def refined(algorithm: Refining, silo: Silo, x: Vector, y: Vector, v: Vector) -> Public:
    def step(k: Any, carry: tuple[Vector, Vector, Vector]) -> tuple[Vector, Vector, Vector]:
        x, y, v = carry
        clip = None if algorithm.clip_local is None else algorithm.clip_local * distance(x, y)
        v = v + silo.privatise(silo.mean([x, y], [1.0, -1.0], clip, "local", algorithm.batch_local, k), k)
        return algorithm.prox(x - algorithm.step_size * v, algorithm.step_size), x, v

    return Public(silo.loop(algorithm.local_steps - 1, step, (x, y, v))[0])


def local_stream(algorithm: Refining, silo: int, silos: int, rounds: Any) -> Stream:
    own = sum(r % silos == silo for r in rounds)
    return Stream("local", own * (algorithm.local_steps - 1), algorithm.batch_local)
