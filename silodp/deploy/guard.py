"""The guard: the only process of a site that reads records. It has no network, only a Unix socket.

    DIR/guard.toml   what the operator allows (silodp.deploy.policy)
    DIR/key          the site's private key
    DIR/ledger.db    what was approved, reserved, answered and counted (silodp.deploy.ledger)
    DIR/run/guard.sock   bytes in, bytes out: the relay's user, and nobody else

It believes nobody. A plan is answered only when its own operator has approved it, every site of the plan has signed the
same fingerprint, and the site's policy and ledger allow it. A refusal is a code and a fixed sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.deploy import policy as rules
from silodp.deploy import signing
from silodp.deploy.certify import certificate_of, is_hash
from silodp.deploy.desk import Desk
from silodp.deploy.document import Document, versions
from silodp.deploy.ledger import Ledger
from silodp.deploy.office import HELLO, KEY, Office
from silodp.deploy.policy import Denied, check_document, read_policy, told_config
from silodp.deploy.shuffling import Outbox
from silodp.deploy.sites import own_facts, read_records
from silodp.deploy.spending import epsilon_over, read, used_of
from silodp.deploy.vouch import Vouch
from silodp.deploy.wire import encode
from silodp.errors import ConfigError, Refused
from silodp.plan.calibrate import group_of
from silodp.plan.plan import cost_of


class Guard(Office):
    """One site: policy, ledger, records, and the run that is answered."""

    policy: rules.Policy

    def __init__(self, folder: Path):
        super().__init__(folder, read_policy(folder))
        self.desk: Desk | None = None

    def _forget(self) -> None:
        if self.desk is not None and self.desk.ahead:
            self.desk = None  # what is in memory is ahead of the disk: it is read again

    def _reply(self, data: bytes) -> bytes:
        header, arrays = self._message(data)
        kind = header.get("kind")
        if kind == HELLO:
            return encode({"kind": HELLO}, {})
        if kind == "plan":
            return self._plan(header)
        if kind == "certificate":
            return self._certificate(header)
        if kind == "budget":
            return self._budget(str(header.get("run")))
        if kind not in ("keys", "leave", "start", "sum", "ask", "local", "account"):
            raise Denied("kind")
        return self._desk(header.get("run")).ask(header, arrays)

    # --- plans --------------------------------------------------------------------------------------------

    def _plan(self, header: Mapping[str, Any]) -> bytes:
        document = self._agreed(header)
        desk = self._open(document)
        told = desk.silo.ready() | {"fingerprint": document.fingerprint, "round": desk.silo.round}
        return encode(told | {"ledger": list(self.ledger.head)}, {})

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
        self.ledger.check_unedited()  # what is decided here is decided by its rows
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

        index = self._index(document)
        setup = {"plan": document.tree["plan"], "index": index, "seed": None, "shuffler": None}
        vouch = Vouch(self.key, document)
        outbox = None if document.shuffler is None else Outbox(self.key, document, index)
        try:
            silo = SiloServer(setup, read_records(self.policy, self.folder).named(), vouch, outbox)
        except ConfigError:
            raise Denied("data") from None
        return Desk(self.ledger, document.run, document.fingerprint, silo, vouch)

    def _index(self, document: Document) -> int:
        return document.sites.index(self.policy.site)

    # --- budget -------------------------------------------------------------------------------------------

    def _budget(self, run: str) -> bytes:
        """Spent and left, as this site's own ledger says it, if its operator wants the server to know. It depends on
        plans and counts, never on a record."""
        found, kept, limits = self.ledger.run(run), self.ledger.document(run), self.policy.limits
        if found is None or kept is None:
            raise Denied("run")
        if not self.policy.tell_budget:
            return encode({"kind": "budget"}, {})
        check_told(total := total_with(self.policy, self.ledger))
        document = self._document(kept.decode())
        privacy, size = told_config(document.tree["plan"]).privacy, document.facts.sizes[self._index(document)]
        cost = lambda lines: cost_of([read(lines)], document.tree["delta"], group_of(privacy, size))
        told = {
            "run_spent": cost(found.counted),
            "run_reserved": cost(found.reserved),
            "total": total,
            "limit": limits.total_epsilon,
            "delta": limits.total_delta,
        }
        return encode({"kind": "budget", "budget": told}, {})

    # --- certificates -------------------------------------------------------------------------------------

    def _certificate(self, header: Mapping[str, Any]) -> bytes:
        """The run is over: no further answers, and a signed statement of what it was."""
        self.ledger.check_unedited()
        run, model = str(header.get("run")), header.get("model")
        found, kept = self.ledger.run(run), self.ledger.document(run)
        if found is None or kept is None:
            raise Denied("run")
        before = self.ledger.model(run)
        if model is not None and (not is_hash(model) or before not in (None, model)):
            raise Denied("model")
        document = self._document(kept.decode())
        if self.policy.tell_budget:
            check_told(epsilon_over(self.ledger.runs(), self.policy.limits.total_delta, {run: used_of(found)}))
        if found.closed is None:
            self.ledger.finish(run)
            self.desk = None
        if model is not None and before is None:
            self.ledger.certify(run, model)
        signed = certificate_of(self.policy, self.key, self.ledger, document, model)
        return encode({"kind": "certificate", "certificate": signed}, {})


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


def check_told(total: float) -> None:
    """An operator may have changed the limits since: at another delta, all runs may come to no number."""
    if not math.isfinite(total):
        raise Denied("total")


def total_with(policy: rules.Policy, ledger: Ledger, document: Document | None = None) -> float:
    """Epsilon of all runs on these records together, with all of this plan, whatever is reserved for it."""
    own = {} if document is None else {document.run: document.plan.spent(document.sites.index(policy.site))}
    return epsilon_over(ledger.runs(), policy.limits.total_delta, own)


def signed_site_facts(folder: Path) -> dict[str, Any]:
    """What `silodp silo facts` writes."""
    from silodp.deploy.document import signed_facts

    policy, key = read_policy(folder), signing.Key.read(folder / KEY)
    facts, schema = own_facts(policy, folder)
    return signed_facts(key, policy.site, facts, schema)
