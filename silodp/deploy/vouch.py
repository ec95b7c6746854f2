"""A site's signatures within one run: under its key for masks, and under the points that it was shown. No JAX.

A server that replaces a mask's key, or shows different points to different sites, cannot sign for them: it is noticed
when keys are agreed on, or one round later. With the points a site signs the last entry of its own ledger, and those
that it knows of the others' ledgers. A ledger that was put back from a copy together with its counter is shorter than
the others have seen it, or lacks an entry that they have seen: they notice the one, and the site itself the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from silodp.deploy.book import MOST_ENTRIES
from silodp.deploy.chain import Head
from silodp.deploy.policy import Denied
from silodp.deploy.signing import Key, canonical, check
from silodp.deploy.wire import encode
from silodp.errors import Refused

if TYPE_CHECKING:
    from silodp.deploy.document import Document

MASK, SEEN = "mask", "seen"
SHORT = 32  # digits of an entry's hash that are told: 128 bits
Heads = Mapping[str, Head]  # last entries of sites' ledgers, by site


class Seen(NamedTuple):
    """What a site has signed: the last entry of its ledger, and the last ones that it knew of the others."""

    head: Head
    known: Heads


class Vouch:
    """Signs for one site, and checks the others' signatures, all bound to the run and its plan."""

    def __init__(self, key: Key, document: Document):
        self.key, self.document = key, document
        self.site = next((site for site, own in document.keys.items() if own == key.public), "")

    def sign(self, key: bytes) -> bytes:
        """Of this site's key for masks."""
        return self.key.sign(MASK, self._bound(key.hex()))

    def check(self, index: int, key: bytes, signature: bytes) -> None:
        check(self.document.keys[self.document.sites[index]], MASK, self._bound(key.hex()), signature)

    def saw(self, question: str, points: str, head: Head, known: Heads) -> list[Any]:
        """The digest of a question's points, the ledger's last entry (the answer's), those that are known of others,
        and a signature of all."""
        told = [points, head.seq, head.hash[:SHORT], {site: list(each) for site, each in known.items()}]
        return [*told, self.key.sign(SEEN, bound(self.document, said(question, told))).hex()]

    def check_same(
        self, echo: Any, question: str, points: str, known: Heads, hash_at: Callable[[int], str]
    ) -> dict[str, Head]:
        """All sites of that question must have been shown these points; each has signed what it saw.

        `known`: the last entries of the others' ledgers as they were; what is returned are those of now. `hash_at`: of
        an entry of this site's own ledger.
        """
        told, now = echo if isinstance(echo, dict) else {}, dict(known)
        shown, missing = self._shown(question), self.document.plan.config.privacy.missing or 0
        if missing and len(told) < len(shown) - missing:
            raise Denied("seen")
        for site in shown if self.document.waits and not missing else told:
            seen = seen_of(self.document, told.get(site), site, question, points)
            own = seen.head if site == self.site else seen.known.get(self.site)
            if own is not None and hash_at(own.seq)[:SHORT] != own.hash:
                raise Denied("put-back", site)
            if site != self.site:
                now[site] = grown(site, seen.head, known.get(site))
        return now

    def by_key(self, heads: Heads) -> dict[str, Head]:
        """Last entries by public key: a site is the same one in another run if it has the same key."""
        return {self.document.keys[site]: head for site, head in heads.items()}

    def of_sites(self, heads: Heads) -> dict[str, Head]:
        """The same by the names that this plan has for the keys."""
        return {site: heads[key] for site, key in self.document.keys.items() if key in heads}

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


def said(question: str, told: list[Any]) -> str:
    return f"{question}|{canonical(told).decode()}"


def grown(site: str, head: Head, before: Head | None) -> Head:
    if before is not None and head.seq <= before.seq:
        raise Denied("behind", site)
    return head


def seen_of(document: Document, told: Any, site: str, question: str, points: str) -> Seen:
    """What a site says to have seen, if it has signed it and was shown these points (`Vouch.saw`)."""
    if not isinstance(told, list) or len(told) != 5 or told[0] != points or site not in document.keys:
        raise Denied("seen", site if site in document.keys else "")
    try:
        check(document.keys[site], SEEN, bound(document, said(question, told[:4])), bytes.fromhex(told[4]))
        known = {str(other): head_of(*head) for other, head in told[3].items() if other in document.keys}
        return Seen(head_of(told[1], told[2]), known)
    except (Refused, ValueError, TypeError, AttributeError, RecursionError):
        raise Denied("seen", site) from None


def head_of(seq: Any, told: Any) -> Head:
    if type(seq) is not int or not 0 <= seq < MOST_ENTRIES or not isinstance(told, str) or len(told) != SHORT:
        raise Refused("ledger: no entry")
    return Head(seq, told)
