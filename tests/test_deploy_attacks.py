"""Attacks on a guard, each refused with its code and nothing else said. Approvals are forced: the operator was fooled,
and all other sites work for the attacker."""

from __future__ import annotations

import copy
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from silodp import registry
from silodp.cli import app
from silodp.deploy import signing
from silodp.deploy.document import Document, approval, proposed, signed_facts
from silodp.deploy.listen import GuardSocket, Listener
from silodp.deploy.policy import SENTENCES
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError
from silodp.facts import Facts
from tests.attacks import counted
from tests.guards import X0, Federation, config_of

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def idle(tmp_path_factory) -> Iterator[Federation]:
    """Sites that answer no run yet."""
    federation = Federation(tmp_path_factory.mktemp("idle"))
    yield federation
    federation.close()


def forced(sites: Federation, tree: Tree, keys: dict[str, signing.Key] | None = None) -> dict[str, Any]:
    """The answer of the guard of north to a plan that everybody has signed, whatever is in it."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    mark = signing.digest("plan", text)
    run = str(tree.get("run"))
    ledger = sites.guard("north").ledger
    with ledger.event({"kind": "approve", "run": run, "plan": mark}):
        ledger.db.execute("insert or replace into approval values(?, ?, ?, 0, null)", (mark, run, text))
    body = {"run": tree.get("run"), "fingerprint": mark}
    approvals = [key.signed("approval", body | {"site": site}) for site, key in (keys or sites.keys).items()]
    header = {"kind": "plan", "document": text.decode(), "approvals": approvals}
    return sites.ask("north", header)[0]


def honest(sites: Federation, **sections: Any) -> Tree:
    return json.loads(json.dumps(sites.document(config_of(**sections)).tree))


def edited(sites: Federation, change: Callable[[Tree], Any], **sections: Any) -> Tree:
    tree = honest(sites, **sections)
    change(tree)
    return tree


def put(*path: Any) -> Callable[[Tree], None]:
    """A change of one place of a document: keys, and the value."""

    def change(tree: Any) -> None:
        for key in path[:-2]:
            tree = tree[key]
        tree[path[-2]] = path[-1]

    return change


def less_noise(tree: Tree) -> None:
    for noise in tree["plan"]["stages"][0]["multipliers"].values():
        noise[0] *= 0.9


def more_noise(tree: Tree) -> None:
    for noise in tree["plan"]["stages"][0]["multipliers"].values():
        noise[0] *= 2


CONFIG = ("plan", "config")
EDITS: dict[str, tuple[str, Callable[[Tree], Any]]] = {
    "code of the interpreter as a model": ("outside", put(*CONFIG, "model", "kind", "code:interact")),
    "a system call as an algorithm": ("outside", put(*CONFIG, "algorithm", "name", "os:system")),
    "a compressor from outside": ("outside", put(*CONFIG, "algorithm", "compressor", "pickle:loads")),
    "a trust model from outside": ("outside", put(*CONFIG, "privacy", "trust", "antigravity:Fly")),
    "a randomizer from outside": ("outside", put(*CONFIG, "algorithm", "randomizer", "antigravity:Fly")),
    "a clip whose noise is lost": ("document", put(*CONFIG, "algorithm", "clip", 4e-37)),
    "a clip below the site's": ("clip", put(*CONFIG, "algorithm", "clip", 1e-9)),
    "a clip of differences below the site's": ("clip", put(*CONFIG, "algorithm", "clip_difference", 1e-9)),
    "a seed": ("seeded", put(*CONFIG, "run", "test_seed", True)),
    "no target": ("not-private", put(*CONFIG, "privacy", {"trust": "untrusted"})),
    "a paper's noise": ("not-private", put(*CONFIG, "privacy", "calibration", "paper")),
    "a trusted server": ("trust", put(*CONFIG, "privacy", "trust", "trusted")),
    "delta 0.999": ("epsilon", put(*CONFIG, "privacy", "delta", 0.999)),
    "a thousand million rounds": ("rounds", put(*CONFIG, "algorithm", "rounds", 10**9)),
    "fitted preprocessing": ("preprocess", put(*CONFIG, "data", "preprocess", ["standardise"])),
    "an unknown key": ("document", put(*CONFIG, "algorithm", "clipp", 1.0)),
    "an unknown algorithm": ("document", put(*CONFIG, "algorithm", "name", "spidr")),
    "a config that is a list": ("not-private", put("plan", "config", [])),
    "less noise than the config needs": ("document", less_noise),
    "more noise than the config needs": ("document", more_noise),
    "noise without end": ("document", put("plan", "stages", 0, "multipliers", "value", [None, None])),
    "no noise": ("document", lambda tree: tree["plan"]["stages"][0]["multipliers"].clear()),
    "another target than the noise": ("document", put(*CONFIG, "privacy", "epsilon", 0.5)),
    "a smaller epsilon on the screen": ("document", put("epsilon", [0.1, 0.1])),
    "no epsilon on the screen": ("document", put("epsilon", None)),
    "a text as epsilon": ("document", put("epsilon", ["1", "1"])),
    "an epsilon beyond all numbers": ("document", put("epsilon", [10**400, 1.0])),
    "another delta on the screen": ("document", put("delta", 1e-9)),
    "sizes that nobody signed": ("document", put("plan", "facts", "sizes", [20, 100_000])),
    "weights that nobody signed": ("document", put("plan", "facts", "weights", [0.9, 0.1])),
    "another number of rounds": ("document", put("plan", "facts", "rounds", 2)),
    "a stage more": ("document", lambda tree: tree["plan"]["stages"].append(tree["plan"]["stages"][0])),
    "own facts inflated": ("document", put("roster", 0, "body", "records", 100_000)),
    "a peer's facts inflated": ("document", put("roster", 1, "body", "records", 100_000)),
    "a roster that is none": ("document", put("roster", "everybody")),
    "a site twice": ("document", lambda tree: tree["roster"].append(tree["roster"][1])),
    "without this site": ("not-listed", lambda tree: tree["roster"].pop(0)),
    "nobody": ("document", put("roster", [])),
    "other software": ("versions", put("versions", "jax", "0.0.1")),
    "a run's number with a path in it": ("document", put("run", "../../etc")),
    "an entry more": ("document", put("hook", "rm -rf")),
    "another format": ("document", put("format", "plan 2")),
    "a rule for missing sites that is none": ("document", put("on_missing", "guess")),
}


@pytest.mark.parametrize("attack", EDITS)
def test_a_changed_plan_is_refused(idle, attack):
    code, change = EDITS[attack]
    check(forced(idle, edited(idle, change)), code)


def test_no_command_imports_what_a_plan_names(tmp_path, monkeypatch):
    """Whoever looks at a stranger's plan is not its author; what an operator lists is imported."""
    sites, plan, signed = Federation(tmp_path), tmp_path / "plan.json", tmp_path / "signed.json"
    document = sites.document()
    sites.open("north", document, sites.approve(document))
    asked = {"kind": "certificate", "run": document.run, "model": "00" * 32}
    signed.write_text(json.dumps([sites.ask("north", asked)[0]["certificate"]]))
    sites.close()
    plan.write_text(json.dumps(edited(sites, put(*CONFIG, "model", "kind", "this:x"))))
    commands = {
        "show": ("plan", "show", plan),
        "approve": ("approve", plan, "--site", sites.folders["north"], "--yes"),
        "verify": ("verify", signed, "--plan", plan),
        "server": ("server", "run", plan, signed, "--out", tmp_path / "run", "--guards", tmp_path),
    }
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for name, words in commands.items():
        monkeypatch.setattr(registry, "_allowed", None)  # a command is a process
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 1 and done.output.startswith("refused: "), (name, done.output)
        assert "this" not in sys.modules, name
    monkeypatch.setattr(registry, "_allowed", None)
    CliRunner().invoke(app, ["plan", "show", str(plan), "--outside", "this:x"])
    assert "this" in sys.modules


