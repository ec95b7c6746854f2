"""The shuffler: opens parcels of sealed messages, forgets their origin, releases them once, permuted.

A silo's messages of a batch are one parcel, sealed to the shuffler, that travels with the silo's answer. The server
carries it and can neither read nor divide it. The shuffler sees ciphertexts of one size only. A batch is released once,
and only when every silo of it has sent its whole share: one silo cannot fill the place of others. The permutation comes
from the operating system's randomness. What was released is in a ledger before it leaves: the same parcels again get
the same bytes, so that a run which was stopped can go on, and other parcels of the same batch are refused.

`Batches` is that. Between machines the shuffler is a site (silodp.deploy.mixer), with signed parcels. On one machine it
is a process on pipes, `python -m silodp.deploy.shuffler DIR`, and nobody signs: whoever has started all processes knows
them. It needs no JAX. Frames of silodp.deploy.wire in on stdin, out on stdout:

    hello    answered by the key that parcels are sealed to
    setup    the plan's terms, by query; the same ones after a restart
    shuffle  parcels by silo; answered by the sealed messages, one row each
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from silodp.channels.sealed import Terms, unwrapped
from silodp.deploy.chain import answer_digest
from silodp.deploy.files import held
from silodp.deploy.ledger import COUNTER, LEDGER, Ledger
from silodp.deploy.shuffling import create_box, label, public_of, read_box
from silodp.deploy.signing import canonical
from silodp.deploy.wire import decode, encode, read_frame, write_frame
from silodp.errors import Refused

BOX = "box"  # the file of the key that opens parcels
TOLD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # errors about what was sent


class Batches:
    """What a shuffler has released of one run. `opened(parcel, silo, batch)`: what a silo has put into its parcel."""

    def __init__(
        self, ledger: Ledger, run: str, terms: Mapping[str, Terms], opened: Callable[[np.ndarray, int, str], bytes]
    ):
        self.ledger, self.run, self.terms, self.opened = ledger, run, terms, opened

    def shuffle(self, header: Mapping[str, Any], parcels: Mapping[str, np.ndarray]) -> bytes:
        """The answer's bytes."""
        self.ledger.check_has(header.get("last"))
        round, query = int(header["round"]), str(header["query"])
        key, question = f"shuffle {round}/{query}", digest_of(parcels)
        given = self.ledger.given(self.run, key, question)
        return self._fresh(query, key, question, parcels, header.get("done")) if given is None else given

    def _fresh(self, query: str, key: str, question: bytes, parcels: Mapping[str, np.ndarray], done: Any) -> bytes:
        began = time.process_time()
        released = {"sealed": rows(permuted(self._collected(query, key.removeprefix("shuffle "), parcels)))}
        told = {"kind": "answer", "facts": {}}
        event = {"kind": "answer", "run": self.run, "key": key, "question": question.hex()}
        with self.ledger.event(event | {"answer": answer_digest(told, released)}) as head:
            reply = encode(told | {"ledger": list(head)}, released)
            self.ledger.add_answer(self.run, key, question, reply, [], {}, time.process_time() - began)
            self.ledger.drop(self.run, [str(each) for each in done] if isinstance(done, list) else [])
        return reply

    def _collected(self, query: str, batch: str, parcels: Mapping[str, np.ndarray]) -> set[bytes]:
        """All messages of a batch, if every silo of the round has sent its whole share."""
        if query not in self.terms:
            raise Refused(f"batch {batch}: the plan has no such query")
        terms = self.terms[query]
        shares = tuple(share if str(i) in parcels else 0 for i, share in enumerate(terms.shares))
        if not terms.allow(Terms(terms.sealed_size, shares, len(parcels))):
            raise Refused(f"batch {batch}: it needs a parcel of each of {terms.silos} silos, and no other")
        sealed, size = list[bytes](), terms.sealed_size
        for i, share in enumerate(shares):
            data = self.opened(parcels[str(i)], i, batch) if share else b""
            if len(data) != size * share:
                raise Refused(f"batch {batch}: silo {i} has not sent its whole share, or more than that")
            sealed += [data[k : k + size] for k in range(0, len(data), size)]
        if len(set(sealed)) != len(sealed):
            raise Refused(f"batch {batch}: a message is in it twice")
        return set(sealed)


