"""Sealed messages and the shuffler, as logic and as a process of its own."""

import random
import secrets
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import spearmanr

from silodp.channels.sealed import OVERHEAD, Batch, Terms, open_batch, open_sealed, seal
from silodp.deploy.links import ShufflerProcess
from silodp.deploy.shuffler import LocalShuffler, split
from silodp.deploy.shuffling import LocalOutbox
from silodp.deploy.wire import decode, encode
from silodp.errors import Gone, Refused

KEY = X25519PrivateKey.generate()
BATCH = Batch(round=3, name="differences", message_size=40)


def _sealed(message: bytes, batch: Batch = BATCH) -> bytes:
    return seal(message, KEY.public_key(), batch)


def test_round_trip_and_one_length_for_all():
    messages = [b"x" * size for size in range(41)]
    sealed = [_sealed(message) for message in messages]
    assert {len(item) for item in sealed} == {40 + OVERHEAD}
    assert [open_sealed(item, KEY, BATCH) for item in sealed] == messages
    assert _sealed(b"same") != _sealed(b"same")


def test_two_thousand_bit_flips_are_all_refused():
    sealed, generator = [_sealed(bytes([i] * 30)) for i in range(20)], random.Random(0)
    for trial in range(2000):
        changed = bytearray(sealed[trial % 20])
        bit = generator.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Refused):
            open_sealed(bytes(changed), KEY, BATCH)


@pytest.mark.parametrize(
    "other", [BATCH._replace(round=4), BATCH._replace(name="values"), BATCH._replace(message_size=41)]
)
def test_a_message_opens_in_its_own_batch_only(other):
    with pytest.raises(Refused):
        open_sealed(_sealed(b"m"), KEY, other)


def test_wrong_key_is_refused_and_long_message_named():
    with pytest.raises(Refused, match="does not open"):
        open_sealed(_sealed(b"m"), X25519PrivateKey.generate(), BATCH)
    with pytest.raises(ValueError, match="at most 40 bytes, not 41"):
        _sealed(b"x" * 41)


def test_batch_reports_duplicates_and_tampering():
    good = [_sealed(b"a"), _sealed(b"b")]
    opened = open_batch([*good, good[0], good[1][:-1] + bytes([good[1][-1] ^ 1]), b"short"], KEY, BATCH)
    assert opened.messages == [b"a", b"b"]
    assert [reason.split(":")[0] for reason in opened.refused] == ["duplicate", "does not open", "wrong size"]


SIZE = 8  # bytes of a message that stands for a sealed one
AGREED = Terms(sealed_size=SIZE, shares=(3, 1, 2, 2, 2), silos=3)


def setup(terms: Any = None, **more: Any) -> dict[str, Any]:
    told = {"value": AGREED._asdict()} if terms is None else terms
    return {"kind": "setup", "run": "r", "terms": told} | more


