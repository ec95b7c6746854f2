"""Faults between real processes and malformed input: a part of what `make faults` and `make fuzz` try."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silodp.data import load_data
from silodp.deploy.wire import encode
from tests.faults.network import BROKEN, KINDS, Network, faults, inject
from tests.faults.pipes import KINDS as PIPED
from tests.faults.pipes import Pipes
from tests.fuzz import fuzz
from tests.guards import X0


def check_none(counts: Counter[str]) -> None:
    assert {name: counts[name] for name in BROKEN} == dict.fromkeys(BROKEN, 0)
    assert counts["finished"] == counts["runs"] >= 1


def test_no_fault_loses_or_doubles_a_release(tmp_path):
    """A short round between real processes. Whatever hangs is told after minutes: nobody waits for ever."""
    counts = inject(tmp_path, 1, 3, Counter(), rounds=2, longest=300.0)
    assert faults(counts) >= 1
    check_none(counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_faults(tmp_path, kind):
    check_none(inject(tmp_path, 1000 // len(KINDS) + 1, 4, Counter(), kind))


@pytest.mark.slow
def test_a_run_over_the_engine_survives_its_processes(tmp_path):
    pytest.importorskip("nvflare")
    from tests.faults.engine import Engine

    counts = Counter[str]()
    Engine(tmp_path, 1, counts).run(12)
    assert faults(counts) >= 1
    check_none(counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PIPED)
def test_a_message_run_survives_its_processes(tmp_path, kind):
    counts = Counter[str]()
    Pipes(tmp_path, kind, 1, counts).run(3)
    assert faults(counts) >= 1
    check_none(counts)


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


# --- malformed input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [250, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore:.*encountered in cast")
def test_malformed_input_is_taken_or_refused_in_one_line(tmp_path, count):
    counts, failed = fuzz(tmp_path, count)
    assert not failed, failed[:20]
    assert sum(counts.values()) >= count * 0.99
    assert all(counts[name, "refused"] for name in ("answers to a server", "plans", "statements", "tables", "archives"))


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


def bombs(folder: Path) -> list[Path]:
    """Files that unpack to a thousand times their size."""
    (folder / "bomb.csv.gz").write_bytes(gzip.compress(b"a,y\n" + b"1,0\n" * (1 << 18)))
    rows = pa.table({"a": pa.DictionaryArray.from_arrays(pa.array(np.zeros(1 << 20, np.int8)), ["x"])})
    pq.write_table(rows, folder / "bomb.parquet")
    np.savez_compressed(folder / "bomb.npz", X=np.zeros((1 << 18, 1)), y=np.zeros(1 << 18))
    return [folder / f"bomb.{ending}" for ending in ("csv.gz", "parquet", "npz")]


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("silodp.data.frames.SMALL", 1 << 12)  # what is not larger may be packed anyhow
    for bomb in bombs(tmp_path):
        with pytest.raises(ValueError, match="unpacks to far more"):
            load_data(str(bomb), target="y", silos=1)


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