CERTIFIED: Tree = {
    "site": "north", "plan": "", "ledger": [1, ""], "date": "2026-01-01T00:00:00Z", "versions": {}, "epsilon": 1.0,
    "record_epsilon": 1.0, "records_together": 1, "delta": 1e-5, "total_epsilon": 1.0, "total_delta": 1e-5, "runs": 1,
    "releases": [], "sees": "", "collusion": None, "model": None,
}  # fmt: skip


def test_no_command_imports_what_a_strangers_run_names(idle, tmp_path, monkeypatch):
    """A federation's run, and the answers that a message run has kept."""
    tree = edited(idle, put(*CONFIG, "algorithm", "name", "this:x"))
    federation, kept = tmp_path / "federation", tmp_path / "kept"
    (kept / "answers").mkdir(parents=True)
    federation.mkdir()
    (federation / "plan.json").write_text(json.dumps(tree))
    signed = idle.keys["north"].signed("certificate", CERTIFIED | {"run": tree["run"]})
    (federation / "certificates.json").write_text(json.dumps([signed]))
    (kept / "plan.json").write_text(json.dumps(tree["plan"]))
    (kept / "config.toml").write_text("")
    save_file({"0/value/mean/value": X0}, kept / "answers" / "000000.safetensors")
    commands = [("show", federation), ("show", federation, "--web"), ("compare", federation, federation)]
    for words in [*commands, ("audit", "--real", kept)]:
        for outside in ([], ["--outside", "this:x"]):
            monkeypatch.delitem(sys.modules, "this", raising=False)
            monkeypatch.setattr(registry, "_allowed", None)  # a command is a process
            done = CliRunner().invoke(app, [*map(str, words), *outside])
            assert done.exit_code and ("this" in sys.modules) == bool(outside), (words, done.output)
            assert outside or "not listed" in done.output, words


