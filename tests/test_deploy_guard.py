"""Guards: what they answer, what they keep, and that nothing is answered twice or forgotten."""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.deploy import approval, server, setup, signing
from silodp.deploy.certify import check_planned, verified
from silodp.deploy.checkpoints import CHECKPOINT
from silodp.deploy.desk import question_of
from silodp.deploy.document import Document
from silodp.deploy.files import held
from silodp.deploy.guard import Guard, total_with
from silodp.deploy.ledger import Ledger
from silodp.deploy.office import open_ledger
from silodp.deploy.pages import story_of_federation
from silodp.deploy.policy import Denied, read_policy
from silodp.deploy.recorded import Recorded
from silodp.deploy.server import CERTIFICATES, MODEL, drive
from silodp.deploy.signing import words
from silodp.deploy.spending import read, written
from silodp.deploy.wire import Late, decode
from silodp.digits import rounded_up
from silodp.doubles import Double
from silodp.errors import ConfigError, Refused
from silodp.privacy import accountant, adaptive
from silodp.privacy.clones import Messages, Shuffled
from silodp.privacy.kinds import Disjoint, FixedSize, Full, Masked, Poisson, Releases, Spent, TwoLevel
from silodp.report.files import write_report
from tests.guards import X0, Federation, config_of, give
from tests.pages import Reader, problems


def asked(sites: Federation, document: Document, round: int) -> dict[str, Any]:
    question = {"kind": "ask", "run": document.run, "query": "value", "round": round}
    return sites.ask("north", question, _0=X0)[0]


# --- signatures and words ----------------------------------------------------------------------------------------


def test_a_fingerprint_is_said_in_words_that_differ_whenever_it_does():
    digests = [signing.digest("plan", bytes([i])) for i in range(200)]
    assert len({signing.words(each) for each in digests}) == 200
    words = signing.words(digests[0]).split()
    assert len(words) == 16 and all(word.isalpha() and len(word) == 6 for word in words)
    pairs = {signing.words(f"{i:04x}" + "00" * 30).split()[0] for i in range(1 << 16)}
    assert len(pairs) == 1 << 16  # no two bytes sound alike


