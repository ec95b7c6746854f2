"""Faults and malformed input: a short round of what `make faults` and `make test-all` do at length."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from silodp.data import load_data
from silodp.data.frames import read_frame
from silodp.deploy import signing
from silodp.deploy.certify import verified
from silodp.deploy.coordinator import checked
from silodp.deploy.document import Document, told_facts
from silodp.deploy.policy import SENTENCES
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError, Refused
from tests.faults.network import BROKEN, Network, faults, inject
from tests.guards import X0, Federation


def test_no_fault_loses_or_doubles_a_release(tmp_path):
    counts = inject(tmp_path, 4, 3, Counter(), rounds=4)
    assert faults(counts) >= 4
    assert {name: counts[name] for name in BROKEN} == dict.fromkeys(BROKEN, 0)
    assert counts["finished"] == counts["runs"] >= 1


@pytest.mark.slow
def test_a_thousand_faults(tmp_path):
    counts = inject(tmp_path, 1000, 4, Counter())
    assert {name: counts[name] for name in BROKEN} == dict.fromkeys(BROKEN, 0)
    assert counts["finished"] == counts["runs"]


def test_the_harness_notices_a_guard_that_answers_twice(tmp_path, monkeypatch):
    """A ledger that forgets its answers, and a silo that forgets its questions, would draw the noise again."""
    monkeypatch.setattr("silodp.deploy.silo.SiloServer._check_fresh", lambda *_: None)
    monkeypatch.setattr("silodp.deploy.desk.Desk._asked", lambda self, header: self.asked)
    monkeypatch.setattr("silodp.deploy.silo.SiloServer._check_budget", lambda *_: None)
    monkeypatch.setattr("silodp.deploy.vouch.Vouch.check_same", lambda *_: {})
    network = Network(tmp_path, 1, Counter())
    sites, document = network.sites, network.sites.document()
    network.number = document.run
    assert sites.open("north", document, sites.approve(document))["kind"] == "ready"
    question = encode({"kind": "ask", "run": document.run, "query": "value", "round": 0}, {"0": X0})
    for _ in range(2):
        network.compare("north", question, sites.rpc("north", question))
    network.check("north")
    assert not sum(network.counts.values())
    ledger = sites.guard("north").ledger
    ledger.db.execute("delete from answer")
    network.compare("north", question, sites.rpc("north", question))
    assert network.counts["two answers to one question"] == 1, ledger.refusals()
    network.check("north")
    assert network.counts["lost"] == 1
    sites.close()


# --- fuzzing -----------------------------------------------------------------------------------------------------


JUNK = [b"1e999", b"NaN", b"-1", b"null", b"[]", b'"', b"{", b"\xff", b"99999999999999"]


def mutated(data: bytes, chosen: random.Random) -> bytes:
    """Bits flipped, pieces cut, repeated or replaced by junk."""
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
            out[at:at] = os.urandom(chosen.randrange(1, 9))
        else:
            out[at:at] = chosen.choice(
                [b"1e999", b"NaN", b"-1", b"null", b"[]", b'"', b"{", b"\xff", b"99999999999999"]
            )
    return bytes(out)


def fuzz(sites: Federation, count: int, seed: int) -> None:
    """Frames and plans to a guard, answers to a server, statements to anybody: refused, never anything else."""
    chosen, document = random.Random(seed), sites.document()
    plan = signing.canonical(document.tree)
    header = {"kind": "plan", "document": plan.decode(), "approvals": []}
    frames = [encode(header, {}), encode({"kind": "ask", "run": "0" * 32, "query": "value", "round": 0}, {"0": X0})]
    answer = encode({"kind": "answer", "facts": {"gradients": 3.0, "step": 0.5, "stream": "value"}}, {"value": X0})
    facts = json.dumps(sites.roster[0]).encode()
    expected = {"stream": "value", "parameters": 3, "records": 20.0}
    for _ in range(count):
        told = decode(sites.rpc("north", mutated(chosen.choice(frames), chosen)))[0]
        assert told["kind"] == "refused" and told["reason"] == SENTENCES[told["code"]]
        for data, read in (
            (answer, lambda data: checked(decode(data), expected)),
            (plan, lambda data: Document(signing.read_document(data)).fingerprint),
            (facts, lambda data: told_facts(signing.read_document(data))),
            (facts, lambda data: verified([signing.read_document(data)])),
        ):
            try:
                read(mutated(data, chosen))
            except (Refused, ConfigError):
                continue


def test_fuzzed_messages_are_refused(tmp_path):
    sites = Federation(tmp_path)
    fuzz(sites, 60, 5)
    sites.close()


@pytest.mark.slow
def test_twenty_thousand_fuzzed_messages_are_refused(tmp_path):
    sites = Federation(tmp_path)
    fuzz(sites, 4000, 6)  # five cases each
    sites.close()


def npz(folder: Path, change: Any) -> Path:
    buffer = io.BytesIO()
    np.savez(buffer, features=np.ones((4, 2)), targets=np.arange(4))
    file = folder / "data.npz"
    file.write_bytes(change(buffer.getvalue()))
    return file


def encrypted(data: bytes) -> bytes:
    """The bit that says that a member is encrypted, in both of its headers."""
    out = bytearray(data)
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = out.find(mark)
        out[at + place] |= 1
    return bytes(out)


def huge_shape(data: bytes) -> bytes:
    shape = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 1), }"
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape) + 1) + shape + b"\n" + bytes(8)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("features.npy", body)
        archive.writestr("targets.npy", body)
    return buffer.getvalue()


def test_known_bad_files_are_one_line_errors(tmp_path):
    """LIBSVM with an index beyond memory, archives that lie, a Parquet file that is none, two columns of one name."""
    svm = tmp_path / "data.svm"
    svm.write_text("1 99999999999:1\n0 1:1\n")
    bad: list[Any] = [svm, npz(tmp_path, encrypted)]
    (tmp_path / "twice.csv").write_text("a,a,y\n1,2,0\n3,4,1\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + os.urandom(100) + struct.pack("<I", 2**31 - 1) + b"PAR1")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"a,y\n" + b"1,0\n" * 1000)[:-9])
    bad += [tmp_path / name for name in ("twice.csv", "bad.parquet", "cut.csv.gz")]
    for file in bad:
        with pytest.raises(ValueError) as caught:
            load_data(str(file), target="y" if file.suffix != ".npz" else None, silos=1)
        assert "\n" not in str(caught.value).strip() and file.name in str(caught.value), caught.value
    huge = npz(tmp_path, huge_shape)
    with pytest.raises(ValueError) as caught:
        load_data(str(huge), silos=1)
    assert huge.name in str(caught.value)


def read_any(path: Path) -> None:
    try:
        read_frame(path)
        load_data(str(path), target="y", silos=1)
    except (ValueError, OSError):
        return


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_fuzzed_tables_are_read_or_refused(tmp_path, count):
    chosen = random.Random(7)
    table = pd.DataFrame({"a": range(9), "b": np.linspace(0, 1, 9), "y": [0, 1, 0] * 3})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    good = {ending: (tmp_path / f"t.{ending}").read_bytes() for ending in ("csv", "parquet")}
    for i in range(count):
        ending = chosen.choice(list(good))
        file = tmp_path / f"{i}.{ending}"
        file.write_bytes(mutated(good[ending], chosen))
        read_any(file)
