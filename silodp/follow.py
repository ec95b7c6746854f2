"""A traced program (a jaxpr), followed from what is secret on: which of its outputs depend on it.

Whatever is computed from a secret is secret, until it passes the marker PRIVATISED. Whole arrays are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jaxpr_core
from jax.interpreters import batching, mlir

from silodp.objective import CALLBACKS


def _marker(name: str) -> Any:
    """An operation that does nothing to its argument but stand in the program."""
    primitive = jaxpr_core.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda _, x, **__: [x])
    batching.primitive_batchers[primitive] = lambda given, axes, **what: (primitive.bind(*given, **what), axes[0])
    return primitive


PRIVATISED = _marker("silodp_privatised")  # from here on it is public
SECRET = _marker("silodp_secret")  # from here on it is secret
CHECKED = _marker("silodp_checked")  # must not be secret here; `what` says what it is


def _privatised_in_a_stack(*_: Any, **__: Any) -> Any:
    raise ValueError("silo.privatise inside jax.vmap: many releases would be counted as one; use silo.loop")


batching.primitive_batchers[PRIVATISED] = _privatised_in_a_stack


@dataclass
class Findings:
    """Streams whose bound the author states, what must not be, and where a release is not the declared one."""

    stated: set[str] = field(default_factory=set)
    leaks: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)


def checked(value: Any, what: str) -> Any:
    return value if value is None or isinstance(value, int | float) else CHECKED.bind(jnp.asarray(value), what=what)


def followed_program(
    function: Callable[..., Any], arguments: Sequence[Any], secret: Sequence[bool], findings: Findings
) -> list[bool]:
    """Whether each output is secret, given which inputs are (one for every leaf, or one for all)."""
    closed = jax.make_jaxpr(function)(*arguments)
    given = list(secret) if len(secret) == len(closed.jaxpr.invars) else [any(secret)] * len(closed.jaxpr.invars)
    return follow(closed.jaxpr, given, findings)


def follow(jaxpr: Any, secret: Sequence[bool], findings: Findings) -> list[bool]:
    """Forward through a program: an output is secret if an input is, unless the operation privatises."""
    known = dict(zip(jaxpr.invars, secret, strict=True))
    is_secret = lambda atom: not isinstance(atom, jaxpr_core.Literal) and (known.get(atom, False) or is_ref(atom))
    for equation in jaxpr.eqns:
        given = [is_secret(atom) for atom in equation.invars]
        known |= dict(zip(equation.outvars, step(equation, given, findings), strict=True))
    return [is_secret(atom) for atom in jaxpr.outvars]


def is_ref(atom: Any) -> bool:
    """A mutable array: who has written what into it is not followed."""
    return type(atom.aval).__name__ == "AbstractRef"


def step(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    name, count = equation.primitive.name, len(equation.outvars)
    if equation.primitive is PRIVATISED:
        return [False]
    if equation.primitive is SECRET or name in CALLBACKS:  # what the host knows is not followed
        return [True] * count
    if equation.primitive is CHECKED:
        if any(given):
            findings.leaks.append(f"{equation.params['what']} depends on records that were not privatised")
        return given
    if name == "cond":
        branches = [follow(branch.jaxpr, given[1:], findings) for branch in equation.params["branches"]]
        return [given[0] or any(outs) for outs in zip(*branches, strict=True)] if count else []
    if name == "while":
        return while_loop(equation, given, findings)
    if name == "scan":
        return scan(equation, given, findings)
    inner = called(equation)
    if inner is not None and len(inner.invars) == len(given) and len(inner.outvars) == count:
        return follow(inner, given, findings)
    if inner is not None:  # its own findings still count
        follow(inner, [any(given)] * len(inner.invars), findings)
    return [any(given)] * count


def called(equation: Any) -> Any | None:
    """The program that an operation calls, if it calls one."""
    for value in equation.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            return jaxpr
    return None


def while_loop(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    for_test, for_body, carry = given[:tests], given[tests : tests + bodies], given[tests + bodies :]
    test, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr

    def once(carry: list[bool]) -> list[bool]:
        # How often a loop runs shows in everything that it returns.
        stops = follow(test, [*for_test, *carry], findings)[0]
        return [stops or out for out in follow(body, [*for_body, *carry], findings)]

    return settled(once, carry)


def scan(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    consts, carried = equation.params["num_consts"], equation.params["num_carry"]
    body, rest = equation.params["jaxpr"].jaxpr, given[consts + carried :]
    once = lambda carry: follow(body, [*given[:consts], *carry, *rest], findings)
    carry = settled(lambda carry: once(carry)[:carried], given[consts : consts + carried])
    return [*carry, *once(carry)[carried:]]


def settled(once: Callable[[list[bool]], list[bool]], carry: list[bool]) -> list[bool]:
    """What is secret after any number of turns."""
    while True:
        grown = [a or b for a, b in zip(carry, once(carry), strict=True)]
        if grown == carry:
            return carry
        carry = grown
