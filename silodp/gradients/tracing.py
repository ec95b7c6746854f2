"""One walk over a traced function (a jaxpr), used to find layers, to tap them and to propagate differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core

Apply = Callable[[core.JaxprEqn, list[Any]], list[Any]]


def walk(
    traced: core.ClosedJaxpr,
    arguments: Sequence[Any],
    apply: Apply,
    *,
    lift: Callable[[Any], Any] = lambda constant: constant,
    inline: Callable[[core.JaxprEqn], core.ClosedJaxpr | None],
) -> list[Any]:
    """Run `apply` on every equation in order. Values may be arrays or anything `lift` makes of a constant.

    An equation for which `inline` gives an inner function is walked through instead.
    """
    jaxpr = traced.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(lift, traced.consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    read = lambda atom: lift(atom.val) if isinstance(atom, core.Literal) else values[atom]
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = inline(equation)
        again = partial(walk, apply=apply, lift=lift, inline=inline)
        outputs = apply(equation, inputs) if inner is None else again(inner, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on arrays."""
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def inner_function(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The body of an equation that only calls another function (jit, custom derivatives, checkpoint)."""
    body: Any
    if equation.primitive.name in ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "remat2"):
        body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    elif equation.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        body = equation.params["call_jaxpr"]
    else:
        return None
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def trace(function: Callable[..., Any], *arguments: Any) -> core.ClosedJaxpr:
    return jax.make_jaxpr(function)(*arguments)
