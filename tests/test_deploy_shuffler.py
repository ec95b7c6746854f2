"""Sealed messages and the shuffler, as logic and as a process of its own."""

import json
import random
import secrets
import socket
import struct
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import spearmanr

from silodp.channels.sealed import OVERHEAD, Batch, Terms, open_batch, open_sealed, seal
from silodp.deploy.shuffler import TOKEN, Shuffler, ShufflerClient, answer
from silodp.deploy.wire import decode, encode
from silodp.errors import Refused

KEY = X25519PrivateKey.generate()
BATCH = Batch(round=3, name="differences", message_size=40)
SERVER, SILOS = b"s" * TOKEN, [bytes([i]) * TOKEN for i in range(5)]


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


def _shuffler(shares: tuple[int, ...] = (3, 1, 0, 0, 0)) -> Shuffler:
    shuffler = Shuffler(SERVER, SILOS)
    shuffler.open(SERVER, "batch", Terms(8, shares, sum(share > 0 for share in shares)))
    return shuffler


def _submit(shuffler: Shuffler, silo: int, count: int) -> None:
    for _ in range(count):
        shuffler.submit(SILOS[silo], "batch", secrets.token_bytes(8))


def test_released_once_and_only_when_complete():
    shuffler = _shuffler()
    _submit(shuffler, 0, 3)
    with pytest.raises(Refused, match="1 of 2 silos have not sent their whole share"):
        shuffler.release(SERVER, "batch")
    _submit(shuffler, 1, 1)
    assert len(shuffler.release(SERVER, "batch")) == 4
    with pytest.raises(Refused, match="released already"):
        shuffler.release(SERVER, "batch")


def test_every_silos_whole_share_is_required():
    """One silo cannot fill the place of another, and a last message that is missing is one too few."""
    shuffler = _shuffler((10, 10, 0, 0, 0))
    _submit(shuffler, 0, 10)
    with pytest.raises(Refused, match="over its share"):
        _submit(shuffler, 0, 1)
    _submit(shuffler, 1, 9)
    with pytest.raises(Refused, match="1 of 2 silos"):
        shuffler.release(SERVER, "batch")
    with pytest.raises(Refused, match="over its share: this silo has sent its 0"):
        _submit(shuffler, 2, 1)
    _submit(shuffler, 1, 1)
    assert len(shuffler.release(SERVER, "batch")) == 20


def test_refusals_have_reasons():
    shuffler = _shuffler()
    shuffler.submit(SILOS[0], "batch", b"12345678")
    cases = [
        (SILOS[1], "batch", b"12345678", "duplicate"),
        (SILOS[1], "batch", b"1234567", "wrong size"),
        (b"?" * TOKEN, "batch", b"abcdefgh", "unknown silo"),
        (SERVER, "batch", b"abcdefgh", "unknown silo"),
        (SILOS[1], "other", b"abcdefgh", "unknown batch"),
    ]
    for token, name, sealed, reason in cases:
        with pytest.raises(Refused, match=reason):
            shuffler.submit(token, name, sealed)
    _submit(shuffler, 0, 2)
    with pytest.raises(Refused, match="over its share"):
        _submit(shuffler, 0, 1)
    _submit(shuffler, 1, 1)
    shuffler.release(SERVER, "batch")
    with pytest.raises(Refused, match="late"):
        _submit(shuffler, 1, 1)


def test_only_the_server_opens_and_releases_and_terms_stay():
    shuffler, terms = _shuffler(), Terms(8, (1, 0, 0, 0, 0), 1)
    with pytest.raises(Refused, match="only the server"):
        shuffler.release(SILOS[0], "batch")
    with pytest.raises(Refused, match="only the server"):
        shuffler.open(SILOS[0], "mine", terms)
    with pytest.raises(Refused, match="exists already"):
        shuffler.open(SERVER, "batch", terms)
    for shares in ((1,) * 6, (1,) * 4, (0,) * 5):
        with pytest.raises(Refused, match="each of 5 silos"):
            shuffler.open(SERVER, "huge", Terms(8, shares, 5))
    for number in range(63):
        shuffler.open(SERVER, f"{number}", terms)
    with pytest.raises(Refused, match="too many batches"):
        shuffler.open(SERVER, "one more", terms)


def _order_correlation(released: list[bytes], arrived: list[bytes]) -> float:
    place = {item: index for index, item in enumerate(arrived)}
    return float(spearmanr(np.arange(len(arrived)), [place[item] for item in released]).statistic)  # type: ignore[attr-defined]


