"""The shuffler as a site: runs through it, and what it refuses. The server and all silos but one may be hostile."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.channels.sealed import Batch, open_batch
from silodp.deploy import approval, signing
from silodp.deploy.certify import SHUFFLED, verified
from silodp.deploy.document import Document, proposed
from silodp.deploy.kits import put_run
from silodp.deploy.policy import SENTENCES, Denied, check_document, left_alone, read_policy
from silodp.deploy.server import drive
from silodp.deploy.shuffling import Outbox, create_box, public_of
from silodp.deploy.signing import SERVER_KEY
from silodp.errors import ConfigError, Refused
from silodp.facts import Facts
from silodp.plan.plan import Plan
from tests.guards import MIXER, X0, Federation, config_of

SHUFFLED_CONFIG = {
    "privacy": {"trust": "shuffled"},
    "algorithm": {"rounds": 2, "randomizer": "privunit", "weights": "size"},
}
BATCH = Batch(0, "0/value", 12)


def refused(told: tuple[dict[str, Any], dict[str, np.ndarray]], code: str) -> None:
    assert told == ({"kind": "refused", "code": code, "reason": SENTENCES[code]}, {})


class Running:
    """A run through the shuffler whose silos have answered the first question."""

    def __init__(self, sites: Federation):
        self.sites, self.document = sites, sites.document(config_of(**SHUFFLED_CONFIG))
        self.approvals = sites.approve(self.document)
        for party in self.document.parties:
            assert sites.open(party, self.document, self.approvals)["kind"] == "ready"
        self.parcels = {}
        for i, site in enumerate(self.document.sites):
            sites.ask(site, {"kind": "start", "run": self.document.run}, x0=X0)
            question = {"kind": "ask", "run": self.document.run, "query": "value", "round": 0}
            self.parcels[str(i)] = sites.ask(site, question, _0=X0)[1]["parcel"]

    def shuffle(self, parcels: dict[str, np.ndarray], **header: Any) -> Any:
        asked = {"kind": "shuffle", "run": self.document.run, "round": 0, "query": "value"} | header
        return self.sites.ask(MIXER, asked, **parcels)

    def parcel(self, site: str, messages: list[bytes], batch: str = "0/value", document: Document | None = None) -> Any:
        """Of a silo that works for the server: whatever it likes, signed with its key."""
        document = document or self.document
        index = self.document.sites.index(site)
        return Outbox(self.sites.keys[site], document, index).submit(batch, messages)["parcel"]

    @property
    def size(self) -> int:
        return BATCH.sealed_size


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    federation = Federation(tmp_path_factory.mktemp("shuffled"), shuffler=True)
    yield Running(federation)
    federation.close()


def test_a_run_through_the_shuffler_ends_in_certificates(tmp_path):
    """A shuffler that is killed after every answer gives the same bytes again; the server's key opens all of them."""
    sites = Federation(tmp_path, shuffler=True)
    document = sites.document(config_of(**SHUFFLED_CONFIG))
    approvals = sites.approve(document)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError, match="holds no key"):
        drive(document, approvals, sites.rpc, run)
    shutil.copy(tmp_path / SERVER_KEY, run / SERVER_KEY)

    def restarted(site: str, data: bytes) -> bytes:
        answer = sites.rpc(site, data)
        if site == MIXER:
            sites.end(site)
            if b'"kind": "shuffle"' in data[:100]:
                assert sites.rpc(site, data) == answer
        return answer

    certificates = drive(document, approvals, restarted, run)
    lines = verified(certificates, document)
    assert len(lines) == 3 and lines[-1] == "mixer: shuffled 2 batches, each with every site's whole share"
    for each in certificates[:2]:
        assert sum(line["count"] for line in each["body"]["releases"]) == 2
        assert each["body"]["collusion"].keys() == {"other_silos_collude", "shuffler_colludes"}
    with pytest.raises(Refused, match="missing: mixer"):
        verified(certificates[:2], document)
    posing = sites.keys["south"].signed(SHUFFLED, certificates[2]["body"])
    with pytest.raises(Refused, match="not signed by the plan's shuffler"):
        verified([*certificates[:2], posing], document)
    assert sites.guard(MIXER).ledger.verify() == []
    check_shufflers_lies(sites, document, certificates)
    sites.close()