def check(told: dict[str, Any], code: str) -> None:
    about = {"about": told.get("about")} if code == "seen" and "about" in told else {}  # a site of the plan
    assert told == {"kind": "refused", "code": code, "reason": SENTENCES[code]} | about


def test_the_honest_plan_would_have_been_accepted(tmp_path):
    """Otherwise the attacks show nothing."""
    sites = Federation(tmp_path)
    assert forced(sites, honest(sites))["kind"] == "ready"
    sites.close()


NOISE = {"epsilon": None, "multipliers": {"value": 0.01, "difference": 0.01}}
LARGE = {"kind": "mlp", "hidden": [10**6], "activation": "softplus", "loss": "cross-entropy"}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon 1e4": ("epsilon", {"privacy": {"epsilon": 1e4}}),
    "hardly any noise, and no epsilon": ("epsilon", {"privacy": NOISE}),
    "a model without end": ("parameters", {"model": LARGE}),
    "sums that stand no colluding silo": ("colluding", {"privacy": {"trust": "aggregated", "colluding": 0}}),
}


@pytest.mark.parametrize("attack", ASKED)
def test_an_honest_plan_beyond_the_limits_is_refused(idle, attack):
    code, sections = ASKED[attack]
    check(forced(idle, honest(idle, **sections)), code)


def test_a_fictitious_site_is_not_believed(idle, tmp_path):
    """It signs whatever is needed, and would hide everybody in its crowd; no operator knows its key."""
    ghost = signing.Key.create(tmp_path / "ghost")
    facts = Facts(
        (100_000,), ("ghost",), *(getattr(idle.document().facts, name) for name in ("record", "outputs", "task"))
    )
    told = signed_facts(ghost, "ghost", facts, idle.roster[0]["body"]["schema"])
    tree = json.loads(json.dumps(proposed(config_of(), [*idle.roster, told])))
    check(forced(idle, tree, idle.keys | {"ghost": ghost}), "peers")


def test_a_known_site_with_another_key_is_not_believed(idle, tmp_path):
    other = signing.Key.create(tmp_path / "other")
    told = other.signed("facts", idle.roster[1]["body"])
    tree = json.loads(json.dumps(proposed(config_of(), [idle.roster[0], told])))
    check(forced(idle, tree, {"north": idle.keys["north"], "south": other}), "peers")


