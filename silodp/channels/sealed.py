"""Messages sealed to the server: the shuffler carries them and cannot read them.

HPKE base mode (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305: every seal uses a fresh
key, so equal messages give unrelated ciphertexts. Messages are padded to one size before sealing;
the round and the batch enter the key schedule (`info`), so a ciphertext opens in its own batch
only.

Sealing does not say who sent a message - that is its purpose - so it cannot stop a dishonest
shuffler from adding messages of its own or dropping some; the certificate's collusion levels say
what is left then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from silodp.errors import Refused

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_LENGTH = 4  # bytes that hold the length of the message inside its padding
OVERHEAD = 32 + 16 + _LENGTH  # encapsulated key, authentication tag, length


class Terms(NamedTuple):
    """What was agreed for a batch: it is whole when every silo in it has sent its whole share, no less and no more."""

    sealed_size: int  # bytes of every message
    shares: tuple[int, ...]  # messages of each silo; 0: it is not in this batch
    silos: int  # of all these, in one batch

    @property
    def messages(self) -> int:
        """The fewest in a batch."""
        return sum(sorted(share for share in self.shares if share)[: self.silos])

    def allow(self, batch: Terms) -> bool:
        """Whether a batch is one of those: as many silos, each with its whole share or not in it."""
        if batch.sealed_size != self.sealed_size or len(batch.shares) != len(self.shares):
            return False
        whole = all(share in (0, own) for share, own in zip(batch.shares, self.shares, strict=True))
        return whole and batch.silos == sum(share > 0 for share in batch.shares) == self.silos


class Batch(NamedTuple):
    """Which shuffle a message belongs to, and the size all its messages are padded to."""

    round: int
    name: str
    message_size: int

    @property
    def sealed_size(self) -> int:
        return self.message_size + OVERHEAD

    @property
    def info(self) -> bytes:
        return f"silodp shuffle 1|{self.round}|{self.message_size}|{self.name}".encode()


def seal(message: bytes, key: X25519PublicKey, batch: Batch) -> bytes:
    """The message for the holder of the server's private key; always `batch.sealed_size` bytes."""
    if len(message) > batch.message_size:
        raise ValueError(f"message must have at most {batch.message_size} bytes, not {len(message)}")
    padded = len(message).to_bytes(_LENGTH, "big") + message.ljust(batch.message_size, b"\0")
    return _SUITE.encrypt(padded, key, info=batch.info)


def open_sealed(sealed: bytes, key: X25519PrivateKey, batch: Batch) -> bytes:
    """The message inside, or `Refused`: wrong size, changed, or sealed for another batch."""
    if len(sealed) != batch.sealed_size:
        raise Refused(f"wrong size: {len(sealed)} bytes instead of {batch.sealed_size}")
    try:
        padded = _SUITE.decrypt(sealed, key, info=batch.info)
    except (InvalidTag, ValueError) as error:
        raise Refused("does not open: changed on the way or sealed for another batch") from error
    length = int.from_bytes(padded[:_LENGTH], "big")
    if length > batch.message_size or any(padded[_LENGTH + length :]):
        raise Refused("badly padded")
    return padded[_LENGTH : _LENGTH + length]


class Opened(NamedTuple):
    """The messages of a batch that opened, and the reasons for those that were refused."""

    messages: list[bytes]
    refused: list[str]


def open_batch(sealed: Sequence[bytes], key: X25519PrivateKey, batch: Batch) -> Opened:
    """Open what the shuffler released; a ciphertext that comes twice counts once."""
    opened, seen = Opened([], []), set[bytes]()
    for item in sealed:
        try:
            if item in seen:
                raise Refused("duplicate")
            opened.messages.append(open_sealed(item, key, batch))
            seen.add(item)
        except Refused as reason:
            opened.refused.append(str(reason))
    return opened


def wrapped(data: bytes, key: X25519PublicKey, info: bytes) -> bytes:
    """Bytes for the holder of a private key, bound to what both know."""
    return _SUITE.encrypt(data, key, info=info)


def unwrapped(data: bytes, key: X25519PrivateKey, info: bytes) -> bytes:
    try:
        return _SUITE.decrypt(data, key, info=info)
    except (InvalidTag, ValueError) as error:
        raise Refused("does not open: changed on the way, or wrapped for something else") from error
