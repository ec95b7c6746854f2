"""Is a loss a network of dense, conv2d and embed layers? If so: which, and their inputs and output cotangents."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, PyTree

from silodp.gradients.layers import CONV, DENSE, EMBED, apply_weight
from silodp.gradients.tracing import bind, inner_function, trace, walk

Loss = Callable[[PyTree, PyTree], Array]


class NotStructured(Exception):
    """Why the structured engine cannot take a loss, in one line."""


class Layer(NamedTuple):
    """One layer call: which of the traced calls, the flat indices of its parameters, and one record's shapes."""

    call: int
    kind: str
    weight: int
    bias: int | None
    stride: int
    output: tuple[int, ...]
    inputs: tuple[int, ...]
    on_record: bool  # its input is made from the record alone, before any parameter


class Taps(NamedTuple):
    """What the layers of one record (or, stacked on the last axis, of many) saw: inputs and output cotangents."""

    inputs: list[Array]
    cotangents: list[Array]


class Structure(NamedTuple):
    traced: core.ClosedJaxpr
    layers: tuple[Layer, ...]

    def taps(self, params: PyTree, records: PyTree) -> Taps:
        """Layer inputs, and the gradients of the losses with respect to what is added to each layer's output."""
        leaves, n = jax.tree.leaves(params), jax.tree.leaves(records)[0].shape[0]
        offsets = [_offset(layer, leaves, n) for layer in self.layers]
        return jax.vmap(self._record_taps, in_axes=(None, 0, -1), out_axes=-1)(leaves, records, offsets)

    def _record_taps(self, leaves: list[Array], record: PyTree, offsets: list[Array]) -> Taps:
        layers = {layer.call: (layer, i) for i, layer in enumerate(self.layers)}

        def perturbed(offsets: list[Array]) -> tuple[Array, list[Array]]:
            calls, inputs = count(), []

            def apply(equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
                if not is_layer(equation) or (call := next(calls)) not in layers:
                    return bind(equation, values)
                layer, i = layers[call]
                inputs.append(values[1])
                return [apply_weight(layer.kind, values[0], values[1], layer.stride) + offsets[i]]

            (value,) = walk(self.traced, [*leaves, *jax.tree.leaves(record)], apply, inline=_inline)
            return value, inputs

        cotangents, inputs = jax.grad(perturbed, has_aux=True)(offsets)
        return Taps(inputs, cotangents)


def _offset(layer: Layer, leaves: list[Array], n: int) -> Array:
    """The bias (or zero) for every record: vmap would move the record axis first if one operand had none."""
    bias = jnp.zeros(()) if layer.bias is None else leaves[layer.bias]
    return jnp.broadcast_to(bias.reshape(*bias.shape, *(1,) * (len(layer.output) + 1 - bias.ndim)), (*layer.output, n))


class _Origin(NamedTuple):
    """Of a value while looking for layers: the parameter it is (if it is one), and whether it depends on any."""

    parameter: int | None = None
    depends: bool = False


def find_structure(loss: Loss, params: PyTree, record: PyTree) -> Structure:
    """Trace the loss of one record; raises NotStructured with the reason when it is not a network of layers."""
    traced = trace(loss, params, record)
    if [_shape(v) for v in traced.jaxpr.outvars] != [()]:
        raise ValueError(f"loss: must return one scalar per record, not {traced.out_avals}")
    names = [jax.tree_util.keystr(path) or "x" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    finder = _Finder(names)
    origins = [_Origin(i, True) for i in range(len(names))]
    data = [_Origin() for _ in jax.tree.leaves(record)]
    results = walk(traced, [*origins, *data], finder.visit, lift=lambda _: _Origin(), inline=_inline)
    finder.refuse_parameters(results)
    return Structure(traced, tuple(finder.layers))


class _Finder:
    def __init__(self, names: list[str]):
        self.names = names
        self.layers: list[Layer] = []
        self.calls = 0

    def visit(self, equation: core.JaxprEqn, inputs: list[_Origin]) -> list[_Origin]:
        if is_layer(equation) and inputs[0].parameter is not None:
            self.layers.append(self._layer(equation, inputs))
        else:
            self.refuse_parameters(inputs)
        self.calls += is_layer(equation)
        return [_Origin(depends=any(i.depends for i in inputs)) for _ in equation.outvars]

    def refuse_parameters(self, origins: list[_Origin]) -> None:
        for origin in origins:
            if origin.parameter is not None:
                name = self.names[origin.parameter]
                raise NotStructured(f"parameter {name} is used outside dense, conv2d and embed")

    def _layer(self, equation: core.JaxprEqn, inputs: list[_Origin]) -> Layer:
        kind, stride = _kind(equation)
        weight, data, *bias = inputs
        self.refuse_parameters([data])
        if kind == EMBED and data.depends:
            raise NotStructured(f"an index into {self.names[weight.parameter or 0]} depends on parameters")
        if bias and bias[0].parameter is None:
            raise NotStructured("a layer's bias is computed, not a parameter")
        layer = Layer(
            self.calls,
            kind,
            weight.parameter or 0,
            bias[0].parameter if bias else None,
            stride,
            _shape(equation.outvars[0]),
            _shape(equation.invars[1]),
            not data.depends,
        )
        self._check(equation, layer)
        return layer

    def _check(self, equation: core.JaxprEqn, layer: Layer) -> None:
        used = {p for earlier in self.layers for p in (earlier.weight, earlier.bias)}
        for parameter in (layer.weight, layer.bias):
            if parameter is not None and parameter in used:
                raise NotStructured(f"parameter {self.names[parameter]} is used by two layers")
        ranks = {DENSE: (2, 1), CONV: (4, 3), EMBED: (2, len(layer.inputs))}[layer.kind]
        if (len(_shape(equation.invars[0])), len(layer.inputs)) != ranks:
            raise NotStructured(f"{self.names[layer.weight]} is applied to a stack of inputs, not to one")


def is_layer(equation: core.JaxprEqn) -> bool:
    name = equation.params.get("name", "")
    return equation.primitive.name in ("jit", "pjit") and name.startswith((DENSE, CONV, EMBED))


def _kind(equation: core.JaxprEqn) -> tuple[str, int]:
    name = equation.params["name"]
    return (CONV, int(name.rsplit("_", 1)[1])) if name.startswith(CONV) else (name, 1)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _inline(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    # A custom derivative must survive, because the walked loss is differentiated afterwards.
    if is_layer(equation) or equation.primitive.name.startswith("custom"):
        return None
    return inner_function(equation)
