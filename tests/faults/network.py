"""The network between the parties, which does everything to them that must not matter."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from silodp.deploy.desk import question_of
from silodp.deploy.listen import GuardSocket, Listener
from silodp.deploy.policy import SOCKET
from silodp.deploy.server import CERTIFICATES
from silodp.deploy.signing import SERVER_KEY, canonical
from silodp.deploy.wire import decode
from tests.faults import disks
from tests.faults.parties import (
    LARGEST,
    ONCE,
    Dropped,
    Process,
    Tallies,
    killed,
    run_guard,
    run_relay,
    run_server,
    spoilt,
    started,
    tallies,
)
from tests.faults.strikes import FAULTS, OFTEN
from tests.guards import MIXER, SIZES, Federation, config_of

RATE = 0.6  # how often a message meets a fault
BROKEN = ("lost", "overspent", "two answers to one question", "not noticed", "hung", "orphans")
RUNS = ("runs", "finished")
LONGEST = 3600.0  # seconds for one run; longer is hung
LARGE = (1 << 20, 64)  # bytes: with the second nearly everything is in a ledger's side files


@dataclass(frozen=True)
class Kind:
    """A federation: its sites' records, what is trained, and whether a shuffler is one more site."""

    options: Mapping[str, Any]
    privacy: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    shuffler: bool = False
    misses: bool = False  # whether a round may do without a site
    rounds: int = 30  # of one run


GRADIENT = {"name": "dp-gd", "clip_difference": None, "restart": None}
KINDS = {
    "untrusted": Kind(GRADIENT, {"epsilon": 0.01}),
    "shuffled": Kind(
        GRADIENT | {"randomizer": "privunit", "weights": "size"}, {"trust": "shuffled", "epsilon": 0.3}, shuffler=True
    ),
    "sums": Kind(
        GRADIENT,
        {"trust": "aggregated", "epsilon": 0.3, "missing": 1, "colluding": 1},
        SIZES | {"east": 9, "west": 14},
        misses=True,
        rounds=6,  # with six messages a site and round
    ),
}


