"""Silos and a shuffler as processes of this machine, spoken to through pipes. Nobody waits for ever.

A link answers `ask(bytes) -> bytes`; over several of them that is the `rpc(site, bytes) -> bytes` which every transport
has. `send` and `receive` are its two halves: a server asks everybody first and then listens.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.channels.sealed import Terms
from silodp.deploy.shuffler import TOKEN, ShufflerClient
from silodp.deploy.wire import decode, encode, plain, put_frame, take_frame, unblocked
from silodp.errors import Gone, Refused

PATIENCE = 600.0  # seconds for one answer: a silo compiles its program before the first

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


class Link(Protocol):
    """The server's way to one silo."""

    def send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None: ...

    def receive(self) -> Answer: ...


def heard(data: bytes) -> Answer:
    """An answer as a message; a refusal is an error whose words cannot do anything to a terminal."""
    header, arrays = decode(data)
    if header.get("kind") == "refused":
        code = f"{plain(header['code'])}: " if "code" in header else ""
        raise Refused(f"a silo refused: {code}{plain(header.get('reason'))}")
    return header, arrays


class SiloProcess(AbstractContextManager["SiloProcess"]):
    """A silo started here for a local message run. Closing its stdin ends it.

    `allowed`: parts from outside that it may import; whoever starts a silo here is its operator. `folder`: where it
    keeps what it must not forget.
    """

    def __init__(self, allowed: Sequence[str] = (), patience: float = PATIENCE, folder: Path | None = None) -> None:
        kept = [] if folder is None else ["--keep", str(folder)]
        command = [sys.executable, "-m", "silodp.deploy.silo", *kept, *allowed]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.patience = patience
        self.input = unblocked(cast(IO[bytes], self.process.stdin))
        self.output = unblocked(cast(IO[bytes], self.process.stdout))

    def send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.put(encode(header, dict(arrays)))

    def receive(self) -> Answer:
        return heard(self.take())

    def ask(self, data: bytes) -> bytes:
        self.put(data)
        return self.take()

    def put(self, data: bytes) -> None:
        try:
            put_frame(self.input, data, self.patience)
        except BrokenPipeError:
            raise Gone(f"a silo's process ended (exit code {self.process.poll()})") from None

    def take(self) -> bytes:
        data = take_frame(self.output, self.patience)
        if not data:
            raise Gone(f"a silo's process ended (exit code {self.process.wait()})")
        return data

    def __exit__(self, *exc: object) -> None:
        with suppress(BrokenPipeError):  # of a silo that ended before it had read everything
            cast(IO[bytes], self.process.stdin).close()
        ended(self.process)


class ShufflerProcess(AbstractContextManager["ShufflerProcess"]):
    """The shuffler of a local message run, and the server's link to it; closing its stdin ends it."""

    def __init__(self, silos: int, agreed: Mapping[str, Terms]) -> None:
        command = [sys.executable, "-m", "silodp.deploy.shuffler"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tokens = [secrets.token_bytes(TOKEN) for _ in range(silos)]
        server = secrets.token_bytes(TOKEN)
        terms = {query: each._asdict() for query, each in agreed.items()}
        parties = {"server": server.hex(), "silos": [token.hex() for token in self.tokens], "agreed": terms}
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps(parties) + "\n")
        stdin.flush()
        self.port = int(cast(IO[str], self.process.stdout).readline())
        self.private_key = X25519PrivateKey.generate()
        self.client = ShufflerClient(self.port, server)
        self.open, self.release = self.client.open, self.client.release

    def invitation(self, silo: int) -> dict[str, Any]:
        """What a silo needs to know to send."""
        public = self.private_key.public_key().public_bytes_raw()
        return {"port": self.port, "token": self.tokens[silo].hex(), "server_key": public.hex()}

    def __exit__(self, *exc: object) -> None:
        self.client.__exit__()
        cast(IO[str], self.process.stdin).close()
        ended(self.process)


def ended(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    cast(IO[Any], process.stdout).close()
