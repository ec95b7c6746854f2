"""The same algorithm message by message: every silo in a process of its own, bytes between them, nothing shared.

The server's side of a round is the algorithm's own `round`, executed eagerly with a `MessageFederation`. The silo's
side is silodp.deploy.silo.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import IO, Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from jaxtyping import Array, Float

from silodp import registry
from silodp.channels import Packed
from silodp.channels.sealed import Terms
from silodp.config import Config
from silodp.deploy.shuffler import TOKEN, ShufflerClient
from silodp.deploy.wire import decode, encode, read_frame, write_frame
from silodp.errors import Refused
from silodp.parse import named_parts, parse_config
from silodp.plan.plan import Plan
from silodp.randomness import SERVER, Randomness, SeededRandomness, SystemRandomness, party_key
from silodp.releases import Account, Answer, Public, Tally, Vector

Records = Mapping[str, np.ndarray]  # of one silo: every array by its path, features... and targets...


class SiloProcess(AbstractContextManager["SiloProcess"]):
    """A silo started here for a local message run. Closing its stdin ends it.

    `allowed`: parts from outside that it may import; whoever starts a silo here is its operator.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "silodp.deploy.silo", *allowed]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        try:
            write_frame(cast(BinaryIO, self.process.stdin), encode(header, dict(arrays)))
        except BrokenPipeError:
            raise Refused(f"a silo's process ended (exit code {self.process.poll()})") from None

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        data = read_frame(cast(BinaryIO, self.process.stdout))
        if not data:
            raise Refused(f"a silo's process ended (exit code {self.process.wait()})")
        header, arrays = decode(data)
        if header.get("kind") == "refused":
            raise Refused(f"a silo refused: {header['reason']}")
        return header, arrays

    def __exit__(self, *exc: object) -> None:
        with suppress(BrokenPipeError):  # of a silo that ended before it had read everything
            cast(BinaryIO, self.process.stdin).close()
        ended(self.process)


class ShufflerProcess(AbstractContextManager["ShufflerProcess"]):
    """The shuffler of a local message run, and the server's link to it; closing its stdin ends it."""

    def __init__(self, silos: int, least: Mapping[str, Terms]) -> None:
        command = [sys.executable, "-m", "silodp.deploy.shuffler"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tokens = [secrets.token_bytes(TOKEN) for _ in range(silos)]
        server = secrets.token_bytes(TOKEN)
        agreed = {query: terms._asdict() for query, terms in least.items()}
        parties = {"server": server.hex(), "silos": [token.hex() for token in self.tokens], "least": agreed}
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps(parties) + "\n")
        stdin.flush()
        self.port = int(cast(IO[str], self.process.stdout).readline())
        self.private_key = X25519PrivateKey.generate()
        self.client = ShufflerClient(self.port, server)
        self.open, self.release = self.client.open, self.client.release

    def invitation(self, silo: int) -> dict[str, Any]:
        """What a silo needs to know to send."""
        public = self.private_key.public_key().public_bytes_raw()
        return {"port": self.port, "token": self.tokens[silo].hex(), "server_key": public.hex()}

    def __exit__(self, *exc: object) -> None:
        self.client.__exit__()
        cast(IO[str], self.process.stdin).close()
        ended(self.process)


