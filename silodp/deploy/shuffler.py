"""The shuffler: collects sealed messages, forgets their origin, releases them once, permuted.

It knows the silos by secret tokens and sees only ciphertexts of one size; the server sees the released batch and learns
neither origin nor order. A batch is released once, to the server only, and only when every silo of the batch has sent
its whole share: one silo cannot fill the place of others. Everything else is refused with a reason. The permutation
comes from the operating system's randomness.

As a process of its own it speaks the frames of silodp.deploy.wire over a localhost socket. A party sends its token
first: nothing else is read before that, and a stranger is sent away. Then requests; a header has a kind and the batch's
name:

    open (server)     with the `Terms`
    submit (silo)     with sealed messages, one row each
    release (server)  answered by the sealed messages, one row each

Start it with `python -m silodp.deploy.shuffler` and one line of JSON on its standard input,
{"server": token, "silos": [token, ...], "agreed": {query: terms}} (tokens hexadecimal; the plan's terms, which the
server may not change); it prints its port and serves until its input closes. It needs no JAX. Between machines the
shuffler is a site: silodp.deploy.mixer.
"""

from __future__ import annotations

import json
import secrets
import socket
import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from silodp.channels.sealed import Terms
from silodp.deploy.wire import decode, encode, put_frame, take_bytes, take_frame
from silodp.errors import Refused

TOKEN = 32
HELLO, IDLE, FRAME = 5.0, 86_400.0, 60.0  # seconds: for a token, between requests, for a frame
STRANGERS = 16  # connections beside those of the parties
HEADER = 1 << 16  # bytes of a request beside its messages
UNFINISHED = 64  # batches that may be open at a time


class _Collected:
    def __init__(self, terms: Terms):
        self.terms = terms
        self.sealed: set[bytes] = set()
        self.senders: Counter[bytes] = Counter()
        self.released = False


class Shuffler:
    """The rules of the shuffler, without any input or output. `agreed`: the plan's terms, by query."""

    def __init__(self, server: bytes, silos: Sequence[bytes], agreed: Mapping[str, Terms] | None = None):
        self._server, self._silos = server, list(silos)
        self._agreed = dict(agreed or {})
        self._batches: dict[str, _Collected] = {}

    def knows(self, token: bytes) -> bool:
        return any(secrets.compare_digest(token, own) for own in (self._server, *self._silos))

    def open(self, token: bytes, name: str, terms: Terms) -> None:
        """Announce a batch and its terms; they cannot change afterwards."""
        self._require_server(token)
        if name in self._batches:
            raise Refused(f"batch {name!r} exists already")
        if len(terms.shares) != len(self._silos) or terms.sealed_size < 1 or max(terms.shares) < 1:
            raise Refused(f"terms must be positive, with a share for each of {len(self._silos)} silos")
        if sum(not batch.released for batch in self._batches.values()) >= UNFINISHED:
            raise Refused("too many batches are open")
        self._check_agreed(name, terms)
        self._batches[name] = _Collected(terms)

    def submit(self, token: bytes, name: str, sealed: bytes) -> None:
        """Take one sealed message of a silo."""
        if token not in self._silos:
            raise Refused("unknown silo")
        batch = self._batch(name)
        if batch.released:
            raise Refused(f"late: batch {name!r} has been released")
        if len(sealed) != batch.terms.sealed_size:
            raise Refused(f"wrong size: {len(sealed)} bytes instead of {batch.terms.sealed_size}")
        if sealed in batch.sealed:
            raise Refused("duplicate")
        share = batch.terms.shares[self._silos.index(token)]
        if batch.senders[token] >= share:
            raise Refused(f"over its share: this silo has sent its {share} messages")
        batch.sealed.add(sealed)
        batch.senders[token] += 1

    def release(self, token: bytes, name: str) -> list[bytes]:
        """All messages of a batch in random order, once; afterwards only its name is remembered."""
        self._require_server(token)
        batch = self._batch(name)
        if batch.released:
            raise Refused(f"batch {name!r} has been released already")
        wanted = dict(zip(self._silos, batch.terms.shares, strict=True))
        late = sum(batch.senders[silo] < share for silo, share in wanted.items())
        if late:
            raise Refused(f"not whole: {late} of {batch.terms.silos} silos have not sent their whole share")
        released = permuted(batch.sealed)
        batch.released = True
        batch.sealed, batch.senders = set(), Counter()
        return released

    def _check_agreed(self, name: str, terms: Terms) -> None:
        if not self._agreed:
            return
        agreed = self._agreed.get(name.rpartition("/")[2])
        if agreed is None:
            raise Refused(f"batch {name!r}: the plan has no such query")
        if not agreed.allow(terms):
            raise Refused(f"batch {name!r}: terms other than the plan's {agreed}")

    def _batch(self, name: str) -> _Collected:
        if name not in self._batches:
            raise Refused(f"unknown batch {name!r}")
        return self._batches[name]

    def _require_server(self, token: bytes) -> None:
        if not secrets.compare_digest(token, self._server):
            raise Refused("only the server may do this")


def permuted(sealed: set[bytes]) -> list[bytes]:
    # Sorted first: a set's own order depends on the order of arrival.
    released = sorted(sealed)
    secrets.SystemRandom().shuffle(released)
    return released


