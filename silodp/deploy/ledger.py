"""The durable ledger of one site: what was approved, reserved, answered and counted, over all runs. No JAX.

SQLite in WAL mode with full synchronisation. Everything that belongs to one answer is one transaction: the charge, the
exact bytes, the digest of the question and the silo's state are on the disk before a byte leaves. Rows are never
changed back: every event adds a link to a chain of hashes, and the last link is kept in a second file as well. A ledger
that was put back from a copy is behind that file, and refuses to work. Large values have files of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from silodp.deploy.blobs import Blobs
from silodp.deploy.chain import FIRST, Event, Head, Told, linked, retold, sealed
from silodp.deploy.files import alone_with
from silodp.deploy.signing import canonical
from silodp.errors import ConfigError, Refused

TABLES = """
create table if not exists approval(fingerprint text primary key, run text not null, document blob not null,
                                    at real not null, revoked real);
create table if not exists run(run text primary key, fingerprint text not null, began real not null,
                               reserved text not null, counted text not null, closed real, cpu real not null);
create table if not exists answer(run text, key text, question blob not null, reply blob, primary key(run, key));
create table if not exists state(run text, name text, data blob not null, primary key(run, name));
create table if not exists secret(value blob not null);
create table if not exists peer(key text primary key, entries integer not null);
create table if not exists refusal(at real not null, code text not null, detail text not null);
create table if not exists chain(seq integer primary key, at real not null, event text not null, head text not null);
"""
NAMED = """select data from state where typeof(data) = 'text'
           union select reply from answer where typeof(reply) = 'text'"""
LEDGER, COUNTER = "ledger.db", "counter"  # files of a run on one machine
SLOT = 128  # bytes of one of two places in the counter's file: a torn write spoils one of them at most
MOST_REFUSALS = 10_000  # that are kept: nobody fills a disk with them


def entry_of(slot: bytes) -> Head | None:
    """What stands in one place of the counter's file; None: nothing that was written whole."""
    parts = slot.decode("ascii", "replace").split()
    whole = len(parts) == 3 and hashlib.sha256(" ".join(parts[:2]).encode()).hexdigest()[:16] == parts[2]
    return Head(int(parts[0]), parts[1]) if whole else None


class Answered(NamedTuple):
    """A question that was answered; `reply` is None when its bytes are no longer needed."""

    question: bytes
    reply: bytes | None


class Run(NamedTuple):
    """A run in the ledger; `reserved` and `counted` are lines of silodp.deploy.spending."""

    run: str
    fingerprint: str
    began: float
    reserved: list[dict[str, Any]]
    counted: list[dict[str, Any]]
    closed: float | None
    cpu: float


class Repeated(Refused):
    """A question under a known key that is not the one that was answered."""


class Dropped(Refused):
    """A question that was answered, whose bytes the server said it no longer needs."""


class Closed(Refused):
    """A run that gets no further answers."""


