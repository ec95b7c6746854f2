"""Malformed input on purpose: `python -m tests.fuzz [COUNT]`, or `make fuzz`.

Frames, plans, answers, statements and tables. Whatever comes, a party refuses it in one line or takes it. A case that
ends in any other error, or takes long to compute, is printed with its number; the number gives the same case again.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import signal
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from silodp.config import DataConfig
from silodp.data.frames import read_checked
from silodp.data.load import read_data
from silodp.data.schema import Schema
from silodp.deploy import signing
from silodp.deploy.approval import screen
from silodp.deploy.certify import certificate_of, verified
from silodp.deploy.coordinator import checked
from silodp.deploy.document import Document, told_facts
from silodp.deploy.policy import SENTENCES, read_policy
from silodp.deploy.silo import SiloServer
from silodp.deploy.silo_process import reply
from silodp.deploy.sites import read_records
from silodp.deploy.wire import decode, encode, plain
from silodp.errors import ConfigError, Refused, one_line
from tests.guards import SCHEMA, X0, Federation

SECONDS = 20.0  # of computing, for one case
JUNK = [b"1e999", b"NaN", b"-1", b"null", b"[]", b'"', b"{", b"\xff", b"99999999999999", b"\x1b[2J", b"\x00", b"\n"]
VALUES: list[Any] = [
    None, True, -1, 0, 3, 2**70, 10**400, 1e308, -1e-300, float("nan"), float("inf"), "", "code:interact", "\x1b[2J",
    "a" * 5000, [], [[]], {}, {"kind": "x"}, "north", "untrusted", [1, 2, 3], "0" * 64,
]  # fmt: skip
REFUSED = (ConfigError, Refused, OSError)


class Hung(BaseException):
    """A case that takes too long."""


def mutated(data: bytes, chosen: random.Random) -> bytes:
    """Bits flipped, pieces cut, repeated, moved or replaced by junk."""
    out = bytearray(data)
    for _ in range(chosen.randrange(1, 6)):
        at, kind = chosen.randrange(len(out) + 1), chosen.randrange(5)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            del out[at : at + chosen.randrange(1, 20)]
        elif kind == 2:
            out[at:at] = out[max(0, at - chosen.randrange(1, 20)) : at]
        elif kind == 3:
            out[at:at] = chosen.randbytes(chosen.randrange(1, 9))
        else:
            out[at:at] = chosen.choice(JUNK)
    return bytes(out)


def grown(tree: Any, chosen: random.Random) -> Any:
    """The tree with one or two of its values replaced, removed or renamed: still JSON, so that it gets further."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chosen.randrange(1, 3)):
        place = tree
        while isinstance(place, dict | list) and place:
            key = chosen.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner: Any = place[key]  # pyright: ignore
            if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.15:
                break
            place = inner
        if not isinstance(place, dict | list) or not place:
            continue
        what = chosen.random()
        if what < 0.15:
            del place[key]  # pyright: ignore
        elif what < 0.25 and isinstance(place, dict):
            place[str(chosen.choice(VALUES))[:20]] = place.pop(key)  # pyright: ignore
        else:
            place[key] = deepcopy(chosen.choice(VALUES))  # pyright: ignore
    return tree