def test_a_signature_is_for_one_purpose_and_one_body(tmp_path):
    key = signing.Key.create(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    statement = signing.Key.read(tmp_path / "key").signed("facts", {"records": 3})
    assert signing.opened("facts", statement) == ({"records": 3}, key.public)
    other = signing.Key.create(tmp_path / "other").public
    for changed in (
        statement | {"body": {"records": 4}}, statement | {"key": other}, statement | {"signature": "00" * 64},
        statement | {"signature": "zz"}, {"body": {}}, None,
        statement | {"key": key.public[:32] + "\n" + key.public[32:]},  # would spoil an operator's file
        statement | {"key": key.public.upper()},  # one key would stand in a roster as two sites
    ):  # fmt: skip
        with pytest.raises(Refused):
            signing.opened("facts", changed)
    with pytest.raises(Refused):
        signing.opened("approval", statement)


# --- spending ----------------------------------------------------------------------------------------------------


def test_releases_are_kept_as_they_were():
    hidden = Shuffled(30, 10, "privunit", 5, 0.5, 2)
    kinds = [Full(), Disjoint(), Poisson(0.1), FixedSize(3, 9), TwoLevel(3, 9, 0.5), Masked(2, 8)]
    kinds += [Messages(hidden, True, Shuffled(30, 10))]
    spent = [Spent(Releases(f"s{i}", i, kind), 1.5 + i) for i, kind in enumerate(kinds)]
    spent.append(Spent(Releases("nothing", 2, Full()), float("inf")))
    spent.append(Spent(Releases("summed", 2, Full(), 1e-9, 1e-300), 3.0))
    spent.append(Spent(Releases("coins", 2, Full(), lost=1e-30, coins=7), 3.0))
    assert read(json.loads(json.dumps(written(spent)))) == spent


def test_a_pass_over_the_records_in_each_run_counts_each_time():
    """One pass costs one release within a run; a second run is a second pass."""
    once = [Spent(Releases("value", 10, Disjoint()), 2.0)]
    both = [Spent(Releases("value", 2, Full()), 2.0)]
    assert adaptive.epsilon([once, once], 1e-5) == adaptive.epsilon([both], 1e-5) > adaptive.epsilon([once], 1e-5)


# --- a run through guards ----------------------------------------------------------------------------------------


def check_report(run: Path, document: Document, told: dict[str, dict]) -> None:
    """Its page has the signatures and what every ledger says over all runs; it is not written for another model."""
    text = (run / "report.html").read_text(encoding="utf-8")
    assert problems(text) == []
    read = Reader(text).text
    assert "a real federation" in read and "protects nobody" not in read and "one machine" not in read
    assert all(document.keys[site] not in read and words(document.keys[site]) in read for site in document.sites)
    for body in told.values():
        assert f"{rounded_up(body['total_epsilon'])} in 1 run at delta 0.0001" in read
        assert body["ledger"][1][:16] in read and body["model"] in read
    model = run / "model.safetensors"
    kept = model.read_bytes()
    model.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(ConfigError, match="not the model that the silos' certificates name"):
        write_report(run, story_of_federation)
    model.write_bytes(kept)
    shown = CliRunner().invoke(app, ["show", str(run)])
    assert shown.exit_code == 0 and "all signatures are good" in shown.output and "over 1 run at delta" in shown.output
    certificates = run / CERTIFICATES
    kept = certificates.read_bytes()
    certificates.write_bytes(kept.replace(b'"runs": 1', b'"runs": 2'))
    for options in ([], ["--json"]):
        forged = CliRunner().invoke(app, ["show", str(run), *options])
        assert forged.exit_code == 1 and "refused: certificate: the signature" in forged.output
    certificates.write_bytes(kept)
    assert write_report(run, story_of_federation).read_text(encoding="utf-8") == text


def test_a_run_ends_in_certificates_that_anybody_can_check(sites, tmp_path):
    document = sites.document()
    approvals = sites.approve(document)
    certificates = drive(document, approvals, sites.rpc, tmp_path / "run")
    assert len(verified(certificates, document)) == 2
    told = {each["body"]["site"]: each["body"] for each in certificates}
    for i, site in enumerate(document.sites):
        assert told[site]["epsilon"] == pytest.approx(document.plan.epsilon(i))
        assert {line["stream"]: line["count"] for line in told[site]["releases"]} == {"value": 2, "difference": 2}
    for change in ({"epsilon": 0.1}, {"releases": []}, {"model": "other"}):
        forged = [certificates[0] | {"body": certificates[0]["body"] | change}, certificates[1]]
        with pytest.raises(Refused):
            verified(forged, document)
    with pytest.raises(Refused, match="missing: south"):
        verified(certificates[:1], document)
    check_report(tmp_path / "run", document, told)
    # Closed: no question of this run is answered any more, and the ledger says what was counted.
    assert asked(sites, document, 3)["code"] == "run"
    assert drive(document, approvals, sites.rpc, tmp_path / "run") == certificates
    ledger = sites.guard("north").ledger
    assert ledger.verify() == []
    kept = ledger.run(document.run)
    assert kept is not None and kept.closed is not None and kept.reserved == kept.counted


class Stopped(Exception):
    pass


def test_a_run_that_stops_everywhere_goes_on_to_the_same_model(sites, tmp_path, monkeypatch):
    """The server stops at every question in turn, and guards are restarted: releases are counted once, and no question
    is answered with two different bytes."""
    document = sites.document(config_of(algorithm={"rounds": 2}))
    approvals = sites.approve(document)
    given: dict[tuple[str, bytes], bytes] = {}
    left = [0]

    def failing(site: str, data: bytes) -> bytes:
        answer = sites.rpc(site, data)
        if b'"kind": "ask"' in data[:200]:
            assert given.setdefault((site, question_of(*decode(data))), answer) == answer
            left[0] -= 1
            if left[0] == 0:
                sites.end(site)
                raise Stopped
        return answer

    for stop in (1, 2, 3, 4):
        left[0] = stop
        try:
            drive(document, approvals, failing, tmp_path / "run")
        except Stopped:
            continue
    certificates = drive(document, approvals, failing, tmp_path / "run")
    for each in certificates:
        assert {line["stream"]: line["count"] for line in each["body"]["releases"]} == {"value": 1, "difference": 1}
    assert len(given) == 4 and (tmp_path / "run" / MODEL).is_file()


def test_a_checkpoint_with_another_bit_is_found_at_once(sites, tmp_path, monkeypatch):
    document = sites.document()
    approvals = sites.approve(document)
    honest, rounds = server.Driver._save, []

    def save(self, carry, done):
        honest(self, carry, done)
        rounds.append(done)
        if len(rounds) == 2:
            raise Stopped

    monkeypatch.setattr(server.Driver, "_save", save)
    with pytest.raises(Stopped):
        drive(document, approvals, sites.rpc, tmp_path / "run")
    file = tmp_path / "run" / CHECKPOINT
    whole = file.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged"):
            drive(document, approvals, sites.rpc, tmp_path / "run")
    file.write_bytes(whole)
    drive(document, approvals, sites.rpc, tmp_path / "run")
    assert rounds == [1, 2, 3, 4]


def test_two_servers_do_not_work_in_one_folder(tmp_path):
    with (
        held(tmp_path / "run", "server"),
        pytest.raises(ConfigError, match="another server"),
        held(tmp_path / "run", "server"),
    ):
        pass
    with held(tmp_path / "run", "server"):
        assert (tmp_path / "run").stat().st_mode & 0o077 == 0


# --- the ledger over runs ----------------------------------------------------------------------------------------


def test_runs_add_up_by_the_accountant_and_closing_frees_what_was_not_used(sites):
    """The first plan is reserved whole; after one answer and a close only that answer is charged."""
    first = sites.document()
    approvals = sites.approve(first)
    assert sites.open("north", first, approvals)["kind"] == "ready"
    policy, ledger = read_policy(sites.folders["north"]), sites.guard("north").ledger
    reserved = total_with(policy, ledger)
    assert reserved == pytest.approx(accountant.epsilon(first.plan.spent(0), 1e-4), rel=2e-3)
    sites.ask("north", {"kind": "start", "run": first.run}, x0=X0)
    assert asked(sites, first, 0)["kind"] == "answer"
    second = sites.document(config_of(privacy={"epsilon": 2.0}))
    assert total_with(policy, ledger, second) < reserved + second.plan.epsilon(0, 1e-4)  # less than the sum
    assert sites.open("north", second, sites.approve(second))["code"] == "busy"
    ledger.finish(first.run)
    one = [Spent(Releases("value", 1, Full()), first.plan.multipliers["value"][0])]
    assert total_with(policy, ledger) == adaptive.epsilon([one], 1e-4)
    assert sites.open("north", second, sites.approve(second))["kind"] == "ready"
    ledger.finish(second.run)
    with pytest.raises(Denied, match="all runs"):
        for _ in range(9):
            more = sites.document(config_of(privacy={"epsilon": 2.0}))
            assert sites.open("north", more, sites.approve(more))["kind"] == "ready"
            all_released(ledger, more)
    assert 3 <= len(ledger.runs()) <= 6


def test_a_certificate_speaks_of_as_many_records_as_the_plan_protects_together(sites):
    document = sites.document(config_of(privacy={"unit": 3}))
    assert sites.open("north", document, sites.approve(document))["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    assert asked(sites, document, 0)["kind"] == "answer"
    budget = sites.ask("north", {"kind": "budget", "run": document.run})[0]["budget"]
    assert budget["run_reserved"] == pytest.approx(document.plan.epsilon(0)) and budget["run_spent"] > 0
    told, _ = sites.ask("north", {"kind": "certificate", "run": document.run, "model": None})
    body, own = told["certificate"]["body"], read(told["certificate"]["body"]["releases"])
    assert body["records_together"] == 3 and body["epsilon"] == document.plan.cost(0, own)
    assert body["epsilon"] == pytest.approx(accountant.group_epsilon(own, 1e-5, 3)) and body["total_epsilon"] > 0
    assert body["record_epsilon"] == accountant.epsilon(own, 1e-5) < body["epsilon"]
    (line,) = verified([told["certificate"]])
    assert "for any 3 records of a silo together, epsilon" in line and "for one record in this run" in line
    with pytest.raises(Refused, match="another number of records"):
        check_planned(body | {"records_together": 1, "epsilon": body["record_epsilon"]}, document)
    for lie, reason in (
        ({"epsilon": body["record_epsilon"]}, "come to epsilon"),
        ({"record_epsilon": 0.9 * body["record_epsilon"]}, "come to record epsilon"),
        ({"records_together": 0}, "not as a guard writes it"),
        ({"records_together": 10**9}, "come to epsilon"),
    ):
        with pytest.raises(Refused, match=reason):
            verified([sites.keys["north"].signed("certificate", body | lie)])


def test_a_run_on_drawn_batches_stays_charged_as_it_was_planned(sites):
    """Who has seen some of it chose when to end it. Without a release it is free."""
    drawn = config_of(algorithm={"name": "dp-sgd", "rounds": 6, "batch": 4, "restart": None, "clip_difference": None})
    policy, ledger = read_policy(sites.folders["north"]), sites.guard("north").ledger
    unused, document = sites.document(drawn), sites.document(drawn)
    assert sites.open("north", unused, sites.approve(unused))["kind"] == "ready"
    whole = total_with(policy, ledger)
    ledger.finish(unused.run)
    assert whole > 0 == total_with(policy, ledger)
    assert sites.open("north", document, sites.approve(document))["kind"] == "ready"
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    question = {"kind": "ask", "run": document.run, "query": "value", "round": 0, "echo": None, "last": None}
    assert sites.ask("north", question, _0=X0)[0]["kind"] == "answer"
    ended = CliRunner().invoke(app, ["ledger", "close", document.run, str(sites.folders["north"])])
    assert "batches that are drawn at random as they were planned" in ended.output
    assert total_with(policy, ledger) == whole and ledger.verify() == []
    told, _ = sites.ask("north", {"kind": "certificate", "run": document.run, "model": None})
    body = told["certificate"]["body"]
    assert [line["count"] for line in body["releases"]] == [1] and body["total_epsilon"] == whole
    verified([told["certificate"]])


def test_a_run_with_local_steps_is_certified(sites, tmp_path):
    """One answer has several releases: the ledger has fewer entries than the run has releases."""
    steps = {"name": "local-sgd", "rounds": 2, "local_steps": 3, "restart": None, "clip_difference": None}
    document = sites.document(config_of(algorithm=steps))
    certificates = drive(document, sites.approve(document), sites.rpc, tmp_path / "run")
    assert [line["count"] for line in certificates[0]["body"]["releases"]] == [6]
    assert len(verified(certificates, document)) == 2 and sites.guard("north").ledger.verify() == []


def test_where_no_epsilon_holds_against_others_who_collude_certificates_say_so(tmp_path):
    """Infinity is nothing that JSON can say: the run ended without certificates, after all was spent."""
    sites = Federation(tmp_path, {"north": 5000, "south": 20})
    algorithm = {"name": "sdp-spider", "weights": "size", "rounds": 1, "restart": 1}
    document = sites.document(config_of(privacy={"trust": "shuffled", "epsilon": 2.0}, algorithm=algorithm))
    assert "if masks are broken: epsilon none" in approval.screen(sites.folders["south"], document)
    (tmp_path / "run").mkdir()
    certificates = drive(document, sites.approve(document), sites.rpc, tmp_path / "run")
    assert len(verified(certificates, document)) == 2
    found = [statement["body"]["collusion"] for statement in certificates]
    assert any(None in each.values() for each in found)
    sites.close()


def test_what_a_certificate_tells_the_server(sites):
    """No total where the operator tells none, and one model for good."""
    file = sites.folders["north"] / "guard.toml"
    file.write_text(file.read_text().replace("[data]", "tell_budget = false\n[data]"))
    document, one, other = sites.document(), "0a" * 32, "0b" * 32
    sites.open("north", document, sites.approve(document))
    asked = lambda model: sites.ask("north", {"kind": "certificate", "run": document.run, "model": model})[0]
    for model in ("A" * 64, "0a", "\x1b[2J" + "0" * 60, 5, [one]):
        assert asked(model)["code"] == "model" and sites.guard("north").ledger.run(document.run).closed is None
    told = asked(one)["certificate"]
    assert [told["body"][name] for name in ("total_epsilon", "total_delta", "runs")] == [None] * 3
    assert "its total over all runs is not told" in verified([told])[0]
    half = sites.keys["north"].signed("certificate", told["body"] | {"runs": 3})
    with pytest.raises(Refused, match="a part of its total"):
        verified([half])
    assert asked(other)["code"] == "model" and asked(one)["certificate"]["body"]["model"] == one
    sites.end("north")
    assert asked(other)["code"] == "model" and asked(None)["certificate"]["body"]["model"] is None
    assert sites.guard("north").ledger.verify() == []


def test_a_total_that_is_no_number_is_refused_before_anything_is_written(sites, monkeypatch):
    """As it may be where an operator sets a smaller total_delta during a run."""
    document, ledger = sites.document(), sites.guard("north").ledger
    sites.open("north", document, sites.approve(document))
    entries = ledger.head
    monkeypatch.setattr("silodp.deploy.guard.epsilon_over", lambda *_: float("inf"))
    for kind in ("budget", "certificate"):
        told, _ = sites.ask("north", {"kind": kind, "run": document.run, "model": "0a" * 32})
        assert told.get("code") == "total", (kind, told)
    assert ledger.head == entries and ledger.run(document.run).closed is None


def test_keys_that_are_trusted_at_once_are_all_noted(tmp_path, monkeypatch):
    """Between reading and writing the file every program takes its time."""
    file, keys = tmp_path / "guard.toml", {name: name[0] * 64 for name in ("south", "east", "west")}
    file.write_text("[peers]\n")
    write = setup.write_whole
    monkeypatch.setattr(setup, "write_whole", lambda *given: (time.sleep(0.05), write(*given)))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda name: setup.note_key(file, "peers", name, keys[name]), [*keys, "south"]))
    assert tomllib.loads(file.read_text())["peers"] == keys


