"""A site's ledger: large values beside it, and copies of it that are put back or run twice."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from silodp.deploy import approval
from silodp.deploy.blobs import LARGE
from silodp.deploy.chain import Head, answer_digest, digest_of
from silodp.deploy.ledger import Ledger
from silodp.deploy.remote import Echoes, Remote
from silodp.deploy.signing import fingerprint_of
from silodp.deploy.vouch import Vouch
from silodp.deploy.wire import encode
from silodp.errors import ConfigError, Refused
from tests.guards import X0, Federation, asked, first_answers

RUN = "00" * 16


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.db", tmp_path / "counter")
    opened.begin(RUN, "plan", [], {"small": b"s", "large": bytes(LARGE + 1)})
    yield opened
    opened.close()


def answer(ledger: Ledger, key: str, reply: bytes, state: dict[str, bytes], done: list[str]) -> None:
    told, message = {"kind": "answer"}, {"reply": np.frombuffer(reply, np.uint8)}
    event = {"kind": "answer", "run": RUN, "key": key, "question": key.encode().hex()}
    with ledger.event(event | {"answer": answer_digest(told, message), "state": ledger.digests(state)}) as head:
        sent = encode(told | {"ledger": list(head)}, message)
        ledger.add_answer(RUN, key, key.encode(), sent, [], state, 0.0)
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
    assert known is not None and known.reply is not None and known.reply.endswith(replies[1])
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
    assert ledger.counter.last() == last
    ledger.finish(RUN)
    assert ledger.counter.last() == ledger.head and not ledger.verify()


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
    assert ledger.counter.last().seq == ledger.head.seq - 1
    assert asked(sites, document.run, "north", "value", 0)["kind"] == "answer"
    assert ledger.counter.last() == ledger.head
    ledger._note = unwritten
    with pytest.raises(OSError, match="error"):
        ledger.finish(document.run)
    sites.end("north")
    assert sites.guard("north").ledger.counter.last().seq == ledger_seq(sites)


def ledger_seq(sites: Federation) -> int:
    return sites.guard("north").ledger.head.seq


def test_a_guard_that_was_killed_before_its_counter_had_an_entry_starts_again(tmp_path, monkeypatch):
    """The file is there before the first entry, so that without it nobody can say that nothing was answered yet."""
    place = tmp_path / "ledger.db", tmp_path / "counter"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # at once, and with a file in which nothing stands
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("silodp.deploy.counter.os.pwrite", killed)
            Ledger(*place)
    book = Ledger(*place)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("silodp.deploy.counter.os.pwrite", killed)
        book.begin(RUN, "plan", [], {})
    book.close()
    book = Ledger(*place)
    assert book.counter.last() == book.head == Head(1, book.hash_at(1))
    book.close()
    place[1].unlink()
    with pytest.raises(ConfigError, match="missing, or cannot be read"):
        Ledger(*place)


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
    refusals = sites.guard("north").ledger.refusals(1)
    assert refusals[0][2].endswith("cloned: south")  # for the operator
    known = {sites.keys["south"].public: Head(*second["south"][1:3])}
    assert sites.guard("north").ledger.peers() == known  # also for the next run
    sites.close()


def test_a_ledger_that_was_put_back_and_made_longer_is_noticed(tmp_path):
    """By length it has not gone back. An honest server tells each site the last entry that it has heard of, and other
    sites sign the last ones that they have seen: it is the site itself that does not have them."""
    sites = Federation(tmp_path / "sites")
    document, other = sites.document(), sites.document()
    run, south, first = document.run, sites.folders["south"], first_answers(sites, document)
    sites.end("south")
    shutil.copytree(south, tmp_path / "backup")
    second = {site: asked(sites, run, site, "difference", 1, first) for site in document.sites}
    seen = {site: told["seen"] for site, told in second.items()}
    sites.end("south")
    shutil.rmtree(south)
    shutil.copytree(tmp_path / "backup", south)
    for _ in range(3):
        approval.approve(south, other)
    last = second["south"]["ledger"]
    assert sites.guard("south").ledger.head.seq > last[0]
    assert asked(sites, run, "south", "value", 2, first, last)["code"] == "put-back"
    assert sites.guard("south").ledger.refusals(1)[0][1] == "put-back"
    for malformed in ([last[0], None], [str(last[0]), last[1]], [-1, ""], last[:1], {}, [2**80, ""]):
        assert asked(sites, run, "south", "value", 2, first, malformed)["code"] == "put-back"
    third = {  # a hostile server says nothing of it
        "north": asked(sites, run, "north", "value", 2, seen)["seen"],
        "south": asked(sites, run, "south", "value", 2, first)["seen"],
    }
    told = asked(sites, run, "south", "difference", 3, third)
    assert (told["code"], told["about"]) == ("put-back", "north")
    sites.close()


def test_a_site_that_is_shown_its_own_signature_of_another_history_stops(sites):
    """As where two copies of it work: each has signed entries that the other does not have."""
    document = sites.document()
    echo, key = first_answers(sites, document), sites.keys["south"]
    points, seq, _, known, _ = echo["south"]
    other = Vouch(key, document).saw("ask 0/value", points, Head(seq, "f" * 64), known)
    told = asked(sites, document.run, "south", "difference", 1, echo | {"south": other})
    assert (told["code"], told["about"]) == ("put-back", "south")
    assert asked(sites, document.run, "south", "difference", 1, echo)["kind"] == "answer"


WORDS: dict[str, Any] = {
    "no entries of others": lambda seen: seen[:3] + seen[4:],
    "others that are no table": lambda seen: [*seen[:3], 5, seen[4]],
    "an entry without end": lambda seen: [seen[0], 2**80, *seen[2:]],
    "a hash that is none": lambda seen: [*seen[:2], "ab", *seen[3:]],
    "an unsigned hash": lambda seen: [*seen[:2], "a" * 32, *seen[3:]],
    "an unsigned entry of another": lambda seen: [*seen[:3], {"north": [1, "a" * 32]}, seen[4]],
    "a signature that is none": lambda seen: [*seen[:4], 7],
}


def test_words_of_a_ledger_that_are_none_are_refused(sites):
    document = sites.document()
    echo = first_answers(sites, document)
    for name, change in WORDS.items():
        told = asked(sites, document.run, "north", "difference", 1, echo | {"south": change(echo["south"])})
        assert (told["code"], told["about"]) == ("seen", "south"), name
    vouch, (points, *_) = Vouch(sites.keys["south"], document), echo["south"]
    signed = vouch.saw("ask 0/value", points, Head(9, "a" * 64), {"north": Head(2**60, "a" * 32)})
    told = asked(sites, document.run, "north", "difference", 1, echo | {"south": signed})
    assert (told["code"], told["about"]) == ("seen", "south")


def test_other_sites_notice_in_the_next_run_that_a_folder_was_put_back(sites):
    """Its total would forget an earlier run. The others remember how long its ledger was, by its key."""
    document, ledger = sites.document(), sites.guard("north").ledger
    earlier = document_of_an_earlier_run(sites, ledger, {sites.keys["south"].public: Head(4, "a" * 32)})
    echo = first_answers(sites, document)
    assert echo["south"][1] == 4 and not ledger.verify()
    told = asked(sites, document.run, "north", "difference", 1, echo)
    assert (told["code"], told["about"]) == ("behind", "south")
    told = asked(sites, document.run, "south", "difference", 1, echo)  # and it has never had that fourth entry
    assert (told["code"], told["about"]) == ("put-back", "north")
    ledger.db.execute("delete from peers")
    assert ledger.verify() == ["others' ledgers: what is known of them is not what was written"]
    assert earlier != document.run


def document_of_an_earlier_run(sites: Federation, ledger: Ledger, peers: dict[str, Head]) -> str:
    """In which these entries of others were seen."""
    plan = fingerprint_of(b"{}")
    ledger.approve(plan, RUN, b"{}")
    ledger.begin(RUN, plan, [], {})
    event = {"kind": "answer", "run": RUN, "key": "ask 0/value", "question": "", "peers": digest_of(peers)}
    with ledger.event(event):
        ledger.add_answer(RUN, "ask 0/value", b"", b"", [], {}, 0.0)
        ledger.note_peers(peers)
    ledger.finish(RUN)
    return RUN