def check_shufflers_lies(sites: Federation, document: Document, certificates: list[Any]) -> None:
    """The shuffler has its key and signs what it likes; it cannot stand in for a site."""
    north, south, mixer = certificates
    signed = lambda **lie: sites.keys[MIXER].signed(SHUFFLED, mixer["body"] | lie)
    lies = {
        "not signed by the plan's shuffler": [north, mixer, signed(site="south")],
        "2 of mixer": [north, south, mixer, signed(date="2026-01-01T00:00:00Z")],
        "missing: south": [north, mixer],
        "none of a site; missing: mixer, north, south": [mixer],
    }
    for reason, told in lies.items():
        with pytest.raises(Refused, match=reason):
            verified(told, document)
    for lie in ({"batches": 0}, {"batches": 10**9}, {"ledger": [0, ""]}, {"ledger": [4, "a" * 64]}):
        with pytest.raises(Refused, match=r"a number of batches|its ledger is shorter"):
            verified([north, south, signed(**lie)], document)


def test_the_server_can_neither_open_a_parcel_nor_tell_who_sent_what(running):
    """It holds the parcels and its own key; only what the shuffler hands on opens."""
    with pytest.raises(ValueError):
        data = running.parcels["0"].tobytes()[64:]
        from silodp.channels.sealed import unwrapped

        unwrapped(data, running.sites.box, b"")
    _, arrays = running.shuffle(running.parcels)
    released = [row.tobytes() for row in arrays["sealed"]]
    assert len(released) == 32 and released != sorted(released)
    assert open_batch(released, running.sites.box, BATCH).refused == []


def test_a_batch_is_released_once_and_the_same_parcels_get_the_same_bytes(running):
    first, again = running.shuffle(running.parcels), running.shuffle(running.parcels, done=["nothing"])
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1]["sealed"], again[1]["sealed"])
    other = running.parcel("south", [bytes([i]) * running.size for i in range(12)])
    refused(running.shuffle(running.parcels | {"1": other}), "repeated")


def test_a_batch_is_of_the_silos_that_the_plan_has_in_this_round(running, monkeypatch):
    """Also where a round has fewer silos than the plan: which ones the server has no say in."""
    monkeypatch.setattr(Facts, "present", lambda facts, round: [1])
    refused(running.shuffle(running.parcels), "question")


NEXT = {"round": 1, "query": "difference"}


def forged(running: Running) -> dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any]]]:
    """Attacks on round 1, in which south works for the server."""
    north = running.parcel("north", [b"n" * (running.size - 1) + bytes([i]) for i in range(20)], "1/difference")
    mine = lambda count: [b"s" * (running.size - 1) + bytes([i]) for i in range(count)]
    south = running.parcel("south", mine(12), "1/difference")
    whole = {"0": north, "1": south}
    other = Document({**running.document.tree, "run": "0" * 32})
    return {
        "one silo fills the batch": ("question", {"1": running.parcel("south", mine(32), "1/difference")}, NEXT),
        "a larger share": ("question", whole | {"1": running.parcel("south", mine(13), "1/difference")}, NEXT),
        "a smaller share": ("question", whole | {"1": running.parcel("south", mine(11), "1/difference")}, NEXT),
        "an empty share": ("question", whole | {"1": running.parcel("south", [], "1/difference")}, NEXT),
        "without a silo": ("question", {"0": north}, NEXT),
        "a silo that is not in the plan": ("question", whole | {"2": south}, NEXT),
        "under another's name": ("question", {"0": south, "1": north}, NEXT),
        "of another batch": ("question", running.parcels, NEXT),
        "of another plan": ("question", whole | {"1": running.parcel("south", mine(12), "1/difference", other)}, NEXT),
        "a changed bit": ("question", whole | {"1": flipped(south, -1)}, NEXT),
        "a changed signature": ("question", whole | {"1": flipped(south, 3)}, NEXT),
        "cut": ("question", whole | {"1": south[:70]}, NEXT),
        "empty": ("question", whole | {"1": south[:0]}, NEXT),
        "numbers instead of bytes": ("question", whole | {"1": south.astype(np.float32)}, NEXT),
        "one message twelve times": (
            "question", whole | {"1": running.parcel("south", mine(1) * 12, "1/difference")}, NEXT
        ),
        "another's messages once more": (
            "question",
            whole | {"1": running.parcel("south", [b"n" * (running.size - 1) + bytes([i]) for i in range(12)],
                                         "1/difference")},
            NEXT,
        ),
        "a round after the last": ("question", whole, NEXT | {"round": 2}),
        "a round that is none": ("question", whole, NEXT | {"round": "x"}),
        "a query that is none": ("question", whole, NEXT | {"query": "value2"}),
        "a run that is not known": ("run", whole, NEXT | {"run": "1" * 32}),
        "terms of the server's own": ("question", {"0": north}, NEXT | {"terms": {"shares": [20, 0], "silos": 1}}),
        "a question for silos": ("kind", {}, {"kind": "ask"}),
        "set-up": ("kind", {}, {"kind": "open", "terms": {}}),
    }  # fmt: skip


