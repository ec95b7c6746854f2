"""One run of one silo on top of a ledger: the same question gets the same bytes, a new one is charged first."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from silodp.deploy.book import PutBack
from silodp.deploy.chain import CHARGED, Head, answer_digest, digest_of
from silodp.deploy.ledger import Ledger
from silodp.deploy.silo import SiloServer
from silodp.deploy.silo_process import account_arrays, respond
from silodp.deploy.spending import written
from silodp.deploy.vouch import points_of
from silodp.deploy.wire import decode, encode
from silodp.errors import Refused
from silodp.facts import Stream

ASKED = ("kind", "round", "query", "stage", "keys", "signatures")  # what a question is; all else are hints
SUMMED = ("step", "publics", "sealed", "words", "answered")  # and what is said around a sum
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]
HEADER = "header"  # the part of a silo's state that is no array


def key_of(header: Mapping[str, Any]) -> str:
    """One answer is given for each."""
    kind = str(header.get("kind"))
    if kind == "leave":
        return f"{kind} {header.get('stage')}"
    if kind == "sum":
        return f"{kind} {int(header['round'])}/{header['query']}/{header['step']}"
    return f"{kind} {int(header['round'])}/{header['query']}" if kind in CHARGED else kind


def question_of(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The digest of what is asked. Not of the frame: hints may differ when a question is repeated."""
    names = (*ASKED, *SUMMED) if header.get("kind") == "sum" else ASKED
    asked = {name: header.get(name) for name in names}
    return hashlib.sha256(encode(asked, dict(sorted(arrays.items())))).digest()


class Witness(Protocol):
    """Signs which points a silo was shown, and checks that the others were shown the same (silodp.deploy.vouch)."""

    def saw(self, question: str, points: str, head: Head, known: Mapping[str, Head]) -> list[Any]: ...

    def check_same(
        self, echo: Any, question: str, points: str, known: Mapping[str, Head], hash_at: Callable[[int], str]
    ) -> dict[str, Head]: ...

    def by_key(self, heads: Mapping[str, Head]) -> dict[str, Head]: ...

    def of_sites(self, heads: Mapping[str, Head]) -> dict[str, Head]: ...


