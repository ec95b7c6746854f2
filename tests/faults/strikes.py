"""What goes wrong: with messages, with processes, and with disks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.deploy.listen import GuardSocket
from silodp.deploy.wire import decode
from tests.faults import disks
from tests.faults.parties import ONCE, STARTING, Dropped, Process, book_of, killed

if TYPE_CHECKING:
    from tests.faults.network import Network

Fault = Callable[["Network", str, bytes, str], bytes]


# --- faults of messages ------------------------------------------------------------------------------------------


def dropped(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.struck(site, name)
    raise Dropped


def lost(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.answer(site, data)
    network.struck(site, name)
    raise Dropped


def doubled(network: Network, site: str, data: bytes, name: str) -> bytes:
    network.struck(site, name)
    network.answer(site, data)
    return network.answer(site, data)


def reordered(network: Network, site: str, data: bytes, name: str) -> bytes:
    """An older message comes again, before this one."""
    network.old.append((site, data))
    network.answer(site, network.random.choice([old for owner, old in network.old if owner == site]))
    network.struck(site, name)
    return network.answer(site, data)


def delayed(network: Network, site: str, data: bytes, name: str) -> bytes:
    """It arrives when the server has asked again."""

    def later() -> None:
        network.stopping.wait(0.5 * network.chosen())
        with suppress(Dropped):
            network.answer(site, data)

    network.late.append(threading.Thread(target=later, daemon=True))
    network.late[-1].start()
    network.struck(site, name)
    raise Dropped


def cut(network: Network, site: str, data: bytes, name: str) -> bytes:
    """A part of the message reaches the guard, then all of it."""
    network.struck(site, name)
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
    network.struck(site, name)
    raise Dropped


def relay_killed(network: Network, site: str, data: bytes, name: str) -> bytes:
    during(network, site, data, network.relays[site].kill)
    killed(network.relays[site])
    network.relays[site] = network.relay(site)
    network.struck(site, name)
    raise Dropped


def server_killed(network: Network, site: str, data: bytes, name: str) -> bytes:
    """While it waits, or when it has the answer and works on it."""
    assert network.server is not None
    if network.chosen() < 0.5:
        during(network, site, data, network.server.kill)
        network.struck(site, name)
        raise Dropped
    answer, victim = network.answer(site, data), network.server

    def later() -> None:
        time.sleep(2 * network.usual * network.chosen())
        victim.kill()

    threading.Thread(target=later, daemon=True).start()
    network.struck(site, name)
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
        network.count("hung", time.monotonic() - began > STARTING)
    finally:
        link.close()
        os.kill(pid, signal.SIGCONT)
    network.struck(site, name)
    raise Dropped


def second_guard(network: Network, site: str, data: bytes, name: str) -> bytes:
    """Two guards in one folder would answer twice."""
    first, second = network.guards[site], network.guard(site)
    ended(second, unless=first)
    if first.exitcode is not None:  # of an earlier fault, just now: nobody was there
        killed(second)
        raise Dropped
    network.count("not noticed", second.exitcode != 1)
    killed(second)
    network.struck(site, name)
    return network.answer(site, data)


def ended(process: Process, unless: Process | None = None) -> None:
    """Wait until a process ends, or another one does. Nobody waits for ever: a guard that should have refused to start
    and works instead would be waited for until the last day."""
    until = time.monotonic() + STARTING
    while process.exitcode is None and time.monotonic() < until and (unless is None or unless.exitcode is None):
        process.join(0.1)


# --- faults of disks ---------------------------------------------------------------------------------------------


def failing(network: Network, site: str, data: bytes, name: str) -> bytes:
    """The guard's disk fails in the middle of its commit."""
    order, chosen = network.order(site), network.random
    fault = name.removeprefix("guard: ").removesuffix(", power cut")
    told = {"fault": fault, "place": chosen.randrange(-4096, 16384)}
    shutil.rmtree(order.with_suffix(".before"), ignore_errors=True)  # of an earlier fault
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
    if died or hit.is_file() or name.endswith("jumps"):
        network.struck(site, name)
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
        ended(fooled)
        network.count("not noticed", fooled.exitcode != 1)
        killed(fooled)
        replaced(folder, ledgers(now))
        network.struck(site, name)
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
CHEAP = [*list(FAULTS)[:6], "guard stopped", "guard: counter not written", "guard: clock jumps"]  # nobody starts again
OFTEN = [*FAULTS, "guard: kill -9", "server: kill -9", *CHEAP, *CHEAP]
