"""Disks that fail: the kernel refuses a system call, ends the process in one, or forgets what was written.

No library is replaced. Seccomp makes the next fsync fail, or kills at it. A limit on files' sizes cuts a write short.
"""

from __future__ import annotations

import ctypes
import platform
import random
import resource
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NUMBERS = {  # of system calls
    "x86_64": {"write": (1, 18), "sync": (74, 75), "rename": (82, 264, 316), "unlink": (87, 263)},
    "aarch64": {"write": (64, 68), "sync": (82, 83), "rename": (38, 276), "unlink": (35,)},
}.get(platform.machine(), {})
FAIL, KILL, ALLOW = 0x00050000, 0x80000000, 0x7FFF0000
IO_ERROR = 5
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of a filter's small machine
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
FILE_TOO_LARGE = 25  # the signal


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid(calls: Sequence[int], action: int) -> None:
    """For this thread, and for good."""
    count = len(calls)
    steps = [(LOAD, 0, 0, 0)]
    steps += [(EQUAL, count - i, 0, number) for i, number in enumerate(calls)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, action)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """A limit of this process, for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def die_when_full() -> None:
    """A write beyond the limit ends the process, after what still fitted was written."""
    ctypes.CDLL(None).signal(FILE_TOO_LARGE, 0)


Files = dict[Path, bytes]


def files_of(folder: Path) -> Files:
    """All that is on the disk, but for what is kept in memory only."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.suffix != ".db-shm"}


def keep(folder: Path, copy: Path) -> None:
    """What is on the disk now, for `power_cut`: all of it, or nothing where the process is killed meanwhile."""
    half = copy.with_suffix(".half")
    for old in (copy, half):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("*.sock", "*.db-shm"))
    half.rename(copy)


def power_cut(folder: Path, copy: Path, chosen: random.Random) -> None:
    """Of what was written since the copy, and never synchronised, some sectors are there and some are not."""
    if not copy.is_dir():
        return
    for file, now in files_of(folder).items():
        before = copy / file.relative_to(folder)
        old = before.read_bytes() if before.is_file() else None
        if old is None or old != now:
            file.write_bytes(mixed(old or b"", now, chosen))
    for shared in folder.glob("*.db-shm"):
        shared.unlink()


def mixed(old: bytes, new: bytes, chosen: random.Random) -> bytes:
    sector, kept = chosen.choice((16, 512, 4096)), bytearray(old)
    for at in range(0, len(new), sector):
        if chosen.random() < 0.5:
            piece = new[at : at + sector]
            kept += bytes(max(0, at - len(kept)))  # a hole
            kept[at : at + len(piece)] = piece
    return bytes(kept)
