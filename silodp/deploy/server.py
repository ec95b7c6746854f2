"""The server's half of a deployed run. It knows nothing of the transport, only `rpc(site, bytes) -> bytes`.

    DIR/plan.json, approvals/    the plan and the sites' approvals
    DIR/checkpoint.safetensors   the run between two rounds, with a checksum; DIR/coins.*: a round's own coins
    DIR/start.safetensors        the model that this run begins with, where an earlier one has come to it
    DIR/status.json              for the status page; DIR/model.safetensors, certificates.json, report.html: the results

It has no records. Nothing that was computed on records is in its files unless a plan has it as a charged stream.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from safetensors.numpy import save

from silodp.core import averaged
from silodp.deploy.board import Board
from silodp.deploy.certify import verified
from silodp.deploy.checkpoints import CHECKPOINT, MODEL_AT, first_model, read_checkpoint, write_checkpoint
from silodp.deploy.coordinator import MessageFederation, exchange
from silodp.deploy.document import Document, check_approvals
from silodp.deploy.files import held, write_whole
from silodp.deploy.pages import story_of_federation
from silodp.deploy.recorded import Recorded
from silodp.deploy.remote import Echoes, Remote, RemoteShuffler, Rpc
from silodp.deploy.signing import SERVER_KEY, canonical
from silodp.errors import ConfigError, Refused
from silodp.models import Model
from silodp.objective import penalised
from silodp.plan.parts import trained_model
from silodp.report.files import write_report
from silodp.server import build_average
from silodp.stages.figures import held_out_figures
from silodp.stages.maps import Map, with_steps

PLAN, MODEL, CERTIFICATES, HELD_OUT = "plan.json", "model.safetensors", "certificates.json", "held_out.json"
Say = Callable[[str], None]


def drive(
    document: Document, approvals: Sequence[Any], rpc: Rpc, folder: Path, say: Say = lambda text: None
) -> list[dict[str, Any]]:
    """Run the plan, or go on with it, to the sites' certificates."""
    check_approvals(document, list(approvals))
    with held(folder, "server"), ThreadPoolExecutor(len(document.parties)) as pool:
        return Driver(document, approvals, rpc, folder, say, pool).run()


