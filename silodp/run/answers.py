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

FOLDER, PLAN = "answers", "plan.json"
SERVER = "mean"  # in the place of a silo's number


class Answer(NamedTuple):
    """One answer: `values` as they were sent, in units of `step` (0: as they are)."""

    round: int
    query: str
    sender: str  # a silo's number, or SERVER
    values: np.ndarray
    step: float


class Answers:
    """Writes the answers of one run down while it goes on: whatever ends it, those that were heard are kept."""

    def __init__(self, plan: Plan, directory: RunDirectory):
        self.directory, self.arrays = directory, dict[str, np.ndarray]()
        self.parts = len(list((directory.path / FOLDER).glob("*.safetensors")))  # of a run that goes on
        directory.write_json(PLAN, plan.to_json())

    def add(self, round: int, query: str, present: Sequence[int], packed: Sequence[Packed], mean: Any) -> None:
        self.arrays[f"{round}/{query}/{SERVER}/value"] = np.asarray(mean)
        for silo, each in zip(present, packed, strict=True):
            if "step" not in each.facts:  # only noised numbers are sent in steps of a grid
                continue
            named = {"value": each.arrays["value"], "step": np.float64(each.facts["step"])}
            self.arrays |= {f"{round}/{query}/{silo}/{name}": np.asarray(array) for name, array in named.items()}

    def save(self) -> None:
        """What has come in since the last time, in a file of its own."""
        if self.arrays:
            self.directory.write_arrays(f"{FOLDER}/{self.parts:06d}.safetensors", self.arrays)
            self.arrays, self.parts = {}, self.parts + 1


def load_arrays(directory: RunDirectory) -> dict[str, np.ndarray]:
    files = sorted((directory.path / FOLDER).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{directory.path}: no answers were kept; set run.answers = true (message mode) before the run"
        )
    return {key: array for file in files for key, array in load_file(file).items()}


def load_answers(directory: RunDirectory) -> list[Answer]:
    """In the order of their rounds."""
    arrays = load_arrays(directory)
    found = []
    for key in arrays:
        round, query, sender, name = key.split("/")
        if name == "value":
            step = float(arrays.get(f"{round}/{query}/{sender}/step", 0.0))
            found.append(Answer(int(round), query, sender, arrays[key], step))
    return sorted(found, key=lambda answer: (answer.round, answer.query, answer.sender))
