"""FedProx-SVRG and FedProx-PL-SVRG (Lowy, Ghafelebashi, Razaviyayn 2023, Alg. 1 and 2; Thm 2.2).

    anchor = x = x0
    every `restart` rounds:  anchor = x;  g = private_mean(clip(grad f(anchor; z), clip)) over all records;  d = 0
    every other round:       d = private_mean(clip(grad f(x; z) - grad f(anchor; z), C)) over a Poisson batch
    every round:             x = prox(x - step_size * (g + d))

C = min(2 * clip, clip_difference * |x - anchor|); without clip_difference it is the paper's 2 * clip. The paper takes
restart = floor(n / batch) and samples with replacement, for which its guarantee is false; here batches are Poisson. It
also releases the difference at the anchor, which is zero whatever the records: here it is not asked for, not noised and
not charged. When only some silos take part, the same ones do so until the next anchor (Alg. 1, line 4).

PL-SVRG runs stages of `epochs` restarts; a stage starts from an iterate of the stage before, drawn uniformly. Its
result is that of its last stage, w_S. A run has whole stages only.

Formal guarantee: ceil(R/restart) full-batch releases `value` of sensitivity 2*clip/n and in each of the other rounds a
sampled release `difference` of sensitivity 2*C/batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from silodp.algorithms.entry import MEANS, Case, Entry, Printed
from silodp.algorithms.papers import LOWY, SHUFFLED, SUMS, amplified, summed_noise
from silodp.algorithms.proofs import CAPPED, CLIP, at_least, small_epsilon, step
from silodp.algorithms.theory import GAP, Choice, condition, whole
from silodp.core import POINT, Algorithm, Federation, Silo, distance
from silodp.facts import Stream, turns
from silodp.releases import Answer, Vector
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector
    anchor: Vector
    g: Vector
    kept: PyTree = ()  # by the server's optimiser


class StageState(eqx.Module):
    x: Vector
    anchor: Vector
    g: Vector
    drawn: Vector  # uniform among the iterates of this stage so far
    kept: PyTree = ()


class ProxSVRG(Algorithm):
    """Differences against an anchor that moves every `restart` rounds."""

    queries: ClassVar = {"value": (POINT,), "difference": (POINT, POINT)}
    steps: ClassVar[bool] = True

    clip: Any
    restart: int = eqx.field(static=True)
    batch: BatchRule = Full()
    clip_difference: Any = None

    def init(self, x0: Vector) -> Any:
        return State(x0, x0, jnp.zeros_like(x0), self.opened(x0))

    def round(self, state: Any, fed: Federation) -> Any:
        return self.inner(state, fed)

    def inner(self, state: Any, fed: Federation) -> State:
        fresh = fed.round % self.restart == 0
        anchor = jnp.where(fresh, state.x, state.anchor)
        g, v = fed.cond(fresh, lambda: self.at_anchor(anchor, fed), lambda: self.beside(state, anchor, fed))
        x, kept = self.stepped(state.x, v, fed.round, state.kept)
        return State(x, anchor, g, kept)

    def at_anchor(self, anchor: Vector, fed: Federation) -> tuple[Vector, Vector]:
        g = fed.mean(self.value, anchor)
        return g, g  # the difference to the anchor is zero, whoever the records are

    def beside(self, state: Any, anchor: Vector, fed: Federation) -> tuple[Vector, Vector]:
        return state.g, state.g + fed.mean(self.difference, state.x, anchor)

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value")

    def difference(self, silo: Silo, x: Vector, anchor: Vector) -> Answer:
        clip = None if self.clip is None else 2 * self.clip
        if clip is not None and self.clip_difference is not None:
            clip = jnp.minimum(clip, self.clip_difference * distance(x, anchor))
        return silo.mean([x, anchor], [1.0, -1.0], clip, "difference", self.batch)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        values = turns(rounds, self.restart)
        return [Stream("value", values, Full()), Stream("difference", len(rounds) - values, self.batch)]


class ProxPLSVRG(ProxSVRG):
    """Stages of ProxSVRG, each from a point that is drawn from the stage before."""

    epochs: int = eqx.field(static=True, kw_only=True)

    @property
    def stage(self) -> int:
        return self.epochs * self.restart

    def check(self, rounds: int) -> None:
        if rounds % self.stage:
            near = max(1, round(rounds / self.stage)) * self.stage
            raise ValueError(
                f"algorithm.rounds = {rounds}: stages have epochs * restart = {self.stage} rounds, and only whole ones "
                f"have a result; use {near}"
            )

    def init(self, x0: Vector) -> StageState:
        return StageState(x0, x0, jnp.zeros_like(x0), x0, self.opened(x0))

    def round(self, state: StageState, fed: Federation) -> StageState:
        begins = (fed.round > 0) & (fed.round % self.stage == 0)
        start = replace(state, x=jnp.where(begins, state.drawn, state.x))
        after = self.inner(start, fed)
        taken = fed.coin("stage") * (fed.round % self.stage + 1) < 1
        return StageState(after.x, after.anchor, after.g, jnp.where(taken, after.x, state.drawn), after.kept)

    def result(self, state: StageState) -> Vector:
        return state.drawn


def prox_svrg(c: Choice) -> None:
    """Lowy et al., Thm E.2. Epochs of Q = floor(n/K) rounds, 12 kappa rounds a stage; prox-svrg is one stage."""
    batch, restart = epoch(c)
    c.pick("rounds", lambda: stage(c, restart))
    svrg_step(c, batch)


def prox_pl_svrg(c: Choice) -> None:
    """The same with as many stages as halve the gap down to the noise."""
    batch, restart = epoch(c)
    epochs = c.pick("epochs", lambda: stage(c, restart) // restart)
    c.pick("rounds", lambda: whole(halvings(c)) * epochs * restart)
    svrg_step(c, batch)


def epoch(c: Choice) -> tuple[int, int]:
    c.pick("clip", lambda: c.G)
    if c.options.batch_share is None and not shared(c):
        c.pick("batch", lambda: least_batch(c))
    elif c.options.batch is None:
        c.pick("batch_share", lambda: least_batch(c) / c.n)
    batch = c.chosen.get("batch") or round(c.n * c.chosen.get("batch_share", 0)) or sampled(c)
    return batch, c.pick("restart", lambda: c.n // batch)


def shared(c: Choice) -> bool:
    """Sums of all silos' records weigh them alike: on silos of different sizes each draws the same part of its own."""
    return c.channel.hides_sizes and len(set(c.facts.sizes)) > 1


