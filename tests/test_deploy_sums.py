"""Sums under masks through guards: sites that are away in a round, servers and guards that start again in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from silodp.config import Config
from silodp.deploy.approval import screen
from silodp.deploy.certify import verified
from silodp.deploy.chain import Head
from silodp.deploy.desk import question_of
from silodp.deploy.document import Document
from silodp.deploy.policy import Denied
from silodp.deploy.server import MODEL, drive
from silodp.deploy.vouch import SHORT, Vouch
from silodp.deploy.wire import Late, decode
from silodp.errors import ConfigError, Refused
from silodp.privacy.sums import LOSS
from tests.guards import Federation, config_of

SIZES = {"north": 20, "south": 12, "east": 16, "west": 14}
DPGD = {"name": "dp-gd", "rounds": 2, "step_size": 0.3, "clip": 1.0, "clip_difference": None, "restart": None}


def summed(**privacy: int) -> Config:
    return config_of(privacy={"trust": "aggregated"} | privacy, algorithm=DPGD)


def test_the_screen_says_what_is_left_if_others_collude(sites):
    """A plan that is calibrated against nobody is refused, until the operator says that it may be."""
    with pytest.raises(Denied, match="fewer colluding parties than this site wants"):
        screen(sites.folders["south"], sites.document(summed(colluding=0)))
    policy = sites.folders["south"] / "guard.toml"
    policy.write_text(policy.read_text().replace("[limits]", "[limits]\ncolluding = 0"))
    told = screen(sites.folders["south"], sites.document(summed(colluding=0)))
    assert "if 0 of 4 silos collude: epsilon 1\n" in told and "if all others collude: epsilon 2." in told
    assert "for every record of this site" in told and len(told.splitlines()) < 24


class Stopped(Exception):
    """The server's program."""


class Sites(Federation):
    """Some are away; and the server stops at a message, with the guard that has just answered it."""

    def __init__(self, root: Path):
        super().__init__(root, SIZES)
        self.away: set[str] = set()
        self.deaf: set[str] = set()  # to questions
        self.left = -1
        self.given: dict[tuple[str, bytes], bytes] = {}

    def rpc(self, site: str, data: bytes) -> bytes:
        header = decode(data)[0]
        if site in self.away or (site in self.deaf and header["kind"] in ("ask", "sum")):
            raise Late(f"{site}: away")
        answer = super().rpc(site, data)
        if header["kind"] in ("ask", "sum") and decode(answer)[0]["kind"] != "refused":
            assert self.given.setdefault((site, question_of(*decode(data))), answer) == answer
        if header["kind"] in ("ask", "sum"):
            self.left -= 1
            if self.left == 0:
                self.end(site)
                raise Stopped
        return answer


@pytest.fixture
def sites(tmp_path) -> Iterator[Sites]:
    federation = Sites(tmp_path)
    yield federation
    federation.close()


def check_certificates(document: Document, certificates: list[dict], counts: dict[str, int]) -> None:
    assert len(verified(certificates, document)) == len(SIZES)
    for i, each in enumerate(certificates):
        body = each["body"]
        assert {line["stream"]: line["count"] for line in body["releases"]} == {"value": counts[body["site"]]}
        assert all(line["loss"] == LOSS for line in body["releases"])
        nobody, some, all_others = body["collusion"].values()
        assert nobody < some < all_others
        assert body["epsilon"] == pytest.approx(some, rel=1e-6) and some <= document.plan.epsilon(i) * (1 + 1e-6)


