"""A ledger that somebody has edited: rows, entries that no guard writes, and runs that nobody has begun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.deploy import approval
from silodp.deploy.chain import linked
from silodp.deploy.guard import Guard, total_with
from silodp.deploy.ledger import Closed, Ledger
from silodp.deploy.policy import read_policy
from silodp.deploy.signing import canonical, fingerprint_of
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError
from tests.guards import X0, Federation, asked, first_answers

RUN, PLAN = "00" * 16, fingerprint_of(b"{}")


@pytest.fixture
def sites(tmp_path) -> Iterator[Federation]:
    federation = Federation(tmp_path / "sites")
    yield federation
    federation.close()


def append(ledger: Ledger, *events: Any) -> None:
    """As somebody does who knows how links are made."""
    for event in events:
        head = linked(ledger.head, event)
        ledger.db.execute("insert into chain values(?, 0, ?, ?)", (head.seq, canonical(event).decode(), head.hash))


def lines(count: int, **others: Any) -> list[dict[str, Any]]:
    return [{"stream": "value", "count": count, "multiplier": 2.0} | others]


APPROVED = {"kind": "approve", "run": "other", "plan": "a third"}
BEGUN = {"kind": "begin", "run": RUN, "plan": "plan", "reserved": []}
ENDED = {"kind": "close", "run": RUN, "counted": []}
GIVEN = {"kind": "answer", "run": RUN, "key": "ask 2/value", "question": ""}
APPENDED: dict[str, tuple[str, list[Any]]] = {
    "a run that begins again with nothing": ("begins twice", [BEGUN, ENDED]),
    "an end that says less": ("its end says another count", [ENDED]),
    "an end before it": ("no close can come before it", [ENDED | {"run": "other"}]),
    "a second end": ("no close can come after its end", [ENDED | {"counted": lines(2)}, ENDED]),
    "an answer after the end": ("no answer can come after", [ENDED | {"counted": lines(2)}, GIVEN | {"counted": []}]),
    "an answer before it": ("no answer can come before it", [GIVEN | {"run": "other"}]),
    "an answer once more": ("ask 1/value is answered twice", [GIVEN | {"key": "ask 1/value", "counted": lines(2)}]),
    "a count that falls": ("ask 2/value counts less", [GIVEN | {"counted": lines(1)}]),
    "no count": ("ask 2/value counts less", [GIVEN | {"counted": []}]),
    "more than was reserved": ("ask 2/value counts less", [GIVEN | {"counted": lines(4)}]),
    "more noise": ("ask 2/value counts less", [GIVEN | {"counted": lines(3, multiplier=20.0)}]),
    "other sampling": ("ask 2/value counts less", [GIVEN | {"counted": lines(3, sampling={"kind": "Disjoint"})}]),
    "another stream": ("ask 2/value counts less", [GIVEN | {"counted": lines(2) + lines(1, stream="x")}]),
    "not a word of a count, and then an end": ("ask 2/value counts less", [GIVEN, ENDED]),
    "a count below nothing": ("ask 2/value counts less", [GIVEN | {"counted": lines(-9) + lines(3)}]),
    "half a release": ("ask 2/value counts less", [GIVEN | {"counted": lines(2.5)}]),  # type: ignore[arg-type]
    "null as a count": ("not the one that was written", [GIVEN | {"counted": None}]),
    "a count that is none": ("not the one that was written", [GIVEN | {"counted": 5}]),
    "an answer to nothing": ("not the one that was written", [{"kind": "answer", "run": RUN}]),
    "no event": ("not the one that was written", [{}]),
    "a kind that there is not": ("not the one that was written", [{"kind": "padding"}]),
    "nothing is revoked": ("not the one that was written", [{"kind": "revoke", "plan": "x"}]),
    "a second plan of a run": ("a second plan is approved", [APPROVED, APPROVED | {"plan": "other"}]),
    "a run that nobody approved": ("without an approval", [BEGUN | {"run": "other"}]),
    "a run of another's approval": ("without an approval", [BEGUN | {"run": "other", "plan": "plan"}]),
    "a run that was revoked": (
        "without an approval",
        [APPROVED | {"plan": "x"}, {"kind": "revoke", "plan": "x"}, BEGUN | {"run": "other", "plan": "x"}],
    ),
    "a model before the end": ("certified before its end", [{"kind": "certify", "run": RUN, "model": "00"}]),
    "no question": ("'nonsense' is no question", [GIVEN | {"key": "nonsense", "counted": lines(2)}]),
    "a question without a count": ("does not say what it counts", [GIVEN]),
}


def test_entries_that_no_guard_writes_are_found(tmp_path):
    """They are linked as they should be, and the rows say what they say."""
    book = Ledger(tmp_path / "ledger.db", tmp_path / "counter", approved=True)
    with pytest.raises(Closed, match="approval does not stand"):
        book.begin(RUN, PLAN, lines(3), {})
    book.approve(PLAN, RUN, b"{}")
    book.begin(RUN, PLAN, lines(3), {})
    for r in range(2):
        event = {"kind": "answer", "run": RUN, "key": f"ask {r}/value", "question": "", "counted": lines(r + 1)}
        with book.event(event):
            book.add_answer(RUN, f"ask {r}/value", b"", b"", lines(r + 1), {}, 0.0)
    assert book.verify() == []
    for name, (problem, events) in APPENDED.items():
        book.db.execute("begin")
        append(book, *events)
        found = book.verify()
        book.db.execute("rollback")
        assert any(problem in line for line in found), (name, found)
    book.db.execute("begin")  # an entry that does not tell a state does not make any state right
    append(book, GIVEN | {"counted": lines(2)})
    book.db.execute("insert into answer values(?, 'ask 2/value', x'', null)", (RUN,))
    assert book.verify() == []
    book.db.execute("insert into state values(?, 'header', x'00')", (RUN,))
    assert book.verify() == [f"run {RUN}: its state is not what was written"]
    book.db.execute("rollback")
    append(book, BEGUN, ENDED)
    book.close()
    with pytest.raises(ConfigError, match=r"counter: older than .*or entries were written by something else"):
        Ledger(tmp_path / "ledger.db", tmp_path / "counter")


ROWS = [
    "update run set reserved = '['", "update run set counted = '5'", "update run set counted = x'ff'",
    "update answer set question = 'text'", "update state set data = 5", "update chain set head = 5 where seq = 2",
    "update chain set event = x'ff' where seq = 2", "update approval set document = 5", "delete from secret",
]  # fmt: skip


def test_a_guard_that_works_and_an_operator_notice_edits(sites):
    """Not only a guard that starts. What is no row at all is told in a line too."""
    document = sites.document()
    first_answers(sites, document)
    other, ledger, north = sites.document(), sites.guard("north").ledger, sites.folders["north"]
    approvals = sites.approve(other)
    for edit in ROWS:
        ledger.db.execute("begin")
        ledger.db.execute(edit)
        assert ledger.edited(), edit
        told = decode(sites.rpc("north", encode({"kind": "certificate", "run": document.run, "model": "00"}, {})))[0]
        assert told["code"] == "edited", edit
        ledger.db.execute("rollback")
    ledger.db.execute("update run set reserved = '[]', counted = '[]'")
    assert sites.open("north", other, approvals)["code"] == "edited"
    told, _ = sites.ask("north", {"kind": "certificate", "run": document.run, "model": "00"})
    assert told["code"] == "edited" and "reservation is not" in ledger.refusals(1)[0][2]
    for act in (approval.approve, approval.screen):
        with pytest.raises(ConfigError, match="its reservation is not what was written"):
            act(north, other)
    for command in (["ledger", "show"], ["ledger", "close", document.run]):
        told = CliRunner().invoke(app, [*command, str(north)])
        assert told.exit_code == 2 and "its reservation is not what was written" in told.output
    ledger.db.execute("update run set reserved = '['")
    for command in (["ledger", "verify"], ["ledger", "show"], ["ledger", "export"], ["silo", "doctor"]):
        told = CliRunner().invoke(app, [*command, str(north)])
        assert told.exit_code and isinstance(told.exception, SystemExit), command


def test_a_run_that_somebody_has_begun_with_nothing_is_charged_with_its_plan(sites):
    """One entry more, of a run that is still to come, in the form that a guard writes."""
    document, ledger = sites.document(), sites.guard("north").ledger
    policy = read_policy(sites.folders["north"])
    whole = total_with(policy, ledger, document)
    sites.approve(document)
    ledger.begin(document.run, document.fingerprint, [], {})
    assert not ledger.verify() and total_with(policy, ledger, document) == whole > 0


def test_copies_with_one_counter_do_not_both_answer(sites, tmp_path):
    """The counter is on another disk. Whoever writes first goes on; the others are refused, also at the same moment."""
    policy = sites.folders["north"] / "guard.toml"
    policy.write_text(policy.read_text().replace("[data]", f'counter = "{tmp_path}/elsewhere"\n[data]', 1))
    document = sites.document()
    assert sites.open("north", document, sites.approve(document))["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    own = sites.guard("north")
    own.ledger.db.execute("pragma wal_checkpoint(truncate)")
    shutil.copytree(sites.folders["north"], tmp_path / "copy")
    shutil.copytree(sites.folders["north"], tmp_path / "another")
    copy, another = Guard(tmp_path / "copy"), Guard(tmp_path / "another")
    another.ledger._check_still_alone = lambda: None  # it looked before the other one wrote
    question = {"kind": "ask", "run": document.run, "query": "value", "round": 0, "echo": None, "last": None}
    told = [decode(guard.reply(encode(question, {"0": X0})))[0] for guard in (own, copy, another)]
    copy.close()
    another.close()
    assert [each.get("code") for each in told] == [None, "put-back", "put-back"]


def test_a_ledger_that_is_written_anew_under_a_guard_stops_it(sites):
    document = sites.document()
    approvals = sites.approve(document)
    assert sites.open("north", document, approvals)["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    ledger = sites.guard("north").ledger
    entries = ledger.head.seq
    ledger.db.execute("delete from chain")
    append(ledger, *[{"kind": "approve", "plan": "padding"}] * (entries + 1))
    question = {"kind": "ask", "run": document.run, "query": "value", "round": 0, "echo": None, "last": None}
    assert decode(sites.rpc("north", encode(question, {"0": X0})))[0]["code"] == "put-back"


def test_a_state_that_is_older_than_its_entries_answers_nothing(sites, monkeypatch):
    """As if the last entry were forged: the right count, and the state of before, which would answer once more."""
    document = sites.document()
    approvals = sites.approve(document)
    assert sites.open("north", document, approvals)["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    before = dict(sites.guard("north").ledger.state(document.run))
    assert "seen" in asked(sites, document.run, "north", "value", 0)
    sites.end("north")
    monkeypatch.setattr(Ledger, "state", lambda ledger, run: before)
    assert asked(sites, document.run, "north", "value", 1)["code"] == "put-back"