def ended(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    cast(IO[Any], process.stdout).close()


def stream_of_queries(plan: Plan) -> dict[str, str]:
    return {query: plan.algorithm.stream_of(query) for query in plan.algorithm.queries}


def portable(config: Config) -> Config:
    """The config with names under which another process finds parts from outside."""
    sections = {"algorithm": {}, "privacy": {}, "model": {}}
    for kind, name in named_parts(config).items():
        section, key = registry.KINDS[kind].split(".")
        sections[section][key] = registry.path_of(kind, name)
    tree = config.model_dump(exclude_unset=True)
    return parse_config({name: tree.get(name, {}) | sections.get(name, {}) for name in tree.keys() | sections.keys()})


def outside_names(config: Config) -> list[str]:
    return [name for kind, name in named_parts(config).items() if not registry.is_own(kind, name)]


@contextmanager
def message_federation(plan: Plan, records: Sequence[Records], seed: int | None) -> Iterator[MessageFederation]:
    """Silos (and a shuffler, where the channel needs one) as processes on this machine, set up with the plan."""
    names = outside_names(portable(plan.config))
    with ExitStack() as stack:
        silos = [stack.enter_context(SiloProcess(names)) for _ in records]
        yield stack.enter_context(joined(plan, silos, records, seed))


@contextmanager
def joined(
    plan: Plan, silos: Sequence[SiloProcess], records: Sequence[Records], seed: int | None
) -> Iterator[MessageFederation]:
    """A federation of silos that are running already."""
    terms = plan.channel.terms(plan.declared, stream_of_queries(plan))
    with ExitStack() as stack:
        shuffler = None if terms is None else stack.enter_context(ShufflerProcess(len(silos), terms))
        set_up(silos, plan, records, seed, shuffler)
        yield MessageFederation(plan, silos, seed, shuffler)


def set_up(
    silos: Sequence[SiloProcess],
    plan: Plan,
    records: Sequence[Records],
    seed: int | None,
    shuffler: ShufflerProcess | None = None,
) -> None:
    """Give every silo the agreed plan and its own records."""
    tree = plan.to_json() | {"config": portable(plan.config).model_dump(mode="json")}
    for index, (silo, own) in enumerate(zip(silos, records, strict=True)):
        invitation = None if shuffler is None else shuffler.invitation(index)
        silo.send({"kind": "setup", "plan": tree, "index": index, "seed": seed, "shuffler": invitation}, own)
    keys = [silo.receive()[0]["key"] for silo in silos]
    if all(keys):
        exchange(silos, keys)


def exchange(silos: Sequence[SiloProcess], keys: list[str]) -> None:
    """Hand every silo the others' public keys; all must have agreed on the same."""
    for silo in silos:
        silo.send({"kind": "keys", "keys": keys}, {})
    fingerprints = {silo.receive()[0]["fingerprint"] for silo in silos}
    if len(fingerprints) > 1:
        raise Refused("keys: the silos have agreed on different plans or keys; their masks would not cancel")


class MessageFederation:
    """The server's view of silos that only answer in bytes."""

    def __init__(self, plan: Plan, processes: Sequence[SiloProcess], seed: int | None, shuffler: Any = None):
        self.whole, self.processes, self.seed = plan, processes, seed
        self.plan = plan.at(plan.stages[0].name)  # the stage that is asked about
        self.silos, self.round = len(processes), 0
        self.accounts = Account.empty(plan.streams, (self.silos,))
        self.end = plan.noised.server_end(plan.sizes, shuffler)
        self.bits, self.gradients = np.zeros(2), 0.0
        self.heard: Callable[[int, str, Sequence[Packed], Vector], None] = lambda *_: None  # who wants to keep answers

    def whiten(self) -> Vector | None:
        """The stage before training, if the plan has one: what it released, which every silo then gets."""
        if self.whole.config.whiten is None:
            return None
        stage = self.plan.algorithm
        self.begin_round(0)
        moment = stage.round(stage.init(jnp.zeros(0)), self).x
        self._tell({"kind": "whiten"}, {"moment": np.asarray(moment)})
        self.plan = self.whole.training
        return moment

    def start(self, x0: Vector) -> None:
        self._tell({"kind": "start"}, {"x0": np.asarray(x0)})

    def _tell(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        for silo in self.processes:
            silo.send(header, arrays)
        for silo in self.processes:
            silo.receive()

    def begin_round(self, round: int) -> None:
        self.round = round
        self.randomness: Randomness = SystemRandomness()
        if self.seed is not None:
            self.randomness = SeededRandomness(party_key(jax.random.key(self.seed), round, SERVER))
        self.present = np.asarray(self.plan.facts.present(round))

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        name = query.__name__
        stream = self.plan.algorithm.stream_of(name)
        if stream in self.plan.sizes:
            each = self.plan.declared.divisors(stream)
            self.end.expect(self.round, name, [round(each[i]) for i in self.present], self.plan.sizes[stream])
        for i in self.present:
            self._send(int(i), "ask", name, public)
        packed = [self._receive(int(i)) for i in self.present]
        weights = jnp.asarray(np.asarray(self.plan.facts.weights)[self.present], jnp.float32)
        own = jax.tree.map(lambda leaf: leaf[self.present], self.accounts)
        value, own = self.end.mean(packed, weights, own, self.randomness)
        self.heard(self.round, name, packed, value)
        self.accounts = jax.tree.map(lambda old, new: old.at[self.present].set(new), self.accounts, own)
        return value

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        self._send(int(index), "local", task.__name__, public)
        return jnp.asarray(self._receive(int(index)).arrays["value"])

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
        except Refused as error:
            raise self._missing(index, error) from None
        self.bits[1] += 8 * sum(a.nbytes for a in arrays.values())

    def _receive(self, index: int) -> Packed:
        try:
            header, arrays = self.processes[index].receive()
        except Refused as error:
            raise self._missing(index, error) from None
        self.bits[0] += 8 * sum(a.nbytes for a in arrays.values())
        self.gradients += header["facts"]["gradients"]
        return Packed(header["facts"], arrays)

    def _missing(self, index: int, error: Refused) -> Refused:
        name = self.plan.facts.names[index]
        return Refused(f"silo {name!r} in round {self.round}: {error}; the run ends here, without this round")
