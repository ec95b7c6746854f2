"""The variance-reduced estimators of SoteriaFL (Li, Zhao, Li, Chi 2022, Alg. 3; Cor. 2, 3): SVRG and SAGA in the silo.

    x = x - step_size * (mean of the silos' compressed, noised g_i)          (compression: silodp.channels.compressed)

    SVRG:  g_i = mean_batch(clip(grad f(x)) - clip(grad f(w))) + mean_all(clip(grad f(w)))
           then, with probability p, w = x for everybody (one public coin)
    SAGA:  g_i = mean_batch(clip(grad f(x; z_j)) - t_j) + mean_all(t_j);  then t_j = clip(grad f(x; z_j)) in the batch

SoteriaFL-GD and -SGD are silodp.algorithms.gradient with the same channel; without compression SVRG is LDP-SVRG.

Formal guarantee: one release `value` a round. Every gradient is clipped to `clip` = G, so replacing a record of m moves
the mean by at most 2G/m unless it is drawn and 2*(2G/b - G/m) if it is: a two-level mixture, not a subsampled
Gaussian (docs/privacy.md). SVRG computes a gradient at the anchor twice, and rounding may turn one of the two: there it
is 2*(2G/b + G/m). The anchor's full mean and SAGA's table stay in the silo and are only seen through g_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from silodp.algorithms import theory
from silodp.algorithms.entry import Case, Entry, Printed
from silodp.algorithms.gradient import GradientDescent, State
from silodp.algorithms.papers import SOTERIA
from silodp.algorithms.proofs import CLIP, WHOLE_STEP, at_least, at_most, step
from silodp.algorithms.theory import Choice, horizon, whole
from silodp.core import NUMBER, POINT, Algorithm, Federation, Silo
from silodp.doubles import Double
from silodp.facts import Stream
from silodp.releases import Answer, Release, Vector
from silodp.sampling import Full, Recomputed, TwoLevel

SHORT_RUN, RENEWED = 8, 64  # see `Table`


class SVRGState(eqx.Module):
    x: Vector
    anchor: Vector
    known: Bool[Array, " silos"]  # which silos hold the full mean at the anchor
    kept: PyTree = ()  # by the server's optimiser


class SilosOnly(Algorithm):
    """Both estimators answer one query a round on a Poisson batch; `batch` says so to the accountant."""

    steps: ClassVar[bool] = True

    clip: Any
    batch: TwoLevel

    def stream_of(self, query: str) -> str:
        return "value"

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.rule)]

    @property
    def rule(self) -> TwoLevel:
        """What the accountant and the noise know of the batch."""
        return self.batch

    def bounded(self, silo: Silo, value: Double) -> Release:
        bound = jnp.inf if self.clip is None else self.clip * self.rule.bound_over_clip(silo.size)
        return Release(value.high, jnp.float32(bound), "value", rest=value.low)


class Snapshot(eqx.Module):
    """SVRG's memory: the anchor and the silo's clipped mean there."""

    anchor: Vector
    mean: Double


class SVRG(SilosOnly):
    """Differences against a snapshot that the server renews by a public coin."""

    queries: ClassVar = {"estimate": (POINT, POINT, NUMBER)}

    snapshot_probability: Any
    silos: int = eqx.field(static=True)

    @property
    def rule(self) -> TwoLevel:
        return Recomputed(self.batch.batch)

    def init(self, x0: Vector) -> SVRGState:
        return SVRGState(x0, x0, jnp.zeros(self.silos, bool), self.opened(x0))

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        return Snapshot(jnp.full_like(x0, jnp.nan), Double.of(jnp.zeros_like(x0)))  # equal to no anchor

    def round(self, state: SVRGState, fed: Federation) -> SVRGState:
        x, anchor = state.x, state.anchor
        fresh = ~jnp.all(state.known[fed.present])
        v = fed.mean(self.estimate, x, anchor, fresh)
        known = state.known.at[fed.present].set(True)
        renew = fed.coin("snapshot") < self.snapshot_probability
        moved, kept = self.stepped(x, v, fed.round, state.kept)
        return SVRGState(moved, jnp.where(renew, x, anchor), known & ~renew, kept)

    def estimate(self, silo: Silo, x: Vector, anchor: Vector, fresh: Array) -> Answer:
        if silo.alone:
            # The bound needs the mean at THIS anchor: in a process of its own a silo does not take the server's word.
            fresh = jnp.any(anchor != silo.memory.anchor)
        full = lambda: silo.mean([anchor], [1.0], self.clip, "value", Full()).mean()
        silo.memory = Snapshot(anchor, silo.cond(fresh, full, lambda: silo.memory.mean))
        batch = self.batch.draw(silo, "value")
        here = silo.mean([x], [1.0], self.clip, "value", batch).mean()
        there = silo.mean([anchor], [1.0], self.clip, "value", batch).mean()
        return self.bounded(silo, here - there + silo.memory.mean)


class Table(eqx.Module):
    """SAGA's memory: each record's last clipped gradient, as factors where the engine has them, and their sum.

    The sum is kept up to date with what changes. Every change is rounded, and rounding depends on the records, so after
    RENEWED answers (`age`) it is computed anew; until then short runs keep the rounding of all changes within SLACK.
    """

    gradients: PyTree
    total: Double
    age: Array


class SAGA(SilosOnly):
    """Differences against each record's own last gradient."""

    queries: ClassVar = {"estimate": (POINT,)}

    def init(self, x0: Vector) -> State:
        return State(x0, self.opened(x0))

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        everyone = Full().draw(silo, "value")
        silo.account = silo.account.work(everyone.divisor)
        gradients = silo.objective.record_factors(x0, everyone.records, everyone.weights, self.clip)
        return Table(gradients, silo.objective.sum_factors(gradients, everyone.weights), jnp.int32(0))

    def round(self, state: State, fed: Federation) -> State:
        v = fed.mean(self.estimate, state.x)
        return State(*self.stepped(state.x, v, fed.round, state.kept))

    def estimate(self, silo: Silo, x: Vector) -> Answer:
        table, objective = silo.memory, silo.objective
        batch = self.batch.draw(silo, "value")
        silo.account = silo.account.work(batch.divisor)
        new = objective.record_factors(x, batch.records, batch.weights, self.clip)
        old = jax.tree.map(lambda leaf: jnp.take(leaf, batch.rows, axis=0, mode="clip"), table.gradients)
        added = lambda rows: objective.sum_factors(rows, batch.weights, SHORT_RUN)
        change = added(new) - added(old)
        total = self.up_to_date(silo)
        kept = jax.tree.map(lambda t, n: t.at[batch.rows].set(n, mode="drop"), table.gradients, new)
        silo.memory = Table(kept, total + change, silo.memory.age + 1)
        return self.bounded(silo, change / batch.divisor + total / silo.size.astype(jnp.float32))

    def up_to_date(self, silo: Silo) -> Double:
        """The table's sum, computed anew when it is old: for all silos of a simulation at once."""
        table = silo.memory
        old = table.age >= RENEWED if silo.alone else silo.round % RENEWED == RENEWED - 1
        silo.memory = Table(table.gradients, table.total, jnp.where(old, 0, table.age))
        everyone = Full().draw(silo, "value")
        anew = lambda: silo.objective.sum_factors(table.gradients, everyone.weights)
        return silo.cond(old, anew, lambda: table.total)


