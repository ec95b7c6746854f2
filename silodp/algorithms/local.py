"""Local SGD (FedAvg), with noise: ISRL-DP Local SGD, a baseline of Lowy, Ghafelebashi and Razaviyayn (2023, App. H).

    for r = 0..R-1:
        every silo, from x:  for k = 1..K:  w = prox(w - step_size * private(clip(grad f(w; z), clip)))
        x = mean of the silos' w

Formal guarantee: every local step is a release `local` of its silo, R*K in all, noised in the silo before it is used;
the model that is sent is made of those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx

from silodp.algorithms.entry import Entry, Printed
from silodp.algorithms.gradient import State
from silodp.algorithms.papers import LOWY, lowy_sgd_noise
from silodp.algorithms.theory import Choice, horizon, whole
from silodp.core import POINT, Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.releases import Public, Vector
from silodp.sampling import BatchRule, Full


class LocalSGD(Algorithm):
    """Silos run `local_steps` private steps; the server averages their models."""

    queries: ClassVar = {"train": (POINT,)}
    steps: ClassVar[bool] = True

    clip: Any
    local_steps: int = eqx.field(static=True)
    batch: BatchRule = Full()

    def init(self, x0: Vector) -> State:
        return State(x0, self.opened(x0))

    def round(self, state: State, fed: Federation) -> State:
        mean = fed.mean(self.train, state.x)
        if self.optimiser is None:
            return State(mean)
        # How far the silos went, as a gradient: a plain step of length 1 along it would be their mean.
        direction, kept = self.optimiser(state.x - mean, state.kept)
        return State(state.x - direction, kept)

    def train(self, silo: Silo, x: Vector) -> Public:
        def step(k: Any, w: Vector) -> Vector:
            v = silo.privatise(silo.mean([w], [1.0], self.clip, "local", self.batch, k), k)
            rate = self.rate(silo.round)
            return self.prox(w - rate * self.slope(w, v), rate)

        return Public(silo.loop(self.local_steps, step, x))

    def stream_of(self, query: str) -> str:
        return "local"

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream("local", len(rounds) * self.local_steps, self.batch, local=True)]


def steps_of(c: Choice) -> None:
    """local-sgd: no theorem in the papers; as many local steps in all as `gradient` takes, K times shorter (ours)."""
    c.pick("clip", lambda: c.G)
    rounds = c.pick("rounds", lambda: whole(horizon(c) / c.steps))
    c.pick("step_size", lambda: min(1.0, horizon(c) / rounds) / (c.steps * c.L))


ENTRIES = {
    "local-sgd": Entry(
        LocalSGD, ("untrusted", "aggregated"), "silos train locally with noise, models are averaged", LOWY,
        example={"clip": 1.0, "batch": 8, "local_steps": 3}, sampling="poisson",
        samplings=("full", "poisson", "fixed"), theory=steps_of, cost="K b",
        printed=Printed(
            "Lowy et al., App. H.2",
            lambda c: lowy_sgd_noise(c, c.options.rounds * (c.options.local_steps or 1), "local"),
        ),
    ),
}  # fmt: skip
