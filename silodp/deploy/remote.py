"""The server's links to guards, over any transport `rpc(site, bytes) -> bytes`. No JAX.

A question may be repeated: a guard gives the same bytes to the same question. What sites say they were shown is passed
on to all of them with the next question. A site whose ledger goes back, or splits in two, is noticed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.channels.sealed import Terms
from silodp.deploy.links import Answer, Link, heard
from silodp.deploy.shuffler import split
from silodp.deploy.shuffling import PARCEL
from silodp.deploy.vouch import points_of, seen_of
from silodp.deploy.wire import encode
from silodp.errors import Refused

if TYPE_CHECKING:
    from silodp.deploy.document import Document

Rpc = Callable[[str, bytes], bytes]
Head = tuple[int, str]
KEPT = 4  # questions whose echoes may still be asked for


class Echoes:
    """By question, what each site signed to have seen; and which question each site was asked last."""

    def __init__(self, told: Mapping[str, Any] | None = None):
        self.seen: dict[str, dict[str, Any]] = dict((told or {}).get("seen", {}))
        self.last: dict[str, str] = dict((told or {}).get("last", {}))

    def to_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "last": self.last}

    def of(self, site: str) -> dict[str, Any]:
        return self.seen.get(self.last.get(site, ""), {})

    def add(self, site: str, question: str, seen: Any) -> None:
        self.seen.setdefault(question, {})[site] = seen
        self.last[site] = question
        needed = set(self.last.values())
        for old in [each for each in self.seen if each not in needed][:-KEPT]:
            del self.seen[old]


class Remote:
    """One guard, as a `MessageFederation` speaks to it."""

    def __init__(
        self, site: str, rpc: Rpc, pool: ThreadPoolExecutor, run: str, echoes: Echoes, signed: Document | None = None
    ):
        """`signed`: the plan whose sites sign what they see. What is forged is noticed here, not at an honest site."""
        self.site, self.rpc, self.pool, self.run, self.echoes, self.signed = site, rpc, pool, run, echoes, signed
        self.shown = ""  # the digest of the points that went out last
        self.done: list[str] = []  # questions that the server's checkpoint covers: told with the next one
        self.asked: list[str] = []  # since the last checkpoint
        self.opened: Head = (0, "")  # the last entry of the site's ledger when it took the plan
        self.head: Head = (0, "")  # and at its last answer
        self.bytes = [0, 0]
        self.heard_at: float | None = None
        self._pending: tuple[str, bool, Future[bytes]] | None = None

    def send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        question = ""
        if header["kind"] in ("ask", "local", "shuffle"):
            question = f"{header['kind']} {header['round']}/{header['query']}"
            header = header | {"echo": self.echoes.of(self.site), "done": self.done}
        elif header["kind"] == "sum":
            question = f"sum {header['round']}/{header['query']}/{header['step']}"
        if question:  # the last entry that it has told: it goes on from there, or was put back from a copy
            header = header | {"last": next((list(head) for head in (self.head, self.opened) if head[0]), None)}
        self.shown = points_of(arrays)
        data = encode(header | {"run": self.run}, dict(arrays))
        self.bytes[1] += len(data)
        self._pending = question, header["kind"] == "plan", self.pool.submit(self.rpc, self.site, data)

    def receive(self) -> Answer:
        assert self._pending is not None
        question, opens, future = self._pending
        data = future.result()
        self.bytes[0] += len(data)
        self.heard_at = time.time()
        header, arrays = heard(data)
        if opens:
            self.opened = self._grown(header.get("ledger"), 0)
        if question and header.get("kind") != "grid":  # that is no answer yet: nothing was spent
            self.head = self._grown(header.get("ledger"), self.head[0] + 1)
            self.asked.append(question)
            if question.startswith("ask"):
                self._saw(question, header.get("seen"))
        return header, arrays

    def _saw(self, question: str, seen: Any) -> None:
        if self.signed is None:
            return
        try:
            seen_of(self.signed, seen, self.site, question, self.shown)
        except Refused:
            raise Refused(f"site {self.site}: has not signed the points that it was shown") from None
        self.echoes.add(self.site, question, seen)

    def _grown(self, head: Any, least: int) -> Head:
        """A ledger only grows. One that does not was put back from a copy, or there are two of it."""
        if not (isinstance(head, list) and len(head) == 2 and isinstance(head[0], int) and isinstance(head[1], str)):
            raise Refused(f"site {self.site}: does not say how long its ledger is")
        if head[0] < least:
            raise Refused(f"site {self.site}: its ledger has two histories; it was cloned, or put back from a copy")
        return head[0], head[1]

    def resumed(self, head: list[Any]) -> None:
        """What it says now goes on from what it said to the program that wrote the checkpoint."""
        if self.opened[0] == head[0] and self.opened[1] != head[1]:
            raise Refused(f"site {self.site}: its ledger has two histories; it was cloned, or put back from a copy")
        self._grown(list(self.opened), head[0])
        self.head = head[0], head[1]

    def covered(self) -> None:
        """A checkpoint covers everything that was asked."""
        self.done, self.asked = self.asked, []


class RemoteShuffler:
    """A shuffler, as the server's end of a channel speaks to it: parcels there, messages back."""

    def __init__(self, link: Link, private_key: X25519PrivateKey):
        self.link, self.private_key = link, private_key
        self.present: list[int] = []

    def open(self, name: str, terms: Terms) -> None:
        """Nobody is asked: the shuffler has its terms from the plan."""
        self.present = [i for i, share in enumerate(terms.shares) if share]

    def release(self, name: str, sealed_size: int, carried: Sequence[Mapping[str, np.ndarray]]) -> list[bytes]:
        parcels = [each.get(PARCEL) for each in carried]
        if len(parcels) != len(self.present) or any(each is None for each in parcels):
            raise Refused(f"batch {name!r}: a silo's answer holds no parcel for the shuffler")
        arrays = {str(i): parcel for i, parcel in zip(self.present, parcels, strict=True) if parcel is not None}
        round, _, query = name.partition("/")
        self.link.send({"kind": "shuffle", "round": int(round), "query": query}, arrays)
        return split(self.link.receive()[1].get("sealed"), name, sealed_size)
