"""A site's ledger: large values beside it, and copies of it that are put back or run twice."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from silodp.deploy.blobs import LARGE
from silodp.deploy.document import Document
from silodp.deploy.ledger import Head, Ledger
from silodp.deploy.remote import Echoes, Remote
from silodp.deploy.wire import encode
from silodp.errors import Refused
from tests.guards import X0, Federation

RUN = "00" * 16


@pytest.fixture
def sites(tmp_path) -> Iterator[Federation]:
    federation = Federation(tmp_path / "sites")
    yield federation
    federation.close()


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.db", tmp_path / "counter")
    opened.begin(RUN, "plan", [], {"small": b"s", "large": bytes(LARGE + 1)})
    yield opened
    opened.close()


def answer(ledger: Ledger, key: str, reply: bytes, state: dict[str, bytes], done: list[str]) -> None:
    event = {"kind": "answer", "run": RUN, "key": key, "question": key.encode().hex(), "answer": ""}
    with ledger.event(event):
        ledger.add_answer(RUN, key, key.encode(), reply, [], state, 0.0)
        ledger.drop(RUN, done)


def files(ledger: Ledger) -> set[str]:
    return {file.name for file in ledger.blobs.folder.iterdir()}


def test_large_values_are_in_files_that_go_when_no_row_names_them(ledger):
    first, replies = files(ledger), [os.urandom(LARGE + 1) for _ in range(2)]
    assert len(first) == 1
    answer(ledger, "ask 0/value", replies[0], {"large": bytes(LARGE + 2)}, [])
    answer(ledger, "ask 1/value", replies[1], {}, ["ask 0/value"])
    assert len(files(ledger)) == 2 and not first & files(ledger)  # the new state, and the second reply
    known = ledger.answered(RUN, "ask 1/value")
    assert known is not None and known.reply == replies[1]
    assert ledger.state(RUN) == {"small": b"s", "large": bytes(LARGE + 2)} and not ledger.verify()
    assert max(len(page) for (page,) in ledger.db.execute("select data from state")) <= LARGE
    for file in ledger.blobs.folder.iterdir():
        assert file.stat().st_mode & 0o077 == 0
    ledger.finish(RUN)
    assert files(ledger) == set()


def test_entries_tell_nothing_of_a_state_that_could_be_tried_out(tmp_path):
    """A state may hold exact gradients. Who guesses it must not see in the entries whether the guess is right."""
    told = []
    for name in ("one", "other"):
        opened = Ledger(tmp_path / f"{name}.db", tmp_path / f"{name}.counter")
        opened.begin(RUN, "plan", [], {"memory": b"exact"})
        told.append(opened.db.execute("select event from chain").fetchone()[0])
        assert not opened.verify()
        opened.db.execute("update state set data = ? where name = 'memory'", [b"edited"])
        assert opened.verify() == [f"run {RUN}: its state is not what was written"]
        opened.close()
    assert told[0] != told[1] and not any(hashlib.sha256(b"exact").hexdigest() in event for event in told)


def test_the_counter_never_goes_back(ledger):
    """A program that was held up between its entry and the counter comes after another one's newer entries."""
    for r in range(3):
        answer(ledger, f"ask {r}/value", b"", {}, [])
    last = ledger.head
    ledger._note(Head(last.seq - 2, "of the one that was held up"))
    assert ledger._noted() == last
    ledger.finish(RUN)
    assert ledger._noted() == ledger.head and not ledger.verify()


def test_a_file_that_changed_is_noticed(ledger):
    (file,) = ledger.blobs.folder.iterdir()
    file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.raises(OSError, match="not what was written"):
        ledger.state(RUN)
    assert "not what was written" in ledger.verify()[0]


def test_a_failed_write_leaves_no_file_and_no_row(ledger, tmp_path):
    with pytest.raises(RuntimeError), ledger.event({"kind": "answer"}):
        ledger.add_answer(RUN, "ask 0/value", b"q", os.urandom(LARGE + 1), [], {}, 0.0)
        raise RuntimeError
    assert len(files(ledger)) == 2  # nobody names it
    answer(ledger, "ask 0/value", b"reply", {}, [])
    assert len(files(ledger)) == 1 and not ledger.verify()


