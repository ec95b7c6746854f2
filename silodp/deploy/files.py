"""Files that survive a power cut and that nobody else can read. No JAX."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from silodp.errors import ConfigError

if os.name == "nt":  # simulations run there too; guards and silos in processes of their own do not
    import msvcrt
else:
    import fcntl

LOCK = "lock"


def locked(handle: int) -> bool:
    """Whether this program holds the file now, until the handle is closed; False: another one does."""
    try:
        if os.name == "nt":
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def alone_with(handle: int) -> Iterator[None]:
    """Other programs that want the same wait."""
    if os.name == "nt":  # where no guard works, and nobody else wants it
        yield
        return
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def folder_alone(folder: Path) -> Iterator[None]:
    """What is read and written again inside is changed by no other program meanwhile, if it asks for the same."""
    if os.name == "nt":  # a folder cannot be opened there
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with alone_with(handle):
            yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """A new file's name is on the disk as well."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to: afterwards the file is on the disk. It is the old one or the new one, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    with (
        replacing(path) as partial,
        os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file,
    ):
        file.write(data)


@contextmanager
def private_files() -> Iterator[None]:
    """What is created inside is for its owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """One program at a time works in a folder, and what it creates there is for its owner only."""
    with private_files():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not locked(handle):
                raise ConfigError(f"{folder}: another {what} works in it")
            yield
        finally:
            os.close(handle)


def is_free(folder: Path) -> bool:
    """Whether no program works in a folder (`held`)."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return locked(handle)
    finally:
        os.close(handle)


def checksum(arrays: Mapping[str, np.ndarray], more: bytes) -> str:
    """Of named arrays, and of what is told with them."""
    digest = hashlib.sha256(more)
    for name in sorted(arrays):
        digest.update(f"|{name}|{arrays[name].dtype}|{arrays[name].shape}|".encode() + arrays[name].tobytes())
    return digest.hexdigest()
