"""The shuffler: collects sealed messages, forgets their origin, releases them once, permuted.

It knows the silos by secret tokens and sees only ciphertexts of one size; the server sees the released batch and learns
neither origin nor order. A batch is released once, to the server only, and only when the agreed number of messages from
the agreed number of distinct silos is in. Everything else is refused with a reason. The permutation comes from the
operating system's randomness.

As a process of its own it speaks the frames of silodp.deploy.wire over a localhost socket. A request's header has a
kind, the sender's token and the batch's name:

    open (server)     with the `Terms`
    submit (silo)     with sealed messages, one row each
    release (server)  answered by the sealed messages, one row each

Start it with `python -m silodp.deploy.shuffler` and one line of JSON on its standard input,
{"server": token, "silos": [token, ...], "least": {query: terms}} (tokens hexadecimal; the plan's terms, which the
server may not weaken); it prints its port and serves until its input closes. It needs no JAX.
"""

import json
import secrets
import socket
import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, cast

import numpy as np

from silodp.channels.sealed import Terms
from silodp.deploy.wire import decode, encode, read_frame, write_frame
from silodp.errors import Refused

TOKEN = 32


class _Collected:
    def __init__(self, terms: Terms):
        self.terms = terms
        self.sealed: set[bytes] = set()
        self.senders: Counter[bytes] = Counter()
        self.released = False


class Shuffler:
    """The rules of the shuffler, without any input or output."""

    def __init__(self, server: bytes, silos: Iterable[bytes], least: Mapping[str, Terms] | None = None):
        self._server, self._silos = server, frozenset(silos)
        self._least = dict(least or {})  # by query: what the plan says hides a record; the server may not ask for less
        self._batches: dict[str, _Collected] = {}

    def open(self, token: bytes, name: str, terms: Terms) -> None:
        """Announce a batch and its terms; they cannot change afterwards."""
        self._require_server(token)
        if name in self._batches:
            raise Refused(f"batch {name!r} exists already")
        if min(terms) < 1 or terms.silos > len(self._silos):
            raise Refused(f"terms must be positive and ask for at most {len(self._silos)} silos")
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
        if batch.senders[token] >= batch.terms.quota:
            raise Refused(f"over quota: this silo has sent its {batch.terms.quota} messages")
        batch.sealed.add(sealed)
        batch.senders[token] += 1

    def release(self, token: bytes, name: str) -> list[bytes]:
        """All messages of a batch in random order, once; afterwards only its name is remembered."""
        self._require_server(token)
        batch = self._batch(name)
        if batch.released:
            raise Refused(f"batch {name!r} has been released already")
        count, silos, terms = len(batch.sealed), len(batch.senders), batch.terms
        if count < terms.messages:
            raise Refused(f"too few messages: {count} of {terms.messages}")
        if silos < terms.silos:
            raise Refused(f"too few silos: {silos} of {terms.silos}")
        # Sorted first: a set's own order depends on the order of arrival.
        released = sorted(batch.sealed)
        secrets.SystemRandom().shuffle(released)
        batch.released = True
        batch.sealed, batch.senders = set(), Counter()
        return released

    def _check_agreed(self, name: str, terms: Terms) -> None:
        if not self._least:
            return
        least = self._least.get(name.rpartition("/")[2])
        if least is None:
            raise Refused(f"batch {name!r}: the plan has no such query")
        if terms.messages < least.messages or terms.silos < least.silos or terms.sealed_size != least.sealed_size:
            raise Refused(f"batch {name!r}: terms weaker than the plan's {least}")

    def _batch(self, name: str) -> _Collected:
        if name not in self._batches:
            raise Refused(f"unknown batch {name!r}")
        return self._batches[name]

    def _require_server(self, token: bytes) -> None:
        if not secrets.compare_digest(token, self._server):
            raise Refused("only the server may do this")


class ShufflerClient:
    """A silo's or the server's connection to the shuffler process."""

    def __init__(self, port: int, token: bytes):
        if len(token) != TOKEN:
            raise ValueError(f"token must have {TOKEN} bytes, not {len(token)}")
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._stream = cast(BinaryIO, self._socket.makefile("rwb"))
        self._token = token

    def __enter__(self) -> "ShufflerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def open(self, name: str, terms: Terms) -> None:
        self._ask({"kind": "open", "batch": name, "terms": terms._asdict()})

    def submit(self, name: str, sealed: Sequence[bytes]) -> None:
        self._ask({"kind": "submit", "batch": name}, {"sealed": rows(sealed)})

    def release(self, name: str, sealed_size: int) -> list[bytes]:
        released = self._ask({"kind": "release", "batch": name})["sealed"]
        if released.dtype != np.uint8 or released.ndim != 2 or released.shape[1] != sealed_size:
            raise Refused(f"batch {name!r}: the shuffler's answer is no batch of messages of {sealed_size} bytes")
        return [row.tobytes() for row in released]

    def _ask(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        write_frame(self._stream, encode(header | {"token": self._token.hex()}, dict(arrays or {})))
        answered = read_frame(self._stream)
        if not answered:
            raise ConnectionError("the shuffler closed the connection")
        header, arrays = decode(answered)
        if header.get("kind") == "refused":
            raise Refused(str(header.get("reason")))
        return dict(arrays)


def rows(sealed: Sequence[bytes]) -> np.ndarray:
    """Messages of one size as rows of bytes."""
    if len({len(message) for message in sealed}) > 1:
        raise ValueError("sealed messages must all have one size")
    return np.frombuffer(b"".join(sealed), np.uint8).reshape(len(sealed), -1 if sealed else 0)


def answer(shuffler: Shuffler, request: bytes) -> bytes:
    """One request frame to one answer frame; a bad request is refused, never fatal."""
    try:
        header, arrays = decode(request)
        kind, name, token = header.get("kind"), str(header.get("batch")), bytes.fromhex(str(header.get("token")))
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
        return Terms(**{name: int(value) for name, value in told.items()})
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise Refused(f"terms must be an object with the fields {', '.join(Terms._fields)}") from error


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, shuffler: Shuffler):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shuffler, self.lock = shuffler, threading.Lock()


class _Handler(socketserver.StreamRequestHandler):
    server: _Server  # type: ignore[assignment]

    def handle(self) -> None:
        while request := read_frame(cast(BinaryIO, self.rfile)):
            with self.server.lock:
                reply = answer(self.server.shuffler, request)
            write_frame(cast(BinaryIO, self.wfile), reply)


def main() -> None:
    """Serve one run: parties from the first input line, the port on standard output."""
    parties = json.loads(sys.stdin.readline())
    silos = [bytes.fromhex(token) for token in parties["silos"]]
    least = {query: Terms(**terms) for query, terms in parties.get("least", {}).items()}
    with _Server(Shuffler(bytes.fromhex(parties["server"]), silos, least)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()  # the parent closes our input when the run is over
        server.shutdown()


if __name__ == "__main__":
    main()