def all_released(ledger: Ledger, document: Document) -> None:
    """As if every question had been answered."""
    run = ledger.run(document.run)
    assert run is not None
    counted = {line["stream"]: line | {"count": 0} for line in run.reserved}
    for line in run.reserved:
        for i in range(line["count"]):
            counted[line["stream"]] = line | {"count": i + 1}
            give(ledger, run.run, f"ask {i}/{line['stream']}", list(counted.values()))
    ledger.finish(run.run)


def test_a_ledger_that_was_put_back_is_noticed(sites):
    document = sites.document()
    approvals = sites.approve(document)
    sites.open("north", document, approvals)
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    sites.end("north")
    folder = sites.folders["north"]
    shutil.copy(folder / "ledger.db", folder / "copy.db")
    assert asked(sites, document, 0)["kind"] == "answer"
    sites.end("north")
    for file in folder.glob("ledger.db*"):
        file.unlink()
    shutil.copy(folder / "copy.db", folder / "ledger.db")
    with pytest.raises(ConfigError, match="put back from a copy"):
        sites.guard("north")
    (folder / "counter").unlink()
    with pytest.raises(ConfigError, match="missing"):
        open_ledger(folder)


EDITS = {
    "nothing was reserved": "update run set reserved = '[]'",
    "nothing was counted": "update run set counted = '[]'",
    "fewer releases": "update run set counted = replace(counted, '\"count\": 1', '\"count\": 0')",
    "more noise": "update run set reserved = replace(reserved, '\"multiplier\": ', '\"multiplier\": 99')",
    "no run": "delete from run",
    "no run and no answers": "delete from run; delete from answer",
    "another plan": "update run set fingerprint = 'other'",
    "an end": "update run set closed = 1",
    "another question": "update answer set question = x'00'",
    "a silo that has answered nothing": "update state set data = x'00' where name = 'header'",
    "a part of the state less": "delete from state where name = 'header'",
    "another document": "update approval set document = x'7b7d'",
    "a document that is no bytes": "update approval set document = '{}'",
    "a revocation": "update approval set revoked = 1",
    "another entry": "update chain set event = replace(event, 'begin', 'began') where seq = 2",
    "no entry": "update chain set event = '[' where seq = 2",
}


