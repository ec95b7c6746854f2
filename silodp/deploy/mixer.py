"""The guard of a shuffler that is a site: it has no records and no network, only a Unix socket and its relay.

    DIR/shuffler.toml   what its operator allows
    DIR/key, DIR/box    its private keys: to sign with, and to open parcels with
    DIR/ledger.db       what was approved and released

It takes keys and terms from the plan that all have signed, never from a message. A batch is released once, permuted,
and only when the parcel of every silo of the round is there with the silo's whole share. The same parcels again get the
same bytes; other ones under the same name are refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from silodp.channels.sealed import Terms
from silodp.deploy.certify import SHUFFLED
from silodp.deploy.document import Document, versions
from silodp.deploy.office import HELLO, KEY, Office
from silodp.deploy.policy import Denied, ShufflerPolicy, check_outside, read_shuffler, told_config
from silodp.deploy.shuffler import BOX, Batches
from silodp.deploy.shuffling import agreed_terms, public_of, read_box, signed_shuffler, unpacked
from silodp.deploy.signing import Key
from silodp.deploy.wire import encode
from silodp.errors import ConfigError, Refused


def shuffler_facts(folder: Path) -> dict[str, Any]:
    """What `silodp shuffler facts` writes."""
    policy = read_shuffler(folder)
    return signed_shuffler(Key.read(folder / KEY), policy.site, read_box(folder / BOX), versions())


def check_shuffled_plan(folder: Path, document: Document) -> dict[str, Terms]:
    """Everything that a shuffler checks of a plan, when its operator approves it and again when it begins."""
    policy, shuffler = read_shuffler(folder), document.shuffler
    own = (policy.site, Key.read(folder / KEY).public, public_of(read_box(folder / BOX)))
    if shuffler is None or (shuffler.site, shuffler.key, shuffler.box) != own:
        raise Denied("not-listed")
    if len(document.sites) > policy.limits.silos:
        raise Denied("silos")
    if document.tree["versions"] != versions():
        raise Denied("versions")
    check_outside((), told_config(document.tree["plan"]))
    try:
        terms = agreed_terms(document.plan)
    except (Refused, ConfigError):
        raise Denied("document") from None
    assert terms is not None  # a document with a shuffler needs one
    if any(sum(each.shares) > policy.limits.messages for each in terms.values()):
        raise Denied("messages")
    return terms


class Mixer(Office):
    """One shuffler: what it was given of each run, and what it has released."""

    policy: ShufflerPolicy

    def __init__(self, folder: Path):
        super().__init__(folder, read_shuffler(folder))
        self.box = read_box(folder / BOX)
        self.known: dict[str, tuple[Document, dict[str, Terms]]] = {}

    def _reply(self, data: bytes) -> bytes:
        header, arrays = self._message(data)
        kind = header.get("kind")
        if kind == HELLO:
            return encode({"kind": HELLO}, {})
        if kind == "plan":
            return self._plan(header)
        if kind == "shuffle":
            return self._shuffle(header, arrays)
        if kind == "certificate":
            return self._statement(header)
        raise Denied("kind")

    def _plan(self, header: Mapping[str, Any]) -> bytes:
        self.ledger.check_unedited()
        document = self._agreed(header)
        found = self.ledger.run(document.run)
        if found is not None and (found.fingerprint != document.fingerprint or found.closed is not None):
            raise Denied("run")
        self.known[document.run] = document, check_shuffled_plan(self.folder, document)
        if found is None:
            self.ledger.begin(document.run, document.fingerprint, [], {})
        told = {"kind": "ready", "key": None, "fingerprint": document.fingerprint}
        return encode(told | {"ledger": list(self.ledger.head)}, {})

    def _open(self, run: str) -> tuple[Document, dict[str, Terms]]:
        """The plan of a run that has begun here and stands."""
        found, kept = self.ledger.run(run), self.ledger.document(run)
        if found is None or kept is None or found.closed is not None or not self.ledger.approved(found.fingerprint):
            raise Denied("run")
        if run not in self.known:  # after a restart
            document = self._document(kept.decode())
            self.known[run] = document, check_shuffled_plan(self.folder, document)
        return self.known[run]

    def _shuffle(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        run = str(header.get("run"))
        document, terms = self._open(run)
        round, query = int(header["round"]), str(header["query"])
        if not 0 <= round < document.plan.facts.rounds:
            raise Refused(f"round {round}: not in the plan")
        present = document.plan.facts.present(round)
        if arrays.keys() != {str(i) for i in present}:
            raise Refused(f"batch {round}/{query}: it needs a parcel of each of {len(present)} silos, and no other")
        opened = lambda parcel, index, batch: unpacked(parcel, self.box, document, index, batch)
        return Batches(self.ledger, run, terms, opened).shuffle(header, arrays)

    def _statement(self, header: Mapping[str, Any]) -> bytes:
        """The run is over: nothing more is released, and a signed statement of what was."""
        self.ledger.check_unedited()
        run = str(header.get("run"))
        found = self.ledger.run(run)
        if found is None:
            raise Denied("run")
        if found.closed is None:
            self.ledger.finish(run)
            self.known.pop(run, None)
        body = {
            "site": self.policy.site,
            "run": run,
            "plan": found.fingerprint,
            "batches": self.ledger.count_answers(run),
            "ledger": list(self.ledger.head),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
        }
        return encode({"kind": "certificate", "certificate": self.key.signed(SHUFFLED, body)}, {})
