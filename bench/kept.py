"""What keeping the previous point may gain: differences from its kept activations and cotangents, by hand.

One version, for dense networks with one hidden layer, on full batches: everything of the previous point that the
difference needs is read instead of computed, and written for the next round. silodp does not work like this
(docs/performance.md says why); its factors, norms and sums are used for the rest.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.peer import Peer
from bench.peers_numpy import clip_of
from bench.workloads import Workload
from silodp.gradients.blocks import clip_factor
from silodp.gradients.factors import make_factors
from silodp.gradients.softplus import slope, slope_change, softplus, softplus_change
from silodp.gradients.structure import Structure, find_structure
from silodp.gradients.structured import block_size, sum_layers

NOTE = "not in silodp: what the previous point needs is read from the last run and written for the next"


class Kept(NamedTuple):
    """Of a block at one point, records last."""

    scores: Any  # into the hidden layer
    active: Any  # its activation
    slope: Any
    back: Any  # what comes back to it from the outputs
    chances: Any  # the outputs' probabilities; nothing for a squared loss
    cotangents: Any  # of the outputs


def first_values(work: Workload, params: Any, features: Any, targets: Any) -> Kept:
    hidden, last = params.values()
    scores = hidden["weight"] @ features.T + hidden["bias"][:, None]
    active = slope(scores) if work.activation == "sigmoid" else softplus(scores)
    steep = active * (1 - active) if work.activation == "sigmoid" else slope(scores)
    out = last["weight"] @ active + last["bias"][:, None]
    if work.loss == "squared":
        chances, cotangents = jnp.zeros((0, len(features))), 2 * (out - targets)
    else:
        chances = jax.nn.softmax(out, axis=0)
        cotangents = chances - jax.nn.one_hot(targets, len(out), axis=0)
    return Kept(scores, active, steep, last["weight"].T @ cotangents, chances, cotangents)


def changes(work: Workload, new: Any, old: Any, features: Any, at: Kept) -> Kept:
    """new - old of everything kept, from changes alone: nothing large is subtracted."""
    (_, last), (first, second) = new.values(), jax.tree.map(jnp.subtract, new, old).values()
    scores = first["weight"] @ features.T + first["bias"][:, None]
    if work.activation == "sigmoid":
        active = slope_change(at.scores, scores, None)
        steep = active * (1 - 2 * at.active - active)
    else:
        active, steep = softplus_change(at.scores, scores, None), slope_change(at.scores, scores, None)
    out = last["weight"] @ active + second["weight"] @ at.active + second["bias"][:, None]
    if work.loss == "squared":
        chances, cotangents = at.chances, 2 * out
    else:
        grown = jnp.expm1(out)
        mean = jnp.sum(at.chances * grown, axis=0)
        chances = cotangents = at.chances * (grown - mean) / (1 + mean)
    back = last["weight"].T @ cotangents + second["weight"].T @ at.cotangents
    return Kept(scores, active, steep, back, chances, cotangents)


def block_sum(work: Workload, structure: Structure, clip: float, new: Any, old: Any, block: Any) -> tuple[Any, Kept]:
    """The block's sum of clipped differences, and what is kept for the next round."""
    features, at = block
    change = changes(work, new, old, features, at)
    after = jax.tree.map(jnp.add, at, change)
    below = change.back * after.slope + at.back * change.slope
    terms = [[(features.T, below)], [(at.active, change.cotangents), (change.active, after.cotangents)]]
    leaves = jax.tree.leaves(new)
    layers = [make_factors(own, leaves[own.weight], t) for own, t in zip(structure.layers, terms, strict=True)]
    factor = clip_factor(sum((layer.square_norms() for layer in layers), jnp.zeros(())), jnp.float32(clip))
    return sum_layers(structure.layers, layers, factor, new), after


def kept_differences(work: Workload, points: int) -> Peer | None:
    if points == 1 or len(work.point(0)) != 2:
        return None
    new, old = (jax.tree.map(jnp.asarray, point) for point in work.points(2))
    structure = find_structure(work.model.loss, new, (work.features[0], work.targets[0]))
    divisors = [size for size in range(1, work.records + 1) if work.records % size == 0]
    size = min(divisors, key=lambda size: abs(np.log(size / block_size(structure, 2))))
    cut = lambda leaf: jnp.asarray(leaf).reshape(-1, size, *leaf.shape[1:])
    features, targets, clip = cut(work.features), cut(work.targets), clip_of(work, 2)

    def program(new: Any, old: Any, features: Any, kept: Kept) -> tuple[Any, Kept]:
        def step(total: Any, block: Any) -> tuple[Any, Kept]:
            part, after = block_sum(work, structure, clip, new, old, block)
            return jax.tree.map(jnp.add, total, part), after

        zeros = [jnp.zeros(leaf.shape) for leaf in jax.tree.leaves(new)]
        total, after = lax.scan(step, zeros, (features, kept))
        return jax.tree.unflatten(jax.tree.structure(new), [leaf / work.records for leaf in total]), after

    kept = jax.jit(jax.vmap(lambda f, t: first_values(work, old, f, t)))(features, targets)
    began = time.perf_counter()
    ready: Any = jax.jit(program, donate_argnums=3).lower(new, old, features, kept).compile()
    state = {"kept": kept, "new": new, "old": old, "sign": -1.0}

    def run() -> Any:
        """There and back again: each run starts where the last one ended, as rounds do."""
        mean, state["kept"] = jax.block_until_ready(ready(state["new"], state["old"], features, state["kept"]))
        state["new"], state["old"], state["sign"] = state["old"], state["new"], -state["sign"]
        return mean

    read = lambda mean: jax.tree.map(lambda leaf: state["sign"] * np.asarray(leaf), mean)
    memory = ready.memory_analysis().temp_size_in_bytes / 1e6
    return Peer(run, read, note=NOTE, temporary_mb=memory, compile_seconds=time.perf_counter() - began)
