"""`silodp federation demo`: a whole federation on this machine. Every party is a process of its own, over mutual TLS.

OUT/sites/NAME    each site's guard: key, policy, ledger      OUT/kits   the engine's CA and kits
OUT/run           the server's run: model, certificates, status
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from silodp.deploy import approval, kits, setup
from silodp.deploy.certify import verified
from silodp.deploy.document import Document, proposed
from silodp.deploy.guard import signed_site_facts
from silodp.deploy.guarding import SOCKET
from silodp.deploy.server import CERTIFICATES
from silodp.deploy.signing import canonical
from silodp.errors import ConfigError, Refused
from silodp.parse import parse_config

Say = Callable[[str], None]
# Public ranges of the ten means in the Wisconsin breast cancer records, as a clinician would write them down.
RANGES = {
    "radius": (5, 30), "texture": (5, 40), "perimeter": (40, 200), "area": (100, 2600), "smoothness": (0.04, 0.2),
    "compactness": (0, 0.4), "concavity": (0, 0.5), "concave points": (0, 0.25), "symmetry": (0.1, 0.35),
    "fractal dimension": (0.04, 0.1),
}  # fmt: skip
CONFIG = {
    "privacy": {"epsilon": 2.0, "delta": 1e-5},
    "algorithm": {"name": "spider", "rounds": 10, "step_size": 2.0, "clip": 1.0, "clip_difference": 0.5, "restart": 5},
}
PATIENCE = 120.0


def schema_text() -> str:
    columns = "".join(f'[columns."{name}"]\nkind = "number"\nrange = [{a}, {b}]\n' for name, (a, b) in RANGES.items())
    return f'[target]\nname = "outcome"\nclasses = ["malignant", "benign"]\n{columns}'


def write_records(folder: Path, sites: Sequence[str]) -> None:
    """The public records of 569 patients, divided among the sites."""
    from sklearn import datasets

    bunch: Any = datasets.load_breast_cancer()
    header = ",".join([*RANGES, "outcome"]) + "\n"
    for i, site in enumerate(sites):
        place = folder / site
        place.mkdir(parents=True, exist_ok=True)
        pairs = list(zip(bunch.data, bunch.target, strict=True))[i :: len(sites)]
        rows = [",".join([*(f"{cell:.6g}" for cell in row[:10]), bunch.target_names[label]]) for row, label in pairs]
        (place / "records.csv").write_text(header + "\n".join(rows) + "\n", encoding="utf-8")


def agreed(out: Path, sites: Sequence[str], say: Say) -> Document:
    """What operators do over days: facts, keys, a proposal, approvals."""
    (out / "schema.toml").write_text(schema_text(), encoding="utf-8")
    write_records(out / "records", sites)
    folders = {site: out / "sites" / site for site in sites}
    for site, folder in folders.items():
        setup.init_site(folder, site, out / "schema.toml", [out / "records" / site / "records.csv"], 2.0, 4.0, 1e-5)
    facts = [signed_site_facts(folder) for folder in folders.values()]
    for folder in folders.values():
        setup.trust_sites(folder, facts, ask=None)
    document = Document(json.loads(canonical(proposed(parse_config(CONFIG), facts))))
    approvals = [approval.approve(folder, document) for folder in folders.values()]
    say(f"plan approved by {len(sites)} sites: {document.words}")
    kits.put_run(out / "run", document, approvals)
    return document


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; it and what it started end with the demo."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True, env=kits.environment()
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    for kind, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=seconds)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def demo(out: Path, count: int, say: Say, watch: Callable[[Path], None] = lambda run: None) -> list[str]:
    """From nothing to checked certificates; everything that was started is stopped."""
    if out.exists():
        raise ConfigError(f"--out {out}: exists; give a new directory")
    if not 2 <= count <= 20:
        raise ConfigError(f"--silos {count}: give a number from 2 to 20")
    out.mkdir(parents=True, mode=0o700)
    sites = [f"site-{i + 1}" for i in range(count)]
    document = agreed(out, sites, say)
    made = kits.provision(out / "kits", "localhost", free_port(), sites)
    say("CA and kits made")
    with ExitStack() as stack:
        start = lambda command, name: stack.enter_context(started(command, out / "logs" / f"{name}.log"))
        start(kits.server_command(made["localhost"].resolve()), "server")
        for site in sites:
            folder = out / "sites" / site
            kits.connect(made[site], folder / SOCKET)
            start([sys.executable, "-m", "silodp.deploy.guarding", str(folder)], f"{site}-guard")
            start(kits.relay_command(made[site].resolve()), f"{site}-relay")
        await_sockets(out, sites)
        say(f"{count} guards, {count} relays and the server run; waiting for them to find each other")
        watch(out / "run")
        kits.submit(made[kits.ADMIN], out / "run", sites, PATIENCE, say)
    return verified(json.loads((out / "run" / CERTIFICATES).read_text()), document)


def await_sockets(out: Path, sites: Sequence[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not all((out / "sites" / site / SOCKET).exists() for site in sites):
        if time.monotonic() > until:
            raise Refused("a guard did not start; see logs")
        time.sleep(0.1)
