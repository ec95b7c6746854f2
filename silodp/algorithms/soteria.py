"""The variance-reduced estimators of SoteriaFL (Li, Zhao, Li, Chi 2022, Alg. 3; Cor. 2, 3): SVRG and SAGA in the silo.

    x = x - step_size * (mean of the silos' compressed, noised g_i)          (compression: silodp.channels.compressed)

    SVRG:  g_i = mean_batch(clip(grad f(x)) - clip(grad f(w))) + mean_all(clip(grad f(w)))
           then, with probability p, w = x for everybody (one public coin)
    SAGA:  g_i = mean_batch(clip(grad f(x; z_j)) - t_j) + mean_all(t_j);  then t_j = clip(grad f(x; z_j)) in the batch

SoteriaFL-GD and -SGD are silodp.algorithms.gradient with the same channel; without compression SVRG is LDP-SVRG.

Formal guarantee: one release `value` a round. Every gradient is clipped to `clip` = G, so replacing a record of m moves
the mean by at most 2G/m unless it is drawn and 2*(2G/b - G/m) if it is: a two-level mixture, not a subsampled
Gaussian (docs/privacy.md). The anchor's full mean and SAGA's table stay in the silo and are only seen through g_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from silodp.core import Algorithm, Answer, Federation, Release, Silo, Stream, Vector
from silodp.sampling import Full, TwoLevel


class State(eqx.Module):
    x: Vector


class SVRGState(eqx.Module):
    x: Vector
    anchor: Vector
    known: Bool[Array, " silos"]  # which silos hold the full mean at the anchor


class SilosOnly(Algorithm):
    """Both estimators answer one query a round on a Poisson batch; `batch` says so to the accountant."""

    clip: Any
    batch: TwoLevel

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]

    def bounded(self, silo: Silo, value: Vector) -> Release:
        bound = jnp.inf if self.clip is None else self.clip * self.batch.bound_over_clip(silo.size)
        return Release(value, jnp.float32(bound), "value")


class Snapshot(eqx.Module):
    """SVRG's memory: the anchor and the silo's clipped mean there."""

    anchor: Vector
    mean: Vector


class SVRG(SilosOnly):
    """Differences against a snapshot that the server renews by a public coin."""

    queries: ClassVar[tuple[str, ...]] = ("estimate",)

    snapshot_probability: Any
    silos: int = eqx.field(static=True)

    def init(self, x0: Vector) -> SVRGState:
        return SVRGState(x0, x0, jnp.zeros(self.silos, bool))

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        return Snapshot(jnp.full_like(x0, jnp.nan), jnp.zeros_like(x0))  # equal to no anchor

    def round(self, state: SVRGState, fed: Federation) -> SVRGState:
        x, anchor = state.x, state.anchor
        fresh = ~jnp.all(state.known[fed.present])
        v = fed.mean(self.estimate, x, anchor, fresh)
        known = state.known.at[fed.present].set(True)
        renew = fed.coin("snapshot") < self.snapshot_probability
        return SVRGState(self.prox(x - self.step_size * v, self.step_size), jnp.where(renew, x, anchor), known & ~renew)

    def estimate(self, silo: Silo, x: Vector, anchor: Vector, fresh: Array) -> Answer:
        if silo.alone:
            # The bound needs the mean at THIS anchor: in a process of its own a silo does not take the server's word.
            fresh = jnp.any(anchor != silo.memory.anchor)
        full = lambda: silo.mean([anchor], [1.0], self.clip, "value", Full()).release().value
        silo.memory = Snapshot(anchor, silo.cond(fresh, full, lambda: silo.memory.mean))
        batch = self.batch.draw(silo, "value")
        here = silo.mean([x], [1.0], self.clip, "value", batch).release().value
        there = silo.mean([anchor], [1.0], self.clip, "value", batch).release().value
        return self.bounded(silo, here - there + silo.memory.mean)


class Table(eqx.Module):
    """SAGA's memory: each record's last clipped gradient, as factors where the engine has them, and their mean."""

    gradients: PyTree
    mean: Vector


class SAGA(SilosOnly):
    """Differences against each record's own last gradient."""

    queries: ClassVar[tuple[str, ...]] = ("estimate",)

    def init(self, x0: Vector) -> State:
        return State(x0)

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        everyone = Full().draw(silo, "value")
        gradients = silo.objective.record_factors(x0, everyone.records, everyone.weights, self.clip)
        total = silo.objective.sum_factors(gradients, everyone.weights)
        return Table(gradients, total / everyone.divisor)

    def round(self, state: State, fed: Federation) -> State:
        v = fed.mean(self.estimate, state.x)
        return State(self.prox(state.x - self.step_size * v, self.step_size))

    def estimate(self, silo: Silo, x: Vector) -> Answer:
        table, objective = silo.memory, silo.objective
        batch = self.batch.draw(silo, "value")
        silo.account = silo.account.work(batch.divisor)
        new = objective.record_factors(x, batch.records, batch.weights, self.clip)
        old = jax.tree.map(lambda leaf: jnp.take(leaf, batch.rows, axis=0, mode="clip"), table.gradients)
        change = objective.sum_factors(new, batch.weights) - objective.sum_factors(old, batch.weights)
        kept = jax.tree.map(lambda t, n: t.at[batch.rows].set(n, mode="drop"), table.gradients, new)
        silo.memory = Table(kept, table.mean + change / silo.size)
        return self.bounded(silo, change / batch.divisor + table.mean)
