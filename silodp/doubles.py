"""Numbers of twice float32's precision, as unevaluated sums of two: what exact sums over records are kept in.

A replaced record must not change how the OTHER records are rounded. So records are summed in float32 in short runs, of
which a replaced record changes one, and the runs are added here, where rounding is 2^23 times smaller than in float32.
A compiler may contract a product and an addition into one operation: products here are exact, so it changes nothing.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

HALF = np.uint32(0xFFFFF000)  # sign, exponent and the upper 12 of 24 bits


class Double(eqx.Module):
    """high + low, where high is that sum rounded to float32."""

    high: Float[Array, "..."]
    low: Float[Array, "..."]

    @staticmethod
    def of(value: Any) -> Double:
        high = rounded(value)
        return Double(high, jnp.zeros_like(high))

    @staticmethod
    def sum_of(parts: Float[Array, "parts ..."]) -> Double:
        """Over the first axis, in an order that no number decides."""
        return Double.of(parts).halved()

    def plus(self, parts: Float[Array, "parts ..."]) -> Double:
        """Parts are added to each other first: what is there already, which is longer, is rounded once."""
        if parts.shape[0] > 1:
            return self + Double.of(parts).halved()
        high, rest = two_sum(self.high, rounded(parts[0]))
        return normal(high, self.low + rest)

    def __add__(self, other: Double) -> Double:
        high, rest = two_sum(self.high, other.high)
        return normal(high, rest + (self.low + other.low))

    def __neg__(self) -> Double:
        return Double(-self.high, -self.low)

    def __sub__(self, other: Double) -> Double:
        return self + -other

    def __mul__(self, factor: Any) -> Double:
        product, rest = two_product(self.high, factor)
        return normal(product, rest + self.low * factor)

    def __truediv__(self, divisor: Any) -> Double:
        quotient = self.high / divisor
        product, rest = two_product(quotient, divisor)
        return normal(quotient, (((self.high - product) - rest) + self.low) / divisor)

    def __getitem__(self, key: Any) -> Double:
        return Double(self.high[key], self.low[key])

    def halved(self) -> Double:
        """The sum over the first axis: halves are added to halves."""
        total = self
        while (count := total.high.shape[0]) > 1:
            half = count // 2
            paired = total[:half] + total[half : 2 * half]
            total = paired if count % 2 == 0 else joined(paired, total[2 * half :])
        return total[0]


def rounded(value: Array) -> Array:
    """The value as float32 holds it.

    A product that is contracted into the addition that follows is never rounded, and what is added would then depend on
    the sum it is added to. No compiler may look through this choice: infinity is not what NaN is.
    """
    return jnp.where(value == value, value, jnp.inf)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b rounded, and exactly what rounding took away (Knuth)."""
    total = a + b
    second = total - a
    return total, (a - (total - second)) + (b - second)


def two_product(a: Array, b: Any) -> tuple[Array, Array]:
    """a * b as a sum of two, from products of halves: these are exact, however the compiler adds them."""
    b = jnp.asarray(b, jnp.float32)
    upper_a, upper_b = upper(a), upper(b)
    lower_a, lower_b = a - upper_a, b - upper_b
    middle, middle_rest = two_sum(upper_a * lower_b, lower_a * upper_b)
    product, rest = two_sum(upper_a * upper_b, middle)
    return product, rest + (middle_rest + lower_a * lower_b)


def upper(x: Array) -> Array:
    """The upper half of a number's bits; products of two such halves are exact."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) & HALF, jnp.float32)


def normal(high: Array, low: Array) -> Double:
    total = high + low
    return Double(total, low - (total - high))


def joined(first: Double, second: Double) -> Double:
    return Double(jnp.concatenate([first.high, second.high]), jnp.concatenate([first.low, second.low]))


def exact(value: Double) -> np.ndarray:
    """In float64, which holds both parts."""
    return np.asarray(value.high, np.float64) + np.asarray(value.low, np.float64)


def highs(tree: PyTree) -> PyTree:
    """A tree of doubles, rounded to float32."""
    return jax.tree.map(lambda d: d.high, tree, is_leaf=lambda leaf: isinstance(leaf, Double))
