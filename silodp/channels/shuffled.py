"""Trust in a shuffler only: every record speaks for itself, and nobody can tell which message is whose.

`ShuffledServer`: each record's clipped vector goes through an eps0-LDP randomizer in its silo; the server averages the
anonymous messages. `BinomialServer`: P_vec, a silo adds up its records' vectors, rounded to integers, and their coins;
only the sum over all silos is read. All messages count alike, so silos weigh as many records as they send
(`silodp.build` checks it).

A simulation needs no permutation: the mean of a multiset has no order. In message mode (`individual`) a silo hands its
messages over one by one, sealed, and a shuffler process permutes them; P_vec's parts are masked (silodp.shuffle).
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from silodp.channels.gaussian import Channel, Packed, normalised
from silodp.core import Account, Answer, RecordMean, Silo, Vector
from silodp.randomness import Randomness, Scoped
from silodp.shuffle.binomial import PVec
from silodp.shuffle.randomizers import Duchi, PrivUnitG
from silodp.shuffle.sealed import OVERHEAD

ROUND = "round"  # the batch that all messages of a round share
MESSAGE = "message"  # the stream of a plan that all shuffled messages belong to (silodp.privacy.plan)


class ShuffledServer(Channel):
    """Local randomizers and a shuffler. A plan's multiplier for messages is 1/eps0: larger is more private."""

    randomizer: str = eqx.field(static=True, kw_only=True)
    eps0: float | None = eqx.field(static=True, kw_only=True, default=None)  # privunit's, fixed when compiled
    individual: bool = eqx.field(static=True, kw_only=True, default=False)

    def batch_name(self, stream: str) -> str:
        """All messages of a record in a round are computed on one batch, as the account says (local steps apart)."""
        return stream if stream == "local" else ROUND

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        mean = per_record(answer)
        multiplier = self.multipliers[MESSAGE][silo.index] if self.multipliers else None
        silo.account = silo.account.spend(mean.stream, jnp.float32(0.0 if multiplier is None else multiplier))
        coins = Scoped(silo.randomness, mean.stream)

        def randomised(vectors: Float[Array, "m d"], step: Array) -> Float[Array, "m d"]:
            if multiplier is None:
                return vectors
            device = PrivUnitG(self.eps0) if self.eps0 is not None else Duchi(1 / multiplier)
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


class BinomialServer(Channel):
    """P_vec: integers and coins, of which only the sum over all silos is read.

    A silo's message is its part of the sum, modulo 2^32; in message mode it leaves the silo masked (silodp.run.silo).
    """

    protocols: dict[str, PVec] = eqx.field(kw_only=True)

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        mean = per_record(answer)
        multiplier = self.multiplier(mean.stream, silo)
        silo.account = silo.account.spend(mean.stream, jnp.float32(0.0 if multiplier is None else multiplier))
        own = Scoped(silo.randomness, mean.stream)
        protocol = self.protocols[mean.stream]
        total = mean.summed(lambda vectors, step: protocol.round(vectors, mean.clip, own, step))
        if multiplier is not None:
            total = total + protocol.coins(own, silo.index, total.size)
        return Part(total, jnp.float32(mean.clip), mean.batch.divisor, mean.stream), memory

    def receive(
        self, messages: PyTree, weights: Float[Array, " m"], accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        total = jnp.sum(messages.total, axis=0)  # wraps around, as the masks do
        decoded = self.protocols[messages.stream].decode(total, messages.clip[0])
        return decoded / jnp.sum(messages.records), accounts, memory

    def message_bits(self, message: PyTree) -> int:
        return 32 * (message.total.size + 1)

    def pack(self, message: PyTree) -> Packed:
        arrays = {"total": np.asarray(message.total).view(np.uint32), "clip": np.asarray(message.clip)}
        return Packed({"stream": message.stream, "records": float(message.records)}, arrays)

    def unpack(self, packed: Packed) -> PyTree:
        total, clip, stream = packed.arrays["total"], packed.arrays["clip"], packed.facts["stream"]
        if total.dtype != np.uint32 or total.ndim != 1 or clip.shape != () or stream not in self.protocols:
            raise ValueError(f"message of stream {stream!r}: {total.dtype}{list(total.shape)} is no part of a sum")
        return Part(jnp.asarray(total.view(np.int32)), jnp.asarray(clip), jnp.float32(packed.facts["records"]), stream)


class Heard(eqx.Module):
    """What a simulation passes on of a silo's messages: their mean and their number."""

    mean: Vector
    records: Float[Array, ""]


class Part(eqx.Module):
    """A silo's part of P_vec's sum, in grid units: its records' rounded vectors and its coins."""

    total: Int[Array, " d"]
    clip: Float[Array, ""]
    records: Float[Array, ""]
    stream: str = eqx.field(static=True)


def per_record(answer: Answer) -> RecordMean:
    if not isinstance(answer, RecordMean):
        raise TypeError("a shuffled channel needs the records one by one: this estimator only has their mean")
    return answer


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