class Driver:
    """One program's work on one run."""

    def __init__(
        self, document: Document, approvals: Sequence[Any], rpc: Rpc, folder: Path, say: Say, pool: ThreadPoolExecutor
    ):
        self.document, self.approvals, self.folder, self.say = document, approvals, folder, say
        self.plan, self.echoes = document.plan, Echoes()
        links = {site: Remote(site, rpc, pool, document.run, self.echoes, document) for site in document.parties}
        self.links = [links[site] for site in document.sites]
        self.parties = list(links.values())  # the shuffler too, if there is one
        self.model: Model = trained_model(self.plan.config, self.plan.facts)
        self.board = Board(folder, document, self.parties)
        self.maps: list[Map] = []  # of the features, by the stages before training

    def run(self) -> list[dict[str, Any]]:
        done = self.folder / CERTIFICATES
        if done.is_file():
            return json.loads(done.read_text())
        try:
            if not (self.folder / MODEL).is_file():  # guards that have certified a run take no further question of it
                self._train()
            certificates = self._certified()
        except Refused as error:
            self.board.refused(error)
            self.board.write("stopped")
            raise
        self.board.write("finished")
        return certificates

    def _train(self) -> None:
        self._open()
        fed = MessageFederation(self.plan, self.links, None, self._shuffler())
        fed.coins, fed.skips = Recorded(self.folder), not self.document.waits
        for name in self.plan.before:
            released = fed.stage(jnp.zeros(0))
            fed.leave(released)
            self.maps.append(self.plan.derived(name, released))
        for link in self.parties:
            link.asked.clear()  # no checkpoint covers the stages: a server that starts again asks for them again
        x0, unravel = ravel_pytree(self.model.init(jax.random.key(self.plan.config.run.seed)))
        earlier = first_model(self.folder)
        x0 = x0 if earlier is None else jnp.asarray(earlier)
        algorithm = with_steps(self.maps, penalised(self.model, unravel, self.plan.training.algorithm))
        fed.start(x0)
        state = algorithm.init(x0)
        output = self._rounds(fed, algorithm, state, algorithm.result(state))
        if self.plan.evaluation is not None:
            fed.leave()
            told = held_out_figures(self.plan, fed.stage(output))
            write_whole(self.folder / HELD_OUT, json.dumps(told, indent=2).encode())
        maps = {name: array for made in self.maps for name, array in made.arrays.items()}
        write_whole(self.folder / MODEL, save(self.model_tree(np.asarray(output)) | maps))

    def _open(self) -> None:
        """Every guard takes the plan; the same words again after a restart."""
        text = canonical(self.document.tree).decode()
        for link in self.parties:
            link.send({"kind": "plan", "document": text, "approvals": list(self.approvals)}, {})
        ready = [link.receive()[0] for link in self.parties]
        for link, told in zip(self.parties, ready, strict=True):
            if told.get("fingerprint") != self.document.fingerprint:
                raise Refused(f"site {link.site}: took another plan")
        exchange(self.links, ready[: len(self.links)])

    def _shuffler(self) -> RemoteShuffler | None:
        """The way to the plan's shuffler, with the key that only this server can open messages with."""
        told = self.document.shuffler
        if told is None:
            return None
        return RemoteShuffler(self.parties[-1], told.check_key(self.folder / SERVER_KEY))

    def _rounds(self, fed: MessageFederation, algorithm: Any, state: Any, output: Any) -> Any:
        rounds, config = self.plan.training.facts.rounds, self.plan.config
        average = build_average(config.algorithm.average, rounds)
        carry, first = self._resumed((state, output, fed.accounts, fed.end.memory))
        state, output, fed.accounts, fed.end.memory = carry
        self.board.write("running", first)
        for r in range(first, rounds):
            began = time.perf_counter()
            fed.begin_round(r)
            state = algorithm.round(state, fed)
            output = averaged(output, algorithm.result(state), r + 1, rounds, average)
            self._save((state, output, fed.accounts, fed.end.memory), r + 1)
            self.board.seconds.append(time.perf_counter() - began)
            self.board.write("running", r + 1)
            self.say(f"round {r + 1} of {rounds}: {self.board.seconds[-1]:.2f} s")
        return output

    def _save(self, carry: Any, done: int) -> None:
        """On the disk, file and folder, before the next question."""
        heads = {link.site: list(link.head) for link in self.parties}
        told = {"plan": self.document.fingerprint, "round": done, "echoes": self.echoes.to_json(), "heads": heads}
        place = len(jax.tree.leaves(carry[0]))  # of the output, after the algorithm's state
        write_checkpoint(self.folder, jax.tree.leaves(carry), told | {MODEL_AT: place})
        for link in self.parties:
            link.covered()

    def _resumed(self, carry: Any) -> tuple[Any, int]:
        found = read_checkpoint(self.folder)
        if found is None:
            return carry, 0
        kept, told = found
        leaves, structure = jax.tree.flatten(carry)
        if told.get("plan") != self.document.fingerprint or len(kept) != len(leaves):
            raise ConfigError(f"{self.folder / CHECKPOINT}: of another plan")
        self.echoes.seen, self.echoes.last = told["echoes"]["seen"], told["echoes"]["last"]
        for link in self.parties:
            link.resumed(told["heads"][link.site])
        self.say(f"going on after round {told['round']}")
        return jax.tree.unflatten(structure, [jnp.asarray(each) for each in kept]), told["round"]

    def _certified(self) -> list[dict[str, Any]]:
        """The run is over: every guard closes it and signs what it was."""
        self.board.ask()
        told = hashlib.sha256((self.folder / MODEL).read_bytes()).hexdigest()
        for link in self.parties:
            link.send({"kind": "certificate", "model": told}, {})
        certificates: list[Any] = [link.receive()[0].get("certificate") for link in self.parties]
        verified(certificates, self.document)  # before they are kept: a site may have sent anything
        write_whole(self.folder / PLAN, canonical(self.document.tree))
        write_whole(self.folder / CERTIFICATES, json.dumps(certificates, indent=2).encode())
        write_report(self.folder, story_of_federation)
        return certificates

    def model_tree(self, output: np.ndarray) -> dict[str, np.ndarray]:
        like = self.model.init(jax.random.key(0))
        params = ravel_pytree(like)[1](jnp.asarray(output))
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        name = lambda path: "last/" + jax.tree_util.keystr(path, simple=True, separator="/")
        return {name(path): np.asarray(leaf, order="C") for path, leaf in flat}
