"""An untrusted server that receives compressed messages: plain, against a shift (SoteriaFL, Alg. 1 to 3), or with the
error fed back (for biased compressors such as top-k).

    plain:     c = C(g);                              server: mean of c
    shifted:   c = C(g - s);  s = s + gamma_t c;      server: s_mean + mean of c;  s_mean = s_mean + gamma_t mean of c
    feedback:  c = C(g + e);  e = g + e - c;          server: mean of c

The silo's message is private before it is compressed, so compression costs no privacy; with a random mask that the silo
draws after it has the point, it even saves some (`mask_amplification`). A stream has a shift, or an error, of its own.
A silo that is absent keeps it; the server keeps the weighted mean of all silos' shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from silodp import registry
from silodp.channels.channel import Channel, Packed, Wishes, normalised, refuse_randomizer, trust_of
from silodp.channels.untrusted import Untrusted
from silodp.compressors import Compressor, RandK, build_compressor, shift_rate
from silodp.core import Silo
from silodp.errors import ConfigError
from silodp.facts import Declared, Stream
from silodp.privacy.kinds import Full, Masked, Releases
from silodp.randomness import Randomness, SeededRandomness
from silodp.releases import Account, Answer, RecordMean, Release, Vector
from silodp.server import Decay, build_decay


@dataclass(frozen=True)
class Shift:
    """How much of each compressed message moves the shift: gamma_t, an input of SoteriaFL's Alg. 2 and 3.

    first: gamma_0; the theorem's when left out. decay: by what it is multiplied in later rounds.
    """

    first: float | None = None
    decay: Decay | None = None

    def __call__(self, omega: float, round: Any) -> Any:
        first = shift_rate(omega) if self.first is None else self.first
        return first if self.decay is None else first * self.decay(round)

    @property
    def told(self) -> dict[str, Any]:
        """As a config says it."""
        given = {"shift_rate": self.first, "shift_decay": None if self.decay is None else self.decay.told}
        return {key: value for key, value in given.items() if value is not None}


class Message(eqx.Module):
    """`decoded` is what the server reads from the bytes; `vector` and `seed` are what the silo encodes them from.

    round: of the question, which says how much of the message moves the shift.
    """

    decoded: Vector
    vector: Vector
    seed: UInt32[Array, "2"]
    round: Int[Array, ""]
    stream: str = eqx.field(static=True)


class Compressed(Untrusted):
    """Noise in the silo, then a compressor; `shifted` and error feedback keep a vector at the silo's end."""

    compressor: Compressor = eqx.field(kw_only=True)
    shifted: bool = eqx.field(static=True, kw_only=True, default=False)
    shift: Shift = eqx.field(static=True, kw_only=True, default=Shift())
    mask_amplification: bool = eqx.field(static=True, kw_only=True, default=False)

    @classmethod
    def of(cls, wishes: Wishes) -> Channel:
        refuse_randomizer(wishes)
        compression = compression_of(wishes)
        if compression is None:
            raise ConfigError(f"algorithm.compressor is missing: {cls.__name__} needs one")
        return cls(**compression)

    def options(self) -> dict[str, Any]:
        kind = type(self.compressor)
        own = {field.name: getattr(self.compressor, field.name) for field in fields(kind)}
        told = {"compressor": registry.name_of("compressor", kind)} | own
        if self.compressor.unbiased:  # a biased one is never shifted
            told["shifted"] = self.shifted
        told |= self.shift.told
        masked = {"privacy.mask_amplification": True} if self.mask_amplification else {}
        return (
            {"privacy.trust": trust_of(self, Compressed)}
            | {f"algorithm.{key}": value for key, value in told.items()}
            | masked
        )

    @property
    def feedback(self) -> bool:
        """A biased compressor converges only with what it dropped added to the next message."""
        return not self.compressor.unbiased

    def check(self, declared: Declared, options: Any) -> None:
        try:
            for own in declared.streams[0]:
                size = declared.dimension(own.name)
                if size is not None:
                    self.compressor.check(size)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from None

    def variance(self, parameters: int) -> float:
        try:
            return self.compressor.omega(parameters) if self.compressor.unbiased else 0.0
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from None

    def accounted(self, declared: Declared, silo: int, streams: Sequence[Stream]) -> list[Releases]:
        plain = super().accounted(declared, silo, streams)
        if not self.mask_amplification:
            return plain
        return [each if s.local else self._masked(each, declared) for each, s in zip(plain, streams, strict=True)]

    def _masked(self, releases: Releases, declared: Declared) -> Releases:
        size = declared.dimension(releases.stream)
        if size is None:
            raise ConfigError("model.parameters is missing: privacy.mask_amplification depends on it")
        if not isinstance(releases.sampling, Full):
            raise ValueError("privacy.mask_amplification: only known for full batches; leave out algorithm.batch")
        assert isinstance(self.compressor, RandK)
        return Releases(releases.stream, releases.count, Masked(self.compressor.keep, size))

    def remember(self, sizes: Mapping[str, int]) -> PyTree:
        kept = self.shifted or self.feedback
        return {stream: jnp.zeros(size) for stream, size in sizes.items()} if kept else {}

    def open(self, sizes: Mapping[str, int]) -> PyTree:
        return {stream: jnp.zeros(size) for stream, size in sizes.items()} if self.shifted else {}

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        stream = answer.stream if isinstance(answer, Release | RecordMean) else "public"
        private = super().send(answer, silo, ())[0].value
        kept = memory.get(stream, jnp.zeros_like(private))
        vector = private + kept if self.feedback else private - kept
        # One fresh seed from the silo's own coins: its bytes and its shift come from the same random choices.
        seed = silo.randomness.bits(f"compress/{stream}", (2,))
        decoded = self.compressor(vector, coins(seed))
        if stream in memory:
            moved = vector - decoded if self.feedback else kept + self._rate(kept.size, silo.round) * decoded
            memory = memory | {stream: moved}
        return Message(decoded, vector, seed, jnp.int32(silo.round), stream), memory

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        mean = normalised(weights) @ messages.decoded
        if messages.stream not in memory:
            return mean, accounts, memory
        shift = memory[messages.stream]
        moved = shift + self._rate(shift.size, messages.round[0]) * (weights @ messages.decoded)
        return shift + mean, accounts, memory | {messages.stream: moved}

    def message_bits(self, message: PyTree) -> int:
        return self.compressor.bits(message.decoded.size)

    def pack(self, message: PyTree) -> Packed:
        data = self.compressor.encode(message.vector, coins(message.seed))
        facts = {"stream": message.stream, "parameters": int(message.vector.size), "round": int(message.round)}
        return Packed(facts, {"bytes": np.frombuffer(data, np.uint8)})

    def unpack(self, packed: Packed) -> PyTree:
        parameters = packed.facts["parameters"]
        decoded = jnp.asarray(self.compressor.decode(packed.arrays["bytes"].tobytes(), parameters))
        round = jnp.int32(packed.facts["round"])
        return Message(decoded, decoded, jnp.zeros(2, jnp.uint32), round, packed.facts["stream"])

    def seen(
        self, messages: PyTree, mean: Vector, released: Sequence[Float[Array, "silos d"]]
    ) -> list[Float[Array, "views d"]]:
        """A message as it was before compression, which can only show more; but when the claim is that rand-k's mask
        hides what it drops, without that."""
        if not self.mask_amplification:
            return list(released)
        return [jnp.where(messages.decoded != 0, row, 0.0) for row in released]

    def _rate(self, parameters: int, round: Any) -> Any:
        return self.shift(self.compressor.omega(parameters), round)