class ShufflerClient:
    """A silo's or the server's connection to the shuffler process."""

    def __init__(self, port: int, token: bytes, patience: float = 600.0):
        if len(token) != TOKEN:
            raise ValueError(f"token must have {TOKEN} bytes, not {len(token)}")
        self._socket, self._patience = socket.create_connection(("127.0.0.1", port), patience), patience
        self._socket.sendall(token)
        self._socket.setblocking(False)

    def __enter__(self) -> ShufflerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open(self, name: str, terms: Terms) -> None:
        self._ask({"kind": "open", "batch": name, "terms": terms._asdict()})

    def submit(self, name: str, sealed: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Nothing is left for the answer to the server to carry."""
        self._ask({"kind": "submit", "batch": name}, {"sealed": rows(sealed)})
        return {}

    def release(self, name: str, sealed_size: int, carried: Sequence[Mapping[str, np.ndarray]] = ()) -> list[bytes]:
        return split(self._ask({"kind": "release", "batch": name}).get("sealed"), name, sealed_size)

    def _ask(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        put_frame(self._socket.fileno(), encode(header, dict(arrays or {})), self._patience)
        answered = take_frame(self._socket.fileno(), self._patience)
        if not answered:
            raise ConnectionError("the shuffler closed the connection")
        header, arrays = decode(answered)
        if header.get("kind") == "refused":
            raise Refused(str(header.get("reason")))
        return dict(arrays)


def split(released: np.ndarray | None, name: str, sealed_size: int) -> list[bytes]:
    """The messages that a shuffler has released."""
    if released is None or released.dtype != np.uint8 or released.ndim != 2 or released.shape[1] != sealed_size:
        raise Refused(f"batch {name!r}: the shuffler's answer is no batch of messages of {sealed_size} bytes")
    return [row.tobytes() for row in released]


def rows(sealed: Sequence[bytes]) -> np.ndarray:
    """Messages of one size as rows of bytes."""
    if len({len(message) for message in sealed}) > 1:
        raise ValueError("sealed messages must all have one size")
    return np.frombuffer(b"".join(sealed), np.uint8).reshape(len(sealed), -1 if sealed else 0)


def answer(shuffler: Shuffler, token: bytes, request: bytes) -> bytes:
    """One request frame to one answer frame; a bad request is refused, never fatal."""
    try:
        header, arrays = decode(request)
        kind, name = header.get("kind"), str(header.get("batch"))
        if kind == "submit":
            for sealed in submitted(arrays):
                shuffler.submit(token, name, sealed)
            return encode({"kind": "done"}, {})
        if kind == "open":
            shuffler.open(token, name, terms_of(header.get("terms")))
            return encode({"kind": "done"}, {})
        if kind == "release":
            return encode({"kind": "released"}, {"sealed": rows(shuffler.release(token, name))})
        raise Refused(f"unknown kind of request {kind!r}")
    except ValueError as reason:
        return encode({"kind": "refused", "reason": str(reason)}, {})


def submitted(arrays: Mapping[str, np.ndarray]) -> list[bytes]:
    sealed = arrays.get("sealed")
    if sealed is None or sealed.dtype != np.uint8 or sealed.ndim != 2:
        raise Refused("submit: sealed messages must be rows of bytes")
    return [row.tobytes() for row in sealed]


def terms_of(told: Any) -> Terms:
    try:
        shares = tuple(int(share) for share in told["shares"])
        terms = Terms(**{**told, "shares": shares})
        if min(shares) < 0 or not all(type(each) is int for each in (terms.sealed_size, terms.silos)):
            raise ValueError("a number is none")
        return terms
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Refused(f"terms must be an object with the fields {', '.join(Terms._fields)}") from error


def longest_request(agreed: Mapping[str, Terms]) -> int:
    """A silo's whole share is the longest that anybody has to say."""
    return HEADER + max(terms.sealed_size * max(terms.shares) for terms in agreed.values())


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, shuffler: Shuffler, parties: int, longest: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shuffler, self.longest, self.lock = shuffler, longest, threading.Lock()
        self.slots = threading.Semaphore(parties + STRANGERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server  # type: ignore[assignment]

    def handle(self) -> None:
        self.request.setblocking(False)
        descriptor = self.request.fileno()
        try:
            token = take_bytes(descriptor, TOKEN, HELLO)
            if not self.server.shuffler.knows(token):
                return
            while request := take_frame(descriptor, FRAME, self.server.longest, IDLE):
                with self.server.lock:
                    reply = answer(self.server.shuffler, token, request)
                put_frame(descriptor, reply, FRAME)
        except (Refused, OSError):  # a frame that is none, or a peer that went away: the connection ends, no more
            return


def main() -> None:
    """Serve one run: parties from the first input line, the port on standard output."""
    parties = json.loads(sys.stdin.readline())
    silos = [bytes.fromhex(token) for token in parties["silos"]]
    agreed = {query: terms_of(terms) for query, terms in parties["agreed"].items()}
    shuffler = Shuffler(bytes.fromhex(parties["server"]), silos, agreed)
    with _Server(shuffler, 1 + len(silos), longest_request(agreed)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()  # the parent closes our input when the run is over
        server.shutdown()


if __name__ == "__main__":
    main()
