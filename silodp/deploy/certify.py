"""Certificates: each guard signs what its own site released; anybody can check them with public keys only."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from silodp.deploy.signing import Key, canonical, opened, words
from silodp.deploy.spending import epsilon_over, read, written
from silodp.deploy.wire import plain
from silodp.digits import rounded_up, several
from silodp.errors import Refused
from silodp.privacy import accountant

if TYPE_CHECKING:
    from silodp.deploy.document import Document
    from silodp.deploy.ledger import Ledger
    from silodp.deploy.policy import Policy
    from silodp.plan.plan import Plan

HELD_OUT = "held_out"  # of a line: it is about records that are not trained on
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # as time.strftime writes it below
HASH = re.compile(r"[0-9a-f]{64}")
NEEDED = 3  # entries of a run beside its answers: approved, begun, closed
CERTIFICATE, SHUFFLED = "certificate", "shuffled"
_text = lambda told: isinstance(told, str)
_count = lambda told: type(told) is int and told >= 0
_number = lambda told: type(told) in (int, float) and 0 <= told < math.inf
_table = lambda told: isinstance(told, dict)
_head = lambda told: isinstance(told, list) and len(told) == 2 and _count(told[0]) and _text(told[1])
_date = lambda told: _text(told) and DATE.fullmatch(told) is not None
Form = dict[str, Callable[[Any], bool]]
SHARED: Form = {"site": _text, "run": _text, "plan": _text, "ledger": _head, "date": _date, "versions": _table}
TOLD: Form = SHARED | {  # what stands in a certificate; a hostile site signs anything
    "epsilon": _number, "delta": _number, "total_epsilon": _number, "total_delta": _number, "runs": _count,
    "releases": lambda told: isinstance(told, list), "sees": _text,
    "collusion": lambda told: told is None or (_table(told) and all(_number(each) for each in told.values())),
    "model": lambda told: told is None or _text(told),
}  # fmt: skip
SHUFFLER_TOLD: Form = SHARED | {"batches": _count}


def fits(body: Mapping[str, Any], form: Form) -> bool:
    return body.keys() == form.keys() and all(check(body[name]) for name, check in form.items())


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
        "epsilon": max((accountant.epsilon(part, delta) for part in plan.apart(own)), default=0.0),
        "delta": delta,
        "releases": [marked(line, plan) for line in found.counted],
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


def marked(line: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A line of the ledger; a record is trained on or held out, so that each part has an epsilon of its own."""
    return {**line, HELD_OUT: True} if plan.stage_of(line["stream"]).held_out else dict(line)


def recounted_epsilon(lines: Sequence[Mapping[str, Any]], delta: float) -> float:
    parts = [[line for line in lines if bool(line.get(HELD_OUT)) is held_out] for held_out in (False, True)]
    return max(accountant.epsilon(read(part), delta) for part in parts)


def verified(certificates: Sequence[Any], document: Document | None = None) -> list[str]:
    """A line for each certificate, if all are signed, belong to one run, and state no less than they count."""
    of_sites = [statement for statement in certificates if not is_shufflers(statement)]
    told = [opened_certificate(statement, document) for statement in of_sites]
    plans = {(body["run"], body["plan"], body["model"]) for body, _ in told}
    if len(plans) > 1:
        raise Refused("certificates: of different runs, plans or models")
    lines, sites = [said(body, key) for body, key in told], {body["site"] for body, _ in told}
    for statement in filter(is_shufflers, certificates):
        body = opened_statement(statement, document)
        if (body["run"], body["plan"]) not in {(run, plan) for run, plan, _ in plans}:
            raise Refused(f"statement of {plain(body['site'])}: of another run")
        sites.add(body["site"])
        lines.append(f"{plain(body['site'])}: shuffled {body['batches']} batches, each with every site's whole share")
    if document is not None:
        missing = document.parties.keys() - sites
        if missing or {plan for _, plan, _ in plans} != {document.fingerprint}:
            raise Refused(f"certificates: not those of this plan, or missing: {', '.join(sorted(missing)) or 'none'}")
    return lines


