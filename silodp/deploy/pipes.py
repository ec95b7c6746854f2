"""Message mode on one machine: silos (and a shuffler, where the channel needs one) as processes, `rpc` over pipes.

A run with a folder can be resumed. Every silo keeps what it must not forget in a folder of its own, and a new process
goes on from there. Two kinds of runs cannot: the shuffler's messages are in its memory only, and so are the shares of a
sum that can do without silos.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from silodp import registry
from silodp.config import Config
from silodp.deploy.coordinator import MessageFederation, exchange
from silodp.deploy.files import write_whole
from silodp.deploy.links import Link, ShufflerProcess, SiloProcess
from silodp.deploy.recorded import Recorded
from silodp.deploy.remote import Echoes, Remote
from silodp.deploy.shuffling import agreed_terms
from silodp.parse import named_parts, parse_config
from silodp.plan.plan import Plan

Records = Mapping[str, np.ndarray]  # of one silo: every array by its path, features... and targets...
SILOS = "silos"  # in the run's directory: a folder for each
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


def lasting(plan: Plan) -> bool:
    """Whether silos can go on with this plan after their processes have ended."""
    shuffled = agreed_terms(plan) is not None
    return not shuffled and not plan.noised.server_end(plan.sizes, None).missing


@contextmanager
def message_federation(
    plan: Plan, records: Sequence[Records], seed: int | None, folder: Path | None = None
) -> Iterator[MessageFederation]:
    """Silos as processes on this machine, set up with the plan. `folder`: of a run that can be resumed."""
    names = outside_names(portable(plan.config))
    with ExitStack() as stack:
        if folder is None or not lasting(plan):
            silos = [stack.enter_context(SiloProcess(names)) for _ in records]
            yield stack.enter_context(joined(plan, silos, records, seed))
            return
        run = number_of(folder / SILOS)
        pool = stack.enter_context(ThreadPoolExecutor(len(records)))  # ends after the silos that it waits for
        each = {
            name: stack.enter_context(SiloProcess(names, folder=folder / SILOS / str(i)))
            for i, name in enumerate(plan.facts.names)
        }
        links = [Remote(name, lambda site, data: each[site].ask(data), pool, run, Echoes()) for name in each]
        fed = stack.enter_context(joined(plan, links, records, seed))
        fed.coins = Recorded(folder)
        yield fed


def number_of(folder: Path) -> str:
    """The run's number: 128 random bits, drawn when it begins."""
    file = folder / NUMBER
    if not file.is_file():
        folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(file, json.dumps({"run": secrets.token_hex(16)}).encode())
    return json.loads(file.read_text())["run"]


@contextmanager
def joined(
    plan: Plan, silos: Sequence[Link], records: Sequence[Records], seed: int | None
) -> Iterator[MessageFederation]:
    """A federation of silos that are running already."""
    terms = agreed_terms(plan)
    with ExitStack() as stack:
        shuffler = None if terms is None else stack.enter_context(ShufflerProcess(len(silos), terms))
        set_up(silos, plan, records, seed, shuffler)
        yield MessageFederation(plan, silos, seed, shuffler)


def set_up(
    silos: Sequence[Link],
    plan: Plan,
    records: Sequence[Records],
    seed: int | None,
    shuffler: ShufflerProcess | None = None,
) -> None:
    """Give every silo the agreed plan and its own records."""
    tree = plan.to_json() | {"config": portable(plan.config).model_dump(mode="json")}
    for index, (silo, own) in enumerate(zip(silos, records, strict=True)):
        invitation = None if shuffler is None else shuffler.invitation(index)
        silo.send({"kind": "setup", "plan": tree, "index": index, "seed": seed, "shuffler": invitation}, own)
    exchange(silos, [silo.receive()[0] for silo in silos])
