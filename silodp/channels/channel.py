"""What a trust model has to answer for: what it accounts, who it protects by how much, what passes, who sees what.

`Channel` is that protocol, with the answers of the simplest case: every silo adds its own noise before anything leaves
it. `send` runs in the silo, `receive` at the server; a message is a pytree of arrays. Noise multipliers come from the
plan that every party holds, never from a message. A channel without any multipliers adds nothing: not private.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from silodp import registry
from silodp.core import Silo
from silodp.errors import ConfigError, Refused
from silodp.facts import Declared, Stream
from silodp.privacy.kinds import Releases, Spent
from silodp.randomness import Randomness
from silodp.releases import Account, Answer, Public, RecordMean, Release, Scalar, Vector

if TYPE_CHECKING:
    from silodp.channels.sealed import Terms

Multipliers = Float[np.ndarray, " silos"]
Levels = dict[str, float] | None  # epsilon, by who works for the server; None: nothing changes
Kept = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]  # a step's answers, asked for or known already
# Around a question: what is said to each silo, and the answers of those that are there.
Talk = Callable[[Mapping[int, dict[str, Any]]], dict[int, dict[str, Any]]]


# Below, float32 itself may have flushed to zero what a bound speaks of: a smaller bound gets the noise of this one.
SMALLEST_BOUND, SMALLEST_STD = 2.0**-106, 2.0**-116


def std_of(release: Release, multiplier: Any) -> Scalar:
    """Of a release's noise. NaN where there is no sound one: nothing usable may come out."""
    std = jnp.maximum(multiplier * jnp.maximum(release.bound, SMALLEST_BOUND), SMALLEST_STD)
    sound = jnp.isfinite(std) & (release.bound >= 0)
    return jnp.where(multiplier == 0, 0.0, jnp.where(sound, std, jnp.nan))


def privatise(release: Release, multiplier: Any, randomness: Randomness, step: Any = 0) -> Vector:
    """The one place where Gaussian noise is drawn: std = multiplier * bound.

    Formal guarantee: a release whose value moves by at most `bound` when one record is replaced is
    (1/multiplier)-Gaussian-DP, given everything released before it; also in floating point, where noise is real.
    """
    if multiplier is None:
        return release.value
    std = std_of(release, multiplier)
    refuse_unsound(release, std)
    return randomness.noised(f"noise/{release.stream}", release.exact, std, step)


def refuse_unsound(release: Release, std: Scalar) -> None:
    """An error where there is no sound noise. A compiled program cannot raise one: there the release is not a number,
    and where its bound is wrong and not only the model overflown, the account says so (`counted`)."""
    if not isinstance(std, Tracer) and not bool(jnp.isfinite(std)):
        raise ValueError(
            f"release {release.stream!r}: its bound must be a finite number >= 0, and so must its noise; nothing was "
            "released"
        )


def counted(bound: Float[Array, "*silos"], multiplier: Any) -> Float[Array, "*silos"]:
    """What an account keeps of a release's noise: no number where the bound is below 0, so that nothing is certified.

    (A model that has overflown makes bounds that are no numbers, releases that are none, and no false promise.)
    """
    return jnp.where(bound < 0, jnp.nan, jnp.float32(0.0 if multiplier is None else multiplier))


class Noised(eqx.Module):
    """A vector that is private already, nearly all of whose numbers are multiples of `step` (0: no grid is known)."""

    value: Vector
    step: Scalar


class Packed(NamedTuple):
    """A message in plain form: what is written to the wire."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Form(NamedTuple):
    """One form in which an audit runs a trust model: changes of the config, by section.key.

    per_record: records' messages are attacked one by one. smaller: by how much fewer records, where each is dear.
    keep_all: rand-k drops nothing, because its masks are public: the claim is about a record that all of them keep.
    """

    changes: dict[str, Any]
    per_record: bool = False
    smaller: int = 1
    keep_all: bool = False


@runtime_checkable
class Asked(Protocol):
    """What an algorithm's registry entry says about the channel it wants (silodp.algorithms.Entry)."""

    @property
    def compression(self) -> str: ...

    @property
    def randomizer(self) -> str: ...


@dataclass(frozen=True)
class Wishes:
    """What a config and an algorithm's entry say about a channel: each channel takes what it knows, refuses the rest.

    `options` holds the algorithm section (compressor, randomizer, ...), `privacy` the privacy section, `own` the keys
    that only a channel from outside knows.
    """

    options: Any
    privacy: Any
    entry: Asked
    own: Mapping[str, Any]