class Targets:
    """What is fed, and to whom."""

    def __init__(self, root: Path):
        self.root, self.sites = root, Federation(root / "sites")
        self.document = self.sites.document()
        self.plan = signing.canonical(self.document.tree)
        approvals = self.sites.approve(self.document)
        opening = {"kind": "plan", "document": self.plan.decode(), "approvals": approvals}
        assert decode(self.sites.rpc("north", encode(opening, {})))[0]["kind"] == "ready"
        ask = {"kind": "ask", "run": self.document.run, "query": "value", "round": 0}
        start, keys = {"kind": "start", "run": self.document.run}, {"kind": "keys", "keys": ["00"], "signatures": []}
        ending = {"kind": "certificate", "run": self.document.run, "model": "00" * 32}
        self.headers = [opening, ask, start, keys, ending, {"kind": "leave", "stage": "whiten", "run": ask["run"]}]
        setup = {"plan": self.document.tree["plan"], "index": 0, "seed": None, "shuffler": None}
        folder = self.sites.folders["north"]
        self.silo: SiloServer | None = SiloServer(setup, read_records(read_policy(folder), folder).named())
        guard, facts = self.sites.guard("north"), self.sites.roster[0]["body"]
        certificate = certificate_of(guard.policy, guard.key, guard.ledger, self.document, "00" * 32)["body"]
        self.told: list[tuple[str, Any, Callable[[Any], Any]]] = [
            ("facts", facts, told_facts),
            ("certificate", certificate, lambda tree: verified([tree])),
            ("certificate", certificate, lambda tree: verified([tree], self.document)),
        ]
        self.answer = {"kind": "answer", "facts": {"gradients": 3.0, "step": 0.5, "stream": "value", "records": 20.0}}
        table = pd.DataFrame(
            {"age": range(20, 29), "dose": np.linspace(0, 9, 9), "outcome": ["well", "ill", "ill"] * 3}
        )
        table.to_csv(root / "t.csv", index=False)
        table.to_parquet(root / "t.parquet")
        np.savez(root / "t.npz", X=np.ones((4, 2)), y=np.arange(4) % 2)
        (root / "t.svm").write_text("1 1:0.5 3:1\n0 2:1\n1 1:2\n")
        (root / "t.csv.gz").write_bytes(gzip.compress((root / "t.csv").read_bytes()))
        self.tables = {name: (root / f"t.{name}").read_bytes() for name in ("csv", "parquet", "npz", "svm", "csv.gz")}
        (root / "schema.toml").write_text(SCHEMA)
        self.schema = Schema.read(root / "schema.toml")

    def frame(self, chosen: random.Random) -> bytes:
        """A message to a guard or a silo: with wrong bytes, or well formed with wrong contents."""
        header = chosen.choice(self.headers)
        if chosen.random() < 0.5:
            return mutated(encode(header, {"0": X0}), chosen)
        shape = chosen.choice([(3,), (0,), (3, 3), (1,)])
        array = np.full(shape, chosen.choice([0.0, np.nan, 1e38]), chosen.choice(["<f4", "<f8", "<i4", "<f2", "|u1"]))
        return encode(grown(header, chosen), {chosen.choice(["0", "1", "x0", "released"]): array})

    def to_guard(self, chosen: random.Random) -> None:
        told = decode(self.sites.rpc("north", self.frame(chosen)))[0]
        if told["kind"] == "refused":
            assert told["reason"] == SENTENCES[told["code"]] and told["code"] != "fault", told
            raise Refused(told["reason"])

    def to_silo(self, chosen: random.Random) -> None:
        self.silo, answer = reply(self.silo, self.frame(chosen))
        told = decode(answer)[0]
        if told["kind"] == "refused":
            assert "in this silo" not in told["reason"], told
            raise Refused(plain(told["reason"]))  # as a server shows it

    def to_server(self, chosen: random.Random) -> None:
        data = encode(self.answer, {"value": X0})
        header = mutated(data, chosen) if chosen.random() < 0.5 else encode(grown(self.answer, chosen), {"value": X0})
        checked(decode(header), {"stream": "value", "parameters": 3, "records": 20.0})

    def plans(self, chosen: random.Random) -> None:
        """What an operator was sent, as far as the screen that asks for approval."""
        data = mutated(self.plan, chosen) if chosen.random() < 0.3 else dumped(grown(self.document.tree, chosen))
        screen(self.sites.folders["north"], Document(signing.read_document(data)))

    def statements(self, chosen: random.Random) -> None:
        """Of a site that has its key: it signs what it likes. Or with bytes that were changed on the way."""
        purpose, body, read = chosen.choice(self.told)
        statement = self.sites.keys["north"].signed(purpose, grown(body, chosen))
        data = dumped(statement)
        read(signing.read_document(mutated(data, chosen) if chosen.random() < 0.3 else data))

    def table(self, chosen: random.Random) -> None:
        ending = chosen.choice(list(self.tables))
        file = self.root / f"case.{ending}"
        file.write_bytes(mutated(self.tables[ending], chosen))
        if "csv" in ending and chosen.random() < 0.5:
            read_checked(self.schema, [file])
        target = {"target": "outcome"} if ending in ("csv", "parquet", "csv.gz") else {}
        read_data(DataConfig(source=str(file), silos=1, **target))

    def archive(self, chosen: random.Random) -> None:
        """npz whose headers lie: sizes, types, encryption, bombs."""
        words = [
            b"'<f8'",
            b"'|O'",
            b"'<f4'",
            b"'<U9999999'",
            b"False",
            b"True",
            b"(4, 2)",
            b"(4000000000000, 2)",
            b"(-1,)",
        ]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in chosen.choice([("X", "y"), ("X",), ("X", "y", "y"), ("../X", "y")]):
                shape = b"{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n" % tuple(
                    chosen.choice(words) for _ in "123"
                )
                size = len(shape).to_bytes(2, "little")
                body = bytes(chosen.choice([0, 64, 4_000_000]))
                archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + size + shape + body)
        data = buffer.getvalue()
        file = self.root / "case.npz"
        file.write_bytes(mutated(data, chosen) if chosen.random() < 0.5 else data)
        read_data(DataConfig(source=str(file), silos=1))


