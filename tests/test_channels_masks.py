"""Pairwise masks: they cancel in the whole sum and hide everything else; what is refused; what they do not cover."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.channels.masks import Masks, pad
from silodp.errors import Refused

SILOS, SIZE = 4, 3000
PARTS = np.random.default_rng(0).integers(-(2**20), 2**20, (SILOS, SIZE), dtype=np.int32).view(np.uint32)


def agreed(plans: tuple[bytes, ...] = (b"plan",) * SILOS) -> list[Masks]:
    masks = [Masks(i, SILOS, plan) for i, plan in enumerate(plans)]
    for own in masks:
        own.agree([each.public_key for each in masks])
    return masks


def hidden(masks: list[Masks], present: tuple[int, ...] = tuple(range(SILOS)), message: str = "0/value") -> np.ndarray:
    return np.stack([masks[i].hide(PARTS[i], present, message) for i in present])


def readable(words: np.ndarray) -> bool:
    """Whether integers that are small show through: of uniform words 1 in 512 is below 2^22."""
    share = np.mean(np.abs(words.view(np.int32).astype(np.int64)) < 2**22)
    return bool(share > 0.02)


@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3), (2, 0, 3)])
def test_they_cancel_over_the_silos_present_and_over_no_others(present):
    sent = hidden(agreed(), present)
    np.testing.assert_array_equal(sent.sum(axis=0, dtype=np.uint32), PARTS[list(present)].sum(axis=0, dtype=np.uint32))
    for count in range(1, len(present)):
        for some in combinations(range(len(present)), count):
            assert not readable(sent[list(some)].sum(axis=0, dtype=np.uint32)), some


def test_what_is_sent_is_uniform_and_never_the_same():
    one, other = hidden(agreed()), hidden(agreed())
    assert readable(PARTS)  # masks left out would show
    assert not readable(one - other)  # two runs share no pads
    again = agreed()
    assert not readable(hidden(again, message="0/value") - hidden(again, message="1/value"))
    counts = np.bincount((one >> np.uint32(24)).ravel(), minlength=256)
    expected = one.size / 256
    assert np.sum((counts - expected) ** 2 / expected) < 255 + 5 * np.sqrt(2 * 255)


MUTANTS: dict[str, Callable[[bytes, str, int], np.ndarray]] = {
    "left out": lambda secret, message, size: np.zeros(size, np.uint32),
    "repeated": lambda secret, message, size: pad(secret, "always", size),
    "too short": lambda secret, message, size: pad(secret, message, size) & np.uint32(0xFFFF),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_bad_pads_would_be_noticed(mutant, monkeypatch):
    """They cancel all the same, so only a look at the parts convicts them."""
    monkeypatch.setattr("silodp.channels.masks.pad", MUTANTS[mutant])
    masks = agreed()
    first, second = hidden(masks, message="0/value"), hidden(masks, message="1/value")
    np.testing.assert_array_equal(first.sum(axis=0, dtype=np.uint32), PARTS.sum(axis=0, dtype=np.uint32))
    assert readable(first) or readable(first - second)


def test_pads_that_are_not_shared_would_not_cancel(monkeypatch):
    monkeypatch.setattr("silodp.channels.masks.pad", lambda secret, message, size: pad(os.urandom(32), message, size))
    assert not readable(hidden(agreed()).sum(axis=0, dtype=np.uint32))


def test_silos_that_were_told_different_plans_do_not_cancel():
    """A server that lets one silo draw fewer coins does not even get the sum."""
    plans = (b"plan", b"plan", b"plan with fewer coins", b"plan")
    assert not readable(hidden(agreed(plans)).sum(axis=0, dtype=np.uint32))


def test_a_server_in_the_middle_reads_a_part_and_changes_the_fingerprints():
    """The known limit: one that plays all the others to a silo. Operators who compare fingerprints notice."""
    silos, played = ([Masks(i, SILOS, b"plan") for i in range(SILOS)] for _ in range(2))
    told = [silos[0].public_key, *(own.public_key for own in played[1:])]
    fingerprints = [own.agree(told) for own in (silos[0], *played[1:])]
    sent = [own.hide(PARTS[0] * (i == 0), range(SILOS), "0/value") for i, own in enumerate((silos[0], *played[1:]))]
    np.testing.assert_array_equal(np.sum(sent, axis=0, dtype=np.uint32), PARTS[0])
    honest = {silos[i].agree([own.public_key for own in silos]) for i in range(1, SILOS)}
    assert len(honest) == 1
    assert fingerprints[0] not in honest


def keys_of(masks: Masks, change: str) -> list[bytes]:
    others = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(SILOS - 1)]
    keys = [masks.public_key, *others]
    match change:
        case "too few":
            return keys[:-1]
        case "one twice":
            return [*keys[:-1], keys[1]]
        case "own left out":
            return [*others, keys[1][::-1]]
        case "own again":
            return [keys[0], keys[0], *keys[2:]]
        case "small order":
            return [*keys[:-1], bytes(32)]
        case _:
            return [*keys[:-1], b"short"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("too few", "3 different ones, the plan has 4 silos"),
        ("one twice", "3 different ones"),
        ("own left out", "number 0 is not this silo's"),
        ("own again", "3 different ones"),
        ("small order", "is no X25519 key"),
        ("short", "is no X25519 key"),
    ],
)
def test_keys_that_are_refused(change, reason):
    masks = Masks(0, SILOS, b"plan")
    with pytest.raises(Refused, match=reason):
        masks.agree(keys_of(masks, change))
    with pytest.raises(Refused, match="not agreed yet"):
        masks.hide(PARTS[0], range(SILOS), "0/value")


def test_a_message_is_hidden_once_and_keys_are_agreed_once():
    masks = agreed()
    masks[0].hide(PARTS[0], range(SILOS), "0/value")
    with pytest.raises(Refused, match="sent already"):
        masks[0].hide(PARTS[0], (0, 1), "0/value")
    for present in ((1, 2), (0, 1, 1), ()):
        with pytest.raises(Refused, match="must be different and contain 0"):
            masks[0].hide(PARTS[0], present, "1/value")
    with pytest.raises(Refused, match="agreed already"):
        masks[0].agree([own.public_key for own in masks])
