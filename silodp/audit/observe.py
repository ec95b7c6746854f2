"""A run as an adversary sees it: the library's own federation and channels, with everything that is released kept.

What a silo sends is made of what it has noised, so the releases themselves are looked at: an adversary who knows the
silo's memory and undoes what the silo did with them (local steps, control variates, compression) could see no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels import Channel
from silodp.core import Answer, Public, Release, Silo, Vector
from silodp.plan.certificate import settle
from silodp.run.federation import Ends, SimulatedFederation
from silodp.run.runner import Prepared
from silodp.run.simulate import start

# Programs run a few times and then never again: compiling them is what an audit costs.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass
class View:
    """What is released about one silo's records, one row a release, and whose noise is in it."""

    releases: list[Float[np.ndarray, " k"]] = field(default_factory=list)
    own_noise: list[bool] = field(default_factory=list)

    def add(self, values: Float[np.ndarray, " k"], own_noise: bool) -> None:
        self.releases.append(values)
        self.own_noise.append(own_noise)


class WatchedSilo(Silo):
    """A silo whose releases are kept. Its loops are written out: what happens inside them must be seen too."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.seen: list[Vector] = []

    def saw(self, release: Release, noised: Vector) -> None:
        self.seen.append(noised)

    def loop(self, steps: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        for k in range(steps):
            carry = body(jnp.int32(k), carry)
        return carry


class WatchedSimulation(SimulatedFederation):
    silo_kind = WatchedSilo


class Watched:
    """The channel, and a copy of what passed through it in one question."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def send(self, answer: Answer, silo: WatchedSilo, memory: PyTree) -> tuple[PyTree, PyTree]:
        message, memory = self.channel.send(answer, silo, memory)
        return (message, silo.seen), memory

    def receive(self, messages: PyTree, *rest: Any) -> tuple[Vector, Any, PyTree]:
        self.messages, self.released = messages
        return self.channel.receive(self.messages, *rest)

    def bits(self, messages: PyTree) -> Any:
        return self.channel.bits(messages[0])


class WatchedFederation:
    """Runs every question through `SimulatedFederation`, compiled one by one, and keeps each silo's view.

    `coordinates`: those that belong to records. A release of another shape (a statistic) has none; it is left to the
    check on neighbours.
    """

    def __init__(self, prepared: Prepared, coordinates: int):
        self.problem, self.setting, self.coordinates = prepared.problem, prepared.setting, coordinates
        self.silos = len(self.problem.silos)
        self.views = [View() for _ in range(self.silos)]
        # Functions of this federation alone: a program never outlives the code it was compiled from.
        self.ends = compiled(lambda *given: start(*given).ends)(self.problem, self.setting)
        self._mean = compiled(lambda *given: ask_everyone(*given))
        self._local = compiled(lambda *given: ask_one(*given))

    def begin_round(self, round: int) -> None:
        self.round = jnp.int32(round)
        self.present = self._simulated().present

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        value, self.ends, seen = self._mean(self._facts(), self.ends, query, public)
        for rows in filter(self._of_records, seen):
            own_noise = len(rows) == self.silos
            for i, view in enumerate(self.views):
                view.add(self._canaries(rows[i if own_noise else 0]), own_noise)
        return value

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        value, self.ends, seen = self._local(self._facts(), self.ends, jnp.asarray(index), task, public)
        for row in seen:
            self.views[int(index)].add(self._canaries(row), True)
        return value

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Float[Array, ""]:
        return self._simulated().coin(purpose)

    def _simulated(self) -> SimulatedFederation:
        return simulated(self._facts(), self.ends, self.setting.channel)

    def _facts(self) -> tuple[Any, ...]:
        return self.problem, self.setting, self.round

    def _of_records(self, rows: Float[Array, "views k"]) -> bool:
        return rows.shape[-1] == self.problem.objective.parameters

    def _canaries(self, vector: Vector) -> Float[np.ndarray, " k"]:
        """The coordinates that belong to records; the clock is of no use to the adversary."""
        return np.asarray(vector, np.float64)[: self.coordinates]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    quick: dict[str, Any] = {"compiler_options": QUICKLY_COMPILED}
    return eqx.filter_jit(function, **quick)


def simulated(facts: tuple[Any, ...], ends: Ends, channel: Any) -> WatchedSimulation:
    problem, setting, round = facts
    return WatchedSimulation(problem.objective, channel, problem.silos, problem.participation, setting.key, round, ends)


def ask_everyone(facts: tuple[Any, ...], ends: Ends, query: Any, public: tuple[Array, ...]) -> tuple[Any, ...]:
    watched = Watched(facts[1].channel)
    fed = simulated(facts, ends, watched)
    value = fed.mean(query, *public)
    return value, fed.ends, watched.channel.seen(watched.messages, value, watched.released)


def ask_one(facts: tuple[Any, ...], ends: Ends, index: Array, task: Any, public: tuple[Array, ...]) -> tuple[Any, ...]:
    fed = simulated(facts, ends, facts[1].channel)
    seen: list[Vector] = []

    def watched(silo: WatchedSilo, *public: Array) -> Public:
        answer = task(silo, *public)
        seen.extend(silo.seen)
        return answer

    return fed.local(index, watched, *public), fed.ends, seen


def observe(prepared: Prepared, coordinates: int) -> list[View]:
    """The whole run, and what it showed of each silo; an error when it released anything but what its plan says."""
    fed = WatchedFederation(prepared, coordinates)
    state = prepared.setting.algorithm.init(prepared.setting.x0)
    for r in range(prepared.problem.rounds):
        fed.begin_round(r)
        state = prepared.setting.algorithm.round(state, fed)
    if prepared.plan.private:
        settle(prepared.plan, fed.ends.accounts)
    return fed.views
