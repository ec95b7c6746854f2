"""Gradient descent on private means: DP-GD, DP-SGD and their non-private forms GD, MB-SGD; one-pass Prox-SGD.

DP-GD is the baseline of DIFF2 (Murata, Suzuki); DP-SGD is MB-SGD of Lowy, Ghafelebashi and Razaviyayn; with one pass
over the data it is their Noisy Prox-SGD (Alg. 6, 7; Thm 2.1).

    for r = 0..R-1:
        x = prox(x - step_size * private_mean(clip(grad f(x; z), clip)))

Formal guarantee: R releases `value`, each over a batch drawn by `batch`, of sensitivity 2*clip/b under replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import PyTree

from silodp.algorithms import theory
from silodp.algorithms.entry import ALL, BOTH, MEANS, Case, Entry, Printed
from silodp.algorithms.papers import (
    CONVEX,
    DIFF2,
    LOWY,
    SHUFFLED,
    SUMS,
    amplified,
    diff2_noise,
    lowy_sgd_noise,
    summed_noise,
)
from silodp.algorithms.proofs import CLIP, HALF_STEP, small_epsilon
from silodp.algorithms.theory import GAP, Choice, condition, whole
from silodp.core import POINT, Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.releases import Answer, Vector
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector
    kept: PyTree = ()  # by the server's optimiser


class GradientDescent(Algorithm):
    """x <- prox(x - step_size * mean of clipped gradients)."""

    queries: ClassVar = {"value": (POINT,)}
    steps: ClassVar[bool] = True

    clip: Any
    batch: BatchRule = Full()

    def init(self, x0: Vector) -> State:
        return State(x0, self.opened(x0))

    def round(self, state: State, fed: Federation) -> State:
        v = fed.mean(self.value, state.x)
        return State(*self.stepped(state.x, v, fed.round, state.kept))

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]


# --- what the theorems choose, and the noise that the papers print -----------------------------------------


def descent(c: Choice) -> None:
    """Without noise: the longest step for which the descent lemma promises progress; rounds stay the config's."""
    c.pick("step_size", lambda: 1 / c.L)


def prox_sgd(c: Choice) -> None:
    """prox-sgd: Lowy et al., Thm E.1."""
    c.pick("clip", lambda: c.G)
    accuracy = lambda: c.L * GAP / (condition(c) * c.G**2) * min(c.silos * c.n, 1 / c.noise)
    c.pick("rounds", lambda: whole(2 * condition(c) * math.log(max(math.e, accuracy())), c.n))
    c.pick("step_size", lambda: 1 / (2 * c.L))


def prox_sgd_noise(case: Case) -> dict[str, float]:
    """sigma^2 = 8 L^2 ln(1/delta) / (eps K)^2 of Theorem E.1's proof."""
    return {"value": math.sqrt(2 * math.log(1 / case.delta)) / case.epsilon}


def summed_sgd(case: Case) -> dict[str, float]:
    """Algorithm 7 of 001, line 7: P_vec with (N/(2M) epsilon, delta) on each of the disjoint batches."""
    return {"value": summed_noise(amplified(case) * case.epsilon / 2, case.delta)}


PL = "kappa^2 d / (mu n^2 N eps^2) + kappa / (mu n N) for proximal PL"
# Thm E.1; `pl_constant` is the user's word for the PL inequality.
ASSUMED = (
    CLIP, HALF_STEP, small_epsilon("8 ln(1/delta) and 15", lambda log: min(8 * log, 15)),
    ("a PL constant, n >= kappa", lambda c: c.n >= condition(c)),
)  # fmt: skip
ONE_PASS: dict[str, Any] = {
    "conditions": ASSUMED,
    "some_silos": True,
    "sampling": "one-pass",
    "samplings": ("one-pass",),
    "any_prox": True,
    "theory": prox_sgd,
    "output": "last",
}

ENTRIES = {
    "gd": Entry(
        GradientDescent, BOTH, "gradient descent", private=False, samplings=("full",), theory=descent, cost="n"
    ),
    "dp-gd": Entry(
        GradientDescent, ALL, "full-batch clipped gradients, noised", DIFF2,
        example={"clip": 1.0}, samplings=("full",), theory=theory.gradient, rate=CONVEX, cost="n", output="before",
        printed=Printed("DIFF2, Prop. 4.1 with restart 1", diff2_noise),
    ),
    "mb-sgd": Entry(
        GradientDescent, BOTH, "minibatch SGD", private=False, sampling="poisson", example={"batch": 8},
        theory=descent, cost="b",
    ),
    "dp-sgd": Entry(
        GradientDescent, ALL, "minibatch clipped gradients, noised", LOWY,
        example={"clip": 1.0, "batch": 8}, sampling="poisson", theory=theory.gradient, rate=CONVEX, cost="b",
        output="before",
        printed=Printed("Lowy et al., App. H.2", lambda c: lowy_sgd_noise(c, c.options.rounds, "value")),
    ),
    "prox-sgd": Entry(
        GradientDescent, MEANS, "one pass of clipped gradients, noised, any prox", LOWY, {"untrusted": "Thm 2.1"},
        example={"clip": 1.0}, rate=PL, cost="n/R", printed=Printed("Lowy et al., Thm E.1", prox_sgd_noise), **ONE_PASS,
    ),
    "sdp-prox-sgd": Entry(
        GradientDescent, SHUFFLED, "prox-sgd on P_vec's sums", LOWY, {"shuffled": "Thm 2.1"},
        example={"clip": 1.0, "batch": 4}, randomizer="pvec", cost="n/R", bits=SUMS,
        printed=Printed("Lowy et al., Alg. 7", summed_sgd, SHUFFLED), **ONE_PASS,
    ),
}  # fmt: skip
