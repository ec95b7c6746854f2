"""Silos and a shuffler as processes of this machine, spoken to through pipes. Nobody waits for ever.

A link answers `ask(bytes) -> bytes`; over several of them that is the `rpc(site, bytes) -> bytes` which every transport
has. `send` and `receive` are its two halves: a server asks everybody first and then listens.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, Self, cast

import numpy as np

from silodp.deploy.nursery import ENDING, Child, Nursery
from silodp.deploy.wire import decode, encode, plain, put_frame, take_frame, unblocked
from silodp.errors import Gone, Refused

PATIENCE = 600.0  # seconds for one answer: a silo compiles its program before the first

Process = subprocess.Popen[bytes] | Child
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
        about = f" ({plain(header['about'])})" if "about" in header else ""
        raise Refused(f"a silo refused: {code}{plain(header.get('reason'))}{about}")
    return header, arrays


def started(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


class PipedProcess:
    """A party started here for a message run, spoken to in frames. Closing its stdin ends it."""

    what: ClassVar[str] = "a party's process"

    def __init__(self, process: Process, patience: float = PATIENCE) -> None:
        self.process, self.patience = process, patience
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
            raise self._gone() from None

    def take(self) -> bytes:
        data = take_frame(self.output, self.patience)
        if not data:
            raise self._gone()
        return data

    def _gone(self) -> Gone:
        with suppress(subprocess.TimeoutExpired):  # it has closed its end, and should be ending
            self.process.wait(timeout=ENDING)
        return Gone(f"{self.what} ended (exit code {self.process.poll()})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(BrokenPipeError):  # of a process that ended before it had read everything
            cast(IO[bytes], self.process.stdin).close()
        ended(self.process)


class SiloProcess(PipedProcess):
    """A silo.

    `allowed`: parts from outside that it may import; whoever starts a silo here is its operator. `folder`: where it
    keeps what it must not forget. `nursery`: forked there instead of started anew.
    """

    what = "a silo's process"

    def __init__(
        self,
        allowed: Sequence[str] = (),
        patience: float = PATIENCE,
        folder: Path | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        kept = [] if folder is None else ["--keep", str(folder)]
        arguments = [*kept, *allowed]
        born = started("silodp.deploy.silo_process", *arguments) if nursery is None else nursery.start(arguments)
        super().__init__(born, patience)


class ShufflerProcess(PipedProcess):
    """The shuffler, which keeps what it has released in `folder`."""

    what = "the shuffler's process"

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        super().__init__(started("silodp.deploy.shuffler", str(folder)), patience)


def ended(process: Process) -> None:
    try:
        process.wait(timeout=ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # not even a killed process is waited for for ever
            process.wait(timeout=ENDING)
    cast(IO[Any], process.stdout).close()
