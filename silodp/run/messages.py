"""The same algorithm message by message: every silo in a process of its own, bytes between them, nothing shared.

The server's side of a round is the algorithm's own `round`, executed eagerly with a `MessageFederation`. The silo's
side is silodp.run.silo.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from silodp.build import Assembled
from silodp.channels import Packed
from silodp.core import Account, Answer, Public, Tally, Vector
from silodp.data import FederatedData
from silodp.randomness import Randomness, SeededRandomness, SystemRandomness
from silodp.run.federation import SERVER, participants, silo_key
from silodp.run.shuffling import ShufflerProcess
from silodp.run.wire import WireError, decode, encode, read_frame, write_frame


class SiloProcess(AbstractContextManager["SiloProcess"]):
    """A silo started here for a local message run. Closing its stdin ends it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "silodp.run.silo"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> int:
        data = encode(header, arrays)
        try:
            write_frame(cast(BinaryIO, self.process.stdin), data)
        except BrokenPipeError:
            raise WireError(f"a silo's process ended (exit code {self.process.poll()})") from None
        return len(data)

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        data = read_frame(cast(BinaryIO, self.process.stdout))
        if not data:
            raise WireError(f"a silo's process ended (exit code {self.process.wait()})")
        header, arrays = decode(data)
        if header.get("kind") == "refused":
            raise WireError(f"a silo refused: {header['reason']}")
        return header, arrays

    def __exit__(self, *exc: object) -> None:
        with suppress(BrokenPipeError):  # of a silo that ended before it had read everything
            cast(BinaryIO, self.process.stdin).close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def set_up(
    silos: Sequence[SiloProcess],
    parts: Assembled,
    multipliers: dict[str, list[float]],
    data: FederatedData,
    seed: int | None,
    shuffler: ShufflerProcess | None = None,
) -> None:
    """Give every silo the agreed plan and its own records."""
    for index, (silo, own) in enumerate(zip(silos, data.silos, strict=True)):
        plan = {
            "config": parts.config.model_dump(),
            "facts": asdict(parts.facts),
            "multipliers": multipliers,
            "index": index,
            "seed": seed,
            "shuffler": None if shuffler is None else shuffler.invitation(index),
        }
        silo.send({"kind": "setup", "plan": plan}, {"features": own.features, "targets": own.targets})
    keys = [silo.receive()[0]["key"] for silo in silos]
    if all(keys):
        exchange(silos, keys)


def exchange(silos: Sequence[SiloProcess], keys: list[str]) -> None:
    """Hand every silo the others' public keys; all must have agreed on the same."""
    for silo in silos:
        silo.send({"kind": "keys", "keys": keys}, {})
    fingerprints = {silo.receive()[0]["fingerprint"] for silo in silos}
    if len(fingerprints) > 1:
        raise WireError("keys: the silos have agreed on different plans or keys; their masks would not cancel")


