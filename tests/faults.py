"""Faults on purpose: `python -m tests.faults [COUNT]` injects so many into runs of two guards and a server, and prints
a table. It may be stopped; what was counted is in .pytest_cache/faults.json, and the same command goes on.

After every fault these must hold: releases = distinct questions = ledger rows, no question answered with two different
bytes, nothing overspent, and the run finished or resumable. A guard or server that is killed loses its memory at once;
what it wrote is what it finds.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silodp.deploy.desk import question_of
from silodp.deploy.document import Document
from silodp.deploy.server import CERTIFICATES, drive
from silodp.deploy.wire import Late, decode
from silodp.errors import Refused
from tests.guards import Federation, config_of

KEPT = Path(".pytest_cache") / "faults.json"
ROUNDS = 4


class Killed(BaseException):
    """The process ends here; nothing after it happens."""


class Faulty:
    """A federation whose transport, disks and processes fail at random."""

    def __init__(self, root: Path, seed: int):
        self.random, self.sites = random.Random(seed), Federation(root / "sites")
        self.run, self.counts = root / "run", Counter[str]()
        self.given: dict[tuple[str, bytes], bytes] = {}
        self.late: list[tuple[str, bytes]] = []
        self.lock, self.rate = threading.Lock(), 0.8

    def begin(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.given.clear()
        self.late.clear()
        options = {"rounds": ROUNDS, "restart": 2}
        self.document: Document = self.sites.document(config_of(privacy={"epsilon": 0.01}, algorithm=options))
        self.approvals = self.sites.approve(self.document)

    def rpc(self, site: str, data: bytes) -> bytes:
        with self.lock:  # a process ends or answers; here both are in one process
            return self.carried(site, data)

    def carried(self, site: str, data: bytes) -> bytes:
        if self.random.random() > self.rate:
            return self.answer(site, data)
        fault = self.random.choice(list(FAULTS))
        self.counts[fault] += 1
        return FAULTS[fault](self, site, data)

    def answer(self, site: str, data: bytes) -> bytes:
        """What a guard says; the same question never gets two answers."""
        answer = self.sites.rpc(site, data)
        header, arrays = decode(data)
        told = decode(answer)[0]
        if header["kind"] == "ask" and told["kind"] == "answer":
            known = self.given.setdefault((site, question_of(header, arrays)), answer)
            self.counts["two answers to one question"] += known != answer
        return answer

    def checked(self) -> None:
        """The invariants, from the ledgers on the disk."""
        for site in self.document.sites:
            self.sites.end(site)
            ledger = self.sites.guard(site).ledger
            kept = ledger.run(self.document.run)
            if kept is None:
                continue
            rows = ledger.db.execute(
                "select count(*) from answer where run = ? and key like 'ask%'", (self.document.run,)
            ).fetchone()[0]
            released = sum(line["count"] for line in kept.counted)
            mine = sum(owner == site for owner, _ in self.given)
            self.counts["lost"] += released != rows or mine > rows or bool(ledger.verify())
            self.counts["overspent"] += released > ROUNDS


def dropped(faulty: Faulty, site: str, data: bytes) -> bytes:
    raise Late("dropped on the way there")


def lost(faulty: Faulty, site: str, data: bytes) -> bytes:
    faulty.answer(site, data)
    raise Late("lost on the way back")


def doubled(faulty: Faulty, site: str, data: bytes) -> bytes:
    faulty.answer(site, data)
    return faulty.answer(site, data)


def reordered(faulty: Faulty, site: str, data: bytes) -> bytes:
    """An older question comes again, before this one."""
    if faulty.late:
        faulty.answer(*faulty.random.choice(faulty.late))
    faulty.late.append((site, data))
    return faulty.answer(site, data)


def guard_killed_before(faulty: Faulty, site: str, data: bytes) -> bytes:
    faulty.sites.end(site)
    return faulty.answer(site, data)


def guard_killed_after(faulty: Faulty, site: str, data: bytes) -> bytes:
    faulty.answer(site, data)
    faulty.sites.end(site)
    raise Late("the guard is gone")


def server_killed(faulty: Faulty, site: str, data: bytes) -> bytes:
    if faulty.random.random() < 0.5:
        faulty.answer(site, data)
    raise Killed


def failing(step: str, error: Exception) -> Callable[[Faulty, str, bytes], bytes]:
    """The guard's disk fails once, before or after a step of its commit."""

    def fault(faulty: Faulty, site: str, data: bytes) -> bytes:
        guard = faulty.sites.guard(site)
        honest, before = getattr(guard.ledger, step), faulty.random.random() < 0.5

        def broken(*given: Any, **named: Any) -> Any:
            if not before:
                honest(*given, **named)
            raise error

        setattr(guard.ledger, step, broken)
        try:
            answer = faulty.answer(site, data)
        finally:
            delattr(guard.ledger, step)
        if decode(answer)[0]["kind"] == "refused":
            raise Late("the site could not write")
        return answer

    return fault


