"""The durable ledger of one site: what was approved, reserved, answered and counted, over all runs. No JAX.

All that belongs to one answer is one transaction (silodp.deploy.book): the charge, the exact bytes, the digest of the
question and the silo's state are on the disk before a byte leaves. Rows are what a guard works with, because they are
quick to find. What they have to say is in the entries too (silodp.deploy.chain): a row that was edited is noticed.
Large values have files of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from silodp.deploy.blobs import Blobs
from silodp.deploy.book import Book
from silodp.deploy.chain import CERTIFY, Event, Head, Retold, Told, digest_of, retold, sealed
from silodp.deploy.wire import plain
from silodp.errors import ConfigError, Refused

TABLES = """
create table if not exists approval(fingerprint text primary key, run text not null, document blob not null,
                                    at real not null, revoked real);
create table if not exists run(run text primary key, fingerprint text not null, began real not null,
                               reserved text not null, counted text not null, closed real, cpu real not null);
create table if not exists answer(run text, key text, question blob not null, reply blob, primary key(run, key));
create table if not exists state(run text, name text, data blob not null, primary key(run, name));
create table if not exists secret(value blob not null);
create table if not exists peers(key text primary key, entries integer not null, head text not null);
create table if not exists refusal(at real not null, code text not null, detail text not null);
"""
NAMED = """select data from state where typeof(data) = 'text'
           union select reply from answer where typeof(reply) = 'text'"""
LEDGER, COUNTER = "ledger.db", "counter"  # files of a run on one machine
MOST_REFUSALS = 10_000  # that are kept: nobody fills a disk with them


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


class Edited(ConfigError):
    """Rows are not what the entries say, or entries are none that a guard writes."""


class Ledger(Book):
    """One site's ledger. `counter`: the second file, best on another disk. `approved`: a guard's, whose runs begin
    with an approval that stands; on one machine nobody approves."""

    def __init__(self, path: Path, counter: Path, approved: bool = False):
        self.needs_approval = approved
        self.blobs = Blobs(path.with_name("blobs"))
        self.swept = False  # whether every file beside it is named by a row
        super().__init__(path, counter, TABLES)

    def _set_up(self) -> None:
        self.db.execute("insert into secret select ? where not exists (select 1 from secret)", [os.urandom(32)])

    def _written(self) -> None:
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

    # --- approvals ----------------------------------------------------------------------------------------

    def approve(self, fingerprint: str, run: str, document: bytes) -> None:
        def approving() -> Event:
            if self._one("select 1 from approval where run = ? and fingerprint <> ?", run, fingerprint):
                raise ConfigError(f"run {run}: another plan was approved under this number; ask for a new proposal")
            return {"kind": "approve", "run": run, "plan": fingerprint}

        with self.event(approving):
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

    def begin(
        self, run: str, fingerprint: str, reserved: list[dict[str, Any]], state: Mapping[str, bytes],
        several: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Reserve the whole plan before anything is computed. The operator may have revoked it meanwhile.

        `several`: streams that one answer may release several times.
        """

        def beginning() -> Event:
            if self.needs_approval and not self.approved(fingerprint):
                raise Closed(f"run {run}: its approval does not stand")
            told = {"plan": fingerprint, "reserved": reserved, "state": self.digests(state)}
            return {"kind": "begin", "run": run} | told | ({"several": list(several)} if several else {})

        with self.event(beginning):
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
        """No further answers; what is charged from now on is what was used (silodp.deploy.spending)."""

        def closing() -> Event:
            found = self.run(run)
            if found is None or found.closed is not None:
                raise ConfigError(f"run {run}: not open here")
            return {"kind": "close", "run": run, "counted": found.counted}

        with self.event(closing):
            self.db.execute("update run set closed = ? where run = ? and closed is null", (time.time(), run))
            self.db.execute("delete from state where run = ?", (run,))
            self.db.execute("update answer set reply = null where run = ?", (run,))
            self.swept = False

    def certify(self, run: str, model: str) -> None:
        """The model that a run has ended in, by its hash: a certificate names no other one afterwards."""
        with self.event({"kind": CERTIFY, "run": run, "model": model}):
            pass

    def model(self, run: str) -> str | None:
        events = self.db.execute("select event from chain where event like ?", [f'%"{CERTIFY}"%']).fetchall()
        told = [json.loads(text) for (text,) in events]
        return next((e["model"] for e in told if e["kind"] == CERTIFY and e["run"] == run), None)

    def run(self, run: str) -> Run | None:
        return next((each for each in self.runs() if each.run == run), None)

    def runs(self) -> list[Run]:
        rows = self.db.execute("select run, fingerprint, began, reserved, counted, closed, cpu from run order by began")
        return [Run(r, f, b, self._lines(s), self._lines(c), closed, cpu) for r, f, b, s, c, closed, cpu in rows]

    def _lines(self, text: Any) -> list[dict[str, Any]]:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise Edited(f"{self.path}: a run's row is none that a guard writes; it was edited") from None

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

    def note_peers(self, heads: Mapping[str, Head]) -> None:
        """Inside `event`, which tells `digest_of` it: the last entries that others have signed, by public key. Kept
        over runs."""
        self.db.executemany("insert or replace into peers values(?, ?, ?)", [(k, *head) for k, head in heads.items()])

    def peers(self) -> dict[str, Head]:
        return {key: Head(seq, head) for key, seq, head in self.db.execute("select key, entries, head from peers")}

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
        lost = [f"{self.blobs.folder / plain(name)}: missing, or not what was written" for name in damaged]
        return self.edited() + lost

    def check_unedited(self) -> None:
        if edited := self.edited():
            raise Edited(f"{self.path}: {edited[0]}; silodp ledger verify {self.path.parent} lists all of it")

    def edited(self) -> list[str]:
        """Entries that are not those that were written, and rows that are not what the entries say."""
        self.db.execute("savepoint reading")  # all that is read is of one moment
        try:
            entries = self.db.execute("select seq, event, head from chain order by seq")
            told = retold(entries, self.needs_approval)
            found = self._programs() + told.problems + self._differing(told)
            return [plain(line) for line in found]  # whoever edits a row writes what he likes
        finally:
            self.db.execute("release reading")

    def _programs(self) -> list[str]:
        """SQL that a database runs by itself when a row is written: a ledger has none."""
        found = self.db.execute("select name from sqlite_master where type in ('trigger', 'view')")
        return [f"{name!r}: a ledger has no triggers and no views" for (name,) in found]

    def _differing(self, told: Retold) -> list[str]:
        questions = self.db.execute("select run, key, question from answer")
        approvals = self.db.execute("select fingerprint, run, document, revoked from approval")
        try:
            return [
                *told.differing_answers({(run, key): question.hex() for run, key, question in questions}),
                *told.differing_replies(self._replies()),
                *told.differing_runs({each.run: self._row(each) for each in self.runs()}),
                *told.differing_approvals(approvals),
                *(["others' ledgers: what is known of them is not what was written"] if self._forgets(told) else []),
            ]
        except (ValueError, TypeError, AttributeError) as error:
            return [f"a row is none that a guard writes ({type(error).__name__})"]

    def _replies(self) -> Iterator[tuple[str, str, bytes | None]]:
        for run, key, cell in self.db.execute("select run, key, reply from answer where reply is not null"):
            yield run, key, self.blobs.get(cell) if self.blobs.sound(cell) else None

    def _forgets(self, told: Retold) -> bool:
        peers = self.peers()
        return bool(peers) if told.peers is None else digest_of(peers) != told.peers

    def _row(self, run: Run) -> Told:
        state = sealed(self._secret, {name: self.blobs.digest(cell) for name, cell in self._cells(run.run)})
        return Told(run.fingerprint, run.reserved, run.counted, state, run.closed is not None)
