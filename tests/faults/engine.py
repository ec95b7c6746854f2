"""Faults of the engine's own processes: `python -m tests.faults.engine [COUNT]`. Needs `silodp[deploy]`.

A real run over NVFlare. Its server, the server's job, sites, their jobs and guards are killed with kill -9 at random
rounds, and guards are stopped for a while; what was killed is started again, as a system's manager would. The run goes
on by itself, and everything that was started ends with it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from silodp.deploy import kits
from silodp.deploy.crew import Crew, members
from silodp.deploy.parade import HOST, Federation, Show, await_guards, free_port
from silodp.deploy.policy import SOCKET
from silodp.deploy.server import CERTIFICATES
from silodp.errors import Refused
from tests.faults.__main__ import add
from tests.faults.network import faults
from tests.faults.parties import tallies
from tests.guards import SCHEMA, SIZES, TREE, make_site

ROUNDS, LONGEST = 60, 3600.0
GRADIENT = {"name": "dp-gd", "rounds": ROUNDS, "clip_difference": None, "restart": None}
PATIENCE = 30.0  # seconds that the server waits for a site before the run pauses


class Engine:
    """A federation over the engine, and what goes wrong in it."""

    def __init__(self, root: Path, seed: int, counts: Counter[str]):
        self.root, self.random, self.counts = root, random.Random(seed), counts
        records = {}
        for site, size in SIZES.items():
            make_site(root / "made" / site, site, size)
            records[site] = (root / "made" / site / "records.csv").read_text()
        config = TREE | {"algorithm": TREE["algorithm"] | GRADIENT}
        self.show, self.out = Show(SCHEMA, records, config), root / "out"

    def run(self, count: int) -> None:
        """One run, with so many faults at most."""
        self.out.mkdir()
        making = kits.begin_provision(self.out / "kits", HOST, free_port(), self.show.parties)
        self.federation = Federation(self.out, self.show)
        self.document = self.federation.agreed(self.federation.made())
        self.made = kits.end_provision(making, self.out / "kits", HOST)
        with Crew(self.out / "logs", kits.environment()) as self.crew:
            self.commands = {"server": kits.server_command(self.made[HOST].resolve())}
            for party, folder in self.federation.folders.items():
                kits.connect(self.made[party], folder / SOCKET)
                self.commands[f"{party}-guard"] = kits.guard_command(folder)
                self.commands[f"{party}-relay"] = kits.relay_command(self.made[party].resolve())
            for name, command in self.commands.items():
                self.crew.start(name, command)
            await_guards(self.federation, self.crew)
            driving = threading.Thread(target=self.driven, daemon=True)
            driving.start()
            self.strike(driving, count)
            driving.join(LONGEST)
        self.counts["runs"] += 1
        self.counts["finished" if self.finished else "hung"] += 1
        self.counts["orphans"] += len(members(self.crew.mark))
        self.check(finished=True)

    @property
    def finished(self) -> bool:
        return (self.out / "run" / CERTIFICATES).is_file()

    def driven(self) -> None:
        """As an operator who repeats `silodp server run --resume`."""
        until = time.monotonic() + LONGEST
        while not self.finished and time.monotonic() < until:
            with suppress(Refused):
                kits.submit(self.made[kits.ADMIN], self.out / "run", self.show.parties, PATIENCE, lambda text: None)

    def strike(self, driving: threading.Thread, count: int) -> None:
        at = 0
        while driving.is_alive() and count > 0:
            at = self.reached(at + self.random.randrange(1, 4), driving)
            name = self.random.choice(list(STRIKES))
            if driving.is_alive() and STRIKES[name](self, self.random.choice(self.show.parties)):
                self.counts[f"engine: {name}"] += 1
                count -= 1
                self.check()

    def reached(self, round: int, driving: threading.Thread) -> int:
        """Wait until the run is in this round, and a moment longer; not for ever: faults may meet in one round, too."""
        until = time.monotonic() + 40.0
        while driving.is_alive() and self.round < round and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3 * self.random.random())
        return self.round

    @property
    def round(self) -> int:
        try:
            return int(json.loads((self.out / "run" / "status.json").read_text())["round"])
        except (OSError, ValueError, LookupError):
            return 0

    def check(self, finished: bool = False) -> None:
        for folder in self.federation.folders.values():
            rows, events, counted = tallies(folder, self.document.run)
            self.counts["lost"] += not rows == events == counted or (finished and rows != ROUNDS)
            self.counts["overspent"] += counted > ROUNDS

    # --- what goes wrong: each says whether it came about ------------------------------------------------

    def killed(self, name: str) -> bool:
        """A process that is started again."""
        self.crew.processes[name].kill()
        self.crew.processes[name].wait()
        self.crew.start(name, self.commands[name])
        return True

    def job_killed(self, kit: Path, program: str) -> bool:
        """A process that the engine has started for the run."""
        for pid in members(self.crew.mark):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if program.encode() in words and str(kit).encode() in words:
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def stopped(self, name: str) -> bool:
        self.crew.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(1 + 2 * self.random.random())
        self.crew.processes[name].send_signal(signal.SIGCONT)
        return True


STRIKES: dict[str, Callable[[Engine, str], bool]] = {
    "server: kill -9": lambda engine, site: engine.killed("server"),
    "server's job: kill -9": lambda engine, site: engine.job_killed(engine.made[HOST].resolve(), "runner_process"),
    "site: kill -9": lambda engine, site: engine.killed(f"{site}-relay"),
    "site's job: kill -9": lambda engine, site: engine.job_killed(engine.made[site].resolve(), "worker_process"),
    "guard: kill -9": lambda engine, site: engine.killed(f"{site}-guard"),
    "guard stopped": lambda engine, site: engine.stopped(f"{site}-guard"),
}


def one_run(folder: Path, counts: Counter[str], most: int) -> str:
    Engine(folder, faults(counts), counts).run(most)
    return f"{ROUNDS} rounds"


if __name__ == "__main__":
    add("engine", 40, one_run)
