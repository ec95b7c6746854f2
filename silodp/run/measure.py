"""What a run reports about a point: objective, stationarity, test metric.

These numbers are computed on the private records by whoever holds all of them. In a simulation they are free; they are
not part of what the guarantee covers, and every report says so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.core import Algorithm, Vector
from silodp.objective import ModelObjective
from silodp.prox import NoProx
from silodp.run.federation import Silos

CHUNK = 8192  # records evaluated at a time, which bounds the memory of a measurement


def measure(
    objective: ModelObjective, silos: Silos, test: PyTree | None, algorithm: Algorithm, x: Vector
) -> dict[str, Float[Array, ""]]:
    """F + psi, |grad F|^2 (or of the proximal gradient mapping), and the mean loss and metric on the test set."""
    value, gradient = value_and_gradient(objective, silos, x)
    moved = algorithm.prox(x - algorithm.step_size * gradient, algorithm.step_size)
    mapping = gradient if isinstance(algorithm.prox, NoProx) else (x - moved) / algorithm.step_size
    row = {"objective": value + algorithm.prox.penalty(x), "gradient_norm2": jnp.sum(mapping**2)}
    if test is not None:
        row["test_loss"] = jnp.mean(objective.losses(x, test))
    if test is not None and objective.model.metric is not None:
        features, targets = test
        row["test_" + objective.model.metric] = objective.model.evaluate(objective.unravel(x), features, targets)
    return row


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
