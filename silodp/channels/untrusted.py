"""Nobody is trusted but the silo itself: every silo adds its own noise before anything leaves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels.channel import Asked, Channel, Form, Packed, Wishes, evaluated, normalised, refuse_randomizer
from silodp.core import Account, Answer, Public, Silo, Vector
from silodp.errors import ConfigError
from silodp.randomness import Randomness


class Untrusted(Channel):
    """Inter-silo record-level DP: what the server is sent is private already."""

    name: ClassVar[str] = "untrusted"
    setting: ClassVar[str] = "under an untrusted server"
    sees: ClassVar[str] = (
        "every message that a silo sends, in every round, and everything the server computes from them"
    )
    honest: ClassVar[tuple[str, ...]] = ("the silo itself: its software clips, draws fresh noise and tells nobody",)
    if_others_collude: ClassVar[str] = (
        "unchanged if the server and all other silos collude: the silo's noise is its own"
    )

    @classmethod
    def of(cls, wishes: Wishes) -> Channel:
        from silodp.channels.compressed import Compressed, compression_of

        refuse_randomizer(wishes)
        compression = compression_of(wishes)
        if compression is None:
            return cls(**wishes.own)
        if cls is not Untrusted:  # a class from outside must not be replaced by one that knows nothing of it
            raise ConfigError(
                f"algorithm.compressor = {wishes.options.compressor!r}: {cls.__name__} sends uncompressed messages; "
                "derive it from silodp.channels.Compressed"
            )
        return Compressed(**compression)

    def averaged(self, silos: float) -> float:
        return math.sqrt(silos)  # each silo's noise is independent of the others'

    def send(self, answer: Answer, silo: Silo, memory: PyTree) -> tuple[PyTree, PyTree]:
        if isinstance(answer, Public):
            return answer.value, memory
        return self.privatise_local(evaluated(answer), silo), memory

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

    @classmethod
    def audited(cls, entry: Asked, example: Mapping[str, Any]) -> list[Form]:
        maskable = example.get("compressor") == "rand-k" and "batch" not in example  # known for full batches only
        return [Form({}), *([Form({"privacy.mask_amplification": True})] if maskable else [])]
