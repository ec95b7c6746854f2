"""The chain of a ledger's entries, and what its tables have to say by them. No JAX.

A guard works with rows, because they are quick to find. Nobody can tell from a row that it was edited; from the entries
it is known what was approved, reserved, counted and closed, and which state a silo had then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from silodp.deploy.signing import canonical, fingerprint_of

FIRST = hashlib.sha256(b"silodp ledger 1|").hexdigest()
Event = Mapping[str, Any]


class Head(NamedTuple):
    """The last link of the chain."""

    seq: int
    hash: str


def linked(last: Head, event: Event) -> Head:
    """The link that an event is after the last one."""
    hashed = hashlib.sha256(last.hash.encode() + canonical([last.seq + 1, dict(event)]))
    return Head(last.seq + 1, hashed.hexdigest())


def sealed(secret: bytes, digests: Mapping[str, str]) -> dict[str, str]:
    """Digests of the parts of a silo's state as they stand in entries, which others may see.

    A state may hold what no noise covers (a table of gradients). Who knows all records but one could try the digest of
    every candidate; under a secret that stays in the ledger's file there is nothing to try.
    """
    return {name: hmac.new(secret, own.encode(), hashlib.sha256).hexdigest() for name, own in digests.items()}


@dataclass
class Told:
    """A run as its entries say it. None: they do not say (a shuffler's, or those of an older version)."""

    plan: str
    reservation: Any
    count: Any = field(default_factory=list)
    state: dict[str, str] | None = None  # digests of its parts, `sealed`
    closed: bool = False

    def answered(self, counted: Any, changed: dict[str, str] | None) -> None:
        self.count = counted
        self.state = None if self.state is None or changed is None else self.state | changed

    def close(self, counted: Any) -> bool:
        """Whether what was counted at the end is what was counted before."""
        same = self.count is None or self.count == counted
        self.reservation = self.count = counted
        self.state, self.closed = None, True
        return same


@dataclass
class Retold:
    """All that the entries say."""

    runs: dict[str, Told] = field(default_factory=dict)
    approvals: dict[str, tuple[str, bool]] = field(default_factory=dict)  # run, and whether it stands
    questions: dict[tuple[str, str], str] = field(default_factory=dict)  # by run and key
    problems: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        kind, run, plan = event["kind"], event.get("run", ""), event.get("plan", "")
        told = self.runs.get(run)
        if kind == "approve":
            self.approvals[plan] = run, True
        elif kind == "revoke" and plan in self.approvals:
            self.approvals[plan] = self.approvals[plan][0], False
        elif kind == "begin":
            self.runs[run] = Told(plan, event["reserved"], state=event.get("state"))
        elif kind == "answer":
            self.questions[run, event["key"]] = event["question"]
            if told is not None:
                told.answered(event.get("counted"), event.get("state"))
        elif kind == "close" and told is not None and not told.close(event["counted"]):
            self.problems.append(f"run {run}: its end says another count than its last answer")

    def differing_runs(self, rows: Mapping[str, Told]) -> list[str]:
        return [
            f"run {run}: its {part} is not what was written"
            for run in sorted(rows.keys() | self.runs.keys())
            for part in differing(rows.get(run), self.runs.get(run))
        ]

    def differing_answers(self, rows: Mapping[tuple[str, str], str]) -> list[str]:
        wrong = {each for each in rows.keys() | self.questions.keys() if rows.get(each) != self.questions.get(each)}
        return [f"run {run}, {key}: answer and entry do not belong together" for run, key in sorted(wrong)]

    def differing_approvals(self, rows: Iterable[tuple[str, str, bytes, float | None]]) -> list[str]:
        kept, other = {}, set()
        for plan, run, document, revoked in rows:
            kept[plan] = run, revoked is None
            other |= {plan} if not isinstance(document, bytes) or fingerprint_of(document) != plan else set()
        other |= {plan for plan in kept.keys() | self.approvals.keys() if kept.get(plan) != self.approvals.get(plan)}
        return [f"approval {plan}: it is not what was written" for plan in sorted(other)]


def differing(row: Told | None, told: Told | None) -> list[str]:
    """The parts of a run that its entries say otherwise."""
    if row is None or told is None:
        return ["row"]
    wrong = [name for name in ("plan", "reservation") if getattr(row, name) != getattr(told, name)]
    known = [name for name in ("count", "state") if getattr(told, name) is not None]
    wrong += [name for name in known if getattr(row, name) != getattr(told, name)]
    return wrong + (["end"] if row.closed is not told.closed else [])


def retold(rows: Iterable[tuple[int, str, str]]) -> Retold:
    """What the entries say, from their numbers, texts and links."""
    told, last = Retold(), Head(0, FIRST)
    for seq, text, head in rows:
        event = read_event(text)
        if event is not None and (seq, head) == linked(last, event):
            told.add(event)
        else:
            told.problems.append(f"entry {seq}: it is not the one that was written")
        last = Head(seq, head)
    return told


def read_event(text: str) -> dict[str, Any] | None:
    """None: no entry that a ledger has written."""
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None