@pytest.mark.parametrize(
    "which", ["missing", "another plan", "another key", "no list", "another purpose", "of nobody", "of several"]
)
def test_approvals_are_everybodys_for_this_plan(idle, which, tmp_path):
    document, other = idle.document(), idle.document()
    approvals = idle.approve(document)
    forged = {
        "missing": approvals[:1],
        "another plan": [approvals[0], approval(idle.keys["south"], "south", other)],
        "another key": [approvals[0], approval(signing.Key.create(tmp_path / "k"), "south", document)],
        "no list": {"south": approvals[1]},
        "another purpose": [approvals[0], idle.keys["south"].signed("facts", approvals[1]["body"])],
        "of nobody": None,
        "of several": [approvals[0], idle.keys["south"].signed("approval", approvals[1]["body"] | {"site": ["south"]})],
    }
    check(idle.open("north", document, forged[which]), "not-signed")


def test_what_the_operator_has_not_seen_is_not_approved(idle):
    document = idle.document()
    approvals = [approval(key, site, document) for site, key in idle.keys.items()]
    check(idle.open("north", document, approvals), "not-approved")


TEXTS = {
    "not JSON": "{",
    "a key twice": '{"run": 1, "run": 2}',
    "NaN": '{"run": NaN}',
    "a list": "[]",
    "deep": "[" * 100_000,
    "nested": json.dumps(None).join(['{"a":' * 5000, "}" * 5000]),
    "empty": "",
    "lone surrogate": '"\ud800"',
}


@pytest.mark.parametrize("which", TEXTS)
def test_a_text_that_is_no_plan_is_refused(idle, which):
    header = json.dumps({"kind": "plan", "document": TEXTS[which], "approvals": []}).encode()
    told, _ = decode(idle.rpc("north", struct.pack("<I", len(header)) + header + encode({}, {})[6:]))
    check(told, "document")


def test_the_table_of_attacks_names_tests_that_are_there():
    """`python -m tests.attacks` tries all of them."""
    assert sum(counted().values()) >= 60


# --- questions ---------------------------------------------------------------------------------------------------


class Running:
    """Two guards of a run, both asked for the value of round 0."""

    def __init__(self, federation: Federation):
        self.sites, self.document = federation, federation.document()
        self.approvals = federation.approve(self.document)
        for site in self.document.sites:
            assert federation.open(site, self.document, self.approvals)["kind"] == "ready"
            self.ask(site, {"kind": "start"}, x0=X0)
        self.first = {site: self.ask(site, self.question(), _0=X0) for site in self.document.sites}
        self.echo = {site: told["seen"] for site, (told, _) in self.first.items()}

    def question(self, query: Any = "value", round: Any = 0, **more: Any) -> dict[str, Any]:
        return {"kind": "ask", "query": query, "round": round} | more

    def ask(self, site: str, header: dict[str, Any], **arrays: np.ndarray) -> Any:
        return self.sites.ask(site, {"run": self.document.run} | header, **arrays)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    federation = Federation(tmp_path_factory.mktemp("running"))
    yield Running(federation)
    federation.close()