class Ledger:
    """One site's ledger. `counter`: the second file, best on another disk."""

    def __init__(self, path: Path, counter: Path):
        self.path, self.counter, self.blobs = path, counter, Blobs(path.with_name("blobs"))
        self.noted = 0  # the entry that this program has told the counter of
        self.swept = False  # whether every file beside it is named by a row
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # before SQLite would create it for all to read
        os.close(handle)
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            self.db.execute("pragma journal_mode=wal")
            self.db.execute("pragma synchronous=full")
            self.db.executescript(TABLES)
            self.db.execute("insert into secret select ? where not exists (select 1 from secret)", [os.urandom(32)])
            self.check_not_behind()
            self.note_last()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path}: the ledger cannot be read ({error})") from None

    def close(self) -> None:
        self.db.close()

    # --- the chain ----------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        found = self._one("select seq, head from chain order by seq desc limit 1")
        return Head(*found) if found else Head(0, FIRST)

    def check_not_behind(self) -> None:
        """A copy that was put back lacks what the counter has seen."""
        noted = self._noted()
        if noted is None or noted.seq == 0:
            return
        found = self._one("select head from chain where seq = ?", noted.seq)
        if found is None or found[0] != noted.hash:
            raise ConfigError(
                f"{self.path}: this ledger is older than {self.counter}, or another one: it was put back from a copy, "
                "and answers that were given are missing in it; bring the newer one back"
            )

    def note_last(self) -> None:
        """The counter knows of every entry before its answer leaves, also when it could not be written at first."""
        head = self.head
        if self.noted != head.seq and head.seq:
            self._note(head)

    def next_head(self, event: Event) -> Head:
        """What the chain's head will be with this event."""
        return linked(self.head, event)

    @contextmanager
    def event(self, told: Event | Callable[[], Event]) -> Iterator[Head]:
        """One transaction with its link; what is written inside is there with it, or not at all. What is to be told of
        the ledger itself is a function: it is called when nobody else can write."""
        self.db.execute("begin immediate")
        try:
            event = told() if callable(told) else told
            head = self.next_head(event)
            row = (head.seq, time.time(), canonical(dict(event)).decode(), head.hash)
            self.db.execute("insert into chain values(?, ?, ?, ?)", row)
            yield head
            self.db.execute("commit")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("rollback")
            raise
        self._note(head)
        if not self.swept:
            self._sweep()

    def _sweep(self) -> None:
        """Files that no row names go. Under the lock: another process may be about to name a new one."""
        self.db.execute("begin immediate")
        try:
            self.blobs.sweep(name for (name,) in self.db.execute(NAMED))
            self.swept = True
        finally:
            self.db.execute("commit")

    def _note(self, head: Head) -> None:
        body = f"{head.seq} {head.hash}"
        line = f"{body} {hashlib.sha256(body.encode()).hexdigest()[:16]}".ljust(SLOT - 1).encode() + b"\n"
        handle, place = os.open(self.counter, os.O_RDWR | os.O_CREAT, 0o600), SLOT * (head.seq % 2)
        try:
            with alone_with(handle):  # the operator's commands write here too
                known = entry_of(os.pread(handle, SLOT, place))
                if known is None or known.seq < head.seq:  # it never goes back
                    os.pwrite(handle, line, place)
                os.fsync(handle)
        finally:
            os.close(handle)
        self.noted = head.seq

    def _noted(self) -> Head | None:
        if not self.counter.is_file():
            if self.head.seq:
                raise ConfigError(f"{self.counter}: missing; nobody can tell whether the ledger was put back")
            return None
        data = self.counter.read_bytes()
        found = [each for each in (entry_of(data[:SLOT]), entry_of(data[SLOT : 2 * SLOT])) if each is not None]
        if not found:
            raise ConfigError(f"{self.counter}: cannot be read; the ledger cannot tell whether it was put back")
        return max(found)

    # --- approvals ----------------------------------------------------------------------------------------

    def approve(self, fingerprint: str, run: str, document: bytes) -> None:
        if self._one("select 1 from approval where run = ? and fingerprint <> ?", run, fingerprint):
            raise ConfigError(f"run {run}: another plan was approved under this number; ask for a new proposal")
        with self.event({"kind": "approve", "run": run, "plan": fingerprint}):
            row = (fingerprint, run, document, time.time(), None)
            self.db.execute("insert or replace into approval values(?, ?, ?, ?, ?)", row)

    def revoke(self, fingerprint: str) -> None:
        with self.event({"kind": "revoke", "plan": fingerprint}):
            self.db.execute("update approval set revoked = ? where fingerprint = ?", (time.time(), fingerprint))

    def approved(self, fingerprint: str) -> bool:
        found = self._one("select revoked from approval where fingerprint = ?", fingerprint)
        return found is not None and found[0] is None

    def document(self, run: str) -> bytes | None:
        found = self._one("select document from approval where run = ?", run)
        return None if found is None else found[0]

    def approvals(self) -> list[tuple[str, str, bool]]:
        """Fingerprint, run and whether it still stands."""
        rows = self.db.execute("select fingerprint, run, revoked from approval order by at").fetchall()
        return [(fingerprint, run, revoked is None) for fingerprint, run, revoked in rows]

    # --- runs ---------------------------------------------------------------------------------------------

    def begin(self, run: str, fingerprint: str, reserved: list[dict[str, Any]], state: Mapping[str, bytes]) -> None:
        """Reserve the whole plan before anything is computed."""
        event = {"kind": "begin", "run": run, "plan": fingerprint, "reserved": reserved, "state": self.digests(state)}
        with self.event(event):
            row = (run, fingerprint, time.time(), json.dumps(reserved), "[]", None, 0.0)
            self.db.execute("insert into run values(?, ?, ?, ?, ?, ?, ?)", row)
            self._put_state(run, state)

    def digests(self, state: Mapping[str, bytes]) -> dict[str, str]:
        """Of the parts of a silo's state, as an entry may tell them."""
        return sealed(self._secret, {name: hashlib.sha256(data).hexdigest() for name, data in state.items()})

    @property
    def _secret(self) -> bytes:
        return self._one("select value from secret")[0]

    def finish(self, run: str) -> None:
        """No further answers; the reservation shrinks to what was counted."""

        def closing() -> Event:
            found = self.run(run)
            if found is None or found.closed is not None:
                raise ConfigError(f"run {run}: not open here")
            return {"kind": "close", "run": run, "counted": found.counted}

        with self.event(closing):
            self.db.execute(
                "update run set closed = ?, reserved = counted where run = ? and closed is null", (time.time(), run)
            )
            self.db.execute("delete from state where run = ?", (run,))
            self.db.execute("update answer set reply = null where run = ?", (run,))
            self.swept = False

    def run(self, run: str) -> Run | None:
        return next((each for each in self.runs() if each.run == run), None)

    def runs(self) -> list[Run]:
        rows = self.db.execute("select run, fingerprint, began, reserved, counted, closed, cpu from run order by began")
        return [Run(r, f, b, json.loads(s), json.loads(c), closed, cpu) for r, f, b, s, c, closed, cpu in rows]

    # --- answers ------------------------------------------------------------------------------------------

    def given(self, run: str, key: str, question: bytes) -> bytes | None:
        """The bytes that this very question was answered with; None: it is a new one."""
        seen = self.answered(run, key)
        if seen is None:
            return None
        if seen.question != question:
            raise Repeated(f"{key}: answered already, to another question")
        if seen.reply is None:
            raise Dropped(f"{key}: answered; the bytes were dropped after the server's checkpoint")
        self.note_last()
        return seen.reply

    def answered(self, run: str, key: str) -> Answered | None:
        found = self._one("select question, reply from answer where run = ? and key = ?", run, key)
        return None if found is None else Answered(found[0], self.blobs.get(found[1]))

    def add_answer(
        self, run: str, key: str, question: bytes, reply: bytes, counted: list[dict[str, Any]],
        state: Mapping[str, bytes], cpu: float,
    ) -> None:  # fmt: skip
        """Inside `event`: everything that belongs to an answer. The operator may have closed the run meanwhile."""
        found = self._one("select closed from run where run = ?", run)
        if found is None or found[0] is not None:
            raise Closed(f"run {run}: closed by this site's operator")
        self.db.execute("insert into answer values(?, ?, ?, ?)", (run, key, question, self._kept(reply)))
        row = (json.dumps(counted), cpu, run)
        self.db.execute("update run set counted = ?, cpu = cpu + ? where run = ?", row)
        self._put_state(run, state)

    def count_answers(self, run: str) -> int:
        return self._one("select count(*) from answer where run = ?", run)[0]

    def drop(self, run: str, keys: list[str]) -> None:
        """Inside `event`: bytes that the server's checkpoint covers; digests stay for ever."""
        for key in keys:
            self.swept = False
            self.db.execute("update answer set reply = null where run = ? and key = ?", (run, key))

    def note_peers(self, entries: Mapping[str, int]) -> None:
        """Inside `event`: how long others' ledgers were when they last signed, by public key. Kept over runs."""
        self.db.executemany("insert or replace into peer values(?, ?)", list(entries.items()))

    def peers(self) -> dict[str, int]:
        return dict(self.db.execute("select key, entries from peer"))

    def _put_state(self, run: str, state: Mapping[str, bytes]) -> None:
        rows = [(run, name, self._kept(data)) for name, data in state.items()]
        self.db.executemany("insert or replace into state values(?, ?, ?)", rows)

    def _kept(self, data: bytes) -> bytes | str:
        cell = self.blobs.put(data)
        self.swept = self.swept and not isinstance(cell, str)  # the row may have named another file
        return cell

    def state(self, run: str) -> dict[str, bytes]:
        return {name: data for name, cell in self._cells(run) if (data := self.blobs.get(cell)) is not None}

    def _cells(self, run: str) -> list[tuple[str, bytes | str]]:
        return self.db.execute("select name, data from state where run = ?", (run,)).fetchall()

    # --- for the operator ---------------------------------------------------------------------------------

    def refused(self, code: str, detail: str) -> None:
        """For the operator's eyes: why something was refused. The oldest are forgotten."""
        self.db.execute("insert into refusal values(?, ?, ?)", (time.time(), code, detail[:500]))
        self.db.execute("delete from refusal where rowid <= (select max(rowid) from refusal) - ?", (MOST_REFUSALS,))

    def refusals(self, most: int = 20) -> list[tuple[float, str, str]]:
        return self.db.execute("select at, code, detail from refusal order by rowid desc limit ?", (most,)).fetchall()

    def verify(self) -> list[str]:
        """What is wrong with the ledger, a line each."""
        damaged = [name for (name,) in self.db.execute(NAMED) if not self.blobs.sound(name)]
        return self.edited() + [f"{self.blobs.folder / name}: missing, or not what was written" for name in damaged]

    def edited(self) -> list[str]:
        """Entries that are not those that were written, and rows that are not what the entries say."""
        self.db.execute("savepoint reading")  # all that is read is of one moment
        try:
            told = retold(self.db.execute("select seq, event, head from chain order by seq"))
            questions = self.db.execute("select run, key, question from answer")
            approvals = self.db.execute("select fingerprint, run, document, revoked from approval")
            return [
                *told.problems,
                *told.differing_answers({(run, key): question.hex() for run, key, question in questions}),
                *told.differing_runs({each.run: self._row(each) for each in self.runs()}),
                *told.differing_approvals(approvals),
            ]
        finally:
            self.db.execute("release reading")

    def _row(self, run: Run) -> Told:
        state = sealed(self._secret, {name: self.blobs.digest(cell) for name, cell in self._cells(run.run)})
        return Told(run.fingerprint, run.reserved, run.counted, state, run.closed is not None)

    def _one(self, sql: str, *given: Any) -> Any:
        return self.db.execute(sql, given).fetchone()
