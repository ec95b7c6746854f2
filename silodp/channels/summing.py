"""Sums between processes: a silo's masked part of one, and how the server reads it.

Without `missing` a question is one message of each silo. With it there are five more (silodp.channels.recovery):
`prepare` (keys and sealed shares), `shares` (they are handed round), `agree` (all were told the same), and after the
answers `close` (who answered) and `open`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels.channel import Channel, Packed, ServerEnd, SiloEnd, Talk
from silodp.channels.grids import exponent_of
from silodp.channels.masks import Masks, Words
from silodp.channels.recovery import ANSWERED, TAKERS, Public, Question, opened_sum
from silodp.discrete import discrete_gaussian
from silodp.doubles import Double, exact
from silodp.errors import Gone, Refused
from silodp.facts import Declared, Facts
from silodp.noise import Entropy
from silodp.privacy.sums import fewest_steps
from silodp.randomness import SERVER, Randomness, SeededRandomness, party_key
from silodp.releases import Account, Vector

if TYPE_CHECKING:
    from silodp.channels.aggregated import Aggregated, Part

STEPS = ("prepare", "shares", "agree", "close", "open")  # around a question
CHUNK = 1 << 16  # numbers that are packed at a time


class MaskedEnd(SiloEnd):
    """The silo's part of a sum under pairwise masks. With whom it masks the silo works out itself, from the public
    facts and the round: a server has no say in it."""

    def __init__(self, channel: Channel, facts: Facts, index: int, agreed: bytes):
        super().__init__(channel)
        self.facts, self.index, self.masks = facts, index, Masks(index, facts.silos, agreed)
        self.key = self.masks.public_key

    def agree(self, keys: Sequence[bytes]) -> str:
        return self.masks.agree(keys)

    def check(self, round: int) -> None:
        if not self.masks.agreed:
            raise Refused("keys: not agreed yet, so nothing can be masked")
        present = self.facts.present(round)
        if self.index not in present:
            raise Refused(f"round {round}: the plan has silos {present} in it, not this one ({self.index})")

    def send(self, round: int, query: str, message: PyTree, asked: bytes = b"") -> Packed:
        packed = self.channel.pack(message)
        hidden = self.masks.hide(packed.arrays["total"], self.facts.present(round), f"{round}/{query}", asked)
        return Packed(packed.facts, packed.arrays | {"total": hidden})

    def state(self) -> dict[str, Any]:
        return self.masks.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.masks.restore(state)
        self.key = self.masks.public_key


class AggregatedSilo(MaskedEnd):
    """Rounds, noises and masks a silo's part. `seed`: of a test, where the first silo adds the simulation's noise."""

    channel: Aggregated

    def __init__(self, channel: Aggregated, declared: Declared, index: int, agreed: bytes, seed: int | None):
        super().__init__(channel, declared.facts, index, agreed)
        self.declared, self.seed, self.entropy = declared, seed, Entropy()
        self.question: Question | None = None
        self.prepared: set[str] = set()

    def settled(self, message: PyTree, exponent: int | None) -> PyTree:
        if not hasattr(message, "std"):
            return message
        return replace(message, step=jnp.float32(2.0 ** exponent_of(float(message.step), exponent)))

    def send(self, round: int, query: str, message: PyTree, asked: bytes = b"") -> Packed:
        if not hasattr(message, "std"):  # made of what the silo has noised before
            return Packed({"stream": None}, {"value": np.asarray(message.value)})
        grid, step = self.channel.grids[message.stream], float(message.step)
        if math.frexp(step)[0] != 0.5:
            raise Refused(f"query {query!r} of round {round}: has no grid; nothing was sent")
        part = self._rounded(message, step) + self._noise(message, step, round)
        exponent, width = int(math.log2(step)), int(grid.width)
        words = narrowed(part.view(np.uint64), width)
        hidden = self._hidden(words, round, query, asked + f"|{exponent}".encode())
        facts = {"stream": message.stream, "exponent": exponent, "asked": asked.hex()}
        return Packed(facts, {"part": packed_bits(hidden, width)})

    def _hidden(self, words: Words, round: int, query: str, context: bytes) -> Words:
        if not self.channel.missing:
            return self.masks.hide(words, self.facts.present(round), f"{round}/{query}", context)
        return self._asked(round, query).hide(words, context)

    def _rounded(self, message: Part, step: float) -> np.ndarray:
        """The weighted mean in steps. A mean longer than any clipped one is cut: no sum wraps around."""
        rest = jnp.zeros_like(message.value) if message.rest is None else message.rest
        value = self._kept(message, exact(Double(message.value, rest)))
        if not np.isfinite(value).all():
            raise Refused("a mean is not finite; nothing was sent")
        weight = self.facts.weights[self.index]
        clip = float(message.bound) / self.declared.bounds_over_clip(message.stream)[self.index]
        longest = self.declared.each(message.stream)[self.index].batch.longest_over_clip() * clip
        return np.rint(np.clip(value, -longest, longest) * (weight / step)).astype(np.int64)

    def _noise(self, message: Part, step: float, round: int) -> np.ndarray:
        """This silo's share: a discrete Gaussian, at least as wide as is accounted."""
        size, std = self._kept(message, np.asarray(message.value)).size, float(message.std)
        nominal = self.channel.multipliers[message.stream]
        if self.seed is not None:
            return self._test_noise(message, step, round)
        if float(nominal[self.index]) == 0:  # the plan needs none
            return np.zeros(size, np.int64)
        steps = std * self.facts.weights[self.index] / step
        if not fewest_steps(size) <= steps < math.inf:
            raise Refused("the noise would not be what the plan accounts; nothing was sent")
        return discrete_gaussian(size, steps, self.entropy)

    def _test_noise(self, message: Part, step: float, round: int) -> np.ndarray:
        """The one draw of a simulation, added by the first silo. A test's noise is nobody's secret."""
        present = self.facts.present(round)
        if self.index != present[0] or not float(message.std):
            return np.zeros(self._kept(message, np.asarray(message.value)).size, np.int64)
        nominal = np.asarray(self.channel.multipliers[message.stream], np.float64)
        shares = nominal * self.declared.bounds_over_clip(message.stream) * self.facts.weights
        own = float(message.std) * self.facts.weights[self.index]
        total = own / shares[self.index] * float(np.linalg.norm(shares[present]))
        coins = SeededRandomness(party_key(jax.random.key(self.seed or 0), round, SERVER))
        drawn = np.asarray(coins.normal(f"noise/{message.stream}", message.value.shape), np.float64)
        return np.rint(self._kept(message, drawn) * (total / step)).astype(np.int64)

    def _kept(self, message: Part, value: np.ndarray) -> np.ndarray:
        return value[self.channel.sent(message.round, message.stream, message.value.size)]

    # --- a sum that survives missing silos ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        question = None if self.question is None else self.question.state()
        return super().state() | {"prepared": sorted(self.prepared), "question": question}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.prepared = set(state["prepared"])
        self.question = None if state["question"] is None else Question.restored(self.masks, state["question"])

    def step(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """What is said around a question, where silos may be missing."""
        if not self.channel.missing:
            raise Refused("sum: this plan has every silo in every sum")
        round, query = int(header["round"]), str(header["query"])
        self.check(round)
        if header["step"] == "prepare":
            return self._prepare(round, query)
        question = self._asked(round, query)
        if header["step"] == "shares":
            publics = {int(i): Public.of(text) for i, text in header["publics"].items()}
            return {"words": texts(question.take(publics, secrets(header["sealed"])))}
        if header["step"] == "agree":
            question.agree(TAKERS, secrets(header["words"]))
            return {}
        if header["step"] == "close":
            return {"words": texts(question.close([int(i) for i in header["answered"]]))}
        if header["step"] == "open":
            question.agree(ANSWERED, secrets(header["words"]))
            seeds, keys = question.open()
            return {"seeds": texts(seeds), "keys": texts(keys)}
        raise Refused(f"sum: step {header['step']!r} is unknown; there are {', '.join(STEPS)}")

    def _prepare(self, round: int, query: str) -> dict[str, Any]:
        label, present = f"{round}/{query}", self.facts.present(round)
        if label in self.prepared:
            raise Refused(f"sum {label}: prepared already; a question has one key")
        self.prepared.add(label)
        self.question = Question(self.masks, self.index, present, len(present) - self.channel.missing, label)
        return {"public": self.question.public.text, "sealed": texts(self.question.sealed())}

    def _asked(self, round: int, query: str) -> Question:
        if self.question is None or self.question.label != f"{round}/{query}":
            raise Refused(f"sum {round}/{query}: not prepared")
        return self.question


class SumEnd(ServerEnd):
    """Adds up parts modulo 2^b and reads the mean off the sum."""

    channel: Aggregated

    def __init__(self, channel: Aggregated, sizes: Mapping[str, int]):
        super().__init__(channel, sizes)
        self.missing = channel.missing
        self.publics: dict[int, Public] = {}
        self.answered: list[int] = []
        self.seeds: dict[int, dict[int, bytes]] = {}
        self.keys: dict[int, dict[int, bytes]] = {}

    def expect(self, round: int, query: str, sent: Sequence[int], size: int) -> None:
        self.round, self.query, self.size, self.silos = round, query, size, sum(n > 0 for n in sent)

    def prepare(self, talk: Talk, present: Sequence[int]) -> list[int]:
        if not self.missing:
            return list(present)
        told = self._all(talk, "prepare", {i: {} for i in present})
        self.publics = {i: Public.of(answer["public"]) for i, answer in told.items()}
        boxes = lambda j: {i: answer["sealed"][str(j)] for i, answer in told.items() if i != j}
        publics = {i: public.text for i, public in self.publics.items()}
        taken = self._all(talk, "shares", {j: {"publics": publics, "sealed": boxes(j)} for j in told})
        return sorted(self._all(talk, "agree", {j: {"words": words_to(j, taken)} for j in taken}))

    def open(self, talk: Talk, answered: Sequence[int]) -> None:
        """Asks the silos that answered to open the sum over them."""
        if not self.missing:
            return
        self.answered = sorted(answered)
        self._check_left(len(self.answered))
        closed = self._all(talk, "close", {j: {"answered": self.answered} for j in answered})
        told = self._all(talk, "open", {j: {"words": words_to(j, closed)} for j in closed})
        gather = lambda what, i: {j: bytes.fromhex(told[j][what][str(i)]) for j in told}
        self.seeds = {i: gather("seeds", i) for i in self.answered}
        self.keys = {i: gather("keys", i) for i in self.publics if i not in self.answered}

    def _all(self, talk: Talk, step: str, asked: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The answers of those that are still there; as many as the plan needs."""
        header = {"round": self.round, "query": self.query, "step": step}

        def ask() -> dict[str, Any]:
            told = talk({i: header | more for i, more in asked.items()})
            self._check_left(len(told))
            return {str(i): each for i, each in told.items()}

        told = self.kept(step, ask)
        self.bits += 8 * _text_bytes(told)
        return {int(i): each for i, each in told.items()}

    def _check_left(self, count: int) -> None:
        if count < self.silos - self.missing:
            raise Gone(f"round {self.round}: {count} of {self.silos} silos left, the plan misses {self.missing}")

    def mean(
        self, packed: Sequence[Packed], weights: Float[Array, " m"], accounts: Account, randomness: Randomness
    ) -> tuple[Vector, Account]:
        if packed[0].facts["stream"] is None:
            return super().mean(packed, weights, accounts, randomness)
        stream, exponent, asked = self._alike(packed)
        width = int(self.channel.grids[stream].width)
        kept = self.channel.sent(self.round, stream, self.size)
        count = int(np.count_nonzero(kept)) if isinstance(kept, np.ndarray) else self.size
        total = sum_of([unpacked_bits(each.arrays["part"], width, count) for each in packed])
        if self.missing:
            label = f"{self.round}/{self.query}|{(bytes.fromhex(asked) + f'|{exponent}'.encode()).hex()}"
            threshold = self.silos - self.missing
            total = opened_sum(total, label, self.publics, self.answered, self.seeds, self.keys, threshold)
        weight = float(np.sum(np.asarray(weights, np.float64)))
        value = np.zeros(self.size)
        value[kept] = centred(total, width) * (2.0**exponent / weight)
        mean = jnp.asarray(value, jnp.float32)
        mean, accounts, self.memory = self.channel.decompressed(mean, self.round, stream, accounts, self.memory)
        return mean, accounts

    def _alike(self, packed: Sequence[Packed]) -> tuple[str, int, str]:
        """What all silos must say alike; their parts do not add up otherwise."""
        told = {(each.facts["stream"], each.facts["exponent"], each.facts["asked"]) for each in packed}
        if len(told) != 1:
            raise Refused(
                f"round {self.round}: silos answer on different grids or questions; their parts do not add up"
            )
        stream, exponent, asked = told.pop()
        if stream not in self.channel.grids or not -126 <= int(exponent) <= 127:
            raise Refused(f"message of stream {stream!r}: is no part of a sum")
        return stream, int(exponent), asked


def texts(secrets: Mapping[int, bytes]) -> dict[int, str]:
    return {i: each.hex() for i, each in secrets.items()}


def secrets(texts: Mapping[str, str]) -> dict[int, bytes]:
    return {int(i): bytes.fromhex(each) for i, each in texts.items()}


def words_to(silo: int, told: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """By which the others confirm to a silo what they were told."""
    return {i: each["words"][str(silo)] for i, each in told.items() if i != silo}


def _text_bytes(tree: Any) -> int:
    """Bytes of a header's texts, as they are sent."""
    if isinstance(tree, dict):
        return sum(map(_text_bytes, tree.values()))
    if isinstance(tree, list):
        return sum(map(_text_bytes, tree))
    return len(tree) if isinstance(tree, str) else 0


def narrowed(words: Words, width: int) -> Words:
    """Modulo 2^32 or 2^64: the smaller that holds sums of `width` bits."""
    return words.astype(np.uint32) if width <= 32 else words


def sum_of(parts: Sequence[Words]) -> Words:
    return np.sum(parts, axis=0, dtype=parts[0].dtype)


def packed_bits(words: Words, width: int) -> np.ndarray:
    """The lowest `width` bits of every word, one after the other."""
    pieces = []
    for begin in range(0, words.size, CHUNK):
        rows = words[begin : begin + CHUNK].astype(words.dtype.newbyteorder("<")).view(np.uint8)
        bits = np.unpackbits(rows.reshape(-1, words.itemsize), axis=1, bitorder="little")[:, :width]
        pieces.append(np.packbits(bits, bitorder="little"))
    return np.concatenate(pieces)


def unpacked_bits(packed: np.ndarray, width: int, count: int) -> Words:
    """The words again; Refused when the bytes are not so many."""
    if packed.dtype != np.uint8 or packed.ndim != 1 or packed.size != -(-width * count // 8):
        raise Refused(f"part: {packed.dtype}{list(packed.shape)}; {count} numbers of {width} bits are needed")
    dtype, pieces = np.dtype("<u4" if width <= 32 else "<u8"), []
    for begin in range(0, count, CHUNK):
        some = min(CHUNK, count - begin)
        rows = packed[begin * width // 8 : -(-(begin + some) * width // 8)]
        bits = np.unpackbits(rows, bitorder="little", count=some * width).reshape(some, width)
        whole = np.zeros((some, 8 * dtype.itemsize), np.uint8)
        whole[:, :width] = bits
        pieces.append(np.packbits(whole, axis=1, bitorder="little").view(dtype).ravel())
    return np.concatenate(pieces).astype(dtype.newbyteorder("="))


def centred(total: Words, width: int) -> np.ndarray:
    """Modulo 2^width, between -2^(width - 1) and 2^(width - 1): as float64, which holds 2^53 steps exactly."""
    unused = np.int64(64 - width)
    return ((total.astype(np.uint64).view(np.int64) << unused) >> unused).astype(np.float64)
