"""The same algorithm message by message: every silo in a process of its own, bytes between them, nothing shared.

The server's side of a round is the algorithm's own `round`, executed eagerly with a `MessageFederation`. The silo's
side is silodp.deploy.silo_process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from silodp.channels import Packed
from silodp.core import Algorithm
from silodp.deploy.links import Answer as Told
from silodp.deploy.links import Link
from silodp.deploy.recorded import Recorded
from silodp.deploy.shuffling import PARCEL
from silodp.deploy.wire import Late, is_number
from silodp.errors import Gone, Refused
from silodp.plan.plan import Plan
from silodp.randomness import SERVER, Randomness, SeededRandomness, SystemRandomness, party_key, seeded
from silodp.releases import Account, Answer, Public, Tally, Vector

LARGEST = 1e30  # of numbers in an answer: no clipped mean is that long, and float32 would lose its squares


def exchange(silos: Sequence[Link], ready: Sequence[Mapping[str, Any]]) -> None:
    """Hand every silo the others' public keys, where there are any; all must have agreed on the same."""
    told = {f"{name}s": [each.get(name) for each in ready] for name in ("key", "signature")}
    if not all(told["keys"]):
        return
    for silo in silos:
        silo.send({"kind": "keys"} | told, {})
    fingerprints = {str(silo.receive()[0].get("fingerprint")) for silo in silos}
    if len(fingerprints) > 1:
        raise Refused("keys: the silos have agreed on different plans or keys; their masks would not cancel")


def placed(places: np.ndarray, old: Any, new: Any) -> np.ndarray:
    """All silos' numbers, with new ones for some of them. In numpy: a program for every such step would be compiled."""
    whole = np.array(old)
    whole[places] = new
    return whole


