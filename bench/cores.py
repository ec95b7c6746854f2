"""Part `cores`: XLA's threads on one device, silos sharded over two host devices, or two processes with half the runs.

Wall time of eight runs that differ in their seed, compiled and started beforehand; every way in processes of its own.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.cases import Case, diff2, spider
from bench.machine import bound_to
from bench.simulated import Ready
from bench.timing import clock

SEEDS = 8
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def even_spider() -> Case:
    """SPIDER with silos that two devices can share, and as many records in each: the paper's 25 are odd."""
    data = {"source": "mnist", "silos": 24, "partition": "iid", "records": 1548}
    case = spider()
    data["preprocess"] = case.tree["data"]["preprocess"]
    return dataclasses.replace(
        case, name="SPIDER, MNIST, 24 silos x 1,548 (iid), MLP 50-64-2", tree=case.tree | {"data": data}
    )


CASES = {"diff2": (diff2, 400), "spider": (even_spider, 25)}


def cores(quick: bool) -> dict[str, Any]:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        return {}
    ways = {
        "one core": [("plain", SEEDS, own[:1])],
        "one process, XLA's threads": [("plain", SEEDS, own[:2])],
        "silos sharded over two devices": [("sharded", SEEDS, own[:2])],
        "two processes, a core each": [("plain", SEEDS // 2, own[:1]), ("plain", SEEDS // 2, own[1:2])],
    }
    chosen = ["diff2"] if quick else list(CASES)
    label = lambda name: f"{CASES[name][0]().name}, {CASES[name][1]} rounds"
    return {label(name): {way: walls(name, parts) for way, parts in ways.items()} for name in chosen}


def walls(case: str, parts: list[tuple[str, int, list[int]]]) -> dict[str, Any]:
    """Start the processes, let all compile, then run together; the slowest counts."""
    started = [start(case, *part) for part in parts]
    for process in started:
        process.stdout.readline()  # it is ready
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [process.communicate()[0].split() for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"cores: {case}, {parts} failed")
    times = [(float(cpu), float(wall)) for cpu, wall in found]
    total = {"wall_s": max(t[1] for t in times), "cpu_s": sum(t[0] for t in times)}
    print(f"  {case}, {parts}: {total['wall_s']:.2f} s wall, {total['cpu_s']:.2f} s CPU", flush=True)
    return total


def start(case: str, mode: str, seeds: int, bound: list[int]) -> Any:
    flags = os.environ.get("XLA_FLAGS", "")
    env = os.environ | ({"XLA_FLAGS": f"{flags} {TWO_DEVICES}"} if mode == "sharded" else {})
    command = [sys.executable, "-m", "bench.cores", case, mode, str(seeds)]
    pipe = subprocess.PIPE
    with bound_to(bound):
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def sharded(problem: Any) -> Any:
    """The silos spread over the devices (refused by JAX where they do not divide); all else on both."""
    spread = NamedSharding(Mesh(np.array(jax.devices()), ("silos",)), PartitionSpec("silos"))
    return dataclasses.replace(problem, silos=jax.tree.map(lambda leaf: jax.device_put(leaf, spread), problem.silos))


def main() -> None:
    case, mode, seeds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    build, rounds = CASES[case]
    prepared = build().prepared(rounds=rounds)
    if mode == "sharded":
        prepared = dataclasses.replace(prepared, problem=sharded(prepared.problem))
    run = Ready(prepared)
    settings = [eqx.tree_at(lambda s: s.key, run.setting, jax.random.key(seed)) for seed in range(seeds)]
    started = [(setting, run.start(setting)) for setting in settings]
    run(*started[0])
    print("ready", flush=True)
    sys.stdin.readline()
    print(*clock(lambda: [run(*one) for one in started]), flush=True)


if __name__ == "__main__":
    main()
