"""What a loss does with each parameter: which are weights of layers, and what those layers see and send back.

Layers are dense, conv2d and embed, and the product of a parameter with one vector, however it is written. A parameter
that is used in any other way (a scale, a norm, a weight that two layers share or that meets a stack of inputs) is kept
as a leaf: its gradient is computed record by record, in the same pass. What remains of a loss may be any JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, PyTree

from silodp.gradients.difference import MOVING
from silodp.gradients.layers import CONV, DENSE, EMBED, LEAF, apply_weight
from silodp.gradients.tracing import bind, inner_function, trace, walk

Loss = Callable[[PyTree, PyTree], Array]
UNCHANGED = frozenset((*MOVING, "convert_element_type"))  # whoever computes it twice gets the same numbers


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
    turned: bool = False  # the parameter is the weight's transpose, inputs first
    as_it_came: bool = False  # its input is numbers of the record, in any order, and nothing that was computed


class Taps(NamedTuple):
    """What the layers of one record (or, stacked, of many) saw: inputs and output cotangents.

    Records are stacked on the last axis, of embeddings and leaves on the first. Of a leaf the cotangent is its
    gradient, and there is no input.
    """

    inputs: list[Array]
    cotangents: list[Array]


class Structure(NamedTuple):
    traced: core.ClosedJaxpr
    layers: tuple[Layer, ...]  # in the order of their calls, then leaves
    why: tuple[str, ...] = ()  # of each leaf: what keeps it from being a layer's weight

    @property
    def leaves(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind == LEAF)

    def taps(self, params: PyTree, records: PyTree) -> Taps:
        """Layer inputs, and the gradients of the losses with respect to what is added to each layer's output."""
        leaves, n = jax.tree.leaves(params), jax.tree.leaves(records)[0].shape[0]
        layers = [layer for layer in self.layers if layer.kind != LEAF]
        offsets = [_offset(layer, leaves, n) for layer in layers]
        axes: list[Any] = [_axis(layer) for layer in self.layers]
        stacked = jax.vmap(self._record_taps, in_axes=(None, 0, axes[: len(layers)]), out_axes=Taps(axes, axes))
        return stacked(leaves, records, offsets)

    def _record_taps(self, leaves: list[Array], record: PyTree, offsets: list[Array]) -> Taps:
        layers = {layer.call: (layer, i) for i, layer in enumerate(self.layers) if layer.kind != LEAF}
        places = [layer.weight for layer in self.leaves]

        def perturbed(offsets: list[Array], kept: list[Array]) -> tuple[Array, list[Array]]:
            calls, inputs, own = count(), [], list(leaves)
            for place, leaf in zip(places, kept, strict=True):
                own[place] = leaf

            def apply(equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
                if not is_call(equation) or (call := next(calls)) not in layers:
                    return bind(equation, values)
                layer, i = layers[call]
                if is_lookup(equation):
                    x, out = _lookup(equation, values, offsets[i])
                    inputs.append(x)
                    return [out]
                weight = leaves[layer.weight].T if layer.turned else leaves[layer.weight]
                x = values[1] if is_layer(equation) or values[0].ndim == 2 else values[0]
                inputs.append(x)
                return [apply_weight(layer.kind, weight, x, layer.stride) + offsets[i]]

            (value,) = walk(self.traced, [*own, *jax.tree.leaves(record)], apply, inline=_inline)
            return value, inputs

        kept = [leaves[place] for place in places]
        (cotangents, gradients), inputs = jax.grad(perturbed, argnums=(0, 1), has_aux=True)(offsets, kept)
        return Taps([*inputs, *(jnp.zeros(()) for _ in kept)], [*cotangents, *gradients])


def _axis(layer: Layer) -> int:
    """Where the records of a block are: last for products, first for what is kept record by record."""
    return 0 if layer.kind in (EMBED, LEAF) else -1


def _offset(layer: Layer, leaves: list[Array], n: int) -> Array:
    """The bias (or zero) for every record: vmap would move the record axis first if one operand had none."""
    if layer.kind == EMBED:
        return jnp.zeros((n, *layer.output))
    bias = jnp.zeros(()) if layer.bias is None else leaves[layer.bias]
    return jnp.broadcast_to(bias.reshape(*bias.shape, *(1,) * (len(layer.output) + 1 - bias.ndim)), (*layer.output, n))


class _Origin(NamedTuple):
    """Of a value while looking for layers: the parameter it is (if it is one), whether it depends on any, and whether
    it was computed (not only moved)."""

    parameter: int | None = None
    depends: bool = False
    turned: bool = False  # the value is the parameter's transpose
    computed: bool = False


def find_structure(loss: Loss, params: PyTree, record: PyTree) -> Structure:
    """Trace the loss of one record; raises NotStructured with the reason when most parameters are no layer's."""
    traced = trace(loss, params, record)
    if [_shape(v) for v in traced.jaxpr.outvars] != [()]:
        raise ValueError(f"loss: must return one scalar per record, not {traced.out_avals}")
    names = [jax.tree_util.keystr(path) or "x" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    finder = _Finder(names)
    origins = [_Origin(i, True) for i in range(len(names))]
    data = [_Origin() for _ in jax.tree.leaves(record)]
    results = walk(traced, [*origins, *data], finder.visit, lift=lambda _: _Origin(), inline=_inline)
    finder.keep(results, "is the loss itself")
    return finder.structure(traced, [jnp.shape(leaf) for leaf in jax.tree.leaves(params)])


class _Finder:
    def __init__(self, names: list[str]):
        self.names = names
        self.layers: list[Layer] = []
        self.why: dict[int, str] = {}  # of every parameter that is kept as a leaf
        self.calls = 0

    def visit(self, equation: core.JaxprEqn, inputs: list[_Origin]) -> list[_Origin]:
        if is_call(equation):
            layer = self._layer(equation, inputs)
            if layer is not None:
                self.layers.append(layer)
            self.calls += 1
        elif equation.primitive.name == "transpose" and inputs[0].parameter is not None and _rank(equation) == 2:
            return [inputs[0]._replace(turned=not inputs[0].turned)]
        else:
            self.keep(inputs, "is used outside dense, conv2d and embed")
        depends, moved = any(i.depends for i in inputs), equation.primitive.name in UNCHANGED
        computed = not moved or any(i.computed for i in inputs)
        return [_Origin(depends=depends, computed=computed) for _ in equation.outvars]

    def keep(self, origins: list[_Origin], why: str) -> None:
        for origin in origins:
            if origin.parameter is not None:
                self.why.setdefault(origin.parameter, f"{self.names[origin.parameter]} {why}")

    def structure(self, traced: core.ClosedJaxpr, shapes: list[tuple[int, ...]]) -> Structure:
        """Layers whose parameters are nobody else's; all other parameters are leaves."""
        self._keep_shared()
        layers = [layer for layer in self.layers if not {layer.weight, layer.bias} & self.why.keys()]
        kept = sorted(self.why)
        in_layers = sum(prod(shapes[i]) for layer in layers for i in (layer.weight, layer.bias) if i is not None)
        if in_layers <= sum(prod(shapes[i]) for i in kept):  # the general engine is then the quicker one
            largest = max(kept, key=lambda i: prod(shapes[i]), default=None)
            raise NotStructured("no parameter is used" if largest is None else self.why[largest])
        leaves = [Layer(-1, LEAF, i, None, 1, shapes[i], (), on_record=False) for i in kept]
        return Structure(traced, (*layers, *leaves), tuple(self.why[i] for i in kept))

    def _keep_shared(self) -> None:
        """A parameter that is kept makes its layer one of plain JAX, and with it that layer's other parameter."""
        used: set[int | None] = set()
        for layer in self.layers:
            self.keep([_Origin(p) for p in (layer.weight, layer.bias) if p in used], "is used by two layers")
            used |= {layer.weight, layer.bias} - {None}
        while again := [each for each in self.layers if self._is_half_kept(each)]:
            for layer in again:
                own = [_Origin(layer.weight), _Origin(layer.bias)]
                self.keep(own, "is used in one layer with a parameter that is kept")

    def _is_half_kept(self, layer: Layer) -> bool:
        own = {layer.weight, layer.bias} - {None}
        return 0 < len(own & self.why.keys()) < len(own)

    def _layer(self, equation: core.JaxprEqn, inputs: list[_Origin]) -> Layer | None:
        """The call as a layer; None where its parameters have to be kept."""
        kind, stride = _kind(equation)
        at = 0 if kind != DENSE or is_layer(equation) or inputs[0].parameter is not None else 1
        weight, data, bias = inputs[at], inputs[1 - at], inputs[2:] if is_layer(equation) else []
        why = self._obstacle(equation, kind, at, inputs)
        if weight.parameter is None or why is not None:
            self.keep(inputs, why or "is used outside dense, conv2d and embed")
            return None
        turned = weight.turned
        if equation.primitive.name == "dot_general":  # the axis that is summed tells which way the weight lies
            (left, right), _ = equation.params["dimension_numbers"]
            turned ^= (left, right)[at] == (0,)
        output, seen = _shape(equation.outvars[0]), _shape(equation.invars[1 - at])
        seen = output[:-1] if is_lookup(equation) else seen
        own = bias[0].parameter if bias else None
        on_record, came = not data.depends, not (data.depends or data.computed)
        return Layer(self.calls, kind, weight.parameter, own, stride, output, seen, on_record, turned, came)

    def _obstacle(self, equation: core.JaxprEqn, kind: str, at: int, inputs: list[_Origin]) -> str | None:
        """What keeps a call with a parameter as its weight from being a layer."""
        weight, data, bias = inputs[at], inputs[1 - at], inputs[2:] if is_layer(equation) else []
        seen = len(_shape(equation.invars[1 - at]))
        ranks = {DENSE: (2, 1), CONV: (4, 3), EMBED: (2, seen)}[kind]
        if data.parameter is not None or len(_shape(equation.invars[at])) != ranks[0]:
            return "is used outside dense, conv2d and embed"
        if seen != ranks[1]:
            return "is applied to a stack of inputs, not to one"
        if kind == EMBED and data.depends:
            return "is looked up at an index that depends on parameters"
        if bias and (bias[0].parameter is None or bias[0].turned):
            return "is in a layer whose bias is computed, not a parameter"
        if weight.turned and kind != DENSE:
            return "is turned before it is used"
        return None


def is_call(equation: core.JaxprEqn) -> bool:
    """What may be a layer."""
    return is_layer(equation) or equation.primitive.name == "dot_general" or is_lookup(equation)


def is_lookup(equation: core.JaxprEqn) -> bool:
    """Whole rows of a matrix by their numbers, as `table[index]` and jnp.take give them."""
    shapes, own = [_shape(each) for each in equation.invars], equation.params
    if equation.primitive.name not in ("gather", "dynamic_slice") or len(shapes[0]) != 2:
        return False
    rows = lax.GatherDimensionNumbers((len(shapes[1]) - 1,), (0,), (0,))
    return own.get("dimension_numbers", rows) == rows and tuple(own["slice_sizes"]) == (1, shapes[0][1])


def _lookup(equation: core.JaxprEqn, values: list[Any], offset: Array) -> tuple[Array, Array]:
    """The rows' numbers, and the rows with the offset added: not to a row outside of the table, to which JAX gives no
    gradient unless it is asked to clamp the number."""
    (found,) = bind(equation, values)
    if equation.primitive.name == "dynamic_slice":
        return values[1][None], found + offset
    index = values[1][..., 0]
    if equation.params["mode"] != lax.GatherScatterMode.CLIP:
        inside = (index >= 0) & (index < values[0].shape[0])
        offset = jnp.where(inside[..., None], offset, 0)
    return index, found + offset


def is_layer(equation: core.JaxprEqn) -> bool:
    name = equation.params.get("name", "")
    return equation.primitive.name in ("jit", "pjit") and name.startswith((DENSE, CONV, EMBED))


def _kind(equation: core.JaxprEqn) -> tuple[str, int]:
    if not is_layer(equation):
        return (EMBED if is_lookup(equation) else DENSE), 1
    name = equation.params["name"]
    return (CONV, int(name.rsplit("_", 1)[1])) if name.startswith(CONV) else (name, 1)


def _rank(equation: core.JaxprEqn) -> int:
    return len(_shape(equation.invars[0]))


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _inline(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    # A custom derivative must survive, because the walked loss is differentiated afterwards.
    if is_layer(equation) or equation.primitive.name.startswith("custom"):
        return None
    return inner_function(equation)
