"""P_vec: a private sum of vectors from rounded integers and fair coins.

Cheu et al. 2021; Lowy et al. 2023, Algorithms 4 and 5. Every record shifts its vector of norm at
most `clip` to [0, 2 clip] per coordinate, rounds it at random to a grid of `levels` steps, and adds
Binomial(bits_per_record, 1/2). Only the sum over all records and coordinates leaves the shuffler,
so its noise is one Binomial(records * bits_per_record, 1/2) per coordinate; the analyser re-centres
and rescales. The paper's analyser subtracts p b n where the number of messages belongs and adds
back L where N L belongs (errata, E18); all integers here are centred, so no count enters at all.

A silo draws the coins of all its records at once, one binomial per coordinate, and the silos' coins
sum to that one binomial. The law is exact but for 2^-105 (`silodp.privacy.coins`), by inversion of 128 random bits.

Formal guarantee: `silodp.privacy.coins`, for whoever sees the sums over all silos. The certificate
does NOT cover a server that sees a silo's part of them: either the integers are sent as single,
shuffled bits as in the papers (`bits_sent`), or the silos' parts are masked (`silodp.channels.masks`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from silodp.channels.channel import Channel, Levels, Multipliers, Packed, ServerEnd, SiloEnd, per_record
from silodp.channels.shuffled import Shuffled, check_alike, known_dimension, largest
from silodp.channels.summing import MaskedEnd
from silodp.core import Silo
from silodp.errors import ConfigError, Refused
from silodp.facts import Declared, Stream
from silodp.privacy import accountant
from silodp.privacy.coins import (
    FEWEST_BITS,
    ROUNDED,
    cumulative_words,
    dominating_gaussian,
    gaussian_multiplier,
    sensitivity,
)
from silodp.privacy.kinds import Releases, Spent
from silodp.randomness import Randomness, Scoped, Shape, Step
from silodp.releases import Account, Answer, Vector
from silodp.sampling import SQUARES_MOVE

SAME_CLIP = 1e-3  # by how much the clip norms of parts may differ: silos compute them alike, but for rounding
_LARGEST_TABLE_BITS = 2**38  # a table of 7 million entries


class CoinTables(eqx.Module):
    """Draws heads - bits/2 for several numbers of fair coins, by inverting their distribution functions."""

    parts: tuple[UInt32[Array, " entries"], ...]  # 32 bits each, the highest first; all tables one after the other
    starts: Int[Array, " tables"]
    sizes: Int[Array, " tables"]
    halvings: int = eqx.field(static=True)

    def __init__(self, bits: Sequence[int]):
        if max(bits) > _LARGEST_TABLE_BITS:
            raise ValueError(f"bits must be at most {_LARGEST_TABLE_BITS}, not {max(bits)}: lower `levels`")
        tables = [cumulative_words(each) for each in bits]
        sizes = [len(table) for table in tables]
        self.parts = tuple(jnp.asarray(part.astype(np.uint32)) for part in np.concatenate(tables).T)
        self.starts = jnp.asarray(np.cumsum([0, *sizes[:-1]]), jnp.int32)
        self.sizes = jnp.asarray(sizes, jnp.int32)
        self.halvings = max(sizes).bit_length()

    @property
    def reach(self) -> Int[np.ndarray, " tables"]:
        """The largest absolute value of each table's draws."""
        return (np.asarray(self.sizes) + 1) // 2

    def draw(self, random: Randomness, shape: Shape, table: int | Array = 0, step: Step = 0) -> Int[Array, "..."]:
        """The number of the table's words not above a random word, minus the central one."""
        word = random.bits("coins", (len(self.parts), *shape), step)
        start, size = self.starts[table], self.sizes[table]

        def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            left, right = bracket
            middle = (left + right) // 2
            passed = jnp.ones(shape, bool)
            for part, drawn in reversed(list(zip(self.parts, word, strict=True))):
                passed = (part[middle] < drawn) | ((part[middle] == drawn) & passed)
            open_ = left < right
            return (
                jnp.where(open_ & passed, middle + 1, left),
                jnp.where(open_ & ~passed, middle, right),
            )

        bracket = (jnp.broadcast_to(start, shape), jnp.broadcast_to(start + size, shape))
        found, _ = jax.lax.fori_loop(0, self.halvings, halve, bracket)
        return found - start - size // 2


