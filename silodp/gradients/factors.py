"""Per-record gradients of one layer without building them: what their norms and weighted sums need.

Factors of dense layers have the records last, as products give them; what is kept record by record has them first.

A record's gradient of a dense layer is an outer product of output cotangent b and input a. A combination over points is
a sum of such products,  sum_k c_k b_k a_k^T = (C b_y + sum_k c_k (b_k - b_y)) a_y^T + sum_k c_k b_k (a_k - a_y)^T  with
C = sum_k c_k and y the last point, so that nothing large cancels for nearby points; the terms are then made
orthogonal, so that the norm is a sum of squares (and of what rounding left of their products), of exactly the terms
that are summed.
The gradients of a convolution's kernel, and of parameters that no layer has to itself, are kept record by record,
within the block of records at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from silodp.doubles import rounded
from silodp.gradients.blocks import in_runs, weighted_rows
from silodp.gradients.layers import CONV, EMBED, LEAF
from silodp.gradients.structure import Layer

PerRecord = Float[Array, " n"]
COMPARED = 128  # positions: more are sorted sooner than compared with each other
TINY, EPSILON = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).eps)


class Term(NamedTuple):
    """One product cotangent x input per record; `constant` is the input that the bias sees: 1, or 0 in a difference."""

    inputs: Array
    constant: PerRecord
    cotangents: Array


class DenseFactors(eqx.Module):
    """Outer products: gradient of record j = sum over terms of cotangents[:, j] (inputs[:, j], constant[j])^T."""

    axis: ClassVar[int] = -1  # of the records
    terms: tuple[Term, ...]
    has_bias: bool = eqx.field(static=True)
    on_record: bool = eqx.field(static=True)

    def square_norms(self) -> PerRecord:
        """The terms' inputs are orthogonal, unless one is but what rounding left of it: then the product counts too."""
        each = [self._square_of(t) for t in self.terms]
        for s, t in combinations(self.terms, 2):
            each.append(2 * self._product_of(s, t))
        return sum(each[1:], each[0])

    def _square_of(self, t: Term) -> PerRecord:
        # A square lost to underflow counts as the largest it may have been: the other factor may be huge.
        outputs, inputs = self._underflown(t)
        return (_square(t.cotangents) + outputs) * (self._dot(t, t) + inputs)

    def _product_of(self, s: Term, t: Term) -> PerRecord:
        """At most this much; a negative product would cancel: left out, the norm is overstated."""
        of_outputs, of_inputs = jnp.sum(s.cotangents * t.cotangents, axis=0), self._dot(s, t)
        outputs, inputs = self._underflown(t)
        lost = jnp.abs(of_outputs) * inputs + (jnp.abs(of_inputs) + inputs) * outputs
        return jnp.maximum(of_outputs * of_inputs, 0) + lost

    def _underflown(self, t: Term) -> tuple[float, float]:
        """The most that sums of products of outputs, and of inputs, lose to underflow."""
        return t.cotangents.shape[0] * TINY, (t.inputs.size // t.cotangents.shape[-1] + 1) * TINY

    def inner(self, weight: Array, bias: Array | None) -> PerRecord:
        total = jnp.zeros(())
        for t in self.terms:
            seen = (t.inputs.T @ weight.T).T
            seen = seen if bias is None else seen + bias[:, None] * t.constant
            total += jnp.sum(t.cotangents * seen, axis=0)
        return total

    @property
    def addends(self) -> int:
        """Products of terms add what rounding left of them, at most as much again for each further term."""
        one = self.terms[0]
        return len(self.terms) * ((one.cotangents.size + one.inputs.size) // one.constant.shape[0] + 4)

    def run_sums(self, scale: PerRecord, run: int) -> tuple[Array, Array | None]:
        sums = [self._sums_of(t, t.cotangents * scale, run) for t in self.terms]
        weight, bias = (reduce(jnp.add, map(rounded, parts)) for parts in zip(*sums, strict=True))
        return weight, bias if self.has_bias else None

    def _sums_of(self, t: Term, scaled: Array, run: int) -> tuple[Array, Array]:
        if scaled.shape[-1] <= run:
            return (scaled @ t.inputs.T)[None], (scaled @ t.constant)[None]
        runs, inputs = in_runs(scaled, 1, run), in_runs(t.inputs.T, 0, run)
        bias = jnp.sum(runs * in_runs(t.constant, 0, run), axis=2).T
        if len(scaled) == 1:  # products with vectors, which XLA has other loops for
            return jnp.einsum("rj,rji->ri", runs[0], inputs)[:, None], bias
        return jnp.einsum("orj,rji->roi", runs, inputs), bias

    def scaled(self, scale: PerRecord) -> DenseFactors:
        terms = (Term(t.inputs, t.constant, t.cotangents * scale) for t in self.terms)
        return DenseFactors(tuple(terms), self.has_bias, self.on_record)

    def orthogonal(self) -> DenseFactors:
        done: list[Term] = []
        for term in self.terms:
            for i, earlier in enumerate(done):
                done[i], term = self._split(earlier, term)
            done.append(term)
        return DenseFactors(tuple(done), self.has_bias, self.on_record)

    def _split(self, first: Term, second: Term) -> tuple[Term, Term]:
        size = self._dot(first, first)
        share = jnp.where(size > 0, self._dot(first, second) / jnp.where(size > 0, size, 1), 0)
        rest = Term(second.inputs - share * first.inputs, second.constant - share * first.constant, second.cotangents)
        return first._replace(cotangents=first.cotangents + share * second.cotangents), rest

    def _dot(self, s: Term, t: Term) -> PerRecord:
        # Features are stored record by record: summed along their rows.
        inputs = jnp.sum(s.inputs.T * t.inputs.T, axis=1) if self.on_record else jnp.sum(s.inputs * t.inputs, axis=0)
        return inputs + s.constant * t.constant if self.has_bias else inputs


class KeptGradients(eqx.Module):
    """Gradients record by record: of a convolution's kernel, or of a parameter that no layer has to itself."""

    axis: ClassVar[int] = 0
    weight: Float[Array, "n *shape"]
    bias: Float[Array, "n outputs"] | None

    def square_norms(self) -> PerRecord:
        return _square_rows(self.weight) + (0 if self.bias is None else _square_rows(self.bias))

    def inner(self, weight: Array, bias: Array | None) -> PerRecord:
        total = jnp.tensordot(self.weight, weight, weight.ndim)
        return total if self.bias is None or bias is None else total + self.bias @ bias

    @property
    def addends(self) -> int:
        return self.weight[0].size + 1

    def run_sums(self, scale: PerRecord, run: int) -> tuple[Array, Array | None]:
        sums = lambda leaf: weighted_rows(scale, leaf, run)
        return sums(self.weight), None if self.bias is None else sums(self.bias)

    def scaled(self, scale: PerRecord) -> KeptGradients:
        return jax.tree.map(lambda leaf: leaf * _along(scale, leaf), self)


class RowFactors(eqx.Module):
    """An embedding's gradients: cotangents that are added to rows. Those of one row stand, added up, where a record
    looks it up first: nearly opposite ones cancel before they are squared, clipped or rounded against other records."""

    axis: ClassVar[int] = 0
    index: Int[Array, "n positions"]
    cotangents: Float[Array, "n positions width"]
    rows: int = eqx.field(static=True)

    def square_norms(self) -> PerRecord:
        return _square_rows(self.cotangents)

    def inner(self, weight: Array, bias: Array | None) -> PerRecord:
        return jnp.einsum("npw,npw->n", self.cotangents, weight[self.index])

    @property
    def addends(self) -> int:
        return self.cotangents[0].size

    def run_sums(self, scale: PerRecord, run: int) -> tuple[Array, Array | None]:
        updates = self.cotangents * _along(scale, self.cotangents)
        zeros = jnp.zeros((self.rows, updates.shape[-1]))
        of_run = lambda index, update: zeros.at[index].add(update, mode="promise_in_bounds")
        if len(updates) <= run:
            return of_run(self.index, updates)[None], None
        return jax.vmap(of_run)(in_runs(self.index, 0, run), in_runs(updates, 0, run)), None

    def scaled(self, scale: PerRecord) -> RowFactors:
        return RowFactors(self.index, self.cotangents * _along(scale, self.cotangents), self.rows)


def added_by_row(index: Int[Array, "n positions"], cotangents: Float[Array, "n positions width"], rows: int) -> Array:
    """At the first position of a row the sum of the row's cotangents, at its later ones zero.

    What a record looks up again is moved one position at a time, in all records at once: as many times as the record
    with most of them needs. In the others nothing is moved, and nothing added is exact.
    """
    count, first, later = repeats(index, rows)
    record = jnp.arange(len(index))

    def move(k: Array, kept: Array) -> Array:
        there, to = later[:, k], first[:, k]
        moved = jnp.where((k < count)[:, None], kept[record, there], 0)
        return kept.at[record, to].add(moved).at[record, there].add(-moved)

    return lax.fori_loop(0, jnp.max(count), move, cotangents)


def repeats(index: Int[Array, "n positions"], rows: int) -> tuple[Int[Array, " n"], Array, Array]:
    """How many positions of a record look up a row again; the first position of that row, and theirs, in order."""
    positions = index.shape[1]
    first, at = _compared(index) if positions <= COMPARED else _sorted(index, rows)
    again = first != at
    pair = jnp.where(again, first * positions + at, positions**2)
    first, later = jnp.divmod(jnp.sort(pair, axis=1), positions)
    return jnp.sum(again, axis=1), jnp.minimum(first, positions - 1), later


def _compared(index: Int[Array, "n positions"]) -> tuple[Array, Array]:
    """Where the row of each position stands first, and the position: all positions are compared with each."""
    place = jnp.broadcast_to(jnp.arange(index.shape[1]), index.shape)

    def earlier(k: Array, first: Array) -> Array:
        return jnp.where((index == lax.dynamic_slice_in_dim(index, k, 1, 1)) & (first > k), k, first)

    return lax.fori_loop(0, index.shape[1], earlier, place), place


def _sorted(index: Int[Array, "n positions"], rows: int) -> tuple[Array, Array]:
    """The same, by row."""
    positions = index.shape[1]
    place = jnp.arange(positions)
    if rows * positions < 1 << 31:  # as one number: sorts of pairs are slow
        row, at = jnp.divmod(jnp.sort(index * positions + place, axis=1), positions)
    else:
        row, at = lax.sort((index, jnp.broadcast_to(place, index.shape)), num_keys=2)
    again = jnp.pad(row[:, 1:] == row[:, :-1], ((0, 0), (1, 0)))
    begun = lax.cummax(jnp.where(again, 0, place), axis=1)
    return jnp.take_along_axis(at, begun, axis=1), at


Factors = DenseFactors | KeptGradients | RowFactors


def make_factors(layer: Layer, weight: Array, terms: Sequence[tuple[Array, Array]]) -> Factors:
    """From (input, cotangent) terms of a block of records; the first is the base point's, the others differences."""
    # A model may hold half precision weights: squares would vanish, and with them the norm.
    single = lambda values: values.astype(jnp.float32)
    if layer.kind == EMBED:
        (index, cotangents), *_ = terms
        rows, n = weight.shape[0], cotangents.shape[0]
        flat = jnp.clip(index.reshape(n, -1), 0, rows - 1)
        added = added_by_row(flat, single(cotangents).reshape(n, -1, weight.shape[1]), rows)
        return RowFactors(flat, added, rows)
    terms = [(single(a), single(b)) for a, b in terms]
    if layer.kind == LEAF:
        return KeptGradients(terms[0][1], None)
    if layer.kind == CONV:
        kernels = [_kernel_gradients(a, b, layer.stride, weight.shape[2:]) for a, b in terms]
        bias = None if layer.bias is None else jnp.sum(terms[0][1], axis=(1, 2)).T
        return KeptGradients(sum(kernels[1:], kernels[0]), bias)
    ones = jnp.ones(terms[0][0].shape[-1])
    listed = (Term(a, ones if i == 0 else 0 * ones, b) for i, (a, b) in enumerate(terms))
    return DenseFactors(tuple(listed), layer.bias is not None, layer.on_record).orthogonal()


def _kernel_gradients(inputs: Array, cotangents: Array, stride: int, size: tuple[int, ...]) -> Array:
    """Correlate each record's input with its cotangents: one small product per record and kernel row."""
    outputs, height, width, n = cotangents.shape
    below = jnp.moveaxis(cotangents, -1, 0).reshape(n, outputs, height * width)
    window = lambda start, length: slice(start, start + (length - 1) * stride + 1, stride)
    images = jnp.moveaxis(inputs, -1, 0)
    shifted = jnp.stack([images[..., window(column, width)] for column in range(size[1])], axis=2)
    shifted = shifted.reshape(n, -1, *shifted.shape[3:])
    rows = [shifted[:, :, window(row, height)].reshape(n, -1, height * width) for row in range(size[0])]
    each = jnp.stack([jnp.einsum("nop,nqp->noq", below, row) for row in rows], axis=2)
    return each.reshape(n, outputs, size[0], -1, size[1]).transpose(0, 1, 3, 2, 4)


def computed(layer: Layer, factors: Factors) -> Any:
    """Which of its arrays hold computed numbers, not features or indices as they came, nor the ones of a bias."""
    numbers = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), factors)
    if not isinstance(factors, DenseFactors):
        return numbers
    came = lambda own: (own.terms[0].inputs, own.terms[0].constant)
    return eqx.tree_at(came, numbers, (not layer.as_it_came, False))