def flipped(parcel: np.ndarray, place: int) -> np.ndarray:
    changed = parcel.copy()
    changed[place] ^= 1
    return changed


FORGED = (
    "one silo fills the batch",
    "a larger share",
    "a smaller share",
    "an empty share",
    "without a silo",
    "a silo that is not in the plan",
    "under another's name",
    "of another batch",
    "of another plan",
    "a changed bit",
    "a changed signature",
    "cut",
    "empty",
    "numbers instead of bytes",
    "one message twelve times",
    "another's messages once more",
    "a round after the last",
    "a round that is none",
    "a query that is none",
    "a run that is not known",
    "terms of the server's own",
    "a question for silos",
    "set-up",
)


@pytest.mark.parametrize("attack", FORGED)
def test_what_is_not_a_whole_batch_of_the_plan_is_refused(running, attack):
    attacks = forged(running)
    assert tuple(attacks) == FORGED
    code, parcels, header = attacks[attack]
    told, arrays = running.shuffle(parcels, **header)
    assert (told.get("code"), arrays) == (code, {})
    assert running.sites.guard(MIXER).ledger.count_answers(running.document.run) <= 1


def test_a_message_that_is_too_large_is_not_read(running):
    refused(running.shuffle({"0": np.zeros(100_001, np.uint8)}), "message")


# --- plans -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle(tmp_path_factory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("idle"), shuffler=True)
    yield federation
    federation.close()


def shuffled_tree(idle: Federation, shuffler: Any) -> dict[str, Any]:
    tree = proposed(config_of(**SHUFFLED_CONFIG), idle.roster, "wait", shuffler)
    return json.loads(json.dumps(tree))


def test_the_server_cannot_name_itself_as_the_shuffler(idle, tmp_path):
    """Nor another site, nor take the same key for both seals."""
    mine, box = signing.Key.create(tmp_path / "mine"), X25519PrivateKey.generate()
    own = mine.signed("shuffler", {"site": MIXER, "box": public_of(box), "versions": {}})
    document = Document(shuffled_tree(idle, {"facts": own, "server_key": public_of(idle.box)}))
    with pytest.raises(Denied) as told:
        approval.approve(idle.folders["north"], document)
    assert told.value.code == "shuffler"
    with pytest.raises(Denied) as told:
        approval.approve(idle.folders[MIXER], document)
    assert told.value.code == "not-listed"
    assert idle.shuffler is not None
    for facts, key in (
        (idle.shuffler, idle.shuffler["body"]["box"]),
        (idle.shuffler, "zz"),
        (idle.shuffler, "00" * 31 + "80"),
        (idle.shuffler | {"key": mine.public}, public_of(idle.box)),
        (idle.keys["south"].signed("shuffler", idle.shuffler["body"]), public_of(idle.box)),
        (mine.signed("shuffler", idle.shuffler["body"] | {"site": "south"}), public_of(idle.box)),
        (mine.signed("shuffler", {"site": MIXER}), public_of(idle.box)),
        (mine.signed("shuffler", idle.shuffler["body"] | {"site": "\x1b[31m../mixer"}), public_of(idle.box)),
        (idle.shuffler, public_of(idle.box).upper()),
    ):
        with pytest.raises(Refused):
            Document(shuffled_tree(idle, {"facts": facts, "server_key": key}))


