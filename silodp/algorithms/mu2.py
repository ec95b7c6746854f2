"""DP-mu2-FL (Reshef, Levy 2024, Alg. 1 untrusted, Alg. 2 trusted; Thm 5.2, 6.2): corrected momentum, one pass.

    w = x = y = x1; q_i = 0
    for t = 1..T, each silo on its next record (or chunk):
        s_i = mean of clip(t * grad f(x; z) - (t-1) * grad f(y; z), clip)         (alpha_t = t; y is the point before x)
        q_i = q_i + s_i
        w = project(w - step_size * private_mean(q_i)), on the ball of diameter D around 0
        y, x = x, x + 2/(t+2) * (w - x)
    return the last point at which gradients were taken

The paper assumes |s_i| <= S = G + 2*L*D; clipping s_i to `clip` = S makes the guarantee need no assumption. Its Alg. 2
takes the second gradient on another record, which is an erratum. Convex losses.

Formal guarantee: T releases `value`. A record enters one s_i and is then part of every later q_i, so each release has
sensitivity 2*clip/chunk for it, and the record of the first round is charged for all T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from silodp.algorithms.entry import BOTH, Case, Entry, Printed
from silodp.algorithms.papers import MU2
from silodp.algorithms.theory import Choice
from silodp.core import POINT, Algorithm, Federation, Silo
from silodp.doubles import Double
from silodp.facts import Stream
from silodp.privacy import gaussian
from silodp.prox import Ball
from silodp.releases import Answer, Release, Vector
from silodp.sampling import Cumulative


class State(eqx.Module):
    x: Vector  # where gradients were last taken: the method's output
    ahead: Vector  # where they are taken next
    w: Vector


class Mu2(Algorithm):
    """Every silo keeps q_i; the server only ever sees it with noise."""

    queries: ClassVar = {"corrected": (POINT, POINT)}

    clip: Any
    diameter: Any
    batch: Cumulative

    def init(self, x0: Vector) -> State:
        return State(x0, x0, x0)

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        return Double.of(jnp.zeros_like(x0))

    def round(self, state: State, fed: Federation) -> State:
        t = jnp.float32(fed.round + 1)
        x = state.ahead
        q = fed.mean(self.corrected, x, state.x)
        moved = self.prox(state.w - self.step_size * q, self.step_size)
        w = Ball(self.diameter / 2)(moved, self.step_size)
        return State(x, x + 2 / (t + 2) * (w - x), w)

    def corrected(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        t = jnp.float32(silo.round + 1)
        s = silo.mean([x, y], [t, 1 - t], self.clip, "value", self.batch).release()
        silo.memory = silo.memory + s.exact
        return Release(silo.memory.high, s.bound, "value", rest=silo.memory.low)

    def stream_of(self, query: str) -> str:
        return "value"

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]


def paper_choice(c: Choice) -> None:
    """Reshef and Levy, Thm 5.2 (untrusted) and 6.2 (trusted). For chunks of b records S is S/b (ours)."""
    options, chunk = c.options, c.options.batch or 1
    D = c.constant("diameter")
    rounds = c.pick("rounds", lambda: c.n // chunk) if options.theory else options.rounds
    clip = c.pick("clip", lambda: c.G + 2 * c.L * D)
    noisy = lambda: c.rho * D * c.spread * chunk / (2 * clip * math.sqrt(c.d)) if c.privacy.private else math.inf
    c.pick("step_size", lambda: min(noisy(), 1 / (4 * c.L)) / rounds)


def printed_noise(case: Case) -> dict[str, float]:
    """Theorems 5.1 and 6.1 of 004: exact, and the claim is in GDP."""
    rho = case.gdp if case.gdp is not None else gaussian.mu_of(case.epsilon, case.delta)
    return {"value": math.sqrt(case.options.rounds) / rho}


ENTRIES = {
    "mu2": Entry(
        Mu2, BOTH, "corrected momentum, one pass, convex, on a ball", MU2,
        {"untrusted": "Thm 5.2", "trusted": "Thm 6.2"},
        example={"clip": 1.0, "diameter": 4.0, "batch": 2}, sampling="cumulative", samplings=("cumulative",),
        everyone=True, rate="1/sqrt(N n) + sqrt(d) / (n sqrt(N) eps) untrusted (n N eps trusted)",
        cost="2 per record of the chunk", theory=paper_choice,
        asked_by=("gradient_bound", "smoothness", "diameter"),
        printed=Printed("mu2, Thm 5.1 and 6.1", printed_noise, claims_gdp=True),
    ),
}  # fmt: skip
