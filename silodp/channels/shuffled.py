"""Trust in a shuffler only: every record speaks for itself, and nobody can tell which message is whose.

Each record's clipped vector goes through an eps0-LDP randomizer in its silo; the server averages the anonymous
messages. All messages count alike, so a silo's weight is the number of records it sends. Everything that a record sends
is one line of the account, `message`, whose multiplier is 1/eps0. (P_vec's sums of integers: silodp.channels.pvec.)

A simulation needs no permutation: the mean of a multiset has no order. In message mode (`individual`) a silo hands its
messages over one by one, sealed, and a shuffler permutes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from jaxtyping import Array, Float, PyTree

from silodp import registry
from silodp.channels.channel import (
    Asked,
    Channel,
    Form,
    Levels,
    Multipliers,
    Packed,
    ServerEnd,
    SiloEnd,
    Wishes,
    normalised,
    per_record,
    refuse_compression,
    trust_of,
)
from silodp.channels.randomizers import Duchi, Randomizer
from silodp.channels.sealed import OVERHEAD, Batch, Terms, open_batch, seal
from silodp.core import Silo
from silodp.errors import ConfigError, Refused
from silodp.facts import Declared, Stream
from silodp.privacy import accountant
from silodp.privacy.clones import Messages
from silodp.privacy.clones import Shuffled as Hiding
from silodp.privacy.kinds import Disjoint, Releases, Spent
from silodp.randomness import Randomness, Scoped
from silodp.releases import Account, Answer, Vector

ROUND = "round"  # the batch that all messages of a round share
MESSAGE = "message"  # the line of the account that all shuffled messages belong to


class Shuffled(Channel):
    """Local randomizers and a shuffler."""

    name: ClassVar[str] = "shuffled"
    gaussian: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    weighs_by_size: ClassVar[bool] = True
    setting: ClassVar[str] = "in the shuffle model"
    sees: ClassVar[str] = (
        "the unordered, anonymous messages of all silos' records in every round, and what follows from them"
    )
    honest: ClassVar[tuple[str, ...]] = (
        "the silo itself: its software clips, randomises every record with fresh coins and tells nobody",
        "the shuffler: it keeps origin and order of the messages to itself",
        "the other silos: their messages really are in every batch",
    )
    if_others_collude: ClassVar[str] = (
        "each silo's statement says what is left if the other silos, or the shuffler, work for the server"
    )
    noise: ClassVar[str] = (
        "a local randomizer in every record's message, with coins of the operating system's entropy, whose lowest bits "
        "say no more than the message; exact Gaussians on a public grid in local steps"
    )
    shared_batch: ClassVar[str | None] = ROUND

    randomizer: type[Randomizer] = eqx.field(static=True, kw_only=True, default=Duchi)
    eps0: float | None = eqx.field(static=True, kw_only=True, default=None)  # where it must be known when compiled
    individual: bool = eqx.field(static=True, kw_only=True, default=False)
    local: tuple[str, ...] = eqx.field(static=True, kw_only=True, default=())  # streams that do not pass the shuffler

    @classmethod
    def of(cls, wishes: Wishes) -> Channel:
        from silodp.channels.pvec import Summed

        refuse_compression(wishes)
        options, implied = wishes.options, wishes.entry.randomizer
        if implied == "pvec" and options.randomizer not in (None, "pvec"):
            raise ConfigError(f"algorithm.randomizer = {options.randomizer!r}: {options.name} uses pvec; leave it out")
        if options.grid is not None and options.grid % 2:
            raise ConfigError(f"algorithm.grid = {options.grid}: give an even number of levels")
        found = registry.find("randomizer", options.randomizer or implied)
        if found is Summed and cls is not Shuffled:
            raise ConfigError(
                f"algorithm.randomizer = 'pvec': {cls.__name__} sends each record's message; leave it out"
            )
        if found is Summed:
            return Summed(**({} if options.grid is None else {"grid": options.grid}), **wishes.own)
        if not (isinstance(found, type) and issubclass(found, Randomizer)):
            raise ConfigError(f"algorithm.randomizer = {options.randomizer!r}: is no silodp.Randomizer")
        return cls(randomizer=found, **wishes.own)

    def options(self) -> dict[str, Any]:
        name = registry.name_of("randomizer", self.randomizer)
        return {"privacy.trust": trust_of(self, Shuffled), "algorithm.randomizer": name}

    def batches(self, kind: str | None, asked: bool) -> str | None:
        if kind == "poisson" and asked:
            raise ConfigError(
                "algorithm.sampling = 'poisson': a shuffler releases an agreed number of messages; use 'fixed'"
            )
        return "fixed" if kind in (None, "poisson") else kind

    def check(self, declared: Declared, options: Any) -> None:
        check_alike(declared, options)
        check_together(declared)

    def accounted(self, declared: Declared, silo: int, streams: Sequence[Stream]) -> list[Releases]:
        """Everything a record sends through the shuffler is one line; local steps are the silo's own."""
        sent = [s for s in streams if not (s.local or s.alone)]
        first = next((s for s in streams if s.alone and s.count), None)
        hiding, once = self._hidden(declared, silo, sent[0])
        # All messages of a round are computed on one batch: composed first, then sampled.
        hiding = replace(hiding, together=declared.together)
        alone = None if first is None else self._hidden(declared, silo, first)[0]
        count = sum(s.count for s in sent) + (first is not None)
        own = super().accounted(declared, silo, [s for s in streams if s.local])
        return [Releases(MESSAGE, count, Messages(hiding, once, alone)), *own]

    def accounted_as(self, stream: Stream) -> str:
        return stream.name if stream.local else MESSAGE

    def _hidden(self, declared: Declared, silo: int, stream: Stream) -> tuple[Hiding, bool]:
        """What hides this silo's record in a round of such batches, and whether it is in one of them only."""
        facts, rule = declared.facts, stream.batch
        size, each = facts.sizes[silo], [rule.divisor(n) for n in facts.sizes]
        own, once = round(each[silo]), isinstance(rule.sampling(size), Disjoint)
        hiding = Hiding(
            messages=round(own + facts.fewest_beside(silo, each)),
            own=own,
            randomizer=self.randomizer.hides,
            dimension=known_dimension(declared, stream.name),
            rate=1.0 if once else own / size,
        )
        return hiding, once

    def joint(self, name: str, needed: Multipliers, declared: Declared) -> Multipliers:
        return needed if name != MESSAGE else largest(needed)

    def std_over_clip(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        if name != MESSAGE:
            return super().std_over_clip(name, nominal, declared)
        stream = next(s.name for s in declared.streams[0] if not (s.local or s.alone))
        size = known_dimension(declared, stream)
        sent = declared.facts.fewest(declared.divisors(stream))
        variance = self.randomizer(1 / float(nominal[0])).variance(size, 1.0) / size / sent
        return np.full(len(nominal), math.sqrt(variance))

    def std_of_average(self, name: str, nominal: Multipliers, declared: Declared) -> float:
        if name != MESSAGE:
            return super().std_of_average(name, nominal, declared)
        return float(self.std_over_clip(name, nominal, declared)[0])

    def left_if(self, own: Sequence[Spent], silo: int, declared: Declared, delta: float, records: int = 1) -> Levels:
        def changed(change: Callable[[Hiding], Hiding]) -> float:
            return accountant.group_epsilon([weakened(spent, change) for spent in own], delta, records)

        return {
            "other_silos_collude": changed(Hiding.without_other_silos),
            "shuffler_colludes": changed(Hiding.without_shuffler),
        }

    def ready(self, declared: Declared, multipliers: Mapping[str, Array], delta: float) -> Channel:
        fixed = not self.randomizer.traced_level and MESSAGE in multipliers
        # One level serves all: that of whoever needs most, so that nobody is charged with less than was drawn.
        eps0 = 1 / float(np.max(np.asarray(multipliers[MESSAGE]))) if fixed else None
        local = tuple(s.name for s in declared.streams[0] if s.local)
        return replace(self, multipliers=dict(multipliers), eps0=eps0, local=local)

    def batch_name(self, stream: str) -> str:
        """All messages of a record in a round are computed on one batch, as the account says (local steps apart)."""
        return stream if stream in self.local else ROUND

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        mean = per_record(answer)
        multiplier = self.multiplier(MESSAGE, silo)
        silo.account = silo.account.spend(mean.stream, jnp.float32(0.0 if multiplier is None else multiplier))
        coins = Scoped(silo.randomness, mean.stream)

        def randomised(vectors: Float[Array, "m d"], step: Array) -> Float[Array, "m d"]:
            if multiplier is None:
                return vectors
            device = self.randomizer(1 / multiplier if self.eps0 is None else self.eps0)
            return device.randomize(vectors, mean.clip, coins, step)

        if self.individual:
            return mean.each(randomised), memory
        return Heard(mean.summed(randomised) / mean.batch.divisor, mean.batch.divisor), memory

    def receive(
        self, messages: PyTree, weights: Float[Array, " m"], accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        return normalised(weights) @ messages.mean, accounts, memory

    def bits(self, messages: PyTree) -> Float[Array, ""]:
        return 8 * sealed_size(messages.mean.shape[1]) * jnp.sum(messages.records)

    def alone(self) -> Channel:
        return replace(self, individual=True)

    def check_round(self, sent: Sequence[Stream], together: int) -> None:
        """A round's messages share a batch and are accounted as sampled together, so many and no more; that of a
        first round is accounted alone."""
        passing = [stream for stream in sent if not stream.local]
        if len(passing) > (1 if any(stream.alone for stream in passing) else together):
            raise Refused(f"streams {[s.name for s in passing]}: the plan has no further message in this round")

    def terms(self, declared: Declared, asks: Mapping[str, str]) -> dict[str, Terms] | None:
        """What hides a record by the plan: no batch without a silo's whole share may be released."""
        passing = {s.name: s for s in declared.streams[0] if not s.local}
        return {query: self._terms(declared, passing[name]) for query, name in asks.items() if name in passing}

    def _terms(self, declared: Declared, stream: Stream) -> Terms:
        each = [round(stream.batch.divisor(n)) for n in declared.facts.sizes]
        size = sealed_size(known_dimension(declared, stream.name))
        return Terms(size, tuple(each), declared.facts.answering)

    def silo_end(
        self, declared: Declared, index: int, agreed: bytes, shuffler: Any, seed: int | None = None
    ) -> SiloEnd:
        if shuffler is None:
            raise Refused("shuffler: this silo was given no way to it, and its messages may go no other")
        return Courier(self, shuffler)

    def server_end(self, sizes: Mapping[str, int], shuffler: Any) -> ServerEnd:
        return Opener(self, sizes, shuffler)

    @classmethod
    def audited(cls, entry: Asked, example: Mapping[str, Any]) -> list[Form]:
        if entry.randomizer == "pvec":
            # Sums are attacked like any other mean. A grid so fine that the rounding, which the claim allows for, is
            # next to nothing, and an epsilon that does not need so few coins that they are no Gaussian any more.
            return [Form({"algorithm.grid": 6000, "privacy.epsilon": 4.0}, smaller=2)]
        return [Form({"algorithm.randomizer": name}, per_record=True) for name in ("duchi", "privunit")]


class Heard(eqx.Module):
    """What a simulation passes on of a silo's messages: their mean and their number."""

    mean: Vector
    records: Float[Array, ""]


class Courier(SiloEnd):
    """A silo's way to the shuffler: each record's message is sealed to the server's key and handed over."""

    def __init__(self, channel: Channel, shuffler: Any):
        super().__init__(channel)
        self.shuffler, self.server_key = shuffler, X25519PublicKey.from_public_bytes(shuffler.server_key)

    def send(self, round: int, query: str, message: PyTree, asked: bytes = b"") -> Packed:
        messages = np.asarray(message)
        batch = batch_of(round, query, messages.shape[1])
        sealed = [seal(message_bytes(each), self.server_key, batch) for each in messages]
        return Packed({}, self.shuffler.submit(batch.name, sealed))


class Opener(ServerEnd):
    """The server announces a batch, lets the shuffler release it, and opens it. Neither sees what the other does."""

    def __init__(self, channel: Channel, sizes: Mapping[str, int], shuffler: Any):
        super().__init__(channel, sizes)
        self.shuffler = shuffler

    def expect(self, round: int, query: str, sent: Sequence[int], size: int) -> None:
        self.batch = batch_of(round, query, size)
        self.shuffler.open(self.batch.name, Terms(self.batch.sealed_size, tuple(sent), sum(n > 0 for n in sent)))

    def mean(
        self, packed: Sequence[Packed], weights: Float[Array, " m"], accounts: Account, randomness: Randomness
    ) -> tuple[Vector, Account]:
        carried = [each.arrays for each in packed]
        sealed = self.shuffler.release(self.batch.name, self.batch.sealed_size, carried)
        opened = open_batch(sealed, self.shuffler.private_key, self.batch)
        if opened.refused:
            raise Refused(f"batch {self.batch.name}: {len(opened.refused)} messages refused ({opened.refused[0]})")
        vectors = [message_vector(message, self.batch.message_size // 4) for message in opened.messages]
        self.bits += 8 * sum(map(len, sealed))
        return jnp.asarray(np.asarray(np.mean(vectors, axis=0, dtype=np.float64), np.float32)), accounts


def weakened(spent: Spent, change: Callable[[Hiding], Hiding]) -> Spent:
    kind = spent.releases.sampling
    if not isinstance(kind, Messages):
        return spent
    return replace(spent, releases=replace(spent.releases, sampling=kind.changed(change)))


def check_alike(declared: Declared, options: Any) -> None:
    """All messages count alike: a silo's weight must be its share of the messages."""
    weights = np.asarray(declared.facts.weights)
    for stream in declared.streams[0]:
        sent = np.array(declared.divisors(stream.name))
        if not stream.local and not np.allclose(sent / sent.sum(), weights / weights.sum(), rtol=1e-6):
            raise ConfigError(
                f"algorithm.weights = {options.weights!r}: under a shuffler every message counts alike; "
                "use 'size' with full batches (and batch_share under pvec), 'equal' with algorithm.batch"
            )


def check_together(declared: Declared) -> None:
    """A round's messages are computed on one batch: so many as the account takes together."""
    for silo, streams in enumerate(declared.streams):
        sent = [s for s in streams if not (s.local or s.alone)]
        if any(stream.batch != sent[0].batch for stream in sent):
            raise ConfigError(
                "algorithm.batch_difference: a record's messages share one batch under a shuffler; leave it out"
            )
        most = declared.together * len(declared.facts.rounds_of(silo))
        if sum(s.count for s in sent) > most:
            raise ConfigError(
                f"releases(): streams {[s.name for s in sent]} have more than {declared.together} message a round; "
                "the algorithm's property `together` must say how many there are"
            )


def known_dimension(declared: Declared, stream: str) -> int:
    size = declared.dimension(stream)
    if size is None:
        raise ConfigError("model.parameters is missing: the noise of shuffled messages depends on it")
    return size


def largest(needed: Multipliers) -> Multipliers:
    """One level serves every silo; a silo that never uses the stream asks for nothing."""
    used = needed[np.isfinite(needed)]
    return np.full(len(needed), used.max() if used.size else math.inf)


def batch_of(round: int, query: str, parameters: int) -> Batch:
    return Batch(round, f"{round}/{query}", 4 * parameters)


def sealed_size(parameters: int) -> int:
    return 4 * parameters + OVERHEAD


def message_bytes(message: np.ndarray) -> bytes:
    """One record's message as it is sealed."""
    return message.astype("<f4").tobytes()


def message_vector(data: bytes, parameters: int) -> np.ndarray:
    vector = np.frombuffer(data, "<f4").astype(np.float32)
    if vector.size != parameters or not np.isfinite(vector).all():
        raise ValueError(f"message: {vector.size} numbers, {parameters} finite ones are needed")
    return vector
