"""One silo: its records, its memory, its account, and the answers it gives.

It is given the agreed plan and its own records once, and afterwards only public points and round numbers. Noise,
batches and masks are drawn here, from the operating system's entropy. It answers no question twice, never goes back in
rounds, and refuses whatever would exceed the releases of the plan. silodp.deploy.silo_process carries bytes to it and
back; a guard puts a ledger in between.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from silodp.core import Silo, Site, ask, privatised
from silodp.deploy.shuffling import LocalOutbox
from silodp.deploy.wire import encode
from silodp.digits import rounded_up
from silodp.errors import Refused
from silodp.facts import Facts, Stream
from silodp.objective import build_objective, example_record, with_penalty
from silodp.plan.calibrate import TRAINING
from silodp.plan.checks import vouched_bounds
from silodp.plan.make import make_plan
from silodp.plan.parts import trained_model, trained_on
from silodp.plan.plan import Plan
from silodp.randomness import Randomness, SeededRandomness, SharedBatch, SystemRandomness, party_key, seeded
from silodp.records import count, fitting
from silodp.releases import Account
from silodp.stages.held_out import divided
from silodp.stages.maps import Map, mapped_records, sound, with_steps

KEPT = ("memory", "account", "wire")  # between rounds


class Vouching(Protocol):
    """Who signs a silo's key of a run, and knows the signatures of the others (silodp.deploy.vouch)."""

    def sign(self, key: bytes) -> bytes: ...

    def check(self, index: int, key: bytes, signature: bytes) -> None: ...