# --- what the corollaries choose, and the noise that the paper prints --------------------------------------


def shift_cost(c: Choice) -> float:
    """tau of SoteriaFL: what compression costs, spread over the silos."""
    return math.sqrt((1 + c.omega) ** 3 / c.silos)


def sgd_choice(c: Choice) -> None:
    """soteria-sgd: Cor. 1. Its batch's sqrt((1+omega) L d ln) / (n eps G) is read off `noise`."""
    spread = lambda: shift_cost(c) / (2 * (1 + c.omega))
    local_noise = lambda: math.sqrt((1 + c.omega) * c.L * c.noise * c.silos) / c.G
    c.pick("batch", lambda: whole(math.sqrt(spread()) / local_noise(), c.n))
    gd_choice(c)


def gd_choice(c: Choice) -> None:
    """soteria-gd: Cor. 1 with all records."""
    c.pick("clip", lambda: c.G)
    c.pick("rounds", lambda: whole(horizon(c) * (1 + math.sqrt(shift_cost(c)))))
    c.pick("step_size", lambda: 1 / ((1 + 2 * shift_cost(c)) * c.L))


def svrg_choice(c: Choice) -> None:
    """soteria-svrg, ldp-svrg: Cor. 2 (omega = 0 without compression)."""
    c.pick("clip", lambda: c.G)
    batch = c.pick("batch", lambda: whole(c.n ** (2 / 3) / 4))
    p = c.pick("snapshot_probability", lambda: batch / c.n)
    c.pick("rounds", lambda: whole(horizon(c) * max(1.0, shift_cost(c))))
    own = p ** (2 / 3) * batch ** (1 / 3)
    c.pick("step_size", lambda: min(own, 0.25) * min(1.0, 1 / shift_cost(c)) / (2 * c.L))


