"""Pairwise masks: a server that adds up the silos' integer vectors learns their sum and nothing else.

Every two silos share a secret (X25519, fresh keys for every run). For each message of a round both derive the same pad
from it (HKDF-SHA256, then the ChaCha20 key stream read as words); the silo that comes first adds it, the other one
subtracts it, modulo 2^32 or 2^64. Over all silos of the round the pads cancel exactly; with any one of them missing,
what the others sent is uniform and independent of their data (Bonawitz et al. 2017). How a sum survives missing silos
is silodp.channels.recovery.

The secrets depend on everything the silos must agree on: all public keys in order, and the plan; a pad depends on the
question too. A server that tells two silos different things (a plan with less noise for one of them, another list of
keys, another point) gets pads that do not cancel.

The public keys travel through the server. One that replaces them by its own knows all pads. Where sites are known by
keys of their own, each mask key comes signed (`Vouching` in silodp.deploy.silo). Elsewhere the silos then hold
different fingerprints, which their operators can compare by other means; nothing here does it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import UInt

from silodp.errors import Refused

Words = UInt[np.ndarray, " d"]  # of 32 or 64 bits
KEY = 32  # bytes of a key


class Masks:
    """One silo's keys and pads for one run. `plan`: bytes that are the same for all honest silos."""

    def __init__(self, index: int, silos: int, plan: bytes):
        self._index, self._silos, self._plan = index, silos, plan
        self._key = X25519PrivateKey.generate()
        self._keys: list[bytes] = []  # of all silos, once they are agreed on
        self._secrets: dict[int, bytes] = {}
        self._used: set[str] = set()

    @property
    def agreed(self) -> bool:
        return bool(self._keys)

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def agree(self, keys: Sequence[bytes]) -> str:
        """Take the public keys of all silos, in order, once. Returns a fingerprint of all that was agreed on."""
        if self.agreed:
            raise Refused("keys: agreed already; other ones could be the server's own")
        if len(keys) != self._silos or len(set(keys)) != len(keys):
            raise Refused(f"keys: {len(set(keys))} different ones, the plan has {self._silos} silos")
        if keys[self._index] != self.public_key:
            raise Refused(f"keys: number {self._index} is not this silo's")
        agreed = hashlib.sha256(hashlib.sha256(self._plan).digest() + b"".join(keys)).digest()
        self._secrets = {i: self._secret(i, key, agreed) for i, key in enumerate(keys) if i != self._index}
        self._keys = list(keys)
        return agreed.hex()

    def hide(self, values: Words, present: Sequence[int], message: str, context: bytes = b"") -> Words:
        """`values` under the pads shared with the other silos present; each message has pads of its own, used once.

        `context`: what the silos must have been told alike.
        """
        if not self.agreed:
            raise Refused("keys: not agreed yet")
        if self._index not in present or len(set(present)) != len(present):
            raise Refused(f"silos {list(present)}: must be different and contain {self._index}")
        if message in self._used:
            raise Refused(f"message {message!r}: sent already")
        self._used.add(message)
        label = f"{message}|{context.hex()}"
        hidden = values.copy()
        for other in set(present) - {self._index}:
            hidden = padded(hidden, self._secrets[other], label, adds=self._index < other)
        return hidden

    def state(self) -> dict[str, Any]:
        """For a silo that starts again: its private key, what was agreed on, and the pads that are used."""
        keys = [key.hex() for key in self._keys]
        return {"key": self._key.private_bytes_raw().hex(), "keys": keys, "used": sorted(self._used)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._key = X25519PrivateKey.from_private_bytes(bytes.fromhex(state["key"]))
        self._keys = []
        if state["keys"]:
            self.agree([bytes.fromhex(key) for key in state["keys"]])
        self._used = set(state["used"])

    def between(self, other: int) -> bytes:
        """The secret of this run that no silo but the two knows."""
        if not self.agreed:
            raise Refused("keys: not agreed yet")
        return self._secrets[other]

    def _secret(self, other: int, key: bytes, agreed: bytes) -> bytes:
        return pair_secret(self._key, self._index, other, key, agreed)


def pair_secret(own: X25519PrivateKey, index: int, other: int, key: bytes, agreed: bytes) -> bytes:
    """What two silos derive alike from one's private and the other's public key."""
    if key[-1:] >= b"\x80":  # X25519 ignores this bit: with it one key could be shown as two
        raise Refused(f"keys: {key.hex()} is not written in the one way allowed")
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise Refused(f"keys: {key.hex()} is no X25519 key ({error})") from None
    # The pair's numbers: a silo that repeats another one's key must not get that one's pads.
    pair = f"{min(index, other)},{max(index, other)}|".encode()
    return derived(shared, b"silodp pair 1|" + pair + agreed)


def padded(values: Words, secret: bytes, label: str, *, adds: bool) -> Words:
    """The values with a pad added or subtracted, in the arithmetic of their words."""
    shared = pad(secret, label, values.size * values.itemsize // 4).view(values.dtype)
    return values + shared if adds else values - shared


def pad(secret: bytes, message: str, size: int) -> UInt[np.ndarray, " d"]:
    """The pad of one message in 32-bit words; its key is used for nothing else, so the nonce may be fixed."""
    key = derived(secret, b"silodp pad 1|" + message.encode())
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


def derived(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)
