"""What the authors' programs do and their papers do not say: for comparison only. NOTHING HERE IS PRIVATE.

SoteriaFL's program clips a silo's ESTIMATE, the mean over a batch, to G, and adds noise that is calibrated as if every
record's gradient had been clipped. One record may then move what is sent by 2G and not by 2G/b, so the noise protects
nobody. The published figures were made this way; per-record clipping gives others.

    g_i = clip(estimate_i, G) + N(0, c G^2 T ln(1/delta) / (m epsilon)^2)

Without a privacy section's target the library adds no noise of its own: what is drawn here is part of the message, and
a run's certificate says that it is not private.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from silodp.algorithms.gradient import GradientDescent
from silodp.algorithms.soteria import SVRG
from silodp.core import Algorithm, Silo, norm
from silodp.releases import Answer, Release, Vector


class ClippedMean(Algorithm):
    """What both estimators share: the noise that the program draws."""

    mean_clip: float = eqx.field(static=True, kw_only=True)  # G
    constant: float = eqx.field(static=True, kw_only=True)  # c
    claimed_epsilon: float = eqx.field(static=True, kw_only=True)
    claimed_delta: float = eqx.field(static=True, kw_only=True)
    rounds: int = eqx.field(static=True, kw_only=True)

    def clipped_as_a_whole(self, silo: Silo, estimate: Vector) -> Release:
        length = norm(estimate)
        clipped = estimate * jnp.minimum(1.0, self.mean_clip / jnp.maximum(length, 1e-30))
        log = math.log(1 / self.claimed_delta)
        spread = self.mean_clip * math.sqrt(self.constant * self.rounds * log) / self.claimed_epsilon
        noise = silo.randomness.normal("noise/value", estimate.shape) * (spread / silo.size)
        return Release(clipped + noise, jnp.float32(jnp.inf), "value")


class ClippedMeanSGD(ClippedMean, GradientDescent):
    """LDP-SGD, CDP-SGD and SoteriaFL-SGD of the program, by what compresses."""

    entry: ClassVar = {
        "summary": "SoteriaFL's program: clip of the batch mean, not private",
        "private": False,
        "sampling": "fixed",
        "samplings": ("fixed",),
    }

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], None, "value", self.batch).mean()
        return self.clipped_as_a_whole(silo, mean.high)


class ClippedMeanSVRG(ClippedMean, SVRG):
    """LDP-SVRG and SoteriaFL-SVRG of the program."""

    entry: ClassVar = {
        "summary": "SoteriaFL's program with SVRG: clip of the estimate, not private",
        "private": False,
        "sampling": "fixed",
        "samplings": ("fixed",),
    }

    @property
    def rule(self) -> Any:
        return self.batch

    def estimate(self, silo: Silo, x: Vector, anchor: Vector, fresh: Any) -> Answer:
        unclipped = super().estimate(silo, x, anchor, fresh)
        assert isinstance(unclipped, Release)
        return self.clipped_as_a_whole(silo, unclipped.value)
