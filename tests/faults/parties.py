"""The processes: guard, relay and server as they are deployed, each with one place where its disk can be made to fail.

They are forked from a server that has imported everything and computed nothing, so that a killed one is back at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any, NamedTuple

from silodp.deploy import blobs, guarding, ledger, server, silo  # noqa: F401 (a fork finds them imported)
from silodp.deploy.approval import load
from silodp.deploy.guard import Guard
from silodp.deploy.listen import GuardSocket, Listener, sockets
from silodp.deploy.mixer import Mixer
from silodp.deploy.office import Office
from silodp.deploy.wire import decode
from silodp.errors import ConfigError
from tests.faults import disks

ONCE, PATIENCE = 10.0, 60.0  # seconds: for one try, and for all of them
STARTING = 120.0  # seconds that a process may take to start, or to refuse to
LARGEST = 1 << 24

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.parties"])


class Dropped(ConnectionError):
    """No answer comes back; whoever asked will ask again."""


def started(target: Any, *given: Any) -> Process:
    process = CONTEXT.Process(target=target, args=given)
    process.start()
    # Threads that start other processes ask all known ones for their exit codes, and a code can be read only once.
    multiprocessing.process._children.discard(process)  # pyright: ignore[reportAttributeAccessIssue]
    return process


def killed(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.join(30)


def book_of(folder: Path) -> sqlite3.Connection:
    """A ledger, to be read while its guard writes it."""
    return sqlite3.connect(f"file:{folder}/ledger.db?mode=ro", uri=True, timeout=30)


class Tallies(NamedTuple):
    """Of one run, from the ledger on the disk."""

    rows: int  # answers
    events: int  # entries of answers
    counted: int  # releases


def tallies(folder: Path, run: str, asked: str = "ask") -> Tallies:
    """All at one moment, after the folder's guard has opened its ledger again."""
    for _ in range(600):
        try:
            with closing(book_of(folder)) as book:
                book.execute("begin")
                one = lambda sql: book.execute(sql, (run,)).fetchone()
                counted = one("select counted from run where run = ?")
                return Tallies(
                    one(f"select count(*) from answer where run = ? and key like '{asked} %'")[0],
                    one(f"select count(*) from chain where event like '%\"{asked} %' and instr(event, ?)")[0],
                    0 if counted is None else sum(line["count"] for line in json.loads(counted[0])),
                )
        except sqlite3.OperationalError:
            time.sleep(0.1)
    raise AssertionError(f"{folder}: its guard does not come back")


def quiet(log: Path) -> None:
    """What a party prints goes to a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)


# --- a guard -----------------------------------------------------------------------------------------------------


def run_guard(folder: Path, order: Path, large: int) -> None:
    """As `silodp silo guard`, or a shuffler's. `order`: a file that says what goes wrong with the next question."""
    quiet(folder.with_suffix(".log"))
    blobs.LARGE, honest = large, Office.reply
    for kind in (Guard, Mixer):
        kind._reply = breaking(kind._reply, folder, order)  # pyright: ignore[reportAttributeAccessIssue]

    def reply(self: Office, data: bytes) -> bytes:
        self.told = {}  # pyright: ignore[reportAttributeAccessIssue]
        hit = order.with_suffix(".hit")
        try:
            answer = honest(self, data)
        except OSError:  # not even the log can be written
            hit.touch()
            raise
        if decode(answer)[0].get("code") == "disk":
            hit.touch()
        if self.told.get("fault") in ("sync fails", "write fails"):  # pyright: ignore[reportAttributeAccessIssue]
            raise ConnectionError  # this thread cannot write any more
        return answer

    Office.reply = reply
    try:
        guarding.serve(folder)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def breaking(answers: Callable[[Any, bytes], bytes], folder: Path, order: Path) -> Callable[[Any, bytes], bytes]:
    def reply(self: Any, data: bytes) -> bytes:
        """Under the guard's lock: nobody else writes meanwhile."""
        if not order.is_file():
            return answers(self, data)
        told = json.loads(order.read_text())
        order.unlink()
        self.told = told
        if told["fault"].startswith("killed at"):
            disks.keep(folder, order.with_suffix(".before"))
        with broken(self, told):
            return answers(self, data)

    return reply


@contextmanager
def broken(guard: Office, told: dict[str, Any]) -> Iterator[None]:
    """One disk fault during one question."""
    fault, place = told["fault"], told["place"]
    log = Path(f"{guard.ledger.path}-wal")
    limit = max(0, (log.stat().st_size if log.is_file() else 0) + place)
    if fault == "sync fails":
        disks.forbid(disks.NUMBERS["sync"], disks.FAIL | disks.IO_ERROR)
    elif fault == "write fails":
        disks.forbid(disks.NUMBERS["write"], disks.FAIL | disks.IO_ERROR)
    elif fault.startswith("killed at "):
        disks.forbid(disks.NUMBERS[fault.removeprefix("killed at ")], disks.KILL)
    elif fault == "disk full":
        with disks.limited(resource.RLIMIT_FSIZE, limit):
            yield
        return
    elif fault == "torn write":
        disks.die_when_full()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    elif fault == "no file handles":
        with disks.limited(resource.RLIMIT_NOFILE, 3):
            yield
        return
    elif fault == "counter not written":
        guard.ledger._note = unwritten
        try:
            yield
        finally:
            del guard.ledger._note
        return
    elif fault == "clock jumps":
        honest = ledger.time.time
        ledger.time.time = lambda: honest() + place * 1e5
        try:
            yield
        finally:
            ledger.time.time = honest
        return
    yield


def unwritten(head: Any) -> None:
    raise OSError(disks.IO_ERROR, "Input/output error")


# --- the others --------------------------------------------------------------------------------------------------


def run_relay(own: Path, guards: Path) -> None:
    """A process that carries bytes to a guard's socket and back."""
    quiet(own.with_suffix(".log"))
    link = GuardSocket(guards, ONCE)

    def carried(data: bytes) -> bytes:
        try:
            return link.ask(data)
        except ValueError as error:  # no guard there, or none in time: who asks will ask again
            raise ConnectionError(str(error)) from None

    Listener(own, os.getuid(), carried, LARGEST).serve()


def run_server(plan: Path, approvals: list[Any], paths: dict[str, Path], folder: Path, order: dict[str, Any]) -> None:
    """As `silodp server run`. `order`: at which checkpoint its disk fails, and how."""
    quiet(folder.with_suffix(".log"))
    honest, left = server.Driver._save, [order.get("after", -1)]

    def save(self: Any, carry: Any, done: int) -> None:
        left[0] -= 1
        if left[0] == 0 and order["fault"] == "disk full":
            with disks.limited(resource.RLIMIT_FSIZE, order["place"]):
                honest(self, carry, done)
        if left[0] == 0 and order["fault"].startswith("killed at "):
            disks.forbid(disks.NUMBERS[order["fault"].removeprefix("killed at ")], disks.KILL)
        honest(self, carry, done)

    server.Driver._save = save
    try:
        server.drive(load(plan), approvals, sockets(paths, PATIENCE, ONCE), folder)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


def spoilt(folder: Path, chosen: random.Random) -> None:
    """What the server had not synchronised when the power went: files under their first names, and the last coins."""
    for file in folder.glob("*.partial"):
        file.write_bytes(disks.mixed(b"", file.read_bytes(), chosen))