def digest_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    return hashlib.sha256(encode({}, dict(sorted(arrays.items())))).digest()


def permuted(sealed: Collection[bytes]) -> list[bytes]:
    # Sorted first: the order of a set, too, depends on the order of arrival.
    released = sorted(sealed)
    secrets.SystemRandom().shuffle(released)
    return released


def rows(sealed: Sequence[bytes]) -> np.ndarray:
    """Messages of one size as rows of bytes."""
    if len({len(message) for message in sealed}) > 1:
        raise ValueError("sealed messages must all have one size")
    return np.frombuffer(b"".join(sealed), np.uint8).reshape(len(sealed), -1 if sealed else 0)


def split(released: np.ndarray | None, name: str, sealed_size: int) -> list[bytes]:
    """The messages that a shuffler has released."""
    if released is None or released.dtype != np.uint8 or released.ndim != 2 or released.shape[1] != sealed_size:
        raise Refused(f"batch {name!r}: the shuffler's answer is no batch of messages of {sealed_size} bytes")
    return [row.tobytes() for row in released]


def terms_of(told: Any) -> Terms:
    try:
        shares = tuple(int(share) for share in told["shares"])
        terms = Terms(**{**told, "shares": shares})
        if min(shares) < 0 or not all(type(each) is int for each in (terms.sealed_size, terms.silos)):
            raise ValueError("a number is none")
        return terms
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Refused(f"terms must be an object with the fields {', '.join(Terms._fields)}") from error


# --- on one machine ----------------------------------------------------------------------------------------------


class LocalShuffler(ExitStack):
    """The shuffler of one message run, in a folder of its own."""

    def __init__(self, folder: Path):
        super().__init__()
        os.umask(0o077)
        self.enter_context(held(folder, "shuffler"))
        self.ledger = Ledger(folder / LEDGER, folder / COUNTER)
        self.callback(self.ledger.close)
        self.box = read_box(folder / BOX) if (folder / BOX).is_file() else create_box(folder / BOX)
        self.batches: Batches | None = None

    def reply(self, data: bytes) -> bytes:
        """One request and its answer; a bad request is refused, never fatal."""
        try:
            header, arrays = decode(data)
            kind = header.get("kind")
            if kind == "hello":
                return encode({"kind": "ready", "box": public_of(self.box)}, {})
            if kind == "setup":
                return self._setup(header)
            if kind != "shuffle":
                raise Refused(f"unknown kind of request {kind!r}")
            if self.batches is None:
                raise Refused("no plan yet: send setup first")
            return self.batches.shuffle(header, arrays)
        except TOLD as reason:
            return encode({"kind": "refused", "reason": str(reason)}, {})
        except (sqlite3.Error, OSError) as error:
            return encode({"kind": "refused", "reason": f"the ledger could not be written ({error})"}, {})

    def _setup(self, header: Mapping[str, Any]) -> bytes:
        told, run = dict(header["terms"]), str(header.get("run"))
        terms, fingerprint = {query: terms_of(each) for query, each in told.items()}, digest_of_terms(told)
        begun = [(each.run, each.fingerprint) for each in self.ledger.runs()]
        if begun and begun != [(run, fingerprint)]:
            raise Refused("setup: this shuffler has begun another run, or this one with other terms")
        if not begun:
            self.ledger.begin(run, fingerprint, [], {})
        self.batches = Batches(self.ledger, run, terms, self._opened)
        return encode({"kind": "ready"}, {})

    def _opened(self, parcel: np.ndarray, index: int, batch: str) -> bytes:
        if parcel.dtype != np.uint8 or parcel.ndim != 1:
            raise Refused("parcel: is none")
        return unwrapped(parcel.tobytes(), self.box, label(index, batch))


def digest_of_terms(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(dict(told))).hexdigest()


def main() -> None:
    """Serve one run, until the input closes."""
    with LocalShuffler(Path(sys.argv[1])) as shuffler:
        while data := read_frame(sys.stdin.buffer):
            write_frame(sys.stdout.buffer, shuffler.reply(data))


if __name__ == "__main__":
    main()