def test_every_edit_of_the_budget_is_found(sites):
    """By the operator's command, and by the guard that is to work with it."""
    document = sites.document()
    sites.open("north", document, sites.approve(document))
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    assert asked(sites, document, 0)["kind"] == "answer"
    ledger = sites.guard("north").ledger
    assert ledger.verify() == []
    for name, edit in EDITS.items():
        ledger.db.execute("begin")
        for statement in edit.split(";"):
            ledger.db.execute(statement)
        found = ledger.verify()
        ledger.db.execute("rollback")
        assert found, name
    ledger.finish(document.run)
    assert ledger.verify() == []
    ledger.db.execute("update run set closed = null, reserved = '[]'")
    assert [line.split(": ")[1].split()[1] for line in ledger.verify()] == ["reservation", "end"]
    sites.end("north")
    with pytest.raises(ConfigError, match="its reservation is not what was written"):
        sites.guard("north")


def test_two_guards_do_not_work_in_one_folder(sites):
    assert sites.ask("north", {"kind": "hello"})[0] == {"kind": "hello"}  # as `silodp silo doctor` asks
    assert sites.guard("north").ledger.refusals() == []
    with pytest.raises(ConfigError, match="another guard"):
        Guard(sites.folders["north"])


def test_a_ledger_that_cannot_be_written_sends_nothing(sites, monkeypatch):
    """What is in memory is ahead of the disk then: it is read again, and the question gets one answer only."""
    document = sites.document()
    sites.open("north", document, sites.approve(document))
    sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)
    guard, question = sites.guard("north"), {"kind": "ask", "run": document.run, "query": "value", "round": 0}
    honest = guard.ledger.add_answer

    def full(*given, **named):
        honest(*given, **named)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guard.ledger, "add_answer", full)
    told, arrays = sites.ask("north", question, _0=X0)
    assert (told["code"], arrays) == ("disk", {}) and guard.desk is None
    monkeypatch.undo()
    first = sites.ask("north", question, _0=X0)
    again = sites.ask("north", question, _0=X0)
    assert first[0] == again[0] and first[0]["kind"] == "answer"
    np.testing.assert_array_equal(first[1]["value"], again[1]["value"])
    assert guard.ledger.verify() == []


