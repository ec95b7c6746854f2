"""How hard XLA tries, and on how many threads. What runs once on a few records is compiled for longer than it runs."""

from __future__ import annotations

import os

# Compiling takes a third of the time. What is computed is the same, but for the order of roundings. A program is
# compiled in one piece: pieces cost a fifth more, and as many processes as cores leave nobody to share them with.
OPTIONS: dict[str, str | bool] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": "0",
    "xla_cpu_parallel_codegen_split_count": "1",
}
QUICK = " ".join(f"--{name}={value}".lower() for name, value in OPTIONS.items())


def compile_quickly() -> None:
    """For this process and those that it starts; to be called before JAX is used. A user's own flags stay."""
    os.environ.setdefault("XLA_FLAGS", QUICK)
    # No operation is told which lines of source it came from: lowering a program is quicker without.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


THREADS = "PJRT_NPROC"  # XLA reads it when it starts; without it there is a thread for each core


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(processes: int) -> dict[str, str]:
    """For the environment of each of so many processes that compute side by side: together they have a thread for each
    core. A number that the user has set stays."""
    return {THREADS: os.environ.get(THREADS, str(max(1, cores() // processes)))}
