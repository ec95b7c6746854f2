"""The server's links to guards, over any transport `rpc(site, bytes) -> bytes`. No JAX.

A question may be repeated: a guard gives the same bytes to the same question. What sites say they were shown is passed
on to all of them with the next question. A site whose ledger goes back, or splits in two, is noticed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from silodp.deploy.links import Answer, heard
from silodp.deploy.wire import encode
from silodp.errors import Refused

Rpc = Callable[[str, bytes], bytes]
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

    def __init__(self, site: str, rpc: Rpc, pool: ThreadPoolExecutor, run: str, echoes: Echoes):
        self.site, self.rpc, self.pool, self.run, self.echoes = site, rpc, pool, run, echoes
        self.done: list[str] = []  # questions that the server's checkpoint covers: told with the next one
        self.asked: list[str] = []  # since the last checkpoint
        self.heads: dict[int, str] = {}  # of the site's ledger, as far as it was told
        self.bytes = [0, 0]
        self._pending: tuple[str, Future[bytes]] | None = None

    def send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        question = ""
        if header["kind"] in ("ask", "local"):
            question = f"{header['kind']} {header['round']}/{header['query']}"
            header = header | {"echo": self.echoes.of(self.site), "done": self.done}
        data = encode(header | {"run": self.run}, dict(arrays))
        self.bytes[1] += len(data)
        self._pending = question, self.pool.submit(self.rpc, self.site, data)

    def receive(self) -> Answer:
        assert self._pending is not None
        question, future = self._pending
        data = future.result()
        self.bytes[0] += len(data)
        header, arrays = heard(data)
        self._check_ledger(header.get("ledger"))
        if question:
            self.asked.append(question)
        if question.startswith("ask") and "seen" in header:
            self.echoes.add(self.site, question, header["seen"])
        return header, arrays

    def _check_ledger(self, head: Any) -> None:
        """Two answers with one number and two heads come from two ledgers."""
        if not (isinstance(head, list) and len(head) == 2 and isinstance(head[0], int) and isinstance(head[1], str)):
            return
        if self.heads.setdefault(head[0], head[1]) != head[1]:
            raise Refused(f"site {self.site}: its ledger has two histories; it was cloned, or put back from a copy")

    def covered(self) -> None:
        """A checkpoint covers everything that was asked."""
        self.done, self.asked = self.asked, []
