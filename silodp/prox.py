"""Proximal operators of psi, the convex and maybe non-smooth part of the objective F + psi.

A `Prox` is called as `prox(y, step_size)` and returns argmin_u step_size * psi(u) + |u - y|^2 / 2;
`prox.penalty(x)` is psi(x). For a constraint psi is the indicator of the set: 0 inside, infinite
outside, and the operator is the projection whatever the step size.

Strengths, radii and bounds are traced scalars, so that a sweep over them compiles once.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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

    bounded: ClassVar[bool] = False  # whether psi is the indicator of a bounded set

    def feasible(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        """The nearest point at which psi is finite."""
        return x

    def diameter(self, parameters: int) -> float:
        """Of the set on which psi is finite."""
        return math.inf


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


class Set(Prox):
    """psi is the indicator of a bounded set."""

    bounded: ClassVar[bool] = True

    def feasible(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return self(x, 1.0)


class Ball(Set):
    """psi = indicator of {|x| <= radius}."""

    radius: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        return y * (self.radius / jnp.maximum(jnp.linalg.norm(y), self.radius))

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return _indicator(jnp.linalg.norm(x) <= self.radius * (1.0 + _TOLERANCE))

    def diameter(self, parameters: int) -> float:
        return 2 * float(self.radius)


class Box(Set):
    """psi = indicator of {low <= x_j <= high for every j}."""

    low: Float[Array, ""] = eqx.field(converter=_as_float32)
    high: Float[Array, ""] = eqx.field(converter=_as_float32)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        return jnp.clip(y, self.low, self.high)

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        low = self.low - _TOLERANCE * jnp.abs(self.low)
        high = self.high + _TOLERANCE * jnp.abs(self.high)
        return _indicator(jnp.all((x >= low) & (x <= high)))

    def diameter(self, parameters: int) -> float:
        return math.sqrt(parameters) * float(self.high - self.low)


class Simplex(Set):
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

    def diameter(self, parameters: int) -> float:
        return math.sqrt(2) * float(self.scale)


class GroupLasso(Prox):
    """psi(x) = strength * sum of the norms of groups, so many parameters in a row each (the last may be shorter)."""

    strength: Float[Array, ""] = eqx.field(converter=_as_float32)
    size: int = eqx.field(static=True, converter=int)

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        norms = jnp.linalg.norm(self._groups(y), axis=1, keepdims=True)
        kept = jnp.maximum(norms - step_size * self.strength, 0.0) / jnp.where(norms > 0, norms, 1.0)
        return (self._groups(y) * kept).reshape(-1)[: y.size]

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return self.strength * jnp.sum(jnp.linalg.norm(self._groups(x), axis=1))

    def _groups(self, x: Float[Array, " d"]) -> Float[Array, "groups size"]:
        return jnp.pad(x, (0, -x.size % self.size)).reshape(-1, self.size)


class Both(Prox):
    """psi = a penalty plus the indicator of a set, where the operator of the sum is that of one after the other.

    It is for l1 and l2 with a box (coordinate by coordinate), with a ball around 0 (Yu 2013: the penalties are
    homogeneous, or depend on |x| alone) and with a simplex (where |x|_1 is constant), and for groups with a ball.
    """

    part: Prox
    within: Set

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.within.bounded

    def __call__(self, y: Float[Array, " d"], step_size: Scalar) -> Float[Array, " d"]:
        part = self.part
        if isinstance(self.within, Simplex) and isinstance(part, ElasticNet):
            return self.within(y / (1.0 + step_size * part.l2), step_size)
        return self.within(part(y, step_size), step_size)

    def penalty(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        return self.part.penalty(x) + self.within.penalty(x)

    def feasible(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.within.feasible(x)

    def diameter(self, parameters: int) -> float:
        return self.within.diameter(parameters)


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
    "group-lasso": (("strength", "size"), GroupLasso),
}
KINDS = {kind: names for kind, (names, _) in _BUILDERS.items()}


def build_sum(parts: Sequence[Mapping[str, Any]]) -> Prox:
    """A penalty and a set, in either order: [{kind = "l1", strength = 0.1}, {kind = "box", low = 0, high = 1}]."""
    each = [build_prox(**part) for part in parts]
    sets, rest = [p for p in each if isinstance(p, Set)], [p for p in each if not isinstance(p, Set)]
    if len(sets) != 1 or len(rest) != 1:
        raise ValueError(f"prox: {[part.get('kind') for part in parts]}: a sum has one penalty and one set")
    if isinstance(rest[0], GroupLasso) and not isinstance(sets[0], Ball):
        raise ValueError("prox: the operator of group-lasso on a box or simplex is not known; use a ball")
    return Both(rest[0], sets[0])


def build_prox(kind: str = "", **options: float) -> Prox:
    """The proximal operator of that name: none, l1, l2, elastic-net, group-lasso, ball, box or simplex."""
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
    elif name == "size":
        if value < 1 or value != int(value):
            raise ValueError(f"prox {kind!r}: {name} = {value} must be a whole number of at least 1")
    elif name in ("radius", "scale"):
        if not 0.0 < value < math.inf:
            raise ValueError(f"prox {kind!r}: {name} = {value} must be positive and finite")
    elif not 0.0 <= value < math.inf:
        raise ValueError(f"prox {kind!r}: {name} = {value} must be at least 0 and finite")