def test_the_screen_says_what_an_operator_decides_on(sites):
    document = sites.document()
    told = approval.screen(sites.folders["south"], document)
    words = signing.words(document.fingerprint).split()
    assert all(word in told for word in words) and "south, 12 records" in told and "north (20 records)" in told
    assert "epsilon 1 at delta" in told and "of 3.5" in told
    assert len(told.splitlines()) < 24
    (sites.folders["south"] / "other.json").write_bytes(signing.canonical(document.tree))
    assert approval.load(sites.folders["south"] / "other.json").fingerprint == document.fingerprint


def test_a_revoked_plan_gets_no_further_answer(sites):
    document = sites.document()
    approvals = sites.approve(document)
    sites.open("north", document, approvals)
    assert approval.revoke(sites.folders["north"], document.words) == document.run
    assert sites.ask("north", {"kind": "start", "run": document.run}, x0=X0)[0]["code"] == "run"
    assert sites.open("north", document, approvals)["code"] == "not-approved"
    assert (sites.folders["north"] / CERTIFICATES).exists() is False


def test_a_resumed_round_tosses_the_same_coins(tmp_path):
    """In every stage: going through the first again must not lose the coins of the second."""
    first = Recorded(tmp_path)
    first.begin("whiten", 0)
    moment = first.noised("noise/moment", Double.of(jnp.zeros(3)), jnp.float32(1))
    first.begin("train", 5)
    coin = first.uniform("coin/snapshot", ())
    again = Recorded(tmp_path)
    again.begin("whiten", 0)
    np.testing.assert_array_equal(again.noised("noise/moment", Double.of(jnp.zeros(3)), jnp.float32(1)), moment)
    again.begin("train", 5)
    assert float(again.uniform("coin/snapshot", ())) == float(coin)
    assert again.uniform("coin/snapshot", (4,)).shape == (4,)  # from here on they are new
    cut = tmp_path / "coins.train"
    cut.write_bytes(cut.read_bytes()[:-3])  # a write that was not finished: nobody has used it
    last = Recorded(tmp_path)
    last.begin("train", 5)
    assert float(last.uniform("coin/snapshot", ())) == float(coin)
    with pytest.raises(Refused, match="not this run's"):
        other = Recorded(tmp_path)
        other.begin("train", 5)
        other.normal("coin/snapshot", ())
    other.begin("train", 6)
    assert other.left == []


