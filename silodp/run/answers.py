"""The answers of a message run, kept for a later look at them: only what everybody may see anyway.

An untrusted server sees every silo's message (compressed ones are not kept); under the other trust models only the mean
that comes out is public, and nothing else is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from silodp.channels import Packed
from silodp.errors import ConfigError

if TYPE_CHECKING:
    from silodp.plan.plan import Plan
    from silodp.run.directory import RunDirectory

FILE, PLAN = "answers.safetensors", "plan.json"
SERVER = "mean"  # in the place of a silo's number


class Answer(NamedTuple):
    """One answer: `values` as they were sent, in units of `step` (0: as they are)."""

    round: int
    query: str
    sender: str  # a silo's number, or SERVER
    values: np.ndarray
    step: float


class Answers:
    """Collects the answers of one run."""

    def __init__(self, plan: Plan):
        self.plan, self.arrays = plan, dict[str, np.ndarray]()

    def add(self, round: int, query: str, packed: Sequence[Packed], mean: Any) -> None:
        self.arrays[f"{round}/{query}/{SERVER}/value"] = np.asarray(mean)
        for silo, each in zip(self.plan.facts.present(round), packed, strict=True):
            if "step" not in each.facts:  # only noised numbers are sent in steps of a grid
                continue
            named = {"value": each.arrays["value"], "step": np.float64(each.facts["step"])}
            self.arrays |= {f"{round}/{query}/{silo}/{name}": np.asarray(array) for name, array in named.items()}

    def save(self, directory: RunDirectory) -> None:
        directory.write_arrays(FILE, self.arrays)
        directory.write_json(PLAN, self.plan.to_json())


def load_answers(directory: RunDirectory) -> list[Answer]:
    """In the order of their rounds."""
    if not (directory.path / FILE).is_file():
        raise ConfigError(
            f"{directory.path}: no answers were kept; set run.answers = true (message mode) before the run"
        )
    arrays = load_file(directory.path / FILE)
    found = []
    for key in arrays:
        round, query, sender, name = key.split("/")
        if name == "value":
            step = float(arrays.get(f"{round}/{query}/{sender}/step", 0.0))
            found.append(Answer(int(round), query, sender, arrays[key], step))
    return sorted(found, key=lambda answer: (answer.round, answer.query, answer.sender))
