"""Partitions: disjoint, covering, of the right sizes and label make-up, fixed by the seed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.data.partition import PARTITIONS, Request, divide, hold_out, select

DIGITS = tuple(map(str, range(10)))


def request(labels, silos=None, *, classes=DIGITS, sizes=None, alpha=None, seed=0):
    labels = np.asarray(labels)
    return Request(len(labels), labels, classes, silos, sizes, alpha, np.random.default_rng(seed))


labels_and_silos = st.tuples(
    st.lists(st.integers(0, 9), min_size=24, max_size=80), st.integers(1, 12), st.integers(0, 9)
)


def assert_cover(parts, records):
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(records))


@settings(max_examples=60, deadline=None)
@given(labels_and_silos, st.sampled_from(["iid", "by-label", "round-robin"]))
def test_equal_partitions_cover_without_overlap(case, kind):
    labels, silos, seed = case
    parts = divide(kind, request(labels, silos, seed=seed))
    assert_cover(parts, len(labels))
    assert len(parts) == silos
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=40, deadline=None)
@given(labels_and_silos, st.floats(0.5, 100))
def test_dirichlet_covers_without_overlap(case, alpha):
    labels, silos, seed = case
    parts = divide("dirichlet", request(labels, min(silos, 4), alpha=alpha, seed=seed))
    assert_cover(parts, len(labels))
    assert min(map(len, parts)) >= 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.sampled_from(["iid", "by-label"]))
def test_sizes_are_kept(sizes, kind):
    labels = np.arange(60) % 10
    parts = divide(kind, request(labels, sizes=tuple(sizes)))
    assert [len(p) for p in parts] == sizes
    assert len(np.unique(np.concatenate(parts))) == sum(sizes)


def test_by_label_is_sorted_and_stable():
    labels = np.random.default_rng(0).integers(0, 10, 100)
    order = np.concatenate(divide("by-label", request(labels, 7)))
    assert (np.diff(labels[order]) >= 0).all()
    for digit in range(10):
        assert (np.diff(order[labels[order] == digit]) > 0).all()


def test_round_robin_keeps_the_natural_order():
    parts = divide("round-robin", request(np.zeros(11, int), 3))
    np.testing.assert_array_equal(parts[1], [1, 4, 7, 10])


def test_by_class():
    labels = np.repeat(np.arange(10), 3)[::-1]
    parts = divide("by-class", request(labels))
    assert [set(labels[p]) for p in parts] == [{d} for d in range(10)]
    assert_cover(parts, 30)


def test_label_pairs():
    labels = np.tile(np.arange(10), 52)
    parts = divide("label-pairs", request(labels))
    assert_cover(parts, 520)
    pairs = [tuple(sorted(set(labels[p]), key=lambda d: d % 2)) for p in parts]
    assert len(set(pairs)) == 25
    assert all(even % 2 == 0 and odd % 2 == 1 for even, odd in pairs)
    assert {len(p) for p in parts} <= {20, 21, 22}


def test_label_pairs_shared_copies_every_digit_five_times():
    labels = np.tile(np.arange(10), 6)
    parts = divide("label-pairs-shared", request(labels, 25))
    assert [len(p) for p in parts] == [12] * 25
    assert (np.bincount(np.concatenate(parts)) == 5).all()


def test_small_alpha_means_few_labels():
    labels = np.repeat(np.arange(10), 200)

    def mean_top_share(alpha):
        parts = divide("dirichlet", request(labels, 5, alpha=alpha))
        return np.mean([np.bincount(labels[p]).max() / len(p) for p in parts])

    assert mean_top_share(0.1) > 0.3 > 0.15 > mean_top_share(1000.0)


@pytest.mark.parametrize("kind", PARTITIONS)
def test_seed_decides(kind):
    labels = np.tile(np.arange(10), 20)
    silos = {"by-class": 10, "label-pairs": 25, "label-pairs-shared": 25}.get(kind, 4)
    alpha = 1.0 if kind == "dirichlet" else None
    one, same, other = (np.concatenate(divide(kind, request(labels, silos, alpha=alpha, seed=s))) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    random = kind not in ("by-label", "by-class", "round-robin")
    assert np.array_equal(one, other) != random


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("sorted", {"silos": 2}, "partition = 'sorted': need one of iid"),
        ("iid", {}, "silos = None"),
        ("iid", {"silos": 0}, "silos = 0"),
        ("iid", {"silos": 21}, "silos = 21: too many for 40 records"),
        ("iid", {"sizes": (30, 11)}, "at most 40 in all, got 41"),
        ("iid", {"sizes": (30, 1)}, "2 or more each"),
        ("round-robin", {"sizes": (5, 5)}, "makes its own"),
        ("iid", {"silos": 2, "alpha": 1.0}, "only by, partition 'dirichlet'"),
        ("dirichlet", {"silos": 2}, "alpha = None"),
        ("dirichlet", {"silos": 2, "alpha": -1.0}, "alpha = -1.0: need a positive"),
        ("dirichlet", {"silos": 20, "alpha": 0.001}, "use a larger alpha"),
        ("by-class", {"silos": 3}, "silos = 3: .* makes 10"),
        ("label-pairs", {"silos": 10}, "silos = 10: .* makes 25"),
        ("label-pairs", {"classes": tuple("abcdefghij")}, "whole numbers"),
    ],
)
def test_bad_requests(kind, options, told):
    with pytest.raises(ValueError, match=told):
        divide(kind, request(np.tile(np.arange(10), 4), **options))


def test_regression_has_no_labels_to_divide_by():
    bare = Request(20, None, (), 2, None, None, np.random.default_rng(0))
    with pytest.raises(ValueError, match="for regression use iid, round-robin"):
        divide("by-label", bare)
    assert_cover(divide("iid", bare), 20)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(5, 30), min_size=1, max_size=5), st.floats(0.2, 0.8))
def test_hold_out_takes_its_share_of_every_part(sizes, fraction):
    ends = np.cumsum([0, *sizes])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    kept, test = hold_out(parts, fraction, np.random.default_rng(0))
    assert_cover([kept, test], ends[-1])
    assert [np.isin(p, test).sum() for p in parts] == [round(fraction * n) for n in sizes]
    assert (np.diff(kept) > 0).all()


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), 0.001])
def test_bad_fractions(fraction):
    with pytest.raises(ValueError, match="test = "):
        hold_out([np.arange(20)], fraction, np.random.default_rng(0))


def test_select():
    labels, rng = np.tile([0, 1, 1], 10), np.random.default_rng(0)
    np.testing.assert_array_equal(select(30, labels, None, 3, rng), [0, 1, 2, 3, 4, 6])
    drawn = select(30, labels, 12, None, rng)
    assert len(np.unique(drawn)) == 12
    assert (np.diff(drawn) > 0).all()
    for limit, per_class in ((31, None), (0, None), (None, 0)):
        with pytest.raises(ValueError, match=r"limit = |per_class = "):
            select(30, labels, limit, per_class, rng)
    with pytest.raises(ValueError, match="classification"):
        select(30, None, None, 3, rng)