def test_a_missing_site_is_skipped_where_answers_are_private_alone(sites, tmp_path):
    """The run goes on with the others; who was there is kept, so that a resumed round does not find it back."""
    document = sites.document(config_of(algorithm={"rounds": 2}), on_missing="skip")
    approvals = sites.approve(document)

    def rpc(site: str, data: bytes) -> bytes:
        if site == "south" and b'"kind": "ask"' in data[:200] and b'"round": 0' in data[:200]:
            raise Late("gone")
        return sites.rpc(site, data)

    told = {each["body"]["site"]: each["body"] for each in drive(document, approvals, rpc, tmp_path / "run")}
    counts = {site: sum(line["count"] for line in body["releases"]) for site, body in told.items()}
    assert counts == {"north": 2, "south": 1} and told["south"]["epsilon"] < told["north"]["epsilon"]
    waiting = sites.document(config_of(algorithm={"rounds": 2}))
    with pytest.raises(Late, match="silo 'south' in round 0"):
        drive(waiting, sites.approve(waiting), rpc, tmp_path / "waits")
    assert drive(waiting, sites.approve(waiting), sites.rpc, tmp_path / "waits")
    with pytest.raises(ConfigError, match="use 'wait'"):
        options = {"name": "sdp-spider", "weights": "size"}
        sites.document(config_of(privacy={"trust": "shuffled"}, algorithm=options), on_missing="skip")