class Desk:
    """Answers of one run, each on the disk before it leaves.

    `ahead`: writing failed, so what is in memory is ahead of the disk; make a new desk.
    """

    def __init__(self, ledger: Ledger, run: str, fingerprint: str, silo: SiloServer, witness: Witness | None = None):
        self.ledger, self.run, self.silo, self.witness, self.ahead = ledger, run, silo, witness, False
        self.seen: tuple[str, str] | None = None  # the last question's key, and the digest of its points
        self.asked: Counter[str] = Counter()
        self.known: dict[str, Head] = {}  # the last entry of every other site's ledger that it has signed
        self.stored: dict[str, bytes] = {}  # digests of the parts of the state on the disk
        if ledger.run(run) is None:
            self.known = {} if witness is None else witness.of_sites(ledger.peers())
            several = silo.whole.released_together(silo.index)
            ledger.begin(run, fingerprint, self._lines(silo.whole.releases(silo.index)), self._changed(), several)
        else:
            self._restore(ledger.state(run))

    def _restore(self, kept: Mapping[str, bytes]) -> None:
        header, _ = decode(kept[HEADER])
        arrays = {name: decode(data)[1]["part"] for name, data in kept.items() if name != HEADER}
        self.silo.restore(header, arrays)
        self.asked = Counter(header["asked"])
        self.seen = None if header["seen"] is None else (header["seen"][0], header["seen"][1])
        self.known = {site: Head(*head) for site, head in header["known"].items()}
        self.stored = {name: hashlib.sha256(data).digest() for name, data in kept.items()}
        row = self.ledger.run(self.run)
        # An older state would answer a question twice.
        if row is not None and row.counted and row.counted != self.counted(self.asked):
            raise PutBack("the state of this run has answered other questions than its entries tell of")

    def _changed(self, asked: Counter[str] | None = None) -> dict[str, bytes]:
        """The parts of the silo's state that differ from those on the disk."""
        header, arrays = self.silo.state()
        header |= {"asked": dict(self.asked if asked is None else asked), "seen": self.seen, "known": self.known}
        parts = {name: encode({}, {"part": array}) for name, array in arrays.items()} | {HEADER: encode(header, {})}
        digests = {name: hashlib.sha256(data).digest() for name, data in parts.items()}
        changed = {name: parts[name] for name, own in digests.items() if self.stored.get(name) != own}
        self.stored = digests
        return changed

    def ask(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        """The answer's bytes."""
        if header.get("kind") == "account":
            return encode({"kind": "account"}, account_arrays(self.silo.account))
        self.ledger.check_has(header.get("last"))
        key, question = key_of(header), question_of(header, arrays)
        given = self.ledger.given(self.run, key, question)
        return self._fresh(key, question, header, arrays) if given is None else given

    def _fresh(self, key: str, question: bytes, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
        began, asked, known = time.process_time(), self._asked(header), self.known
        witness = self.witness if header.get("kind") == "ask" else None
        if witness is not None and self.seen is not None:
            known = witness.check_same(header.get("echo"), *self.seen, known, self.ledger.hash_at)
        told, message = self._answered(header, arrays)
        peers = {} if witness is None else self.ledger.peers() | witness.by_key(known)
        self.known, self.seen = known, self.seen if witness is None else (key, points_of(arrays))
        event = {"kind": "answer", "run": self.run, "key": key, "question": question.hex()}
        event |= {"answer": answer_digest(told, message)}
        state, counted = self._changed(asked), self.counted(asked)
        event |= {"counted": counted, "state": self.ledger.digests(state)}
        event |= {} if witness is None else {"peers": digest_of(peers)}
        with self.ledger.event(event) as head:
            reply = encode(told | self._signed(witness, head), message)
            self.ledger.add_answer(self.run, key, question, reply, counted, state, time.process_time() - began)
            self.ledger.note_peers(peers)
            self.ledger.drop(self.run, self._covered(header))
        self.ahead, self.asked = False, asked
        return reply

    def _signed(self, witness: Witness | None, head: Head) -> dict[str, Any]:
        """What an answer says of the ledger with this answer in it."""
        seen = {} if witness is None or self.seen is None else {"seen": witness.saw(*self.seen, head, self.known)}
        return {"ledger": list(head)} | seen

    def _answered(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Answer:
        """The silo's answer. From here on memory is ahead of the disk, unless a question was refused as it came."""
        before, refused = self.silo.answered, header.get("kind") in CHARGED
        try:
            told, message = respond(self.silo, header, arrays)
            refused = False
        finally:
            self.ahead = not refused or self.silo.answered is not before
        return told, message

    def _asked(self, header: Mapping[str, Any]) -> Counter[str]:
        """How often each stream was asked for, this question included; no more often than the plan has it.

        Under a trusted server the noise, and so the count, is the server's: here its questions are counted.
        """
        stream = self._stream(header)
        asked = self.asked + Counter([] if stream is None else [stream])
        if stream is not None and asked[stream] > self.silo.streams[stream].count:
            raise Refused(f"stream {stream!r}: asked for more often than the plan has it")
        return asked

    def _stream(self, header: Mapping[str, Any]) -> str | None:
        algorithm, query = self.silo.plan.algorithm, header.get("query")
        if header.get("kind") != "ask" or query not in algorithm.queries:
            return None
        stream = algorithm.stream_of(str(query))
        return stream if stream in self.silo.streams else None

    def _covered(self, header: Mapping[str, Any]) -> list[str]:
        done = header.get("done")
        return [str(key) for key in done] if isinstance(done, list) else []

    def counted(self, asked: Counter[str]) -> list[dict[str, Any]]:
        """What was released so far."""
        tallies = self.silo.account.tallies
        count = lambda stream: min(stream.count, max(int(tallies[stream.name].count), asked[stream.name]))
        streams: Sequence[Stream] = self.silo.whole.releases(self.silo.index)
        return self._lines([replace(stream, count=count(stream)) for stream in streams])

    def _lines(self, streams: Sequence[Stream]) -> list[dict[str, Any]]:
        """Releases as the accountant takes them."""
        whole = self.silo.whole
        return written(whole.spent(self.silo.index, streams)) if whole.private else []
