"""Two sites with guards in this process: folders, keys, facts, a plan that both have approved, and a way to ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from silodp.config import Config
from silodp.deploy import approval, signing
from silodp.deploy.chain import answer_digest
from silodp.deploy.document import Document, proposed
from silodp.deploy.guard import Guard, signed_site_facts
from silodp.deploy.ledger import Ledger
from silodp.deploy.mixer import BOX, Mixer, shuffler_facts
from silodp.deploy.office import KEY, Office
from silodp.deploy.shuffling import create_box, public_of
from silodp.deploy.signing import SERVER_KEY
from silodp.deploy.wire import decode, encode
from silodp.parse import parse_config

SCHEMA = """
[target]
name = "outcome"
classes = ["well", "ill"]
[columns.age]
kind = "number"
range = [0, 120]
[columns.dose]
kind = "number"
range = [0, 10]
"""
POLICY = """
site = "{site}"
[data]
files = ["records.csv"]
schema = "schema.toml"
[limits]
trusts = ["untrusted", "aggregated", "shuffled"]
epsilon = 2.0
delta = 1e-4
total_epsilon = 3.5
total_delta = 1e-4
rounds = 50
parameters = 1000
silos = 5
message_bytes = 1_000_000
[peers]
{peers}
[shufflers]
{shufflers}
"""
SIZES = {"north": 20, "south": 12}
MIXER = "mixer"  # the name of the shuffler
X0 = np.zeros(3, np.float32)
TREE: dict[str, Any] = {
    "privacy": {"epsilon": 1.0, "delta": 1e-5},
    "algorithm": {"name": "spider", "rounds": 4, "step_size": 0.3, "clip": 1.0, "clip_difference": 0.7, "restart": 2},
    "run": {"mode": "messages"},
}


def config_of(**sections: Any) -> Config:
    return parse_config({name: TREE.get(name, {}) | sections.get(name, {}) for name in TREE.keys() | sections.keys()})


def make_site(folder: Path, site: str, records: int) -> signing.Key:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(records)
    rows = [
        f"{rng.integers(20, 90)},{rng.integers(0, 10)},{'ill' if rng.random() < 0.5 else 'well'}"
        for _ in range(records)
    ]
    (folder / "records.csv").write_text("age,dose,outcome\n" + "\n".join(rows) + "\n")
    (folder / "schema.toml").write_text(SCHEMA)
    return signing.Key.create(folder / KEY)


def make_shuffler(folder: Path) -> dict[str, Any]:
    """Its folder, and what it tells everybody."""
    folder.mkdir(parents=True)
    (folder / "shuffler.toml").write_text(f'site = "{MIXER}"\n[limits]\nmessage_bytes = 100_000\n')
    signing.Key.create(folder / KEY)
    create_box(folder / BOX)
    return shuffler_facts(folder)


def give(ledger: Ledger, run: str, key: str, counted: list[dict[str, Any]]) -> None:
    """An answer with nothing in it, as a guard writes one."""
    told = {"kind": "answer"}
    event = {"kind": "answer", "run": run, "key": key, "question": "", "answer": answer_digest(told, {})}
    with ledger.event(event | {"counted": counted}) as head:
        ledger.add_answer(run, key, b"", encode(told | {"ledger": list(head)}, {}), counted, {}, 0.0)


class Federation:
    """Sites in folders under `root`; guards are opened when they are asked, and may be ended and opened again."""

    def __init__(self, root: Path, sizes: dict[str, int] | None = None, shuffler: bool = False):
        self.sizes = sizes or SIZES
        self.shuffler = make_shuffler(root / MIXER) if shuffler else None
        self.folders = {site: root / site for site in self.sizes}
        self.keys = {site: make_site(self.folders[site], site, n) for site, n in self.sizes.items()}
        for site, folder in self.folders.items():
            peers = "\n".join(f'{name} = "{key.public}"' for name, key in self.keys.items() if name != site)
            known = "" if self.shuffler is None else f'{MIXER} = "{self.shuffler["key"]}"'
            (folder / "guard.toml").write_text(POLICY.format(site=site, peers=peers, shufflers=known))
        self.roster = [signed_site_facts(folder) for folder in self.folders.values()]
        if self.shuffler is not None:
            self.folders[MIXER] = root / MIXER
            self.keys[MIXER] = signing.Key.read(root / MIXER / KEY)
            self.box = create_box(root / SERVER_KEY)
        self.guards: dict[str, Office] = {}

    def document(self, config: Config | None = None, **changes: Any) -> Document:
        shuffler = None
        if self.shuffler is not None:
            shuffler = {"facts": self.shuffler, "server_key": public_of(self.box)}
        tree = proposed(config or config_of(), self.roster, changes.pop("on_missing", "wait"), shuffler)
        return Document(json.loads(json.dumps(tree | changes)))

    def approve(self, document: Document) -> list[dict[str, Any]]:
        return [approval.approve(folder, document) for folder in self.folders.values()]

    def guard(self, site: str) -> Any:
        if site not in self.guards:
            self.guards[site] = (Mixer if site == MIXER else Guard)(self.folders[site])
        return self.guards[site]

    def end(self, site: str) -> None:
        """As if its process had been killed: what is in memory is gone."""
        guard = self.guards.pop(site, None)
        if guard is not None:
            guard.close()

    def rpc(self, site: str, data: bytes) -> bytes:
        return self.guard(site).reply(data)

    def ask(
        self, site: str, header: dict[str, Any], **arrays: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        named = {name.removeprefix("_"): array for name, array in arrays.items()}
        return decode(self.rpc(site, encode(header, named)))

    def open(self, site: str, document: Document, approvals: Any) -> dict[str, Any]:
        text = signing.canonical(document.tree).decode()
        return self.ask(site, {"kind": "plan", "document": text, "approvals": approvals})[0]

    def close(self) -> None:
        for site in list(self.guards):
            self.end(site)


def asked(
    sites: Federation, run: str, site: str, query: str, round: int, echo: Any = None, last: Any = None
) -> dict[str, Any]:
    header = {"kind": "ask", "run": run, "query": query, "round": round, "echo": echo, "last": last}
    return sites.ask(site, header, **{f"_{i}": X0 + i for i in range(1 if query == "value" else 2)})[0]


def first_answers(sites: Federation, document: Document) -> dict[str, Any]:
    """Of a run that begins: what the sites have signed."""
    approvals = sites.approve(document)
    for site in document.sites:
        assert sites.open(site, document, approvals)["kind"] == "ready"
        sites.ask(site, {"kind": "start", "run": document.run}, x0=X0)
    return {site: asked(sites, document.run, site, "value", 0)["seen"] for site in document.sites}
