"""Top-k: the k largest coordinates of a message. Biased, so the channel feeds its error back."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from silodp.compressors import Compressor


class TopK(Compressor):
    unbiased: ClassVar[bool] = False

    largest: int = eqx.field(static=True)  # an option that the library has never heard of

    def check(self, d):
        if not 1 <= self.largest <= d:
            raise ValueError(f"largest = {self.largest} must be between 1 and the {d} parameters")

    def bits(self, d):
        return 64 * self.largest

    def __call__(self, v, randomness):
        places = jax.lax.top_k(jnp.abs(v), self.largest)[1]
        return jnp.zeros_like(v).at[places].set(v[places])

    def encode(self, v, randomness):
        places = np.asarray(jax.lax.top_k(jnp.abs(v), self.largest)[1], "<u4")
        return places.tobytes() + np.asarray(v, "<f4")[places].tobytes()

    def decode(self, data, d):
        if len(data) != self.bits(d) // 8:
            raise ValueError(f"message: {len(data)} bytes received, exactly {self.bits(d) // 8} expected")
        places = np.frombuffer(data[: 4 * self.largest], "<u4")
        if places.max() >= d or len(set(places.tolist())) < len(places):
            raise ValueError("message: places must be different coordinates")
        decoded = np.zeros(d, np.float32)
        decoded[places] = np.frombuffer(data[4 * self.largest :], "<f4")
        return decoded
