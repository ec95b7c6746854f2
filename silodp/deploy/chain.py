"""The chain of a ledger's entries, and what its tables have to say by them. No JAX.

A guard works with rows, because they are quick to find. Nobody can tell from a row that it was edited; from the entries
it is known what was approved, reserved, counted and closed, and which state a silo had then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from silodp.deploy.signing import canonical, fingerprint_of
from silodp.deploy.wire import decode, encode
from silodp.errors import Refused

FIRST = hashlib.sha256(b"silodp ledger 1|").hexdigest()
OF_LEDGER = ("ledger", "seen")  # what an answer says of its own entry
CHARGED = ("ask", "local")  # kinds of questions whose answers release something
ANSWERED = re.compile(r"keys|start|leave .+|(ask|local|shuffle) \d+/.+|sum \d+/.+/.+", re.DOTALL)  # keys of answers
Event = Mapping[str, Any]


class Head(NamedTuple):
    """The last link of the chain."""

    seq: int
    hash: str


def linked(last: Head, event: Event) -> Head:
    """The link that an event is after the last one."""
    hashed = hashlib.sha256(last.hash.encode() + canonical([last.seq + 1, dict(event)]))
    return Head(last.seq + 1, hashed.hexdigest())


def answer_digest(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """Of an answer, as its entry tells it: but for what it says of the entry itself."""
    told = {name: header[name] for name in sorted(header) if name not in OF_LEDGER}
    return hashlib.sha256(encode(told, dict(sorted(arrays.items())))).hexdigest()


def sealed(secret: bytes, digests: Mapping[str, str]) -> dict[str, str]:
    """Digests of the parts of a silo's state as they stand in entries, which others may see.

    A state may hold what no noise covers (a table of gradients). Who knows all records but one could try the digest of
    every candidate; under a secret that stays in the ledger's file there is nothing to try.
    """
    return {name: hmac.new(secret, own.encode(), hashlib.sha256).hexdigest() for name, own in digests.items()}


Lines = list[dict[str, Any]]


@dataclass
class Told:
    """A run as its entries say it."""

    plan: str
    reservation: Lines
    count: Lines = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)  # digests of its parts, `sealed`
    closed: bool = False
    several: Collection[str] = ()  # streams that one answer may release several times
    steps: dict[tuple[str, str], int] = field(default_factory=dict)  # how often it did, by stream and query

    def answered(self, counted: Lines, changed: dict[str, str]) -> None:
        self.count, self.state = counted, self.state | changed

    def may_grow(self, key: str, counted: Lines) -> bool:
        """Whether one answer may have released so much: nothing around a sum or a stage; a stream once, or where an
        answer has several releases of it, as often as the first answer to this query."""
        before, kind, query = by_stream(self.count), key.split()[0], key.rpartition("/")[2]
        more = {s: count - before.get(s, NOTHING)[0] for s, (count, _) in by_stream(counted).items()}
        grown = {stream: count for stream, count in more.items() if count}
        return not grown or (
            kind in CHARGED
            and all(
                count == (self.steps.setdefault((stream, query), count) if stream in self.several else 1)
                for stream, count in grown.items()
            )
        )

    def may_count(self, counted: Lines) -> bool:
        """Whether a guard may have counted so after what it had counted before: every stream once, none less often, and
        none more often or with other noise than was reserved."""
        most, least, now = by_stream(self.reservation), by_stream(self.count), by_stream(counted)
        grows = all(now.get(stream, NOTHING)[0] >= count for stream, (count, _) in least.items())
        return (
            grows
            and len(now) == len(counted)
            and all(
                stream in most and type(count) is int and 0 <= count <= most[stream][0] and rest == most[stream][1]
                for stream, (count, rest) in now.items()
            )
        )

    def close(self, counted: Lines) -> bool:
        """Whether what was counted at the end is what was counted before."""
        same = self.count == counted
        self.count = counted
        self.state, self.closed = {}, True
        return same


NOTHING: tuple[int, dict[str, Any]] = (0, {})


def by_stream(lines: Lines) -> dict[str, tuple[int, dict[str, Any]]]:
    """How often each stream was released, and what stands in its line beside that: its noise and its sampling."""
    return {line["stream"]: (line["count"], {k: v for k, v in line.items() if k != "count"}) for line in lines}


CERTIFY = "certify"
KINDS = ("approve", "revoke", "begin", "answer", "close", CERTIFY)


@dataclass
class Retold:
    """All that the entries say. One that no guard writes after those before it is a problem, and changes nothing.

    `approved`: every run has to be approved before, as those of guards are.
    """

    approved: bool = False
    runs: dict[str, Told] = field(default_factory=dict)
    approvals: dict[str, tuple[str, bool]] = field(default_factory=dict)  # run, and whether it stands
    models: dict[str, str] = field(default_factory=dict)  # that certificates name, by run
    questions: dict[tuple[str, str], str] = field(default_factory=dict)  # by run and key
    answers: dict[tuple[str, str], tuple[str | None, Head]] = field(default_factory=dict)  # digests, and their entries
    peers: str | None = None  # the digest of what is known of others' ledgers; None: it was never told
    problems: list[str] = field(default_factory=list)

    def add(self, event: Event, head: Head) -> None:
        kind, run, plan = event["kind"], event.get("run", ""), event.get("plan", "")
        told = self.runs.get(run)
        if kind == "approve":
            self._approve(run, plan)
        elif kind == "revoke":
            self._revoke(plan)
        elif kind == "begin" and self._follows(told is None, run, "it begins twice"):
            stands = self.approvals.get(plan) == (run, True)
            self._follows(stands or not self.approved, run, "it begins without an approval that stands")
            several = event.get("several", [])
            self.runs[run] = Told(plan, event["reserved"], state=event.get("state", {}), several=several)
        elif kind in ("answer", "close") and self._follows(told is not None, run, f"no {kind} can come before it"):
            assert told is not None
            if self._follows(not told.closed, run, f"no {kind} can come after its end"):
                self._answer(told, run, event, head) if kind == "answer" else self._close(told, run, event)
        elif kind == CERTIFY and self._follows(told is not None and told.closed, run, "certified before its end"):
            self._follows(run not in self.models, run, "certified twice")
            self.models.setdefault(run, event["model"])
        elif kind not in KINDS:
            raise ValueError("a kind that no guard writes")

    def _approve(self, run: str, plan: str) -> None:
        others = {other for other, (its, _) in self.approvals.items() if its == run} - {plan}
        if self._follows(not others, run, "a second plan is approved under its number"):
            self.approvals[plan] = run, True

    def _revoke(self, plan: str) -> None:
        """Twice is harmless: two operators may have done it at once."""
        if plan not in self.approvals:
            raise ValueError("nothing to revoke")
        self.approvals[plan] = self.approvals[plan][0], False

    def _follows(self, right: bool, run: str, wrong: str) -> bool:
        if not right:
            self.problems.append(f"run {run}: {wrong}")
        return right

    def _answer(self, told: Told, run: str, event: Event, head: Head) -> None:
        key, counted = event["key"], event.get("counted", [])  # a shuffler counts nothing, and has no state
        self._follows(ANSWERED.fullmatch(key) is not None, run, f"{key!r} is no question")
        self._follows("counted" in event or not told.reservation, run, f"{key} does not say what it counts")
        if self._follows((run, key) not in self.questions, run, f"{key} is answered twice"):
            self.questions[run, key], self.answers[run, key] = event["question"], (event.get("answer"), head)
        self._follows(told.may_grow(key, counted), run, f"{key} counts more than one answer releases")
        if self._follows(told.may_count(counted), run, f"{key} counts less than was released, or other noise"):
            told.answered(counted, event.get("state", {}))
        self.peers = event.get("peers", self.peers)

    def _close(self, told: Told, run: str, event: Event) -> None:
        self._follows(told.close(event["counted"]), run, "its end says another count than its last answer")

    def differing_runs(self, rows: Mapping[str, Told]) -> list[str]:
        return [
            f"run {run}: its {part} is not what was written"
            for run in sorted(rows.keys() | self.runs.keys())
            for part in differing(rows.get(run), self.runs.get(run))
        ]

    def differing_answers(self, rows: Mapping[tuple[str, str], str]) -> list[str]:
        wrong = {each for each in rows.keys() | self.questions.keys() if rows.get(each) != self.questions.get(each)}
        return [f"run {run}, {key}: answer and entry do not belong together" for run, key in sorted(wrong)]

    def differing_replies(self, rows: Iterable[tuple[str, str, bytes | None]]) -> list[str]:
        """`rows`: run, key and the bytes that are kept to be sent again; None: they cannot be read."""
        return [
            f"run {run}, {key}: the bytes that would be sent again are not those that were sent"
            for run, key, reply in rows
            if reply is None or not is_answer(reply, self.answers.get((run, key)))
        ]

    def differing_approvals(self, rows: Iterable[tuple[str, str, bytes, float | None]]) -> list[str]:
        kept, other = {}, set()
        for plan, run, document, revoked in rows:
            kept[plan] = run, revoked is None
            other |= {plan} if not isinstance(document, bytes) or fingerprint_of(document) != plan else set()
        other |= {plan for plan in kept.keys() | self.approvals.keys() if kept.get(plan) != self.approvals.get(plan)}
        return [f"approval {plan}: it is not what was written" for plan in sorted(other)]


def is_answer(reply: bytes, told: tuple[str | None, Head] | None) -> bool:
    """Whether these bytes are the answer that an entry tells of."""
    try:
        header, arrays = decode(reply)
    except Refused:
        return False
    return told is not None and (answer_digest(header, arrays), header.get("ledger")) == (told[0], list(told[1]))


def differing(row: Told | None, told: Told | None) -> list[str]:
    """The parts of a run that its entries say otherwise."""
    if row is None or told is None:
        return ["row"]
    parts = {"plan": "plan", "reservation": "reservation", "count": "count", "state": "state", "closed": "end"}
    return [name for part, name in parts.items() if getattr(row, part) != getattr(told, part)]


def retold(rows: Iterable[tuple[int, str, str]], approved: bool = False) -> Retold:
    """What the entries say, from their numbers, texts and links."""
    told, last = Retold(approved), Head(0, FIRST)
    for seq, text, head in rows:
        try:
            event = json.loads(text)
            link = linked(last, event)
            if link != (seq, head):
                raise ValueError("another link")
            told.add(event, link)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            told.problems.append(f"entry {seq}: it is not the one that was written")
        last = Head(seq, str(head))
    return told


def digest_of(table: Mapping[str, Head]) -> str:
    """Of what is known of others' ledgers."""
    return hashlib.sha256(canonical({key: list(head) for key, head in table.items()})).hexdigest()