FAR = {"_0": X0 + 1, "_1": X0}
NEXT = {"query": "difference", "round": 1}
QUESTIONS: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray]]] = {
    "the same question at another point": ("repeated", {}, {"_0": X0 + 1}),
    "an unknown query": ("question", {"query": "__class__", "round": 1}, FAR),
    "a query that is a list": ("question", {"query": [], "round": 1}, FAR),
    "a round after the last": ("question", NEXT | {"round": 4}, FAR),
    "a round before the first": ("question", NEXT | {"round": -1}, FAR),
    "a round beyond all numbers": ("question", NEXT | {"round": 1e400}, FAR),
    "a round that is a text": ("question", NEXT | {"round": "one"}, FAR),
    "a point of another shape": ("question", NEXT, {"_0": np.zeros(4, np.float32), "_1": X0}),
    "a point too few": ("question", NEXT, {"_0": X0}),
    "a point too many": ("question", NEXT, FAR | {"_2": X0}),
    "half precision": ("question", NEXT, {"_0": X0.astype(np.float16), "_1": X0}),
    "NaN": ("question", NEXT, {"_0": X0 * np.nan, "_1": X0}),
    "infinite": ("question", NEXT, {"_0": X0 + np.inf, "_1": X0}),
    "arrays of other names": ("question", NEXT, {"a": X0, "b": X0}),
    "a mean as a local task": ("question", {"kind": "local", "query": "difference", "round": 1}, FAR),
    "a run that is not known": ("run", NEXT | {"run": "00" * 16}, FAR),
    "no run": ("run", NEXT | {"run": None}, FAR),
    "a second start": ("repeated", {"kind": "start"}, {"x0": X0 + 1}),
    "keys where there are none": ("question", {"kind": "keys", "keys": []}, {}),
    "a stage that is not there": ("question", {"kind": "leave", "stage": "whiten"}, {"released": X0}),
    "set-up with records": ("kind", {"kind": "setup", "plan": {}, "index": 0, "seed": 7}, {"features": X0}),
    "no kind": ("kind", {"kind": None}, {}),
    "a kind from nowhere": ("kind", {"kind": "shutdown"}, {}),
    "a certificate of no run": ("run", {"kind": "certificate", "run": "11" * 16}, {}),
    "no word of what the others saw": ("seen", NEXT, FAR),
    "others' word that is none": ("seen", NEXT | {"echo": {"north": 1, "south": [2]}}, FAR),
}


@pytest.mark.parametrize("attack", QUESTIONS)
def test_a_question_outside_the_plan_is_refused(running, attack):
    code, header, arrays = QUESTIONS[attack]
    echo = {} if code == "seen" else {"echo": running.echo}
    told, answered = running.ask("north", running.question() | echo | header, **arrays)
    check(told, code)
    assert answered == {}
    assert int(running.ask("north", {"kind": "account"})[1]["count/value"]) == 1


def test_a_site_that_was_shown_another_point_is_noticed_one_round_later(running):
    """Signatures cannot be made up, taken from another question, or replaced by one's own."""
    digest, entries, head, known, signature = running.echo["south"]
    north, last = running.echo["north"][4], [head, known, signature]
    words = [[digest, entries, head, known, other] for other in (north, "zz", "")]
    words += [["00" * 32, entries, *last], [digest, entries + 1, *last], [digest, "x", *last], [digest, *last]]
    for wrong in words:
        told, _ = running.ask("north", running.question(**NEXT, echo=running.echo | {"south": wrong}), **FAR)
        check(told, "seen")


def test_a_repeated_question_gets_the_same_bytes(running):
    again = running.ask("south", running.question(done=["nothing"], echo={"a": 1}), _0=X0)
    assert again[0] == running.first["south"][0]
    np.testing.assert_array_equal(again[1]["value"], running.first["south"][1]["value"])


def test_another_plan_is_not_answered_meanwhile(running):
    other = running.sites.document(config_of(algorithm={"clip": 2.0}))
    check(running.sites.open("north", other, running.sites.approve(other)), "busy")
    with pytest.raises(ConfigError, match="another plan was approved under this number"):
        running.sites.approve(Document({**other.tree, "run": running.document.run}))


def test_a_third_value_is_refused_also_under_a_server_that_counts_itself(running):
    """The plan has two values: in rounds 0 and 2."""
    desk = running.sites.guard("north").desk
    assert desk is not None and desk.asked["value"] == 1
    desk.asked["value"] = 2
    try:
        told, _ = running.ask("north", running.question(round=1, echo=running.echo), _0=X0)
        check(told, "question")
    finally:
        desk.asked["value"] = 1


