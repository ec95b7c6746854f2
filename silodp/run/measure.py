"""What a run reports about a point: objective, stationarity, test metric.

These numbers are computed on the private records by whoever holds all of them. In a simulation they are free; they are
not part of what the guarantee covers, and every report says so. The same holds for a user's own metrics and for the
columns of single silos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.objective import ModelObjective
from silodp.prox import NoProx
from silodp.releases import Vector
from silodp.run.federation import Silos

CHUNK = 8192  # records evaluated at a time, which bounds the memory of a measurement
COSTS = ("bits_up", "bits_down", "record_gradients")
COLUMNS = ("round", "objective", "gradient_norm2", *COSTS)  # beside test_...


class Records(NamedTuple):
    features: PyTree
    targets: PyTree


class MetricData(NamedTuple):
    """What a metric of the user's own sees: all silos' records together, the test records, each silo's own."""

    train: Records
    test: Records | None
    silos: Mapping[str, Records]


Metric = Callable[[PyTree, MetricData], Any]


@dataclass(frozen=True)
class Wanted:
    """What is measured beside the library's own columns: metrics by name, and whether every silo has columns."""

    metrics: tuple[tuple[str, Metric], ...] = ()
    silos: tuple[tuple[str, int], ...] = ()  # names and sizes
    per_silo: bool = False


def named_metrics(metrics: Mapping[str, Metric] | None) -> tuple[tuple[str, Metric], ...]:
    """The metrics, when their names are free and they can be called."""
    for name, metric in (metrics or {}).items():
        if name in COLUMNS or "/" in name or name.startswith("test_"):
            # A private selection trusts that a test_ column was measured on public records.
            raise ConfigError(f"metrics: {name!r} is a name of the library's own columns; give another")
        if not callable(metric):
            raise ConfigError(f"metrics: {name!r} is {type(metric).__name__}; give a function of (params, data)")
    return tuple((metrics or {}).items())


def measure(
    objective: ModelObjective,
    silos: Silos,
    test: PyTree | None,
    algorithm: Algorithm,
    x: Vector,
    wanted: Wanted | None = None,
) -> dict[str, Float[Array, ""]]:
    """F + psi, |grad F|^2 (or of the proximal gradient mapping), the mean loss and metric on the test set, and what is
    wanted beside."""
    value, gradient = value_and_gradient(objective, silos, x)
    psi = algorithm.psi
    moved = psi(x - algorithm.step_size * gradient, algorithm.step_size)
    mapping = gradient if isinstance(psi, NoProx) else (x - moved) / algorithm.step_size
    row = {"objective": value + psi.penalty(x), "gradient_norm2": jnp.sum(mapping**2)}
    if test is not None:
        row["test_loss"] = jnp.mean(objective.losses(x, test))
    if test is not None and objective.model.metric is not None:
        features, targets = test
        row["test_" + objective.model.metric] = objective.model.evaluate(objective.unravel(x), features, targets)
    if wanted is not None and wanted.metrics:
        row |= own_metrics(objective, silos, test, x, wanted)
    if wanted is not None and wanted.per_silo:
        row |= silo_columns(objective, silos, psi.penalty(x), x, [name for name, _ in wanted.silos])
    return row


def own_metrics(
    objective: ModelObjective, silos: Silos, test: PyTree | None, x: Vector, wanted: Wanted
) -> dict[str, Float[Array, ""]]:
    pick = lambda i, size: Records(*jax.tree.map(lambda leaf: leaf[i, :size], silos.records))
    each = {name: pick(i, size) for i, (name, size) in enumerate(wanted.silos)}
    train = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each.values())
    data = MetricData(train, None if test is None else Records(*test), each)
    return {name: number(name, metric(objective.unravel(x), data)) for name, metric in wanted.metrics}


def number(name: str, value: Any) -> Float[Array, ""]:
    value = jnp.asarray(value)
    if value.shape:
        raise ConfigError(f"metrics: {name!r} gives shape {value.shape}; return one number")
    return value.astype(jnp.float32)


def silo_columns(
    objective: ModelObjective, silos: Silos, penalty: Any, x: Vector, names: list[str]
) -> dict[str, Float[Array, ""]]:
    """F_i + psi and the model's metric on every silo's own records."""
    model, params = objective.model, objective.unravel(x)

    def values(record: PyTree) -> dict[str, Array]:
        one = jax.tree.map(lambda leaf: leaf[None], record)
        loss = {"objective": objective.losses(x, one)[0]}
        return loss if model.metric is None else loss | {model.metric: model.evaluate(params, *one)}

    records, weights = flattened(silos)
    each = jax.lax.map(values, records, batch_size=CHUNK)
    mean = lambda leaf: jnp.where(weights > 0, leaf, 0.0).reshape(len(silos), -1).sum(axis=1) / silos.sizes
    means = {column: mean(leaf) for column, leaf in each.items()}
    means["objective"] += penalty
    return {f"{column}/{name}": leaf[i] for column, leaf in means.items() for i, name in enumerate(names)}


def value_and_gradient(objective: ModelObjective, silos: Silos, x: Vector) -> tuple[Float[Array, ""], Vector]:
    """F(x) = sum_i w_i mean_j f(x; z_ij) and its gradient, a chunk of records at a time."""
    records, weights = flattened(silos)
    count = weights.shape[0]
    chunk = -(-count // -(-count // CHUNK))

    def part(x: Vector, records: PyTree, weights: Array) -> Float[Array, ""]:
        return jnp.sum(jnp.where(weights > 0, weights * objective.losses(x, records), 0.0))

    def add(i: Array, total: tuple[Array, Vector]) -> tuple[Array, Vector]:
        # Pieces are cut out where they lie: padding all records to whole chunks would copy them. The last piece
        # starts early enough to be whole, and what the one before has counted weighs nothing in it.
        first = jnp.minimum(i * chunk, count - chunk)
        piece, own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, chunk), (records, weights))
        fresh = first + jnp.arange(chunk) >= i * chunk
        value, gradient = jax.value_and_grad(part)(x, piece, jnp.where(fresh, own, 0.0))
        return total[0] + value, total[1] + gradient

    return jax.lax.fori_loop(0, -(-count // chunk), add, (jnp.zeros(()), jnp.zeros_like(x)))


def flattened(silos: Silos) -> tuple[PyTree, Float[Array, " n"]]:
    """All silos' rows in one line, each with its weight in F (padding has none)."""
    length = jax.tree.leaves(silos.records)[0].shape[1]
    share = (silos.weights / silos.weights.sum() / silos.sizes)[:, None]
    weights = jnp.where(jnp.arange(length) < silos.sizes[:, None], share, 0.0).reshape(-1)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), silos.records), weights
