"""The shuffler as a party of a plan: who it is, what it waits for, and how a silo's share travels to it.

A silo's messages are sealed one by one to the server's key, all together to the shuffler's, and signed by the silo. The
server carries them and can neither read nor replace them: a parcel is bound to run, plan, batch and silo. The shuffler
opens the outer seal and cannot read what is inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from silodp.channels.sealed import Terms, unwrapped, wrapped
from silodp.deploy.files import private_files, write_whole
from silodp.deploy.signing import PUBLIC, SITE, Key, check, opened
from silodp.errors import ConfigError, Refused

if TYPE_CHECKING:
    from silodp.deploy.document import Document
    from silodp.plan.plan import Plan

SHUFFLER, PARCEL = "shuffler", "parcel"  # purposes of signatures; the latter also names a silo's share in an answer
TOLD = {"site", "box", "versions"}
SIGNATURE = 64  # bytes


def agreed_terms(plan: Plan) -> dict[str, Terms] | None:
    """What a shuffler waits for, by query; None: the plan needs no shuffler."""
    queries = {query: plan.algorithm.stream_of(query) for query in plan.algorithm.queries}
    return plan.channel.terms(plan.declared, queries)


def signed_shuffler(key: Key, site: str, box: X25519PrivateKey, versions: dict[str, str]) -> dict[str, Any]:
    """What a shuffler tells everybody: its name, and the key to seal to."""
    return key.signed(SHUFFLER, {"site": site, "box": public_of(box), "versions": versions})


@dataclass(frozen=True)
class Shuffling:
    """A plan's shuffler: `key` it signs with, silos seal their parcels to `box`, and what is inside to `server_key`."""

    site: str
    key: str
    box: str
    server_key: str

    @staticmethod
    def read(tree: Any) -> Shuffling:
        if not isinstance(tree, dict) or tree.keys() != {"facts", "server_key"}:
            raise Refused("shuffler: must have facts and server_key")
        body, key = opened(SHUFFLER, tree["facts"])
        if body.keys() != TOLD or not isinstance(body["site"], str) or not SITE.fullmatch(body["site"]):
            raise Refused("shuffler: its facts are not those of a shuffler")
        found = Shuffling(body["site"], key, str(body["box"]), str(tree["server_key"]))
        if len({public(found.box).public_bytes_raw(), public(found.server_key).public_bytes_raw()}) < 2:
            raise Refused("shuffler: the server's key is the shuffler's; one of them could read what the other hides")
        return found

    def check_key(self, path: Path) -> X25519PrivateKey:
        """The server's key, if it is the one that this plan's messages are sealed to."""
        box = read_box(path)
        if public_of(box) != self.server_key:
            raise ConfigError(f"{path}: not the key that the plan's messages are sealed to")
        return box


def public(text: str) -> X25519PublicKey:
    if not PUBLIC.fullmatch(text):
        raise Refused("shuffler: a key is none")
    key = X25519PublicKey.from_public_bytes(bytes.fromhex(text))
    if bytes.fromhex(text)[-1] >= 0x80:  # X25519 ignores this bit: one key could be shown as two
        raise Refused("shuffler: a key is not written in the one way allowed")
    return key


def public_of(box: X25519PrivateKey) -> str:
    return box.public_key().public_bytes_raw().hex()


def create_box(path: Path) -> X25519PrivateKey:
    """A new key in a new file that only its owner can read."""
    box = new_box()
    write_box(path, box)
    return box


def new_box() -> X25519PrivateKey:
    return X25519PrivateKey.generate()


def write_box(path: Path, box: X25519PrivateKey) -> None:
    if path.exists():
        raise ConfigError(f"{path}: exists; a key is never written over")
    with private_files():
        write_whole(path, box.private_bytes_raw().hex().encode() + b"\n")


def read_box(path: Path) -> X25519PrivateKey:
    try:
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="ascii").strip()))
    except (OSError, ValueError):
        raise ConfigError(f"{path}: holds no key to open messages with") from None


def bound(document: Document, index: int, batch: str) -> bytes:
    return f"{document.run}|{document.fingerprint}|{index}|{batch}".encode()


def signed_part(document: Document, index: int, batch: str, body: bytes) -> bytes:
    return bound(document, index, batch) + b"|" + hashlib.sha256(body).hexdigest().encode()


def label(index: int, batch: str) -> bytes:
    """What a parcel is bound to on one machine. Every run has a key of its own."""
    return f"{index}|{batch}".encode()


class LocalOutbox:
    """A silo's link to the shuffler of a message run on one machine. Nobody signs: see silodp.deploy.shuffler."""

    def __init__(self, invitation: Mapping[str, Any], index: int):
        self.box, self.index = public(invitation["box"]), index
        self.server_key = bytes.fromhex(invitation["server_key"])

    def submit(self, batch: str, sealed: Sequence[bytes]) -> dict[str, np.ndarray]:
        body = wrapped(b"".join(sealed), self.box, label(self.index, batch))
        return {PARCEL: np.frombuffer(body, np.uint8)}


class Outbox:
    """A silo's link to a shuffler that is a site: what it submits travels with its answer, as a parcel."""

    def __init__(self, key: Key, document: Document, index: int):
        assert document.shuffler is not None
        self.key, self.document, self.index = key, document, index
        self.box = public(document.shuffler.box)
        self.server_key = bytes.fromhex(document.shuffler.server_key)

    def submit(self, batch: str, sealed: Sequence[bytes]) -> dict[str, np.ndarray]:
        body = wrapped(b"".join(sealed), self.box, bound(self.document, self.index, batch))
        signature = self.key.sign(PARCEL, signed_part(self.document, self.index, batch, body))
        return {PARCEL: np.frombuffer(signature + body, np.uint8)}


def unpacked(parcel: np.ndarray, box: X25519PrivateKey, document: Document, index: int, batch: str) -> bytes:
    """What a silo has put in; Refused when it is another silo's, another batch's or another plan's."""
    if parcel.dtype != np.uint8 or parcel.ndim != 1:
        raise Refused("parcel: is none")
    data = parcel.tobytes()
    signature, body = data[:SIGNATURE], data[SIGNATURE:]
    check(document.keys[document.sites[index]], PARCEL, signed_part(document, index, batch, body), signature)
    return unwrapped(body, box, bound(document, index, batch))
