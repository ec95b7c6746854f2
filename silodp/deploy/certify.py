"""Certificates: each guard signs what its own site released; anybody can check them with public keys only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from silodp.deploy.signing import Key, opened, words
from silodp.deploy.spending import epsilon_over, read
from silodp.digits import rounded_up, several
from silodp.errors import Refused
from silodp.privacy import accountant

if TYPE_CHECKING:
    from silodp.deploy.document import Document
    from silodp.deploy.ledger import Ledger
    from silodp.deploy.policy import Policy

CERTIFICATE = "certificate"
TOLD = {
    "site", "run", "plan", "epsilon", "delta", "releases", "sees", "collusion", "model", "total_epsilon", "total_delta",
    "runs", "ledger", "date", "versions",
}  # fmt: skip


def certificate_of(policy: Policy, key: Key, ledger: Ledger, document: Document, model: Any) -> dict[str, Any]:
    """What was counted here, and what it comes to. `model`: the hash that the server tells."""
    found = ledger.run(document.run)
    assert found is not None
    plan, index, own = document.plan, document.sites.index(policy.site), read(found.counted)
    delta = plan.config.privacy.delta
    runs = {each.run: read(each.reserved) for each in ledger.runs()}
    body = {
        "site": policy.site,
        "run": document.run,
        "plan": document.fingerprint,
        "epsilon": accountant.epsilon(own, delta),
        "delta": delta,
        "releases": found.counted,
        "sees": plan.channel.sees,
        "collusion": plan.if_others_collude(index, own, delta),
        "model": str(model) if model is not None else None,
        "total_epsilon": epsilon_over(runs, policy.limits.total_delta),
        "total_delta": policy.limits.total_delta,
        "runs": len(runs),
        "ledger": list(ledger.head),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": dict(document.tree["versions"]),
    }
    return key.signed(CERTIFICATE, body)


def verified(certificates: Sequence[Any], document: Document | None = None) -> list[str]:
    """A line for each certificate, if all are signed, belong to one run, and state no less than they count."""
    lines, plans = [], set()
    for statement in certificates:
        body, key = opened(CERTIFICATE, statement)
        if body.keys() != TOLD:
            raise Refused("certificate: not as a guard writes it")
        recounted = accountant.epsilon(read(body["releases"]), body["delta"])
        if not body["epsilon"] >= recounted * (1 - 1e-6):
            raise Refused(f"certificate of {body['site']}: its releases come to epsilon {rounded_up(recounted)}")
        if document is not None and document.keys.get(body["site"]) != key:
            raise Refused(f"certificate of {body['site']}: signed with another key than the plan's")
        plans.add((body["run"], body["plan"], body["model"]))
        promise = f"({rounded_up(body['epsilon'])}, {rounded_up(body['delta'])})-DP in this run"
        total = (
            f"{rounded_up(body['total_epsilon'])} over {several(body['runs'], 'run')} at delta {body['total_delta']:g}"
        )
        lines.append(f"{body['site']}: {promise}, epsilon {total}; key {words(key)[:40]}...")
    if len(plans) > 1:
        raise Refused("certificates: of different runs, plans or models")
    if document is not None:
        missing = set(document.sites) - {statement["body"]["site"] for statement in certificates}
        if missing or {plan for _, plan, _ in plans} != {document.fingerprint}:
            raise Refused(f"certificates: not those of this plan, or missing: {', '.join(sorted(missing)) or 'none'}")
    return lines