FRAMES = {
    "empty": b"",
    "one byte": b"\x00",
    "junk": os.urandom(400),
    "a header longer than the frame": struct.pack("<I", 1 << 31) + b"{}",
    "a header that is a list": struct.pack("<I", 2) + b"[]" + encode({}, {})[6:],
    "a header without arrays": struct.pack("<I", 2) + b"{}",
    "a deep header": struct.pack("<I", 200_000) + b"[" * 200_000,
    "cut": encode({"kind": "ask"}, {"0": X0})[:-1],
    "larger than allowed": bytes(1_000_001),
    "a shape of seven tebibytes": struct.pack("<I", 2) + b"{}" + struct.pack("<Q", 66)
    + b'{"0":{"dtype":"F32","shape":[2000000000000],"data_offsets":[0,4]}}' + bytes(4),
}  # fmt: skip


@pytest.mark.parametrize("which", FRAMES)
def test_bytes_that_are_no_message_are_refused(idle, which):
    told, arrays = decode(idle.rpc("north", FRAMES[which]))
    check(told, "message")
    assert arrays == {}


def test_no_text_of_an_error_leaves_a_guard(running, monkeypatch):
    for error in (RuntimeError("record 17.25"), ValueError("record 17.25"), OSError("record 17.25"), MemoryError()):
        monkeypatch.setattr("silodp.deploy.desk.respond", lambda *_, error=error: (_ for _ in ()).throw(error))
        told, _ = running.ask("north", running.question(**NEXT, echo=running.echo), **FAR)
        assert told["reason"] == SENTENCES[told["code"]]


# --- masks -------------------------------------------------------------------------------------------------------


def test_a_server_cannot_replace_a_masks_key(tmp_path):
    """It has no site's key to sign its own with; nothing is masked, so nothing is sent."""
    sites = Federation(tmp_path, {"north": 20, "south": 12, "east": 16})
    options = {"name": "sdp-spider", "weights": "size"}
    document = sites.document(config_of(privacy={"trust": "shuffled"}, algorithm=options))
    approvals = sites.approve(document)
    ready = [sites.open(site, document, approvals) for site in document.sites]
    keys, signatures = [each["key"] for each in ready], [each["signature"] for each in ready]
    mine = signing.Key.create(tmp_path / "mine")
    own = "11" * 32
    bound = f"{document.run}|{document.fingerprint}|{own}".encode()
    for told in (
        {"keys": [keys[0], own, keys[2]], "signatures": signatures},
        {"keys": [keys[0], own, keys[2]], "signatures": [signatures[0], mine.sign("mask", bound).hex(), signatures[2]]},
        {"keys": keys, "signatures": [signatures[0], signatures[2], signatures[1]]},
        {"keys": [keys[0], keys[2], keys[1]], "signatures": signatures},
        {"keys": keys},
        {"keys": keys[:2], "signatures": signatures[:2]},
    ):
        check(sites.ask("north", {"kind": "keys", "run": document.run} | told)[0], "question")
    good = {"kind": "keys", "run": document.run, "keys": keys, "signatures": signatures}
    assert sites.ask("north", good)[0]["kind"] == "ready"
    other = copy.deepcopy(good) | {"keys": keys[::-1]}
    check(sites.ask("north", other)[0], "repeated")
    sites.close()


# --- the socket --------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path) -> Iterator[Callable[..., GuardSocket]]:
    """A socket that answers with what it was asked, for a user."""
    opened: list[Listener] = []

    def serve(user: int) -> GuardSocket:
        path = tmp_path / f"{user}" / "guard.sock"
        listener = Listener(path, user, lambda data: data[::-1], 1000)
        threading.Thread(target=listener.serve, daemon=True).start()
        opened.append(listener)
        assert path.stat().st_mode & 0o777 == 0o660 and path.parent.stat().st_mode & 0o777 == 0o750
        return GuardSocket(path, 5.0)

    yield serve
    for listener in opened:
        listener.close()


def test_a_frame_that_is_too_long_ends_the_connection_only(listening):
    link = listening(os.getuid())
    with pytest.raises(OSError):
        link.ask(bytes(1001))
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(link.path)
    raw.sendall(struct.pack("<Q", 500) + b"cut")
    raw.close()
    assert link.ask(b"abc") == b"cba"
    link.close()
