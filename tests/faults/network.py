"""The network between the parties, which does everything to them that must not matter."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from silodp.deploy.desk import question_of
from silodp.deploy.listen import GuardSocket, Listener
from silodp.deploy.policy import SOCKET
from silodp.deploy.server import CERTIFICATES
from silodp.deploy.signing import canonical
from silodp.deploy.wire import decode
from tests.faults import disks
from tests.faults.parties import LARGEST, ONCE, Process, run_guard, run_relay, run_server, spoilt, started
from tests.guards import Federation, config_of

ROUNDS = 30  # of one run
BROKEN = ("lost", "overspent", "two answers to one question", "not noticed", "hung", "orphans")
LONGEST = 3600.0  # seconds for one run; longer is hung
LARGE = (1 << 20, 64)  # bytes: with the second nearly everything is in a ledger's side files


class Dropped(ConnectionError):
    """No answer comes back; whoever asked will ask again."""


class Network:
    """Two sites and a server in processes, and what goes wrong between them."""

    def __init__(self, root: Path, seed: int, counts: Counter[str], rate: float = 0.6, rounds: int = ROUNDS):
        self.root, self.random, self.counts, self.rate, self.rounds = root, random.Random(seed), counts, rate, rounds
        self.large = LARGE[seed % 2]
        self.given: dict[tuple[str, bytes], bytes] = {}  # by site and question
        self.sites = Federation(root / "sites")
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
        if header["kind"] == "ask" and decode(answer)[0]["kind"] == "answer":
            with self.counting:
                known = self.given.setdefault((site, question_of(header, arrays)), answer)
                self.counts["two answers to one question"] += known != answer

    # --- a run --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One plan to its end, however often it has to go on."""
        self.given.clear()
        self.old.clear()
        options = {"name": "dp-gd", "rounds": self.rounds, "clip_difference": None, "restart": None}
        document = self.sites.document(config_of(privacy={"epsilon": 0.01}, algorithm=options))
        self.number, approvals = document.run, self.sites.approve(document)
        plan, self.folder = self.root / f"{document.run}.json", self.root / document.run
        plan.write_bytes(canonical(document.tree))
        paths, until = {site: self.path("net", site) for site in self.names}, time.monotonic() + LONGEST
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
        released = 0 if counted is None else sum(line["count"] for line in json.loads(counted[0]))
        with self.counting:
            mine = sum(owner == site for owner, _ in self.given)
        whole = released == rows == events and mine <= rows
        self.count("lost", not whole or (finished and not mine == rows == self.rounds))
        self.count("overspent", released > self.rounds)

    def read(self, site: str) -> tuple[int, int, Any]:
        """Answers, entries of answers, and what was counted, all at one moment; after its guard has opened it again."""
        for _ in range(600):
            try:
                with closing(book_of(self.sites.folders[site])) as book:
                    book.execute("begin")
                    one = lambda sql: book.execute(sql, (self.number,)).fetchone()
                    return (
                        one("select count(*) from answer where run = ? and key like 'ask%'")[0],
                        one("select count(*) from chain where event like '%\"ask %' and instr(event, ?)")[0],
                        one("select counted from run where run = ?"),
                    )
            except sqlite3.OperationalError:
                time.sleep(0.1)
        raise AssertionError(f"{site}: its guard does not come back")


