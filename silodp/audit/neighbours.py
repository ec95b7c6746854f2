"""Measured sensitivity: a whole run on two neighbouring inputs, release by release.

Silo 0's first record is replaced by another. Both runs are asked the same questions with the same coins, and whatever
one of them released the other is given too (an adversary sees one transcript); then every release must have moved by no
more than its bound. Nothing is compiled and loops are written out, so that each release is seen where it is noised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from silodp.core import Silo, Site
from silodp.doubles import exact
from silodp.randomness import SERVER, SeededRandomness, party_key
from silodp.releases import Account, Answer, Public, RecordMean, Release, Vector
from silodp.run.prepare import Prepared

ROUNDING = 1e-6  # of the bound itself, which is a float32 number


@dataclass
class Moved:
    """How far each release moved, in units of its bound; the worst one by stream."""

    worst: dict[str, float] = field(default_factory=dict)

    def note(self, stream: str, ratio: float) -> None:
        self.worst[stream] = max(self.worst.get(stream, 0.0), ratio)

    def join(self, other: Moved) -> None:
        for stream, ratio in other.worst.items():
            self.note(stream, ratio)

    @property
    def exceeded(self) -> dict[str, float]:
        return {stream: ratio for stream, ratio in self.worst.items() if not ratio <= 1 + ROUNDING}


class Recorder(Silo):
    """A silo that writes down its releases, or is given those of another run and compares its own with them."""

    transcript: list[tuple[Release, Vector]]
    replayed: list[tuple[Release, Vector]] | None
    moved: Moved

    def privatise(self, answer: RecordMean | Release, step: Any = 0) -> Vector:
        release = answer if isinstance(answer, Release) else answer.release()
        self.account = self.account.spend(release.stream, jnp.float32(1.0))
        return self.released(release)

    def released(self, release: Release) -> Vector:
        if self.replayed is None:
            noise = self.randomness.normal(f"probe/{len(self.transcript)}", release.value.shape)
            bound = jnp.where(jnp.isfinite(release.bound), release.bound, 0.0)
            self.transcript.append((release, release.value + bound * noise))
            return self.transcript[-1][1]
        other, noised = self.replayed.pop(0)
        shift = float(np.linalg.norm(exact(release.exact) - exact(other.exact)))
        bound = float(jnp.minimum(release.bound, other.bound))
        self.moved.note(release.stream, shift / bound if bound > 0 else (np.inf if shift > 0 else 0.0))
        return noised

    def loop(self, steps: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        for k in range(steps):
            carry = body(jnp.int32(k), carry)
        return carry

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()


class NeighbourFederation:
    """Asks every silo, and silo 0 twice: with the one and with the other of two first records."""

    def __init__(self, prepared: Prepared, one: PyTree, other: PyTree):
        self.plan, self.problem, self.setting = prepared.plan, prepared.problem, prepared.setting
        self.silos, self.moved = len(self.problem.silos), Moved()
        self.records = [self._own(i) for i in range(self.silos)]
        with_first = lambda new: jax.tree.map(lambda leaf, value: leaf.at[0].set(value), self.records[0], new)
        self.records[0], self.neighbour = with_first(one), with_first(other)
        remember = lambda i, records: self.plan.algorithm.remember(self._silo(i, records, -1, ()), self.setting.x0)
        self.memory = [remember(i, records) for i, records in enumerate(self.records)]
        self.replaced = remember(0, self.neighbour)

    def begin_round(self, round: int) -> None:
        self.round = round
        self.present = np.asarray(self.plan.facts.present(round))

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        weights = np.asarray(self.plan.facts.weights)[self.present]
        values = [self._asked(int(i), query, public) for i in self.present]
        return jnp.tensordot(jnp.asarray(weights / weights.sum(), jnp.float32), jnp.stack(values), 1)

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        return self._asked(int(index), task, public)

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Array:
        server = SeededRandomness(party_key(self.setting.key, self.round, SERVER))
        return server.uniform(f"coin/{purpose}", ())

    def _asked(self, i: int, query: Callable[..., Answer], public: tuple[Array, ...]) -> Vector:
        silo = self._silo(i, self.records[i], self.round, self.memory[i])
        value = let_out(query(silo, *public), silo)
        self.memory[i] = silo.memory
        if i == 0:
            other = self._silo(0, self.neighbour, self.round, self.replaced)
            other.replayed = list(silo.transcript)
            let_out(query(other, *public), other)
            self.replaced = other.memory
        return value

    def _own(self, i: int) -> PyTree:
        size = int(self.problem.silos.sizes[i])
        return jax.tree.map(lambda leaf: leaf[i, :size], self.problem.silos.records)

    def _silo(self, i: int, records: PyTree, round: int, memory: PyTree) -> Recorder:
        size = jnp.int32(jax.tree.leaves(records)[0].shape[0])
        site = Site(self.problem.objective, self.plan.noised, records, size, jnp.int32(i), alone=True)
        coins = SeededRandomness(party_key(self.setting.key, round, i))
        silo = Recorder(site, jnp.int32(round), coins, memory, Account.empty(self.plan.streams))
        silo.transcript, silo.replayed, silo.moved = [], None, self.moved
        return silo


def let_out(answer: Answer, silo: Recorder) -> Vector:
    if isinstance(answer, Public):
        return answer.value
    return silo.released(answer if isinstance(answer, Release) else answer.release())


def measured_sensitivity(prepared: Prepared, rounds: int, one: PyTree, other: PyTree) -> Moved:
    """The run's first rounds on neighbours that differ in silo 0's first record."""
    fed = NeighbourFederation(prepared, one, other)
    state = prepared.plan.algorithm.init(prepared.setting.x0)
    for r in range(min(rounds, prepared.problem.rounds)):
        fed.begin_round(r)
        state = prepared.plan.algorithm.round(state, fed)
    return fed.moved
