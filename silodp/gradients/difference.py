"""f(x) - f(y) without cancellation, for any traceable f.

Subtracting two float32 results loses all digits when x and y are close: at |x - y| = 1e-6 the error is of the order of
10%. Here the difference itself is carried through f next to the value at y, by algebraic identities that hold for
near and far points alike, e.g. for a product  a_x b_x - a_y b_y = (a_x - a_y) b_y + a_x (b_x - b_y),  for the
exponential  e^u - e^v = e^max(u,v) (1 - e^-|u-v|) sign(u-v),  for tanh the addition theorem. A primitive without an
identity of its own falls back to its tangent at the midpoint where that agrees with plain subtraction up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, PyTree

from silodp.gradients.softplus import slope_change, softplus_change
from silodp.gradients.tracing import bind, inner_function, trace, walk

# Agreement of tangent and subtraction that plain float32 rounding explains.
ROUNDING = 4 * float(jnp.finfo(jnp.float32).eps)


class Pair(NamedTuple):
    """A value at y and what x changes: `delta` for numbers, `other` (the value at x) for truth values and integers."""

    base: Any
    delta: Any = None
    other: Any = None

    @property
    def at_x(self) -> Any:
        if self.other is not None:
            return self.other
        return self.base if self.delta is None else self.base + self.delta

    @property
    def same(self) -> bool:
        return self.delta is None and self.other is None

    @property
    def change(self) -> Any:
        return jnp.zeros_like(self.base) if self.delta is None else self.delta


def difference(function: Callable[..., PyTree], x: PyTree, y: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
    """(f(y, *rest), f(x, *rest) - f(y, *rest)); the second has None where f does not depend on its first argument."""
    traced = trace(function, y, *rest)
    shape = jax.tree.structure(jax.eval_shape(function, y, *rest))
    moved = [Pair(b, a - b, a) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)]
    fixed = [Pair(leaf) for leaf in jax.tree.leaves(rest)]
    results = walk(traced, [*moved, *fixed], _propagate, lift=Pair, inline=inner_function)
    return shape.unflatten([r.base for r in results]), shape.unflatten([r.delta for r in results])


class Combination(NamedTuple):
    """sum_k c_k f(x_k), as whole * f at the last point + sum_k others[k] * (f(x_k) - f at the last point).

    whole: None where it is known to be 0, and then nobody computes what only f at the last point needs.
    """

    whole: Array | None
    others: list[Array]

    @staticmethod
    def of(coefficients: Sequence[Any]) -> Combination:
        numbers = [jnp.asarray(c, jnp.float32) for c in coefficients]
        known = all(isinstance(c, (int, float)) for c in coefficients)
        nothing = len(coefficients) > 1 and known and sum(coefficients) == 0
        return Combination(None if nothing else sum(numbers[1:], numbers[0]), numbers[:-1])

    def add(self, base: Array, changes: Sequence[Array | None]) -> Array:
        """Changes that are None are 0."""
        parts = [] if self.whole is None else [self.whole * base]
        parts += [c * change for c, change in zip(self.others, changes, strict=True) if change is not None]
        return sum(parts[1:], parts[0]) if parts else jnp.zeros_like(base)


class Step(NamedTuple):
    """One primitive about to be differenced: how to evaluate it, its inputs, and its results at y."""

    evaluate: Callable[..., list[Any]]
    inputs: list[Pair]
    bases: list[Any]
    parameters: dict[str, Any]


def _propagate(equation: core.JaxprEqn, inputs: list[Pair]) -> list[Pair]:
    if equation.primitive.name == "scan" and not all(p.same for p in inputs):
        return _loop(equation, inputs)
    evaluate = lambda *values: bind(equation, values)
    bases = evaluate(*(p.base for p in inputs))
    if all(p.same for p in inputs):
        return [Pair(base) for base in bases]
    step = Step(evaluate, inputs, bases, equation.params)
    name = equation.primitive.name
    if not any(map(_is_float, bases)):
        return _discrete(name, step)
    deltas = RULES.get(name, _fallback)(step)
    if name in RULES and name not in SELECTING:
        return [Pair(base, delta) for base, delta in zip(bases, deltas, strict=True)]
    # Gradients ask which input was the largest by comparing with ==, so x's values must stay bitwise what they were.
    others = evaluate(*(p.at_x for p in inputs))
    return [Pair(b, d if _is_float(b) else None, o) for b, d, o in zip(bases, deltas, others, strict=True)]


def _loop(equation: core.JaxprEqn, inputs: list[Pair]) -> list[Pair]:
    """A loop of differences, instead of the difference of two loops and of their tangents."""
    own, first = equation.params, equation.params["num_consts"]
    last = first + own["num_carry"]
    fixed, start, rows = inputs[:first], inputs[first:last], inputs[last:]
    body = lambda held, row: walk(own["jaxpr"], [*fixed, *held, *row], _propagate, lift=Pair, inline=inner_function)
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    moving = [not p.same for p in start]
    held = lambda pairs: [_held(*each) for each in zip(pairs, moving, strict=True)]
    after = lambda: jax.eval_shape(body, held(start), row)[: last - first]
    while (more := [moves or not p.same for moves, p in zip(moving, after(), strict=True)]) != moving:
        moving = more  # what is held moves with what it is computed from, perhaps some turns later

    def step(pairs: list[Pair], row: list[Pair]) -> tuple[list[Pair], list[Pair]]:
        found = body(pairs, row)
        return held(found[: last - first]), found[last - first :]

    done, stacked = lax.scan(step, held(start), rows, own["length"], own["reverse"], own["unroll"])
    return [*done, *stacked]


def _held(pair: Pair, moves: bool) -> Pair:
    """What a loop holds has the same parts in every turn."""
    if not moves:
        return Pair(pair.base)
    return Pair(pair.base, pair.change if _is_float(pair.base) else None, pair.at_x)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _discrete(name: str, step: Step) -> list[Pair]:
    if name in ("lt", "le", "gt", "ge") and _is_float(step.inputs[0].base):
        # x's order from the gap: adding a tiny delta to the value first would round it away.
        left, right = step.inputs
        gap = (left.base - right.base) + (left.change - right.change)
        exact, rounded = step.evaluate(gap, jnp.zeros_like(gap))[0], step.evaluate(left.at_x, right.at_x)[0]
        return [Pair(step.bases[0], other=jnp.where(jnp.isfinite(gap), exact, rounded))]
    others = step.evaluate(*(p.at_x for p in step.inputs))
    return [Pair(base, other=other) for base, other in zip(step.bases, others, strict=True)]


def _fallback(step: Step) -> list[Any]:
    """Tangent at the midpoint where it agrees with the subtraction up to rounding, else the subtraction."""
    at_x = step.evaluate(*(p.at_x for p in step.inputs))
    plain = [a - b if _is_float(b) else a for a, b in zip(at_x, step.bases, strict=True)]
    if any(p.other is not None and not _is_float(p.base) for p in step.inputs):
        return plain
    moving = [i for i, p in enumerate(step.inputs) if p.delta is not None]

    def only_moving(*values: Any) -> list[Any]:
        full = [p.base for p in step.inputs]
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return step.evaluate(*full)

    middle = [step.inputs[i].base + step.inputs[i].delta / 2 for i in moving]
    _, push = jax.linearize(only_moving, *middle)
    tangents, shaken = push(*(step.inputs[i].delta for i in moving)), push(*middle)
    return [_agreed(*args) for args in zip(tangents, plain, shaken, at_x, step.bases, strict=True)]


def _agreed(tangent: Any, plain: Any, shaken: Any, at_x: Any, base: Any) -> Any:
    """`shaken`: how the result moves with its inputs' relative errors."""
    if not _is_float(base):
        return plain
    scale = jnp.maximum(jnp.abs(at_x), jnp.abs(base)) + jnp.abs(shaken)
    return jnp.where(jnp.abs(tangent - plain) <= ROUNDING * scale, tangent, plain)


