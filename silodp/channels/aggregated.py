"""Nobody is trusted, and the server sees sums only: every silo adds its share of the noise, under masks.

A silo sends round(w v / h) + X modulo 2^b under pairwise masks (silodp.channels.masks): w is its weight, v its clipped
mean, X a discrete Gaussian and h a public power of two. The server learns the sum over all silos of a round. Shares of
the noise are sized so that what is left when `colluding` silos tell theirs, and `missing` ones send none, is what the
target needs: with N silos a sum carries sqrt(N / (N - colluding - missing)) times a trusted server's noise.

Nothing but sums passes, so a compressor must commute with them: rand-k does, with one public mask for all silos of a
round. The shift of a shifted method is then one vector, and the server keeps it.

A simulation draws the noise of a sum once, with the variance of all shares. What silos and server do between processes
is silodp.channels.summing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, UInt32

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
    counted,
    evaluated,
    normalised,
    refuse_randomizer,
    std_of,
    trust_of,
)
from silodp.channels.compressed import Shift, compression_of
from silodp.channels.grids import NEVER, Lattice, Part, hidden_by, moves_of, planned_grid, shares_for
from silodp.channels.summing import AggregatedSilo, SumEnd
from silodp.compressors import Compressor, Identity, RandK, random_mask
from silodp.core import Silo
from silodp.doubles import Double
from silodp.errors import ConfigError
from silodp.facts import Declared, Stream
from silodp.privacy import accountant
from silodp.privacy.kinds import Releases, Spent
from silodp.privacy.sums import LOSS, LOST, ROUNDING
from silodp.randomness import SERVER, Randomness, SeededRandomness, party_key, power_of_two
from silodp.releases import Account, Answer, Public, Release, Vector

SMALLEST_SCALE = 2.0**-70  # of a clip norm: below, float32 runs out of numbers for steps
ROUNDED_UP = 1 + 2.0**-20  # silos compute a clip norm from their bounds, in float32


class Aggregated(Channel):
    """Sums under masks, with noise that all silos share.

    Args:
        colluding: so many silos may work for the server; default: half of the silos of a round, rounded down.
        missing: a round may do without so many silos.

    Example:
        >>> import silodp
        >>> silodp.channels.Aggregated(colluding=2).options()
        {'privacy.trust': 'aggregated', 'privacy.colluding': 2}
    """

    name: ClassVar[str] = "aggregated"
    setting: ClassVar[str] = "under secure aggregation"
    sees: ClassVar[str] = (
        "the sums over all silos of a round, in every round, what silos have made private by themselves (local steps), "
        "and everything the server computes from them; no silo's part of a sum"
    )
    honest: ClassVar[tuple[str, ...]] = (
        "the silo itself: its software clips, draws fresh noise and tells nobody",
        "the other silos, but for as many as may collude: their shares of the noise are in every sum, and they keep "
        "shares and masks to themselves",
        "the silos' public keys are theirs: signed where there is a roster, else fingerprints are compared",
    )
    if_others_collude: ClassVar[str] = (
        "calibrated against the server and as many colluding silos as are said below; a silo that only reads what the "
        "server tells is one of them, as it knows its own share; if all others collude, this silo's own share is left"
    )
    noise: ClassVar[str] = (
        "discrete Gaussians on a public grid, a share from each silo, exactly drawn from the operating system's "
        "entropy; exact Gaussians in local steps; rounding and grid are part of sensitivity and epsilon"
    )

    colluding: int | None = eqx.field(static=True, kw_only=True, default=None)
    missing: int = eqx.field(static=True, kw_only=True, default=0)
    compressor: Compressor | None = eqx.field(kw_only=True, default=None)
    shifted: bool = eqx.field(static=True, kw_only=True, default=False)
    shift: Shift = eqx.field(static=True, kw_only=True, default=Shift())
    grids: dict[str, Lattice] = eqx.field(kw_only=True, default_factory=dict)  # by stream; a plan fills it in
    coins: UInt32[Array, "2"] | None = eqx.field(kw_only=True, default=None)  # public: of rand-k's masks

    # --- the promise ------------------------------------------------------------------------------------

    @classmethod
    def of(cls, wishes: Wishes) -> Channel:
        refuse_randomizer(wishes)
        if wishes.privacy.mask_amplification:
            raise ConfigError(
                "privacy.mask_amplification = true: not under trust 'aggregated', where all silos share a mask that "
                "the server knows beforehand"
            )
        compression = compression_of(wishes) or dict(wishes.own)
        compression.pop("mask_amplification", None)
        if not isinstance(compression.get("compressor"), RandK | Identity | None):
            raise ConfigError(
                f"algorithm.compressor = {wishes.options.compressor!r}: not under trust 'aggregated', where only sums "
                "are read, and messages that silos compress each in their own way do not add up; use rand-k"
            )
        privacy = wishes.privacy
        return cls(colluding=privacy.colluding, missing=privacy.missing or 0, **compression)

    def options(self) -> dict[str, Any]:
        told: dict[str, Any] = {"privacy.trust": trust_of(self, Aggregated)}
        told |= {} if self.colluding is None else {"privacy.colluding": self.colluding}
        told |= {"privacy.missing": self.missing} if self.missing else {}
        if self.compressor is not None:
            kind = "rand-k" if isinstance(self.compressor, RandK) else "identity"
            keep = {"algorithm.keep": self.compressor.keep} if isinstance(self.compressor, RandK) else {}
            told |= {"algorithm.compressor": kind, "algorithm.shifted": self.shifted} | keep
            told |= {f"algorithm.{key}": value for key, value in self.shift.told.items()}
        return told

    def check(self, declared: Declared, options: Any) -> None:
        if self.missing and any(s.local and s.count for own in declared.streams for s in own):
            raise ConfigError(
                f"privacy.missing = {self.missing}: nobody takes a missing silo's local steps; leave it out"
            )
        silos, colluding = declared.facts.answering, self.colluders(declared.facts.answering)
        if colluding + self.missing >= silos:
            raise ConfigError(
                f"privacy.colluding = {colluding}, privacy.missing = {self.missing}: of the {silos} silos of a round "
                f"one at least must be honest and present; together at most {silos - 1}"
            )
        if self.missing and colluding + 2 * self.missing >= silos:
            raise ConfigError(
                f"privacy.missing = {self.missing}: with {colluding} of {silos} silos colluding the server could open "
                f"two sums of a round; colluding + 2 missing must be below {silos}"
            )
        for stream in declared.streams[0]:
            self.variance(declared.dimension(stream.name) or 1 << 62)  # refuses what rand-k cannot keep

    def colluders(self, silos: int) -> int:
        """How many silos of a round may work for the server. Where some may miss, two openings must share a silo that
        does not: colluding + 2 missing < silos."""
        if self.colluding is not None:
            return self.colluding
        return min(silos // 2, max(0, silos - 2 * self.missing - 1) if self.missing else silos - 1)

    def honest_present(self, silos: int) -> int:
        """Shares of the noise that are in every sum and that the server does not know."""
        return silos - self.colluders(silos) - self.missing

    def accounted(self, declared: Declared, silo: int, streams: Sequence[Stream]) -> list[Releases]:
        plain = super().accounted(declared, silo, streams)
        pairs = zip(plain, streams, strict=True)
        return [each if s.local else replace(each, loss=LOSS, lost=LOST) for each, s in pairs]

    def joint(self, name: str, needed: Multipliers, declared: Declared) -> Multipliers:
        """Own share of the noise over what an own record moves."""
        used = np.isfinite(needed)  # a silo that never uses the stream asks for nothing
        if declared.each(name)[0].local or not used.any():
            return needed
        moves = moves_of(name, declared)
        wanted = np.where(used, needed, 0.0) * (1 + ROUNDING) * moves
        return shares_for(wanted, self.honest_present(declared.facts.answering)) / moves

    def protecting(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        return self.hidden(name, nominal, declared, self.honest_present(declared.facts.answering))

    def hidden(self, name: str, nominal: Multipliers, declared: Declared, honest: int) -> Multipliers:
        """The multiplier for each silo's records when so many shares are unknown, its own among them."""
        if declared.each(name)[0].local or not np.isfinite(nominal).all():
            return nominal
        moves = moves_of(name, declared)
        return hidden_by(nominal * moves, honest) / ((1 + ROUNDING) * moves)

    def std_over_clip(self, name: str, nominal: Multipliers, declared: Declared) -> Multipliers:
        """On the average, as for a trusted server: all shares are in it."""
        if declared.each(name)[0].local:
            return super().std_over_clip(name, nominal, declared)
        facts = declared.facts
        largest = np.sort((nominal * moves_of(name, declared)) ** 2)[-facts.answering :]
        return np.full(len(nominal), math.sqrt(largest.sum()) / facts.fewest(list(facts.weights)))

    def std_of_average(self, name: str, nominal: Multipliers, declared: Declared) -> float:
        if declared.each(name)[0].local:
            return super().std_of_average(name, nominal, declared)
        return float(self.std_over_clip(name, nominal, declared)[0])

    def averaged(self, silos: float) -> float:
        return math.sqrt(silos * self.honest_present(int(silos)))

    def variance(self, parameters: int) -> float:
        try:
            return 0.0 if self.compressor is None else self.compressor.omega(parameters)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from None

    def left_if(self, own: Sequence[Spent], silo: int, declared: Declared, delta: float, records: int = 1) -> Levels:
        """On three levels. A channel without the noise of a plan knows no shares."""
        if not self.multipliers:
            return None
        silos = declared.facts.answering
        colluding = self.colluders(silos)
        levels = {
            "nobody_colludes": silos - self.missing,
            f"{colluding}_of_{silos}_silos_collude": self.honest_present(silos),
            "all_others_collude": 1,
        }

        def epsilon(honest: int) -> float:
            hidden = lambda line: self.hidden(line, np.asarray(self.multipliers[line], np.float64), declared, honest)
            left = [replace(s, multiplier=float(hidden(s.releases.stream)[silo])) for s in own]
            return accountant.group_epsilon(left, delta, records)

        return {name: epsilon(honest) for name, honest in levels.items()}

    def ready(self, declared: Declared, multipliers: Mapping[str, Array], delta: float) -> Channel:
        if not declared.facts.everyone and any(s.squares for s in declared.streams[0]):
            raise ConfigError("algorithm.participation: whiten needs all silos under trust 'aggregated'; leave it out")
        grids = {
            name: self._lattice(declared, name, np.asarray(noise, np.float64))
            for name, noise in multipliers.items()
            if not declared.each(name)[0].local
        }
        coins = jax.random.key_data(jax.random.key(declared.facts.seed))
        return replace(self, multipliers=dict(multipliers), grids=grids, coins=coins)

    def _lattice(self, declared: Declared, name: str, nominal: Multipliers) -> Lattice:
        size, grid = declared.dimension(name), NEVER
        if size is None:
            raise ConfigError("model.parameters is missing: the grid of sums depends on it")
        if np.isfinite(nominal).all():
            grid = planned_grid(name, nominal, declared, self._sent(size))
        single = lambda value: jnp.asarray(value, jnp.float32)
        hidden = single(self.protecting(name, nominal, declared))
        return Lattice(single(declared.bounds_over_clip(name)), single(grid.step), jnp.asarray(grid.width), hidden)

    def _sent(self, size: int) -> int:
        """Numbers of a release that are in a sum."""
        return self.compressor.keep if isinstance(self.compressor, RandK) else size

    # --- the run ----------------------------------------------------------------------------------------

    def open(self, sizes: Mapping[str, int]) -> PyTree:
        return {stream: jnp.zeros(size) for stream, size in sizes.items()} if self.shifted else {}

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        if isinstance(answer, Public):
            return answer, memory
        release = evaluated(answer)
        # A simulation rounds the silos' means to float32 before it adds them up; between machines nothing is lost.
        rest = release.rest if silo.alone else None
        hidden, std, step = self._noise(release, silo)
        silo.account = silo.account.spend(release.stream, counted(release.bound, hidden))
        return Part(release.value, release.bound, rest, std, step, silo.round, release.stream), memory

    def _noise(self, release: Release, silo: Silo) -> tuple[Array, Array, Array]:
        """What protects this silo's records, its share's std and the coarsest step that the grid may have."""
        multiplier = self.multiplier(release.stream, silo)
        if multiplier is None:
            return jnp.float32(0), jnp.float32(0), jnp.float32(0)
        lattice = self.grids[release.stream]
        over_clip = lattice.over_clip[silo.index]
        scale = jnp.maximum(release.bound / over_clip, SMALLEST_SCALE)
        bound = jnp.where(release.bound >= 0, scale * over_clip * ROUNDED_UP, jnp.nan)
        std = std_of(replace(release, bound=bound), multiplier)
        return lattice.hidden[silo.index], std, lattice.step * scale

    def receive(
        self, messages: PyTree, weights: Float[Array, " m"], accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        """The mean that a server reads off the sum; between processes it has only the sum (silodp.channels.summing)."""
        share = normalised(weights)
        if isinstance(messages, Public):
            return share @ messages.value, accounts, memory
        value = share @ messages.value
        if self.multipliers:
            std, step = jnp.linalg.norm(share * messages.std), power_of_two(messages.step[0]) / weights.sum()
            noised = randomness.noised(f"noise/{messages.stream}", Double.of(value), std)
            value = jnp.rint(noised / step) * step
        return self.decompressed(value, messages.round[0], messages.stream, accounts, memory)

    def decompressed(
        self, mean: Vector, round: Any, stream: str, accounts: Account, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        """What the server makes of a mean of which it has seen the coordinates under the round's mask."""
        if not isinstance(self.compressor, RandK):
            return mean, accounts, memory
        shift = memory.get(stream, jnp.zeros_like(mean))
        kept = self.mask(round, stream, mean.size) | ~jnp.isfinite(mean)
        moved = jnp.where(kept, (mean - shift) * (mean.size / self.compressor.keep), 0.0)
        if stream in memory:
            rate = self.shift(self.compressor.omega(mean.size), round)
            memory = memory | {stream: shift + rate * moved}
        return shift + moved, accounts, memory

    def mask(self, round: Any, stream: str, size: int) -> Bool[Array, " d"]:
        """Which coordinates are sent: the same for all silos of a round, by the public seed."""
        assert isinstance(self.compressor, RandK)
        assert self.coins is not None
        key = jax.random.wrap_key_data(self.coins, impl="threefry2x32")
        seed = SeededRandomness(party_key(key, round, SERVER)).bits(f"mask/{stream}", (2,))
        return random_mask(seed, size, self.compressor.keep)

    def message_bits(self, message: PyTree) -> Any:
        if isinstance(message, Public) or message.stream not in self.grids:
            return 32 * message.value.size
        bits = self.grids[message.stream].width * self._sent(message.value.size)
        return 8 * ((bits + 7) // 8)

    # --- between machines -------------------------------------------------------------------------------

    def sent(self, round: Any, stream: str, size: int) -> Any:
        """Which coordinates of a release are in the sum, as an index."""
        return np.asarray(self.mask(round, stream, size)) if isinstance(self.compressor, RandK) else slice(None)

    def unpack(self, packed: Packed) -> PyTree:
        """Parts of a sum are read together; this is what silos have noised by themselves."""
        return Public(jnp.asarray(packed.arrays["value"]))

    def silo_end(
        self, declared: Declared, index: int, agreed: bytes, shuffler: Any, seed: int | None = None
    ) -> SiloEnd:
        if not self.multipliers:
            raise ConfigError("privacy.epsilon is missing: trust 'aggregated' adds up noised parts; give a target")
        return AggregatedSilo(self, declared, index, agreed, seed)

    def server_end(self, sizes: Mapping[str, int], shuffler: Any) -> ServerEnd:
        return SumEnd(self, sizes)

    # --- an auditor -------------------------------------------------------------------------------------

    @classmethod
    def audited(cls, entry: Asked, example: Mapping[str, Any]) -> list[Form]:
        return [Form({"privacy.colluding": 0}, keep_all=True)]  # all of the noise is needed: the claim is attained

    def seen(
        self, messages: PyTree, mean: Vector, released: Sequence[Float[Array, "silos d"]]
    ) -> list[Float[Array, "views d"]]:
        return list(released) or [mean[None]]
