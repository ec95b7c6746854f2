"""A federation simulated in one compiled program: silos stacked and vmapped, every key derived from one seed.

The silo's whole side of a question is `silodp.core.ask`, which a silo in its own process calls too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from silodp.channels import Channel
from silodp.channels.channel import normalised
from silodp.core import Algorithm, Silo, Site, ask, privatised
from silodp.facts import Participation, limits, silos_of_round
from silodp.objective import Objective
from silodp.randomness import SERVER, SeededRandomness, party_key
from silodp.releases import Account, Answer, Public, Vector

MESSAGES_BYTES = 1 << 26  # of one vector of each silo that is in memory at one time; a round has a few of them


class Silos(eqx.Module):
    """All silos' records, stacked and padded to the longest; silo i owns the first sizes[i] rows of its block."""

    records: PyTree[Array]
    sizes: Int[Array, " silos"]
    weights: Float[Array, " silos"]

    def __len__(self) -> int:
        return self.sizes.shape[0]


class Ends(eqx.Module):
    """What both ends keep between rounds: each silo's memory, each end of the channel, each silo's account."""

    memory: PyTree
    silo_channel: PyTree
    server_channel: PyTree
    accounts: Account
    bits: Float[Array, "2"]  # up, down


class SimulatedFederation:
    """One round of all silos inside a compiled program. What changes is kept in `ends`."""

    silo_kind: type[Silo] = Silo  # an auditor's looks at what is released

    def __init__(
        self,
        objective: Objective,
        channel: Channel,
        silos: Silos,
        participation: Participation,
        key: Key[Array, ""],
        round: Int[Array, ""],
        ends: Ends,
        same_silos: int = 1,
    ):
        self.objective, self.channel, self.data, self.key, self.round, self.ends = (
            objective, channel, silos, key, round, ends,
        )  # fmt: skip
        self.silos = len(silos)
        self.server = SeededRandomness(party_key(key, round, SERVER))
        self.everyone = limits(participation, self.silos)[0] == self.silos
        # A silo that is repeated (its answer is, to the bit, the same) counts once: it weighs nothing again.
        self.present, self.answering = silos_of_round(key, round, self.silos, participation, same_silos)

    def mean(self, query: Callable[..., Answer], *public: Array) -> Vector:
        ends = self.ends
        present = self.present
        pick = (lambda tree: tree) if self.everyone else rows(present)
        weights = self._once(pick(self.data.weights))
        given = (
            pick(self.data.records), pick(self.data.sizes), present,
            pick(ends.memory), pick(ends.accounts), pick(ends.silo_channel),
        )  # fmt: skip
        ask = jax.vmap(lambda *own: self._ask(query, public, *own))
        if len(present) <= self._at_once:
            messages, memory, accounts, wires = ask(*given)
            bits = self._bits(messages, public, len(present))
            receive = self.channel.receive
        else:
            added = in_parts(partial(self._part, ask, public), self._at_once, (normalised(weights), *given))
            (mean, bits), (messages, memory, accounts, wires) = added
            receive = partial(self.channel.receive_mean, mean)
        value, accounts, server_channel = receive(messages, weights, accounts, self.server, ends.server_channel)
        place = (lambda old, new: new) if self.everyone else put(present)
        self.ends = Ends(
            place(ends.memory, memory), place(ends.silo_channel, wires), server_channel,
            place(ends.accounts, accounts), ends.bits + bits,
        )  # fmt: skip
        return value

    def local(self, index: Any, task: Callable[..., Public], *public: Array) -> Vector:
        ends, one = self.ends, jnp.asarray(index)[None]
        pick = lambda tree: jax.tree.map(lambda leaf: leaf[index], tree)
        silo = self._silo(
            pick(self.data.records), self.data.sizes[index], jnp.asarray(index), pick(ends.memory), pick(ends.accounts)
        )
        value = privatised(task(silo, *public))
        lift = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
        self.ends = Ends(
            put(one)(ends.memory, lift(silo.memory)), ends.silo_channel, ends.server_channel,
            put(one)(ends.accounts, lift(silo.account)), ends.bits + jnp.array([32.0 * value.size, array_bits(public)]),
        )  # fmt: skip
        return value

    def cond(self, predicate: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        def branch(run: Callable[[], Any]) -> Callable[[Ends], tuple[Any, Ends]]:
            def traced(ends: Ends) -> tuple[Any, Ends]:
                self.ends = ends
                return run(), self.ends

            return traced

        value, self.ends = jax.lax.cond(predicate, branch(yes), branch(no), self.ends)
        return value

    def coin(self, purpose: str) -> Float[Array, ""]:
        return self.server.uniform(f"coin/{purpose}", ())

    def _once(self, each: Array) -> Array:
        """Of every silo that answers, and nothing of those repeated."""
        if isinstance(self.answering, int):
            return each
        return jnp.where(jnp.arange(len(each)) < self.answering, each, 0)

    @property
    def _at_once(self) -> int:
        """Silos whose messages are in memory at one time."""
        return max(1, MESSAGES_BYTES // (4 * self.objective.parameters)) if self.channel.in_parts else self.silos

    def _part(self, ask: Any, public: tuple[Array, ...], shares: Array, *given: Any) -> tuple[Any, Any]:
        """Some silos' answers: what is added to that of others, and what is kept of every silo."""
        messages, *kept = ask(*given)
        added = shares @ messages.value, self._bits(messages, public, len(shares))
        return added, (eqx.tree_at(lambda own: own.value, messages, messages.value[:, :0]), *kept)

    def _ask(self, query: Any, public: Any, records: Any, size: Any, index: Any, memory: Any, account: Any, wire: Any):
        return ask(query, public, self._silo(records, size, index, memory, account), wire)

    def _silo(self, records: PyTree, size: Array, index: Array, memory: PyTree, account: Account) -> Silo:
        site = Site(self.objective, self.channel, records, size, index)
        randomness = SeededRandomness(party_key(self.key, self.round, index))
        return self.silo_kind(site, self.round, randomness, memory, account)

    def _bits(self, messages: PyTree, public: tuple[Array, ...], present: int) -> Float[Array, "2"]:
        up, down = jnp.float32(self.channel.bits(messages)), jnp.float32(present * array_bits(public))
        both = jnp.stack([up, down])
        return both if isinstance(self.answering, int) else both * self.answering / len(self.present)


def in_parts(part: Callable[..., tuple[Any, Any]], size: int, given: tuple[PyTree, ...]) -> tuple[Any, Any]:
    """part(*given) of so many silos at one time: the first of its results added up, the second one after another."""
    silos = jax.tree.leaves(given)[0].shape[0]
    whole = silos // size * size
    several = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), given)
    added, kept = jax.lax.map(lambda own: part(*own), several)
    added = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), added)
    kept = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), kept)
    if whole == silos:
        return added, kept
    last = part(*jax.tree.map(lambda leaf: leaf[whole:], given))
    joined = lambda first, second: jnp.concatenate([first, second])
    return jax.tree.map(jnp.add, added, last[0]), jax.tree.map(joined, kept, last[1])


