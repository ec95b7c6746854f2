"""The second file of a ledger: its last entry, once more. A ledger that was put back is behind it. No JAX."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from silodp.deploy.chain import Head
from silodp.deploy.files import alone_with

SLOT = 128  # bytes of one of two places in the file: a torn write spoils one of them at most


class Counter:
    """Its file never goes back, whoever writes it."""

    def __init__(self, path: Path):
        self.path = path

    def last(self) -> Head | None:
        """The newest entry that it was told of; None: nothing was written whole."""
        return newest(self.path.read_bytes()) if self.path.is_file() else None

    def note(self, head: Head) -> Head:
        """The newest entry that it knows of then: this one, unless it was told of another at its place or beyond."""
        body = f"{head.seq} {head.hash}"
        line = f"{body} {hashlib.sha256(body.encode()).hexdigest()[:16]}".ljust(SLOT - 1).encode() + b"\n"
        handle, place = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), SLOT * (head.seq % 2)
        try:
            with alone_with(handle):  # the operator's commands write here too
                known = newest(os.pread(handle, 2 * SLOT, 0))
                if known is None or known.seq < head.seq:
                    os.pwrite(handle, line, place)
                    known = head
                os.fsync(handle)
                return known
        finally:
            os.close(handle)


def newest(data: bytes) -> Head | None:
    found = [entry_of(data[:SLOT]), entry_of(data[SLOT : 2 * SLOT])]
    return max((each for each in found if each is not None), default=None)


def entry_of(slot: bytes) -> Head | None:
    """What stands in one place of the file; None: nothing that was written whole."""
    parts = slot.decode("ascii", "replace").split()
    whole = len(parts) == 3 and hashlib.sha256(" ".join(parts[:2]).encode()).hexdigest()[:16] == parts[2]
    return Head(int(parts[0]), parts[1]) if whole and parts[0].isdigit() else None
