"""Sealed messages and the shuffler, as logic and as a process of its own."""

import json
import random
import secrets
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


def _shuffler(**changed: int) -> Shuffler:
    shuffler = Shuffler(SERVER, SILOS)
    terms = {"sealed_size": 8, "messages": 4, "silos": 2, "quota": 3} | changed
    shuffler.open(SERVER, "batch", Terms(**terms))
    return shuffler


def _submit(shuffler: Shuffler, silo: int, count: int) -> None:
    for _ in range(count):
        shuffler.submit(SILOS[silo], "batch", secrets.token_bytes(8))


def test_released_once_and_only_when_complete():
    shuffler = _shuffler()
    _submit(shuffler, 0, 3)
    with pytest.raises(Refused, match="too few messages: 3 of 4"):
        shuffler.release(SERVER, "batch")
    _submit(shuffler, 1, 1)
    assert len(shuffler.release(SERVER, "batch")) == 4
    with pytest.raises(Refused, match="released already"):
        shuffler.release(SERVER, "batch")


def test_distinct_silos_are_required():
    shuffler = _shuffler(quota=10)
    _submit(shuffler, 0, 10)
    with pytest.raises(Refused, match="too few silos: 1 of 2"):
        shuffler.release(SERVER, "batch")


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
    with pytest.raises(Refused, match="over quota"):
        _submit(shuffler, 0, 1)
    _submit(shuffler, 1, 1)
    shuffler.release(SERVER, "batch")
    with pytest.raises(Refused, match="late"):
        _submit(shuffler, 1, 1)


def test_only_the_server_opens_and_releases_and_terms_stay():
    shuffler = _shuffler()
    with pytest.raises(Refused, match="only the server"):
        shuffler.release(SILOS[0], "batch")
    with pytest.raises(Refused, match="only the server"):
        shuffler.open(SILOS[0], "mine", Terms(8, 1, 1, 1))
    with pytest.raises(Refused, match="exists already"):
        shuffler.open(SERVER, "batch", Terms(8, 1, 1, 9))
    with pytest.raises(Refused, match="at most 5 silos"):
        shuffler.open(SERVER, "huge", Terms(8, 1, 6, 9))


def _order_correlation(released: list[bytes], arrived: list[bytes]) -> float:
    place = {item: index for index, item in enumerate(arrived)}
    return float(spearmanr(np.arange(len(arrived)), [place[item] for item in released]).statistic)  # type: ignore[attr-defined]


def test_order_of_release_says_nothing_about_order_of_arrival():
    shuffler = _shuffler(messages=10_000, silos=5, quota=2000)
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


def _request(kind: str, token: bytes | str, arrays: dict[str, np.ndarray] | None = None, **header: object) -> bytes:
    told = token.hex() if isinstance(token, bytes) else token
    return encode({"kind": kind, "token": told, "batch": "batch"} | header, arrays or {})


GOOD_TERMS = {"sealed_size": 8, "messages": 4, "silos": 2, "quota": 3}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"", "too short"),
        (_request("submit", SILOS[0])[:20], "announced"),
        (b"\x01\x00\x00\x00\xff" + _request("submit", SILOS[0]), "cannot be read"),
        (_request("submit", "no hexadecimal"), "hexadecimal"),
        (_request("shred", SILOS[0]), "unknown kind"),
        (_request("submit", SILOS[0]), "rows of bytes"),
        (_request("submit", SILOS[0], {"sealed": np.zeros((1, 2), np.float32)}), "rows of bytes"),
        (_request("submit", SILOS[0], {"sealed": np.zeros(8, np.uint8)}), "rows of bytes"),
        (_request("open", SERVER, batch="b"), "terms must be an object"),
        (_request("open", SERVER, batch="b", terms=[]), "terms must be an object"),
        (_request("open", SERVER, batch="b", terms={"quota": 1}), "terms must be an object"),
        (_request("open", SERVER, batch="b", terms=GOOD_TERMS | {"more": 1}), "terms must be an object"),
        (_request("open", SERVER, batch="b", terms=GOOD_TERMS | {"quota": float("inf")}), "terms must be an object"),
    ],
)
def test_bad_frames_are_refused_and_not_fatal(request_, reason):
    header, arrays = decode(answer(_shuffler(), request_))
    assert (header["kind"], arrays) == ("refused", {})
    assert reason in header["reason"]


def test_good_frames_are_not_refused():
    shuffler = _shuffler()
    assert decode(answer(shuffler, _request("open", SERVER, batch="b", terms=GOOD_TERMS)))[0] == {"kind": "done"}
    for silo in range(2):
        sealed = np.full((2, 8), silo, np.uint8)
        sealed[1] += 2
        done = answer(shuffler, _request("submit", SILOS[silo], {"sealed": sealed}))
        assert decode(done)[0] == {"kind": "done"}
    header, arrays = decode(answer(shuffler, _request("release", SERVER)))
    assert header == {"kind": "released"}
    assert sorted(arrays["sealed"][:, 0].tolist()) == [0, 1, 2, 3]


LEAST = Terms(sealed_size=8, messages=4, silos=2, quota=3)


def test_the_server_may_not_ask_for_less_than_the_plan():
    shuffler = Shuffler(SERVER, SILOS, {"value": LEAST})
    for weaker in ({"messages": 3}, {"silos": 1}, {"sealed_size": 7}, {"sealed_size": 9}):
        with pytest.raises(Refused, match="terms weaker than the plan's"):
            shuffler.open(SERVER, "0/value", LEAST._replace(**weaker))
    with pytest.raises(Refused, match="the plan has no such query"):
        shuffler.open(SERVER, "0/other", LEAST)
    shuffler.open(SERVER, "0/value", LEAST)
    shuffler.open(SERVER, "1/value", LEAST._replace(messages=5, silos=3))


def test_as_a_process_of_its_own():
    process = subprocess.Popen(
        [sys.executable, "-m", "silodp.deploy.shuffler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        parties = {"server": SERVER.hex(), "silos": [token.hex() for token in SILOS]}
        process.stdin.write(json.dumps(parties) + "\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        with ShufflerClient(port, SERVER) as server:
            server.open("differences", Terms(BATCH.sealed_size, 60, 5, 12))
            for silo, token in enumerate(SILOS):
                with ShufflerClient(port, token) as client:
                    client.submit("differences", [_sealed(bytes([silo, record])) for record in range(11)])
                    client.submit("differences", [_sealed(bytes([silo, 11]))])
                    with pytest.raises(Refused, match="over quota"):
                        client.submit("differences", [_sealed(b"more")])
            released = server.release("differences", BATCH.sealed_size)
            server.open("others", Terms(8, 1, 1, 1))
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
