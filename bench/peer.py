"""What every way of computing a clipped mean looks like to the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.workloads import Tree, Workload


@dataclass
class Peer:
    """`run` does the work and waits for it; `read` turns what it gave into the mean gradient, as numpy arrays."""

    run: Callable[[], Any]
    read: Callable[[Any], Tree]
    clipped: bool = True
    note: str = ""
    temporary_mb: float | None = None  # what XLA says that the program needs beside its inputs
    compile_seconds: float | None = None
    same: bool = True  # False: it cannot compute the same number, and its note says why


Build = Callable[[Workload, int], Peer | None]  # (workload, points) -> the peer, or None where it does not apply
