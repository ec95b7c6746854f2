"""Trust in a shuffler only: every record speaks for itself, and nobody can tell which message is whose.

`ShuffledServer`: each record's clipped vector goes through an eps0-LDP randomizer in its silo; the server averages the
anonymous messages. `BinomialServer`: P_vec, the records' vectors are rounded to integers and hidden by coins whose sum
alone is read. All messages count alike, so silos weigh as many records as they send (`silodp.build` checks it).

A simulation needs no permutation: the mean of a multiset has no order. In message mode (`individual`) a silo hands its
messages over one by one, sealed, and a shuffler process permutes them (silodp.shuffle).
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels.gaussian import Channel, normalised
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
    """P_vec: integers and coins, of which only the sum over all records is read."""

    protocols: dict[str, PVec] = eqx.field(kw_only=True)

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        mean = per_record(answer)
        multiplier = self.multiplier(mean.stream, silo)
        silo.account = silo.account.spend(mean.stream, jnp.float32(0.0 if multiplier is None else multiplier))
        coins = Scoped(silo.randomness, mean.stream)
        protocol = self.protocols[mean.stream]
        total = mean.summed(lambda vectors, step: protocol.round(vectors, mean.clip, coins, step))
        return Rounded(total, jnp.float32(mean.clip), mean.batch.divisor, mean.stream), memory

    def receive(
        self, messages: PyTree, weights: Float[Array, " m"], accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        protocol = self.protocols[messages.stream]
        total = jnp.sum(messages.total, axis=0)
        if self.multipliers:
            total = total + protocol.noise(Scoped(randomness, messages.stream), total.size)
        return protocol.decode(total, messages.clip[0]) / jnp.sum(messages.records), accounts, memory

    def bits(self, messages: PyTree) -> Float[Array, ""]:
        protocol = self.protocols[messages.stream]
        return protocol.integer_bits(messages.total.shape[1]) * jnp.sum(messages.records)


class Heard(eqx.Module):
    """What a simulation passes on of a silo's messages: their mean and their number."""

    mean: Vector
    records: Float[Array, ""]


class Rounded(eqx.Module):
    """A silo's part of P_vec's sum, in grid units and still without coins: what a simulation passes on."""

    total: Float[Array, " d"]
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