def least_batch(c: Choice) -> int:
    return whole((c.n**2 / c.silos) ** (1 / 3), c.n)


def stage(c: Choice, restart: int) -> int:
    return whole(12 * condition(c) / restart) * restart


def svrg_step(c: Choice, batch: int) -> None:
    c.pick("step_size", lambda: longest_step(c, batch))


def longest_step(c: Choice, batch: int) -> float:
    return min(1.0, batch**1.5 * math.sqrt(c.silos) / c.n) / (8 * c.L)


def halvings(c: Choice) -> float:
    """Stages that take the gap down to the noise."""
    return math.log2(GAP * c.L / (condition(c) ** 2 * c.noise * c.G**2))


def sampled(c: Choice) -> int:
    """Records of the smallest silo in a batch."""
    share = c.options.batch_share
    return round(share * c.n) if share is not None else c.options.batch or c.n


def printed_noise(case: Case) -> dict[str, float]:
    """Theorem E.2 of 001, for its own epochs of floor(n/batch) rounds (and stages of them)."""
    options, inner = case.options, max(1, case.records // case.batch)
    stages = math.ceil(options.rounds / (inner * options.epochs)) if options.epochs else 1
    epochs = options.epochs or math.ceil(options.rounds / inner)
    steps, log = epochs * (case.records // case.batch), math.log(2 / case.delta)
    noise = lambda uses, c: 8 * math.sqrt(stages * uses * log * math.log(c * uses / case.delta)) / case.epsilon
    return {"value": noise(epochs, 5), "difference": noise(steps, 2.5) * case.batch / case.records}


def summed_svrg(case: Case) -> dict[str, float]:
    """Algorithms 8 and 9 of 001: every sum of a stage is called with (epsilon~, delta~), line 1."""
    options, epsilon, delta = case.options, case.epsilon, case.delta
    stages = math.ceil(options.rounds / ((options.restart or 1) * options.epochs)) if options.epochs else 1
    if options.epochs:
        epsilon, delta = epsilon / (2 * math.sqrt(2 * stages)), delta / (2 * stages)
    steps = options.rounds / stages  # E Q
    own = epsilon * amplified(case, case.batch) / (8 * math.sqrt(4 * steps * math.log(2 / delta)))
    return dict.fromkeys(("value", "difference"), summed_noise(own, delta / (2 * steps)))


# Thm E.2. It leaves the step open ("there is eta"): this is the one of its proof's Lemma, as `theory` takes it.
THM_E_2 = (
    CLIP, CAPPED, step("min(1, batch^1.5 sqrt(N)/n)/(8 L)", lambda c: longest_step(c, sampled(c))),
    at_least("batch >= (n^2/N)^(1/3)", sampled, lambda c: (c.n**2 / c.silos) ** (1 / 3)),
    ("restart = floor(n/batch)", lambda c: c.options.restart == c.n // sampled(c)),
    small_epsilon("2 ln(2/delta) and 15", lambda log: min(2 * (log + math.log(2)), 15)),
)  # fmt: skip
STAGE = at_least("12 kappa rounds", lambda c: c.options.rounds, lambda c: 12 * condition(c))
STAGED = (
    at_least(
        "12 kappa rounds a stage",
        lambda c: (c.options.epochs or 0) * (c.options.restart or 0),
        lambda c: 12 * condition(c),
    ),
    at_least(
        "log2(gap / noise) stages",
        lambda c: c.options.rounds / ((c.options.epochs or 1) * (c.options.restart or 1)),
        halvings,
    ),
)
ONE_STAGE: dict[str, Any] = {"conditions": (*THM_E_2, STAGE)}
STAGES_MET: dict[str, Any] = {"conditions": (*THM_E_2, *STAGED)}

PRINTED = Printed("Lowy et al., Thm E.2", printed_noise)
STAGES = {"restart": 2, "epochs": 1}
CLIPS = {"clip": 1.0, "clip_difference": 0.7}
COST: dict[str, Any] = {"any_prox": True, "cost": "2b (n at an anchor)", "same_silos": "restart"}
W_S: dict[str, Any] = {"output": "last"}
SUMMED: dict[str, Any] = {
    "randomizer": "pvec",
    "bits": SUMS,
    "printed": Printed("Lowy et al., Alg. 8 and 9", summed_svrg, SHUFFLED),
}

ENTRIES = {
    "prox-svrg": Entry(
        ProxSVRG, MEANS, "differences to an anchor, any prox", LOWY, {"untrusted": "Thm 2.2 (one stage)"},
        example=CLIPS | {"batch": 8, "restart": 3}, sampling="poisson", theory=prox_svrg, printed=PRINTED,
        **ONE_STAGE, **COST,
    ),
    "prox-pl-svrg": Entry(
        ProxPLSVRG, MEANS, "stages of prox-svrg for proximal PL losses", LOWY, {"untrusted": "Thm 2.2"},
        example=CLIPS | {"batch": 8} | STAGES, sampling="poisson", theory=prox_pl_svrg, printed=PRINTED,
        rate="kappa d / (mu n^2 N eps^2) for proximal PL", **STAGES_MET, **W_S, **COST,
    ),
    "sdp-prox-svrg": Entry(
        ProxSVRG, SHUFFLED, "prox-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2 (one stage)"},
        example=CLIPS | {"restart": 3}, theory=prox_svrg, **SUMMED, **ONE_STAGE, **COST,
    ),
    "sdp-prox-pl-svrg": Entry(
        ProxPLSVRG, SHUFFLED, "prox-pl-svrg on P_vec's sums", LOWY, {"shuffled": "Thm 2.2"},
        example=CLIPS | STAGES, theory=prox_pl_svrg, **SUMMED, **STAGES_MET, **W_S, **COST,
    ),
}  # fmt: skip
