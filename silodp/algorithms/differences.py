"""Recursive differences with restarts: DIFF2-GD (Murata, Suzuki 2023, Alg. 1 and 3; Thm 4.3) and FedProx-SPIDER
(Lowy, Ghafelebashi, Razaviyayn 2023, Alg. 3; Thm 3.1). The two papers' estimators are one.

    v = 0; y = x = x0
    for r = 0..R-1:
        if r mod restart == 0:  v = private_mean(clip(grad f(x; z), clip))
        else:                   v = v + private_mean(clip(grad f(x; z) - grad f(y; z), clip_difference * |x - y|))
        y, x = x, prox(x - step_size * v)

A difference moves with |x - y|, so its noise shrinks as the run settles; that is the whole point of the method.
A difference of two gradients clipped to `clip` cannot exceed 2 * clip: `capped` uses that. DIFF2's own form has no cap.

DIFF2-BVR-L-SGD (Alg. 4; Thm 5.3) lets ONE silo a round carry the estimate on by steps of its own (`LocalSteps`):

    x_1 = x - step_size * v;  silo r mod N, for k = 1..K-1, on a fixed-size batch:
        v = v + private(clip(grad f(x_k; z) - grad f(x_{k-1}; z), clip_local * |x_k - x_{k-1}|))
        x_{k+1} = prox(x_k - step_size * v)

Formal guarantee: ceil(R/restart) releases `value` of sensitivity 2*clip/n and the other rounds' releases `difference`
of sensitivity 2*min(clip_difference*|x-y|, 2*clip)/n. Both streams are calibrated together (Lowy's Thm F.1 gives each
of them the whole budget: an erratum). Local steps are K-1 releases `local` in each of the silo's rounds, noised in the
silo: whatever the trust model, they protect and are charged to that silo alone. K = 1 is DIFF2-GD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from silodp.algorithms.entry import ALL, MEANS, Entry, Printed
from silodp.algorithms.papers import (
    DIFF2,
    LOWY,
    NONCONVEX,
    SHUFFLED,
    SUMS,
    bvr_noise,
    diff2_noise,
    lowy_sgd_noise,
    spider_noise,
    summed_spider,
)
from silodp.algorithms.proofs import (
    CAPPED,
    CLIP,
    DIFFERENCE,
    ENOUGH,
    FULL,
    HALF_STEP,
    LOCAL,
    LOCAL_NOISE,
    MODEST,
    SMALL_LOCAL_BATCH,
    noise_step,
    small_epsilon,
    step,
)
from silodp.algorithms.theory import (
    Choice,
    difference_clips,
    difference_noise,
    heterogeneity,
    horizon,
    local_limits,
    optimum,
    stable_step,
    whole,
)
from silodp.core import NUMBER, POINT, Algorithm, Federation, Silo, distance
from silodp.facts import Stream, turns
from silodp.privacy.accountant import optimal_share
from silodp.releases import Answer, Public, Vector
from silodp.sampling import BatchRule, Full


class State(eqx.Module):
    x: Vector
    previous: Vector
    v: Vector
    kept: PyTree = ()  # by the server's optimiser


class LocalState(eqx.Module):
    x: Vector
    previous: Vector
    v: Vector
    local: Vector  # uniform among the points at which this round's local steps began
    kept: PyTree = ()


class RecursiveDifference(Algorithm):
    """v follows the gradient by private differences and starts afresh every `restart` rounds."""

    queries: ClassVar = {"value": (POINT,), "difference": (POINT, POINT)}
    steps: ClassVar[bool] = True

    clip: Any
    restart: int = eqx.field(static=True)
    clip_difference: Any = None
    capped: bool = eqx.field(static=True, default=True)
    batch: BatchRule = Full()
    batch_difference: BatchRule | None = None  # as `batch` unless given

    def init(self, x0: Vector) -> Any:
        return State(x0, x0, jnp.zeros_like(x0), self.opened(x0))

    def round(self, state: Any, fed: Federation) -> Any:
        v = self.estimate(state, fed)
        x, kept = self.stepped(state.x, v, fed.round, state.kept)
        return State(x, state.x, v, kept)

    def estimate(self, state: Any, fed: Federation) -> Vector:
        return fed.cond(
            fed.round % self.restart == 0,
            lambda: fed.mean(self.value, state.x),
            lambda: state.v + fed.mean(self.difference, state.x, state.previous),
        )

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch)

    def difference(self, silo: Silo, x: Vector, y: Vector) -> Answer:
        return silo.mean([x, y], [1.0, -1.0], self.difference_clip(x, y), "difference", self.sampled)

    @property
    def sampled(self) -> BatchRule:
        """Which records answer with a difference."""
        return self.batch if self.batch_difference is None else self.batch_difference

    def difference_clip(self, x: Vector, y: Vector) -> Any:
        """Two gradients of norm `clip` are never further than 2 * clip apart: all that is known without a C2."""
        if self.clip_difference is None:
            return None if self.clip is None else 2 * self.clip
        scaled = self.clip_difference * distance(x, y)
        return jnp.minimum(scaled, 2 * self.clip) if self.capped and self.clip is not None else scaled

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        values = turns(rounds, self.restart)
        differences = len(rounds) - values
        return [Stream("value", values, self.batch), Stream("difference", differences, self.sampled)]

    def optimal_shares(self, rounds: int) -> dict[str, float] | None:
        """Guesses that a step has length step_size * clip; then both streams' noise is known."""
        if self.clip is None or self.restart == 1:
            return None
        step = float(self.step_size) * float(self.clip)
        cap = 2 * float(self.clip)
        difference = cap if self.clip_difference is None else min(float(self.clip_difference) * step, cap)
        values = -(-rounds // self.restart)
        path = (self.restart - 1) * difference**2
        share = optimal_share(values, rounds - values, float(self.clip) ** 2, path)
        return {"value": share, "difference": 1 - share}


class Diff2(RecursiveDifference):
    """DIFF2's own form: a clip per unit of distance, without a cap."""

    def check(self, rounds: int) -> None:
        if self.clip_difference is None and self.clip is not None:
            raise ValueError("algorithm.clip_difference is missing: DIFF2 does not cap differences at 2 * clip")


class LocalSteps(Algorithm):
    """One silo a round carries the server's estimate on by `local_steps` - 1 steps of its own."""

    steps: ClassVar[bool] = True

    clip_local: Any = eqx.field(kw_only=True, default=None)
    local_steps: int = eqx.field(static=True, kw_only=True, default=1)
    batch_local: BatchRule = eqx.field(kw_only=True, default=Full())

    def check(self, rounds: int) -> None:
        clipped = getattr(self, "clip", None) is not None
        if clipped and self.local_steps > 1 and self.clip_local is None:
            raise ValueError("algorithm.clip_local is missing: local steps release differences of their own")
        super().check(rounds)

    def init(self, x0: Vector) -> LocalState:
        return LocalState(x0, x0, jnp.zeros_like(x0), x0, self.opened(x0))

    def advance(self, state: LocalState, v: Vector, fed: Federation) -> LocalState:
        """A step along v, and the local steps of the silo whose turn it is."""
        first, kept = self.stepped(state.x, v, fed.round, state.kept)
        if self.local_steps == 1:
            return LocalState(first, state.x, v, state.x, kept)
        shown = jnp.floor(fed.coin("local iterate") * self.local_steps)
        both = fed.local(fed.round % fed.silos, self.refine, first, state.x, v, shown)
        last, local = jnp.split(both, 2)
        return LocalState(last, state.x, v, local, kept)

    def candidate(self, before: Any, after: Any) -> Vector:
        return after.local

    def refine(self, silo: Silo, x: Vector, y: Vector, v: Vector, shown: Array) -> Public:
        """The point after the last local step, and the one at which step number `shown` of the round began."""
        rate = self.rate(silo.round)

        def step(k: Any, carry: tuple[Vector, ...]) -> tuple[Vector, ...]:
            x, y, v, local = carry
            clip = None if self.clip_local is None else self.clip_local * distance(x, y)
            v = v + silo.privatise(silo.mean([x, y], [1.0, -1.0], clip, "local", self.batch_local, k), k)
            return self.prox(x - rate * self.slope(x, v), rate), x, v, jnp.where(shown == k + 1, x, local)

        last, _, _, local = silo.loop(self.local_steps - 1, step, (x, y, v, y))
        return Public(jnp.concatenate([last, local]))

    def local_stream(self, silo: int, silos: int, rounds: Sequence[int]) -> Stream:
        own = turns(rounds, silos, silo)
        return Stream("local", own * (self.local_steps - 1), self.batch_local, local=True)


class LocalDifference(LocalSteps, Diff2):
    """DIFF2-BVR-L-SGD."""

    queries: ClassVar = {**RecursiveDifference.queries, "refine": (POINT, POINT, POINT, NUMBER)}

    def round(self, state: LocalState, fed: Federation) -> LocalState:
        return self.advance(state, self.estimate(state, fed), fed)

    def stream_of(self, query: str) -> str:
        return "local" if query == "refine" else query

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [*super().releases(silo, sizes, rounds), self.local_stream(silo, len(sizes), rounds)]


# --- what the theorems choose ------------------------------------------------------------------------------


def difference_step(c: Choice, rounds: int, restart: int) -> float:
    """The longest step at which noise gathered between restarts stays below the descent."""
    return stable_step(c, difference_noise(c, rounds=rounds, restart=restart), restart)


def diff2(c: Choice) -> None:
    """diff2-gd: DIFF2, Thm 4.3."""
    difference_clips(c)
    rounds = c.pick("rounds", lambda: whole(1 + c.L / optimum(c) + c.L**2 * c.noise / optimum(c) ** 2))
    restart = c.pick("restart", lambda: diff2_restart(c, rounds))
    c.pick("step_size", lambda: difference_step(c, rounds, restart))


def diff2_restart(c: Choice, rounds: int) -> int:
    share = (c.G**2 * math.sqrt(c.noise) / c.L) ** (2 / 3)
    return whole(share * rounds, rounds)


def bvr(c: Choice) -> None:
    """diff2-bvr-l-sgd: DIFF2, Thm F.4; local_steps and batch_local are the config's."""
    difference_clips(c)
    K, b = c.steps, c.options.batch_local or c.n
    if K > 1:
        c.pick("clip_local", lambda: c.L)
    rounds = c.pick("rounds", lambda: bvr_rounds(c, K, b))
    restart = c.pick("restart", lambda: diff2_restart(c, rounds))
    noisy = lambda: difference_noise(c, rounds=rounds, restart=restart)
    c.pick("step_size", lambda: min(stable_step(c, noisy(), restart, K), *local_limits(c, K, b, rounds)))


def bvr_rounds(c: Choice, K: int, b: int) -> int:
    descent = c.L / K + heterogeneity(c) + c.L / math.sqrt(K * b)
    private = c.d * math.log(1 / c.privacy.delta) / c.epsilon
    noisy, lasting = c.L * math.sqrt(private / K) / b, c.L**2 * private / (c.n**2 * c.silos * c.epsilon)
    return whole(1 + (descent + noisy) / optimum(c) + lasting / optimum(c) ** 2)


def spider(c: Choice) -> None:
    """spider: Lowy et al., Thm F.1 (F.2 with a shuffler): R = sqrt(q L / noise) / G, and the largest q for which
    q <= 1/(tau2 eta)^2. That condition is q R <= cap for the noise that is really added; solving it for q gives the
    theorem's q with its constant."""
    difference_clips(c)
    cap = lambda: 1 / (2 * c.d * difference_noise(c, rounds=2, restart=2) ** 2)
    longest = lambda: math.floor(max(1.0, min((cap() / horizon(c)) ** (2 / 3), sampled_silos(c))))
    rounds = c.pick("rounds", lambda: whole(math.sqrt(longest()) * horizon(c)))
    restart = c.pick("restart", lambda: math.floor(max(1.0, min(cap() / rounds, sampled_silos(c), rounds))))
    c.pick("step_size", lambda: difference_step(c, rounds, restart))


def sampled_silos(c: Choice) -> float:
    return math.inf if c.facts.everyone else float(c.n * c.silos)


def spider_alt(c: Choice) -> None:
    """spider-alt: no theorem; spider's with q = 2."""
    difference_clips(c)
    rounds = c.pick("rounds", lambda: whole(math.sqrt(2) * horizon(c)))
    c.pick("step_size", lambda: stable_step(c, difference_noise(c, rounds=rounds), 2))


# Thm F.1 and F.2; the restart interval only decides how good the bound is.
SPIDER = (FULL, CLIP, CAPPED, HALF_STEP)
SPIDER_SILOS = (*SPIDER, small_epsilon("2 ln(1/delta)", lambda log: 2 * log))
SPIDER_SUMS = (*SPIDER, MODEST)
RESTARTED = noise_step("n N epsilon/(K L sqrt(restart R d))", lambda c: c.options.restart or 1)
THM_4_3 = (FULL, CLIP, DIFFERENCE, HALF_STEP, RESTARTED, ENOUGH)
THM_5_3 = (
    *THM_4_3, LOCAL,
    step("1/(K zeta)", lambda c: 1 / (c.steps * heterogeneity(c))),
    step("sqrt(b/K)/L", lambda c: math.sqrt((c.options.batch_local or c.n) / c.steps) / c.L),
    LOCAL_NOISE, *SMALL_LOCAL_BATCH,
)  # fmt: skip

CLIPS = {"clip": 1.0, "clip_difference": 0.7, "restart": 3}
COST = "2n (n at a restart)"

ENTRIES = {
    "diff2-gd": Entry(
        Diff2, ALL, "private gradient differences with restarts", DIFF2, {"trusted": "Thm 4.3"},
        example=CLIPS, fixed={"capped": False}, theory=diff2, printed=Printed("DIFF2, Prop. 4.1", diff2_noise),
        rate="(sqrt(d) / (n N eps))^(4/3)", cost=COST, output="before",
        conditions=THM_4_3,
    ),
    "diff2-bvr-l-sgd": Entry(
        LocalDifference, MEANS, "DIFF2 with local steps of one silo a round", DIFF2, {"trusted": "Thm 5.3"},
        example=CLIPS | {"clip_local": 0.7, "local_steps": 3, "batch_local": 8}, fixed={"capped": False},
        everyone=True, theory=bvr, printed=Printed("DIFF2, Prop. E.2", bvr_noise),
        rate="(sqrt(d) / (n N eps))^(4/3), fewer rounds", cost="2n, and 2 K b for one silo",
        bits="32 d, and 64 d for one silo", output="local", conditions=THM_5_3,
    ),
    "spider": Entry(
        RecursiveDifference, ALL, "private gradient differences with restarts, any prox", LOWY,
        {"untrusted": "Thm 3.1"}, example=CLIPS | {"prox": {"kind": "l1", "strength": 0.01}}, any_prox=True,
        theory=spider, printed=Printed("Lowy et al., Thm F.1", spider_noise), rate=NONCONVEX, cost=COST,
        conditions=SPIDER_SILOS, some_silos=True, case=lambda c: "Thm 3.1" if c.facts.everyone else "Thm F.1",
    ),
    "spider-alt": Entry(
        RecursiveDifference, MEANS, "spider in pairs of rounds on Poisson batches", LOWY,
        example={"clip": 1.0, "clip_difference": 0.7, "batch": 8}, fixed={"restart": 2}, sampling="poisson",
        theory=spider_alt, cost="b, then 2b",
        printed=Printed("Lowy et al., App. H.2", lambda c: lowy_sgd_noise(c, c.options.rounds, "value", "difference")),
    ),
    "sdp-spider": Entry(
        RecursiveDifference, SHUFFLED, "spider on P_vec's sums", LOWY, {"shuffled": "Thm 3.2"}, example=CLIPS,
        any_prox=True, randomizer="pvec", theory=spider, cost=COST, bits=SUMS, conditions=SPIDER_SUMS,
        printed=Printed("Lowy et al., Alg. 10", summed_spider, SHUFFLED),
        some_silos=True, case=lambda c: "Thm 3.2" if c.facts.everyone else "Thm F.2",
    ),
}  # fmt: skip