class PVec(eqx.Module):
    """The protocol when silo i sends for `sent[i]` records; holds tables, so build it outside jit."""

    levels: int = eqx.field(static=True)
    bits_per_record: int = eqx.field(static=True)
    sent: tuple[int, ...] = eqx.field(static=True)
    tables: CoinTables  # one for each number of records that a silo sends for
    table_of: Int[Array, " silos"]

    def __init__(self, levels: int, bits_per_record: int, sent: Sequence[int], most: Sequence[int] = ()):
        """`most`: records that a silo's sum can hold, where that is more than it sends coins for."""
        if levels < 2 or levels % 2:
            raise ValueError(f"levels must be even and at least 2, not {levels}")
        self.levels, self.bits_per_record, self.sent = levels, bits_per_record, tuple(sent)
        counts, table_of = np.unique(sent, return_inverse=True)
        self.tables = CoinTables([bits_per_record * int(count) for count in counts])
        self.table_of = jnp.asarray(table_of, jnp.int32)
        largest = sum(most or sent) * levels // 2 + int(self.tables.reach[table_of].sum())
        if largest >= 2**31:
            raise ValueError(f"levels = {levels}: sums up to {largest} do not fit into 32 bits; lower it")

    def round(
        self, vectors: Float[Array, "n d"], clip: float | Array, random: Randomness, step: Step = 0
    ) -> Int[Array, "n d"]:
        """Vectors in units of 2 clip/levels, rounded at random to keep the mean; zeros when there is no clip norm."""
        usable = jnp.isfinite(clip) & (jnp.asarray(clip) > 0)
        scaled = jnp.where(usable, vectors * (self.levels / 2) / jnp.where(usable, clip, 1.0), 0.0)
        scaled = jnp.clip(scaled, -self.levels / 2, self.levels / 2)
        below = jnp.floor(scaled)
        up = random.uniform("rounding", vectors.shape, step) < scaled - below
        return below.astype(jnp.int32) + up

    def coins(self, random: Randomness, silo: int | Array, dimension: int) -> Int[Array, " d"]:
        """The coins of all records that a silo sends for, to be added to the sum of their rounded vectors."""
        return self.tables.draw(random, (dimension,), self.table_of[silo])

    def decode(self, total: Int[Array, " d"], clip: float | Array) -> Float[Array, " d"]:
        """The estimate of the sum of the vectors from the sum of all integers."""
        return total * (2 * clip / self.levels)

    def noise_std(self, clip: float) -> float:
        """Std of all silos' coins in one coordinate of the decoded sum (without the rounding's)."""
        return math.sqrt(self.bits_per_record * sum(self.sent)) / 2 * (2 * clip / self.levels)

    def bits_sent(self, dimension: int) -> int:
        """Bits a record sends when each message is one labelled bit, as in the paper."""
        label = math.ceil(math.log2(dimension)) if dimension > 1 else 0
        return dimension * (self.levels + self.bits_per_record) * (1 + label)


class Part(eqx.Module):
    """A silo's part of P_vec's sum, in grid units: its records' rounded vectors and its coins."""

    total: Int[Array, " d"]
    clip: Float[Array, ""]
    records: Float[Array, ""]
    stream: str = eqx.field(static=True)


