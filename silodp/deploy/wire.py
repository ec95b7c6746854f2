"""Bytes between processes: a JSON header and safetensors arrays, framed by their length. No pickle.

frame = length of the rest (8 bytes) | length of the header (4 bytes) | header, UTF-8 JSON | safetensors
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from typing import IO, Any, BinaryIO

import numpy as np
from safetensors.numpy import load, save

from silodp.errors import Gone, Refused

HEADER = 8 << 20  # bytes: as JSON they take twenty times as much memory, or more
LARGEST = 1 << 34  # a frame announced as longer than this is an error, not a reason to allocate


def encode(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    head = json.dumps(header).encode()
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return struct.pack("<I", len(head)) + head + save(contiguous)


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if len(data) < 4:
        raise Refused(f"message of {len(data)} bytes: too short to hold a header")
    (length,) = struct.unpack_from("<I", data)
    if length > HEADER:
        raise Refused(f"message: header of {length} bytes announced, at most {HEADER} are read")
    if 4 + length > len(data):
        raise Refused(f"message: header of {length} bytes announced, {len(data) - 4} present")
    try:
        header = json.loads(data[4 : 4 + length])
        arrays = load(data[4 + length :])
    except Exception as error:  # safetensors raises its own class, json another: both mean bad bytes
        raise Refused(f"message: cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise Refused("message: the header must be a JSON object")
    return header, arrays


def plain(text: Any) -> str:
    """A peer's words as they may be shown: one line, no control characters, not too long."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:400])


def is_number(told: Any) -> bool:
    """Whether a peer has told a number >= 0 that a float can hold: JSON's whole numbers have no end."""
    return type(told) in (int, float) and 0 <= told < 1e300


class Late(Gone):
    """A peer did not answer, or did not listen, in time."""


def unblocked(stream: IO[bytes]) -> int:
    """The stream's file descriptor, for `put_frame` and `take_frame`."""
    os.set_blocking(stream.fileno(), False)
    return stream.fileno()


def put_frame(descriptor: int, data: bytes, seconds: float) -> None:
    """A whole frame into a pipe or socket, or `Late`."""
    until, left = time.monotonic() + seconds, memoryview(struct.pack("<Q", len(data)) + data)
    while left:
        _wait(descriptor, select.POLLOUT, until)
        left = left[os.write(descriptor, left[: 1 << 20]) :]


def take_frame(descriptor: int, seconds: float, largest: int = LARGEST, idle: float | None = None) -> bytes:
    """The next frame; b"" when the peer has closed its end between two frames; `Late` when it takes too long.

    `idle`: how long it may take until a frame begins, where that differs. It has begun with its first byte.
    """
    first = _take(descriptor, 1, time.monotonic() + (seconds if idle is None else idle))
    if not first:
        return b""
    until = time.monotonic() + seconds
    length = _length(first + _take(descriptor, 7, until), largest)
    data = _take(descriptor, length, until)
    if len(data) != length:
        raise Gone(f"frame: {length} bytes announced, {len(data)} received")
    return data


def take_bytes(descriptor: int, size: int, seconds: float) -> bytes:
    """So many bytes, fewer when the peer closes its end; `Late` when it takes too long."""
    return _take(descriptor, size, time.monotonic() + seconds)


def _take(descriptor: int, size: int, until: float) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        _wait(descriptor, select.POLLIN, until)
        part = os.read(descriptor, min(size - len(taken), 1 << 20))
        if not part:
            break
        taken += part
    return bytes(taken)


def _wait(descriptor: int, event: int, until: float) -> None:
    watch = select.poll()
    watch.register(descriptor, event)
    if not watch.poll(max(0.0, 1000 * (until - time.monotonic()))):
        raise Late("no answer in time; the peer is stopped, or too busy")


def _length(prefix: bytes, largest: int) -> int:
    (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (largest + 1,)
    if length > largest:
        raise Refused("frame: cut short or longer than allowed")
    return length


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """The next frame; b"" when the peer has closed its end between two frames."""
    prefix = stream.read(8)
    if not prefix:
        return b""
    length = _length(prefix, LARGEST)
    data = stream.read(length)
    if len(data) != length:
        raise Refused(f"frame: {length} bytes announced, {len(data)} received")
    return data