def test_order_of_release_says_nothing_about_order_of_arrival():
    shuffler = _shuffler((2000,) * 5)
    # Arrival in the order of the content too: sorting instead of shuffling would show.
    arrived = [index.to_bytes(8, "big") for index in range(10_000)]
    for index, item in enumerate(arrived):
        shuffler.submit(SILOS[index // 2000], "batch", item)
    released = shuffler.release(SERVER, "batch")
    assert sorted(released) == arrived
    assert abs(_order_correlation(released, arrived)) < 4.5 / 100  # standard error 1/100
    neighbours = [int.from_bytes(b) - int.from_bytes(a) for a, b in pairwise(released)]
    assert np.mean(np.abs(neighbours) == 1) < 0.002
    assert _order_correlation(arrived, arrived) == pytest.approx(1)  # a missing shuffle would show


def _request(kind: str, arrays: dict[str, np.ndarray] | None = None, **header: object) -> bytes:
    return encode({"kind": kind, "batch": "batch"} | header, arrays or {})


GOOD_TERMS = {"sealed_size": 8, "shares": [3, 1, 0, 0, 0], "silos": 2}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"", "too short"),
        (_request("submit")[:20], "announced"),
        (b"\x01\x00\x00\x00\xff" + _request("submit"), "cannot be read"),
        (_request("shred"), "unknown kind"),
        (_request("release"), "only the server"),
        (_request("submit"), "rows of bytes"),
        (_request("submit", {"sealed": np.zeros((1, 2), np.float32)}), "rows of bytes"),
        (_request("submit", {"sealed": np.zeros(8, np.uint8)}), "rows of bytes"),
        (_request("open", batch="b"), "terms must be an object"),
        (_request("open", batch="b", terms=[]), "terms must be an object"),
        (_request("open", batch="b", terms={"silos": 1}), "terms must be an object"),
        (_request("open", batch="b", terms=GOOD_TERMS | {"more": 1}), "terms must be an object"),
        (_request("open", batch="b", terms=GOOD_TERMS | {"silos": float("inf")}), "terms must be an object"),
        (_request("open", batch="b", terms=GOOD_TERMS | {"shares": [3, -1, 0, 0, 0]}), "terms must be an object"),
    ],
)
def test_bad_frames_are_refused_and_not_fatal(request_, reason):
    header, arrays = decode(answer(_shuffler(), SILOS[0], request_))
    assert (header["kind"], arrays) == ("refused", {})
    assert reason in header["reason"]


def test_good_frames_are_not_refused():
    shuffler = _shuffler((2, 2, 0, 0, 0))
    assert decode(answer(shuffler, SERVER, _request("open", batch="b", terms=GOOD_TERMS)))[0] == {"kind": "done"}
    for silo in range(2):
        sealed = np.full((2, 8), silo, np.uint8)
        sealed[1] += 2
        done = answer(shuffler, SILOS[silo], _request("submit", {"sealed": sealed}))
        assert decode(done)[0] == {"kind": "done"}
    header, arrays = decode(answer(shuffler, SERVER, _request("release")))
    assert header == {"kind": "released"}
    assert sorted(arrays["sealed"][:, 0].tolist()) == [0, 1, 2, 3]


AGREED = Terms(sealed_size=8, shares=(3, 1, 2, 2, 2), silos=3)


def test_the_server_may_not_ask_for_less_than_the_plan():
    """Nor for more: a larger share would let one silo fill a batch."""
    shuffler = Shuffler(SERVER, SILOS, {"value": AGREED})
    good = AGREED._replace(shares=(3, 1, 2, 0, 0))
    for other in (
        {"shares": (3, 1, 0, 0, 0), "silos": 2}, {"shares": (3, 1, 0, 0, 0)}, {"shares": (3, 1, 1, 0, 0)},
        {"shares": (4, 1, 2, 0, 0)}, {"shares": (3, 1, 2, 2, 0), "silos": 4}, {"sealed_size": 7}, {"sealed_size": 9},
    ):  # fmt: skip
        with pytest.raises(Refused, match="terms other than the plan's"):
            shuffler.open(SERVER, "0/value", good._replace(**other))
    with pytest.raises(Refused, match="the plan has no such query"):
        shuffler.open(SERVER, "0/other", good)
    shuffler.open(SERVER, "0/value", good)
    shuffler.open(SERVER, "1/value", AGREED._replace(shares=(0, 0, 2, 2, 2)))


def _stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def test_as_a_process_of_its_own():
    process = subprocess.Popen(
        [sys.executable, "-m", "silodp.deploy.shuffler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    agreed = {
        "differences": Terms(BATCH.sealed_size, (12,) * 5, 5)._asdict(),
        "others": Terms(8, (1,) * 5, 1)._asdict(),
    }
    try:
        parties = {"server": SERVER.hex(), "silos": [token.hex() for token in SILOS], "agreed": agreed}
        process.stdin.write(json.dumps(parties) + "\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        check_strangers(port)
        with ShufflerClient(port, SERVER) as server:
            server.open("differences", Terms(BATCH.sealed_size, (12,) * 5, 5))
            for silo, token in enumerate(SILOS):
                with ShufflerClient(port, token) as client:
                    client.submit("differences", [_sealed(bytes([silo, record])) for record in range(11)])
                    client.submit("differences", [_sealed(bytes([silo, 11]))])
                    with pytest.raises(Refused, match="over its share"):
                        client.submit("differences", [_sealed(b"more")])
            released = server.release("differences", BATCH.sealed_size)
            server.open("others", Terms(8, (1, 0, 0, 0, 0), 1))
            with ShufflerClient(port, SILOS[0]) as client:
                client.submit("others", [b"12345678"])
            with pytest.raises(Refused, match="no batch of messages of 9 bytes"):
                server.release("others", 9)
        opened = open_batch(released, KEY, BATCH)
        assert opened.refused == []
        expected = [bytes([silo, record]) for silo in range(5) for record in range(12)]
        assert sorted(opened.messages) == expected
        assert opened.messages != expected
    finally:
        process.stdin.close()
        assert process.wait(timeout=20) == 0
        process.stdout.close()


def check_strangers(port: int) -> None:
    """Without a token nothing is read; with one no more than the longest share; only so many are heard at a time."""
    with _stranger(port) as wrong:
        wrong.sendall(b"?" * TOKEN)
        assert wrong.recv(1) == b""
    with _stranger(port) as known:
        known.sendall(SILOS[0] + struct.pack("<Q", 1 << 30))
        assert known.recv(1) == b""
    crowd = [_stranger(port) for _ in range(40)]
    crowd[-1].settimeout(20)
    assert crowd[-1].recv(1) == b""  # turned away at once
    for each in crowd:
        each.close()
