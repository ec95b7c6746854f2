"""The shuffler in a message run: a process of its own between the silos and the server.

A silo seals each record's message to the server's key and hands it to the shuffler; the server is told how many were
sent, asks the shuffler to release the round's batch, and opens it. Neither sees what the other does.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import IO, Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from silodp.build import Assembled
from silodp.channels.shuffled import message_bytes, message_vector, sealed_size
from silodp.privacy.plan import LOCAL
from silodp.run.wire import WireError
from silodp.shuffle.sealed import Batch, open_batch, seal
from silodp.shuffle.shuffler import TOKEN, ShufflerClient, Terms


def agreed_terms(parts: Assembled) -> dict[str, Terms]:
    """What the plan says hides a record, by query: no batch with fewer messages or silos may be released."""
    sizes, options = parts.facts.sizes, parts.config.algorithm
    size, silos = sealed_size(parts.objective.parameters), options.participation or len(sizes)

    def terms(divisors: list[int]) -> Terms:
        return Terms(size, sum(sorted(divisors)[:silos]), silos, max(divisors))

    sent = {s.name: [round(s.batch.divisor(n)) for n in sizes] for s in parts.releases(0) if s.name != LOCAL}
    streams = {query: parts.algorithm.stream_of(query) for query in parts.queries}
    return {query: terms(sent[stream]) for query, stream in streams.items() if stream in sent}


class ShufflerProcess(AbstractContextManager["ShufflerProcess"]):
    """Started here for a local message run; closing its stdin ends it."""

    def __init__(self, silos: int, least: Mapping[str, Terms]) -> None:
        command = [sys.executable, "-m", "silodp.shuffle.shuffler"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tokens = [secrets.token_bytes(TOKEN) for _ in range(silos)]
        server = secrets.token_bytes(TOKEN)
        agreed = {query: terms._asdict() for query, terms in least.items()}
        parties = {"server": server.hex(), "silos": [token.hex() for token in self.tokens], "least": agreed}
        stdin = cast(IO[str], self.process.stdin)
        stdin.write(json.dumps(parties) + "\n")
        stdin.flush()
        self.port = int(cast(IO[str], self.process.stdout).readline())
        self.key = X25519PrivateKey.generate()
        self.client = ShufflerClient(self.port, server)

    def invitation(self, silo: int) -> dict[str, Any]:
        """What a silo needs to know to send."""
        public = self.key.public_key().public_bytes_raw()
        return {"port": self.port, "token": self.tokens[silo].hex(), "server_key": public.hex()}

    def open(self, round: int, query: str, parameters: int, sent: list[int]) -> Batch:
        """Announce a batch: at least all agreed messages, from every silo of the round."""
        batch = batch_of(round, query, parameters)
        self.client.open(batch.name, Terms(batch.sealed_size, sum(sent), len(sent), max(sent)))
        return batch

    def collect(self, batch: Batch) -> tuple[np.ndarray, int]:
        """The mean of the released messages and the bits they took; a refused message is an error."""
        sealed = self.client.release(batch.name, batch.sealed_size)
        opened = open_batch(sealed, self.key, batch)
        if opened.refused:
            raise WireError(f"batch {batch.name}: {len(opened.refused)} messages refused ({opened.refused[0]})")
        vectors = [message_vector(message, batch.message_size // 4) for message in opened.messages]
        mean = np.asarray(np.mean(vectors, axis=0, dtype=np.float64), np.float32)
        return mean, 8 * sum(map(len, sealed))

    def __exit__(self, *exc: object) -> None:
        self.client.__exit__()
        cast(IO[str], self.process.stdin).close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Courier:
    """A silo's way to the shuffler."""

    def __init__(self, invitation: dict[str, Any]):
        self.client = ShufflerClient(invitation["port"], bytes.fromhex(invitation["token"]))
        self.key = X25519PublicKey.from_public_bytes(bytes.fromhex(invitation["server_key"]))

    def deliver(self, round: int, query: str, messages: np.ndarray) -> None:
        batch = batch_of(round, query, messages.shape[1])
        for message in messages:
            self.client.submit(batch.name, seal(message_bytes(message), self.key, batch))


def batch_of(round: int, query: str, parameters: int) -> Batch:
    return Batch(round, f"{round}/{query}", 4 * parameters)