def saga_choice(c: Choice) -> None:
    """soteria-saga: Cor. 3."""
    c.pick("clip", lambda: c.G)
    c.pick("batch", lambda: whole(3 * c.n ** (2 / 3), c.n))
    c.pick("rounds", lambda: whole(horizon(c) * max(1.0, shift_cost(c))))
    c.pick("step_size", lambda: min(1.0, 1 / shift_cost(c)) / (3 * c.L))


CONSTANT = 48.0  # the paper leaves c open; this is the value in its authors' program


def std(case: Case, squares: float, constant: float = CONSTANT) -> float:
    """Eq. (4) of 002, in units of G; `squares`: G_A^2/4 + G_B^2 in units of G^2."""
    log = math.log(1 / case.delta)
    return math.sqrt(constant * squares * case.options.rounds * log) / (case.records * case.epsilon)


def printed_mean(batch: Callable[[Case], int]) -> Callable[[Case], dict[str, float]]:
    return lambda case: {"value": std(case, 0.25) * batch(case) / 2}


def printed_reduced(rule: type[TwoLevel]) -> Callable[[Case], dict[str, float]]:
    """SVRG and SAGA: G_A = 2 G, G_B = G; our multiplier is relative to the bound of their two levels."""
    return lambda case: {"value": std(case, 2.0) / rule(case.batch).bound_over_clip(case.records)}


def pace(c: Choice) -> float:
    """p^(2/3) b^(1/3) of Cor. 2."""
    return (c.options.snapshot_probability or 1.0) ** (2 / 3) * (c.options.batch or c.n) ** (1 / 3)


def unhindered(c: Choice) -> float:
    """min(1, sqrt(N / (1+omega)^3))."""
    return min(1.0, 1 / shift_cost(c))


COR_1 = (CLIP, step("1/((1 + 2 sqrt((1+omega)^3/N)) L)", lambda c: 1 / ((1 + 2 * shift_cost(c)) * c.L)))
COR_2 = (
    CLIP,
    step("p^(2/3) b^(1/3) min(1, sqrt(N/(1+omega)^3))/(2 L)", lambda c: pace(c) * unhindered(c) / (2 * c.L)),
    at_most("p^(2/3) b^(1/3) <= 1/4", pace, lambda _: 0.25),
    at_most("p <= 1/4", lambda c: c.options.snapshot_probability, lambda _: 0.25),
)
COR_3 = (
    CLIP,
    step("min(1, sqrt(N/(1+omega)^3))/(3 L)", lambda c: unhindered(c) / (3 * c.L)),
    at_least("batch >= 3 n^(2/3)", lambda c: c.options.batch, lambda c: min(3 * c.n ** (2 / 3), c.n)),
)

