"""Nobody is trusted but the silo itself: every silo adds its own noise before anything leaves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.channels.channel import (
    Asked,
    Channel,
    Form,
    Noised,
    Packed,
    Wishes,
    evaluated,
    normalised,
    refuse_randomizer,
    std_of,
)
from silodp.core import Silo
from silodp.errors import ConfigError
from silodp.randomness import Randomness
from silodp.releases import Account, Answer, Public, Vector


class Untrusted(Channel):
    """Inter-silo record-level DP: what the server is sent is private already."""

    name: ClassVar[str] = "untrusted"
    setting: ClassVar[str] = "under an untrusted server"
    sees: ClassVar[str] = (
        "every message that a silo sends, in every round, and everything the server computes from them"
    )
    honest: ClassVar[tuple[str, ...]] = ("the silo itself: its software clips, draws fresh noise and tells nobody",)
    alone_is_private: ClassVar[bool] = True
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
            return Noised(answer.value, jnp.float32(0)), memory
        release = evaluated(answer)
        value = self.privatise_local(release, silo)
        multiplier = self.multiplier(release.stream, silo)
        if multiplier is None:
            return Noised(value, jnp.float32(0)), memory
        return Noised(value, silo.randomness.step_of(value, std_of(release, multiplier))), memory

    @property
    def in_parts(self) -> bool:
        return type(self) is Untrusted  # others may read single messages

    def receive(
        self,
        messages: PyTree,
        weights: Float[Array, " m"],
        accounts: Account,
        randomness: Randomness,
        memory: PyTree,
    ) -> tuple[Vector, Account, PyTree]:
        return normalised(weights) @ messages.value, accounts, memory

    def receive_mean(
        self, mean: Vector, messages: PyTree, weights: Array, accounts: Account, randomness: Randomness, memory: PyTree
    ) -> tuple[Vector, Account, PyTree]:
        return mean, accounts, memory

    def message_bits(self, message: PyTree) -> int:
        return 32 * message.value.size

    def pack(self, message: PyTree) -> Packed:
        """Noised numbers as integers: how many steps of the grid."""
        value, step = np.asarray(message.value), float(message.step)
        if not step or not np.isfinite(value).all():  # what diverged is nobody's secret: it is private already
            return Packed({"step": 0.0}, {"value": value})
        steps = np.rint(value.astype(np.float64) / step)
        return Packed({"step": step}, {"value": steps.astype(np.int32 if abs(steps).max() < 2**31 else np.int64)})

    def unpack(self, packed: Packed) -> PyTree:
        step, array = float(packed.facts["step"]), packed.arrays["value"]
        if not 0 <= step < np.inf:
            raise ValueError(f"step = {step}: must be a number of at least 0")
        value = array.astype(np.float64) * step if step else array
        return Noised(*jax.device_put((value.astype(np.float32), np.float32(step))))

    @classmethod
    def audited(cls, entry: Asked, example: Mapping[str, Any]) -> list[Form]:
        maskable = example.get("compressor") == "rand-k" and "batch" not in example  # known for full batches only
        return [Form({}), *([Form({"privacy.mask_amplification": True})] if maskable else [])]
