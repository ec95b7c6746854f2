"""Who said it: Ed25519 keys of sites, signed statements, and fingerprints that people can read to each other. No JAX.

What is signed is `silodp PURPOSE 1|` and the canonical JSON of a statement: a signature for one purpose is none for
another. A signed statement is a JSON object with `body`, `key` and `signature`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from silodp.errors import ConfigError, Refused

LARGEST = 8 << 20  # bytes of a document: plans hold no arrays
DEEPEST = 40
SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")  # a party's name; also a certificate's and a folder's
PUBLIC = re.compile(r"[0-9a-f]{64}")  # a public key: one way to write it, which is also plain text in TOML
SERVER_KEY = "server.key"  # in the server's run folder: what shuffled messages are sealed to
ONSETS, RIMES = "bdfghjklmnprstvz", "abadakalamanaparelemeneribilinon"


def canonical(tree: Any) -> bytes:
    """The one way to write a document."""
    try:
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise Refused("document: it holds what JSON cannot say") from None


def digest(purpose: str, body: bytes) -> str:
    return hashlib.sha256(f"silodp {purpose} 1|".encode() + body).hexdigest()


def fingerprint_of(document: bytes) -> str:
    """Of a plan in its canonical form."""
    return digest("plan", document)


def words(fingerprint: str) -> str:
    """A fingerprint for a telephone: sixteen words of two syllables, which say all of its bits."""
    syllables = [ONSETS[byte >> 4] + RIMES[2 * (byte & 15) :][:2] for byte in bytes.fromhex(fingerprint)]
    return " ".join(first + second for first, second in zip(syllables[::2], syllables[1::2], strict=True))


def read_document(data: bytes) -> dict[str, Any]:
    """A JSON object from somebody else."""
    tree = read_json(data)
    if not isinstance(tree, dict):
        raise Refused("document: must be a JSON object")
    return tree


def read_json(data: bytes) -> Any:
    """From somebody else: no key twice, no NaN, neither large nor deep."""
    if len(data) > LARGEST:
        raise Refused("document: too large")
    try:
        tree = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
        check_depth(tree)
    except (ValueError, RecursionError):
        raise Refused("document: not valid JSON, or a key stands in it twice") from None
    return tree


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a key twice")
    return tree


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def check_depth(tree: Any, left: int = DEEPEST) -> None:
    if left == 0:
        raise ValueError("too deep")
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        check_depth(part, left - 1)


class Key:
    """A site's private key."""

    def __init__(self, private: Ed25519PrivateKey):
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @staticmethod
    def create(path: Path) -> Key:
        """A new key in a new file that only its owner can read."""
        private = Ed25519PrivateKey.generate()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(private.private_bytes_raw().hex() + "\n")
        return Key(private)

    @staticmethod
    def read(path: Path) -> Key:
        try:
            return Key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip())))
        except ValueError:
            raise ConfigError(f"{path}: holds no key; silodp silo init makes one") from None

    def sign(self, purpose: str, body: bytes) -> bytes:
        return self._private.sign(f"silodp {purpose} 1|".encode() + body)

    def signed(self, purpose: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A statement that everybody can check."""
        signature = self.sign(purpose, canonical(body)).hex()
        return {"body": dict(body), "key": self.public, "signature": signature}


def check(key: str, purpose: str, body: bytes, signature: bytes) -> None:
    """Refuse what the holder of `key` has not signed for this purpose."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(signature, f"silodp {purpose} 1|".encode() + body)
    except (InvalidSignature, ValueError, TypeError):
        raise Refused(f"{purpose}: the signature is not that of this key") from None


def opened(purpose: str, statement: Any) -> tuple[dict[str, Any], str]:
    """Body and key of a signed statement."""
    if not isinstance(statement, dict) or statement.keys() != {"body", "key", "signature"}:
        raise Refused(f"{purpose}: must have body, key and signature")
    body, key, signature = statement["body"], statement["key"], statement["signature"]
    if not (isinstance(body, dict) and isinstance(key, str) and isinstance(signature, str) and PUBLIC.fullmatch(key)):
        raise Refused(f"{purpose}: body, key or signature of another kind")
    try:
        check(key, purpose, canonical(body), bytes.fromhex(signature))
    except ValueError:
        raise Refused(f"{purpose}: the signature is not that of this key") from None
    return body, key
