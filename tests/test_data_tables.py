"""Readers: every format gives the same records; every fault names file, place and remedy."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import dump_svmlight_file

from silodp.data import load_data
from silodp.data.frames import names_of, refuse_same_file

X = np.array([[1.0, 0.0, 2.5], [0.0, 3.0, 1.0], [4.0, 0.5, 0.0], [2.0, 2.0, 2.0]])
Y = np.array([-1, 1, 1, -1])


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y)


def gathered(data):
    """All records of all silos, sorted, with their targets as the last column."""
    rows = np.concatenate([np.column_stack([s.features, s.targets]) for s in data.silos])
    return rows[np.lexsort(rows.T)]


def write(kind: str, path, frame: pd.DataFrame):
    x, y = frame[["a", "b", "c"]].to_numpy(), frame["label"].to_numpy()
    path = path.with_suffix(kind)
    if kind == ".csv":
        frame.to_csv(path, index=False)
    elif kind == ".parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    elif kind == ".npz":
        np.savez(path, X=x, label=y)
    else:
        dump_svmlight_file(x, y, str(path), zero_based=False)
    return path


KINDS = [".csv", ".parquet", ".npz", ".libsvm", ".svm"]
EXPECTED = np.array([[1, 0, 2.5, 0], [2, 2, 2, 0], [0, 3, 1, 1], [4, 0.5, 0, 1]])
EXPECTED = EXPECTED[np.lexsort(EXPECTED.T)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_file(kind, tmp_path, frame):
    path = write(kind, tmp_path / "all", frame)
    data = load_data(path, 2, target="label")
    assert data.task == "classification"
    assert data.classes == ("-1", "1")
    assert any("2 that occur in the records" in note.text for note in data.notes)
    given = load_data(path, 2, target="label", classes=[-1, 1])
    assert any("-1 -> 0, 1 -> 1" in note.text for note in given.notes)
    assert data.silos[0].features.dtype == np.float32
    assert data.silos[0].targets.dtype == np.int32
    np.testing.assert_array_equal(gathered(data), EXPECTED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["folder", "pattern", "list"])
def test_one_file_per_silo(kind, form, tmp_path, frame):
    paths = [
        write(kind, tmp_path / "east", frame[:2]),
        write(kind, tmp_path / "west", frame[2:]),
    ]
    source = {"folder": tmp_path, "pattern": str(tmp_path / f"*{kind}"), "list": paths}[form]
    data = load_data(source, target="label")
    assert data.sizes == (2, 2)
    assert [s.name for s in data.silos] == ["east", "west"]
    np.testing.assert_array_equal(gathered(data), EXPECTED)


def test_arrays_frames_dicts_and_gzip(tmp_path, frame):
    path = tmp_path / "all.csv.gz"
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
    halves = {"east": frame[:2], "west": frame[2:]}
    for data in (
        load_data((X, Y), 2),
        load_data(frame, 2, target="label"),
        load_data(path, 2, target="label"),
        load_data(halves, target="label"),
        load_data([(X[:2], Y[:2]), (X[2:], Y[2:])]),
    ):
        np.testing.assert_array_equal(gathered(data), EXPECTED)
    assert [s.name for s in load_data(halves, target="label").silos] == ["east", "west"]


def test_list_order_is_silo_order():
    parts = [(np.full((2, 1), float(i)), np.array([0, 1])) for i in range(12)]
    assert [s.features[0, 0] for s in load_data(parts).silos] == list(range(12))


def test_silo_column(tmp_path, frame):
    frame["site"] = ["north", "south", "north", "south"]
    frame.to_csv(tmp_path / "t.csv", index=False)
    np.savez(tmp_path / "t.npz", X=X, y=Y, site=frame["site"].to_numpy(str))
    csv, npz = tmp_path / "t.csv", tmp_path / "t.npz"
    for source, target in ((frame, "label"), (csv, "label"), (npz, None)):
        data = load_data(source, target=target, silo_column="site")
        assert [s.name for s in data.silos] == ["north", "south"]
        np.testing.assert_array_equal(data.silos[0].features, X[[0, 2]])
        assert data.input_shape == (3,)
    tested = load_data(frame, target="label", silo_column="site", test=csv).test
    assert tested is not None
    np.testing.assert_array_equal(tested.features, X)


def test_columns_are_matched_by_name(frame):
    data = load_data([frame[:2], frame[2:][["label", "c", "a", "b"]]], target="label")
    np.testing.assert_array_equal(gathered(data), EXPECTED)


def test_libsvm_files_may_end_in_zero_columns(tmp_path):
    (tmp_path / "a.svm").write_text("1 1:2.0\n-1 2:1\n")
    (tmp_path / "b.svm").write_text("1 5:1\n-1 1:1\n")
    data = load_data(tmp_path)
    assert data.input_shape == (5,)
    np.testing.assert_array_equal(data.silos[0].features, [[2, 0, 0, 0, 0], [0, 1, 0, 0, 0]])


def test_test_table_is_aligned_and_kept_apart(tmp_path, frame):
    path = write(".csv", tmp_path / "test", frame[::-1])
    data = load_data(frame, 2, target="label", test=path)
    assert data.test is not None
    np.testing.assert_array_equal(data.test.features, X[::-1])
    np.testing.assert_array_equal(data.test.targets, [0, 1, 1, 0])


def test_one_hot_of_text_is_common_to_all_silos(frame):
    frame["colour"] = ["red", "blue", "green", "red"]
    silos = [frame[:2], frame[2:]]
    data = load_data(silos, target="label", preprocess=["one-hot:colour"])
    np.testing.assert_array_equal(data.silos[0].features[:, 3:], [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(data.silos[1].features[:, 3:], [[0, 1, 0], [0, 0, 1]])
    assert not data.notes[-1].public


def test_task_is_inferred_or_stated():
    many = (np.ones((60, 1)), np.arange(60))
    few = (np.ones((60, 1)), np.arange(60) % 3)
    real = (np.ones((60, 1)), np.arange(60) / 7)
    assert load_data(many, 2).task == "regression"
    assert load_data(few, 2).task == "classification"
    assert load_data(real, 2).task == "regression"
    stated = load_data(few, 2, task="regression")
    assert stated.classes == ()
    assert stated.silos[0].targets.dtype == np.float32


def bad_frame(**changes) -> pd.DataFrame:
    good = pd.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y, site=list("uvuv"))
    return good.assign(**changes)


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"b": [1, None, 1, 1]}, {}, ["t.csv", "record 2", "'b'", "fill in or drop"]),
        ({"b": [1, 1, np.inf, 1]}, {}, ["t.csv", "record 3", "'b'"]),
        ({"b": [1, 1, 1, 1e60]}, {}, ["t.csv", "record 4", "'b'", "float32"]),
        ({"b": ["1", "x", "2", "3"]}, {}, ["t.csv", "'b'", "record 2", "one-hot:b"]),
        ({"label": [1, None, 1, 0]}, {}, ["t.csv", "record 2", "target"]),
        ({"label": ["y", None, "n", "n"]}, {}, ["t.csv", "record 2", "target"]),
        ({"label": [0, 1, 1.5, 0]}, {"task": "classification"}, ["t.csv", "record 3", "no class label"]),
        ({"label": list("abca")}, {"task": "regression"}, ["t.csv", "no numbers", "classification"]),
        ({"label": list("abca")}, {"classes": ["a", "b"]}, ["t.csv", "record 3", "unknown label", "a, b"]),
        ({"label": [1, 1, 1, 1]}, {}, ["classes: 1 labels", "two or more"]),
        ({}, {"target": "nope"}, ["t.csv", "target = 'nope'", "a, b, c, label"]),
        ({}, {"target": None}, ["t.csv", "target is not set", "a, b, c, label"]),
        ({}, {"silo_column": "nope"}, ["t.csv", "silo_column = 'nope'", "site"]),
        ({"site": [1, None, 1, 2]}, {"silo_column": "site"}, ["t.csv", "record 2", "'site'"]),
        (
            {"site": list("uuuv")},
            {"silo_column": "site"},
            ["silo_column = 'site': 1 of its 2 silos have fewer than 2"],
        ),
        ({}, {"silo_column": "site", "silos": 3}, ["silos = 3", "2 silos"]),
        ({}, {"silo_column": "site", "partition": "iid"}, ["partition = 'iid'", "leave out"]),
        ({}, {"task": "ranking"}, ["task = 'ranking'", "classification, regression"]),
        ({}, {"preprocess": ["one-hot:nope"]}, ["one-hot:nope", "'nope' is not a column"]),
        ({"b": ["r", None, "g", "g"]}, {"preprocess": ["one-hot:b"]}, ["record 2", "'b'"]),
    ],
)
def test_bad_tables(changes, options, told, tmp_path):
    path = tmp_path / "t.csv"
    table = bad_frame(**changes)
    if "silo_column" not in options:
        table = table.drop(columns="site")
    table.to_csv(path, index=False)
    options = {"target": "label", "silos": None if "silo_column" in options else 2} | options
    with pytest.raises(ValueError) as caught:
        load_data(path, **options)
    for part in told:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.csv", "a,b,label\n1,2,0\n1,2,3,4\n", ["t.csv", "line 3"]),
        ("t.csv", "a,b,label\n1,2,0,9\n1,2,1,9\n", ["t.csv", "not a readable CSV"]),
        ("t.csv", "a,b,label\n1,2,0\n1,2\n", ["t.csv", "record 2", "target"]),
        ("t.csv", "1,2,0\n1,2,1\n", ["t.csv", "first line"]),
        ("t.csv", "", ["t.csv", "not a readable CSV"]),
        ("t.csv", "a,label\n", ["t.csv", "no records"]),
        ("t.svm", "1 0:3\n", ["t.svm", "not a readable LIBSVM"]),
        ("t.svm", "1 one:3\n", ["t.svm", "not a readable LIBSVM"]),
        ("t.npz", "junk", ["t.npz", "not a readable npz"]),
        ("t.parquet", "junk", ["t.parquet", "not a readable Parquet"]),
        ("t.docx", "junk", ["t.docx", ".csv, .parquet"]),
    ],
)
def test_bad_files(name, text, told, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        load_data(tmp_path / name, 2, target="label")
    for part in told:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sources(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.csv: no such file"):
        load_data(tmp_path / "gone.csv", 2, target="y")
    with pytest.raises(ValueError, match="no data files"):
        load_data(tmp_path, target="y")
    with pytest.raises(ValueError, match="no data files"):
        load_data(str(tmp_path / "*.csv"), target="y")
    with pytest.raises(ValueError, match=r"'minst'.*no dataset.*mnist"):
        load_data("minst", 2)
    with pytest.raises(ValueError, match="empty list"):
        load_data([])
    with pytest.raises(ValueError, match="cannot read a int"):
        load_data(3, 2)  # pyright: ignore


def test_npz_without_the_arrays_and_with_pickles(tmp_path):
    np.savez(tmp_path / "a.npz", Z=X)
    with pytest.raises(ValueError, match=r"a\.npz: no array 'features' \(there are: Z\)"):
        load_data(tmp_path / "a.npz", 2)
    np.savez(tmp_path / "b.npz", X=X, y=np.array([{}, 1, 2, 3], dtype=object))
    with pytest.raises(ValueError, match=r"b\.npz: not a readable npz"):
        load_data(tmp_path / "b.npz", 2)


def test_silos_with_other_columns(tmp_path, frame):
    write(".csv", tmp_path / "a", frame[:2])
    frame[2:].drop(columns="b").assign(z=1).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(ValueError, match=r"b\.csv: compared with .*a\.csv, it lacks \['b'\]"):
        load_data(tmp_path, target="label")
    with pytest.raises(ValueError, match=r"silo 1: records of shape \(2,\), but \(3,\) in silo 0"):
        load_data([(X[:2], Y[:2]), (X[2:, :2], Y[2:])])


def test_unknown_label_in_one_silo_or_in_the_test_table(tmp_path, frame):
    write(".csv", tmp_path / "a", frame[:2])
    write(".csv", tmp_path / "b", frame[2:].assign(label=[1, 7]))
    with pytest.raises(ValueError, match=r"b\.csv: record 2 .* unknown label; need .*-1, 1"):
        load_data(tmp_path, target="label", classes=[-1, 1])
    with pytest.raises(ValueError, match=r"b\.csv: record 2 has an unknown label; need one of the 2 that"):
        load_data(frame, 2, target="label", test=tmp_path / "b.csv")


def test_one_record_or_no_record_silo(tmp_path, frame):
    write(".csv", tmp_path / "a", frame[:3])
    write(".csv", tmp_path / "b", frame[3:])
    with pytest.raises(ValueError, match="silo 'b' has 1 training record"):
        load_data(tmp_path, target="label")
    with pytest.raises(ValueError, match="silo 1: no data"):
        load_data([(X, Y), (X[:0], Y[:0])])


@pytest.mark.parametrize(
    ("x", "y"),
    [(X[:, 0], Y), (X, Y[:3]), (X, Y[:, None]), (X.astype(str), Y), (X[:, :0], Y)],
)
def test_bad_arrays(x, y):
    with pytest.raises(ValueError, match="arrays: "):
        load_data((x, y), 2)


def test_a_silo_is_called_by_what_tells_its_file_from_others(frame, tmp_path):
    """As `silodp fit` calls it: a certificate that leaves the machine does not say where files lie on it."""
    for place in ("north/a.csv", "north/b.csv", "south/a.csv", "north/.hidden.csv"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        frame.to_csv(tmp_path / place, index=False)
    names = lambda *places: [s.name for s in load_data([tmp_path / p for p in places], target="label").silos]
    assert names("north/a.csv", "north/b.csv") == ["a", "b"]
    assert names("north/a.csv", "south/a.csv") == ["north/a", "south/a"]
    assert names("north/.hidden.csv", "south/a.csv") == [".hidden.csv", "a"]
    mixed = load_data([tmp_path / "north/a.csv", frame, str(tmp_path / "north/b.csv")], target="label")
    assert [silo.name for silo in mixed.silos] == ["a", "silo 1", "b"]
    given = load_data({"x": tmp_path / "north/a.csv", "y": tmp_path / "north/b.csv"}, target="label")
    assert [silo.name for silo in given.silos] == ["x", "y"]


def test_a_file_by_two_paths_is_no_two_silos(frame, tmp_path):
    """Each of its records would be asked twice as often as the certificate says."""
    first, other, link, hard = (tmp_path / name for name in ("a.csv", "b.csv", "link.csv", "hard.csv"))
    frame.to_csv(first, index=False)
    frame.to_csv(other, index=False)
    link.symlink_to(first)
    hard.hardlink_to(first)
    around = f"{tmp_path}/../{tmp_path.name}/a.csv"
    for again in (str(first), around, link, hard):
        for source in ([first, other, again], {"x": first, "y": again}):
            with pytest.raises(ValueError, match="one is given twice"):
                load_data(source, target="label")
        with pytest.raises(ValueError, match="one is given twice"):
            refuse_same_file([first, again])
    with pytest.raises(ValueError, match="one is given twice"):
        load_data(tmp_path, target="label")  # a folder with links
    assert load_data([first, other], target="label").sizes == (4, 4)


def test_files_are_named_by_what_tells_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = lambda *names: names_of([Path(name) for name in names])
    assert named("x/east.csv", "/x/west.csv.gz") == ["east", "west"]
    assert named("x/east.csv", tmp_path / "y" / "east.csv") == ["x/east", "y/east"]
    assert named("east.csv", "east.parquet") == ["east.csv", "east.parquet"]
    assert named("/east.csv", "east.csv") == ["east", f"{tmp_path.name}/east"]