def test_a_shuffler_imports_nothing_that_a_plan_names(idle, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    tree = shuffled_tree(idle, {"facts": idle.shuffler, "server_key": public_of(idle.box)})
    tree["plan"]["config"].setdefault("model", {})["kind"] = "this:x"
    with pytest.raises(Denied) as told:
        approval.screen(idle.folders[MIXER], Document(tree))
    assert told.value.code == "outside" and "this" not in sys.modules


def test_a_site_is_charged_with_the_level_that_its_messages_have(idle):
    """One level serves all silos. A plan that told a site of less would have its ledger charge less than is sent."""
    tree = shuffled_tree(idle, {"facts": idle.shuffler, "server_key": public_of(idle.box)})
    (noise,) = tree["plan"]["stages"][0]["multipliers"].values()
    noise[1] *= 10
    with pytest.raises(Refused, match="more noise than its config needs"):
        assert Document(tree).plan
    channel: Any = Plan.from_json(tree["plan"]).noised
    assert 1 / channel.eps0 >= noise[1]


def test_a_site_may_limit_what_is_left_if_all_others_collude(idle):
    """A site that signs for more records than it has makes a crowd that is not there."""
    document, policy = idle.document(config_of(**SHUFFLED_CONFIG)), read_policy(idle.folders["north"])
    key = idle.keys["north"].public
    check_document(policy, key, document)
    for most, refused in ((100.0, False), (1.01, True)):
        limits = policy.limits.model_copy(update={"epsilon_alone": most})
        with pytest.raises(Denied, match="colluding parties") if refused else nullcontext():
            check_document(policy.model_copy(update={"limits": limits}), key, document)


def test_what_is_left_alone_is_of_as_many_records_as_the_plan_protects_together(idle):
    """As the screen says it: an operator who limits it limits that."""
    alone = {}
    for unit in ("record", 3):
        privacy = SHUFFLED_CONFIG["privacy"] | {"unit": unit}
        plan = idle.document(config_of(**SHUFFLED_CONFIG | {"privacy": privacy})).plan
        levels = plan.if_others_collude(0, plan.spent(0), plan.config.privacy.delta, plan.together(0))
        alone[unit] = left_alone(plan, 0), max(levels.values())
    assert all(own == most for own, most in alone.values()) and alone[3][0] > 2 * alone["record"][0] / 3


def test_a_plan_without_its_shuffler_or_with_one_too_many_is_refused(idle):
    whole = shuffled_tree(idle, {"facts": idle.shuffler, "server_key": public_of(idle.box)})
    with pytest.raises(Refused, match="none where it needs one"):
        assert Document(whole | {"shuffler": None}).plan
    with pytest.raises(ConfigError, match="needs a shuffler"):
        proposed(config_of(**SHUFFLED_CONFIG), idle.roster)
    with pytest.raises(ConfigError, match="needs no shuffler"):
        proposed(config_of(), idle.roster, shuffler=whole["shuffler"])
    with pytest.raises(Refused, match="must have"):
        Document({name: part for name, part in whole.items() if name != "shuffler"})


def test_nobody_begins_without_the_shufflers_signature_and_it_not_without_the_sites(idle, tmp_path):
    document = idle.document(config_of(**SHUFFLED_CONFIG))
    approvals = idle.approve(document)
    for party in ("north", MIXER):
        assert idle.open(party, document, approvals[:2])["code"] == "not-signed"
        assert idle.open(party, document, approvals[1:])["code"] == "not-signed"
    create_box(tmp_path / "other.key")
    with pytest.raises(ConfigError, match="not the key that the plan's messages are sealed to"):
        put_run(tmp_path / "run", document, approvals, tmp_path / "other.key")
    unseen = idle.document(config_of(**SHUFFLED_CONFIG))
    signed = [signing.Key.signed(key, "approval", {"site": site, "run": unseen.run, "fingerprint": unseen.fingerprint})
              for site, key in idle.keys.items()]  # fmt: skip
    assert idle.open(MIXER, unseen, signed)["code"] == "not-approved"
    told = approval.screen(idle.folders[MIXER], document)
    assert "north, south" in told and "32 messages" in told and len(told.splitlines()) < 24
    assert "shuffled by  mixer" in approval.screen(idle.folders["north"], document)
    assert "mixer: shuffles" in approval.show(document)