def _linear(step: Step) -> list[Any]:
    if any(p.other is not None and not _is_float(p.base) for p in step.inputs):
        return _fallback(step)
    return step.evaluate(*(p.change if _is_float(p.base) else p.base for p in step.inputs))


def _bilinear(step: Step) -> list[Any]:
    left, right = step.inputs
    parts = []
    if left.delta is not None:
        parts += step.evaluate(left.delta, right.base)
    if right.delta is not None:
        parts += step.evaluate(left.at_x, right.delta)
    return [sum(parts[1:], parts[0])]


def _divide(step: Step) -> list[Any]:
    top, bottom = step.inputs
    return [(top.change - step.bases[0] * bottom.change) / bottom.at_x]


def _select(step: Step) -> list[Any]:
    which, *cases = step.inputs
    changes = step.evaluate(which.base, *(p.change for p in cases))[0]
    if which.same:
        return [changes]
    jump = step.evaluate(which.other, *(p.at_x for p in cases))[0] - step.bases[0]
    return [jnp.where(which.other == which.base, changes, jump)]


def _max_change(a: Pair, b: Pair) -> Array:
    lead = a.base - b.base
    led, leads = lead >= 0, lead + (a.change - b.change) >= 0
    from_a = jnp.where(leads, a.change, b.change - lead)
    from_b = jnp.where(leads, a.change + lead, b.change)
    return jnp.where(led, from_a, from_b)


