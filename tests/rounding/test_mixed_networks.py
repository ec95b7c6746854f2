"""Networks of which some parameters are kept as leaves, next to layers that are summed as factors: no record counts for
more than its clip norm, and none moves the sum beyond its bound."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp import gradients
from silodp.doubles import exact
from silodp.gradients import SLACK, conv2d, dense, embed, engine_for

N = 300
WILD = (np.nan, np.inf, -np.inf, 3e38, 1e30, -1e19, 1e6, -1e3, 1.0, 1e-6, 1e-20, 1e-38, 0.0)
QUESTIONS = {"value": ((1.0,), 0.7), "difference": ((1.0, -1.0), 1e-3), "mu2": ((7.0, -6.0), 1.0)}


def normed(p: Any, record: Any) -> Any:
    """LayerNorm between two layers: scale and shift are leaves."""
    hidden = dense(p["w"], p["b"], record[0])
    centred = hidden - hidden.mean()
    hidden = p["scale"] * centred / jnp.sqrt(jnp.mean(centred**2) + 1e-5) + p["shift"]
    return one_of_four(dense(p["v"], None, jnp.tanh(hidden)), record[1])


def shared(p: Any, record: Any) -> Any:
    """One matrix in two layers is a leaf; the others are not."""
    hidden = jnp.tanh(dense(p["w"], p["b"], record[0]))
    hidden = jnp.tanh(dense(p["both"], None, hidden))
    return one_of_four(dense(p["v"], None, dense(p["both"], None, hidden)), record[1])


def tokens(p: Any, record: Any) -> Any:
    """Features become places in a table, which a scale multiplies."""
    seen = jnp.where(jnp.abs(record[0]) < 1e9, record[0], 0)
    rows = embed(p["table"], jnp.abs(jnp.rint(3 * seen)).astype(jnp.int32) % 9)
    return one_of_four(dense(p["v"], p["b"], jnp.sum(p["scale"] * rows * record[0][:, None], axis=0)), record[1])


def images(p: Any, record: Any) -> Any:
    """A convolution with a scale for each of its channels."""
    seen = p["scale"][:, None, None] * jnp.tanh(conv2d(p["k"], p["c"], record[0].reshape(1, 4, 4)))
    return one_of_four(dense(p["v"], p["b"], seen.ravel()), record[1])


def one_of_four(out: Any, target: Any) -> Any:
    return jax.nn.logsumexp(out) - out[target]


SHAPES: dict[Any, dict[str, tuple[int, ...]]] = {
    normed: {"w": (8, 16), "b": (8,), "scale": (8,), "shift": (8,), "v": (4, 8)},
    shared: {"w": (8, 16), "b": (8,), "both": (8, 8), "v": (4, 8)},
    tokens: {"table": (9, 8), "scale": (8,), "v": (4, 8), "b": (4,)},
    images: {"k": (3, 1, 2, 2), "c": (3,), "scale": (3,), "v": (4, 27), "b": (4,)},
}


@cache
def summed(network: Any, question: str) -> Any:
    """The sum over all records, and the one that counts the records of weight 1 only."""
    coefficients, clip = QUESTIONS[question]
    rng = np.random.default_rng(1)
    point = {name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES[network].items()}
    points = [point, jax.tree.map(lambda leaf: leaf * 1.01, point)][: len(coefficients)]
    run = jax.jit(lambda r, w: gradients.clipped_sum(network, points, coefficients, r, w, clip, engine="structured"))
    assert engine_for(network, point, (jnp.zeros(16), jnp.int32(0)))[1].count("per-record") == 1  # it is a mixed one

    def flat(records: Any, weights: Any) -> np.ndarray:
        parts = run(records, weights).values()
        return np.concatenate([exact(part).ravel() for part in parts])

    return flat


QUICK = ((normed, "mu2"), (shared, "value"), (tokens, "difference"), (images, "value"))


@pytest.mark.parametrize(
    ("network", "question"),
    [
        pytest.param(n, q, marks=() if (n, q) in QUICK else pytest.mark.slow, id=f"{n.__name__}-{q}")
        for n in SHAPES
        for q in QUESTIONS
    ],
)
def test_no_record_moves_the_sum_of_a_mixed_network_beyond_its_bound(network, question):
    rng, clip = np.random.default_rng(2), QUESTIONS[question][1]
    features, targets = np.float32(3 * rng.normal(size=(N, 16))), rng.integers(0, 4, N)
    everyone, one = np.ones(N, np.float32), np.eye(1, N, 37, dtype=np.float32)[0]
    sums, reached = [], []
    for wild in WILD:
        for mixed in (np.full(16, wild), np.where(np.arange(16) == 5, wild, features[37])):
            other = features.copy()
            other[37] = mixed
            sums.append(summed(network, question)((other, targets), everyone))
            reached.append(np.linalg.norm(summed(network, question)((other, targets), one)))
    assert max(reached) <= clip
    moved = [np.linalg.norm(a - b) for i, a in enumerate(sums) for b in sums[:i]]
    assert max(moved) <= 2 * clip * (1 + SLACK)
    assert max(reached) > 0.9 * clip  # these records test it