class MessageFederation:
    """The server's view of silos that only answer in bytes."""

    def __init__(
        self,
        parts: Assembled,
        processes: Sequence[SiloProcess],
        weights: Float[np.ndarray, " silos"],
        seed: int | None,
        public_seed: int,
        shuffler: ShufflerProcess | None = None,
    ):
        self.shuffler = shuffler
        self.parts, self.processes, self.weights, self.seed = parts, processes, weights, seed
        self.public_key = jax.random.key(public_seed)  # of who takes part: no secret
        self.silos, self.round = len(processes), 0
        streams = [stream.name for stream in parts.releases(0)]
        self.accounts = Account.empty(streams, (self.silos,))
        self.channel_end = parts.channel.open(parts.objective.parameters)
        self.bits, self.gradients = np.zeros(2), 0.0

    def start(self, x0: Vector) -> None:
        for silo in self.processes:
            silo.send({"kind": "start"}, {"x0": np.asarray(x0)})
        for silo in self.processes:
            silo.receive()

    def begin_round(self, round: int) -> None:
        self.round = round
        self.randomness: Randomness = SystemRandomness()
        if self.seed is not None:
            self.randomness = SeededRandomness(silo_key(jax.random.key(self.seed), round, SERVER))
        count = self.parts.config.algorithm.participation or self.silos
        public = SeededRandomness(silo_key(self.public_key, round, SERVER))
        self.present = np.arange(self.silos)
        if count < self.silos:
            self.present = np.asarray(participants(public, self.silos, count))

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        if self.shuffler is not None:
            return self._shuffled_mean(self.shuffler, query.__name__, public)
        for i in self.present:
            self._send(int(i), "ask", query.__name__, public)
        messages = [self._message(int(i)) for i in self.present]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *messages)
        weights = jnp.asarray(self.weights[self.present], jnp.float32)
        own = jax.tree.map(lambda leaf: leaf[self.present], self.accounts)
        value, own, self.channel_end = self.parts.channel.receive(
            stacked, weights, own, self.randomness, self.channel_end
        )
        put = lambda old, new: old.at[self.present].set(new)
        self.accounts = jax.tree.map(put, self.accounts, own)
        return value

    def _shuffled_mean(self, shuffler: ShufflerProcess, query: str, public: tuple[Array, ...]) -> Vector:
        stream = self.parts.algorithm.stream_of(query)
        rule = next(s.batch for s in self.parts.releases(0) if s.name == stream)
        sent = [round(rule.divisor(self.parts.facts.sizes[i])) for i in self.present]
        batch = shuffler.open(self.round, query, self.parts.objective.parameters, sent)
        for i in self.present:
            self._send(int(i), "ask", query, public)
        for i in self.present:
            self._receive(int(i))
        mean, bits = shuffler.collect(batch)
        self.bits[0] += bits
        return jnp.asarray(mean)

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        self._send(int(index), "local", task.__name__, public)
        arrays = self._receive(int(index)).arrays
        return jnp.asarray(arrays["value"])

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return yes() if bool(predicate) else no()

    def coin(self, purpose: str) -> Float[Array, ""]:
        return self.randomness.uniform(f"coin/{purpose}", ())

    def take_costs(self) -> dict[str, float]:
        """What was sent and computed since the last call."""
        costs = {
            "bits_up": self.bits[0],
            "bits_down": self.bits[1],
            "record_gradients": self.gradients,
        }
        self.bits, self.gradients = np.zeros(2), 0.0
        return {name: float(cost) for name, cost in costs.items()}

    def final_accounts(self) -> Account:
        """What each silo counted itself, joined with what the server counted for it."""
        for silo in self.processes:
            silo.send({"kind": "account"}, {})
        own = [silo.receive()[1] for silo in self.processes]
        gather = lambda name: jnp.asarray(np.stack([arrays[name] for arrays in own]))
        tallies = {
            stream: Tally(
                tally.count + gather(f"count/{stream}"),
                jnp.minimum(tally.multiplier, gather(f"multiplier/{stream}")),
            )
            for stream, tally in self.accounts.tallies.items()
        }
        return Account(tallies, gather("gradients"))

    def _send(self, index: int, kind: str, name: str, public: tuple[Array, ...]) -> None:
        arrays = {str(i): np.asarray(point) for i, point in enumerate(public)}
        try:
            self.processes[index].send({"kind": kind, "query": name, "round": self.round}, arrays)
        except WireError as error:
            raise self._missing(index, error) from None
        self.bits[1] += 8 * sum(a.nbytes for a in arrays.values())

    def _message(self, index: int) -> Any:
        return self.parts.channel.unpack(self._receive(index))

    def _receive(self, index: int) -> Packed:
        try:
            header, arrays = self.processes[index].receive()
        except WireError as error:
            raise self._missing(index, error) from None
        self.bits[0] += 8 * sum(a.nbytes for a in arrays.values())
        self.gradients += header["facts"]["gradients"]
        return Packed(header["facts"], arrays)

    def _missing(self, index: int, error: WireError) -> WireError:
        name = self.parts.facts.names[index]
        return WireError(f"silo {name!r} in round {self.round}: {error}; the run ends here, without this round")
