"""Certificates: each guard signs what its own site released; anybody can check them with public keys only."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from silodp.deploy.shuffling import agreed_terms
from silodp.deploy.signing import Key, canonical, opened, words
from silodp.deploy.spending import epsilon_over, is_charged_singly, read, written
from silodp.deploy.wire import is_number, plain
from silodp.digits import as_number, rounded_up, several, together
from silodp.errors import Refused
from silodp.plan.certificate import known_levels
from silodp.plan.plan import cost_of
from silodp.privacy import adaptive

if TYPE_CHECKING:
    from silodp.deploy.document import Document
    from silodp.deploy.ledger import Ledger
    from silodp.deploy.policy import Policy
    from silodp.plan.plan import Plan

HELD_OUT = "held_out"  # of a line: it is about records that are not trained on
DATE = "%Y-%m-%dT%H:%M:%SZ"
FIRST_YEAR = 1970  # of any computer's clock
HASH = re.compile(r"[0-9a-f]{64}")
NEEDED = 3  # entries of a run beside its answers: approved, begun, closed
CERTIFICATE, SHUFFLED = "certificate", "shuffled"
TOTAL = ("total_epsilon", "total_delta", "runs")  # of all runs on these records; a site may keep it for itself
# Of what is recounted where no plan says how much there is: a line takes a second or so, larger numbers hours or all of
# a computer's memory.
MOST_LINES = 500
MOST_TOLD = {"count": 10**5, "together": 100, "messages": 10**8}
MOST_DELTA = 2e-2  # of a site's total: no policy has more
_text = lambda told: isinstance(told, str)
_count = lambda told: type(told) is int and told >= 0
_table = lambda told: isinstance(told, dict)
_head = lambda told: isinstance(told, list) and len(told) == 2 and _count(told[0]) and _text(told[1])
_delta = lambda told: is_number(told) and 0 < told < 1
_or_none = lambda form: lambda told: told is None or form(told)


def _date(told: Any) -> bool:
    with suppress(ValueError, TypeError):
        when = datetime.strptime(told, DATE)
        return when.year >= FIRST_YEAR and when.strftime(DATE) == told
    return False


Form = dict[str, Callable[[Any], bool]]
SHARED: Form = {"site": _text, "run": _text, "plan": _text, "ledger": _head, "date": _date, "versions": _table}
TOLD: Form = SHARED | {  # what stands in a certificate; a hostile site signs anything
    "epsilon": is_number, "record_epsilon": is_number, "delta": _delta,
    "records_together": lambda told: _count(told) and told >= 1,
    "total_epsilon": _or_none(is_number), "total_delta": _or_none(_delta), "runs": _or_none(_count),
    "releases": lambda told: isinstance(told, list), "sees": _text,
    "collusion": _or_none(lambda told: _table(told) and all(_or_none(is_number)(each) for each in told.values())),
    "model": _or_none(lambda told: is_hash(told)),
}  # fmt: skip
SHUFFLER_TOLD: Form = SHARED | {"batches": _count}


def fits(body: Mapping[str, Any], form: Form) -> bool:
    return body.keys() == form.keys() and all(check(body[name]) for name, check in form.items())


def is_hash(told: Any) -> bool:
    return _text(told) and HASH.fullmatch(told) is not None


def certificate_of(policy: Policy, key: Key, ledger: Ledger, document: Document, model: str | None) -> dict[str, Any]:
    """What was counted here, and what it comes to. `model`: the hash that the server tells. The total over all runs is
    left out where the server may not know it."""
    found = ledger.run(document.run)
    assert found is not None
    plan, index, own = document.plan, document.sites.index(policy.site), read(found.counted)
    delta, group, runs = plan.config.privacy.delta, plan.together(index), ledger.runs()
    body = {
        "site": policy.site,
        "run": document.run,
        "plan": document.fingerprint,
        "epsilon": plan.cost(index, own),
        "delta": delta,
        "records_together": group,  # epsilon and collusion are of so many, totals of one
        "record_epsilon": cost_of(plan.apart(own), delta, 1),
        "releases": [marked(line, plan) for line in found.counted],
        "sees": plan.channel.sees,
        "collusion": known_levels(plan.if_others_collude(index, own, delta, group)),
        "model": model,
        "total_epsilon": epsilon_over(runs, policy.limits.total_delta) if policy.tell_budget else None,
        "total_delta": policy.limits.total_delta if policy.tell_budget else None,
        "runs": len(runs) if policy.tell_budget else None,
        "ledger": list(ledger.head),
        "date": time.strftime(DATE, time.gmtime()),
        "versions": dict(document.tree["versions"]),
    }
    return key.signed(CERTIFICATE, body)


def marked(line: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A line of the ledger; a record is trained on or held out, so that each part has an epsilon of its own."""
    return {**line, HELD_OUT: True} if plan.stage_of(line["stream"]).held_out else dict(line)