class Channel(eqx.Module):
    """A trust model: it answers for itself, from what is checked before a run to what an auditor sees.

    Args:
        multipliers: by stream, one noise multiplier for each silo; a plan fills it in.

    Example:
        >>> import silodp
        >>> silodp.channels.Summed(grid=64).options()
        {'privacy.trust': 'shuffled', 'algorithm.randomizer': 'pvec', 'algorithm.grid': 64}
        >>> print(silodp.channels.Untrusted().if_others_collude)
        unchanged if the server and all other silos collude: the silo's noise is its own
    """

    name: ClassVar[str] = ""
    # For the certificate: in which setting, what the adversary sees, who has to be honest, and what is left if the
    # others are not.
    setting: ClassVar[str] = ""
    sees: ClassVar[str] = ""
    honest: ClassVar[tuple[str, ...]] = ()
    if_others_collude: ClassVar[str] = ""
    noise: ClassVar[str] = (  # where it is real; a simulation says so
        "an exact Gaussian, rounded to a public grid, from the operating system's entropy; what rounding does to sums "
        "over records is part of their bounds"
    )
    gaussian: ClassVar[bool] = True  # what it releases are means with Gaussian noise
    sums: ClassVar[bool] = True  # what it releases are means over records, of whatever stages ask for
    alone_is_private: ClassVar[bool] = False  # whether one silo's answer may be used without the others'
    hides_sizes: ClassVar[bool] = False  # nobody learns how many records are in a message
    weighs_by_size: ClassVar[bool] = False  # silos weigh what they send, as a theorem for this channel expects

    multipliers: dict[str, Float[Array, " silos"]] = eqx.field(default_factory=dict, kw_only=True)

    # --- the promise: before a run, with public facts only ---------------------------------------------

    @classmethod
    def of(cls, wishes: Wishes) -> Channel:
        """The channel that a config asks for; ConfigError where it asks for what this trust model cannot do."""
        refuse_compression(wishes)
        refuse_randomizer(wishes)
        return cls(**wishes.own)

    def options(self) -> dict[str, Any]:
        """This channel as a config says it, by section.key: `of` gives the same channel back."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "multipliers"}
        named = {"privacy.trust": registry.name_of("channel", type(self))}
        return named | {f"privacy.{name}": value for name, value in own.items()}

    def batches(self, kind: str | None, asked: bool) -> str | None:
        """The way batches are drawn on this channel, when `kind` is what the algorithm (or the user) wants."""
        return kind

    def check(self, declared: Declared, options: Any) -> None:
        """Refuse, before anything is spent, what this trust model cannot keep."""

    def accounted(self, declared: Declared, silo: int, streams: Sequence[Stream]) -> list[Releases]:
        """A silo's streams as the accountant sees them."""
        size = declared.facts.sizes[silo]
        # By its class: equinox makes an object of a method whenever an object's is named, and silos may be many.
        return [Releases(s.name, s.count, type(s.batch).sampling(s.batch, size)) for s in streams]

    def accounted_as(self, stream: Stream) -> str:
        """The line of the account that a stream's releases belong to."""
        return stream.name

    def joint(self, name: str, needed: Multipliers, declared: Declared) -> Multipliers:
        """The channel's multipliers, from those that each silo's own records need."""
        return needed

    def protecting(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        """The multiplier that a release has for each silo's own records, at least."""
        return nominal

    def protecting_at_most(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        """The same at most: a run that counts more has not done what was planned."""
        return self.protecting(name, nominal, declared)

    def std_over_clip(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        """Std of the noise in clip norms: on each silo's mean, or on the average where only that is noised."""
        return nominal * declared.bounds_over_clip(name)

    def std_of_average(self, name: str, nominal: Multipliers, declared: Declared) -> float:
        """Std of the noise in clip norms on the weighted average of all silos."""
        weights = np.asarray(declared.facts.weights)
        return float(np.linalg.norm(weights * self.std_over_clip(name, nominal, declared)))

    def averaged(self, silos: float) -> float:
        """By how much the noise of the average over so many silos is smaller than that of one silo's mean."""
        return silos

    def variance(self, parameters: int) -> float:
        """omega: the variance that compression adds to a message, relative to its square."""
        return 0.0

    def left_if(self, own: Sequence[Spent], silo: int, declared: Declared, delta: float, records: int = 1) -> Levels:
        """The epsilon that is left to a silo's records when others work for the server, by who does.

        `records`: so many of them are protected together.
        """
        return None

    def ready(self, declared: Declared, multipliers: Mapping[str, Array], delta: float) -> Channel:
        """This channel with the noise of a plan."""
        return replace(self, multipliers=dict(multipliers))

    # --- the run ----------------------------------------------------------------------------------------

    def remember(self, sizes: Mapping[str, int]) -> PyTree:
        """The silo's end of the channel between rounds; `sizes`: the numbers in a release, by stream."""
        return ()

    def open(self, sizes: Mapping[str, int]) -> PyTree:
        """The server's end of the channel between rounds."""
        return ()

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The silo's message and its end of the channel afterwards."""
        raise NotImplementedError

    @property
    def in_parts(self) -> bool:
        """Whether a simulation may keep only the mean of the messages' `value`, for `receive_mean`."""
        return False

    def receive_mean(
        self,
        mean: Vector,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        """As `receive`, of messages whose weighted mean is known, and which have no `value`."""
        raise NotImplementedError

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        """The private mean of this round's messages, the silos' accounts and the server's end afterwards.

        `weights` are the participants' parts of the whole objective; those of all silos sum to 1.
        """
        raise NotImplementedError

    def batch_name(self, stream: str) -> str:
        """Whose batch a stream uses: here its own, drawn independently of every other."""
        return stream

    def multiplier(self, stream: str, silo: Silo) -> Array | None:
        return self.multipliers[stream][silo.index] if self.multipliers else None

    def privatise_local(self, release: Release, silo: Silo, step: Any = 0) -> Vector:
        """Noise drawn in the silo, whatever the channel: what a silo computes locally only it can protect."""
        multiplier = self.multiplier(release.stream, silo)
        silo.account = silo.account.spend(release.stream, counted(release.bound, multiplier))
        noised = privatise(release, multiplier, silo.randomness, step)
        silo.saw(release, noised)
        return noised

    def bits(self, messages: PyTree) -> Any:
        """Bits of all silos' messages of a round."""
        one = jax.tree.map(lambda leaf: leaf[0], messages)
        return jax.tree.leaves(messages)[0].shape[0] * self.message_bits(one)

    def message_bits(self, message: PyTree) -> int:
        """Bits of one silo's message on the wire."""
        raise NotImplementedError

    # --- between machines -------------------------------------------------------------------------------

    shared_batch: ClassVar[str | None] = None  # the batch that all questions of a round share

    def alone(self) -> Channel:
        """The channel as a silo in a process of its own uses it."""
        return self

    def pack(self, message: PyTree) -> Packed:
        """The message as named arrays and plain facts, for the wire."""
        raise NotImplementedError

    def unpack(self, packed: Packed) -> PyTree:
        """The message that `receive` takes; ValueError when the arrays are not one."""
        raise NotImplementedError

    def check_round(self, sent: Sequence[Stream], together: int) -> None:
        """Refuse a further message of a round that the account does not have (`sent`: streams of the round so far)."""

    def colluders(self, silos: int) -> int | None:
        """How many of so many silos may work for the server before the promise gets weaker, where the noise is sized by
        such a number."""
        return None

    def terms(self, declared: Declared, asks: Mapping[str, str]) -> dict[str, Terms] | None:
        """What a shuffler has to wait for, by query (`asks`: query -> stream); None: no shuffler is needed."""
        return None

    def silo_end(
        self, declared: Declared, index: int, agreed: bytes, shuffler: Any, seed: int | None = None
    ) -> SiloEnd:
        """What happens in the silo between a message and the wire.

        `agreed`: bytes that all silos have in common. `shuffler`: the silo's link to it, where there is one. `seed`: of
        a test, which is not private.
        """
        return SiloEnd(self)

    def server_end(self, sizes: Mapping[str, int], shuffler: Any) -> ServerEnd:
        """What happens at the server between the wire and the mean. `shuffler`: its link, where there is one."""
        return ServerEnd(self, sizes)

    # --- an auditor -------------------------------------------------------------------------------------

    @classmethod
    def audited(cls, entry: Asked, example: Mapping[str, Any]) -> list[Form]:
        """The forms in which this trust model is audited for an algorithm with these example options."""
        return [Form({})]

    def seen(
        self, messages: PyTree, mean: Vector, released: Sequence[Float[Array, "silos d"]]
    ) -> list[Float[Array, "views d"]]:
        """What an adversary sees of a question: for each release a row for each silo, or one when only a mean is seen.

        `released`: what the silos noised themselves, which is all that their messages are made of.
        """
        return list(released)


class SiloEnd:
    """A silo's end between processes: here a message is packed as it is."""

    key: bytes | None = None  # public, to be exchanged with the other silos

    def __init__(self, channel: Channel):
        self.channel = channel

    def agree(self, keys: Sequence[bytes]) -> str:
        """Take all silos' keys; returns a fingerprint of what was agreed on."""
        raise ValueError("keys: this channel has none to agree on")

    def check(self, round: int) -> None:
        """Refuse before anything is computed."""

    def settled(self, message: PyTree, exponent: int | None) -> PyTree:
        """The message as it will be sent; Undecided when a grid must be told. Nothing is spent yet."""
        return message

    def send(self, round: int, query: str, message: PyTree, asked: bytes = b"") -> Packed:
        """`asked`: a digest of the question's public arguments."""
        return self.channel.pack(message)

    def state(self) -> dict[str, Any]:
        """What a restarted silo has to know, as JSON can hold it. It may hold secrets: it stays in the silo."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be what `state` told."""

    def step(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """What is said around a question, where more than an answer is needed."""
        raise Refused("sum: this channel has none to prepare or to open")


class ServerEnd:
    """The server's end between processes."""

    missing: int = 0  # silos that a round may do without

    def __init__(self, channel: Channel, sizes: Mapping[str, int]):
        self.channel, self.memory = channel, channel.open(sizes)
        self.bits = 0.0  # that reached the server by another way than a silo's answer
        # Of a server that may be started again: what silos said in a step is on its disk before it is used.
        self.kept: Kept = lambda step, ask: ask()

    def expect(self, round: int, query: str, sent: Sequence[int], size: int) -> None:
        """Before a question: how many records each silo answers for; 0: it is not asked."""

    def prepare(self, talk: Talk, present: Sequence[int]) -> list[int]:
        """What is said before a question; returns the silos that are asked."""
        return list(present)

    def open(self, talk: Talk, answered: Sequence[int]) -> None:
        """What is said after the answers of these silos."""

    def mean(
        self, packed: Sequence[Packed], weights: Float[Array, " m"], accounts: Account, randomness: Randomness
    ) -> tuple[Vector, Account]:
        messages = [self.channel.unpack(each) for each in packed]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *messages)
        value, accounts, self.memory = self.channel.receive(stacked, weights, accounts, randomness, self.memory)
        return value, accounts


def normalised(weights: Float[Array, " m"]) -> Float[Array, " m"]:
    return weights / weights.sum()


def evaluated(answer: Answer) -> Release:
    if isinstance(answer, Public):
        raise TypeError("a Public answer carries no bound")
    return answer if isinstance(answer, Release) else answer.release()


def per_record(answer: Answer) -> RecordMean:
    if not isinstance(answer, RecordMean):
        raise TypeError("a shuffled channel needs the records one by one: this estimator only has their mean")
    return answer


def trust_of(channel: Channel, library: type[Channel]) -> str:
    """How a config asks for it: the library's class by its trust model, a class derived from it by its own name."""
    return channel.name if type(channel) is library else registry.name_of("channel", type(channel))


def refuse_compression(wishes: Wishes) -> None:
    """For the trust models in which a message is not private before it is compressed."""
    if wishes.privacy.mask_amplification:
        raise ConfigError("privacy.mask_amplification = true: needs algorithm.compressor = 'rand-k'")
    if wishes.options.compressor is not None:
        raise ConfigError(
            f"algorithm.compressor = {wishes.options.compressor!r}: needs privacy.trust = 'untrusted', where a message "
            "is private before it is compressed"
        )


def refuse_randomizer(wishes: Wishes) -> None:
    for option in ("randomizer", "grid"):
        value = getattr(wishes.options, option)
        if value is not None:
            raise ConfigError(f"algorithm.{option} = {value!r}: needs privacy.trust = 'shuffled'")