class SiloServer:
    """One silo's records, memory and account, and the answers it gives.

    `vouching`: signs this silo's key and checks the others', where sites are known by keys of their own. `outbox`: the
    way to a shuffler that is a site.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        records: Mapping[str, np.ndarray],
        vouching: Vouching | None = None,
        outbox: Any = None,
    ):
        self.vouching = vouching
        self.index: int = setup["index"]
        self.seed: int | None = setup["seed"]
        self.whole = Plan.from_json(setup["plan"])
        facts = self.whole.facts
        if self.index not in range(facts.silos):
            raise Refused(f"setup: index = {self.index!r}; the plan has silos 0 to {facts.silos - 1}")
        stored, size = own_records(facts, records)
        planned = facts.sizes[self.index] + sum(facts.held_out[self.index : self.index + 1])
        if size != planned:
            raise Refused(f"setup: this silo has {size} records, the plan says {planned}")
        self._check_plan()
        config = self.whole.config
        example = example_record(trained_on(config, facts))
        self.objective = build_objective(trained_model(config, facts), example, config.model.engine)
        if self.objective.parameters != facts.parameters:
            has = self.objective.parameters
            raise Refused(f"setup: the plan says {facts.parameters} parameters, the model has {has}")
        channel = self.whole.noised.alone()
        link = outbox if setup["shuffler"] is None else LocalOutbox(setup["shuffler"], self.index)
        self.end = channel.silo_end(self.whole.declared, self.index, agreed_bytes(setup), link, self.seed)
        self.site = Site(
            self.objective, channel, stored, *jax.device_put((np.int32(size), np.int32(self.index))), alone=True
        )
        self.streams = {s.name: s for s in self.whole.releases(self.index)}
        self.account = Account.empty(list(self.streams))
        self.wire = channel.remember(self.whole.sizes)
        self.maps: list[Map] = []
        self.left: list[np.ndarray | None] = []  # stages that are over, each with what it released, if it maps records
        self.populations = self._divided(stored, size)
        self._enter(self.whole.stages[0].name)

    def _divided(self, records: PyTree[Array], size: int) -> list[PyTree[Array]]:
        """Records to train on and records held out: drawn here, by the plan's public seed."""
        held = self.whole.facts.held_out
        if not held:
            return [records]
        each = divided(size, held[self.index], self.whole.config.data.seed, self.index)
        return [jax.tree.map(lambda leaf, rows=rows: leaf[rows], records) for rows in each]

    def _enter(self, name: str) -> None:
        """A stage of the plan, on records as earlier ones have left them. Nothing is forgotten of what was spent."""
        self.plan = self.whole.at(name)
        records = self.populations[int(self.plan.stages[0].held_out)]
        # A silo believes nobody: that the queries let nothing out it has to see for itself.
        objective, algorithm = self.objective, self.plan.algorithm
        if name == TRAINING:
            objective, algorithm = with_penalty(objective, algorithm)
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), records)
        vouched_bounds(self.plan, objective, stacked)
        size = self.plan.facts.sizes[self.index]
        self.site = replace(self.site, records=records, objective=objective, size=jax.device_put(np.int32(size)))
        self.algorithm = with_steps(self.maps, algorithm)
        self.memory: Any = ()
        self.answered: set[tuple[int, str]] = set()  # of this round
        self.released: list[Stream] = []  # in this round
        self.round, self.started = -1, False
        self.batch_seed = fresh_seed()
        self.compiled: dict[tuple[str, str], Callable[..., Any]] = {}

    def leave(self, told: str, released: Array | None) -> None:
        """A stage is over; records become what its outcome makes of them, and the next one begins."""
        name = self.plan.stages[0].name
        if told != name:
            raise Refused(f"leave: {told!r} is not the stage that is under way")
        if name == self.whole.stages[-1].name:
            raise Refused(f"leave: {name} is the last stage of the plan")
        if name in self.whole.before and not self.answered:
            raise Refused(f"leave: this silo was not asked about {name} yet, so it is in no release that is told")
        self._leave(released)

    def _leave(self, released: Array | None) -> None:
        names, name = [stage.name for stage in self.whole.stages], self.plan.stages[0].name
        if name in self.whole.before:
            self._map(name, released)
        elif released is not None:
            raise Refused(f"leave: nothing is made of what {name} released")
        self.left.append(None if released is None else np.asarray(released))
        self._enter(names[names.index(name) + 1])

    def _map(self, name: str, released: Array | None) -> None:
        size = self.plan.algorithm.init(jnp.zeros(0)).x.size
        if released is None:
            raise Refused(f"leave: what {name} released is missing")
        self._check_points("leave", [released], [(size,)])
        made = self.whole.derived(name, released)
        if not sound(made):
            raise Refused(f"leave: this release of {name} maps to nothing; the run has diverged, or was meant to")
        self.maps.append(made)
        self.populations = [mapped_records(made, records, self.index) for records in self.populations]

    def _check_plan(self) -> None:
        """The noise that was sent must be what the agreed config needs, and a seed only stands in a test."""
        config = self.whole.config
        if self.seed is not None and not config.run.test_seed:
            raise Refused("setup: a seed, but the config has no run.test_seed = true; noise must not be repeatable")
        if not config.privacy.private:
            return
        told, promised = self.whole.epsilon(self.index), self._promised()
        if not told <= promised * (1 + 1e-4):
            raise Refused(f"setup: this noise gives epsilon {rounded_up(told, 6)}, the config says {promised:.6g}")

    def _promised(self) -> float:
        """The epsilon of this silo's records by the config alone."""
        privacy = self.whole.config.privacy.of_silo(self.whole.facts.names[self.index])
        if privacy.epsilon is not None and privacy.calibration == "exact":
            return privacy.epsilon
        return make_plan(self.whole.config, self.whole.facts).epsilon(self.index)

    def start(self, x0: Array) -> None:
        if self.started:
            raise Refused("start: this run has begun already")
        self._check_points("start", [x0], [(self.objective.parameters,)])
        (self.memory, self.account), self.started = self._remembered(x0), True

    def _remembered(self, x0: Array) -> tuple[PyTree, Account]:
        """What the algorithm keeps, and the account with what it took to compute that."""

        def remember(records: PyTree, x0: Array, account: Account, batch_seed: Array) -> tuple[PyTree, Account]:
            silo = self._silo(jnp.int32(-1), (), account, batch_seed, records)
            return self.algorithm.remember(silo, x0), silo.account

        return jax.jit(remember)(self.site.records, x0, self.account, self.batch_seed)

    def ready(self) -> dict[str, Any]:
        """What the others have to know of a silo that has its plan."""
        key = self.end.key
        if key is None or self.vouching is None:
            return {"kind": "ready", "key": None if key is None else key.hex()}
        return {"kind": "ready", "key": key.hex(), "signature": self.vouching.sign(key).hex()}

    def agree(self, told: Sequence[str], signatures: Sequence[str] | None) -> str:
        """Take all silos' keys; where sites are known, only with their signatures."""
        keys = [bytes.fromhex(key) for key in told]
        if self.vouching is not None:
            for index, (key, signature) in enumerate(zip(keys, signatures or [], strict=True)):
                self.vouching.check(index, key, bytes.fromhex(signature))
        return self.end.agree(keys)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """All that a silo which starts again would have lost. It holds secrets and never leaves the site."""
        header = {
            "round": self.round,
            "answered": sorted(self.answered),
            "released": [stream.name for stream in self.released],
            "started": self.started,
            "batch_seed": self.batch_seed.tolist(),
            "end": self.end.state(),
            "left": [released is not None for released in self.left],
        }
        leaves = {
            f"{part}/{i}": np.asarray(leaf)
            for part in KEPT
            for i, leaf in enumerate(jax.tree.leaves(getattr(self, part)))
        }
        return header, leaves | {f"left/{i}": told for i, told in enumerate(self.left) if told is not None}

    def restore(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Be the silo whose state this was; only a fresh one may."""
        if self.started or self.round >= 0:
            raise Refused("restore: this silo has begun already")
        for i, mapped in enumerate(header["left"]):
            self._leave(jnp.asarray(arrays[f"left/{i}"]) if mapped else None)
        self.end.restore(header["end"])
        if header["started"]:
            self.memory = jax.eval_shape(self._remembered, jnp.zeros(self.objective.parameters))[0]
        for part in KEPT:
            structure = jax.tree.structure(getattr(self, part))
            leaves = [jnp.asarray(arrays[f"{part}/{i}"]) for i in range(structure.num_leaves)]
            setattr(self, part, jax.tree.unflatten(structure, leaves))
        self.round, self.started = header["round"], header["started"]
        self.answered = {(round, name) for round, name in header["answered"]}
        self.released = [self.streams[name] for name in header["released"]]
        self.batch_seed = np.asarray(header["batch_seed"], np.uint32)

    def answer(
        self, kind: str, name: str, round: int, public: list[Array], exponent: int | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The message for one question; the silo's state moves only when it may be sent.

        `exponent`: the grid that the others take, told to a silo that has asked for it.
        """
        compiled = self._compiled(kind, name)
        self._check_fresh(name, round)
        shapes = self.plan.algorithm.shapes(name, self.objective.parameters)
        self._check_points(f"query {name!r}", public, shapes)
        self.end.check(round)
        seed = self.batch_seed if round == self.round else fresh_seed()
        state = self.memory, self.account, self.wire, seed
        try:
            message, memory, account, wire = jax.block_until_ready(
                compiled(self.site.records, tuple(public), np.int32(round), *state)
            )
        except jax.errors.JaxRuntimeError:  # its text may quote numbers: not passed on
            raise Refused(f"query {name!r} of round {round}: no noise could be drawn; nothing was sent") from None
        self._check_budget(account)
        released = self._check_together(account, round)
        message = self.end.settled(message, exponent) if kind == "ask" else message
        work = {"gradients": float(account.gradients) - float(self.account.gradients)}
        self.answered = {each for each in self.answered if each[0] == round} | {(round, name)}
        self.memory, self.account, self.wire, self.round, self.released = memory, account, wire, round, released
        self.batch_seed = seed
        if kind == "local":
            return work, {"value": np.asarray(message)}
        packed = self.end.send(round, name, message, digest(public))
        return work | packed.facts, packed.arrays

    def _compiled(self, kind: str, name: str) -> Callable[..., Any]:
        if kind not in ("ask", "local"):
            known = "setup, keys, leave, start, sum, ask, local and account"
            raise Refused(f"kind {kind!r}: unknown; a silo answers {known}")
        if name not in self.plan.algorithm.queries:
            raise Refused(f"query {name!r}: the agreed algorithm asks only {tuple(self.plan.algorithm.queries)}")
        if (kind, name) not in self.compiled:
            query = getattr(self.algorithm, name)

            # Records are an argument: as a constant they would stand in the program, and with it in a cache.
            def run(
                records: PyTree, public: Any, round: Array, memory: Any, account: Account, wire: Any, batch_seed: Array
            ) -> Any:
                silo = self._silo(round, memory, account, batch_seed, records)
                if kind == "local":
                    return privatised(query(silo, *public)), silo.memory, silo.account, wire
                return ask(query, public, silo, wire)

            self.compiled[kind, name] = jax.jit(run)
        return self.compiled[kind, name]

    def _silo(self, round: Array, memory: Any, account: Account, batch_seed: Any, records: PyTree) -> Silo:
        return Silo(replace(self.site, records=records), round, self._randomness(round, batch_seed), memory, account)

    def _randomness(self, round: Array, batch_seed: Any) -> Randomness:
        if self.seed is not None:
            return SeededRandomness(party_key(seeded(self.seed), round, self.index))
        shared = self.site.channel.shared_batch
        if shared is None:
            return SystemRandomness()
        key = jax.random.wrap_key_data(jnp.asarray(batch_seed), impl="threefry2x32")
        return SharedBatch(SystemRandomness(), key, f"batch/{shared}")

    def _check_points(self, what: str, public: list[Array], shapes: list[tuple[int, ...]]) -> None:
        """Arguments have the declared shapes, and are what bounds are proved for: nothing is broadcast or coarser."""
        got = [point.shape for point in public]
        if got != shapes:
            raise Refused(f"{what}: public arguments of shapes {got}, the agreed algorithm sends {shapes}")
        types = [str(point.dtype) for point in public]
        # A single number may be a count or a flag. A point of whole numbers is another point with the same bytes.
        allowed = lambda shape: ("float32",) if shape else ("float32", "int32", "bool")
        if not all(kind in allowed(shape) for kind, shape in zip(types, shapes, strict=True)):
            raise Refused(f"{what}: public arguments of types {types}; send float32")
        if not all(np.isfinite(np.asarray(point)).all() for point in public):
            raise Refused(f"{what}: a public argument is not finite; the run has diverged, or was meant to")

    def _check_fresh(self, name: str, round: int) -> None:
        if not 0 <= round < self.plan.facts.rounds:
            raise Refused(f"round {round}: the plan has {self.plan.facts.rounds} rounds, from 0 on")
        if round < self.round or (round, name) in self.answered:
            raise Refused(f"query {name!r} of round {round}: answered already, or in the past")

    def _check_together(self, account: Account, round: int) -> list[Stream]:
        """The streams released in this round, this question included, if the channel takes them together."""
        before = self.account.tallies
        fresh = [name for name, tally in account.tallies.items() if int(tally.count) > int(before[name].count)]
        released = [*(self.released if round == self.round else []), *(self.streams[name] for name in fresh)]
        self.site.channel.check_round(released, self.plan.algorithm.together)
        return released

    def _check_budget(self, account: Account) -> None:
        for name, tally in account.tallies.items():
            if int(tally.count) > self.streams[name].count:
                raise Refused(
                    f"stream {name!r}: the plan allows {self.streams[name].count} releases; "
                    "one more would exceed this silo's budget"
                )


def own_records(facts: Facts, arrays: Mapping[str, np.ndarray]) -> tuple[PyTree[Array], int]:
    """The records that came by name, as the tree that the plan describes, and how many they are."""
    if facts.record is None:
        raise Refused("setup: the plan does not say what a record is")
    try:
        return jax.device_put(fitting(facts.record, arrays)), count(arrays)
    except ValueError as error:
        raise Refused(f"setup: {error}") from None


def fresh_seed() -> np.ndarray:
    return np.frombuffer(os.urandom(8), np.uint32)


def agreed_bytes(setup: Mapping[str, Any]) -> bytes:
    """What all silos have to agree on, as bytes: masks that differ in it do not cancel."""
    return json.dumps({"plan": setup["plan"], "seed": setup["seed"]}, sort_keys=True).encode()


def digest(public: list[Array]) -> bytes:
    """Of what a question tells: silos that were told different points must not think that they answer the same."""
    told = {str(i): np.asarray(point) for i, point in enumerate(public)}
    return hashlib.sha256(encode({}, told)).digest()  # with types and shapes: bytes alone may be two points
