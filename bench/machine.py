"""Part `machine`: what these cores can do at best: float32 matrix products, and reading and writing memory.

Memory is written where it was read before (the output's buffer is the input's), so no page is new and no line is
fetched only to be overwritten: the bytes counted are the bytes moved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import clock

SIZE = 2048  # of the square matrices
FLOATS = 1 << 26  # 256 MB: far more than any cache
TRIES = 12


def machine(quick: bool) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    found = {"1 thread": limits_on(cores[:1])}
    if len(cores) > 1:
        found[f"{len(cores)} threads"] = limits_on(cores)
    for threads, limits in found.items():
        print(f"  {threads}: " + ", ".join(f"{name} {value:.1f}" for name, value in limits.items()), flush=True)
    return found


def limits_on(cores: list[int]) -> dict[str, float]:
    """In a process of its own: thread pools look at the cores they may use once, when they start."""
    command = [sys.executable, "-m", "bench.machine"]
    with bound_to(cores):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@contextmanager
def bound_to(cores: list[int]) -> Iterator[None]:
    """Processes that are started inside may use these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    yield
    os.sched_setaffinity(0, before)


def best(run: Callable[[], Any], work: float) -> float:
    """Billions a second, in the best of some tries: of CPU time on one core, else of wall time."""
    run()
    which = 0 if len(os.sched_getaffinity(0)) == 1 else 1
    return work / min(clock(run)[which] for _ in range(TRIES)) / 1e9


def triad() -> Callable[[], Any]:
    """x = x + 3 y, in place: two arrays read, one written."""
    state = {"x": jnp.ones(FLOATS), "y": jnp.ones(FLOATS)}
    program = jax.jit(lambda x, y: x + 3 * y, donate_argnums=0)

    def run() -> None:
        state["x"] = program(state["x"], state["y"]).block_until_ready()

    return run


def main() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    c, d = jnp.asarray(a), jnp.asarray(b)
    product = jax.jit(jnp.matmul)
    v = np.ones(FLOATS, np.float32)
    found = {
        "GEMM, JAX, Gflop/s": best(lambda: product(c, d).block_until_ready(), 2 * SIZE**3),
        "GEMM, numpy, Gflop/s": best(lambda: np.dot(a, b), 2 * SIZE**3),
        "scale in place, numpy, GB/s": best(lambda: np.multiply(v, np.float32(1), out=v), 8 * FLOATS),
        "triad in place, JAX, GB/s": best(triad(), 12 * FLOATS),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
