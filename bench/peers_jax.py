"""Peers in JAX: silodp's two engines, the plain gradient, jax-privacy, and per-record gradients by vmap."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.peer import Build, Peer
from bench.timing import clock
from bench.workloads import Loss, Workload
from silodp.doubles import highs
from silodp.gradients import clipped_sum, engine_for

SIGNS = [1.0, -1.0]
MICROBATCHES = (8, 64)  # sizes tried with jax-privacy, nearly
OPTIONS: dict[str, str | bool] = {}  # of the compiler, beside its own defaults (bench.flags)


def record_gradients(work: Workload, at: Any, records: Any) -> tuple[Any, Any]:
    """Every record's gradient (at two points: their difference), and its norm."""
    grads = [jax.vmap(jax.grad(work.written), in_axes=(None, 0))(x, records) for x in at]
    rows = grads[0] if len(at) == 1 else jax.tree.map(jnp.subtract, *grads)
    return rows, jnp.sqrt(sum(jnp.square(leaf).reshape(len(leaf), -1).sum(axis=1) for leaf in jax.tree.leaves(rows)))


@cache
def clip_of(work: Workload, points: int) -> float:
    """The median norm of some records' gradients (or differences): about half of them are clipped."""
    _, norms = record_gradients(work, work.points(points), (work.features[:64], work.targets[:64]))
    return float(jnp.median(norms))


def compiled(work: Workload, points: int, program: Callable[..., Any], clipped: bool = True, note: str = "") -> Peer:
    """`program(points, records)` gives the mean."""
    at = jax.tree.map(jnp.asarray, tuple(work.points(points)))
    records = (jnp.asarray(work.features), jnp.asarray(work.targets))
    began = time.perf_counter()
    ready: Any = jax.jit(program).lower(at, records).compile(OPTIONS or None)
    seconds = time.perf_counter() - began
    memory = ready.memory_analysis().temp_size_in_bytes / 1e6
    run = lambda: jax.block_until_ready(ready(at, records))
    return Peer(run, lambda tree: jax.tree.map(np.asarray, tree), clipped, note, memory, seconds)


def engine(name: str, work: Workload, points: int) -> Peer | None:
    clip, count = clip_of(work, points), work.records
    record = work.features[0], work.targets[0]
    chosen, why = engine_for(work.model.loss, work.point(0), record)
    if name == chosen:
        return None  # "auto" is the same program
    note = f"the {chosen} engine: {why}" if name == "auto" else ""

    def program(at: Any, records: Any) -> Any:
        total = clipped_sum(work.model.loss, at, SIGNS[:points], records, jnp.ones(count), clip, engine=name)
        return jax.tree.map(lambda leaf: leaf / count, highs(total))

    return compiled(work, points, program, note=note)


def plain(loss_of: Callable[[Workload], Loss], work: Workload, points: int) -> Peer:
    """ONE gradient of the mean loss, at the first point, whatever the number of points."""
    loss = loss_of(work)
    mean = lambda params, records: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, records))
    return compiled(work, 1, lambda at, records: jax.grad(mean)(at[0], records), clipped=False)


def own_layers(work: Workload, points: int) -> Peer | None:
    """Networks with silodp's convolution (the others are the same program as the hand-written loss)."""
    return plain(lambda w: w.model.loss, work, points) if work.kind == "cnn" else None


def combined_loss(work: Workload) -> Callable[..., Any]:
    """A function of a shift whose gradient at 0 is the combination of the gradients at the points."""
    loss = work.written
    add = lambda x, u: jax.tree.map(jnp.add, x, u)
    return lambda u, at, record: sum(s * loss(add(x, u), record) for s, x in zip(SIGNS, at, strict=False))


def jax_privacy(work: Workload, points: int, microbatch: int | None = None) -> Peer | None:
    from jax_privacy import clipped_grad

    if microbatch is None and not work.all_fit:
        return None

    options: dict[str, Any] = {
        "l2_clip_norm": clip_of(work, points), "normalize_by": float(work.records), "keep_batch_dim": False,
        "microbatch_size": microbatch,
    }  # fmt: skip
    if points == 1:
        gradient = clipped_grad(work.written, **options)
        return compiled(work, points, lambda at, records: gradient(at[0], records))
    shifted = clipped_grad(combined_loss(work), batch_argnums=2, **options)
    zero = lambda at: jax.tree.map(jnp.zeros_like, at[0])
    note = "of the difference of two losses, as a function of a common shift"
    return compiled(work, points, lambda at, records: shifted(zero(at), at, records), note=note)


def jax_privacy_in_microbatches(work: Workload, points: int) -> Peer:
    """The quicker of two sizes; it takes only those that divide the records."""
    divisors = [size for size in range(2, work.records) if work.records % size == 0]
    sizes = {min(divisors, key=lambda size: abs(log(size / wanted))) for wanted in MICROBATCHES}
    tried = {size: peer for size in sizes if (peer := jax_privacy(work, points, size)) is not None}
    best = min(tried, key=lambda size: clock(tried[size].run)[0])
    listed = " and ".join(map(str, sorted(sizes)))
    return replace(tried[best], note=f"microbatch_size {best}, the quicker of {listed}")


def vmapped(work: Workload, points: int) -> Peer | None:
    """Per-record gradients by vmap, clipped and averaged."""
    if not work.all_fit:
        return None
    clip = clip_of(work, points)

    def program(at: Any, records: Any) -> Any:
        rows, norms = record_gradients(work, at, records)
        factors = jnp.minimum(1, clip / norms) / work.records
        return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), rows)

    return compiled(work, points, program)


PEERS: dict[str, Build] = {
    "plain gradient, JAX": partial(plain, lambda work: work.written),
    "plain gradient, JAX, silodp's layers": own_layers,
    "silodp": partial(engine, "auto"),
    "silodp general": partial(engine, "general"),
    "JAX vmap": vmapped,
    "jax-privacy clipped_grad": jax_privacy,
    "jax-privacy, microbatches": jax_privacy_in_microbatches,
}
