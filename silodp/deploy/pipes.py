"""Message mode on one machine: silos (and a shuffler, where the channel needs one) as processes, `rpc` over pipes.

A run with a folder can be resumed. Every silo, and the shuffler, keeps what it must not forget in a folder of its own,
and a new process goes on from there.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp import registry
from silodp.channels.sealed import Terms
from silodp.config import Config
from silodp.deploy.coordinator import MessageFederation, exchange
from silodp.deploy.files import write_whole
from silodp.deploy.links import Link, ShufflerProcess, SiloProcess
from silodp.deploy.nursery import Nursery
from silodp.deploy.recorded import Recorded
from silodp.deploy.remote import Echoes, Remote, RemoteShuffler
from silodp.deploy.shuffling import agreed_terms, create_box, public_of, read_box
from silodp.deploy.signing import SERVER_KEY
from silodp.parse import named_parts, parse_config
from silodp.plan.plan import Plan

Records = Mapping[str, np.ndarray]  # of one silo: every array by its path, features... and targets...
SILOS = "silos"  # in the run's directory: a folder for each
SHUFFLER = "shuffler"  # among them
NUMBER = "run.json"  # in the folder of the silos: the run's number


def portable(config: Config) -> Config:
    """The config with names under which another process finds parts from outside."""
    sections = {"algorithm": {}, "privacy": {}, "model": {}}
    for kind, name in named_parts(config).items():
        section, key = registry.KINDS[kind].split(".")
        sections[section][key] = registry.path_of(kind, name)
    tree = {name: own for name, own in config.model_dump(exclude_unset=True).items() if own is not None}
    return parse_config({name: tree.get(name, {}) | sections.get(name, {}) for name in tree.keys() | sections.keys()})


def outside_names(config: Config) -> list[str]:
    return [name for kind, name in named_parts(config).items() if not registry.is_own(kind, name)]


@contextmanager
def message_federation(
    plan: Plan, records: Sequence[Records], seed: int | None, folder: Path | None = None
) -> Iterator[MessageFederation]:
    """Silos as processes on this machine, set up with the plan. `folder`: of a run that can be resumed."""
    names = outside_names(portable(plan.config))
    with ExitStack() as stack:
        nursery = stack.enter_context(Nursery()) if sys.platform == "linux" else None
        if folder is None:
            silos = [stack.enter_context(SiloProcess(names, nursery=nursery)) for _ in records]
            yield stack.enter_context(joined(plan, silos, records, seed))
            return
        run = number_of(folder / SILOS)
        pool = stack.enter_context(ThreadPoolExecutor(len(records) + 1))  # ends after the parties that it waits for
        linked = lambda name, process: Remote(name, lambda _, data: process.ask(data), pool, run, Echoes())
        links = [
            linked(name, stack.enter_context(SiloProcess(names, folder=folder / SILOS / str(i), nursery=nursery)))
            for i, name in enumerate(plan.facts.names)
        ]
        keeping = Keeping(folder / SILOS, lambda process: linked(SHUFFLER, process))
        fed = stack.enter_context(joined(plan, links, records, seed, keeping))
        fed.coins = Recorded(folder)
        yield fed


def number_of(folder: Path) -> str:
    """The run's number: 128 random bits, drawn when it begins."""
    file = folder / NUMBER
    if not file.is_file():
        folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(file, json.dumps({"run": secrets.token_hex(16)}).encode())
    return json.loads(file.read_text())["run"]


class Keeping(NamedTuple):
    """Where a run keeps what its shuffler and its server must not forget, and how the shuffler is spoken to."""

    folder: Path
    linked: Callable[[ShufflerProcess], Link]


@contextmanager
def joined(
    plan: Plan,
    silos: Sequence[Link],
    records: Sequence[Records],
    seed: int | None,
    keeping: Keeping | None = None,
) -> Iterator[MessageFederation]:
    """A federation of silos that are running already."""
    terms, shuffler, invitation = agreed_terms(plan), None, None
    with ExitStack() as stack:
        if terms is not None:
            keeping = keeping or Keeping(Path(stack.enter_context(TemporaryDirectory())), lambda process: process)
            link = keeping.linked(stack.enter_context(ShufflerProcess(keeping.folder / SHUFFLER)))
            shuffler = RemoteShuffler(link, kept_box(keeping.folder / SERVER_KEY))
            invitation = introduced(shuffler, terms)
        set_up(silos, plan, records, seed, invitation)
        yield MessageFederation(plan, silos, seed, shuffler)


def kept_box(file: Path) -> X25519PrivateKey:
    """The key that messages are sealed to: a resumed run opens what was sealed before."""
    return read_box(file) if file.is_file() else create_box(file)


def introduced(shuffler: RemoteShuffler, terms: Mapping[str, Terms]) -> dict[str, str]:
    """Tell the shuffler what it has to wait for; returns what silos need to know to send."""
    shuffler.link.send({"kind": "hello"}, {})
    box = str(shuffler.link.receive()[0]["box"])
    shuffler.link.send({"kind": "setup", "terms": {query: each._asdict() for query, each in terms.items()}}, {})
    shuffler.link.receive()
    return {"box": box, "server_key": public_of(shuffler.private_key)}


def set_up(
    silos: Sequence[Link],
    plan: Plan,
    records: Sequence[Records],
    seed: int | None,
    invitation: Mapping[str, str] | None = None,
) -> None:
    """Give every silo the agreed plan and its own records, and the way to the shuffler if there is one."""
    tree = plan.to_json() | {"config": portable(plan.config).model_dump(mode="json")}
    for index, (silo, own) in enumerate(zip(silos, records, strict=True)):
        told = None if invitation is None else dict(invitation)
        silo.send({"kind": "setup", "plan": tree, "index": index, "seed": seed, "shuffler": told}, own)
    exchange(silos, [silo.receive()[0] for silo in silos])