def clock_jumps(faulty: Faulty, site: str, data: bytes) -> bytes:
    from silodp.deploy import ledger as module

    honest = module.time.time
    module.time.time = lambda: honest() - 1e8 * faulty.random.random()
    try:
        return faulty.answer(site, data)
    finally:
        module.time.time = honest


def cut(faulty: Faulty, site: str, data: bytes) -> bytes:
    """A part of the frame reaches the guard, then all of it."""
    told = decode(faulty.sites.rpc(site, data[: faulty.random.randrange(len(data) - 1)]))[0]
    assert told["kind"] == "refused", told
    return faulty.answer(site, data)


FAULTS: dict[str, Callable[[Faulty, str, bytes], bytes]] = {
    "message dropped": dropped,
    "answer lost": lost,
    "message doubled": doubled,
    "messages reordered": reordered,
    "guard killed before": guard_killed_before,
    "guard killed after": guard_killed_after,
    "server killed": server_killed,
    "disk full": failing("add_answer", OSError(28, "No space left on device")),
    "I/O error": failing("add_answer", sqlite3.OperationalError("disk I/O error")),
    "counter not written": failing("_note", OSError(5, "Input/output error")),
    "clock jumps": clock_jumps,
    "frame cut": cut,
}
BROKEN = ("lost", "overspent", "two answers to one question", "hung", "orphans")


def inject(root: Path, count: int, seed: int, counts: Counter[str], rate: float = 0.8) -> Counter[str]:
    """At least so many faults, over as many runs as they take."""
    faulty = Faulty(root, seed)
    faulty.counts, faulty.rate = counts, rate
    faults = lambda: sum(counts[name] for name in FAULTS)
    until = faults() + count
    try:
        while faults() < until:
            faulty.begin()
            for _ in range(400):  # resumes; more would be a run that cannot be finished
                try:
                    drive(faulty.document, faulty.approvals, faulty.rpc, faulty.run)
                    break
                except (Late, Refused, Killed):
                    continue
            else:
                counts["hung"] += 1
            faulty.checked()
            counts["runs"] += 1
            counts["finished"] += (faulty.run / CERTIFICATES).is_file()
    finally:
        faulty.sites.close()
    return counts


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    counts = Counter(json.loads(KEPT.read_text()) if KEPT.is_file() else {})
    while (done := sum(counts[name] for name in FAULTS)) < wanted:
        with tempfile.TemporaryDirectory() as folder:
            inject(Path(folder), min(50, wanted - done), done, counts)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(counts))
        print(f"{sum(counts[name] for name in FAULTS)} faults", flush=True)
    width = max(map(len, (*FAULTS, *BROKEN)))
    for name in (*FAULTS, "runs", "finished", *BROKEN):
        print(f"{name.ljust(width)} {counts[name]:6d}")
    sys.exit(any(counts[name] for name in BROKEN) or counts["finished"] != counts["runs"])


if __name__ == "__main__":
    main()
