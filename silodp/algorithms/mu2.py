"""DP-mu2-FL (Reshef, Levy 2024, Alg. 1 untrusted, Alg. 2 trusted; Thm 5.2, 6.2): corrected momentum, one pass.

    w = x = y = x1, in K; q_i = 0
    for t = 1..T, each silo on its next chunk:
        s_i = mean of clip(t * grad f(x; z) - (t-1) * grad f(y; z), clip)         (alpha_t = t; y is the point before x)
        q_i = q_i + s_i
        w = project(w - step_size * private_mean(q_i)), on K
        y, x = x, x + 2/(t+2) * (w - x)
    return the last point at which gradients were taken

K is the prox where that is a bounded set (ball, box, simplex), else the ball of diameter D around 0, with the prox
before it. Silo i's chunks share its records out, floor or ceil(n_i / T) of them, none unused; `batch` asks for chunks
of one size everywhere. A penalty's step is alpha_t * step_size, as a gradient's is. The paper assumes
|s_i| <= S = G + 2*L*D; clipping s_i to `clip` = S makes the guarantee need no assumption. Its Alg. 2 takes the second
gradient on another record, which is an erratum. Convex losses.

`weight_power` = p (ours) takes alpha_t = t^p with beta_t = 1 - alpha_{t-1}/alpha_t. Then |s_i| <= t^(p-1) * S with
S = p*G + (p+1)*L*D, and s_i is clipped to t^(p-1) * clip. The paper's theorems are for p = 1.

Formal guarantee: T releases `value`. A record enters one s_i and is then part of every later q_i, so each release has
sensitivity 2*clip/chunk for it (its silo's smallest chunk, and the clip of the round, which never falls), and the
record of the first round is charged for all T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from silodp.algorithms.entry import MEANS, Case, Entry, Printed, prox_of
from silodp.algorithms.papers import MU2
from silodp.algorithms.proofs import at_least, step
from silodp.algorithms.theory import Choice
from silodp.core import POINT, Algorithm, Federation, Silo
from silodp.doubles import Double
from silodp.facts import Stream
from silodp.privacy import gaussian
from silodp.prox import Ball, Both, NoProx, Prox, Set
from silodp.releases import Answer, Release, Vector
from silodp.sampling import MOVES, Cumulative


class State(eqx.Module):
    x: Vector  # where gradients were last taken: the method's output
    ahead: Vector  # where they are taken next
    w: Vector
    total: Array  # of the weights alpha so far


class Mu2(Algorithm):
    """Every silo keeps q_i; the server only ever sees it with noise."""

    queries: ClassVar = {"corrected": (POINT, POINT)}

    steps: ClassVar[bool] = True

    clip: Any
    batch: Cumulative
    diameter: Any = None
    weight_power: float = eqx.field(static=True, default=1.0)

    @property
    def psi(self) -> Prox:
        """K, with what is penalised on it."""
        if self.prox.bounded:
            return self.prox
        ball = Ball(self.diameter / 2)
        return ball if isinstance(self.prox, NoProx) else Both(self.prox, ball)

    def check(self, rounds: int) -> None:
        if self.diameter is None and not self.prox.bounded:
            raise ValueError("algorithm.diameter is missing: mu2 needs it, or a prox that is a bounded set")
        if self.weight_power < 1:
            raise ValueError(f"algorithm.weight_power = {self.weight_power:g}: weights must not grow slower than t; "
                             "give at least 1")  # fmt: skip
        if self.optimiser is not None:
            raise ValueError("algorithm.optimiser: mu2 has a momentum of its own; leave it out")

    def init(self, x0: Vector) -> State:
        start = self.psi.feasible(x0)
        return State(start, start, start, jnp.float32(1))

    def alpha(self, t: Any) -> Any:
        return t if self.weight_power == 1 else t**self.weight_power

    def remember(self, silo: Silo, x0: Vector) -> PyTree:
        return Double.of(jnp.zeros_like(x0))

    def round(self, state: State, fed: Federation) -> State:
        t = jnp.float32(fed.round + 1)
        x = state.ahead
        q = fed.mean(self.corrected, x, state.x)
        rate = self.rate(fed.round)
        # q is alpha_t times a gradient, so a penalty counts alpha_t times as well; a set is the same at any step.
        w = self.psi(state.w - rate * self.slope(x, q, self.alpha(t)), rate * self.alpha(t))
        total = state.total + self.alpha(t + 1)
        share = 2 / (t + 2) if self.weight_power == 1 else self.alpha(t + 1) / total
        return State(x, x + share * (w - x), w, total)

    def corrected(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        t = jnp.float32(silo.round + 1)
        clip = self.clip
        if clip is not None and self.weight_power != 1:
            clip = clip * t ** (self.weight_power - 1)
        s = silo.mean([x, y], [self.alpha(t), -self.alpha(t - 1)], clip, "value", self.batch).release()
        silo.memory = silo.memory + s.exact
        # A record of an earlier, smaller chunk is in this sum too: what it moves there bounds what it moves here.
        bound = s.bound if self.batch.chunk is not None or clip is None else MOVES * clip / self.batch.least(silo.size)
        return Release(silo.memory.high, jnp.float32(bound), "value", rest=silo.memory.low)

    def stream_of(self, query: str) -> str:
        return "value"

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch)]


def paper_choice(c: Choice) -> None:
    """Reshef and Levy, Thm 5.2 (untrusted) and 6.2 (trusted). For chunks of b records S is S/b (ours)."""
    options = c.options
    D = c.options.diameter or width(c)
    rounds = c.pick("rounds", lambda: c.n // (options.batch or 1)) if options.theory else options.rounds
    chunk = options.batch or max(1, c.n // rounds)
    p = options.weight_power or 1.0
    clip = c.pick("clip", lambda: p * c.G + (p + 1) * c.L * D)
    noisy = lambda: rho(c, rounds) * D * c.spread * chunk / (2 * clip * math.sqrt(c.d))
    limit = lambda: noisy() if c.privacy.private else math.inf
    c.pick("step_size", lambda: min(limit(), 1 / (4 * c.L)) / rounds)


def longest_step(c: Choice) -> float:
    """Of Thm 5.2 and 6.2."""
    rounds, clip = c.options.rounds, c.options.clip or 0.0
    chunk = c.options.batch or max(1, c.n // rounds)
    noisy = rho(c, rounds) * (c.options.diameter or width(c)) * c.spread * chunk / (2 * clip * math.sqrt(c.d))
    return min(noisy, 1 / (4 * c.L)) / rounds


THEOREM = (
    ("weights t", lambda c: c.options.weight_power in (None, 1.0)),
    ("K a bounded set, no penalty on it", lambda c: isinstance(prox_of(c.options.prox), NoProx | Set)),
    at_least("clip >= G + 2 L D", lambda c: c.options.clip, lambda c: c.G + 2 * c.L * (c.options.diameter or width(c))),
    step("min(rho D sqrt(N) chunk/(2 clip sqrt(d)), 1/(4 L))/T, N for sqrt(N) if trusted", longest_step),
    ("the start in K", lambda c: True),  # it is projected onto it
)


def width(c: Choice) -> float:
    """The diameter of K, where the prox says what K is."""
    prox = prox_of(c.options.prox)
    return prox.diameter(c.d) if prox.bounded else c.constant("diameter")


def rho(c: Choice, rounds: int) -> float:
    """The Gaussian-DP mu of the run: the target, or what the given noise makes of it."""
    given = c.privacy.multipliers
    return c.rho if given is None else math.sqrt(rounds) / given["value"]


def printed_noise(case: Case) -> dict[str, float]:
    """Theorems 5.1 and 6.1 of 004: exact, and the claim is in GDP."""
    rho = case.gdp if case.gdp is not None else gaussian.mu_of(case.epsilon, case.delta)
    return {"value": math.sqrt(case.options.rounds) / rho}


ENTRIES = {
    "mu2": Entry(
        Mu2, MEANS, "corrected momentum, one pass, convex, on a ball or another bounded set", MU2,
        {"untrusted": "Thm 5.2", "trusted": "Thm 6.2"},
        example={"clip": 1.0, "diameter": 4.0, "batch": 2}, sampling="cumulative", samplings=("cumulative",),
        everyone=True, rate="1/sqrt(N n) + sqrt(d) / (n sqrt(N) eps) untrusted (n N eps trusted)",
        cost="2 per record of the chunk", theory=paper_choice, output="last", any_prox=True, conditions=THEOREM,
        asked_by=("gradient_bound", "smoothness", "diameter"),
        printed=Printed("mu2, Thm 5.1 and 6.1", printed_noise, claims_gdp=True),
    ),
}  # fmt: skip