class Talk:
    """A shuffler in this process, and the silos' ways to it."""

    def __init__(self, folder: Path, terms: Terms = AGREED):
        self.shuffler, self.terms = LocalShuffler(folder), terms
        box = self.ask({"kind": "hello"})[0]["box"]
        invitation = {"box": box, "server_key": KEY.public_key().public_bytes_raw().hex()}
        self.outboxes = [LocalOutbox(invitation, i) for i in range(len(terms.shares))]
        assert self.ask(setup({"value": terms._asdict()}))[0] == {"kind": "ready"}

    def ask(self, header: dict[str, Any], arrays: Any = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return decode(self.shuffler.reply(encode(header, dict(arrays or {}))))

    def parcel(self, silo: int, count: int | None = None, batch: str = "0/value") -> np.ndarray:
        many = self.terms.shares[silo] if count is None else count
        return self.posted(silo, [secrets.token_bytes(SIZE) for _ in range(many)], batch)

    def posted(self, silo: int, sealed: list[bytes], batch: str = "0/value") -> np.ndarray:
        return self.outboxes[silo].submit(batch, sealed)["parcel"]

    def shuffle(self, parcels: dict[int, np.ndarray], round: int = 0, **more: Any) -> Any:
        arrays = {str(i): parcel for i, parcel in parcels.items()}
        return self.ask({"kind": "shuffle", "round": round, "query": "value"} | more, arrays)


@pytest.fixture
def talk(tmp_path) -> Iterator[Talk]:
    made = Talk(tmp_path / "shuffler")
    yield made
    made.shuffler.close()


def test_a_batch_is_released_once_and_the_same_parcels_get_the_same_bytes(talk, tmp_path):
    parcels = {i: talk.parcel(i) for i in (0, 1, 2)}
    header, arrays = talk.shuffle(parcels)
    assert header["kind"] == "answer" and arrays["sealed"].shape == (6, SIZE)
    assert talk.shuffle(parcels)[1]["sealed"].tobytes() == arrays["sealed"].tobytes()
    told, nothing = talk.shuffle(parcels | {1: talk.parcel(1)})
    assert "answered already, to another question" in told["reason"] and not nothing
    talk.shuffler.close()  # as if its process had been killed
    with LocalShuffler(tmp_path / "shuffler") as again:
        assert decode(again.reply(encode(setup(), {})))[0] == {"kind": "ready"}
        arrays_again = decode(again.reply(question(parcels)))[1]
        assert arrays_again["sealed"].tobytes() == arrays["sealed"].tobytes()
        assert "other terms" in decode(again.reply(encode(setup(run="s"), {})))[0]["reason"]
    talk.shuffler = LocalShuffler(tmp_path / "shuffler")


def question(parcels: dict[int, np.ndarray]) -> bytes:
    header = {"kind": "shuffle", "round": 0, "query": "value"}
    return encode(header, {str(i): parcel for i, parcel in parcels.items()})


def test_what_is_not_a_whole_batch_is_refused(talk):
    """One silo cannot fill the place of another, nobody may be left out, and a parcel is of its silo and batch."""
    good = {i: talk.parcel(i) for i in (0, 1, 2)}
    twice = [b"12345678"] * 2
    cases = [
        ({0: good[0], 1: good[1]}, "a parcel of each of 3 silos"),
        (good | {3: talk.parcel(3)}, "a parcel of each of 3 silos"),
        ({0: good[0], 1: good[1], 7: good[2]}, "a parcel of each of 3 silos"),
        (good | {0: talk.parcel(0, 2)}, "silo 0 has not sent its whole share"),
        (good | {0: talk.parcel(0, 4)}, "silo 0 has not sent its whole share, or more than that"),
        (good | {2: talk.posted(2, twice)}, "a message is in it twice"),
        (good | {2: talk.parcel(3)}, "does not open"),
        (good | {2: talk.parcel(2, batch="1/value")}, "does not open"),
        (good | {2: np.zeros(3, np.float32)}, "is none"),
    ]
    for parcels, reason in cases:
        told, nothing = talk.shuffle(parcels)
        assert told["kind"] == "refused" and reason in told["reason"], told
        assert not nothing
    assert "the plan has no such query" in talk.shuffle(good, query="other")[0]["reason"]
    assert talk.shuffle(good)[0]["kind"] == "answer"


def _order_correlation(released: list[bytes], arrived: list[bytes]) -> float:
    place = {item: index for index, item in enumerate(arrived)}
    return float(spearmanr(np.arange(len(arrived)), [place[item] for item in released]).statistic)  # type: ignore[attr-defined]


def test_order_of_release_says_nothing_about_order_of_arrival(tmp_path):
    talk = Talk(tmp_path / "shuffler", Terms(SIZE, (2000,) * 5, 5))
    # Arrival in the order of the content too: sorting instead of shuffling would show.
    arrived = [index.to_bytes(SIZE, "big") for index in range(10_000)]
    _, arrays = talk.shuffle({i: talk.posted(i, arrived[2000 * i : 2000 * (i + 1)]) for i in range(5)})
    talk.shuffler.close()
    released = split(arrays["sealed"], "0/value", SIZE)
    assert sorted(released) == arrived
    assert abs(_order_correlation(released, arrived)) < 4.5 / 100  # standard error 1/100
    neighbours = [int.from_bytes(b) - int.from_bytes(a) for a, b in pairwise(released)]
    assert np.mean(np.abs(neighbours) == 1) < 0.002
    assert _order_correlation(arrived, arrived) == pytest.approx(1)  # a missing shuffle would show


GOOD_TERMS = AGREED._asdict()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"", "too short"),
        (encode({"kind": "shuffle"}, {})[:6], "announced"),
        (b"\x01\x00\x00\x00\xff" + encode({}, {}), "cannot be read"),
        (encode({"kind": "shred"}, {}), "unknown kind"),
        (encode({"kind": "shuffle"}, {}), "round"),
        (encode({"kind": "shuffle", "round": "x", "query": "value"}, {}), "invalid literal"),
        (encode(setup({}), {}), "other terms"),
        (encode(setup([]), {}), "other terms"),
        (encode(setup({"value": {"silos": 1}}), {}), "terms must be an object"),
        (encode(setup({"value": GOOD_TERMS | {"more": 1}}), {}), "terms must be an object"),
        (encode(setup({"value": GOOD_TERMS | {"silos": float("inf")}}), {}), "terms must be an object"),
        (encode(setup({"value": GOOD_TERMS | {"shares": [3, -1, 2, 2, 2]}}), {}), "terms must be an object"),
        (encode(setup({"value": GOOD_TERMS | {"shares": [3, 9, 2, 2, 2]}}), {}), "other terms"),
    ],
)
def test_bad_frames_are_refused_and_not_fatal(talk, request_, reason):
    header, arrays = decode(talk.shuffler.reply(request_))
    assert (header["kind"], arrays) == ("refused", {})
    assert reason in header["reason"]
    assert talk.shuffle({i: talk.parcel(i) for i in (0, 1, 2)})[0]["kind"] == "answer"