def coins(seed: UInt32[Array, "2"]) -> SeededRandomness:
    return SeededRandomness(jax.random.wrap_key_data(seed, impl="threefry2x32"))


def compression_of(wishes: Wishes) -> dict[str, Any] | None:
    """The fields of `Compressed`; None: messages are sent as they are."""
    options, implied = wishes.options, wishes.entry.compression
    masked = wishes.privacy.mask_amplification
    if masked and options.compressor != "rand-k":
        raise ConfigError("privacy.mask_amplification = true: needs algorithm.compressor = 'rand-k'")
    if options.compressor is None:
        if implied in ("plain", "shifted"):
            known = ", ".join(registry.names("compressor"))
            raise ConfigError(f"algorithm.compressor is missing: {options.name} needs one of {known}")
        return None
    if implied == "none":
        raise ConfigError(f"algorithm.compressor = {options.compressor!r}: {options.name} sends uncompressed messages")
    if options.shifted is not None and implied in ("plain", "shifted") and options.shifted != (implied == "shifted"):
        raise ConfigError(f"algorithm.shifted = {options.shifted}: {options.name} compresses {implied}")
    try:
        compressor = build_compressor(options.compressor, options.given)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None
    shifted = options.shifted if options.shifted is not None else implied == "shifted" and compressor.unbiased
    if shifted and not compressor.unbiased:
        raise ConfigError(
            f"algorithm.shifted = true: {options.compressor!r} is biased and feeds its error back instead; leave it out"
        )
    shift = Shift(options.shift_rate, build_decay(options.shift_decay, options.rounds, "shift_decay"))
    if shift.told and not shifted:
        key, value = next(iter(shift.told.items()))
        raise ConfigError(f"algorithm.{key} = {value!r}: messages are compressed without a shift; leave it out")
    own = {"shift": shift} if shift.told else {}
    return {"compressor": compressor, "shifted": shifted, "mask_amplification": masked} | own | dict(wishes.own)
