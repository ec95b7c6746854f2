"""Large values of a ledger, in files beside it that are named by their hash. No JAX.

SQLite would write a large value twice, and all of it again whenever its row changes. A file is on the disk before the
row that names it, and goes only when no row does.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable
from pathlib import Path

from silodp.deploy.files import write_whole

LARGE = 1 << 20  # bytes; what is longer gets a file

Cell = bytes | str | None  # in a row: the value itself, the name of its file, or a value that was dropped


class Blobs:
    """The files of one ledger. They are written and removed under the ledger's own lock."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, data: bytes) -> bytes | str:
        if len(data) <= LARGE:
            return data
        name = hashlib.sha256(data).hexdigest()
        if not (self.folder / name).is_file():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(self.folder / name, data, mode=0o600)
        return name

    def get(self, cell: Cell) -> bytes | None:
        if not isinstance(cell, str):
            return cell
        data = (self.folder / cell).read_bytes()
        if hashlib.sha256(data).hexdigest() != cell:
            raise OSError(errno.EIO, f"{self.folder / cell}: not what was written")
        return data

    def digest(self, cell: bytes | str) -> str:
        """Of a value, without reading its file: that is named by it."""
        return cell if isinstance(cell, str) else hashlib.sha256(cell).hexdigest()

    def sound(self, cell: Cell) -> bool:
        try:
            self.get(cell)
        except (OSError, ValueError):  # the latter: a name that no file can have
            return False
        return True

    def sweep(self, needed: Iterable[str]) -> None:
        """Remove what no row names, and what was never written to its end."""
        if self.folder.is_dir():
            kept = set(needed)
            for file in self.folder.iterdir():
                if file.name not in kept:
                    file.unlink()
