"""Processes that are started together and end together, whatever they started themselves. Linux. No JAX.

Every process of a crew has the crew's mark in its environment, and so has whatever it starts. A keeper, a small process
of its own, waits until the crew's owner closes a pipe, by leaving or by dying, and then ends all that have the mark.
`python -m silodp.deploy.crew MARK` is the keeper.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, cast

VARIABLE = "SILODP_CREW"
PATIENCE = ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0))  # seconds that each kind of word may take


class Crew(AbstractContextManager["Crew"]):
    """`logs`: a folder; what a process prints is in a file there, under its name."""

    def __init__(self, logs: Path, environment: Mapping[str, str]):
        self.logs, self.mark = logs, secrets.token_hex(16)
        self.environment = dict(environment) | {VARIABLE: self.mark}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "silodp.deploy.crew", self.mark]
        self.keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C reaches the owner only, who then ends all of them."""
        with (self.logs / f"{name}.log").open("ab") as file:
            self.processes[name] = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                env=self.environment,
            )  # fmt: skip
        return self.processes[name]

    def ended(self) -> str | None:
        """A process that is no longer there."""
        return next((name for name, process in self.processes.items() if process.poll() is not None), None)

    def __exit__(self, *exc: object) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave some of them behind
        try:
            cast(IO[bytes], self.keeper.stdin).close()
            for process in self.processes.values():
                process.wait()
            self.keeper.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def members(mark: str) -> list[int]:
    """Living processes with this mark."""
    wanted, found = f"{VARIABLE}={mark}".encode(), []
    for place in Path("/proc").iterdir():
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if place.name.isdigit() and wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def end_all(mark: str) -> list[int]:
    """Ask all of them to end, then make them; returns those that are left."""
    for word, seconds in PATIENCE:
        until, asked = time.monotonic() + seconds, set[int]()
        while (left := members(mark)) and time.monotonic() < until:
            for process in set(left) - asked:
                asked.add(process)
                with suppress(ProcessLookupError):
                    os.kill(process, word)
            time.sleep(0.05)
        if not left:
            break
    return members(mark)


def main() -> None:
    for word in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(word, signal.SIG_IGN)
    sys.stdin.buffer.read()
    left = end_all(sys.argv[1])
    if left:
        sys.exit(f"processes that do not end: {left}")


if __name__ == "__main__":
    main()