EQ4 = "SoteriaFL, eq. (4), constant 48"
RATE = "sqrt((1+omega) d) / (n sqrt(N) eps)"
PLAIN_RATE = "sqrt(d) / (n sqrt(N) eps)"
SILOS = ("untrusted", "aggregated")  # a trusted server would add less noise itself
BEFORE: dict[str, Any] = {"output": "before"}  # the theorems bound the mean over x_0 .. x_{T-1}
RAND_K: dict[str, Any] = {"compressor": "rand-k", "keep": 3}
COMPRESSED: dict[str, Any] = BEFORE | {"rate": RATE, "bits": "the compressor's: rand-k 32 k + 64"}
TWO_LEVEL: dict[str, Any] = {"sampling": "two-level", "samplings": ("two-level",)}

ENTRIES = {
    "soteria-gd": Entry(
        GradientDescent, SILOS, "shifted compression of noised gradients", SOTERIA, {"untrusted": "Cor. 1"},
        example={"clip": 1.0} | RAND_K, samplings=("full",), compression="shifted", theory=gd_choice, cost="n",
        conditions=COR_1, printed=Printed(EQ4, printed_mean(lambda case: case.records)), **COMPRESSED,
    ),
    "soteria-sgd": Entry(
        GradientDescent, SILOS, "shifted compression of noised minibatch gradients", SOTERIA,
        {"untrusted": "Cor. 1"}, example={"clip": 1.0, "batch": 8} | RAND_K, sampling="poisson",
        compression="shifted", theory=sgd_choice, cost="b", conditions=COR_1,
        printed=Printed(EQ4, printed_mean(lambda case: case.batch)), **COMPRESSED,
    ),
    "soteria-svrg": Entry(
        SVRG, SILOS, "shifted compression, SVRG in the silos", SOTERIA, {"untrusted": "Cor. 2"},
        example={"clip": 1.0, "batch": 8, "snapshot_probability": 0.3} | RAND_K, compression="shifted",
        theory=svrg_choice, cost="2b (+ n at a snapshot)", printed=Printed(EQ4, printed_reduced(Recomputed)),
        conditions=COR_2, **COMPRESSED, **TWO_LEVEL,
    ),
    "soteria-saga": Entry(
        SAGA, SILOS, "shifted compression, SAGA in the silos", SOTERIA, {"untrusted": "Cor. 3"},
        example={"clip": 1.0, "batch": 8} | RAND_K, compression="shifted", theory=saga_choice, cost="b",
        conditions=COR_3, printed=Printed(EQ4, printed_reduced(TwoLevel)), **COMPRESSED, **TWO_LEVEL,
    ),
    "cdp-sgd": Entry(
        GradientDescent, SILOS, "plain compression of noised minibatch gradients", SOTERIA,
        {"untrusted": "Thm 1"}, example={"clip": 1.0, "batch": 8} | RAND_K, sampling="poisson",
        compression="plain", theory=theory.gradient, cost="b", conditions=(CLIP, WHOLE_STEP),
        printed=Printed("SoteriaFL, Thm 4", printed_mean(lambda case: case.batch)), **COMPRESSED,
    ),
    "ldp-sgd": Entry(
        GradientDescent, SILOS, "noised minibatch gradients, uncompressed", SOTERIA,
        example={"clip": 1.0, "batch": 8}, sampling="poisson", compression="none", theory=theory.gradient,
        rate=PLAIN_RATE, cost="b", printed=Printed(EQ4, printed_mean(lambda case: case.batch)), **BEFORE,
    ),
    "ldp-svrg": Entry(
        SVRG, SILOS, "SVRG in the silos, uncompressed", SOTERIA,
        example={"clip": 1.0, "batch": 8, "snapshot_probability": 0.3}, compression="none", theory=svrg_choice,
        rate=PLAIN_RATE, cost="2b (+ n at a snapshot)", printed=Printed(EQ4, printed_reduced(Recomputed)),
        **TWO_LEVEL, **BEFORE,
    ),
}  # fmt: skip
