"""What a hostile site can do to the server with its answers: it is refused in a line, and nothing of it is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from silodp.deploy.certify import verified
from silodp.deploy.checkpoints import model_of, put_first
from silodp.deploy.coordinator import exchange
from silodp.deploy.files import held
from silodp.deploy.kits import put_run
from silodp.deploy.server import CERTIFICATES, MODEL, drive
from silodp.deploy.wire import decode, encode
from silodp.errors import ConfigError, Refused
from tests.guards import Federation, config_of

Header = dict[str, Any]
SHORT = {"name": "dp-gd", "rounds": 1, "clip_difference": None, "restart": None}


class Told:
    """A run whose answers are kept: a server that asks the same gets the same, and its guards need not work again."""

    def __init__(self, sites: Federation, folder: Any):
        self.sites, self.document = sites, sites.document(config_of(algorithm=SHORT))
        self.approvals, self.answers, self.folder = sites.approve(self.document), {}, folder
        self.certificates = drive(self.document, self.approvals, self._heard, folder)

    def _heard(self, site: str, data: bytes) -> bytes:
        self.answers[site, data] = self.sites.rpc(site, data)
        return self.answers[site, data]

    def again(self, folder: Any, change: Callable[[Header], Header] = dict, kind: str = "") -> list[Header]:
        """The same run, in which south answers questions of one kind as it likes."""
        if kind == "certificate":  # all rounds are over
            shutil.copy(self.folder / MODEL, folder / MODEL)

        def rpc(site: str, data: bytes) -> bytes:
            answer = self.answers[site, data]
            if site != "south" or decode(data)[0]["kind"] != kind:
                return answer
            header, arrays = decode(answer)
            return encode(change(header), arrays)

        return drive(self.document, self.approvals, rpc, folder)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Iterator[Told]:
    sites = Federation(tmp_path_factory.mktemp("sites"))
    yield Told(sites, tmp_path_factory.mktemp("run"))
    sites.close()


GRID = {"kind": "grid", "exponents": 5}
LIES: dict[str, tuple[str, Callable[[Header], Header]]] = {
    "another plan": ("plan", lambda header: header | {"fingerprint": "00" * 32}),
    "a ledger that is none": ("plan", lambda header: header | {"ledger": "x"}),
    "a start without an answer": ("start", lambda header: {}),
    "a start with a text": ("start", lambda header: header | {"gradients": "many"}),
    "a start beyond all numbers": ("start", lambda header: header | {"gradients": 10**400}),
    "a start without end": ("start", lambda header: header | {"gradients": float("inf")}),
    "no answer": ("ask", lambda header: {}),
    "points that it has not signed": ("ask", lambda header: header | {"seen": [*header["seen"][:4], "00" * 64]}),
    "not a word of what it saw": ("ask", lambda header: {k: part for k, part in header.items() if k != "seen"}),
    "a grid that is none": ("ask", lambda header: header | GRID),
    "no certificate": ("certificate", lambda header: {}),
    "a text as a certificate": ("certificate", lambda header: {"certificate": "I, south, spent nothing"}),
    "a certificate that nobody signed": (
        "certificate", lambda header: {"certificate": header["certificate"] | {"signature": "00" * 64}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_no_honest_site_sends_is_refused(told, tmp_path, lie):
    kind, change = LIES[lie]
    with pytest.raises(Refused) as caught:
        told.again(tmp_path, change, kind)
    assert str(caught.value).isprintable()
    assert not (tmp_path / CERTIFICATES).exists()


def test_the_honest_answers_would_have_been_taken_and_still_are(told, tmp_path):
    """A bad certificate is not kept: with the right one the same folder comes to its end."""
    with pytest.raises(Refused):
        told.again(tmp_path, lambda header: {}, "certificate")
    assert told.again(tmp_path) == told.certificates


SIGNED = {
    "a text as a total": {"total_epsilon": "none"},
    "less than nothing": {"total_epsilon": -1.0},
    "more than any number": {"epsilon": 10**400},
    "a total that is more than any number": {"total_epsilon": 10**400, "runs": 2},
    "a list as a model": {"model": []},
    "a ledger without a head": {"ledger": [3]},
    "a date that reaches a terminal": {"date": "\x1b[2J"},
    "no collusion levels": {"collusion": {"all": None}},
    "a day that is none": {"date": "2026-02-30T00:00:00Z"},
    "a date before all clocks": {"date": "0001-01-01T00:00:00Z"},
    "a total that says nothing": {"total_delta": 0.5, "total_epsilon": 1e-9},
    "a total that is not that of its one run": {"total_epsilon": 1e9},
    "another run": {"run": "0" * 32},
    "another site": {"site": "north"},
    "fewer releases": {"epsilon": 1e-3},
    "releases that are none": {"releases": [{"stream": "value"}]},
}


@pytest.mark.parametrize("lie", SIGNED)
def test_a_certificate_is_more_than_a_signature(told, lie):
    """A site has its key and signs what it likes."""
    north, south = told.certificates
    forged = told.sites.keys["south"].signed("certificate", south["body"] | SIGNED[lie])
    verified([north, told.sites.keys["south"].signed("certificate", south["body"])], told.document)
    with pytest.raises(Refused):
        verified([north, forged], told.document)


def test_there_is_one_certificate_of_every_site(told):
    north, south = told.certificates
    again = told.sites.keys["south"].signed("certificate", south["body"] | {"epsilon": 99.0})
    posing = told.sites.keys["south"].signed("certificate", south["body"] | {"site": "east"})
    for given, document in (([north, south, again], told.document), ([south, again], None), ([south, posing], None)):
        with pytest.raises(Refused, match="2 of"):
            verified(given, document)
    with pytest.raises(Refused, match="missing: north, south"):
        verified([], told.document)
    with pytest.raises(Refused, match="none of a site"):
        verified([])
    many = {"releases": [line | {"stream": str(i)} for line in south["body"]["releases"] for i in range(501)]}
    with pytest.raises(Refused, match="without --plan at most 500"):
        verified([told.sites.keys["south"].signed("certificate", south["body"] | many)])


HEAVY = {
    "releases without number": {"count": 10**15, "sampling": {"kind": "Poisson", "sampling_rate": 0.1}},
    "messages without number": {
        "sampling": {"kind": "Messages", "round": {"kind": "Shuffled", "messages": 10**12, "own": 10**12}},
    },
    "messages together without number": {
        "count": 10**5,
        "sampling": {"kind": "Messages", "round": {"kind": "Shuffled", "messages": 9, "own": 9, "together": 10**5}},
    },
}


@pytest.mark.parametrize("lie", HEAVY)
def test_what_would_take_hours_or_all_memory_to_recount_is_refused(told, lie):
    """Without a plan, which says how much there is."""
    body = told.certificates[1]["body"]
    heavy = {"epsilon": 1e9, "releases": [body["releases"][0] | HEAVY[lie]]}
    with pytest.raises(Refused, match="without --plan no more"):
        verified([told.sites.keys["south"].signed("certificate", body | heavy)])


def other_lines(body: Header, **change: Any) -> Header:
    return {"releases": [line | change for line in body["releases"]], "epsilon": 1e9, "total_epsilon": 1e9}


def test_what_a_certificate_counts_is_what_was_planned(told):
    """Each of these is signed, and consistent in itself."""
    north, south = told.certificates
    body, first = south["body"], south["body"]["releases"][0]
    lies: list[tuple[str, Header]] = [
        ("fewer streams", {"releases": [], "epsilon": 0, "total_epsilon": 0}),
        ("delta", {"delta": 0.99}),
        ("who sees what", {"sees": "nobody anything"}),
        ("other noise", other_lines(body, multiplier=first["multiplier"] / 10)),
        ("other noise", other_lines(body, multiplier=None)),
        ("other noise", other_lines(body, sampling={"kind": "Poisson", "rate": 0.01})),
        ("other noise", other_lines(body, held_out=True)),
        ("other noise", other_lines(body, stream="another")),
        ("a number of releases", other_lines(body, count=1000)),
        ("a number of releases", other_lines(body, count=0)),
        ("a number of releases", other_lines(body, count=True)),
        ("twice", {"releases": [*body["releases"], first], "epsilon": 1e9}),
        ("over all runs", {"total_epsilon": 0.0}),
        ("over all runs", {"runs": 0}),
        ("versions", {"versions": {}}),
        ("if others collude", {"collusion": {"nobody_colludes": 0.0}}),
        ("another number of records", {"records_together": 2, "epsilon": 1e9}),
        ("its ledger is shorter", {"ledger": [3, "a" * 64]}),
        ("its last entry is none", {"ledger": [9, ""]}),
    ]
    for reason, lie in lies:
        with pytest.raises(Refused, match=reason):
            verified([north, told.sites.keys["south"].signed("certificate", body | lie)], told.document)


class Scripted:
    """A silo that says these things."""

    def __init__(self, *headers: Header):
        self.headers = list(headers)

    def send(self, header: Header, arrays: Any) -> None:
        pass

    def receive(self) -> tuple[Header, dict[str, np.ndarray]]:
        return self.headers.pop(0), {}


def test_silos_that_do_not_say_which_keys_they_took_are_noticed():
    agreed = {"kind": "ready", "fingerprint": "ab"}
    for other in ({}, {"fingerprint": ["ab"]}, {"fingerprint": "cd"}):
        with pytest.raises(Refused, match="different plans or keys"):
            exchange([Scripted(agreed), Scripted(other)], [{"key": "11"}, {"key": "22"}])
    exchange([Scripted(agreed), Scripted(agreed)], [{"key": "11"}, {"key": "22"}])


def test_a_new_plan_begins_with_what_an_earlier_run_had_come_to(told, tmp_path):
    """As when a site is gone for good. What has no model, or none of this size, is said before anything is written."""
    sites, asked = told.sites, []
    document = sites.document(config_of(algorithm=SHORT))
    model = model_of(told.folder, document)
    named = sorted(load_file(told.folder / MODEL).items())
    np.testing.assert_array_equal(model, np.concatenate([array.ravel() for _, array in named]))
    put_first(tmp_path, model)

    def rpc(site: str, data: bytes) -> bytes:
        header, arrays = decode(data)
        if header["kind"] == "start":
            asked.append(arrays["x0"])
        return sites.rpc(site, data)

    drive(document, sites.approve(document), rpc, tmp_path)
    assert len(asked) == 2 and all(np.array_equal(x0, model) for x0 in asked)
    with pytest.raises(ConfigError, match="no round of that run is over"):
        model_of(tmp_path / "none", document)
    with pytest.raises(ConfigError, match="whiten first, so it begins anew"):
        model_of(told.folder, sites.document(config_of(algorithm=SHORT, whiten={"share": 0.2, "clip": 1.0})))


def test_a_folder_holds_the_run_of_one_plan(told, tmp_path):
    put_run(tmp_path, told.document, told.approvals)
    put_run(tmp_path, told.document, told.approvals)  # resumed
    other = told.sites.document(config_of(algorithm=SHORT))
    with pytest.raises(Refused, match="has not signed this plan"):
        put_run(tmp_path, told.document, told.approvals[:1])
    with pytest.raises(ConfigError, match="the run of another plan"):
        put_run(tmp_path, other, told.sites.approve(other))
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    with held(tmp_path, "server"), pytest.raises(ConfigError, match="another server works in it"):
        put_run(tmp_path, told.document, told.approvals)
    assert before == {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
