"""Proximal operators of psi, the convex and maybe non-smooth part of the objective F + psi.

A `Prox` is called as `prox(y, step_size)` and returns argmin_u step_size * psi(u) + |u - y|^2 / 2;
`prox.penalty(x)` is psi(x). For a constraint psi is the indicator of the set: 0 inside, infinite
outside, and the operator is the projection whatever the step size.

Strengths, radii and bounds are traced scalars, so that a sweep over them compiles once.
"""

import abc
import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from jaxtyping import ArrayLike as Scalar

# A projection lands on the boundary only up to float32 rounding, and is feasible all the same.
_TOLERANCE = 1e-4


def _as_float32(value: Scalar) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)


class Prox(eqx.Module):
    """psi and its proximal operator."""

    @abc.abstractmethod
    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        """argmin_u step_size * psi(u) + |u - y|^2 / 2."""

    @abc.abstractmethod
    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        """psi(x)."""


class NoProx(Prox):
    """psi = 0."""

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        return y

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return jnp.zeros((), x.dtype)


class ElasticNet(Prox):
    """psi(x) = l1 |x|_1 + l2/2 |x|^2; the kinds "l1" and "l2" are its two halves."""

    l1: Float[Array, ""] = eqx.field(converter=_as_float32)
    l2: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        shrunk = jnp.sign(y) * jnp.maximum(jnp.abs(y) - step_size * self.l1, 0.0)
        return shrunk / (1.0 + step_size * self.l2)

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return self.l1 * jnp.sum(jnp.abs(x)) + 0.5 * self.l2 * jnp.sum(x**2)


class Ball(Prox):
    """psi = indicator of {|x| <= radius}."""

    radius: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        return y * (self.radius / jnp.maximum(jnp.linalg.norm(y), self.radius))

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return _indicator(jnp.linalg.norm(x) <= self.radius * (1.0 + _TOLERANCE))


class Box(Prox):
    """psi = indicator of {low <= x_j <= high for every j}."""

    low: Float[Array, ""] = eqx.field(converter=_as_float32)
    high: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        return jnp.clip(y, self.low, self.high)

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        low = self.low - _TOLERANCE * jnp.abs(self.low)
        high = self.high + _TOLERANCE * jnp.abs(self.high)
        return _indicator(jnp.all((x >= low) & (x <= high)))


class Simplex(Prox):
    """psi = indicator of {x >= 0, sum of x = scale}."""

    scale: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        # The projection is max(y - threshold, 0) with the threshold that makes the sum right; in
        # sorted order the coordinates that stay positive come first. A constant added to y moves
        # the threshold with it; with the largest coordinate at 0 nothing large is cancelled.
        y = y - jnp.max(y)
        ordered = jnp.sort(y, descending=True)
        counts = jnp.arange(1, y.size + 1, dtype=y.dtype)
        thresholds = (jnp.cumsum(ordered) - self.scale) / counts
        positive = jnp.sum(ordered > thresholds)
        return jnp.maximum(y - thresholds[positive - 1], 0.0)

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        slack = _TOLERANCE * self.scale
        return _indicator(jnp.all(x >= -slack) & (jnp.abs(jnp.sum(x) - self.scale) <= slack))


def _indicator(inside: Array) -> Float[Array, ""]:
    return jnp.where(inside, 0.0, jnp.inf)


_BUILDERS: dict[str, tuple[tuple[str, ...], Callable[..., Prox]]] = {
    "none": ((), NoProx),
    "l1": (("strength",), lambda strength: ElasticNet(strength, 0.0)),
    "l2": (("strength",), lambda strength: ElasticNet(0.0, strength)),
    "elastic-net": (("l1", "l2"), ElasticNet),
    "ball": (("radius",), Ball),
    "box": (("low", "high"), Box),
    "simplex": (("scale",), Simplex),
}


def build_prox(kind: str, **options: float) -> Prox:
    """The proximal operator of that name: none, l1, l2, elastic-net, ball, box or simplex."""
    if kind not in _BUILDERS:
        raise ValueError(f"prox: {kind!r} is unknown; possible: {', '.join(_BUILDERS)}")
    names, builder = _BUILDERS[kind]
    if set(options) != set(names):
        given, needed = ", ".join(sorted(options)), ", ".join(names)
        raise ValueError(f"prox {kind!r}: got options ({given}), needs exactly ({needed})")
    for name, value in options.items():
        _check_option(kind, name, value)
    if kind == "box" and options["low"] > options["high"]:
        low, high = options["low"], options["high"]
        raise ValueError(f"prox 'box': low = {low} is above high = {high}; low must be <= high")
    return builder(**options)


def _check_option(kind: str, name: str, value: float) -> None:
    if name in ("low", "high"):
        if math.isnan(value):
            raise ValueError(f"prox {kind!r}: {name} = {value} must be a number (maybe infinite)")
    elif name in ("radius", "scale"):
        if not 0.0 < value < math.inf:
            raise ValueError(f"prox {kind!r}: {name} = {value} must be positive and finite")
    elif not 0.0 <= value < math.inf:
        raise ValueError(f"prox {kind!r}: {name} = {value} must be at least 0 and finite")
