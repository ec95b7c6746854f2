"""A run as an adversary sees it: the library's own federation and channels, with everything that is released kept.

What a silo sends is made of what it has noised, so the releases themselves are looked at: an adversary who knows the
silo's memory and undoes what the silo did with them (local steps, control variates, compression) could see no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from silodp.audit.canaries import Canaries, canary_data
from silodp.channels import Channel
from silodp.core import Silo
from silodp.doubles import Double
from silodp.objective import ModelObjective
from silodp.plan.certificate import settle
from silodp.randomness import SERVER, SeededRandomness, party_key
from silodp.releases import Answer, Public, Release, Vector
from silodp.run.federation import Ends, SimulatedFederation
from silodp.run.prepare import Prepared
from silodp.run.simulate import start

# Programs run a few times and then never again: compiling them is what an audit costs, unless each record is dear.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OPTIMISED = {"xla_backend_optimization_level": 1}


@dataclass(frozen=True)
class View:
    """What is released about one silo's records, one row a release, and whose noise is in it."""

    releases: Float[np.ndarray, "r runs k"]
    own_noise: Bool[np.ndarray, " r"]
    clocks: Float[np.ndarray, "r runs p"]  # at the points that a release was asked at


@dataclass
class Seen:
    """The same of one run, as it grows."""

    releases: list[Float[np.ndarray, " k"]] = field(default_factory=list)
    own_noise: list[bool] = field(default_factory=list)
    clocks: list[list[float]] = field(default_factory=list)

    def add(self, values: Float[np.ndarray, " k"], own_noise: bool, clocks: list[float]) -> None:
        self.releases.append(values)
        self.own_noise.append(own_noise)
        self.clocks.append(clocks)


def joined(runs: Sequence[Seen]) -> View:
    points = max((len(clocks) for clocks in runs[0].clocks), default=0)
    clocks = [[each + [np.nan] * (points - len(each)) for each in run.clocks] for run in runs]
    releases = np.stack([np.stack(run.releases) for run in runs], axis=1)
    return View(releases, np.array(runs[0].own_noise), np.moveaxis(np.array(clocks), 0, 1))


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

    in_parts = False  # every message is looked at

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


class Traces:
    """What was traced of an objective in one audit: rows ask for the same sums, and a trace is found again.

    Traces are inlined, so that programs are those of a run to the letter.
    """

    def __init__(self) -> None:
        traced = partial(jax.jit, static_argnums=(0, 1), inline=True)
        chosen = lambda known, coefficients: coefficients if known is None else list(known)
        self.sum = traced(lambda of, known, points, c, *given: of.clipped_sum(points, chosen(known, c), *given))
        self.rows = traced(lambda of, known, points, c, *given: of.per_record(points, chosen(known, c), *given))


class TracedOnce(ModelObjective):
    """An objective that is traced once for all rows of an audit."""

    plain: ModelObjective = eqx.field(static=True, kw_only=True)
    traces: Traces = eqx.field(static=True, kw_only=True)

    @staticmethod
    def of(plain: ModelObjective, traces: Traces) -> TracedOnce:
        return TracedOnce(**{f.name: getattr(plain, f.name) for f in fields(plain)}, plain=plain, traces=traces)

    def clipped_sum(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, weights: Array, clip: Any
    ) -> Double:
        if clip is None:
            return self.plain.clipped_sum(points, coefficients, records, weights, clip)
        given = known_numbers(coefficients), list(points), in_arrays(coefficients), records, weights
        return self.traces.sum(self.plain, *given, jnp.float32(clip))

    def per_record(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, clip: Any
    ) -> Float[Array, "n d"]:
        if clip is None:
            return self.plain.per_record(points, coefficients, records, clip)
        given = known_numbers(coefficients), list(points), in_arrays(coefficients), records
        return self.traces.rows(self.plain, *given, jnp.float32(clip))


def known_numbers(coefficients: Sequence[Any]) -> tuple[float, ...] | None:
    """Numbers that a run's program has in it, where all are: a sum that is known to be 0 makes another program."""
    return tuple(coefficients) if all(isinstance(c, (int, float)) for c in coefficients) else None


def in_arrays(coefficients: Sequence[Any]) -> list[Array]:
    return [jnp.asarray(c, jnp.float32) for c in coefficients]


class Programs:
    """Functions of one audit alone, for all its runs: a program never outlives the code it was compiled from.

    dear: records are, so that programs are optimised. traces: shared with the audit's other programs.
    """

    def __init__(self, dear: bool, traces: Traces) -> None:
        self.traces, options = traces, OPTIMISED if dear else QUICKLY_COMPILED
        self.start = compiled(lambda *given: start(*given).ends, options)
        self.mean = compiled(lambda *given: ask_everyone(*given), options)
        self.local = compiled(lambda *given: ask_one(*given), options)