def test_a_batch_is_of_as_many_silos_as_the_plan_has_each_with_its_whole_share():
    """Nor of more: a larger share would let one silo fill a batch."""
    good = AGREED._replace(shares=(3, 1, 2, 0, 0))
    assert AGREED.allow(good) and AGREED.allow(AGREED._replace(shares=(0, 0, 2, 2, 2)))
    for other in (
        {"shares": (3, 1, 0, 0, 0), "silos": 2}, {"shares": (3, 1, 0, 0, 0)}, {"shares": (3, 1, 1, 0, 0)},
        {"shares": (4, 1, 2, 0, 0)}, {"shares": (3, 1, 2, 2, 0), "silos": 4}, {"sealed_size": 7}, {"sealed_size": 9},
    ):  # fmt: skip
        assert not AGREED.allow(good._replace(**other))


def test_as_a_process_of_its_own(tmp_path):
    with ShufflerProcess(tmp_path / "shuffler", patience=60.0) as process:
        process.send({"kind": "hello"}, {})
        invitation = {"box": process.receive()[0]["box"], "server_key": KEY.public_key().public_bytes_raw().hex()}
        process.send(setup({"differences": Terms(BATCH.sealed_size, (12,) * 5, 5)._asdict()}), {})
        assert process.receive()[0] == {"kind": "ready"}
        sealed = {i: [_sealed(bytes([i, record])) for record in range(12)] for i in range(5)}
        parcels = {
            str(i): LocalOutbox(invitation, i).submit("3/differences", own)["parcel"] for i, own in sealed.items()
        }
        process.send({"kind": "shuffle", "round": 3, "query": "differences"}, parcels)
        released = split(process.receive()[1]["sealed"], "differences", BATCH.sealed_size)
        process.process.kill()
        with pytest.raises(Gone, match="the shuffler's process ended"):
            process.ask(b"")
    opened = open_batch(released, KEY, BATCH)
    assert opened.refused == []
    expected = [bytes([silo, record]) for silo in range(5) for record in range(12)]
    assert sorted(opened.messages) == expected
    assert opened.messages != expected
    with pytest.raises(Refused, match="no batch of messages of 9 bytes"):
        split(np.zeros((1, 8), np.uint8), "others", 9)
