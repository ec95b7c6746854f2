"""The shuffler: collects sealed messages, forgets their origin, releases them once, permuted.

It knows the silos by secret tokens and sees only ciphertexts of one size; the server sees the
released batch and learns neither origin nor order. A batch is released once, to the server only,
and only when the agreed number of messages from the agreed number of distinct silos is in.
Everything else is refused with a reason. The permutation comes from the operating system's
randomness.

As a process of its own it speaks frames over a localhost socket (4 bytes of length, then the
payload; no pickle). A request is one byte of kind, a 32-byte token, two bytes of name length, the
batch's name, and a body; an answer is b"+" and a body, or b"-" and a reason:

    O (server)  open a batch; body: JSON of the `Terms`
    S (silo)    submit; body: one sealed message
    R (server)  release; the answer's body is the sealed messages, one after the other

Start it with `python -m silodp.shuffle.shuffler` and one line of JSON on its standard input,
{"server": token, "silos": [token, ...], "least": {query: terms}} (tokens hexadecimal; the plan's terms,
which the server may not weaken); it prints its port and serves until its input closes.
"""

import json
import secrets
import socket
import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from silodp.shuffle.sealed import Refused

TOKEN = 32
_LARGEST_FRAME = 2**31


class Terms(NamedTuple):
    """What was agreed for a batch."""

    sealed_size: int  # bytes of every message
    messages: int  # fewest messages to release
    silos: int  # fewest distinct silos among their senders
    quota: int  # most messages of one silo


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
        self._token = token

    def __enter__(self) -> "ShufflerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open(self, name: str, terms: Terms) -> None:
        self._ask(b"O", name, json.dumps(terms._asdict()).encode())

    def submit(self, name: str, sealed: bytes) -> None:
        self._ask(b"S", name, sealed)

    def release(self, name: str, sealed_size: int) -> list[bytes]:
        body = self._ask(b"R", name, b"")
        return [body[start : start + sealed_size] for start in range(0, len(body), sealed_size)]

    def _ask(self, kind: bytes, name: str, body: bytes) -> bytes:
        encoded = name.encode()
        send_frame(self._socket, kind + self._token + len(encoded).to_bytes(2, "big") + encoded + body)
        answer = receive_frame(self._socket)
        if not answer:
            raise ConnectionError("the shuffler closed the connection")
        if answer[:1] == b"-":
            raise Refused(answer[1:].decode())
        return answer[1:]


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Four bytes of length, then the payload."""
    connection.sendall(len(payload).to_bytes(4, "big") + payload)


def receive_frame(connection: socket.socket) -> bytes:
    """The next payload; empty when the other side has closed."""
    header = _receive(connection, 4)
    length = int.from_bytes(header, "big")
    if length > _LARGEST_FRAME:
        raise ValueError(f"frame must have at most {_LARGEST_FRAME} bytes, not {length}")
    return _receive(connection, length) if header else b""


def _receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            if received:
                raise ConnectionError("the connection broke off inside a frame")
            return b""
        received += part
    return bytes(received)


def answer(shuffler: Shuffler, request: bytes) -> bytes:
    """One request frame to one answer frame; a bad request is refused, never fatal."""
    try:
        kind, token, name, body = _parse(request)
        if kind == b"S":
            shuffler.submit(token, name, body)
            return b"+"
        if kind == b"O":
            shuffler.open(token, name, _terms(body))
            return b"+"
        if kind == b"R":
            return b"+" + b"".join(shuffler.release(token, name))
        raise Refused(f"unknown kind of request {kind!r}")
    except Refused as reason:
        return b"-" + str(reason).encode()


def _parse(request: bytes) -> tuple[bytes, bytes, str, bytes]:
    token_end, name_start = 1 + TOKEN, 3 + TOKEN
    name_end = name_start + int.from_bytes(request[token_end:name_start], "big")
    if len(request) < name_start or len(request) < name_end:
        raise Refused("the request is cut off")
    try:
        name = request[name_start:name_end].decode()
    except UnicodeDecodeError as error:
        raise Refused("the batch's name is not UTF-8") from error
    return request[:1], request[1:token_end], name, request[name_end:]


def _terms(body: bytes) -> Terms:
    try:
        return Terms(**{name: int(value) for name, value in json.loads(body).items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"terms must be JSON with the fields {', '.join(Terms._fields)}") from error


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, shuffler: Shuffler):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shuffler, self.lock = shuffler, threading.Lock()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server  # type: ignore[assignment]

    def handle(self) -> None:
        while request := receive_frame(self.request):
            with self.server.lock:
                reply = answer(self.server.shuffler, request)
            send_frame(self.request, reply)


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
