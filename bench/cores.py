"""Part `cores`: one core, XLA's threads, two threads or two processes with half of the runs, or silos sharded.

Wall time of eight runs that differ in their seed, compiled and started beforehand, in processes that wait for their
turns.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.cases import Case, diff2, spider
from bench.machine import bound_to
from bench.simulated import Ready
from bench.timing import Samples, clock, shuffled, summaries

SEEDS, TURNS = 8, 3
ONE, THREADS = "one core", "one process, two threads, half of the runs each"
# What each process does in a way: runs, and threads that share them.
WAYS = {
    ONE: {"first core": (SEEDS, 1)},
    "one process, XLA's threads": {"both cores": (SEEDS, 1)},
    THREADS: {"both cores": (SEEDS, 2)},
    "silos sharded over two devices": {"sharded": (SEEDS, 1)},
    "two processes, a core each": {"first core": (SEEDS // 2, 1), "second core": (SEEDS // 2, 1)},
}
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def even_spider() -> Case:
    """SPIDER with silos that two devices can share, and as many records in each: the paper's 25 are odd."""
    data = {"source": "mnist", "silos": 24, "partition": "iid", "records": 1548}
    case = spider()
    data["preprocess"] = case.tree["data"]["preprocess"]
    return dataclasses.replace(
        case, name="SPIDER, MNIST, 24 silos x 1,548 (iid), MLP 50-64-2", tree=case.tree | {"data": data}
    )


CASES = {"diff2": (diff2, 150), "spider": (even_spider, 12)}


def cores(quick: bool) -> dict[str, Any]:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        return {}
    bound = {"first core": own[:1], "second core": own[1:2], "both cores": own[:2], "sharded": own[:2]}
    chosen = ["diff2"] if quick else list(CASES)
    label = lambda name: f"{CASES[name][0]().name}, {CASES[name][1]} rounds"
    return {label(name): in_turns(name, bound, 1 if quick else TURNS) for name in chosen}


def in_turns(case: str, bound: dict[str, list[int]], turns: int) -> dict[str, Any]:
    processes = {name: start(case, name, own) for name, own in bound.items()}
    for process in processes.values():
        line_of(process)  # it is ready
    samples = {way: Samples() for way in WAYS}
    for turn in range(turns):
        for way in shuffled(WAYS, turn):
            samples[way].add(turn, together([(processes[name], *work) for name, work in WAYS[way].items()]))
    for process in processes.values():
        process.communicate()  # the end of its input ends it
    rows = summaries(samples, ONE)
    for way, row in rows.items():
        print(f"    {way:50}{row['wall_s'][1]:8.2f} s wall {row['cpu_s'][1]:8.2f} s CPU", flush=True)
    return rows


def together(parts: list[tuple[Any, int, int]]) -> tuple[float, float]:
    """CPU seconds of all, and wall seconds of the slowest."""
    for process, runs, threads in parts:
        process.stdin.write(f"{runs} {threads}\n")
        process.stdin.flush()
    cpu, wall = zip(*(map(float, line_of(process).split()) for process, *_ in parts), strict=True)
    return sum(cpu), max(wall)


def line_of(process: Any) -> str:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"cores: {' '.join(process.args)} failed")
    return line


def start(case: str, mode: str, bound: list[int]) -> Any:
    flags = os.environ.get("XLA_FLAGS", "")
    env = os.environ | ({"XLA_FLAGS": f"{flags} {TWO_DEVICES}"} if mode == "sharded" else {})
    command = [sys.executable, "-m", "bench.cores", case, mode]
    pipe = subprocess.PIPE
    with bound_to(bound):
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def sharded(problem: Any) -> Any:
    """The silos spread over the devices (refused by JAX where they do not divide); all else on both."""
    spread = NamedSharding(Mesh(np.array(jax.devices()), ("silos",)), PartitionSpec("silos"))
    return dataclasses.replace(problem, silos=jax.tree.map(lambda leaf: jax.device_put(leaf, spread), problem.silos))


def main() -> None:
    case, mode = sys.argv[1:]
    build, rounds = CASES[case]
    prepared = build().prepared(rounds=rounds)
    if mode == "sharded":
        prepared = dataclasses.replace(prepared, problem=sharded(prepared.problem))
    run = Ready(prepared)
    settings = [eqx.tree_at(lambda s: s.key, run.setting, jax.random.key(seed)) for seed in range(SEEDS)]
    started = [(setting, run.start(setting)) for setting in settings]
    run(*started[0])
    print("ready", flush=True)
    in_order = lambda part: [run(*one) for one in part]
    for line in sys.stdin:
        runs, threads = map(int, line.split())
        parts = [started[i:runs:threads] for i in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            print(*clock(lambda pool=pool, parts=parts: list(pool.map(in_order, parts))), flush=True)


if __name__ == "__main__":
    main()
