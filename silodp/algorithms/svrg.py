"""FedProx-SVRG and FedProx-PL-SVRG (Lowy, Ghafelebashi, Razaviyayn 2023, Alg. 1 and 2; Thm 2.2).

    anchor = x = x0
    every `restart` rounds:  anchor = x;  g = private_mean(clip(grad f(anchor; z), clip)) over all records
    every round:             d = private_mean(clip(grad f(x; z) - grad f(anchor; z), C)) over a Poisson batch
                             x = prox(x - step_size * (g + d))

C = min(2 * clip, clip_difference * |x - anchor|); without clip_difference it is the paper's 2 * clip. The paper takes
restart = floor(n / batch) and samples with replacement, for which its guarantee is false; here batches are Poisson.
PL-SVRG runs stages of `epochs` restarts; a stage starts from an iterate of the stage before, drawn uniformly.

Formal guarantee: ceil(R/restart) full-batch releases `value` of sensitivity 2*clip/n and R sampled releases
`difference` of sensitivity 2*C/batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.algorithms.entry import BOTH, Case, Entry, Printed
from silodp.algorithms.papers import LOWY, SHUFFLED, SUMS
from silodp.algorithms.theory import GAP, Choice, condition, whole
from silodp.core import POINT, Algorithm, Federation, Silo, distance
from silodp.facts import Stream
from silodp.releases import Answer, Vector
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector
    anchor: Vector
    g: Vector
    drawn: Vector  # uniform among the iterates of this stage so far


class ProxSVRG(Algorithm):
    """Differences against an anchor that moves every `restart` rounds."""

    queries: ClassVar = {"value": (POINT,), "difference": (POINT, POINT)}

    clip: Any
    restart: int = eqx.field(static=True)
    batch: BatchRule = Full()
    clip_difference: Any = None
    epochs: int | None = eqx.field(static=True, default=None)

    def init(self, x0: Vector) -> State:
        return State(x0, x0, jnp.zeros_like(x0), x0)

    def round(self, state: State, fed: Federation) -> State:
        state = self.stage_start(state, fed)
        fresh = fed.round % self.restart == 0
        anchor = jnp.where(fresh, state.x, state.anchor)
        g = fed.cond(fresh, lambda: fed.mean(self.value, anchor), lambda: state.g)
        v = g + fed.mean(self.difference, state.x, anchor)
        x = self.prox(state.x - self.step_size * v, self.step_size)
        return State(x, anchor, g, self.stage_draw(state.drawn, x, fed))

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value")

    def difference(self, silo: Silo, x: Vector, anchor: Vector) -> Answer:
        clip = None if self.clip is None else 2 * self.clip
        if clip is not None and self.clip_difference is not None:
            clip = jnp.minimum(clip, self.clip_difference * distance(x, anchor))
        return silo.mean([x, anchor], [1.0, -1.0], clip, "difference", self.batch)

    def stage_start(self, state: State, fed: Federation) -> State:
        if self.epochs is None:
            return state
        begins = (fed.round > 0) & (fed.round % (self.epochs * self.restart) == 0)
        x = jnp.where(begins, state.drawn, state.x)
        return State(x, state.anchor, state.g, state.drawn)

    def stage_draw(self, drawn: Vector, x: Vector, fed: Federation) -> Vector:
        if self.epochs is None:
            return x
        position = fed.round % (self.epochs * self.restart)
        return jnp.where(fed.coin("stage") * (position + 1) < 1, x, drawn)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        values = sum(r % self.restart == 0 for r in rounds)
        return [Stream("value", values, Full()), Stream("difference", len(rounds), self.batch)]


def prox_svrg(c: Choice) -> None:
    """Lowy et al., Thm E.2. Epochs of Q = floor(n/K) rounds, 12 kappa rounds a stage; prox-svrg is one stage."""
    batch, restart = epoch(c)
    c.pick("rounds", lambda: stage(c, restart))
    svrg_step(c, batch)


def prox_pl_svrg(c: Choice) -> None:
    """The same with as many stages as halve the gap down to the noise."""
    batch, restart = epoch(c)
    epochs = c.pick("epochs", lambda: stage(c, restart) // restart)
    halvings = lambda: math.log2(GAP * c.L / (condition(c) ** 2 * c.noise * c.G**2))
    c.pick("rounds", lambda: whole(halvings()) * epochs * restart)
    svrg_step(c, batch)


def epoch(c: Choice) -> tuple[int, int]:
    c.pick("clip", lambda: c.G)
    batch = c.pick("batch", lambda: whole((c.n**2 / c.silos) ** (1 / 3), c.n))
    return batch, c.pick("restart", lambda: c.n // batch)


def stage(c: Choice, restart: int) -> int:
    return whole(12 * condition(c) / restart) * restart


def svrg_step(c: Choice, batch: int) -> None:
    c.pick("step_size", lambda: min(1.0, batch**1.5 * math.sqrt(c.silos) / c.n) / (8 * c.L))


def printed_noise(case: Case) -> dict[str, float]:
    """Theorem E.2 of 001, for its own epochs of floor(n/batch) rounds (and stages of them)."""
    options, inner = case.options, max(1, case.records // case.batch)
    stages = math.ceil(options.rounds / (inner * options.epochs)) if options.epochs else 1
    epochs = options.epochs or math.ceil(options.rounds / inner)
    steps, log = epochs * (case.records // case.batch), math.log(2 / case.delta)
    noise = lambda uses, c: 8 * math.sqrt(stages * uses * log * math.log(c * uses / case.delta)) / case.epsilon
    return {"value": noise(epochs, 5), "difference": noise(steps, 2.5) * case.batch / case.records}


ANCHORED = "32 d (+ 32 d at an anchor)"
PRINTED = Printed("Lowy et al., Thm E.2", printed_noise)
STAGES = {"restart": 2, "epochs": 1}
CLIPS = {"clip": 1.0, "clip_difference": 0.7}
COST: dict[str, Any] = {"any_prox": True, "cost": "2b (+ n at an anchor)"}
SUMMED: dict[str, Any] = {"randomizer": "pvec", "bits": SUMS}

ENTRIES = {
    "prox-svrg": Entry(
        ProxSVRG, BOTH, "differences to an anchor, any prox", LOWY, {"untrusted": "Thm 2.2 (one stage)"},
        example=CLIPS | {"batch": 8, "restart": 3}, sampling="poisson", theory=prox_svrg, printed=PRINTED,
        bits=ANCHORED, **COST,
    ),
    "prox-pl-svrg": Entry(
        ProxSVRG, BOTH, "stages of prox-svrg for proximal PL losses", LOWY, {"untrusted": "Thm 2.2"},
        example=CLIPS | {"batch": 8} | STAGES, sampling="poisson", theory=prox_pl_svrg, printed=PRINTED,
        rate="kappa d / (mu n^2 N eps^2) for proximal PL", bits=ANCHORED, **COST,
    ),
    "sdp-prox-svrg": Entry(
        ProxSVRG, SHUFFLED, "prox-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2 (one stage)"},
        example=CLIPS | {"restart": 3}, theory=prox_svrg, **SUMMED, **COST,
    ),
    "sdp-prox-pl-svrg": Entry(
        ProxSVRG, SHUFFLED, "prox-pl-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2"},
        example=CLIPS | STAGES, theory=prox_pl_svrg, **SUMMED, **COST,
    ),
}  # fmt: skip