# --- held-out records --------------------------------------------------------------------------------------------


def test_an_evaluation_is_a_planned_stream_that_guards_charge_and_certify(sites, tmp_path):
    """Its figures are the only thing that the server learns of how well the model does; the server cannot ask early,
    twice, or at another point, and a restarted guard gives the same bytes."""
    document = sites.document(config_of(algorithm={"rounds": 2}, evaluate={"held_out": 0.25}))
    approvals, given = sites.approve(document), {}

    def restarted(site: str, data: bytes) -> bytes:
        header, arrays = decode(data)
        answer = sites.rpc(site, data)
        if header.get("query") == "metric":
            sites.end(site)
            assert sites.rpc(site, data) == answer
            moved = {f"_{name}": array + 1 for name, array in arrays.items()}
            assert sites.ask(site, header, **moved)[0]["code"] == "repeated"
            given[site] = header["kind"]
        return answer

    assert sites.open("north", document, approvals)["kind"] == "ready"
    for kind in ("ask", "local"):
        early = {"kind": kind, "run": document.run, "query": "metric", "round": 0}
        assert sites.ask("north", early, _0=X0)[0]["code"] == "question"
    certificates = drive(document, approvals, restarted, tmp_path / "run")
    assert given.keys() == set(document.sites) and len(verified(certificates, document)) == 2
    told = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert told
    for i, each in enumerate(certificates):
        streams = {line["stream"]: line["count"] for line in each["body"]["releases"]}
        assert len(streams) == 3 and set(streams.values()) == {1}
        assert each["body"]["epsilon"] == pytest.approx(document.plan.epsilon(i))
    body = certificates[0]["body"]
    lines = [line | {"held_out": True} for line in body["releases"]]  # as if nothing had been trained on
    changed = sites.keys["north"].signed("certificate", body | {"releases": lines})
    with pytest.raises(Refused, match="north"):
        verified([changed, certificates[1]], document)
