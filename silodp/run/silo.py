"""A silo in its own process: `python -m silodp.run.silo`, bytes in on stdin, bytes out on stdout.

It is given the agreed plan (config, public facts, multipliers) and its own records once, and afterwards only public
points and round numbers. Noise, batches and masks are drawn here, from the operating system's entropy. It answers no
question twice, never goes back in rounds, and refuses whatever would exceed the releases of the plan.

P_vec's parts leave the silo under pairwise masks (silodp.shuffle.masks). Whom it masks with the silo works out itself,
from the plan and the round: a server has no say in it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from silodp.build import Assembled, Facts, assemble
from silodp.channels import BinomialServer, ShuffledServer
from silodp.channels.shuffled import ROUND
from silodp.config import parse_config
from silodp.core import FIRST, Account, Silo
from silodp.planning import plan_of
from silodp.privacy.plan import LOCAL
from silodp.randomness import Randomness, SeededRandomness, SharedBatch, SystemRandomness
from silodp.run.federation import SERVER, ask, participants, privatised, silo_key
from silodp.run.shuffling import Courier
from silodp.run.wire import WireError, decode, encode, read_frame, write_frame
from silodp.shuffle.masks import Masks


class SiloServer:
    """One silo's records, memory and account, and the answers it gives."""

    def __init__(self, plan: dict[str, Any], records: dict[str, np.ndarray]):
        self.index: int = plan["index"]
        self.seed: int | None = plan["seed"]
        self.parts: Assembled = assemble(parse_config(plan["config"]), Facts(**plan["facts"]), plan["multipliers"])
        self.courier = None if plan["shuffler"] is None else Courier(plan["shuffler"])
        self.channel = self.parts.channel
        if isinstance(self.channel, ShuffledServer):
            self.channel = dataclasses.replace(self.channel, individual=True)
        self.masks = None
        if isinstance(self.channel, BinomialServer):
            self.masks = Masks(self.index, len(self.parts.facts.sizes), common(plan))
        planned = self.parts.facts.sizes[self.index]
        if len(records["targets"]) != planned:
            raise WireError(f"setup: this silo has {len(records['targets'])} records, the plan says {planned}")
        self._check_plan(plan["multipliers"])
        self.records = (jnp.asarray(records["features"]), jnp.asarray(records["targets"]))
        self.size = jnp.int32(len(records["targets"]))
        self.allowed = {s.name: s.count for s in self.parts.releases(self.index)}
        self.account = Account.empty(list(self.allowed))
        self.memory: Any = ()
        self.wire = self.parts.channel.remember(self.parts.objective.parameters)
        self.answered: set[tuple[int, str]] = set()
        self.released: list[str] = []  # streams released in this round
        self.round, self.started = -1, False
        self.batch_seed = np.frombuffer(os.urandom(8), np.uint32)
        self.compiled: dict[tuple[str, str], Callable[..., Any]] = {}

    def _check_plan(self, multipliers: dict[str, list[float]]) -> None:
        """The noise that was sent must be what the agreed config needs, and a seed only stands in a test."""
        config, facts = self.parts.config, self.parts.facts
        if self.seed is not None and not config.run.test_seed:
            raise WireError("setup: a seed, but the config has no run.test_seed = true; noise must not be repeatable")
        if not config.privacy.private:
            return
        own = {stream: told[self.index] for stream, told in multipliers.items()}
        privacy = config.privacy.model_copy(update={"epsilon": None, "gdp": None, "multipliers": own})
        told = config.model_copy(update={"privacy": privacy})
        plan = plan_of(told, facts.sizes, facts.names, self.parts.objective.parameters, "exact")
        assert plan is not None
        promised = self._promised()
        if not plan.epsilon(self.index) <= promised * (1 + 1e-4):
            raise WireError(
                f"setup: this noise gives epsilon {plan.epsilon(self.index):.6g}, the config says {promised:.6g}"
            )

    def _promised(self) -> float:
        """The epsilon of this silo's records by the config alone."""
        config, facts = self.parts.config, self.parts.facts
        if config.privacy.epsilon is not None and config.privacy.calibration == "exact":
            return config.privacy.epsilon
        plan = plan_of(config, facts.sizes, facts.names, self.parts.objective.parameters)
        assert plan is not None
        return plan.epsilon(self.index)

    def start(self, x0: Array) -> None:
        if self.started:
            raise WireError("start: this run has begun already")
        self.started = True
        silo = self._silo(jnp.int32(-1), (), self.account, self.batch_seed)
        self.memory = self.parts.algorithm.remember(silo, x0)

    def answer(
        self, kind: str, name: str, round: int, public: list[Array]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The message for one question; the silo's state moves only when it may be sent."""
        compiled = self._compiled(kind, name)
        self._check_fresh(name, round)
        self._check_public(name, public)
        present = self._present(round)
        if round != self.round:
            self.batch_seed = np.frombuffer(os.urandom(8), np.uint32)
        outcome = compiled(tuple(public), jnp.int32(round), self.memory, self.account, self.wire, self.batch_seed)
        message, memory, account, wire = outcome
        self._check_budget(account)
        released = self._check_together(account, round)
        work = {"gradients": float(account.gradients - self.account.gradients)}
        self.memory, self.account, self.wire, self.round, self.released = memory, account, wire, round, released
        self.answered.add((round, name))
        if kind == "local":
            return work, {"value": np.asarray(message)}
        if self.courier is not None:
            self.courier.deliver(round, name, np.asarray(message))
            return work, {}
        packed = self.channel.pack(message)
        if self.masks is None:
            return work | packed.facts, packed.arrays
        hidden = self.masks.hide(packed.arrays["total"], present, f"{round}/{name}")
        return work | packed.facts, packed.arrays | {"total": hidden}

    def _compiled(self, kind: str, name: str) -> Callable[..., Any]:
        if kind not in ("ask", "local"):
            raise WireError(f"kind {kind!r}: unknown; a silo answers setup, keys, start, ask, local and account")
        if name not in self.parts.queries:
            raise WireError(f"query {name!r}: the agreed algorithm asks only {self.parts.queries}")
        if (kind, name) not in self.compiled:
            query = getattr(self.parts.algorithm, name)

            def run(public: Any, round: Array, memory: Any, account: Account, wire: Any, batch_seed: Array) -> Any:
                silo = self._silo(round, memory, account, batch_seed)
                if kind == "local":
                    return privatised(query(silo, *public)), silo.memory, silo.account, wire
                return ask(query, public, silo, self.channel, wire)

            self.compiled[kind, name] = jax.jit(run)
        return self.compiled[kind, name]

    def _silo(self, round: Array, memory: Any, account: Account, batch_seed: Any) -> Silo:
        return Silo(
            objective=self.parts.objective,
            channel=self.channel,
            records=self.records,
            size=self.size,
            index=jnp.int32(self.index),
            round=round,
            randomness=self._randomness(round, batch_seed),
            memory=memory,
            account=account,
            alone=True,
        )

    def _randomness(self, round: Array, batch_seed: Any) -> Randomness:
        if self.seed is None:
            key = jax.random.wrap_key_data(jnp.asarray(batch_seed), impl="threefry2x32")
            return SharedBatch(SystemRandomness(), key, f"batch/{ROUND}")
        return SeededRandomness(silo_key(jax.random.key(self.seed), round, self.index))

    def _check_public(self, name: str, public: list[Array]) -> None:
        """Points are vectors of the model's size, everything else is a number: nothing else may be broadcast."""
        wanted = inspect.signature(getattr(self.parts.algorithm, name)).parameters
        shapes = [(self.parts.objective.parameters,) if p.annotation == "Vector" else () for p in wanted.values()][1:]
        if [point.shape for point in public] != shapes:
            got = [point.shape for point in public]
            raise WireError(f"query {name!r}: public arguments of shapes {got}, the agreed algorithm sends {shapes}")

    def _check_fresh(self, name: str, round: int) -> None:
        if not 0 <= round < self.parts.config.algorithm.performed:
            raise WireError(f"round {round}: the plan has {self.parts.config.algorithm.performed} rounds, from 0 on")
        if round < self.round or (round, name) in self.answered:
            raise WireError(f"query {name!r} of round {round}: answered already, or in the past")

    def _present(self, round: int) -> list[int]:
        """The silos of this round, by the plan's public coins; where messages are masked this must be one of them."""
        if self.masks is not None and not self.masks.agreed:
            raise WireError("keys: not agreed yet, so nothing can be masked")
        options, silos = self.parts.config.algorithm, len(self.parts.facts.sizes)
        count = options.participation or silos
        if self.masks is None or count == silos:
            return list(range(silos))
        public = SeededRandomness(silo_key(jax.random.key(self.parts.config.run.seed), round, SERVER))
        present = np.asarray(participants(public, silos, count)).tolist()
        if self.index not in present:
            raise WireError(f"round {round}: the plan has silos {present} in it, not this one ({self.index})")
        return present

    def _check_together(self, account: Account, round: int) -> list[str]:
        """The streams released in this round, this question included; through a shuffler no more than go together.

        A round's shuffled messages share a batch and are accounted as sampled together, so many and no more; that of a
        first round is accounted alone.
        """
        before = self.account.tallies
        fresh = [name for name, tally in account.tallies.items() if int(tally.count) > int(before[name].count)]
        released = [*(self.released if round == self.round else []), *fresh]
        sent = [name for name in released if name != LOCAL]
        most = 1 if FIRST in sent else self.parts.algorithm.together
        if isinstance(self.channel, ShuffledServer) and len(sent) > most:
            raise WireError(f"streams {sent} in round {round}: the plan has no further message in this round")
        return released

    def _check_budget(self, account: Account) -> None:
        for stream, tally in account.tallies.items():
            if int(tally.count) > self.allowed[stream]:
                raise WireError(
                    f"stream {stream!r}: the plan allows {self.allowed[stream]} releases; "
                    "one more would exceed this silo's budget"
                )


def common(plan: dict[str, Any]) -> bytes:
    """What all silos have to agree on, as bytes: masks that differ in it do not cancel."""
    return json.dumps({key: plan[key] for key in ("config", "facts", "multipliers", "seed")}, sort_keys=True).encode()


def account_arrays(account: Account) -> dict[str, np.ndarray]:
    arrays = {"gradients": np.asarray(account.gradients)}
    for stream, tally in account.tallies.items():
        arrays[f"count/{stream}"] = np.asarray(tally.count)
        arrays[f"multiplier/{stream}"] = np.asarray(tally.multiplier)
    return arrays


def reply(server: SiloServer | None, data: bytes) -> tuple[SiloServer | None, bytes]:
    """One request and its answer. A refusal is an answer too: the reason goes back, nothing else does."""
    try:
        header, arrays = decode(data)
        kind = header.get("kind")
        if kind == "setup":
            if server is not None and server.seed is None:
                raise WireError("setup: this silo has a plan; a new one would forget what it has spent")
            fresh = SiloServer(header["plan"], arrays)
            key = None if fresh.masks is None else fresh.masks.public_key.hex()
            return fresh, encode({"kind": "ready", "key": key}, {})
        if server is None:
            raise WireError("no plan yet: send setup first")
        if kind == "keys" and server.masks is not None:
            fingerprint = server.masks.agree([bytes.fromhex(key) for key in header["keys"]])
            # For the silo's operator, who may compare it with the other silos'; the server's word would be worthless.
            print(f"silo {server.index}: keys and plan agreed, fingerprint {fingerprint}", file=sys.stderr, flush=True)
            return server, encode({"kind": "ready", "fingerprint": fingerprint}, {})
        if kind == "start":
            server.start(jnp.asarray(arrays["x0"]))
            return server, encode({"kind": "ready"}, {})
        if kind == "account":
            return server, encode({"kind": "account"}, account_arrays(server.account))
        public = [jnp.asarray(arrays[str(i)]) for i in range(len(arrays))]
        facts, message = server.answer(str(kind), header["query"], int(header["round"]), public)
        return server, encode({"kind": "answer", "facts": facts}, message)
    except (WireError, ValueError, KeyError, TypeError, OverflowError) as error:
        return server, encode({"kind": "refused", "reason": f"{error}"}, {})


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    server: SiloServer | None = None
    while data := read_frame(requests):
        server, answer = reply(server, data)
        write_frame(answers, answer)


def main() -> None:
    # Whatever prints must not end up between the frames: keep the pipe, point stdout at stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