class Network:
    """Sites and a server in processes, and what goes wrong between them."""

    def __init__(
        self, root: Path, seed: int, counts: Counter[str], kind: str = "untrusted", rounds: int | None = None,
        longest: float = LONGEST,
    ):  # fmt: skip
        self.root, self.random, self.counts, self.rate = root, random.Random(seed), counts, RATE
        self.kind, self.longest = KINDS[kind], longest
        self.rounds = rounds or self.kind.rounds
        self.large = LARGE[seed % 2]
        self.given: dict[tuple[str, bytes], bytes] = {}  # by site and question
        self.sites = Federation(root / "sites", dict(self.kind.sizes), self.kind.shuffler)
        self.names = list(self.sites.folders)
        self.locks = {site: threading.RLock() for site in self.names}
        self.counting, self.stopping = threading.Lock(), threading.Event()
        self.guards: dict[str, Process] = {}
        self.relays: dict[str, Process] = {}
        self.server: Process | None = None
        self.old: list[tuple[str, bytes]] = []  # messages that may come again
        self.older: dict[str, tuple[int, disks.Files]] = {}  # entries and disk of a site at an earlier time
        self.usual = 0.02  # seconds for an answer
        self.late: list[threading.Thread] = []
        for folder in ("net", "relays", "orders"):
            (root / folder).mkdir()

    # --- processes ----------------------------------------------------------------------------------------

    def guard(self, site: str) -> Process:
        return started(run_guard, self.sites.folders[site], self.order(site), self.large)

    def relay(self, site: str) -> Process:
        return started(run_relay, self.path("relays", site), self.sites.folders[site] / SOCKET)

    def path(self, folder: str, site: str) -> Path:
        return self.root / folder / f"{site}.sock"

    def order(self, site: str) -> Path:
        return self.root / "orders" / f"{site}.json"

    def restarted(self, site: str) -> None:
        """A guard that is dead, back again."""
        killed(self.guards[site])
        self.guards[site] = self.guard(site)

    @contextmanager
    def running(self) -> Iterator[None]:
        listeners = []
        try:
            for site in self.names:
                self.guards[site], self.relays[site] = self.guard(site), self.relay(site)
                reply = lambda data, site=site: self.carried(site, data)
                listeners.append(Listener(self.path("net", site), os.getuid(), reply, LARGEST))
                threading.Thread(target=listeners[-1].serve, daemon=True).start()
            yield
        finally:
            self.stopping.set()
            for thread in self.late:
                thread.join(2 * ONCE)
            for listener in listeners:
                listener.close()
            for process in (*self.guards.values(), *self.relays.values(), self.server):
                if process is not None:
                    killed(process)

    # --- messages -----------------------------------------------------------------------------------------

    def carried(self, site: str, data: bytes) -> bytes:
        """From the server to a site and back, or not."""
        with self.locks[site]:
            if self.guards[site].exitcode is not None:
                self.restarted(site)
            if self.relays[site].exitcode is not None:
                self.relays[site] = self.relay(site)
            if self.chosen() > self.rate:
                return self.answer(site, data)
            name = self.random.choice(OFTEN)
            try:
                return FAULTS[name](self, site, data, name)
            finally:
                self.check(site)

    def chosen(self) -> float:
        return self.random.random()

    def count(self, name: str, by: int = 1) -> None:
        with self.counting:
            self.counts[name] += by

    def struck(self, site: str, name: str) -> None:
        """A fault that came about."""
        self.count(name.replace("guard", "shuffler") if site == MIXER else name)

    def answer(self, site: str, data: bytes) -> bytes:
        """What a guard says through its relay; the same question never gets two answers."""
        began, link = time.monotonic(), GuardSocket(self.path("relays", site), ONCE)
        try:
            answer = link.ask(data)
        except (OSError, ValueError) as error:
            raise Dropped(str(error)) from None
        finally:
            link.close()
        self.usual = 0.8 * self.usual + 0.2 * min(2.0, time.monotonic() - began)
        self.compare(site, data, answer)
        return answer

    def compare(self, site: str, data: bytes, answer: bytes) -> None:
        header, arrays = decode(data)
        if header["kind"] in ("ask", "shuffle") and decode(answer)[0]["kind"] == "answer":
            with self.counting:
                known = self.given.setdefault((site, question_of(header, arrays)), answer)
                self.counts["two answers to one question"] += known != answer

    # --- a run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One plan to its end, however often it has to go on."""
        self.given.clear()
        self.old.clear()
        options = dict(self.kind.options) | {"rounds": self.rounds}
        document = self.sites.document(config_of(privacy=dict(self.kind.privacy), algorithm=options))
        self.number, approvals = document.run, self.sites.approve(document)
        plan, self.folder = self.root / f"{document.run}.json", self.root / document.run
        plan.write_bytes(canonical(document.tree))
        if self.kind.shuffler:
            self.folder.mkdir(mode=0o700)
            shutil.copy(self.root / "sites" / SERVER_KEY, self.folder / SERVER_KEY)
        paths, until = {site: self.path("net", site) for site in self.names}, time.monotonic() + self.longest
        while not (self.folder / CERTIFICATES).is_file() and time.monotonic() < until:
            order = self.server_order()
            self.server = party = started(run_server, plan, approvals, paths, self.folder, order)
            party.join(max(1.0, until - time.monotonic()))
            code = party.exitcode
            killed(party)
            if order and code != 0:
                self.count(f"server: {order['fault']}")
                spoilt(self.folder, self.random)
        self.count("runs")
        self.count("finished" if (self.folder / CERTIFICATES).is_file() else "hung")
        for site in self.names:
            self.check(site, finished=True)

    def server_order(self) -> dict[str, Any]:
        if self.chosen() > self.rate:
            return {}
        fault = self.random.choice(("disk full", "killed at sync", "killed at rename"))
        return {"fault": fault, "after": self.random.randrange(1, 8), "place": self.random.randrange(400)}

    def check(self, site: str, finished: bool = False) -> None:
        """The invariants, from the ledger on the disk: it may be read while a guard writes it."""
        rows, events, counted = self.read(site)
        released = rows if site == MIXER else counted  # a shuffler has no budget
        with self.counting:
            mine = sum(owner == site for owner, _ in self.given)
        whole = released == rows == events and mine <= rows
        all_there = mine == rows == self.rounds or self.kind.misses
        self.count("lost", not whole or (finished and not all_there))
        self.count("overspent", released > self.rounds)

    def read(self, site: str) -> Tallies:
        return tallies(self.sites.folders[site], self.number, "shuffle" if site == MIXER else "ask")


def faults(counts: Counter[str]) -> int:
    return sum(number for name, number in counts.items() if name not in (*BROKEN, *RUNS))


def inject(
    root: Path, count: int, seed: int, counts: Counter[str], kind: str = "untrusted", rounds: int | None = None,
    longest: float = LONGEST,
) -> Counter[str]:  # fmt: skip
    """At least so many faults, over as many runs as they take."""
    until, network = faults(counts) + count, Network(root, seed, counts, kind, rounds, longest)
    with network.running():
        while faults(counts) < until and not counts["hung"]:
            network.run()
    everybody = [*network.guards.values(), *network.relays.values(), network.server]
    counts["orphans"] += sum(process is not None and process.is_alive() for process in everybody)
    for site in network.names:
        ledger = network.sites.guard(site).ledger
        counts["lost"] += bool(ledger.verify())
    network.sites.close()
    shutil.rmtree(root / "net")
    return counts
