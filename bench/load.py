"""`python -m bench.load [--silos 32] [--parameters 50000] [--rounds 200]`: many silos on pipes, for long.

Every silo is a process with a ledger of its own, as in any run with `run.mode = "messages"`. Memory is what a process
has for itself: of all silos together, of the largest one, and of the server. It has to stay level.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from silodp import train
from silodp.data import FederatedData, SiloData

ROWS = 10  # of the table
RECORDS = 4  # of a silo: the model is what is large


def data_of(silos: int, parameters: int) -> FederatedData:
    rng = np.random.default_rng(0)
    features = lambda: rng.normal(size=(RECORDS, parameters - 1)).astype(np.float32) / np.sqrt(parameters)
    each = tuple(SiloData(f"silo {i}", features(), np.arange(RECORDS, dtype=np.int32) % 2) for i in range(silos))
    return FederatedData("made", each, None, "classification", ("0", "1"), ())


def descendants(process: int) -> list[int]:
    """What a process has started, and what those have: silos are forked in a nursery."""
    found = [
        int(child) for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]
    return found + [pid for child in found for pid in descendants(child)]


def own_memory(process: int) -> float:
    """Megabytes that are this process's alone."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def size_of(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


class Watch:
    """Prints a row of the table whenever the run has got further."""

    def __init__(self, out: Path):
        self.out, self.began = out, time.monotonic()
        self.silos: list[float] = []
        print("round  s so far  server MB  silos MB  largest MB  directory MB", flush=True)

    def __call__(self, x: Any, row: dict[str, float]) -> None:
        each = [own_memory(child) for child in descendants(os.getpid())]
        self.silos.append(sum(each))
        print(
            f"{row['round']:5.0f} {time.monotonic() - self.began:9.1f} {own_memory(os.getpid()):10.0f} "
            f"{sum(each):9.0f} {max(each, default=0.0):11.0f} {size_of(self.out):13.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("silos", 32), ("parameters", 50_000), ("rounds", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    tree = {
        "privacy": {"trust": "untrusted", "epsilon": 1.0, "delta": 1e-5},
        "algorithm": {"name": "dp-gd", "rounds": asked.rounds, "step_size": 0.1, "clip": 1.0},
        "run": {"mode": "messages", "every": max(1, asked.rounds // ROWS)},
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        watch = Watch(out)
        train(tree, data=data_of(asked.silos, asked.parameters), out=out, on_round=watch)
        seconds = time.monotonic() - watch.began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    server, silos = (each.ru_utime + each.ru_stime for each in used)
    print(f"{asked.silos} silos, {asked.parameters} parameters, {asked.rounds} rounds: {seconds:.0f} s in all")
    print(f"CPU seconds: server {server:.0f}, silos {silos:.0f} ({silos / asked.silos:.1f} each, start included)")
    print(
        f"silos' memory in the second half of the run: {watch.silos[-1] / watch.silos[len(watch.silos) // 2]:.3f} times"
    )


if __name__ == "__main__":
    main()
