"""load_data as a whole: splits, sizes, notes, stacking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silodp.data import FederatedData, Note, load_data


def numbered(records: int, classes: int = 2):
    """A table whose only feature is the record's number, so that records can be traced."""
    return np.arange(records, dtype=float)[:, None], np.arange(records) % classes


def ids(silo) -> list[int]:
    return silo.features[:, 0].astype(int).tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(40, 90),
    st.integers(2, 6),
    st.sampled_from([None, 0.2, 0.5]),
    st.sampled_from(["iid", "by-label", "round-robin"]),
)
def test_every_record_lands_in_one_place_with_its_target(records, silos, test, partition):
    data = load_data(numbered(records, 3), silos, partition, test=test, seed=records)
    places = [*data.silos, *([data.test] if data.test else [])]
    assert sorted(i for place in places for i in ids(place)) == list(range(records))
    for place in places:
        np.testing.assert_array_equal(place.targets, np.array(ids(place)) % 3)
    assert (data.test is None) == (test is None)


def test_shared_records_never_reach_the_test_set():
    data = load_data(numbered(400, 10), partition="label-pairs-shared", test=0.2)
    assert data.test is not None
    assert len(data.silos) == 25
    assert not set(ids(data.test)) & {i for silo in data.silos for i in ids(silo)}
    assert any("silos share records" in note.text for note in data.notes)


def test_split_inside_given_silos():
    x, y = numbered(60)
    data = load_data([(x[:20], y[:20]), (x[20:], y[20:])], test=0.25)
    assert data.sizes == (15, 30)
    assert data.test is not None
    assert sum(i < 20 for i in ids(data.test)) == 5


def test_stack_pads_behind_the_records():
    x, y = numbered(30)
    data = load_data((x + 1, y), sizes=[5, 2, 9], partition="by-label")
    features, targets, sizes = data.stack()
    assert features.shape == (3, 9, 1)
    assert targets.shape == (3, 9)
    assert targets.dtype == np.int32
    np.testing.assert_array_equal(sizes, [5, 2, 9])
    for i, silo in enumerate(data.silos):
        np.testing.assert_array_equal(features[i, : len(silo)], silo.features)
        np.testing.assert_array_equal(targets[i, : len(silo)], silo.targets)
        assert not features[i, len(silo) :].any()
        assert not targets[i, len(silo) :].any()
    assert (features[1, :2] > 0).all()


def test_images_keep_their_shape():
    data = load_data((np.ones((10, 4, 5, 3)), np.arange(10) % 2), 2)
    assert data.input_shape == (4, 5, 3)
    assert data.stack()[0].shape == (2, 5, 4, 5, 3)


def test_seed_repeats_and_separates():
    def first(seed, **more) -> FederatedData:
        return load_data(numbered(50), 2, seed=seed, **more)

    assert ids(first(1).silos[0]) == ids(first(1).silos[0])
    assert ids(first(1).silos[0]) != ids(first(2).silos[0])
    # preprocessing must not shift the random streams
    steps = {"preprocess": ["bias"]}
    assert ids(first(1, **steps).silos[0]) == ids(first(1).silos[0])


def test_records_limit_and_per_class():
    data = load_data(numbered(50), 4, records=7)
    assert data.sizes == (7, 7, 7, 7)
    assert any("first 7 records" in note.text for note in data.notes)
    assert sum(load_data(numbered(50), 4, limit=20).sizes) == 20
    data = load_data(numbered(50), 2, per_class=3)
    assert sorted(ids(data.silos[0]) + ids(data.silos[1])) == list(range(6))
    assert any("per_class = 3: 6 records" in note.text for note in data.notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"silos": 4, "records": 13}, "silo 'silo 2' has 12 training record.s.; needs 13"),
        ({"silos": 4, "records": 1}, "records = 1"),
        ({"silos": 4, "sizes": [5, 5]}, "silos = 4: sizes lists 2"),
        ({"silos": 26}, "silos = 26: too many"),
        ({"silos": 2, "seed": -1}, "seed = -1"),
        ({"silos": 2, "test": 1.0}, "test = 1.0: need a fraction"),
        ({"silos": 2, "classes": [0]}, "classes: 1 labels, 1 of them different"),
        ({"silos": 2, "classes": [0, 1], "task": "regression"}, "only for classification"),
        ({"silos": 2, "preprocess": ["divide:1e-44"]}, "beyond float32"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(ValueError, match=told):
        load_data(numbered(50), **options)


def test_silo_column_and_one_table_per_silo_exclude_each_other(tmp_path):
    x, y = numbered(4)
    np.savez(tmp_path / "a.npz", X=x, y=y, site=y)
    with pytest.raises(ValueError, match="silo_column: there is one table per silo already"):
        load_data(tmp_path, silo_column="site")


def test_labels_are_ordered_as_numbers_and_parity_renames_them():
    x, _ = numbered(12)
    labels = np.tile([10, 9, 2], 4)
    assert load_data((x, labels), 2).classes == ("2", "9", "10")
    data = load_data((x, labels), 2, "by-label", preprocess=["target-parity"])
    assert data.classes == ("even", "odd")
    assert data.silos[0].targets.tolist() == [0, 0, 0, 0, 1, 1]


def test_every_note_is_marked():
    x = np.random.default_rng(0).normal(size=(40, 3))
    steps = ["standardise", "pca:2", "bias"]
    data = load_data((x, np.arange(40) % 2), 2, test=0.2, limit=30, preprocess=steps)
    assert len(data.notes) == 8
    assert [note.public for note in data.notes] == [True] * 5 + [False, False, True]
    assert [str(note).partition(": ")[0] for note in data.notes] == ["public"] * 5 + ["not private"] * 2 + ["public"]
    assert all(Note.read(str(note))[:2] == note[:2] for note in data.notes)
    assert [note.fitted for note in data.notes if note.fitted] == ["standardise", "pca:2"]
