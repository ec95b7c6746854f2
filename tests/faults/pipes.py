"""Faults of a message run on one machine: `python -m tests.faults.pipes [COUNT]`.

Silos and shuffler are processes on pipes, started by the program that runs the federation. One of them, or the program,
is killed with kill -9 at a random moment, and the run is resumed until it is complete. Nothing that was in a ledger may
be missing afterwards, no question may have two entries, and no process may be left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from silodp.compiler import compile_quickly
from silodp.run.runner import resume, train
from tests.conftest import made_data
from tests.faults.__main__ import add
from tests.faults.network import faults
from tests.faults.parties import STARTING, Process, book_of, killed, quiet, started

LONGEST = 1800.0  # seconds for one run; longer is hung
EARLY = 0.25  # how often somebody is killed before the run has gone on
ONE_RUN = 6  # faults
PARTIES = {
    "silodp.deploy.silo_process": "silo", "silodp.deploy.shuffler": "shuffler", "silodp.deploy.nursery": "nursery",
}  # fmt: skip
GRADIENT = {"name": "dp-gd", "rounds": 8, "step_size": 0.3, "clip": 1.0, "weights": "size"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffled": ({"trust": "shuffled"}, {"randomizer": "privunit"}),
    "sums": ({"trust": "aggregated", "missing": 1, "colluding": 0}, {}),
    "untrusted": ({}, {}),
}


def run_messages(tree: dict[str, Any], out: Path) -> None:
    """As `silodp run`, and `silodp resume` after the first time."""
    quiet(out.with_suffix(".log"))
    compile_quickly()
    data = made_data((20, 12, 16))
    if (out / "config.toml").is_file():
        resume(out, data=data)
    else:
        train(tree, data=data, out=out)


def children(parent: int) -> dict[int, str]:
    """Of a process: what each was started with."""
    found = {}
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if place.name.isdigit() and int(stat_of(place)[1]) == parent:
                found[int(place.name)] = (place / "cmdline").read_bytes().decode().replace("\0", " ")
    return found


def parties_of(server: int) -> dict[int, str]:
    """What a message run has started. Silos are forked in a nursery, and called as it is."""
    found = {pid: name for pid, told in children(server).items() if (name := named(told))}
    nurseries = [pid for pid, name in found.items() if name == "nursery"]
    return found | {pid: "silo" for nursery in nurseries for pid in children(nursery)}


def stat_of(place: Path) -> list[str]:
    return (place / "stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    try:
        return stat_of(Path(f"/proc/{pid}"))[0] not in "ZX"
    except OSError:
        return False


class Pipes:
    """One run, and what goes wrong in it."""

    def __init__(self, root: Path, kind: str, seed: int, counts: Counter[str]):
        privacy, options = KINDS[kind]
        self.out, self.random, self.counts = root / "run", random.Random(seed), counts
        self.tree = {
            "privacy": {"epsilon": 2.0, "delta": 1e-4} | privacy,
            "algorithm": GRADIENT | options,
            "run": {"mode": "messages"},
        }
        self.seen: dict[str, list[str]] = {}  # links of each party's ledger
        self.family: set[int] = set()  # what the last program had started

    @property
    def finished(self) -> bool:
        return (self.out / "summary.json").is_file()

    def run(self, count: int) -> None:
        until = time.monotonic() + LONGEST
        while not self.finished and time.monotonic() < until:
            process = started(run_messages, self.tree, self.out)
            if count > 0 and self.struck(process):
                count -= 1
            process.join(max(1.0, until - time.monotonic()))
            killed(process)
            self.check()
        self.counts["runs"] += 1
        self.counts["finished" if self.finished else "hung"] += 1

    def struck(self, process: Process) -> bool:
        """Somebody is killed: some time after the run has gone on, or while it starts."""
        before, until = self.entries(), time.monotonic() + STARTING
        early = self.random.random() < EARLY
        parties = lambda: parties_of(process.pid or 0)
        there = lambda: bool(parties()) if early else self.entries() > before
        while not there() and process.exitcode is None and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep((3.0 if early else 0.5) * self.random.random())
        everybody = parties() | {process.pid or 0: "server"}
        self.family = set(everybody) - {process.pid}
        victim = self.random.choice(sorted(everybody))
        if process.exitcode is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        self.counts[f"pipes: {everybody[victim]}: kill -9"] += 1
        return True

    def entries(self) -> int:
        return sum(len(self.links(folder)) for folder in self.folders())

    def folders(self) -> list[Path]:
        return [file.parent for file in self.out.glob("silos/*/ledger.db")]

    def links(self, folder: Path) -> list[tuple[str, str]]:
        """The entries of a ledger, and the links of its chain. There are none while its first ones are written."""
        try:
            with closing(book_of(folder)) as book:
                return book.execute("select head, event from chain order by seq").fetchall()
        except sqlite3.OperationalError:
            return []

    def check(self) -> None:
        """Ledgers only grow, and no question has two entries. Silos of a dead server end by themselves."""
        until = time.monotonic() + STARTING
        living = lambda: sum(is_alive(pid) for pid in self.family)
        while living() and time.monotonic() < until:
            time.sleep(0.1)
        self.counts["orphans"] += living()
        for folder in self.folders():
            self.compare(folder)

    def compare(self, folder: Path) -> None:
        links = self.links(folder)
        before, self.seen[folder.name] = self.seen.get(folder.name, []), [head for head, _ in links]
        self.counts["lost"] += self.seen[folder.name][: len(before)] != before
        events = [json.loads(event) for _, event in links]
        keys = [event["key"] for event in events if event["kind"] == "answer"]
        asked = sum(key.startswith(("ask ", "shuffle ")) for key in keys)
        self.counts["two answers to one question"] += len(keys) - len(set(keys))
        self.counts["overspent"] += asked > GRADIENT["rounds"]


def named(command: str) -> str:
    return next((name for module, name in PARTIES.items() if module in command), "")


def one_run(folder: Path, counts: Counter[str], most: int) -> str:
    kind = list(KINDS)[counts["runs"] % len(KINDS)]
    Pipes(folder, kind, faults(counts), counts).run(min(ONE_RUN, most))
    return kind


if __name__ == "__main__":
    add("pipes", 24, one_run)
