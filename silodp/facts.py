"""What everybody knows about a run: its silos, who answers when, and what will be released. Never a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from silodp import records
from silodp.randomness import SERVER, SeededRandomness, party_key, seeded
from silodp.records import Description, Kind
from silodp.sampling import MOVES, SQUARES_MOVE, BatchRule

Silos = tuple[int, ...]
Participation = int | tuple[int, int] | None  # silos in a round, or the fewest and the most of them; None: all


@dataclass(frozen=True)
class Facts:
    """The public facts that a plan rests on. The split, the weights and who is present are decided here, once.

    Args:
        sizes, names: of the silos. record, outputs, task: what a record holds. parameters: of the model.
        weights, rounds, participation, seed, scheduled, same_silos, held_out: a plan fills them in from its config.

    Example:
        >>> import silodp
        >>> facts = silodp.Facts((400, 250, 120), ("north", "south", "lake"))
        >>> facts.silos, facts.fewest(facts.sizes)
        (3, 770)
    """

    sizes: Silos
    names: tuple[str, ...]
    record: tuple[Description, Description] | None = None  # features, targets (silodp.records); None: no data yet
    outputs: int = 1  # classes, or 1 for a number
    task: str = "regression"
    parameters: int | None = None  # d; None where no model is known yet
    weights: tuple[float, ...] = ()  # each silo's part of the objective
    rounds: int = 0  # that take place
    participation: Participation = None
    seed: int = 0  # public: who takes part in which round
    scheduled: bool = False  # who takes part is fixed beforehand, and only that is charged
    same_silos: int = 1  # rounds through which the same silos take part
    held_out: Silos = ()  # records of each silo that are not trained on; `sizes` are the others

    def __post_init__(self) -> None:
        for field in ("sizes", "names", "weights", "held_out"):  # JSON brings lists
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if isinstance(self.participation, list):
            object.__setattr__(self, "participation", tuple(self.participation))
        if len(self.names) != self.silos:
            raise ValueError(f"facts: {self.silos} sizes and {len(self.names)} names; give one of each for every silo")
        if self.record is not None:
            object.__setattr__(self, "record", records.checked(self.record))

    @staticmethod
    def of_sizes(sizes: Iterable[int], **others: Any) -> Facts:
        """Of silos that have no names yet: they are numbered."""
        sizes = tuple(sizes)
        return Facts(sizes, tuple(f"silo {i}" for i in range(len(sizes))), **others)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Facts:
        unknown = set(tree) - {field.name for field in fields(Facts)}
        if unknown:
            raise ValueError(f"facts: unknown {', '.join(sorted(unknown))}")
        if not all(isinstance(size, int) and size > 0 for size in tree["sizes"]):
            raise ValueError(f"facts: sizes = {tree['sizes']}: every silo needs a whole number of records")
        return Facts(**tree)

    @property
    def silos(self) -> int:
        return len(self.sizes)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Type and shape of every array of a record, by name: features or features/..., targets or targets/..."""
        return {} if self.record is None else records.kinds(self.record)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a record's features, where they are one array."""
        if "features" not in self.kinds:
            named = ", ".join(self.kinds) or "unknown"
            raise ValueError(f"input_shape: the features are not one array (the record: {named}); see facts.record")
        return self.kinds["features"].shape

    @property
    def answering(self) -> int:
        """Silos that answer in a round, at least."""
        return limits(self.participation, self.silos)[0]

    @property
    def everyone(self) -> bool:
        return self.answering == self.silos

    @property
    def alike(self) -> bool:
        """Whether silos have one weight."""
        return min(self.weights) == max(self.weights)

    def present(self, round: int) -> list[int]:
        """The silos of a round, by the public seed."""
        if self.everyone:
            return list(range(self.silos))
        present, count = self._present(seeded(self.seed), round)
        return np.asarray(present)[: int(count)].tolist()

    def _present(self, key: Key[Array, ""], round: Any) -> tuple[Int[Array, " m"], int | Int[Array, ""]]:
        return silos_of_round(key, round, self.silos, self.participation, self.same_silos)

    def rounds_of(self, silo: int) -> Sequence[int]:
        """The rounds in which a silo may be asked."""
        return self._attendance[silo] if self.scheduled and not self.everyone else range(self.rounds)

    @cached_property
    def _attendance(self) -> tuple[tuple[int, ...], ...]:
        key = seeded(self.seed)
        present = np.asarray(jax.vmap(lambda r: self._present(key, r)[0])(jnp.arange(self.rounds)))
        return tuple(tuple(np.flatnonzero(np.any(present == i, axis=1)).tolist()) for i in range(self.silos))

    @property
    def counts_exactly(self) -> bool:
        """Whether it is known beforehand how often each silo answers."""
        return self.everyone or self.scheduled

    def fewest(self, each: Sequence[float]) -> float:
        """The smallest total over the silos of a round: of records that answer, or of weights."""
        return sum(sorted(each)[: self.answering])

    def fewest_beside(self, silo: int, each: Sequence[float]) -> float:
        """The smallest total over the other silos of a round in which this one answers."""
        return sum(sorted(n for i, n in enumerate(each) if i != silo)[: self.answering - 1])


