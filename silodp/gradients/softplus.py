"""softplus and its slope as primitives, so that `difference` can treat them as a whole.

As compositions of exp, log1p, abs and max, each with its own identity, a pair of points costs eight transcendental
functions; by the identities below, which share theirs, it costs five. Small networks spend most of a round there.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

Numbers = Float[Array, "..."]
NEAR = 0.1


def softplus(z: Numbers) -> Numbers:
    """log(1 + exp z)."""
    return softplus_p.bind(z)


def slope(z: Numbers) -> Numbers:
    """The derivative of softplus, 1 / (1 + exp -z)."""
    return slope_p.bind(z)


def _tail(z: Numbers) -> Numbers:
    return jnp.exp(-jnp.abs(z))


def _softplus(z: Numbers) -> Numbers:
    return jnp.maximum(z, 0) + jnp.log1p(_tail(z))


def _slope(z: Numbers) -> Numbers:
    return jnp.where(z >= 0, 1, _tail(z)) / (1 + _tail(z))


def softplus_change(v: Numbers, d: Numbers, _: Any) -> Numbers:
    """softplus(u) - softplus(v), u = v + d: max(u, 0) - max(v, 0) + log1p((e_u - e_v) / (1 + e_v)), e_z = exp(-|z|).

    e_u - e_v = (e_u + e_v) tanh((|v| - |u|) / 2), where |v| - |u| is -d or d on one side of zero and +-(u + v) across
    it. Across, two terms of the series are enough for steps below NEAR; above, nothing cancels.
    """
    u, half = v + d, v + d / 2
    right, now_right = v >= 0, u >= 0
    across = right != now_right
    bend = jnp.where(across, half - half**3 / 3, jnp.tanh(d / 2))
    exact = jnp.where(now_right, -bend, bend) * (_tail(u) + _tail(v))
    tails = jnp.where(across & (jnp.abs(d) >= NEAR), _tail(u) - _tail(v), exact)
    top = jnp.where(right, jnp.where(now_right, d, -v), jnp.where(now_right, u, 0))
    return top + jnp.log1p(tails / (1 + _tail(v)))


def slope_change(v: Numbers, d: Numbers, _: Any) -> Numbers:
    """slope(u) - slope(v) = tanh((u - v)/2) (slope(v) (1 - slope(u)) + slope(u) (1 - slope(v)))."""
    u = v + d
    high_u, low_u = jnp.where(u >= 0, 1, _tail(u)), jnp.where(u >= 0, _tail(u), 1)
    high_v, low_v = jnp.where(v >= 0, 1, _tail(v)), jnp.where(v >= 0, _tail(v), 1)
    return jnp.tanh(d / 2) * (high_v * low_u + high_u * low_v) / ((1 + _tail(u)) * (1 + _tail(v)))


def _primitive(name: str, function: Any) -> Primitive:
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda z: z)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    batching.defvectorized(made)
    return made


softplus_p = _primitive("softplus", _softplus)
slope_p = _primitive("softplus_slope", _slope)
ad.defjvp(softplus_p, lambda tangent, z: tangent * slope(z))
ad.defjvp(slope_p, lambda tangent, z: tangent * slope(z) * slope(-z))