class MessageFederation:
    """The server's view of silos that only answer in bytes."""

    def __init__(self, plan: Plan, processes: Sequence[Link], seed: int | None, shuffler: Any = None):
        self.whole, self.processes, self.seed = plan, processes, seed
        self.plan = plan.at(plan.stages[0].name)  # the stage that is asked about
        self.silos, self.round = len(processes), 0
        self.parties = [*processes, *([] if shuffler is None else [shuffler.link])]  # all that keep their answers
        self.accounts = jax.tree.map(np.asarray, Account.empty(plan.streams, (self.silos,)))
        self.end = plan.noised.server_end(plan.sizes, shuffler)
        self.end.kept = self._kept
        self.bits, self.gradients = np.zeros(2), 0.0
        self.coins: Recorded | None = None  # of a run that can be resumed
        self.skips = False  # whether a round goes on without a silo that does not answer
        self.gone: set[int] = set()  # silos whose processes ended
        # Who wants to keep answers: round, question, silos, what they sent, what came out.
        self.heard: Callable[[int, str, Sequence[int], Sequence[Packed], Vector], None] = lambda *_: None

    def stage(self, x0: Vector) -> Vector:
        """All rounds of a stage beside training: what it released."""
        asked = self.plan.algorithm
        state = asked.init(x0)
        for r in range(self.plan.facts.rounds):
            self.begin_round(r)
            state = asked.round(state, self)
        return state.x

    def leave(self, released: Vector | None = None) -> None:
        """The next stage begins; every silo gets what this one released, if records are to be mapped by it."""
        names, name = [stage.name for stage in self.whole.stages], self.plan.stages[0].name
        arrays = {} if released is None else {"released": np.asarray(released)}
        self._tell({"kind": "leave", "stage": name}, arrays)
        self.plan = self.whole.at(names[names.index(name) + 1])

    def rounds(self, algorithm: Algorithm, x0: Vector) -> Iterator[Any]:
        """A whole run of the stage that is asked about: the algorithm's state after each of its rounds."""
        self.start(x0)
        state = algorithm.init(x0)
        for r in range(self.plan.facts.rounds):
            self.begin_round(r)
            state = algorithm.round(state, self)
            yield state

    def start(self, x0: Vector) -> None:
        told: list[Any] = [said.get("gradients") for said in self._tell({"kind": "start"}, {"x0": np.asarray(x0)})]
        if not all(is_number(each) for each in told):
            raise Refused("start: a silo's answer is none")
        self.gradients += sum(told)

    def _tell(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        living = [silo for i, silo in enumerate(self.processes) if i not in self.gone]
        for silo in living:
            silo.send(header, arrays)
        return [silo.receive()[0] for silo in living]

    def begin_round(self, round: int) -> None:
        self.round = round
        self.randomness: Randomness = SystemRandomness()
        if self.coins is not None:
            self.coins.begin(self.plan.stages[0].name, round)
            self.randomness = self.coins
        if self.seed is not None:
            self.randomness = SeededRandomness(party_key(seeded(self.seed), round, SERVER))
        self.present = np.asarray(self.plan.facts.present(round))

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        name = query.__name__
        stream = self.plan.algorithm.stream_of(name)
        if stream in self.plan.sizes:
            each = self.plan.declared.divisors(stream)
            sent = [round(own) if i in self.present else 0 for i, own in enumerate(each)]
            self.end.expect(self.round, name, sent, self.plan.sizes[stream])
        asked = self._summed if self.end.missing else self._asked
        present, packed = asked(name, public, stream)
        weights = jax.device_put(np.asarray(self.plan.facts.weights, np.float32)[present])
        own = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf)[present], self.accounts))
        value, own = self._mean(packed, weights, own)
        self.heard(self.round, name, present.tolist(), packed, value)
        self.accounts = jax.tree.map(partial(placed, present), self.accounts, own)
        return value

    def _asked(self, name: str, public: tuple[Array, ...], stream: str) -> tuple[np.ndarray, list[Packed]]:
        """Who answered, and what. Who did is kept before it is used: a resumed round must not find others."""
        known = None if self.coins is None or not self.skips else self.coins.next("present")
        present = self.present if known is None else known
        for i in present:
            self._send(int(i), "ask", name, public)
        packed: dict[int, Packed] = {}
        for i in present:
            try:
                packed[int(i)] = self._receive(int(i), stream)
            except Late:
                if not self.skips or known is not None:
                    raise
        if not packed:
            raise Late(f"round {self.round}: no silo answers")
        packed |= {i: self._told(i, name, public, stream, packed) for i in undecided(packed)}
        if self.coins is not None and self.skips and known is None:
            self.coins.keep("present", np.array(list(packed)))
        return np.array(list(packed)), list(packed.values())

    def _summed(self, name: str, public: tuple[Array, ...], stream: str) -> tuple[np.ndarray, list[Packed]]:
        """The same where only sums are read, and a round can do without some silos: it is prepared, and opened."""
        with self._fitting():
            asked = self.end.prepare(self._talk, [int(i) for i in self.present if int(i) not in self.gone])
        known = None if self.coins is None else self.coins.next("present")
        asked = asked if known is None else known.tolist()
        asked = [i for i in asked if self._reached(i, lambda i: self._send(i, "ask", name, public) or True)]
        receive = lambda i: self._receive(i, stream)
        answers = {i: answer for i in asked if (answer := self._reached(i, receive)) is not None}
        again = lambda i: self._told(i, name, public, stream, answers)
        answers |= {i: self._reached(i, again) for i in undecided(answers)}
        answers = {i: answer for i, answer in answers.items() if answer is not None}
        if known is not None and len(answers) < len(known):
            raise Late(f"round {self.round}: a silo whose answer belongs to this round's sum does not repeat it")
        if self.coins is not None and known is None:
            self.coins.keep("present", np.array(list(answers)))
        with self._fitting():
            self.end.open(self._talk, list(answers))
        return np.array(list(answers)), list(answers.values())

    def _kept(self, step: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What silos said in a step around a sum. They confirm one set: a resumed round must not tell them another."""
        known = None if self.coins is None else self.coins.next(step)
        if known is not None:
            return json.loads(known.tobytes())
        told = ask()
        if self.coins is not None:
            self.coins.keep(step, np.frombuffer(json.dumps(told).encode(), np.uint8))
        return told

    def _told(self, index: int, name: str, public: Any, stream: str, answers: Mapping[int, Packed]) -> Packed:
        """The answer of a silo on the border between two grids, which is told the one that the others take."""
        settled = {each.facts["exponent"] for each in answers.values() if "exponent" in each.facts}
        exponent = settled.pop() if settled else min(answers[index].facts["exponents"])
        self._send(index, "ask", name, public, {"exponent": exponent})
        return self._receive(index, stream)

    def _reached(self, index: int, action: Callable[[int], Any]) -> Any:
        """None when the silo is gone; whether the round can do without it is counted when its sum is made."""
        try:
            return action(index)
        except Gone:
            self.gone.add(index)
            return None

    def _talk(self, said: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """What is said around a question: to all first, and then their answers."""
        send = lambda i: self.processes[i].send({"kind": "sum"} | said[i], {}) or True
        asked = [i for i in said if self._reached(i, send)]
        told = {i: self._reached(i, lambda i: self.processes[i].receive()[0]) for i in asked}
        return {i: answer for i, answer in told.items() if answer is not None}

    def _mean(self, packed: Sequence[Packed], weights: Array, accounts: Account) -> tuple[Vector, Account]:
        """What the silos' answers come to."""
        with self._fitting(), np.errstate(over="ignore"):  # what is too large is told below
            value, accounts = self.end.mean(packed, weights, accounts, self.randomness)
        if not np.max(np.abs(value), initial=0.0) <= LARGEST:  # also of NaN
            raise Refused(f"round {self.round}: the mean of the answers is no number that a run can go on from")
        return value, accounts

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """An answer that no honest silo sends ends the run, not this program."""
        try:
            yield
        except Refused:
            raise
        except MALFORMED as error:
            raise Refused(f"round {self.round}: the answers do not fit together ({type(error).__name__})") from None

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        self._send(int(index), "local", task.__name__, public)
        return jax.device_put(self._receive(int(index), None).arrays["value"])

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Float[Array, ""]:
        return self.randomness.uniform(f"coin/{purpose}", ())

    def take_costs(self) -> dict[str, float]:
        """What was sent and computed since the last call."""
        up, down = self.bits[0] + self.end.bits, self.bits[1]
        costs = {"bits_up": float(up), "bits_down": float(down), "record_gradients": float(self.gradients)}
        self.bits, self.gradients, self.end.bits = np.zeros(2), 0.0, 0.0
        return costs

    def final_accounts(self) -> Account:
        """What each silo counted itself, joined with what the server counted for it."""
        own = [self._own_account(i) for i in range(self.silos)]
        gather = lambda name: np.stack([arrays[name] for arrays in own])
        tallies = {
            stream: Tally(
                *jax.device_put(
                    (
                        np.asarray(tally.count) + gather(f"count/{stream}"),
                        np.minimum(tally.multiplier, gather(f"multiplier/{stream}")),
                    )
                )
            )
            for stream, tally in self.accounts.tallies.items()
        }
        return Account(tallies, jax.device_put(gather("gradients")))

    def _own_account(self, index: int) -> dict[str, np.ndarray]:
        """As the silo counts; one that went away is charged with all that the plan has."""
        if index not in self.gone:
            self.processes[index].send({"kind": "account"}, {})
            return self.processes[index].receive()[1]
        arrays: dict[str, Any] = {"gradients": np.float32(0.0)}
        for stream in self.whole.releases(index):
            line = self.whole.channel.accounted_as(stream)
            arrays[f"count/{stream.name}"] = np.int32(stream.count)
            arrays[f"multiplier/{stream.name}"] = np.float32(self.whole.protecting(line)[index])
        return {name: np.asarray(value) for name, value in arrays.items()}

    def _send(
        self, index: int, kind: str, name: str, public: tuple[Array, ...], more: Mapping[str, Any] | None = None
    ) -> None:
        arrays = {str(i): np.asarray(point) for i, point in enumerate(public)}
        try:
            self.processes[index].send({"kind": kind, "query": name, "round": self.round} | dict(more or {}), arrays)
        except Refused as error:
            raise self._missing(index, error) from None
        self.bits[1] += 8 * sum(a.nbytes for a in arrays.values())

    def _receive(self, index: int, stream: str | None) -> Packed:
        try:
            packed = checked(self.processes[index].receive(), self._expected(index, stream))
        except Refused as error:
            raise self._missing(index, error) from None
        # What is in a parcel is counted when the shuffler has released it.
        self.bits[0] += 8 * sum(array.nbytes for name, array in packed.arrays.items() if name != PARCEL)
        self.gradients += packed.facts["gradients"]
        return packed

    def _expected(self, index: int, stream: str | None) -> dict[str, Any]:
        """What the plan says of a silo's answer, by the name of the fact."""
        size = self.plan.sizes.get(stream or "")
        if stream is None or size is None:
            return {}
        records = self.plan.declared.divisors(stream)[index]
        return {"stream": stream, "parameters": size, "records": records, "round": self.round}

    def _missing(self, index: int, error: Refused) -> Refused:
        name = self.plan.facts.names[index]
        return type(error)(f"silo {name!r} in round {self.round}: {error}; the run ends here, without this round")


# What is raised by code that an answer of another form reaches.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
UNNAMED = (None, "public")  # streams of what is public already


def checked(told: Told, expected: Mapping[str, Any]) -> Packed:
    """An answer, if it is of the form that the plan has; its numbers are finite, and facts are the plan's."""
    header, arrays = told
    exponents = header.get("exponents")
    if header.get("kind") == "grid" and isinstance(exponents, list) and [type(each) for each in exponents] == [int] * 2:
        return Packed({"gradients": 0.0, "exponents": exponents}, {})
    facts = header.get("facts")
    if header.get("kind") != "answer" or not isinstance(facts, dict):
        raise Refused("its answer is none")
    for name in facts.keys() & expected.keys():
        if not same(facts[name], expected[name]) and not (name == "stream" and facts[name] in UNNAMED):
            raise Refused(f"its answer says another {name} than the plan")
    if not all(is_number(facts.get(name, 0.0)) for name in ("gradients", "step", "records")):
        raise Refused("its answer tells numbers that are none")
    for name, array in arrays.items():
        check_array(name, array, expected.get("parameters"))
    return Packed({"gradients": 0.0} | facts, arrays)


def undecided(packed: Mapping[int, Packed]) -> list[int]:
    """Silos that answered with a question: on which grid?"""
    return [i for i, each in packed.items() if not each.arrays and "exponents" in each.facts]


def same(told: Any, planned: Any) -> bool:
    """Numbers of records are told in float32."""
    return told == planned or (is_number(told) and is_number(planned) and math.isclose(told, planned, rel_tol=1e-6))


def check_array(name: str, array: np.ndarray, size: int | None) -> None:
    if array.dtype.kind not in "iuf" or array.ndim > 1:
        raise Refused("its answer holds an array of another kind")
    if size is not None and name in ("value", "total") and array.shape != (size,):
        raise Refused(f"its answer has {array.size} numbers, the plan {size}")
    if array.dtype.kind == "f" and not (np.abs(array) <= LARGEST).all():
        raise Refused("its answer holds numbers that are not finite")
