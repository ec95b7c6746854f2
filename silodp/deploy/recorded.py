"""The server's own random numbers of a round, on the disk before they are used: a resumed round repeats them.

Otherwise a round that is asked again would toss other coins and ask another question, which no silo answers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from silodp.deploy.files import sync_folder
from silodp.deploy.wire import decode, encode, read_frame, write_frame
from silodp.errors import Refused
from silodp.randomness import Shape, Step, SystemRandomness


def checksum(purpose: str, value: np.ndarray) -> str:
    return hashlib.sha256(f"{purpose}|{value.dtype}|{value.shape}|".encode() + value.tobytes()).hexdigest()


class Recorded:
    """The operating system's numbers, kept for the round that is under way. A stage has a file of its own."""

    def __init__(self, folder: Path):
        self.folder, self.path, self.system = folder, folder, SystemRandomness()
        self.left: list[tuple[str, np.ndarray]] = []  # drawn before this program was stopped, not used again yet

    def begin(self, stage: str, round: int) -> None:
        self.path = self.folder / f"coins.{stage}"
        entries = self._read()
        if entries and entries[0][0] == f"round {round}":
            self.left = entries[1:]
            return
        self.left = []
        self.path.unlink(missing_ok=True)
        self._append(f"round {round}", np.zeros(0))

    def _read(self) -> list[tuple[str, np.ndarray]]:
        """Entries up to the last whole one. What comes after it was never used, and must not stand before new ones."""
        if not self.path.is_file():
            return []
        entries, whole = [], 0
        with self.path.open("r+b") as file:
            with suppress(Refused, LookupError):  # of an entry that was not written to its end
                while data := read_frame(file):
                    header, arrays = decode(data)
                    if header.get("checksum") != checksum(header["purpose"], arrays["value"]):
                        break
                    entries.append((header["purpose"], arrays["value"]))
                    whole = file.tell()
            file.truncate(whole)
        return entries

    def _append(self, purpose: str, value: np.ndarray) -> None:
        new = not self.path.exists()
        with self.path.open("ab") as file:
            write_frame(file, encode({"purpose": purpose, "checksum": checksum(purpose, value)}, {"value": value}))
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)

    def next(self, purpose: str) -> np.ndarray | None:
        """What was kept under this purpose next, if anything was kept."""
        if not self.left:
            return None
        found, value = self.left.pop(0)
        if found != purpose:
            raise Refused(f"{self.path}: holds {found!r} where {purpose!r} comes; not this run's")
        return value

    def keep(self, purpose: str, value: np.ndarray) -> None:
        self._append(purpose, value)

    def _drawn(self, purpose: str, draw: Callable[[], Array]) -> Array:
        known = self.next(purpose)
        if known is not None:
            return jnp.asarray(known)
        value = draw()
        self.keep(purpose, np.asarray(value))
        return value

    def step_of(self, noised: Array, std: Array) -> Array:
        return self.system.step_of(noised, std)

    def noised(self, purpose: str, value: Any, std: Array, step: Step = 0) -> Array:
        return self._drawn(f"noised {purpose}", lambda: self.system.noised(purpose, value, std, step))

    def tilted(self, purpose: str, unit: Array, threshold: float, above: float, step: Step = 0) -> Array:
        return self._drawn(f"tilted {purpose}", lambda: self.system.tilted(purpose, unit, threshold, above, step))

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Array:
        return self._drawn(f"normal {purpose}", lambda: self.system.normal(purpose, shape, step))

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Array:
        return self._drawn(f"uniform {purpose}", lambda: self.system.uniform(purpose, shape, step))

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> Array:
        return self._drawn(f"bits {purpose}", lambda: self.system.bits(purpose, shape, step))

    def scattered(self, purpose: str, rows: Array, step: Step = 0) -> Array:
        return self._drawn(f"scattered {purpose}", lambda: self.system.scattered(purpose, rows, step))
