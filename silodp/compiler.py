"""How hard XLA tries. Programs that run once on a few records are compiled for longer than they run."""

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