def dumped(tree: Any) -> bytes:
    return json.dumps(tree).encode()


KINDS: dict[str, tuple[Callable[[Targets, random.Random], None], float]] = {  # with its share of the cases
    "frames to a guard": (Targets.to_guard, 0.25),
    "frames to a silo": (Targets.to_silo, 0.15),
    "answers to a server": (Targets.to_server, 0.2),
    "plans": (Targets.plans, 0.1),
    "statements": (Targets.statements, 0.1),
    "tables": (Targets.table, 0.15),
    "archives": (Targets.archive, 0.05),
}


@contextmanager
def in_time() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(targets: Targets, name: str, number: int) -> str:
    """One case: taken, refused, or how it failed."""
    try:
        with in_time():
            KINDS[name][0](targets, random.Random(f"{name} {number}"))
    except REFUSED as error:
        shown = one_line(error)
        return "refused" if shown.isprintable() and len(shown) < 2000 else f"no line for a terminal: {shown[:200]!r}"
    except Hung:
        return "hung"
    except Exception as error:  # what the table counts as failed
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "taken"


def fuzz(root: Path, count: int, first: int = 0) -> tuple[Counter[tuple[str, str]], list[str]]:
    """So many cases, divided among the kinds: what became of them, and those that failed."""
    targets, counts, failed = Targets(root), Counter[tuple[str, str]](), list[str]()
    for name, (_, share) in KINDS.items():
        for number in range(first, first + max(1, round(share * count))):
            outcome = attempt(targets, name, number)
            known = outcome in ("taken", "refused", "hung")
            counts[name, outcome if known else "failed"] += 1
            failed += [] if outcome in ("taken", "refused") else [f"{name} {number}: {outcome}"]
    targets.sites.close()
    return counts, failed


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        counts, failed = fuzz(Path(folder), count)
    width, outcomes = max(map(len, KINDS)), ("taken", "refused", "failed", "hung")
    print(" ".join(["".ljust(width), *(outcome.rjust(8) for outcome in outcomes)]))
    for name in KINDS:
        print(" ".join([name.ljust(width), *(f"{counts[name, outcome]:8d}" for outcome in outcomes)]))
    print(f"{sum(counts.values())} cases")
    print("\n".join(failed[:40]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
