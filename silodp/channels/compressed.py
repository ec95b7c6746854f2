"""Compression of a silo's noised message, plain or against a shift (SoteriaFL, Alg. 1 to 3).

    plain:    c = C(g);                          mean of c
    shifted:  c = C(g - s); s = s + rate * c;    server: s_mean + mean of c; s_mean = s_mean + rate * mean of c

The silo's message is private before it is compressed, so compression costs no privacy; with a random mask that the silo
draws after it has the point, it even saves some (`mask_amplification`). A stream has a shift of its own. A silo that is
absent keeps its shift; the server keeps the weighted mean of all silos' shifts.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt32

from silodp.channels.gaussian import Channel, Packed, UntrustedServer, normalised
from silodp.compressors import Compressor, shift_rate
from silodp.core import Account, Answer, RecordMean, Release, Silo, Vector
from silodp.randomness import Randomness, SeededRandomness


class Compressed(eqx.Module):
    """`decoded` is what the server reads from the bytes; `vector` and `seed` are what the silo encodes them from."""

    decoded: Vector
    vector: Vector
    seed: UInt32[Array, "2"]
    stream: str = eqx.field(static=True)


class CompressedServer(Channel):
    """An untrusted server that receives compressed messages."""

    compressor: Compressor = eqx.field(kw_only=True)
    shifted: bool = eqx.field(static=True, kw_only=True)
    streams: tuple[str, ...] = eqx.field(static=True, kw_only=True)

    def remember(self, parameters: int) -> PyTree:
        return self._zero_shifts(parameters)

    def open(self, parameters: int) -> PyTree:
        return self._zero_shifts(parameters)

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        stream = stream_of(answer)
        private, _ = UntrustedServer(self.multipliers).send(answer, silo, ())
        shift = memory.get(stream, jnp.zeros_like(private))
        # One fresh seed from the silo's own coins: its bytes and its shift come from the same random choices.
        seed = silo.randomness.bits(f"compress/{stream}", (2,))
        decoded = self.compressor(private - shift, coins(seed))
        if stream in memory:
            memory = memory | {stream: shift + self._rate(shift.size) * decoded}
        return Compressed(decoded, private - shift, seed, stream), memory

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
        moved = shift + self._rate(shift.size) * (weights @ messages.decoded)
        return shift + mean, accounts, memory | {messages.stream: moved}

    def message_bits(self, message: PyTree) -> int:
        return self.compressor.bits(message.decoded.size)

    def pack(self, message: PyTree) -> Packed:
        data = self.compressor.encode(message.vector, coins(message.seed))
        facts = {"stream": message.stream, "parameters": int(message.vector.size)}
        return Packed(facts, {"bytes": np.frombuffer(data, np.uint8)})

    def unpack(self, packed: Packed) -> PyTree:
        parameters = packed.facts["parameters"]
        decoded = jnp.asarray(self.compressor.decode(packed.arrays["bytes"].tobytes(), parameters))
        return Compressed(decoded, decoded, jnp.zeros(2, jnp.uint32), packed.facts["stream"])

    def _zero_shifts(self, parameters: int) -> dict[str, Vector]:
        return {stream: jnp.zeros(parameters) for stream in self.streams} if self.shifted else {}

    def _rate(self, parameters: int) -> float:
        return shift_rate(self.compressor.omega(parameters))


def stream_of(answer: Answer) -> str:
    return answer.stream if isinstance(answer, Release | RecordMean) else "public"


def coins(seed: UInt32[Array, "2"]) -> SeededRandomness:
    return SeededRandomness(jax.random.wrap_key_data(seed, impl="threefry2x32"))