def test_a_run_without_missing_sites(sites, tmp_path):
    """Its certificates tell of all rounds, and of all that may collude: a site may sign less, and is not believed."""
    document = sites.document(summed(colluding=2))
    certificates = drive(document, sites.approve(document), sites.rpc, tmp_path / "run")
    check_certificates(document, certificates, dict.fromkeys(SIZES, 2))
    body = certificates[0]["body"]
    levels, less = body["collusion"], {"releases": [line | {"count": 1} for line in body["releases"]]}
    for reason, lie in (
        ("a number of releases", less),
        ("fewer streams", {"releases": []}),
        ("if others collude", {"collusion": dict.fromkeys(levels, 0.0)}),
        ("if others collude", {"collusion": None}),
        ("if others collude", {"collusion": dict(list(levels.items())[:1])}),
    ):
        with pytest.raises(Refused, match=reason):
            verified([sites.keys["north"].signed("certificate", body | lie), *certificates[1:]], document)


def test_a_round_does_without_a_site_and_its_certificate_comes_later(sites, tmp_path):
    document = sites.document(summed(colluding=1, missing=1))
    approvals = sites.approve(document)
    said: list[str] = []

    def rpc(site: str, data: bytes) -> bytes:
        header = decode(data)[0]
        said.append(f"{header['kind']} {header.get('round')} {header.get('step')}")
        if site == "west" and header["kind"] == "ask" and header["round"] == 1:
            sites.away = {"west"}  # it has shared, and does not answer
        return sites.rpc(site, data)

    with pytest.raises(Late, match="west"):
        drive(document, approvals, rpc, tmp_path / "run")
    assert (tmp_path / "run" / MODEL).is_file() and "sum 1 open" in said
    sites.away = set()
    certificates = drive(document, approvals, rpc, tmp_path / "run")
    check_certificates(document, certificates, dict.fromkeys(SIZES, 2) | {"west": 1})


def test_a_server_that_starts_again_in_a_sum_goes_on_with_the_same_silos(sites, tmp_path):
    """It stops in each step of the first round, each time with a guard. A site is away until the silos have confirmed
    who takes part without it; when it is back, it must not be told to them."""
    document = sites.document(summed(colluding=1, missing=1))
    approvals = sites.approve(document)
    sites.deaf = {"west"}
    for stop in (2, 5, 5, 5, 5, 5):  # three silos, six steps
        sites.left = stop
        with pytest.raises(Stopped):
            drive(document, approvals, sites.rpc, tmp_path / "run")
        sites.deaf = {"west"} if stop == 2 else set()
    sites.left = -1
    certificates = drive(document, approvals, sites.rpc, tmp_path / "run")
    check_certificates(document, certificates, dict.fromkeys(SIZES, 2) | {"west": 1})


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        ({"name": "spider", "clip_difference": 0.7, "restart": 2}, {"whiten": {}}),
        ({"name": "mu2", "batch": 1, "diameter": 4.0}, {}),
    ],
)
def test_what_a_returning_site_would_have_to_know_is_refused(sites, algorithm, sections):
    privacy = {"trust": "aggregated", "colluding": 1, "missing": 1}
    with pytest.raises((ConfigError, Refused), match="a site that comes back would not know what it missed"):
        sites.document(config_of(privacy=privacy, algorithm=DPGD | algorithm, **sections))


def test_a_server_must_show_what_the_others_saw(sites):
    """Of as many sites as the plan has in a sum: fewer could hide that others were shown another point."""
    document = sites.document(summed(colluding=1, missing=1))
    vouches = {site: Vouch(sites.keys[site], document) for site in document.sites}
    question, points = "ask 0/value", "aa"
    head = Head(5, "a" * SHORT)
    echo = {site: vouch.saw(question, points, head, {}) for site, vouch in vouches.items()}
    some = {site: echo[site] for site in ("north", "south", "east")}
    same = lambda told: vouches["north"].check_same(told, question, points, {}, lambda seq: "a" * 64)
    assert same(some) == dict.fromkeys(("south", "east"), head)
    lied = some | {"south": vouches["south"].saw(question, "bb", head, {})}
    endless = some | {"south": vouches["south"].saw(question, points, Head(2**63, head.hash), {})}
    for bad in ({"north": echo["north"], "south": echo["south"]}, {}, None, lied, endless):
        with pytest.raises(Denied):
            same(bad)