def recounted(body: Mapping[str, Any], group: int) -> float:
    """Epsilon of so many records by the releases that a certificate counts."""
    lines = body["releases"]
    parts = [[line for line in lines if bool(line.get(HELD_OUT)) is held_out] for held_out in (False, True)]
    return cost_of([read(part) for part in parts], body["delta"], group)


def verified(certificates: Sequence[Any], document: Document | None = None) -> list[str]:
    """A line for each certificate, if all are signed, belong to one run, and state no less than they count. There is
    exactly one of every party."""
    of_sites = [statement for statement in certificates if not is_shufflers(statement)]
    if not of_sites:
        raise Refused(f"certificates: none of a site{'' if document is None else missing_words(document, [])}")
    if document is None:
        check_few(of_sites)
    told = [opened_certificate(statement, document) for statement in of_sites]
    shuffled = [opened_statement(statement, document) for statement in filter(is_shufflers, certificates)]
    check_once([*told, *shuffled])
    check_one_run([body for body, _ in told], [body for body, _ in shuffled], document)
    mixed = "shuffled {batches} batches, each with every site's whole share"
    lines = [f"{plain(body['site'])}: {mixed.format(batches=body['batches'])}" for body, _ in shuffled]
    return [said(body, key) for body, key in told] + lines


def check_few(of_sites: Sequence[Any]) -> None:
    """Whoever writes a file of many different releases would keep its reader busy for hours."""
    bodies = [body for each in of_sites if isinstance(each, dict) and isinstance(body := each.get("body"), dict)]
    lines = [line for body in bodies if isinstance(told := body.get("releases"), list) for line in told]
    if len(lines) > MOST_LINES:
        raise Refused(
            f"certificates: {len(lines)} lines of releases; without --plan at most {MOST_LINES} are recounted"
        )
    numbers = ((name, told) for line in lines for name, told in parts_of(line) if type(told) in (int, float))
    if any(told > MOST_TOLD.get(name, told) for name, told in numbers):
        raise Refused(f"certificates: without --plan no more is recounted than {MOST_TOLD}")


def parts_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """All that has a name in a line, at any depth."""
    for name, part in tree.items() if isinstance(tree, dict) else ():
        yield name, part
        yield from parts_of(part)


def check_once(told: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    for names in ([body["site"] for body, _ in told], [key for _, key in told]):
        name, times = Counter(names).most_common(1)[0]
        if times > 1:
            raise Refused(f"certificates: {times} of {plain(name)}; there is one of every party")


def check_one_run(
    of_sites: Sequence[Mapping[str, Any]], shuffled: Sequence[Mapping[str, Any]], document: Document | None
) -> None:
    runs = {(body["run"], body["plan"]) for body in of_sites}
    if len(runs) > 1 or len({body["model"] for body in of_sites}) > 1:
        raise Refused("certificates: of different runs, plans or models")
    for body in shuffled:
        if (body["run"], body["plan"]) not in runs:
            raise Refused(f"statement of {plain(body['site'])}: of another run")
    if document is not None:
        missing = missing_words(document, [*of_sites, *shuffled])
        if missing or runs != {(document.run, document.fingerprint)}:
            raise Refused(f"certificates: not those of this plan{missing}")


def missing_words(document: Document, bodies: Iterable[Mapping[str, Any]]) -> str:
    missing = document.parties.keys() - {body["site"] for body in bodies}
    return f"; missing: {', '.join(sorted(missing))}" if missing else ""


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
        levels = {name: recounted(body, group) for name, group in promises(body).items()}
        total = total_of_run(body) if tells_total(body) else None
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError):
        raise Refused(f"certificate of {site}: its releases are none") from None
    for name, level in levels.items():
        if body[name] < level * (1 - 1e-6):
            raise Refused(f"certificate of {site}: its releases come to {name.replace('_', ' ')} {rounded_up(level)}")
    if total is not None:
        check_total(body, total)
    return body, key


def promises(body: Mapping[str, Any]) -> dict[str, int]:
    """What a certificate promises, and to how many records of its site together."""
    return {"epsilon": body["records_together"], "record_epsilon": 1}


def tells_total(body: Mapping[str, Any]) -> bool:
    """Whether it says what was spent over all runs: all of it, or nothing."""
    told = {body[name] is not None for name in TOTAL}
    if len(told) > 1:
        raise Refused(f"certificate of {plain(body['site'])}: it says a part of its total, and hides the rest")
    return told.pop()