class Summed(Channel):
    """P_vec under a shuffler, or under masks: integers and coins, of which only the sum over all silos is read.

    A silo's message is its part of the sum, modulo 2^32; between processes it leaves the silo masked.
    """

    name: ClassVar[str] = "shuffled"
    gaussian: ClassVar[bool] = False
    hides_sizes: ClassVar[bool] = True
    weighs_by_size: ClassVar[bool] = True
    setting: ClassVar[str] = "in the shuffle model"
    sees: ClassVar[str] = (
        "the sums over all silos' records of rounded integers and coins, in every round, and no part of them"
    )
    honest: ClassVar[tuple[str, ...]] = (
        "the silo itself: its software clips, rounds, draws fresh coins for every record and tells nobody",
        "the server: it passes the silos' public keys on unchanged (fingerprints show it), so that masks hide each "
        "part",
        "the other silos: their coins really are in every sum",
    )
    if_others_collude: ClassVar[str] = (
        "if the other silos tell the server their coins, only this silo's own coins are left"
    )

    noise: ClassVar[str] = (
        "fair coins of all silos in every sum, whole numbers of the operating system's entropy; exact Gaussians on a "
        "public grid in local steps"
    )

    grid: int = eqx.field(static=True, kw_only=True, default=200)  # rounding levels
    protocols: dict[str, PVec] = eqx.field(kw_only=True, default_factory=dict)  # by stream; a plan fills it in

    def options(self) -> dict[str, Any]:
        return {"privacy.trust": self.name, "algorithm.randomizer": "pvec", "algorithm.grid": self.grid}

    def batches(self, kind: str | None, asked: bool) -> str | None:
        return Shuffled.batches(self, kind, asked)  # type: ignore[arg-type]

    def check(self, declared: Declared, options: Any) -> None:
        check_alike(declared, options)

    def accounted(self, declared: Declared, silo: int, streams: Sequence[Stream]) -> list[Releases]:
        """The Gaussian releases that the sums are no worse than, but for the far tail of their coins."""
        pairs = zip(super().accounted(declared, silo, streams), streams, strict=True)
        sizes = {stream.name: known_dimension(declared, stream.name) for stream in streams}
        rounded = {name: 2 * ROUNDED * size * declared.facts.silos for name, size in sizes.items()}
        return [each if s.local else replace(each, coins=sizes[s.name], lost=rounded[s.name]) for each, s in pairs]

    def joint(self, name: str, needed: Multipliers, declared: Declared) -> Multipliers:
        return needed if declared.each(name)[0].local else largest(needed)

    def std_over_clip(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        if declared.each(name)[0].local:
            return super().std_over_clip(name, nominal, declared)
        sent = declared.facts.fewest(declared.divisors(name))
        return nominal * self._shift(declared, name) * 2 / self.grid / sent

    def std_of_average(self, name: str, nominal: Multipliers, declared: Declared) -> float:
        if declared.each(name)[0].local:
            return super().std_of_average(name, nominal, declared)
        return float(self.std_over_clip(name, nominal, declared)[0])

    def _shift(self, declared: Declared, name: str) -> float:
        return sensitivity(self._moved(declared, name), known_dimension(declared, name))

    def _moved(self, declared: Declared, name: str) -> float:
        """By how many levels a sum moves when one record is replaced; squares v v^T move less than other vectors."""
        return self.grid * (SQUARES_MOVE / 2 if declared.each(name)[0].squares else 1.0)

    def left_if(self, own: Sequence[Spent], silo: int, declared: Declared, delta: float, records: int = 1) -> Levels:
        """What is left when only this silo's own coins are secret.

        The same holds if the masks between silos are broken: the server then reads the silo's part of each sum.
        """
        left = []
        for spent in own:
            name = spent.releases.stream
            if declared.each(name)[0].local:  # Gaussian noise that is this silo's alone
                left.append(spent)
                continue
            shift, shares = self._shift(declared, name), coins_for(declared, name)
            # Fewer coins than there are: their Gaussian equivalent has been rounded down already.
            every = (2 * spent.multiplier * shift) ** 2
            coins = every * shares[silo] / declared.facts.fewest(shares)
            if coins < FEWEST_BITS:
                return dict.fromkeys(("other_silos_collude", "masks_are_broken"), math.inf)
            left.append(replace(spent, multiplier=dominating_gaussian(2 * int(coins / 2)) / shift))
        epsilon = accountant.group_epsilon(left, delta, records)
        return {"other_silos_collude": epsilon, "masks_are_broken": epsilon}

    def ready(self, declared: Declared, multipliers: Mapping[str, Array], delta: float) -> Channel:
        used = {s.name for own in declared.streams for s in own if s.count and not s.local}
        protocols = {name: self._protocol(declared, name, multipliers.get(name)) for name in sorted(used)}
        return replace(self, multipliers=dict(multipliers), protocols=protocols)

    def _protocol(self, declared: Declared, name: str, multipliers: Array | None) -> PVec:
        """P_vec with the fewest coins that give the planned multiplier, also when the smallest silos take part."""
        size, moved = known_dimension(declared, name), self._moved(declared, name)
        sent = coins_for(declared, name)
        most = [s.batch.most(n) for s, n in zip(declared.each(name), declared.facts.sizes, strict=True)]
        records = int(declared.facts.fewest(sent))
        needed = 0.0 if multipliers is None else float(np.max(np.asarray(multipliers)))
        target = (2 * needed * sensitivity(moved, size)) ** 2
        least = max(2, 2 * int(np.ceil(max(target, FEWEST_BITS) / records / 2)))
        per_record = least
        while gaussian_multiplier(per_record * records, moved, size) < needed:
            per_record += max(2, 2 * (per_record // 20_000))
        try:
            return PVec(self.grid, per_record, sent, most)
        except ValueError as error:
            raise ConfigError(f"algorithm.grid: {error}") from None

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

    def silo_end(
        self, declared: Declared, index: int, agreed: bytes, shuffler: Any, seed: int | None = None
    ) -> SiloEnd:
        return MaskedEnd(self, declared.facts, index, agreed)

    def server_end(self, sizes: Mapping[str, int], shuffler: Any) -> ServerEnd:
        return PartsEnd(self, sizes)

    def seen(
        self, messages: PyTree, mean: Vector, released: Sequence[Float[Array, "silos d"]]
    ) -> list[Float[Array, "views d"]]:
        return list(released) or [mean[None]]


def coins_for(declared: Declared, name: str) -> list[int]:
    """For how many records each silo tosses coins: whole ones, whatever the share of its records is."""
    return [round(divisor) for divisor in declared.divisors(name)]


class PartsEnd(ServerEnd):
    """Adds up parts that were all made with one clip norm: a silo that tells another would scale everybody's mean."""

    def mean(
        self, packed: Sequence[Packed], weights: Float[Array, " m"], accounts: Account, randomness: Randomness
    ) -> tuple[Vector, Account]:
        clips = np.array([each.arrays["clip"] for each in packed], np.float64)
        if not (clips <= clips.min() * (1 + SAME_CLIP)).all():  # also of NaN
            raise Refused("parts of a sum were made with different clip norms")
        return super().mean(packed, weights, accounts, randomness)