def limits(count: Participation, silos: int) -> tuple[int, int]:
    """The fewest and the most silos of a round."""
    return count if isinstance(count, tuple) else (count or silos, count or silos)


def silos_of_round(
    key: Key[Array, ""], round: Any, silos: int, count: Participation, same: int = 1
) -> tuple[Int[Array, " m"], int | Int[Array, ""]]:
    """The silos of a round and how many they are: a uniform subset drawn by the server's public coins, in increasing
    order. A random number of them is uniform between its limits; up to the larger one the first silo is repeated.

    same: rounds through which they stay.
    """
    fewest, most = limits(count, silos)
    if fewest == silos:
        return jnp.arange(silos), silos
    server = SeededRandomness(party_key(key, round - round % same, SERVER))
    drawn = jax.lax.top_k(server.uniform("participation", (silos,)), most)[1]
    if fewest == most:
        return jnp.sort(drawn), most
    many = jnp.minimum(fewest + (server.uniform("how many", ()) * (most - fewest + 1)).astype(jnp.int32), most)
    present = jnp.sort(jnp.where(jnp.arange(most) < many, drawn, silos))
    return jnp.where(present < silos, present, present[0]), many


def turns(rounds: Sequence[int], period: int, first: int = 0) -> int:
    """How many of the rounds are first, first + period, first + 2 period and so on; at once where all rounds count."""
    if isinstance(rounds, range):
        return len(rounds[(first - rounds.start) % period :: period])
    return int(np.count_nonzero(np.asarray(rounds, np.int64) % period == first))


@dataclass(frozen=True)
class Stream:
    """One line of what an algorithm releases about a silo: so many releases, over batches drawn by this rule.

    local: the silo adds the noise itself under every trust model, because it uses the value before anybody sees it.
    alone: a record's only message of its round, on a batch of its own (a first round that differs from the others).
    dimension: numbers in a release, where it is not a vector of the model's parameters.
    squares: a mean of v v^T (`silo.squares`), which moves less than a mean of vectors.

    Example:
        >>> import silodp
        >>> from silodp.sampling import Full
        >>> silodp.Stream("value", 12, Full()).count
        12
    """

    name: str
    count: int
    batch: BatchRule
    local: bool = False
    alone: bool = False
    dimension: int | None = None
    squares: bool = False

    def bound_over_clip(self, records: int) -> float:
        """How far the mean over a silo of so many records moves, in clip norms, when one is replaced."""
        return self.batch.bound_over_clip(records, SQUARES_MOVE if self.squares else MOVES)


@dataclass(frozen=True)
class Declared:
    """What a run declares to release about each of its silos: what trust models and the accountant start from.

    `streams` holds a line for every silo. `together`: streams that are released in the same round.
    """

    facts: Facts
    streams: tuple[tuple[Stream, ...], ...]
    together: int = 1

    def each(self, name: str) -> list[Stream]:
        """The stream as every silo has it."""
        return [next(stream for stream in own if stream.name == name) for own in self.streams]

    def divisors(self, name: str) -> list[float]:
        """How many records of each silo answer in a round."""
        return [s.batch.divisor(n) for s, n in zip(self.each(name), self.facts.sizes, strict=True)]

    def bounds_over_clip(self, name: str) -> np.ndarray:
        """How far each silo's released mean moves, in clip norms."""
        if name not in self._bounds:  # which is asked for every silo, of all of them
            pairs = zip(self.each(name), self.facts.sizes, strict=True)
            self._bounds[name] = np.array([stream.bound_over_clip(size) for stream, size in pairs])
            self._bounds[name].flags.writeable = False
        return self._bounds[name]

    @cached_property
    def _bounds(self) -> dict[str, np.ndarray]:
        return {}

    def dimension(self, name: str) -> int | None:
        stream = next(stream for stream in self.streams[0] if stream.name == name)
        return self.facts.parameters if stream.dimension is None else stream.dimension
