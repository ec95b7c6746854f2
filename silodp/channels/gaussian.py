"""The Gaussian trust models: noise once at a trusted server, or in every silo when the server is not trusted.

`send` runs in the silo, `receive` at the server. A message is a pytree of arrays; `noise` multipliers come from the
plan that every party holds, never from a message. A channel without any multipliers adds nothing: not private.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.core import Account, Answer, Public, Release, Silo, Vector
from silodp.randomness import Randomness


def privatise(release: Release, multiplier: Any, randomness: Randomness, step: Any = 0) -> Vector:
    """The one place where Gaussian noise is drawn: std = multiplier * bound.

    Formal guarantee: a release whose value moves by at most `bound` when one record is replaced is
    (1/multiplier)-Gaussian-DP, given everything released before it.
    """
    if multiplier is None:
        return release.value
    draw = randomness.normal(f"noise/{release.stream}", release.value.shape, step)
    # A zero multiplier or bound adds exactly nothing, also when the other factor is infinite.
    silent = (multiplier == 0) | (release.bound == 0)
    return release.value + jnp.where(silent, 0.0, multiplier * release.bound) * draw


class Packed(NamedTuple):
    """A message in plain form: what is written to the wire."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Channel(eqx.Module):
    """What passes between a silo and the server. `multipliers` holds, by stream, one number for each silo."""

    multipliers: dict[str, Float[Array, " silos"]]

    def remember(self, parameters: int) -> PyTree:
        """The silo's end of the channel between rounds (nothing, unless messages are compressed against a shift)."""
        return ()

    def open(self, parameters: int) -> PyTree:
        """The server's end of the channel between rounds."""
        return ()

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The silo's message and its end of the channel afterwards."""
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

    def message_bits(self, message: PyTree) -> int:
        """Bits of one silo's message on the wire."""
        raise NotImplementedError

    def bits(self, messages: PyTree) -> Any:
        """Bits of all silos' messages of a round."""
        one = jax.tree.map(lambda leaf: leaf[0], messages)
        return jax.tree.leaves(messages)[0].shape[0] * self.message_bits(one)

    def pack(self, message: PyTree) -> Packed:
        """The message as named arrays and plain facts, for the wire."""
        raise NotImplementedError

    def unpack(self, packed: Packed) -> PyTree:
        """The message that `receive` takes; ValueError when the arrays are not one."""
        raise NotImplementedError

    def batch_name(self, stream: str) -> str:
        """Whose batch a stream uses: here its own, drawn independently of every other."""
        return stream

    def multiplier(self, stream: str, silo: Silo) -> Array | None:
        return self.multipliers[stream][silo.index] if self.multipliers else None

    def privatise_local(self, release: Release, silo: Silo, step: Any = 0) -> Vector:
        """Noise drawn in the silo, whatever the channel: what a silo computes locally only it can protect."""
        multiplier = self.multiplier(release.stream, silo)
        silo.account = silo.account.spend(release.stream, jnp.float32(0.0 if multiplier is None else multiplier))
        return privatise(release, multiplier, silo.randomness, step)


class UntrustedServer(Channel):
    """Every silo adds its own noise before anything leaves it (inter-silo record-level DP)."""

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        if isinstance(answer, Public):
            return answer.value, memory
        release = evaluated(answer)
        return self.privatise_local(release, silo), memory

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        return normalised(weights) @ messages, accounts, memory

    def message_bits(self, message: PyTree) -> int:
        return 32 * message.size

    def pack(self, message: PyTree) -> Packed:
        return Packed({}, {"value": np.asarray(message)})

    def unpack(self, packed: Packed) -> PyTree:
        return jnp.asarray(packed.arrays["value"])


class TrustedServer(Channel):
    """Silos send their clipped means in the clear; the server adds noise once, on the average."""

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        return (answer if isinstance(answer, Public) else evaluated(answer)), memory

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        weights = normalised(weights)
        mean = weights @ messages.value
        if isinstance(messages, Public):
            return mean, accounts, memory
        moves = weights * messages.bound
        release = Release(mean, jnp.max(moves), messages.stream)
        if not self.multipliers:
            return mean, accounts.spend(messages.stream, jnp.zeros_like(weights)), memory
        multiplier = self.multipliers[messages.stream][0]
        # A silo whose record moves the average less than the worst one's is hidden by as much more noise.
        own = multiplier * jnp.where(moves > 0, release.bound / jnp.where(moves > 0, moves, 1.0), 1.0)
        return privatise(release, multiplier, randomness), accounts.spend(messages.stream, own), memory

    def message_bits(self, message: PyTree) -> int:
        return 32 * (message.value.size + (0 if isinstance(message, Public) else 1))

    def pack(self, message: PyTree) -> Packed:
        if isinstance(message, Public):
            return Packed({"stream": None}, {"value": np.asarray(message.value)})
        arrays = {"value": np.asarray(message.value), "bound": np.asarray(message.bound)}
        return Packed({"stream": message.stream}, arrays)

    def unpack(self, packed: Packed) -> PyTree:
        value = jnp.asarray(packed.arrays["value"])
        if packed.facts["stream"] is None:
            return Public(value)
        return Release(value, jnp.asarray(packed.arrays["bound"]), packed.facts["stream"])


def normalised(weights: Float[Array, " m"]) -> Float[Array, " m"]:
    return weights / weights.sum()


def evaluated(answer: Answer) -> Release:
    if isinstance(answer, Public):
        raise TypeError("a Public answer carries no bound")
    return answer if isinstance(answer, Release) else answer.release()
