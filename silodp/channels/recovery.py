"""Masks that survive missing silos: double masking with Shamir shares (Bonawitz et al. 2017, against active servers).

For every question a silo draws a fresh X25519 key, from which its pads with the others follow, and a seed of a pad of
its own; it hides its part under all of them. It gives each other silo a share of both secrets, sealed under what the
two share in this run. A sum is opened once, over one set: the silos that answered. Of each of these the others hand out
their share of the seed, of each missing one their share of the key, never both. `threshold` shares give a secret back.

What silos are told they first confirm to each other: who takes part before they hide anything, who answered before they
open anything. A silo confirms one set, and goes on when `threshold` silos have confirmed the same. Two sets would need
2 threshold confirmations from N silos of which only colluding ones give two, so 2 threshold > N + colluding excludes
them; with threshold = N - missing that is colluding + 2 missing < N. Hence all honest silos of a question hide from the
same others and open the same set, at least threshold - colluding of them are in it, and the sum over exactly these is
all that a server can read. Without confirmations it could name each silo another set, collect the keys of more silos
than may be missing, and read the sum of too few. Whoever answered too late stays under its own pad, which nobody opens.

What a server could swap is bound together: keys and commitments are authenticated with every sealed share, and these
depend on all that the silos agreed on. A share that is not what was shared shows when a secret does not fit its key or
its commitment.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from silodp.channels.masks import KEY, Masks, Words, derived, padded, pair_secret
from silodp.errors import Refused

PRIME = 2**521 - 1  # a Mersenne prime, above every secret of 256 bits
SHARE = 66  # bytes of a number below it
OWN = b"silodp own pad 1"
ONCE = b"silodp once 1"
TAKERS, ANSWERED = "takers", "answered"  # what silos confirm to each other, in this order


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Shamir: each holder's value of a random polynomial of degree threshold - 1 whose value at 0 is the secret."""
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def value(place: int) -> int:
        total = 0
        for factor in reversed(factors):
            total = (total * place + factor) % PRIME
        return total

    return {holder: value(holder + 1).to_bytes(SHARE, "big") for holder in holders}


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from `threshold` shares or more."""
    some = dict(sorted(shares.items())[:threshold])
    if len(some) < threshold or any(len(share) != SHARE for share in some.values()):
        raise Refused(f"shares: {len(some)} usable ones, {threshold} are needed to open a sum")
    total = 0
    for holder, share in some.items():
        above = below = 1
        for other in some:
            if other != holder:
                above, below = above * (other + 1) % PRIME, below * (other - holder) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    total %= PRIME
    if total >= 2 ** (8 * KEY):
        raise Refused("shares: one of them is forged; they give no secret back")
    return total.to_bytes(KEY, "big")


class Public(NamedTuple):
    """What everybody may see of a silo's secrets of one question."""

    key: bytes
    commitment: bytes  # to the seed of its own pad

    @staticmethod
    def of(text: Sequence[str]) -> Public:
        key, commitment = (bytes.fromhex(each) for each in text)
        return Public(key, commitment)

    @property
    def whole(self) -> bytes:
        return self.key + self.commitment

    @property
    def text(self) -> list[str]:
        return [self.key.hex(), self.commitment.hex()]


def commitment(seed: bytes) -> bytes:
    return hashlib.sha256(OWN + seed).digest()