def _largest(step: Step) -> list[Any]:
    """The largest (v_i - max v) + d_i."""
    (p,) = step.inputs
    gaps = p.base - jnp.expand_dims(step.bases[0], step.parameters["axes"])
    return step.evaluate(gaps + p.change)


def _negated(p: Pair) -> Pair:
    return Pair(-p.base, -p.change)


def _max(step: Step) -> list[Any]:
    return [_max_change(*step.inputs)]


def _min(step: Step) -> list[Any]:
    return [-_max_change(*map(_negated, step.inputs))]


def _abs(step: Step) -> list[Any]:
    return [_max_change(step.inputs[0], _negated(step.inputs[0]))]


def _unary(identity: Callable[[Any, Any, Any], Any]) -> Callable[[Step], list[Any]]:
    """identity(v, d, f(v)) = f(v + d) - f(v)."""
    return lambda step: [identity(step.inputs[0].base, step.inputs[0].delta, step.bases[0])]


def _tanh(v: Array, d: Array, t: Array) -> Array:
    return jnp.tanh(d) * (1 - t * jnp.tanh(v + d))


def _logistic(v: Array, d: Array, s: Array) -> Array:
    moved = jax.nn.sigmoid(v + d)
    return jnp.tanh(d / 2) * (s * (1 - moved) + moved * (1 - s))


def _exp(v: Array, d: Array, _: Array) -> Array:
    return -jnp.exp(jnp.maximum(v, v + d)) * jnp.expm1(-jnp.abs(d)) * jnp.sign(d)


def _sqrt(v: Array, d: Array, root: Array) -> Array:
    total = root + jnp.sqrt(v + d)
    return jnp.where(total > 0, d / jnp.where(total > 0, total, 1), 0)


def _integer_pow(step: Step) -> list[Any]:
    """u^n - v^n = (u - v) sum_i u^i v^(n-1-i); a negative power is one over a positive one."""
    power, (p,) = step.parameters["y"], step.inputs
    n, u, v = abs(power), p.at_x, p.base
    if n > 4:
        return _fallback(step)
    change = p.delta * sum((u**i * v ** (n - 1 - i) for i in range(n)), jnp.zeros_like(v))
    return [change if power > 0 else -change / (u**n * v**n)]


def _selected_scatter(step: Step) -> list[Any]:
    """Max-pooling's gradient: linear in the source; the bracket is exactly 0 when both points select the same."""
    source, operand = step.inputs
    (moved,) = step.evaluate(source.change, operand.base)
    (here,), (there,) = step.evaluate(source.at_x, operand.base), step.evaluate(source.at_x, operand.at_x)
    return [moved + (there - here)]


MOVING = (
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "concatenate", "pad", "slice", "rev",
    "copy", "gather", "dynamic_slice", "dynamic_update_slice", "stop_gradient", "split",
    "stack", "unstack",
)  # fmt: skip
ADDING = ("add", "sub", "neg", "add_any", "reduce_sum", "cumsum", "reduce_window_sum", "scatter-add")
# Results are some of the inputs, unchanged.
SELECTING = frozenset((*MOVING, "max", "min", "select_n", "reduce_max"))
RULES: dict[str, Callable[[Step], list[Any]]] = {
    **dict.fromkeys((*MOVING, *ADDING, "convert_element_type"), _linear),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _bilinear),
    "div": _divide,
    "select_n": _select,
    "max": _max,
    "min": _min,
    "reduce_max": _largest,
    "abs": _abs,
    "exp": _unary(_exp),
    "log": _unary(lambda v, d, _: jnp.log1p(d / v)),
    "log1p": _unary(lambda v, d, _: jnp.log1p(d / (1 + v))),
    "tanh": _unary(_tanh),
    "logistic": _unary(_logistic),
    "softplus": _unary(softplus_change),
    "softplus_slope": _unary(slope_change),
    "integer_pow": _integer_pow,
    "sin": _unary(lambda v, d, _: 2 * jnp.cos(v + d / 2) * jnp.sin(d / 2)),
    "cos": _unary(lambda v, d, _: -2 * jnp.sin(v + d / 2) * jnp.sin(d / 2)),
    "square": _unary(lambda v, d, _: d * (v + (v + d))),
    "sqrt": _unary(_sqrt),
    "select_and_scatter_add": _selected_scatter,
}