def opened_certificate(statement: Any, document: Document | None) -> tuple[dict[str, Any], str]:
    """What a site's guard has signed, if it counts no more than it states, and no other releases than the plan's."""
    body, key = opened(CERTIFICATE, statement)
    if not fits(body, TOLD):
        raise Refused("certificate: not as a guard writes it")
    site = plain(body["site"])
    if document is not None and document.keys.get(body["site"]) != key:
        raise Refused(f"certificate of {site}: signed with another key than the plan's")
    try:
        if document is not None:
            check_planned(body, document)
        recounted, total = recounted_epsilon(body["releases"], body["delta"]), total_of_run(body)
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        raise Refused(f"certificate of {site}: its releases are none") from None
    if body["epsilon"] < recounted * (1 - 1e-6):
        raise Refused(f"certificate of {site}: its releases come to epsilon {rounded_up(recounted)}")
    if body["runs"] < 1 or body["total_epsilon"] < total * (1 - 1e-4):
        raise Refused(f"certificate of {site}: over all runs it says less than this run's {rounded_up(total)}")
    return body, key


def total_of_run(body: Mapping[str, Any]) -> float:
    """What this run takes of the total over all runs, which is at a delta of its own."""
    return accountant.epsilon(read(body["releases"]), body["total_delta"])


def check_planned(body: Mapping[str, Any], document: Document) -> None:
    """All that a certificate says is the plan's, or what the plan makes of its releases."""
    plan, site, index = document.plan, plain(body["site"]), document.sites.index(body["site"])
    if body["delta"] != plan.config.privacy.delta or body["sees"] != plan.channel.sees:
        raise Refused(f"certificate of {site}: its delta, or who sees what, is not the plan's")
    if body["versions"] != document.tree["versions"]:
        raise Refused(f"certificate of {site}: its versions are not the plan's")
    check_releases(body["releases"], document, index)
    left = plan.if_others_collude(index, read(body["releases"]), body["delta"])
    if not same_levels(body["collusion"], left):
        raise Refused(f"certificate of {site}: what is left if others collude is not what its releases leave")
    least = NEEDED + max((line["count"] for line in body["releases"]), default=0)
    if body["ledger"][0] < least or not HASH.fullmatch(body["ledger"][1]):
        raise Refused(f"certificate of {site}: its ledger is shorter than this run, or its last entry is none")


def check_releases(lines: Sequence[Mapping[str, Any]], document: Document, index: int) -> None:
    """Streams, sampling and noise are the plan's. No stream was released more often; nor less often, where it is known
    that every site was asked in all of its rounds."""
    plan, site = document.plan, document.sites[index]
    planned = {line["stream"]: marked(line, plan) for line in written(plan.spent(index) if plan.private else [])}
    if len({line["stream"] for line in lines}) < len(lines):
        raise Refused(f"certificate of {site}: a stream stands in it twice")
    surely_asked = plan.facts.counts_exactly and document.waits and not plan.config.privacy.missing
    for line in lines:
        right = planned.get(line["stream"])
        if right is None or canonical({**line, "count": right["count"]}) != canonical(right):
            raise Refused(f"certificate of {site}: releases that are not the plan's, or with other noise")
        least = right["count"] if surely_asked else 1
        if type(line["count"]) is not int or not least <= line["count"] <= right["count"]:
            raise Refused(f"certificate of {site}: a number of releases that the plan does not have")
    if surely_asked and len(lines) < len(planned):
        raise Refused(f"certificate of {site}: fewer streams than those of a plan that waits for every site")


def same_levels(told: Mapping[str, float] | None, left: Mapping[str, float] | None) -> bool:
    if told is None or left is None:
        return told is left
    return told.keys() == left.keys() and all(math.isclose(told[who], left[who], rel_tol=1e-6) for who in left)


def said(body: Mapping[str, Any], key: str) -> str:
    promise = f"({rounded_up(body['epsilon'])}, {rounded_up(body['delta'])})-DP in this run"
    runs = several(body["runs"], "run")
    total = f"{rounded_up(body['total_epsilon'])} over {runs} at delta {body['total_delta']:g}"
    return f"{plain(body['site'])}: {promise}, epsilon {total}; key {words(key)[:40]}..."


def is_shufflers(statement: Any) -> bool:
    """Whether it says how a shuffler worked, rather than what a site released."""
    body = statement.get("body") if isinstance(statement, dict) else None
    return isinstance(body, dict) and "batches" in body


def opened_statement(statement: Any, document: Document | None) -> dict[str, Any]:
    body, key = opened(SHUFFLED, statement)
    if not fits(body, SHUFFLER_TOLD):
        raise Refused("statement: not as a shuffler writes it")
    if document is not None and body["versions"] != document.tree["versions"]:
        raise Refused(f"statement of {plain(body['site'])}: its versions are not the plan's")
    if document is not None and (document.shuffler is None or document.shuffler.key != key):
        raise Refused(f"statement of {plain(body['site'])}: it is not signed by the plan's shuffler")
    return body
