"""Seeded records of any size, and a compiled run on them whose single rounds can be timed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import clock, quartiles
from silodp.data.types import FederatedData, SiloData
from silodp.parse import parse_config
from silodp.run.prepare import prepare
from silodp.run.simulate import begin, compile_run

LONGEST = 128  # rounds of a run; fewer are carried out by starting late


def records(silos: int, size: int, width: int, classes: int = 0) -> FederatedData:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((silos, size, width), np.float32)
    if classes:
        targets = rng.integers(0, classes, (silos, size)).astype(np.int32)
    else:
        targets = rng.standard_normal((silos, size), np.float32)
    parts = tuple(SiloData(f"silo {i}", features[i], targets[i]) for i in range(silos))
    names = tuple(str(c) for c in range(classes))
    task = "classification" if classes else "regression"
    return FederatedData(source="synthetic", silos=parts, test=None, task=task, classes=names, notes=())


def difference_config(trust: str, hidden: int, activation: str, rounds: int = LONGEST) -> Any:
    return parse_config(
        {
            "model": {"kind": "mlp", "hidden": [hidden], "activation": activation},
            "privacy": {"trust": trust, "multipliers": {"value": 1.0, "difference": 1.0}},
            "algorithm": {
                "name": "diff2-gd", "rounds": rounds, "restart": rounds - 1, "step_size": 0.01, "clip": 1.0,
                "clip_difference": 1.0,
            },
            "run": {"every": rounds},
        }
    )  # fmt: skip


class Rounds:
    """DIFF2-GD's usual round (a difference of two points), without the measurement at the end of a run.

    The last round of every run is a restart: it gives the first carry a real point, and cancels in `cost`.
    """

    def __init__(
        self, data: FederatedData, trust: str = "untrusted", hidden: int = 10, activation: str = "softplus",
        longest: int = LONGEST,
    ):  # fmt: skip
        self.longest = longest
        prepared = prepare(difference_config(trust, hidden, activation, longest), data)
        self.problem, self.setting = prepared.problem, prepared.setting
        self.parameters = prepared.ground.objective.parameters
        self.carry, _ = begin(self.problem, self.setting, sweep=False)
        self.compiled = compile_run(self.problem, self.setting, self.carry, sweep=False)
        self.carry = self.run(1)[0]

    def run(self, rounds: int) -> Any:
        carry = eqx.tree_at(lambda c: c.round, self.carry, jnp.int32(self.longest - rounds))
        return jax.block_until_ready(self.compiled.advance(self.problem, self.setting, carry, jnp.int32(1)))

    def cost(self, rounds: int, tries: int = 3) -> dict[str, Any]:
        """CPU and wall milliseconds of a round: what `rounds` more of them add to a run."""
        pairs = [(clock(lambda: self.run(rounds + 1)), clock(lambda: self.run(1))) for _ in range(tries)]
        per = lambda i: quartiles([max(1e-6, 1e3 * (long[i] - short[i]) / rounds) for long, short in pairs])
        return {"cpu_ms": per(0), "wall_ms": per(1)}

    @property
    def temporary_mb(self) -> float:
        advance: Any = self.compiled.advance
        return advance.compiled.memory_analysis().temp_size_in_bytes / 1e6
