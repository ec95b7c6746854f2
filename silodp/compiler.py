"""How hard XLA tries, and on how many threads. What runs once on a few records is compiled for longer than it runs."""

from __future__ import annotations

import os
from pathlib import Path

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


MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # of Linux


def make_room() -> None:
    """JAX keeps all that a process has compiled, some 230 maps of memory for a fit, and Linux gives a process 65,530:
    the 280th fit would end it. When half of them are taken, programs are forgotten; who needs one compiles it again."""
    if not (MAPS.exists() and MOST_MAPS.exists()):
        return
    with MAPS.open("rb") as lines:
        taken = sum(1 for _ in lines)
    if taken > int(MOST_MAPS.read_text()) // 2:
        import jax  # this module is read before JAX is

        jax.clear_caches()