def check_total(body: Mapping[str, Any], total: float) -> None:
    """`total`: this run's part of it."""
    site = plain(body["site"])
    if body["runs"] < 1 or body["total_epsilon"] < total * (1 - 1e-4):
        raise Refused(f"certificate of {site}: over all runs it says less than this run's {rounded_up(total)}")
    alone = body["runs"] == 1 and is_charged_singly(body["releases"])  # others are charged as they were planned
    if body["total_delta"] >= MOST_DELTA or (alone and body["total_epsilon"] > total * (1 + 1e-4)):
        raise Refused(f"certificate of {site}: its total is not that of its one run, or at a delta that no site allows")


def total_of_run(body: Mapping[str, Any]) -> float:
    """What this run takes of the total over all runs, which is at a delta of its own."""
    return adaptive.epsilon([read(body["releases"])], body["total_delta"])


def check_planned(body: Mapping[str, Any], document: Document) -> None:
    """All that a certificate says is the plan's, or what the plan makes of its releases."""
    plan, site, index = document.plan, plain(body["site"]), document.sites.index(body["site"])
    if body["delta"] != plan.config.privacy.delta or body["sees"] != plan.channel.sees:
        raise Refused(f"certificate of {site}: its delta, or who sees what, is not the plan's")
    if body["versions"] != document.tree["versions"]:
        raise Refused(f"certificate of {site}: its versions are not the plan's")
    if body["records_together"] != plan.together(index):
        raise Refused(f"certificate of {site}: its promise is to another number of records than the plan's")
    check_releases(body["releases"], document, index)
    left = plan.if_others_collude(index, read(body["releases"]), body["delta"], body["records_together"])
    if not same_levels(body["collusion"], known_levels(left)):
        raise Refused(f"certificate of {site}: what is left if others collude is not what its releases leave")
    several = plan.released_together(index)
    answers = max((1 if line["stream"] in several else line["count"] for line in body["releases"]), default=0)
    check_ledger(f"certificate of {site}", body["ledger"], answers)


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


def same_levels(told: Mapping[str, float | None] | None, left: Mapping[str, float | None] | None) -> bool:
    if told is None or left is None:
        return told is left
    same = lambda who: math.isclose(as_number(told[who]), as_number(left[who]), rel_tol=1e-6)
    return told.keys() == left.keys() and all(map(same, left))


def said(body: Mapping[str, Any], key: str) -> str:
    promise = (
        f"({rounded_up(body['epsilon'])}, {rounded_up(body['delta'])})-DP for {together(body['records_together'])}"
    )
    alone = f", epsilon {rounded_up(body['record_epsilon'])} for one record" if body["records_together"] > 1 else ""
    total = "its total over all runs is not told"
    if tells_total(body):
        over = f"over {several(body['runs'], 'run')} at delta {body['total_delta']:g}"
        total = f"epsilon {rounded_up(body['total_epsilon'])} for one record {over}"
    return f"{plain(body['site'])}: {promise}{alone} in this run, {total}; key {words(key)[:40]}..."


def is_shufflers(statement: Any) -> bool:
    """Whether it says how a shuffler worked, rather than what a site released."""
    body = statement.get("body") if isinstance(statement, dict) else None
    return isinstance(body, dict) and "batches" in body


def opened_statement(statement: Any, document: Document | None) -> tuple[dict[str, Any], str]:
    """What a shuffler has signed. It counts for the plan's shuffler, and for no site."""
    body, key = opened(SHUFFLED, statement)
    if not fits(body, SHUFFLER_TOLD):
        raise Refused("statement: not as a shuffler writes it")
    if document is not None:
        check_shuffled(body, key, document)
    return body, key


def check_shuffled(body: Mapping[str, Any], key: str, document: Document) -> None:
    site, shuffler, facts = plain(body["site"]), document.shuffler, document.plan.facts
    if shuffler is None or (shuffler.site, shuffler.key) != (body["site"], key):
        raise Refused(f"statement of {site}: it is not signed by the plan's shuffler")
    if body["versions"] != document.tree["versions"]:
        raise Refused(f"statement of {site}: its versions are not the plan's")
    least, most = facts.rounds if facts.everyone else 0, facts.rounds * len(agreed_terms(document.plan) or {})
    if not least <= body["batches"] <= most:
        raise Refused(f"statement of {site}: a number of batches that the plan does not have")
    check_ledger(f"statement of {site}", body["ledger"], body["batches"])


def check_ledger(what: str, head: Sequence[Any], answers: int) -> None:
    """The last entry of a ledger that a run with so many answers has ended in."""
    if head[0] < NEEDED + answers or not is_hash(head[1]):
        raise Refused(f"{what}: its ledger is shorter than this run, or its last entry is none")
