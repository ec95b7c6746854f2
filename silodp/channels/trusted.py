"""The server is trusted: silos send clipped means in the clear, and it adds noise once, to the average.

The noise is scaled to the record that moves the average most; a silo whose records move it less is protected by more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels.channel import Channel, Multipliers, Packed, counted, evaluated, normalised, privatise
from silodp.core import Silo
from silodp.doubles import Double, exact
from silodp.facts import Declared
from silodp.randomness import Randomness
from silodp.releases import Account, Answer, Public, Release, Vector


def weighted(messages: Release, weights: Float[Array, " m"]) -> Double:
    """The weighted sum of the silos' means: exactly, if they came exactly."""
    if messages.rest is None:
        return Double.of(weights @ messages.value)
    return (messages.exact * weights[:, None]).halved()


class Trusted(Channel):
    """Noise once, at the server."""

    name: ClassVar[str] = "trusted"
    setting: ClassVar[str] = "under a trusted server"
    sees: ClassVar[str] = "everything the server broadcasts; not the silos' messages to the server"
    honest: ClassVar[tuple[str, ...]] = (
        "the silo itself: its software clips",
        "the server: it sees clipped means in the clear, draws fresh noise and keeps both to itself",
        "the transport between silo and server is confidential",
    )
    if_others_collude: ClassVar[str] = "unchanged if all other silos collude; nothing is left against the server itself"

    def joint(self, name: str, needed: Multipliers, declared: Declared) -> Multipliers:
        if declared.each(name)[0].local:
            return needed
        relative = self._moves(name, declared) if declared.facts.everyone else np.ones(len(needed))
        used = np.isfinite(needed)  # a silo that never uses the stream asks for nothing
        return np.full(len(needed), np.max((needed * relative)[used]) if used.any() else math.inf)

    def protecting(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        return self.protecting_at_most(name, nominal, declared) if declared.facts.everyone else nominal

    def protecting_at_most(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        return nominal if declared.each(name)[0].local else nominal / self._moves(name, declared)

    def std_over_clip(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        bounds = declared.bounds_over_clip(name)
        if declared.each(name)[0].local:
            return nominal * bounds
        weights = np.asarray(declared.facts.weights)
        if not declared.facts.everyone:
            weights = weights / declared.facts.fewest(weights.tolist())
        return nominal * np.max(weights * bounds)

    def std_of_average(self, name: str, nominal: Multipliers, declared: Declared) -> float:
        return float(self.std_over_clip(name, nominal, declared)[0])

    def _moves(self, name: str, declared: Declared) -> Multipliers:
        """How far a record of each silo moves the weighted average, relative to the worst one."""
        moved = np.asarray(declared.facts.weights) * declared.bounds_over_clip(name)
        return moved / moved.max()

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        if isinstance(answer, Public):
            return answer, memory
        release = evaluated(answer)
        # A simulation rounds the silos' means to float32 before it averages them; between machines nothing is lost.
        return (release if silo.alone else replace(release, rest=None)), memory

    @property
    def in_parts(self) -> bool:
        return type(self) is Trusted  # others may read single messages

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        weights = normalised(weights)
        if isinstance(messages, Public):
            return weights @ messages.value, accounts, memory
        return self._noised(weighted(messages, weights), messages, weights, accounts, randomness, memory)

    def receive_mean(
        self, mean: Vector, messages: PyTree, weights: Array, accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        if isinstance(messages, Public):
            return mean, accounts, memory
        return self._noised(Double.of(mean), messages, normalised(weights), accounts, randomness, memory)

    def _noised(
        self,
        exact: Double,
        messages: Release,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        moves = weights * messages.bound
        bound = jnp.where(jnp.min(moves) < 0, jnp.nan, jnp.max(moves))
        release = Release(exact.high, bound, messages.stream, rest=exact.low)
        if not self.multipliers:
            return exact.high, accounts.spend(messages.stream, jnp.zeros_like(weights)), memory
        multiplier = self.multipliers[messages.stream][0]
        own = multiplier_of_each(multiplier, moves)
        return privatise(release, multiplier, randomness), accounts.spend(messages.stream, counted(moves, own)), memory

    def message_bits(self, message: PyTree) -> int:
        return 32 * message.value.size if isinstance(message, Public) else 64 * message.value.size + 32

    def pack(self, message: PyTree) -> Packed:
        if isinstance(message, Public):
            return Packed({"stream": None}, {"value": np.asarray(message.value)})
        arrays = {"value": exact(message.exact), "bound": np.asarray(message.bound)}
        return Packed({"stream": message.stream}, arrays)

    def unpack(self, packed: Packed) -> PyTree:
        value = packed.arrays["value"]
        if packed.facts["stream"] is None:
            return Public(jnp.asarray(value))
        high = value.astype(np.float32)
        low = jnp.asarray(value - high, jnp.float32)
        return Release(jnp.asarray(high), jnp.asarray(packed.arrays["bound"]), packed.facts["stream"], rest=low)

    def seen(
        self, messages: PyTree, mean: Vector, released: Sequence[Float[Array, "silos d"]]
    ) -> list[Float[Array, "views d"]]:
        return list(released) or [mean[None]]


def multiplier_of_each(multiplier: Array, moves: Float[Array, " m"]) -> Float[Array, " m"]:
    """A silo whose record moves the average less than the worst one's is hidden by as much more noise.

    Nothing is shown of records that move nothing, nor under noise without end (points infinitely far apart).
    """
    known = (moves > 0) & jnp.isfinite(moves)
    more = jnp.where(known, jnp.max(moves) / jnp.where(known, moves, 1.0), jnp.inf)
    return jnp.where(multiplier > 0, multiplier * more, 0.0)
