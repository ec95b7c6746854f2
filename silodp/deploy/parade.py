"""`silodp federation demo`: a whole federation on this machine. Every party is a process of its own, over mutual TLS.

OUT/sites/NAME    each site's guard: key, policy, ledger      OUT/kits   the engine's CA and kits
OUT/run           the server's run: model, certificates, status
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.deploy import kits
from silodp.deploy.crew import Crew
from silodp.deploy.policy import SOCKET
from silodp.deploy.signing import SERVER_KEY, canonical
from silodp.errors import ConfigError, Refused

Say = Callable[[str], None]
HOST, SHUFFLER = "localhost", "shuffler"
# Public ranges of the ten means in the Wisconsin breast cancer records, as a clinician would write them down.
RANGES = {
    "radius": (5, 30), "texture": (5, 40), "perimeter": (40, 200), "area": (100, 2600), "smoothness": (0.04, 0.2),
    "compactness": (0, 0.4), "concavity": (0, 0.5), "concave points": (0, 0.25), "symmetry": (0.1, 0.35),
    "fractal dimension": (0.04, 0.1),
}  # fmt: skip
OPTIONS = {"name": "spider", "rounds": 10, "step_size": 2.0, "clip": 1.0, "clip_difference": 0.5, "restart": 5}
CONFIG = {"privacy": {"epsilon": 2.0, "delta": 1e-5}, "algorithm": OPTIONS}
SHUFFLED = {
    "privacy": {"epsilon": 2.0, "delta": 1e-5, "trust": "shuffled"},
    "algorithm": OPTIONS | {"randomizer": "privunit"},
}
PATIENCE = 120.0


@dataclass(frozen=True)
class Show:
    """What is trained, on whose records. `records`: of every site, as the text of a CSV file."""

    schema: str
    records: Mapping[str, str]
    config: Mapping[str, Any]
    shuffler: bool = False

    @property
    def sites(self) -> list[str]:
        return list(self.records)

    @property
    def parties(self) -> list[str]:
        return [*self.sites, *([SHUFFLER] if self.shuffler else [])]


def breast_cancer(count: int, shuffler: bool) -> Show:
    """The public records of 569 patients, divided among the sites."""
    from sklearn import datasets

    bunch: Any = datasets.load_breast_cancer()
    columns = "".join(f'[columns."{name}"]\nkind = "number"\nrange = [{a}, {b}]\n' for name, (a, b) in RANGES.items())
    schema = f'[target]\nname = "outcome"\nclasses = ["malignant", "benign"]\n{columns}'
    header = ",".join([*RANGES, "outcome"]) + "\n"
    pairs = list(zip(bunch.data, bunch.target, strict=True))
    line = lambda row, label: ",".join([*(f"{cell:.6g}" for cell in row[:10]), bunch.target_names[label]]) + "\n"
    records = {
        f"site-{i + 1}": header + "".join(line(row, label) for row, label in pairs[i::count]) for i in range(count)
    }
    return Show(schema, records, SHUFFLED if shuffler else CONFIG, shuffler)


class Federation:
    """The parties' folders under `out`, and what their operators do over days: keys, facts, a proposal, approvals."""

    def __init__(self, out: Path, show: Show):
        self.out, self.show = out, show
        self.folders = {party: out / "sites" / party for party in show.parties}

    def made(self) -> list[dict[str, Any]]:
        """Every party's folder, and its signed facts, which the sites have noted."""
        from silodp.deploy import setup
        from silodp.deploy.guard import signed_site_facts
        from silodp.deploy.mixer import shuffler_facts

        (self.out / "schema.toml").write_text(self.show.schema, encoding="utf-8")
        trusts = [self.show.config["privacy"].get("trust", "untrusted")]
        for site, text in self.show.records.items():
            data = self.out / "records" / site / "records.csv"
            data.parent.mkdir(parents=True)
            data.write_text(text, encoding="utf-8")
            epsilon = self.show.config["privacy"]["epsilon"]
            schema = self.out / "schema.toml"
            setup.init_site(self.folders[site], site, schema, [data], epsilon, 2 * epsilon, 1e-5, trusts)
        facts = [signed_site_facts(self.folders[site]) for site in self.show.sites]
        if self.show.shuffler:
            setup.init_shuffler(self.folders[SHUFFLER], SHUFFLER)
            facts.append(shuffler_facts(self.folders[SHUFFLER]))
        for site in self.show.sites:
            setup.trust_sites(self.folders[site], facts, ask=None)
        return facts

    def agreed(self, facts: Sequence[dict[str, Any]]) -> Any:
        """The plan, approved by all, in the server's run folder."""
        from silodp.deploy import approval
        from silodp.deploy.document import Document, proposed
        from silodp.deploy.shuffling import create_box, public_of
        from silodp.parse import parse_config

        key, shuffler = None, None
        if self.show.shuffler:
            key = self.out / SERVER_KEY
            shuffler = {"facts": facts[-1], "server_key": public_of(create_box(key))}
        sites = facts[: len(self.show.sites)]
        tree = proposed(parse_config(dict(self.show.config)), sites, shuffler=shuffler)
        document = Document(json.loads(canonical(tree)))
        approvals = [approval.approve(folder, document) for folder in self.folders.values()]
        kits.put_run(self.out / "run", document, approvals, key)
        return document


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def interrupted_by(*words: signal.Signals) -> Iterator[None]:
    """These signals end a block as Ctrl-C does, with everything that has to be undone."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    heard = [word for word in words if signal.getsignal(word) is not signal.SIG_IGN]  # nohup stays nohup
    before = {word: signal.signal(word, stop) for word in heard}
    try:
        yield
    finally:
        for word, handler in before.items():
            signal.signal(word, handler)


def demo(out: Path, count: int, shuffler: bool, say: Say) -> list[str]:
    """From nothing to checked certificates; everything that was started is stopped."""
    if out.exists():
        raise ConfigError(f"--out {out}: exists; give a new directory")
    if not 2 <= count <= 20:
        raise ConfigError(f"--silos {count}: give a number from 2 to 20")
    with interrupted_by(signal.SIGTERM, signal.SIGHUP):
        return performed(out, breast_cancer(count, shuffler), say, status=True)


def performed(
    out: Path,
    show: Show,
    say: Say,
    guard: Callable[[Path], list[str]] = kits.guard_command,
    status: bool = False,
) -> list[str]:
    """A whole run. `guard`: the command of a guard, where a test needs another one. Whoever has to wait for nobody is
    started first: the engine's kits, then guards, server and relays, while the plan is still made."""
    from silodp.deploy.certify import verified
    from silodp.deploy.server import CERTIFICATES

    out.mkdir(parents=True, mode=0o700)
    began = time.monotonic()
    tell = lambda text: say(f"{time.monotonic() - began:5.1f} s  {text}")
    making = kits.begin_provision(out / "kits", HOST, free_port(), show.parties)
    try:
        federation = Federation(out, show)
        facts = federation.made()
        tell(f"{len(show.parties)} parties have keys and know each other's")
        made = kits.end_provision(making, out / "kits", HOST)
    finally:
        making.kill()
    with Crew(out / "logs", kits.environment()) as crew:
        crew.start("server", kits.server_command(made[HOST].resolve()))
        for party, folder in federation.folders.items():
            kits.connect(made[party], folder / SOCKET)
            crew.start(f"{party}-guard", guard(folder))
            crew.start(f"{party}-relay", kits.relay_command(made[party].resolve()))
        tell("CA and kits made; server, guards and relays are starting")
        document = federation.agreed(facts)
        tell(f"plan approved by all: {document.words}")
        if status:
            port = free_port()
            crew.start("status", [*kits.silodp_command(), "status", str(out / "run"), "--web", f"127.0.0.1:{port}"])
            tell(f"status page: http://127.0.0.1:{port}/")
        await_guards(federation, crew)
        kits.submit(made[kits.ADMIN], out / "run", show.parties, PATIENCE, tell)
        lines = verified(json.loads((out / "run" / CERTIFICATES).read_text()), document)
        tell("run finished, certificates checked")
    return lines


def await_guards(federation: Federation, crew: Crew) -> None:
    until = time.monotonic() + PATIENCE
    while not all((folder / SOCKET).exists() for folder in federation.folders.values()):
        if time.monotonic() > until or crew.ended() is not None:
            raise Refused(f"{crew.ended() or 'a guard'} did not start; see {crew.logs}")
        time.sleep(0.1)