def book_of(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{folder}/ledger.db?mode=ro", uri=True, timeout=30)


def killed(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.join(30)


# --- faults of messages ------------------------------------------------------------------------------------------

Fault = Callable[[Network, str, bytes, str], bytes]


def dropped(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.count(name)
    raise Dropped


def lost(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.answer(site, data)
    network.count(name)
    raise Dropped


def doubled(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.count(name)
    network.answer(site, data)
    return network.answer(site, data)


def reordered(network: Network, site: str, data: bytes, name: str) -> bytes:
    """An older message comes again, before this one."""
    network.old.append((site, data))
    network.answer(site, network.random.choice([old for owner, old in network.old if owner == site]))
    network.count(name)
    return network.answer(site, data)


def delayed(network: Network, site: str, data: bytes, name: str) -> bytes:
    """It arrives when the server has asked again."""

    def later() -> None:
        network.stopping.wait(0.5 * network.chosen())
        with suppress(Dropped):
            network.answer(site, data)

    network.late.append(threading.Thread(target=later, daemon=True))
    network.late[-1].start()
    network.count(name)
    raise Dropped


def cut(network: Network, site: str, data: bytes, name: str) -> bytes:
    """A part of the message reaches the guard, then all of it."""
    network.count(name)
    link = GuardSocket(network.path("relays", site), ONCE)
    with suppress(OSError, ValueError):
        told = decode(link.ask(data[: network.random.randrange(1, len(data) - 1)]))[0]
        network.count("not noticed", told["kind"] != "refused")
    link.close()
    return network.answer(site, data)


# --- faults of processes -----------------------------------------------------------------------------------------


def during(network: Network, site: str, data: bytes, strike: Callable[[], None]) -> None:
    """Something happens at a random moment while a question is answered."""
    asking = threading.Thread(target=lambda: suppressed(network, site, data))
    asking.start()
    time.sleep(1.3 * network.usual * network.chosen())
    strike()
    asking.join(2 * ONCE)


def suppressed(network: Network, site: str, data: bytes) -> None:
    with suppress(Dropped):
        network.answer(site, data)


def guard_killed(network: Network, site: str, data: bytes, name: str) -> bytes:
    during(network, site, data, network.guards[site].kill)
    network.restarted(site)
    network.count(name)
    raise Dropped


def relay_killed(network: Network, site: str, data: bytes, name: str) -> bytes:
    during(network, site, data, network.relays[site].kill)
    killed(network.relays[site])
    network.relays[site] = network.relay(site)
    network.count(name)
    raise Dropped


def server_killed(network: Network, site: str, data: bytes, name: str) -> bytes:
    """While it waits, or when it has the answer and works on it."""
    assert network.server is not None
    if network.chosen() < 0.5:
        during(network, site, data, network.server.kill)
        network.count(name)
        raise Dropped
    answer, victim = network.answer(site, data), network.server

    def later() -> None:
        time.sleep(2 * network.usual * network.chosen())
        victim.kill()

    threading.Thread(target=later, daemon=True).start()
    network.count(name)
    return answer


def stopped(network: Network, site: str, data: bytes, name: str) -> bytes:
    """A guard that hangs: nobody else does, and it goes on later as if nothing had been."""
    pid = network.guards[site].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.01)  # on a busy machine its other threads go on for a while
    began, link = time.monotonic(), GuardSocket(network.path("relays", site), 0.3)
    try:
        link.ask(data)
        network.count("not noticed")
    except (OSError, ValueError):
        network.count("hung", time.monotonic() - began > 5.0)
    finally:
        link.close()
        os.kill(pid, signal.SIGCONT)
    network.count(name)
    raise Dropped


def second_guard(network: Network, site: str, data: bytes, name: str) -> bytes:
    """Two guards in one folder would answer twice."""
    second = network.guard(site)
    second.join(LONGEST)
    network.count("not noticed", second.exitcode != 1)
    killed(second)
    network.count(name)
    return network.answer(site, data)


# --- faults of disks ---------------------------------------------------------------------------------------------


def failing(network: Network, site: str, data: bytes, name: str) -> bytes:
    """The guard's disk fails in the middle of its commit."""
    order, chosen = network.order(site), network.random
    fault = name.removeprefix("guard: ").removesuffix(", power cut")
    told = {"fault": fault, "place": chosen.randrange(-4096, 16384)}
    order.with_suffix(".partial").write_text(json.dumps(told))
    os.replace(order.with_suffix(".partial"), order)
    answer = None
    with suppress(Dropped):
        answer = network.answer(site, data)
    order.unlink(missing_ok=True)
    hit = order.with_suffix(".hit")
    deadly = fault == "torn write" or fault.startswith("killed")
    network.guards[site].join(3.0 if answer is None and deadly else 0.0)
    died = network.guards[site].exitcode is not None
    if died:
        if name.endswith("power cut"):
            disks.power_cut(network.sites.folders[site], order.with_suffix(".before"), chosen)
        network.restarted(site)
    network.count(name, died or hit.is_file() or name.endswith("jumps"))
    hit.unlink(missing_ok=True)
    if answer is None or decode(answer)[0].get("code") == "disk":
        raise Dropped
    return answer


def put_back(network: Network, site: str, data: bytes, name: str) -> bytes:
    """A ledger from an older copy is noticed, and the newer one goes on."""
    folder = network.sites.folders[site]
    network.read(site)
    with closing(book_of(folder)) as book:
        entries = book.execute("select max(seq) from chain").fetchone()[0]
    killed(network.guards[site])
    now, (then, older) = disks.files_of(folder), network.older.get(site, (entries, {}))
    if entries > then + 1:  # the last entry may not have been noted, and then nothing was sent either
        replaced(folder, ledgers(older))
        fooled = network.guard(site)
        fooled.join(LONGEST)
        network.count("not noticed", fooled.exitcode != 1)
        killed(fooled)
        replaced(folder, ledgers(now))
        network.count(name)
    network.older[site] = entries, now
    network.guards[site] = network.guard(site)
    raise Dropped


def ledgers(files: disks.Files) -> disks.Files:
    return {file: data for file, data in files.items() if file.name in ("ledger.db", "ledger.db-wal")}


def replaced(folder: Path, files: disks.Files) -> None:
    for file in folder.glob("ledger.db*"):
        file.unlink()
    for file, data in files.items():
        file.write_bytes(data)


FAULTS: dict[str, Fault] = {
    "message dropped": dropped,
    "answer lost": lost,
    "message doubled": doubled,
    "messages reordered": reordered,
    "message delayed": delayed,
    "message cut": cut,
    "guard: kill -9": guard_killed,
    "relay: kill -9": relay_killed,
    "server: kill -9": server_killed,
    "guard stopped": stopped,
    "second guard": second_guard,
    "ledger put back": put_back,
    "guard: disk full": failing,
    "guard: torn write": failing,
    "guard: write fails": failing,
    "guard: sync fails": failing,
    "guard: killed at write": failing,
    "guard: killed at sync": failing,
    "guard: killed at sync, power cut": failing,
    "guard: killed at rename": failing,
    "guard: killed at unlink": failing,
    "guard: no file handles": failing,
    "guard: counter not written": failing,
    "guard: clock jumps": failing,
}
OFTEN = [*FAULTS, "guard: kill -9", "server: kill -9"]
SERVER_FAULTS = tuple(f"server: {fault}" for fault in ("disk full", "killed at sync", "killed at rename"))
ALL = (*FAULTS, *SERVER_FAULTS)


def faults(counts: Counter[str]) -> int:
    return sum(counts[name] for name in ALL)


def inject(
    root: Path, count: int, seed: int, counts: Counter[str], rate: float = 0.6, rounds: int = ROUNDS
) -> Counter[str]:
    """At least so many faults, over as many runs as they take."""
    until, network = faults(counts) + count, Network(root, seed, counts, rate, rounds)
    with network.running():
        while faults(counts) < until:
            network.run()
    everybody = [*network.guards.values(), *network.relays.values(), network.server]
    counts["orphans"] += sum(process is not None and process.is_alive() for process in everybody)
    for site in network.names:
        ledger = network.sites.guard(site).ledger
        counts["lost"] += bool(ledger.verify())
    network.sites.close()
    shutil.rmtree(root / "net")
    return counts
