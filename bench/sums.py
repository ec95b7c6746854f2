"""Part `sums`: what a proven bound costs: clipped sums in runs and doubles beside one running sum in float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.targets import IN_RUNS, RUNNING
from bench.timing import interleaved, summaries
from silodp.doubles import Double
from silodp.gradients import clipped_sum, dense, structured


def logistic(params: Any, record: Any) -> Any:
    return jnp.logaddexp(0.0, -record[1] * dense(params["w"], params["b"], record[0])[0])


def mlp(params: Any, record: Any) -> Any:
    out = dense(params["v"], params["c"], jnp.tanh(dense(params["w"], params["b"], record[0])))
    return jax.nn.logsumexp(out) - out[0] * record[1]


def running_sum(sums: Callable[..., Any], records: Any, weights: Any, size: int, run: int) -> Any:
    """As sums were before: block after block in float32. Crafted neighbours move it by many times its bound."""
    n = weights.shape[0]
    blocks = -(-n // size)
    size = -(-n // blocks)

    def step(total: Any, block: Any) -> Any:
        start = jnp.minimum(block * size, n - size)
        take = lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size)
        fresh = start + jnp.arange(size) >= block * size
        part = sums(jax.tree.map(take, records), jnp.where(fresh, take(weights), 0))
        return jax.tree.map(lambda t, p: t + p[0], total, part), None

    shapes = jax.eval_shape(sums, jax.tree.map(lambda leaf: leaf[:size], records), weights[:size])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape[1:]), shapes)
    return jax.tree.map(Double.of, lax.scan(step, zeros, jnp.arange(blocks))[0])


def program(loss: Callable[..., Any], params: Any, records: Any, runs: bool) -> Callable[[], Any]:
    compute = lambda p, r, w: clipped_sum(loss, [p], [1.0], r, w, 1.0, engine="structured")
    given = params, records, jnp.ones(len(records[1]))
    before = mock.patch.multiple(structured, sum_in_blocks=running_sum, RUN=1 << 30)
    with nullcontext() if runs else before:
        compiled = jax.jit(compute).lower(*given).compile()
    return lambda: jax.block_until_ready(compiled(*given))


def sums(quick: bool) -> dict[str, Any]:
    """A small model with many records, and a network whose sums of runs do not fit the cache."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)
    small = {"w": draw(1, 123), "b": draw(1)}
    network = {"w": draw(100, 784), "b": draw(100), "v": draw(10, 100), "c": draw(10)}
    cases = {
        "logistic 123, 50,000 records": (logistic, small, 50_000, 123),
        "MLP 784-100-10, 6,000 records": (mlp, network, 6_000, 784),
    }
    found = {}
    for name, (loss, params, count, features) in cases.items():
        records = draw(count, features), jnp.sign(draw(count))
        programs = {RUNNING: program(loss, params, records, False), IN_RUNS: program(loss, params, records, True)}
        found[name] = summaries(interleaved(programs, 5 if quick else 40, 20.0, RUNNING), [RUNNING])
        row = found[name][IN_RUNS]
        print(f"  {name:38}{1e3 * row['cpu_s'][1]:8.2f} ms {row['over'][RUNNING]['cpu'][1]:9.2f}x", flush=True)
    return found