class WatchedFederation:
    """Runs every question through `SimulatedFederation`, compiled one by one, and keeps what is seen of each silo.

    `coordinates`: those that belong to records. A release of another shape (a statistic) has none; it is left to the
    check on neighbours. `public`: the key of the public coins, the same in all runs, so that their releases match.
    """

    def __init__(self, prepared: Prepared, coordinates: int, programs: Programs, public: Array):
        self.problem, self.setting, self.coordinates = prepared.problem, prepared.setting, coordinates
        self.silos, self.programs, self.public = len(self.problem.silos), programs, public
        self.seen = [Seen() for _ in range(self.silos)]
        self.ends = programs.start(self.problem, self.setting)

    def begin_round(self, round: int) -> None:
        self.round = jnp.int32(round)
        self.present = self._simulated().present

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        value, self.ends, released = self.programs.mean(self._facts(), self.ends, query, public)
        for rows in filter(self._of_records, released):
            own_noise = len(rows) == self.silos
            for i, seen in enumerate(self.seen):
                seen.add(self._canaries(rows[i if own_noise else 0]), own_noise, clocks(public))
        return value

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        value, self.ends, released = self.programs.local(self._facts(), self.ends, jnp.asarray(index), task, public)
        for row in released:
            self.seen[int(index)].add(self._canaries(row), True, clocks(public))
        return value

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Float[Array, ""]:
        return SeededRandomness(party_key(self.public, self.round, SERVER)).uniform(f"coin/{purpose}", ())

    def _simulated(self) -> SimulatedFederation:
        return simulated(self._facts(), self.ends, self.setting.channel)

    def _facts(self) -> tuple[Any, ...]:
        return self.problem, self.setting, self.round

    def _of_records(self, rows: Float[Array, "views k"]) -> bool:
        return rows.shape[-1] == self.problem.objective.parameters

    def _canaries(self, vector: Vector) -> Float[np.ndarray, " k"]:
        """The coordinates that belong to records; the clock is of no use to the adversary."""
        return np.asarray(vector, np.float64)[: self.coordinates]


def compiled(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    passed_on: dict[str, Any] = {"compiler_options": options}
    return eqx.filter_jit(function, **passed_on)


def simulated(facts: tuple[Any, ...], ends: Ends, channel: Any) -> WatchedSimulation:
    problem, setting, round = facts
    answering = problem.participation, setting.key, round, ends, problem.same_silos
    return WatchedSimulation(problem.objective, channel, problem.silos, *answering)


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


def clocks(public: tuple[Array, ...]) -> list[float]:
    """The clock, which is the last parameter, at the points of a question."""
    return [float(point[-1]) for point in public if point.ndim == 1]


def observe(prepared: Prepared, canaries: Canaries, programs: Programs) -> list[View]:
    """Whole runs, each with its own seed and signs, and what they showed of each silo."""
    objective = TracedOnce.of(prepared.problem.objective, programs.traces)
    prepared = replace(prepared, problem=replace(prepared.problem, objective=objective))
    runs = [observe_once(run_of(prepared, canaries, r), programs, prepared.setting.key) for r in range(canaries.runs)]
    return [joined(seen) for seen in zip(*runs, strict=True)]


def run_of(prepared: Prepared, canaries: Canaries, run: int) -> Prepared:
    """The same plan and program with the signs and the seed of this run."""
    records = jax.tree.map(jnp.asarray, canary_data(canaries, run).stack()[:2])
    problem = eqx.tree_at(lambda problem: problem.silos.records, prepared.problem, records)
    setting = eqx.tree_at(lambda setting: setting.key, prepared.setting, run_key(prepared, run))
    return replace(prepared, problem=problem, setting=setting)


def run_key(prepared: Prepared, run: int) -> Array:
    return jax.random.fold_in(prepared.setting.key, run)


def observe_once(prepared: Prepared, programs: Programs, public: Array) -> list[Seen]:
    """One run; an error when it released anything but what its plan says."""
    fed = WatchedFederation(prepared, prepared.setting.x0.size - 1, programs, public)
    state = prepared.setting.algorithm.init(prepared.setting.x0)
    for r in range(prepared.problem.rounds):
        fed.begin_round(r)
        state = prepared.setting.algorithm.round(state, fed)
    if prepared.plan.private:
        settle(prepared.plan, fed.ends.accounts)
    return fed.seen
