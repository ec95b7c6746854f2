"""What a ledger is written in: SQLite, a chain of entries, and a second file that knows the last one. No JAX.

SQLite in WAL mode with full synchronisation. Rows are never changed back: every event adds a link to a chain of hashes,
and the last link is kept in the counter's file as well. A book that was put back from a copy is behind that file, and
refuses to work.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from silodp.deploy.chain import FIRST, Event, Head, linked
from silodp.deploy.counter import Counter
from silodp.deploy.files import sync_folder
from silodp.deploy.signing import canonical
from silodp.errors import ConfigError, Refused

CHAIN = """
create table if not exists chain(seq integer primary key, at real not null, event text not null, head text not null);
"""
MOST_ENTRIES = 2**53  # what is told beyond is no length of a book


class PutBack(Refused):
    """An entry that others have seen is not in this book."""


class Book:
    """`counter`: the second file, best on another disk. `tables`: what is kept beside the chain."""

    def __init__(self, path: Path, counter: Path, tables: str):
        self.path, self.counter = path, Counter(counter)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # before SQLite would create it for all to read
        os.close(handle)
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self.db.text_factory = lambda text: text.decode(errors="replace")  # of an edited cell, which is told of then
        try:
            self.db.execute("pragma journal_mode=wal")
            self.db.execute("pragma synchronous=full")
            self.db.executescript(CHAIN + tables)
            self._set_up()
            self.check_not_behind()
            self.note_last()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path}: the ledger cannot be read ({error})") from None

    def close(self) -> None:
        self.db.close()

    def _set_up(self) -> None:
        """What has to be there before anything is written."""

    def _written(self) -> None:
        """An entry is on the disk."""

    def _one(self, sql: str, *given: Any) -> Any:
        return self.db.execute(sql, given).fetchone()

    @property
    def head(self) -> Head:
        found = self._one("select seq, head from chain order by seq desc limit 1")
        return Head(*found) if found else Head(0, FIRST)

    def check_not_behind(self) -> None:
        """A copy that was put back lacks what the counter has seen. It is seen with every entry, before the next one:
        of a ledger that is two entries ahead of it, one of the two files is not the one that was written."""
        head = self.head  # first: another program may write, and the counter is never behind what it has finished
        noted = self.counter.last()
        if noted is None and head.seq:
            raise ConfigError(
                f"{self.counter.path}: missing, or cannot be read; nobody can tell whether the ledger was put back"
            )
        if noted is None:  # before the first entry, so that a ledger with entries has one
            self._note(head)
            sync_folder(self.counter.path.parent)
            return
        if not self.has(noted):
            raise ConfigError(
                f"{self.path}: this ledger is older than {self.counter.path}, or another one: it was put back from a "
                "copy, and answers that were given are missing in it; bring the newer one back"
            )
        if head.seq > noted.seq + 1:
            raise ConfigError(
                f"{self.counter.path}: older than {self.path}: it was put back from a copy, or entries were written by "
                "something else than a guard; bring the newer one back"
            )

    def _check_still_alone(self) -> None:
        """Nothing was put back, copied or written anew under a program at work; a server is not told which file."""
        try:
            self.check_not_behind()
        except ConfigError:
            raise PutBack("the counter's file does not fit this ledger") from None

    def has(self, head: Head) -> bool:
        """Whether this was the last entry once."""
        return self.hash_at(head.seq) == head.hash

    def hash_at(self, seq: int) -> str:
        """The link of an entry; empty: there is none."""
        found = self._one("select head from chain where seq = ?", seq) if seq else (FIRST,)
        return found[0] if found else ""

    def check_has(self, told: Any) -> None:
        """Refuse to go on from an entry that this ledger does not have. None: nothing is known of it."""
        if told is None:
            return
        form = isinstance(told, list) and len(told) == 2 and type(told[0]) is int and 0 <= told[0] < MOST_ENTRIES
        if not form or not self.has(Head(*told)):
            raise PutBack("an entry that was told before is not in this ledger")

    def note_last(self) -> None:
        """The counter knows of every entry before its answer leaves, and before another one is written, also when it
        could not be written at first."""
        head = self.head
        if head.seq and self.counter.last() != head:
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
            self._check_still_alone()
            self.note_last()
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
        self._written()

    def _note(self, head: Head) -> None:
        # Two copies of a ledger may have one counter, and both write at once: only the first one's answer leaves.
        if not self.has(self.counter.note(head)):
            raise PutBack("another copy of this ledger has written an entry that is not in it")
