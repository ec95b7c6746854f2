"""A run as an adversary sees it: the library's own federation and channels, with everything that is released kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from silodp.channels import Channel
from silodp.core import Answer, Public, Silo, Vector
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


class Watched:
    """The channel, and a copy of what passed through it in one question."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        self.public = isinstance(answer, Public)
        return self.channel.send(answer, silo, memory)

    def receive(self, messages: PyTree, *rest: Any) -> tuple[Vector, Any, PyTree]:
        self.messages = messages
        return self.channel.receive(messages, *rest)

    def seen(self, mean: Vector, before: PyTree) -> Float[Array, "views d"]:
        """What an adversary sees, as the channel says: one row for everybody, or a row for each silo."""
        return self.channel.seen(self.messages, mean, before)


class WatchedFederation:
    """Runs every question through `SimulatedFederation`, compiled one by one, and keeps each silo's view."""

    def __init__(self, prepared: Prepared, blank: Bool[np.ndarray, " k"]):
        self.problem, self.setting, self.blank = prepared.problem, prepared.setting, blank
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
        value, self.ends, seen, made_public = self._mean(self._facts(), self.ends, query, public)
        rows = [self._canaries(row) for row in seen]
        if made_public:
            rows = [self._without(row, public) for row in rows]
        own_noise = len(rows) == self.silos
        for view, row in zip(self.views, rows if own_noise else rows * self.silos, strict=True):
            view.add(row, own_noise)
        return value

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        value, self.ends = self._local(self._facts(), self.ends, jnp.asarray(index), task, public)
        self.views[int(index)].add(self._without(self._canaries(value), public), True)
        return value

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Float[Array, ""]:
        return self._simulated().coin(purpose)

    def _simulated(self) -> SimulatedFederation:
        return simulated(self._facts(), self.ends, self.setting.channel)

    def _facts(self) -> tuple[Any, ...]:
        return self.problem, self.setting, self.round

    def _canaries(self, vector: Vector) -> Float[np.ndarray, " k"]:
        """The coordinates that belong to records; the clock is of no use to the adversary."""
        return np.asarray(vector, np.float64)[: self.blank.size]

    def _without(self, made: Float[np.ndarray, " k"], public: tuple[Array, ...]) -> Float[np.ndarray, " k"]:
        """What a silo made from public points, less their part in it: as the coordinates without records show it."""
        points = np.stack([self._canaries(p) for p in public if p.ndim == 1], axis=1)
        parts = np.linalg.lstsq(points[self.blank], made[self.blank])[0]
        return made - points @ parts


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    quick: dict[str, Any] = {"compiler_options": QUICKLY_COMPILED}
    return eqx.filter_jit(function, **quick)


def simulated(facts: tuple[Any, ...], ends: Ends, channel: Any) -> SimulatedFederation:
    problem, setting, round = facts
    return SimulatedFederation(
        problem.objective, channel, problem.silos, problem.participation, setting.key, round, ends
    )


def ask_everyone(facts: tuple[Any, ...], ends: Ends, query: Any, public: tuple[Array, ...]) -> tuple[Any, ...]:
    watched = Watched(facts[1].channel)
    fed = simulated(facts, ends, watched)
    value = fed.mean(query, *public)
    return value, fed.ends, watched.seen(value, ends.silo_channel), watched.public


def ask_one(facts: tuple[Any, ...], ends: Ends, index: Array, task: Any, public: tuple[Array, ...]) -> tuple[Any, ...]:
    fed = simulated(facts, ends, facts[1].channel)
    return fed.local(index, task, *public), fed.ends


def observe(prepared: Prepared, blank: Bool[np.ndarray, " k"]) -> list[View]:
    """The whole run, and what it showed of each silo; an error when it released anything but what its plan says."""
    fed = WatchedFederation(prepared, blank)
    state = prepared.setting.algorithm.init(prepared.setting.x0)
    for r in range(prepared.problem.rounds):
        fed.begin_round(r)
        state = prepared.setting.algorithm.round(state, fed)
    if prepared.plan.private:
        settle(prepared.plan, fed.ends.accounts)
    return fed.views