def test_the_counter_knows_of_an_entry_before_its_answer_leaves(sites, tmp_path):
    """It could not be written with the entry. Whoever asks again gets the answer only when it can."""
    document = sites.document()
    assert sites.open("north", document, sites.approve(document))["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    ledger = sites.guard("north").ledger

    def unwritten(head: Any) -> None:
        raise OSError(5, "Input/output error")

    ledger._note = unwritten
    for _ in range(2):
        assert asked(sites, document.run, "north", "value", 0)["code"] == "disk"
    del ledger._note
    assert ledger._noted().seq == ledger.head.seq - 1
    assert asked(sites, document.run, "north", "value", 0)["kind"] == "answer"
    assert ledger._noted() == ledger.head
    ledger._note = unwritten
    with pytest.raises(OSError, match="error"):
        ledger.finish(document.run)
    sites.end("north")
    assert sites.guard("north").ledger._noted().seq == ledger_seq(sites)


def ledger_seq(sites: Federation) -> int:
    return sites.guard("north").ledger.head.seq


# --- copies ------------------------------------------------------------------------------------------------------


def link(*heads: Any) -> Remote:
    """A site that says these last entries of its ledger, the first with the plan."""
    left = list(heads)
    rpc = lambda site, data: encode({"kind": "answer", "ledger": left.pop(0)}, {})
    remote = Remote("north", rpc, ThreadPoolExecutor(1), RUN, Echoes())
    said(remote, {"kind": "plan"})
    return remote


def said(remote: Remote, header: dict[str, Any]) -> None:
    remote.send(header, {})
    remote.receive()


QUESTION = {"kind": "ask", "query": "value", "round": 0}


@pytest.mark.parametrize("second", [[5, "b"], [4, "a"], None, ["5", "b"], [7]])
def test_a_server_notices_a_ledger_that_does_not_grow(second):
    remote = link([3, "x"], [5, "a"], second)
    said(remote, QUESTION)
    with pytest.raises(Refused, match="north"):
        said(remote, QUESTION)


def test_a_server_that_resumes_notices_a_ledger_that_was_put_back():
    for told in ([4, "x"], [5, "other"]):
        with pytest.raises(Refused, match="put back"):
            link(told).resumed([5, "a"])
    remote = link([9, "x"], [6, "old bytes, given again"], [7, "y"])
    remote.resumed([5, "a"])
    said(remote, QUESTION)
    said(remote, QUESTION)


def asked(sites: Federation, run: str, site: str, query: str, round: int, echo: Any = None) -> dict[str, Any]:
    header = {"kind": "ask", "run": run, "query": query, "round": round, "echo": echo}
    return sites.ask(site, header, **{f"_{i}": X0 + i for i in range(1 if query == "value" else 2)})[0]


def test_other_sites_notice_a_folder_that_was_put_back_whole(tmp_path):
    """Its counter went back with it, so that the site itself cannot tell. One round later the others can."""
    sites = Federation(tmp_path / "sites")
    document = sites.document()
    run, south, first = document.run, sites.folders["south"], first_answers(sites, document)
    sites.end("south")
    shutil.copytree(south, tmp_path / "backup")
    second = {site: asked(sites, run, site, "difference", 1, first)["seen"] for site in document.sites}
    sites.end("south")
    shutil.rmtree(south)
    shutil.copytree(tmp_path / "backup", south)
    third = {
        "north": asked(sites, run, "north", "value", 2, second)["seen"],
        "south": asked(sites, run, "south", "value", 2, first)["seen"],
    }
    assert asked(sites, run, "north", "difference", 3, third)["code"] == "behind"
    longest = {sites.keys[site].public: second[site][1] for site in document.sites}
    assert sites.guard("north").ledger.peers() == longest  # also for the next run
    sites.close()


def test_other_sites_notice_in_the_next_run_that_a_folder_was_put_back(sites):
    """Its total would forget an earlier run. The others remember how long its ledger was, by its key."""
    document, ledger = sites.document(), sites.guard("north").ledger
    with ledger.event({"kind": "seen in an earlier run"}):
        ledger.note_peers({sites.keys["south"].public: 3})
    echo = first_answers(sites, document)
    assert echo["south"][1] == 3
    assert asked(sites, document.run, "north", "difference", 1, echo)["code"] == "behind"


def first_answers(sites: Federation, document: Document) -> dict[str, Any]:
    """Of a run that begins: what the sites have signed."""
    approvals = sites.approve(document)
    for site in document.sites:
        assert sites.open(site, document, approvals)["kind"] == "ready"
        sites.ask(site, {"kind": "start", "run": document.run}, x0=X0)
    return {site: asked(sites, document.run, site, "value", 0)["seen"] for site in document.sites}
