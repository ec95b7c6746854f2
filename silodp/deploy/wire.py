"""Bytes between processes: a JSON header and safetensors arrays, framed by their length. No pickle.

frame = length of the rest (8 bytes) | length of the header (4 bytes) | header, UTF-8 JSON | safetensors
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load, save

from silodp.errors import Refused

LARGEST = 1 << 34  # a frame announced as longer than this is an error, not a reason to allocate


def encode(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    head = json.dumps(header).encode()
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return struct.pack("<I", len(head)) + head + save(contiguous)


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if len(data) < 4:
        raise Refused(f"message of {len(data)} bytes: too short to hold a header")
    (length,) = struct.unpack_from("<I", data)
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


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """The next frame; b"" when the peer has closed its end between two frames."""
    prefix = stream.read(8)
    if not prefix:
        return b""
    (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (LARGEST + 1,)
    if length > LARGEST:
        raise Refused("frame: cut short or longer than allowed")
    data = stream.read(length)
    if len(data) != length:
        raise Refused(f"frame: {length} bytes announced, {len(data)} received")
    return data
