"""The guard: the only process of a site that reads records. It has no network, only a Unix socket.

    DIR/guard.toml   what the operator allows (silodp.deploy.policy)
    DIR/key          the site's private key
    DIR/ledger.db    what was approved, reserved, answered and counted (silodp.deploy.ledger)
    DIR/run/guard.sock   bytes in, bytes out: the relay's user, and nobody else

It believes nobody. A plan is answered only when its own operator has approved it, every site of the plan has signed the
same fingerprint, and the site's policy and ledger allow it. A refusal is a code and a fixed sentence.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.deploy import policy as rules
from silodp.deploy import signing
from silodp.deploy.certify import certificate_of
from silodp.deploy.desk import Desk, Dropped, Repeated
from silodp.deploy.document import Document, check_approvals, versions
from silodp.deploy.ledger import Closed, Ledger
from silodp.deploy.policy import Denied, check_document, read_policy
from silodp.deploy.sites import own_facts, read_records
from silodp.deploy.spending import epsilon_over, read
from silodp.deploy.vouch import Vouch
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError, Refused, Undecided

KEY = "key"  # the file of the site's private key


class Guard:
    """One site: policy, ledger, records, and the run that is answered."""

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, threading.Lock()
        self.held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.held)
            raise ConfigError(f"{folder}: another guard works here; two would answer twice") from None
        self.policy, self.key = read_policy(folder), signing.Key.read(folder / KEY)
        self.ledger = open_ledger(folder)
        self.desk: Desk | None = None

    def close(self) -> None:
        self.ledger.close()
        os.close(self.held)

    def reply(self, data: bytes) -> bytes:
        """One request and its answer. Nothing that is sent ends a guard, and no text of an error leaves it."""
        with self.lock:
            try:
                return self._reply(data)
            except Undecided as error:  # nothing was spent, and the two grids are public
                return encode({"kind": "grid", "exponents": list(error.either)}, {})
            except Denied as error:
                return self._refused(error.code, str(error))
            except (Repeated, Dropped) as error:
                return self._refused("repeated", str(error))
            except Closed as error:
                return self._refused("run", str(error))
            except (sqlite3.Error, OSError) as error:
                return self._refused("disk", f"{type(error).__name__}: {error}")
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                return self._refused("question", f"{type(error).__name__}: {error}")
            except Exception as error:
                return self._refused("fault", type(error).__name__)

    def _refused(self, code: str, detail: str) -> bytes:
        if self.desk is not None and self.desk.ahead:
            self.desk = None  # what is in memory is ahead of the disk: it is read again
        try:
            self.ledger.refused(code, detail)
        except sqlite3.Error as error:  # a full disk refuses this line too
            print(f"guard: a refusal could not be noted ({error})", file=sys.stderr, flush=True)
        return encode({"kind": "refused", "code": code, "reason": rules.SENTENCES[code]}, {})

    def _reply(self, data: bytes) -> bytes:
        if len(data) > self.policy.limits.message_bytes:
            raise Denied("message")
        try:
            header, arrays = decode(data)
        except Refused:
            raise Denied("message") from None
        kind = header.get("kind")
        if kind == "plan":
            return self._plan(header)
        if kind == "certificate":
            return self._certificate(header)
        if kind not in ("keys", "leave", "start", "sum", "ask", "local", "account"):
            raise Denied("kind")
        return self._desk(header.get("run")).ask(header, arrays)

    # --- plans --------------------------------------------------------------------------------------------

    def _plan(self, header: Mapping[str, Any]) -> bytes:
        document = self._document(header.get("document"))
        if not self.ledger.approved(document.fingerprint):
            raise Denied("not-approved")
        try:
            check_approvals(document, header.get("approvals"))
        except Refused:
            raise Denied("not-signed") from None
        desk = self._open(document)
        told = desk.silo.ready() | {"fingerprint": document.fingerprint, "round": desk.silo.round}
        return encode(told | {"ledger": list(self.ledger.head)}, {})

    def _document(self, text: Any) -> Document:
        try:
            return Document(signing.read_document(str(text).encode()))
        except (Refused, ConfigError, UnicodeError, LookupError, TypeError):
            raise Denied("document") from None

    def _desk(self, run: Any) -> Desk:
        """The desk of a run that has begun here: the one in memory, or after a restart the one on the disk."""
        if self.desk is None or self.desk.run != run:
            known = self.ledger.document(str(run)) if self.ledger.run(str(run)) is not None else None
            if known is None:
                raise Denied("run")
            self._open(self._document(known.decode()))
        assert self.desk is not None
        found = self.ledger.run(self.desk.run)
        if found is None or found.closed is not None or not self.ledger.approved(found.fingerprint):
            self.desk = None
            raise Denied("run")
        if found.cpu > self.policy.limits.cpu_seconds:
            raise Denied("cpu")
        return self.desk

    def _open(self, document: Document) -> Desk:
        if self.desk is not None and self.desk.run == document.run:
            return self.desk
        known = self.ledger.run(document.run)
        if known is not None and (known.fingerprint != document.fingerprint or known.closed is not None):
            raise Denied("run")
        if any(each.closed is None and each.run != document.run for each in self.ledger.runs()):
            raise Denied("busy")
        check_plan(self.policy, self.key, self.ledger, document)
        self.desk = self._new_desk(document)
        return self.desk

    def _new_desk(self, document: Document) -> Desk:
        from silodp.deploy.silo import SiloServer

        index = document.sites.index(self.policy.site)
        setup = {"plan": document.tree["plan"], "index": index, "seed": None, "shuffler": None}
        vouch = Vouch(self.key, document)
        try:
            silo = SiloServer(setup, read_records(self.policy, self.folder).named(), vouch)
        except ConfigError:
            raise Denied("data") from None
        return Desk(self.ledger, document.run, document.fingerprint, silo, vouch)

    # --- certificates -------------------------------------------------------------------------------------

    def _certificate(self, header: Mapping[str, Any]) -> bytes:
        """The run is over: no further answers, and a signed statement of what it was."""
        run = str(header.get("run"))
        found, kept = self.ledger.run(run), self.ledger.document(run)
        if found is None or kept is None:
            raise Denied("run")
        if found.closed is None:
            self.ledger.finish(run)
            self.desk = None
        signed = certificate_of(self.policy, self.key, self.ledger, self._document(kept.decode()), header.get("model"))
        return encode({"kind": "certificate", "certificate": signed}, {})


def open_ledger(folder: Path) -> Ledger:
    policy = read_policy(folder)
    return Ledger(folder / "ledger.db", folder / policy.counter)


def check_plan(policy: rules.Policy, key: signing.Key, ledger: Ledger, document: Document) -> None:
    """Everything that a site checks of a plan, when its operator approves it and again when it is answered."""
    try:
        check_document(policy, key.public, document)
    except Denied:
        raise
    except (Refused, ConfigError):
        raise Denied("document") from None
    if document.tree["versions"] != versions():
        raise Denied("versions")
    if not total_with(policy, ledger, document) <= policy.limits.total_epsilon * (1 + 1e-6):
        raise Denied("total")


def total_with(policy: rules.Policy, ledger: Ledger, document: Document | None = None) -> float:
    """Epsilon of all runs on these records together, with this plan if it is not among them."""
    runs = {each.run: read(each.reserved) for each in ledger.runs()}
    if document is not None and document.run not in runs:
        runs[document.run] = document.plan.spent(document.sites.index(policy.site))
    return epsilon_over(runs, policy.limits.total_delta)


def signed_site_facts(folder: Path) -> dict[str, Any]:
    """What `silodp silo facts` writes."""
    from silodp.deploy.document import signed_facts

    policy, key = read_policy(folder), signing.Key.read(folder / KEY)
    facts, schema = own_facts(policy, folder)
    return signed_facts(key, policy.site, facts, schema)