def array_bits(arrays: tuple[Array, ...]) -> float:
    """Bits of public arguments on the wire."""
    return 8.0 * sum(jnp.asarray(a).size * jnp.asarray(a).dtype.itemsize for a in arrays)


def rows(indices: Array) -> Callable[[PyTree], PyTree]:
    return lambda tree: jax.tree.map(lambda leaf: leaf[indices], tree)


def put(indices: Array) -> Callable[[PyTree, PyTree], PyTree]:
    """Write the participants' rows back; absent silos keep theirs."""
    return lambda old, new: jax.tree.map(lambda o, n: o.at[indices].set(n), old, new)


def opening(
    objective: Objective, algorithm: Algorithm, channel: Channel, silos: Silos, x0: Vector, streams: Sequence[str],
    sizes: Mapping[str, int], key: Key[Array, ""],
) -> Ends:  # fmt: skip
    """Both ends before the first round."""

    def remember(records: PyTree, size: Array, index: Array) -> tuple[PyTree, Account]:
        site = Site(objective, channel, records, size, index)
        coins = SeededRandomness(party_key(key, -1, index))
        silo = Silo(site, jnp.int32(-1), coins, (), Account.empty(streams))
        return algorithm.remember(silo, x0), silo.account

    count = len(silos)
    memory, accounts = jax.vmap(remember)(silos.records, silos.sizes, jnp.arange(count))
    wire = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), channel.remember(sizes))
    return Ends(memory, wire, channel.open(sizes), accounts, jnp.zeros(2))