class Question:
    """A silo's secrets for one question, and the shares that it keeps for the others."""

    def __init__(self, masks: Masks, index: int, present: Sequence[int], threshold: int, label: str):
        self.masks, self.index, self.present, self.threshold, self.label = masks, index, present, threshold, label
        self._key, self._seed = X25519PrivateKey.generate(), secrets.token_bytes(KEY)
        self.public = Public(self._key.public_key().public_bytes_raw(), commitment(self._seed))
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # of the others' keys and seeds
        self._publics: dict[int, Public] = {}
        self._confirmed: dict[str, str] = {}  # what this silo has confirmed, each once
        self._agreed: set[str] = set()  # and `threshold` silos with it
        self.sent = self.opened = False

    def state(self) -> dict[str, Any]:
        """For a silo that starts again; secret."""
        return {
            "asked": [self.index, list(self.present), self.threshold, self.label],
            "secrets": [self._key.private_bytes_raw().hex(), self._seed.hex()],
            "shares": {i: [share.hex() for share in both] for i, both in self._shares.items()},
            "publics": {i: public.text for i, public in self._publics.items()},
            "confirmed": self._confirmed,
            "agreed": sorted(self._agreed),
            "done": [self.sent, self.opened],
        }

    @staticmethod
    def restored(masks: Masks, state: Mapping[str, Any]) -> Question:
        question = Question(masks, *state["asked"])
        key, question._seed = (bytes.fromhex(each) for each in state["secrets"])
        question._key = X25519PrivateKey.from_private_bytes(key)
        question.public = Public(question._key.public_key().public_bytes_raw(), commitment(question._seed))
        shares = {int(i): tuple(map(bytes.fromhex, both)) for i, both in state["shares"].items()}
        question._shares = {i: (key, seed) for i, (key, seed) in shares.items()}
        question._publics = {int(i): Public.of(text) for i, text in state["publics"].items()}
        question._confirmed, question._agreed = dict(state["confirmed"]), set(state["agreed"])
        question.sent, question.opened = state["done"]
        return question

    def sealed(self) -> dict[int, bytes]:
        """For each other silo its shares of both secrets, which only it can read."""
        keys, seeds = (
            split(each, self.present, self.threshold) for each in (self._key.private_bytes_raw(), self._seed)
        )
        self._shares[self.index] = keys[self.index], seeds[self.index]
        return {j: self._box(self.index, j, self.public, keys[j] + seeds[j]) for j in self.present if j != self.index}

    def take(self, publics: Mapping[int, Public], sealed: Mapping[int, bytes]) -> dict[int, bytes]:
        """The keys and sealed shares of all silos that take part, once. Returns what confirms them to the others."""
        if self._publics or self.sent:
            raise Refused(f"shares of {self.label}: taken already")
        if not set(publics) <= set(self.present) or publics.get(self.index) != self.public:
            raise Refused(
                f"shares of {self.label}: keys of silos {sorted(publics)}; the round has {list(self.present)}"
            )
        if len(publics) < self.threshold:
            raise Refused(f"shares of {self.label}: {len(publics)} silos take part, {self.threshold} are needed")
        shares = {}
        for i in publics.keys() - {self.index}:
            pair_secret(self._key, self.index, i, publics[i].key, ONCE)  # refuses what is no key
            opened = self._unbox(i, publics[i], sealed.get(i, b""))
            shares[i] = opened[:SHARE], opened[SHARE:]
        self._shares |= shares  # all or none: nobody but who takes part is opened
        self._publics = dict(publics)
        listed = [f"{i}:{public.whole.hex()}" for i, public in sorted(publics.items())]
        return self._confirms(TAKERS, ",".join(listed))

    def _confirms(self, what: str, told: str) -> dict[int, bytes]:
        self._confirmed[what] = told
        return {j: self._word(what, self.index, j) for j in self._publics if j != self.index}

    def _word(self, what: str, sender: int, receiver: int) -> bytes:
        """By which a silo tells another one what it was told; nobody but the two can write it."""
        secret = self.masks.between(receiver if sender == self.index else sender)
        told = f"{self.label}|{what}|{sender}>{receiver}|{self._confirmed[what]}"
        return derived(secret, b"silodp confirm 1|" + told.encode())

    def agree(self, what: str, words: Mapping[int, bytes]) -> None:
        """Go on if enough of the others confirm what this silo was told."""
        if what not in self._confirmed:
            raise Refused(f"sum {self.label}: nothing to confirm yet")
        fits = lambda i: hmac.compare_digest(words[i], self._word(what, i, self.index))
        alike = [i for i in words if i in self._publics and i != self.index and fits(i)]
        if len(alike) + 1 < self.threshold:
            raise Refused(
                f"sum {self.label}: {len(alike) + 1} silos were told the same ({what}), {self.threshold} are needed"
            )
        self._agreed.add(what)

    def hide(self, values: Words, context: bytes) -> Words:
        if TAKERS not in self._agreed or self.sent:
            raise Refused(f"message {self.label}: sent already, or its shares were not taken and confirmed")
        self.sent = True
        label = f"{self.label}|{context.hex()}"
        hidden = padded(values, self._seed, label, adds=True)
        for other in self._publics.keys() - {self.index}:
            secret = pair_secret(self._key, self.index, other, self._publics[other].key, ONCE)
            hidden = padded(hidden, secret, label, adds=self.index < other)
        return hidden

    def close(self, answered: Sequence[int]) -> dict[int, bytes]:
        """The one set that this silo will open. Returns what confirms it to the others."""
        if ANSWERED in self._confirmed or not self.sent:
            raise Refused(f"sum {self.label}: closed already, or this silo is not in it")
        if not set(answered) <= set(self._shares) or len(set(answered)) != len(answered):
            raise Refused(f"sum {self.label}: silos {list(answered)} are not those that take part")
        if self.index not in answered:
            raise Refused(f"sum {self.label}: this silo answered; it is not opened as missing")
        if len(answered) < self.threshold:
            raise Refused(f"sum {self.label}: over {len(answered)} silos, the plan needs {self.threshold}")
        return self._confirms(ANSWERED, ",".join(map(str, sorted(answered))))

    def open(self) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """This silo's shares of the seeds of those that answered, and of the keys of those that did not."""
        if self.opened or ANSWERED not in self._agreed:
            raise Refused(f"sum {self.label}: opened already, or not closed and confirmed")
        self.opened = True
        seeds = {i: self._shares[i][1] for i in map(int, self._confirmed[ANSWERED].split(","))}
        return seeds, {i: self._shares[i][0] for i in self._shares if i not in seeds}

    def _box(self, sender: int, receiver: int, public: Public, shares: bytes) -> bytes:
        return self._cipher(sender, receiver).encrypt(bytes(12), shares, public.whole)

    def _unbox(self, sender: int, public: Public, box: bytes) -> bytes:
        try:
            return self._cipher(sender, self.index).decrypt(bytes(12), box, public.whole)
        except InvalidTag:
            raise Refused(f"shares of {self.label}: those of silo {sender} are forged, or for another plan") from None

    def _cipher(self, sender: int, receiver: int) -> ChaCha20Poly1305:
        """A key for one box, so the nonce may be fixed."""
        secret = self.masks.between(receiver if sender == self.index else sender)
        return ChaCha20Poly1305(derived(secret, f"silodp share 1|{self.label}|{sender}>{receiver}".encode()))


def opened_sum(
    total: Words,
    label: str,
    publics: Mapping[int, Public],
    answered: Sequence[int],
    seeds: Mapping[int, Mapping[int, bytes]],
    keys: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> Words:
    """The server's side: the sum of what was sent without the pads that are left. `seeds`, `keys`: shares by silo."""
    for i in answered:
        seed = joined(seeds[i], threshold)
        if commitment(seed) != publics[i].commitment:
            raise Refused(f"shares: one of silo {i}'s seed is forged")
        total = padded(total, seed, label, adds=False)
    for i in set(publics) - set(answered):
        key = X25519PrivateKey.from_private_bytes(joined(keys[i], threshold))
        if key.public_key().public_bytes_raw() != publics[i].key:
            raise Refused(f"shares: one of silo {i}'s key is forged")
        for j in answered:  # what silo j added for silo i
            total = padded(total, pair_secret(key, i, j, publics[j].key, ONCE), label, adds=not j < i)
    return total