def keep_only(factors: Factors, kept: Bool[Array, " n"]) -> Factors:
    """Zero every other record, also where it is not finite: 0 * inf would spoil the sum."""
    along = lambda leaf: _along(kept, leaf) if factors.axis == 0 else kept
    clean: Any = lambda leaf: jnp.where(along(leaf), leaf, jnp.zeros_like(leaf))
    return jax.tree.map(clean, factors)


def of_silos(factors: Factors, silos: int) -> Factors:
    """Of records of several silos, equally many of each: the silos on an axis of their own before the records'."""
    if factors.axis == 0:
        return jax.tree.map(lambda leaf: leaf.reshape(silos, -1, *leaf.shape[1:]), factors)
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-1], silos, -1), factors)


def records_first(factors: Factors) -> Factors:
    return factors if factors.axis == 0 else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0), factors)


def as_computed(factors: Factors) -> Factors:
    """What `records_first` gave, back."""
    return factors if factors.axis == 0 else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), factors)


def turn_features(factors: Factors) -> Factors:
    """A layer's inputs records first, or back, if they are features."""
    if not isinstance(factors, DenseFactors) or not factors.on_record:
        return factors
    terms = (term._replace(inputs=term.inputs.T) for term in factors.terms)
    return DenseFactors(tuple(terms), factors.has_bias, factors.on_record)


def _along(values: Array, leaf: Array) -> Array:
    """A number for each record, against a leaf with records first."""
    return values.reshape(-1, *(1,) * (leaf.ndim - 1))


def _square_rows(x: Array) -> PerRecord:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _square(x: Array) -> PerRecord:
    return jnp.sum(x * x, axis=tuple(range(x.ndim - 1)))
