"""Files that survive a power cut and that nobody else can read. No JAX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """A new file's name is on the disk as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """The file is the old one or the new one, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


@contextmanager
def private_files() -> Iterator[None]:
    """What is created inside is for its owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
