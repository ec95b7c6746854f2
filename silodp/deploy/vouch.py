"""A site's signatures within one run: under its key for masks, and under the points that it was shown. No JAX.

A server that replaces a mask's key, or shows different points to different sites, cannot sign for them: it is noticed
when keys are agreed on, or one round later. With the points a site signs how long its ledger is: the others notice when
that goes back, which is how a ledger looks that was put back from a copy together with its counter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from silodp.deploy.policy import Denied
from silodp.deploy.signing import Key, check
from silodp.deploy.wire import encode
from silodp.errors import Refused

if TYPE_CHECKING:
    from silodp.deploy.document import Document

MASK, SEEN = "mask", "seen"


class Vouch:
    """Signs for one site, and checks the others' signatures, all bound to the run and its plan."""

    def __init__(self, key: Key, document: Document):
        self.key, self.document = key, document

    def sign(self, key: bytes) -> bytes:
        """Of this site's key for masks."""
        return self.key.sign(MASK, self._bound(key.hex()))

    def check(self, index: int, key: bytes, signature: bytes) -> None:
        check(self.document.keys[self.document.sites[index]], MASK, self._bound(key.hex()), signature)

    def saw(self, question: str, points: str, entries: int) -> list[Any]:
        """The digest of the points that came with a question, how long the ledger was, and a signature of both."""
        return [points, entries, self.key.sign(SEEN, self._bound(f"{question}|{points}|{entries}")).hex()]

    def check_same(self, echo: Any, question: str, points: str, entries: Mapping[str, int]) -> dict[str, int]:
        """All sites of that question must have been shown these points; each has signed what it saw.

        `entries`: how long the sites' ledgers were before; what is returned is how long they are now.
        """
        told, now = echo if isinstance(echo, dict) else {}, dict(entries)
        shown, missing = self._shown(question), self.document.plan.config.privacy.missing or 0
        if missing and len(told) < len(shown) - missing:
            raise Denied("seen")
        for site in shown if self.document.waits and not missing else told:
            now[site] = entries_of(self.document, told.get(site), site, question, points)
            if now[site] <= entries.get(site, -1):
                raise Denied("behind")
        return now

    def by_key(self, entries: Mapping[str, int]) -> dict[str, int]:
        """Lengths of ledgers by public key: a site is the same one in another run if it has the same key."""
        return {self.document.keys[site]: length for site, length in entries.items()}

    def of_sites(self, entries: Mapping[str, int]) -> dict[str, int]:
        """The same by the names that this plan has for the keys."""
        return {site: entries[key] for site, key in self.document.keys.items() if key in entries}

    def _shown(self, question: str) -> list[str]:
        round = int(question.split()[1].partition("/")[0])
        return [self.document.sites[i] for i in self.document.plan.facts.present(round)]

    def _bound(self, body: str) -> bytes:
        return bound(self.document, body)


def bound(document: Document, body: str) -> bytes:
    return f"{document.run}|{document.fingerprint}|{body}".encode()


def points_of(arrays: Mapping[str, Any]) -> str:
    """The digest of the points that come with a question."""
    return hashlib.sha256(encode({}, dict(sorted(arrays.items())))).hexdigest()


MOST_ENTRIES = 2**53  # of a ledger: what a site signs beyond is no length


def entries_of(document: Document, seen: Any, site: str, question: str, points: str) -> int:
    """How long a site's ledger was when it was shown these points, if it has signed so (`Vouch.saw`)."""
    if not isinstance(seen, list) or len(seen) != 3 or seen[0] != points or site not in document.keys:
        raise Denied("seen")
    if type(seen[1]) is not int or not 0 <= seen[1] < MOST_ENTRIES:
        raise Denied("seen")
    try:
        signed = bound(document, f"{question}|{points}|{seen[1]}")
        check(document.keys[site], SEEN, signed, bytes.fromhex(str(seen[2])))
    except (Refused, ValueError, TypeError):
        raise Denied("seen") from None
    return seen[1]
