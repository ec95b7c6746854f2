"""Private stochastic gradients with momentum (STORM): MB-PSGM and CE-PSGM ("Efficient Private Federated Non-Convex
Optimization with Shuffled Model", Alg. 1; Thm 4.2, A.3), under any trust model.

    y = x = x0; v = 0
    for r = 0..R-1:   rho = 1 in round 0, `momentum` afterwards
        v = (1 - rho) * (v + private_mean(clip(grad f(x; z) - grad f(y; z), clip_difference * |x - y|)))
            + rho * private_mean(clip(grad f(x; z), clip))
        silo r mod N: w_0 = w_1 = x; for k = 1..K:
            v_k = v_{k-1} + private(clip(grad f(w_k; z) - grad f(w_{k-1}; z), clip_local * |w_k - w_{k-1}|))
            w_{k+1} = prox(w_k - step_size * v_k)
        y, x = x, w_{K+1}

local_steps K = 1 is MB-PSGM: the first local difference is zero and nothing local is released. Full batches are the -FG
variants. The paper takes the value at the point before x: an erratum. `fused` (ours) sends one vector a record,
clip(grad f(x; z) - (1-rho) * grad f(y; z), C) with C = (1-rho) * clip_difference * |x-y| + rho * clip:
one release a round instead of two. `batch_first` (B0) is a batch of round 0's own. Through a shuffler the two messages
of a record come from one batch, as in the paper; on the Gaussian channels each stream draws its own.

Formal guarantee: R releases `value` and R-1 releases `difference` (fused: R `value`), and for the silo that works K-1
releases `local` in each of its rounds. With `batch_first` the value of round 0 is a stream of its own, `first`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.algorithms.differences import LocalState, LocalSteps
from silodp.algorithms.entry import ALL, Case, Entry, Printed
from silodp.algorithms.papers import FULL, PSGM, SHUFFLED
from silodp.algorithms.proofs import (
    CLIP,
    DIFFERENCE,
    ENOUGH_MESSAGES,
    LOCAL,
    LOCAL_NOISE,
    MODEST,
    WHOLE_STEP,
    at_most,
    first_batch,
    noise_step,
    step,
)
from silodp.algorithms.theory import (
    GAP,
    Choice,
    difference_clips,
    difference_noise,
    heterogeneity,
    local_limits,
    optimum,
    stable_step,
    whole,
)
from silodp.core import NUMBER, POINT, Federation, Silo, distance
from silodp.errors import Inadmissible
from silodp.facts import Stream
from silodp.releases import Answer, Vector
from silodp.sampling import BatchRule, Full


class MomentumDifference(LocalSteps):
    """STORM's estimator, with local steps of one silo a round."""

    queries: ClassVar = {
        "value": (POINT,),
        "difference": (POINT, POINT),
        "fused_value": (POINT, POINT),
        "first_value": (POINT,),
        "refine": (POINT, POINT, POINT, NUMBER),
    }

    clip: Any
    clip_difference: Any
    momentum: Any
    batch: BatchRule = Full()
    batch_first: BatchRule | None = None
    fused: bool = eqx.field(static=True, default=False)

    def round(self, state: LocalState, fed: Federation) -> LocalState:
        return self.advance(state, self.estimate(state, fed), fed)

    def estimate(self, state: LocalState, fed: Federation) -> Vector:
        if self.batch_first is None:
            return self.momentum_estimate(state, fed)
        return fed.cond(
            fed.round == 0,
            lambda: fed.mean(self.first_value, state.x),
            lambda: self.momentum_estimate(state, fed),
        )

    def momentum_estimate(self, state: LocalState, fed: Federation) -> Vector:
        x, y, keep = state.x, state.previous, 1 - self.momentum
        if self.fused:
            return (1 - self.share(fed.round)) * state.v + fed.mean(self.fused_value, x, y)
        fresh = fed.mean(self.value, x)
        return fed.cond(
            fed.round == 0,
            lambda: fresh,
            lambda: keep * (state.v + fed.mean(self.difference, x, y)) + self.momentum * fresh,
        )

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def first_value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "first", self.batch_first)

    def difference(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        return silo.mean([x, y], [1.0, -1.0], self.difference_clip(x, y), "difference", self.batch)

    def share(self, round: Any) -> Any:
        """rho: a fresh start in round 0, the momentum afterwards."""
        return jnp.where(round == 0, 1.0, self.momentum)

    def fused_value(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        rho = self.share(silo.round)
        clip = None if self.clip is None else (1 - rho) * self.difference_clip(x, y) + rho * self.clip
        return silo.mean([x, y], [1.0, rho - 1], clip, "value", self.batch)

    def difference_clip(self, x: Vector, y: Vector) -> Any:
        return None if self.clip_difference is None else self.clip_difference * distance(x, y)

    def stream_of(self, query: str) -> str:
        return {"fused_value": "value", "first_value": "first", "refine": "local"}.get(query, query)

    @property
    def together(self) -> int:
        return 1 if self.fused else 2

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        has_first = int(0 in rounds)
        later = 0 if self.fused else len(rounds) - has_first
        first = 0 if self.batch_first is None else has_first
        streams = [
            Stream("value", len(rounds) - first, self.batch),
            Stream("difference", later, self.batch),
            self.local_stream(silo, len(sizes), rounds),
        ]
        if self.batch_first is None:
            return streams
        return [*streams, Stream("first", first, self.batch_first, alone=True)]


# --- what the theorems choose ------------------------------------------------------------------------------


def choice(c: Choice) -> None:
    """mb-psgm, ce-psgm: PSGM, Thm A.3, A.4, 4.2, A.2, proved there for the shuffle model. The theorems fix no rounds:
    those are chosen at which descent is as small as the cost of privacy (ours). Their bound on the step by the noise,
    sqrt(momentum) reach eps / (sqrt(d R) K L), is that of differences with 1/momentum for the restart interval, and
    is taken with the same constants: with constant 1 runs diverge."""
    difference_clips(c)
    K, b = c.steps, c.options.batch_local or c.n
    if K > 1:
        c.pick("clip_local", lambda: c.L)
    rounds = c.pick("rounds", lambda: whole(GAP * c.L / optimum(c)))
    momentum = c.pick("momentum", lambda: best_momentum(c, rounds))
    if c.options.batch and needed_first(c.options.batch, momentum, rounds) > c.options.batch:
        c.pick("batch_first", lambda: whole(needed_first(c.options.batch or 1, momentum, rounds), c.n))
    c.pick("step_size", lambda: min(step_limit(c, K, momentum, rounds), *local_limits(c, K, b, rounds)))


def needed_first(batch: int, momentum: float, rounds: int) -> float:
    """The least b0 for which 1/(R b0) <= momentum^2 / batch: a first estimate as good as those that follow."""
    return batch / (rounds * momentum**2)


def best_momentum(c: Choice, rounds: int) -> float:
    scale = (GAP * c.L) ** (2 / 3) / c.G ** (4 / 3)
    private = scale / (c.noise ** (1 / 3) * rounds)
    sampled = scale * (c.silos * c.options.batch) ** (1 / 3) / rounds ** (2 / 3) if c.options.batch else math.inf
    return min(1.0, max(1 / rounds, min(private, sampled)))


def step_limit(c: Choice, K: int, momentum: float, rounds: int) -> float:
    stream = "value" if c.options.fused else "difference"  # a fused message carries the difference too
    private = stable_step(c, difference_noise(c, stream, rounds=rounds), 1 / momentum, K)
    sampled = math.sqrt(momentum * c.silos * c.options.batch) / (K * c.L) if c.options.batch else math.inf
    return min(private, sampled)


# --- the noise that the paper prints -----------------------------------------------------------------------


def printed_level(case: Case) -> dict[str, float]:
    """1/eps0 of the printed conditions; they are refused together when no eps0 meets them."""
    eps0, reasons = paper_eps0(case)
    if (case.options.local_steps or 1) > 1:
        reasons = (*reasons, "Thm 4.1 gives the noise of local steps only up to a constant")
    if reasons:
        raise Inadmissible(reasons)
    return {"message": 1 / eps0}


def paper_eps0(case: Case) -> tuple[float, tuple[str, ...]]:
    """eps0 from the printed conditions of Lemma A.9 and the budget of Theorem 4.1 (constant 1536), and those of them
    that forbid one. All of them bound e^eps0 from above, but Lemma A.8 is stated for eps0 >= 1 only."""
    constant, order = 1536, 1 + 2 * math.log(1 / case.delta) / case.epsilon
    first = case.options.batch_first or case.batch
    limits, reasons = [], []
    for size in sorted({first, case.batch}):
        rate, sent = size / case.records, case.silos * size
        hidden = math.log(1 / rate)
        if rate > 0.1:
            reasons.append(f"Lemma A.9 (i): sampling rate {rate:g} is above 0.1")
        limits += [
            ("Lemma A.9 (i), 1536 e^eps0 / (M B) <= 0.1", 0.1 * sent / constant),
            ("Lemma A.9 (iii), 6 * 1536 e^eps0 <= M B ln(1/rate)", sent * hidden / (6 * constant)),
            ("Lemma A.9 (ii), 1536 >= 16 eps0 ln(1/rate)", math.exp(min(96 / max(hidden, 1), 96))),
            (
                f"Lemma A.9, order {order:.1f} <= M B ln(1/rate) / (4 * 1536 e^eps0)",
                sent * hidden / (4 * constant * order),
            ),
        ]
    sampled = first + case.options.rounds * case.batch  # n (gamma_0 + R gamma_1)
    spent = 52 * constant * sampled * order / (case.silos * case.records**2)
    limits.append((f"budget: {spent:.3g} e^eps0 <= epsilon/4", case.epsilon / 4 / spent))
    for condition, largest in limits:
        if largest < math.e:
            allowed = f"eps0 <= {math.log(largest):.2f}" if largest > 0 else "no eps0"
            reasons.append(f"{condition}: allows {allowed}, but Lemma A.8 needs eps0 >= 1")
    return math.log(max(min(largest for _, largest in limits), 1e-300)), tuple(reasons)


def duchi(c: Choice) -> bool:
    return c.options.randomizer in (None, "duchi") and not c.options.fused


# Thm A.3 and A.4; without a batch the conditions about it hold by themselves.
COMMON_CONDITIONS = (
    ("Duchi's randomizer, two messages", duchi), CLIP, DIFFERENCE, WHOLE_STEP, MODEST,
    noise_step(
        "sqrt(momentum) n N epsilon/(K L sqrt(R d))",
        lambda c: 1 / c.options.momentum if c.options.momentum else math.inf,
    ),
    at_most(
        "1/(R b0) <= momentum^2/batch",
        lambda c: 0.0 if c.options.batch is None else 1 / (c.options.rounds * first_batch(c)),
        lambda c: (c.options.momentum or 0.0) ** 2 / (c.options.batch or c.n),
    ),
    ENOUGH_MESSAGES,
    step(
        "sqrt(momentum N batch)/(K L)",
        lambda c: math.inf if c.options.batch is None
        else math.sqrt((c.options.momentum or 0.0) * c.silos * c.options.batch) / (c.steps * c.L),
    ),
)  # fmt: skip
# Thm 4.2 and A.2 add what the local steps need.
LOCAL_CONDITIONS = (
    *COMMON_CONDITIONS, LOCAL,
    step("1/(K tau)", lambda c: 1 / (c.steps * heterogeneity(c))),
    step("sqrt(b/K)/L", lambda c: math.sqrt((c.options.batch_local or c.n) / c.steps) / c.L),
    LOCAL_NOISE,
    ("batch = K batch_local or all records",
     lambda c: c.options.batch in (None, c.steps * (c.options.batch_local or c.n))),
)  # fmt: skip

CLIPS = {"clip": 1.0, "clip_difference": 0.7, "momentum": 0.3}
LOCAL_EXAMPLE = {"clip_local": 0.7, "local_steps": 3, "batch_local": 8}
ONE_STEP: dict[str, Any] = {"local_steps": 1, "clip_local": None, "batch_local": Full()}
ONE_BATCH: dict[str, Any] = {"batch_first": None}
COMMON: dict[str, Any] = {
    "theory": choice,
    "printed": Printed("PSGM, Thm 4.1 and Lemma A.9", printed_level, SHUFFLED),
    "rate": "1/R + (sqrt(d) / (n N eps))^(4/3) shuffled",
    "output": "local",
}
MESSAGES, AND_LOCAL = "64 d (fused: 32 d)", "64 d (fused: 32 d), and 64 d for one silo"

ENTRIES = {
    "mb-psgm": Entry(
        MomentumDifference, ALL, "momentum with private differences (STORM)", PSGM, {"shuffled": "Thm A.3"},
        example=CLIPS, fixed=ONE_STEP, cost="3b", bits=MESSAGES, conditions=COMMON_CONDITIONS,
        case=lambda c: "Thm A.4" if c.options.batch is None else "Thm A.3", **COMMON,
    ),
    "ce-psgm": Entry(
        MomentumDifference, ALL, "momentum with private differences and local steps of one silo a round", PSGM,
        {"shuffled": "Thm 4.2"}, example=CLIPS | LOCAL_EXAMPLE, everyone=True, cost="3b, and 2 K b for one silo",
        bits=AND_LOCAL, conditions=LOCAL_CONDITIONS,
        case=lambda c: "Thm A.2" if c.options.batch is None else "Thm 4.2", **COMMON,
    ),
    "mb-psgm-fg": Entry(
        MomentumDifference, ALL, "mb-psgm on full gradients", PSGM, {"shuffled": "Thm A.4"},
        example=CLIPS, fixed=ONE_STEP | ONE_BATCH, cost="3n", bits=MESSAGES, conditions=COMMON_CONDITIONS,
        **FULL, **COMMON,
    ),
    "ce-psgm-fg": Entry(
        MomentumDifference, ALL, "ce-psgm on full gradients", PSGM, {"shuffled": "Thm A.2"},
        example=CLIPS | LOCAL_EXAMPLE, fixed=ONE_BATCH, everyone=True, cost="3n, and 2 K b for one silo",
        bits=AND_LOCAL, conditions=LOCAL_CONDITIONS, **FULL, **COMMON,
    ),
}  # fmt: skip
