"""A ledger that somebody has edited: rows, entries that no guard writes, and runs that nobody has begun."""

from __future__ import annotations

import shutil
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
from tests.guards import X0, asked, first_answers, give

RUN, PLAN = "00" * 16, fingerprint_of(b"{}")


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
    "more than was reserved": ("ask 2/value counts less", [GIVEN | {"counted": lines(6)}]),
    "a count that jumps": ("ask 2/value counts more than one answer", [GIVEN | {"counted": lines(4)}]),
    "a count that jumps at once": ("counts more than one", [GIVEN | {"key": "ask 2/other", "counted": lines(4)}]),
    "a count around a sum": ("counts more than one", [GIVEN | {"key": "sum 2/value/offer", "counted": lines(3)}]),
    "a count of a start": ("start counts more than one", [GIVEN | {"key": "start", "counted": lines(3)}]),
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
        book.begin(RUN, PLAN, lines(5), {})
    book.approve(PLAN, RUN, b"{}")
    book.begin(RUN, PLAN, lines(5), {})
    for r in range(2):
        give(book, RUN, f"ask {r}/value", lines(r + 1))
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


def test_answers_with_several_releases_have_as_many_each_time(tmp_path):
    """Of local steps: so many in every answer to one query."""
    book = Ledger(tmp_path / "ledger.db", tmp_path / "counter", approved=True)
    book.approve(PLAN, RUN, b"{}")
    book.begin(RUN, PLAN, lines(30), {}, ["value"])
    for r in range(2):
        give(book, RUN, f"local {r}/walk", lines(3 * r + 3))
    assert book.verify() == []
    for counted, right in ((9, True), (8, False), (12, False)):
        book.db.execute("begin")
        append(book, GIVEN | {"key": "local 2/walk", "counted": lines(counted)})
        assert ("counts more than one answer" in str(book.verify())) is not right
        book.db.execute("rollback")
    book.close()


def test_cells_that_no_guard_writes_are_told_in_words(tmp_path):
    """Bytes that are no text where SQLite takes them for one, and what would reach a terminal."""
    book = Ledger(tmp_path / "ledger.db", tmp_path / "counter", approved=True)
    book.approve(PLAN, RUN, b"{}")
    book.begin(RUN, PLAN, lines(5), {"header": b"\xff\x00"})
    give(book, RUN, "ask 0/value", lines(1))
    for edit, problem in {
        "update answer set reply = x'ff00' || x'00' where key like 'ask%'": "the bytes that would be sent again",
        "update state set data = data || x'00'": "its state is not what was written",
        "update answer set key = cast(x'61ff' as text)": "answer and entry do not belong together",
        "update chain set event = cast(x'7bff7d' as text) where seq = 2": "entry 2: it is not the one",
        "update run set run = run || char(27) || '[2J' || char(7)": "its row is not what was written",
    }.items():
        book.db.execute("begin")
        book.db.execute(edit)
        found = book.verify()
        assert any(problem in line for line in found), (edit, found)
        assert all(line.isprintable() for line in found)
        with pytest.raises(ConfigError) as refused:
            book.check_unedited()
        assert str(refused.value).isprintable()
        book.db.execute("rollback")
    assert book.verify() == []
    book.close()


def test_bytes_that_are_sent_again_are_those_that_were_sent(sites):
    document = sites.document()
    first_answers(sites, document)
    ledger = sites.guard("north").ledger
    row = "select reply from answer where key = 'ask 0/value'"
    (reply,) = ledger.db.execute(row).fetchone()
    header, arrays = decode(reply)
    for changed in (
        encode(header, {name: array + 1 for name, array in arrays.items()}),
        encode(header | {"ledger": [1, "00" * 32]}, arrays),
        encode({name: part for name, part in header.items() if name != "ledger"}, arrays),
        encode(header | {"gradients": 1e9}, arrays),
        b"", b"\x00" * 40,
    ):  # fmt: skip
        ledger.db.execute("begin")
        ledger.db.execute("update answer set reply = ? where key = 'ask 0/value'", [changed])
        assert "ask 0/value: the bytes that would be sent again" in str(ledger.edited())
        ledger.db.execute("rollback")
    assert ledger.edited() == []
    ledger.db.execute("update answer set reply = ? where key = 'ask 0/value'", [changed])
    sites.end("north")
    with pytest.raises(ConfigError, match="sent again"):
        sites.guard("north")


def test_a_run_that_is_open_during_an_upgrade_is_refused_with_what_to_do(sites, monkeypatch):
    document = sites.document()
    first_answers(sites, document)
    north = sites.folders["north"]
    healthy = CliRunner().invoke(app, ["silo", "doctor", str(north)])
    assert f"ok      run {document.run}: open; before an upgrade let it end" in healthy.output
    sites.end("north")
    close, newer = ["ledger", "close", document.run, str(north)], {**document.tree["versions"], "jax": "99.0"}
    with monkeypatch.context() as upgraded:
        upgraded.setattr("silodp.deploy.guard.versions", lambda: newer)
        upgraded.setattr("silodp.deploy.document.versions", lambda: newer)
        told = asked(sites, document.run, "north", "value", 1)
        assert told["code"] == "versions" and "silodp ledger close" in told["reason"] and "new plan" in told["reason"]
        found = CliRunner().invoke(app, ["silo", "doctor", str(north)])
        assert f"so it cannot go on; silodp {' '.join(close)}" in found.output
    assert "seen" in asked(sites, document.run, "north", "value", 0)  # the old programs, put back
    assert "stays charged" in CliRunner().invoke(app, close).output
    assert sites.guard("north").ledger.verify() == []


ROWS = [
    "update run set reserved = '['", "update run set counted = '5'", "update run set counted = x'ff'",
    "update answer set question = 'text'", "update state set data = 5", "update chain set head = 5 where seq = 2",
    "update chain set event = x'ff' where seq = 2", "update approval set document = 5", "delete from secret",
    "create trigger forgets after insert on answer begin delete from answer; end",
    "update answer set reply = 'a' || char(0) || 'b'", "update answer set reply = x'00'",
    "update answer set reply = 'no such file' where key = 'start'",
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
        assert ledger.verify(), edit
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
