"""Named datasets: shapes and label counts of the real files where present, messages where not."""

import hashlib
import os
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from sklearn.utils import Bunch

from silodp.data import DATASETS, datasets, load_data, load_dataset

NEIGHBOUR = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def real(monkeypatch):
    """Point SILODP_DATA at the real files; skip the test where there are none."""
    directory = os.environ.get("SILODP_DATA") or str(NEIGHBOUR)
    if not Path(directory).is_dir():
        pytest.skip("needs the dataset files (SILODP_DATA)")
    monkeypatch.setenv("SILODP_DATA", directory)

    def need(name: str) -> None:
        if not all((Path(directory) / file).is_file() for file in DATASETS[name].files):
            pytest.skip(f"needs {', '.join(DATASETS[name].files)}")

    return need


@pytest.fixture
def no_network(monkeypatch):
    """Replace every downloader, so that none can be reached by accident."""

    def refuse(*args, **kwargs):
        raise URLError("no route")

    for name in ("california_housing", "covtype", "kddcup99", "openml"):
        monkeypatch.setattr(datasets.public, f"fetch_{name}", refuse)
    monkeypatch.delenv("SILODP_DATA", raising=False)


def counts(table) -> list[int]:
    return np.unique(table.targets, return_counts=True)[1].tolist()


def test_wbcd_needs_no_file(no_network):
    data = load_data("wbcd", partition="by-class")
    assert data.classes == ("benign", "malignant")
    assert data.sizes == (357, 212)
    assert data.input_shape == (30,)


@pytest.mark.parametrize("name", [n for n in DATASETS if DATASETS[n].files])
def test_missing_files_are_named(name, no_network, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="SILODP_DATA is not set") as caught:
        load_dataset(name)
    assert DATASETS[name].files[0] in str(caught.value)
    monkeypatch.setenv("SILODP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=f"SILODP_DATA = '{tmp_path}'"):
        load_dataset(name)


def test_unknown_name():
    with pytest.raises(ValueError, match="dataset 'iris': need one of wbcd, mnist"):
        load_dataset("iris")


def test_downloads_stand_in_for_files(no_network, monkeypatch):
    x, y = np.arange(12.0).reshape(6, 2), np.array([1, 2, 3, 1, 2, 3])
    plain = Bunch(data=x, target=y, feature_names=["a", "b"])
    images = Bunch(data=np.ones((6, 784)), target=np.array(list("012345")))
    names = ["duration", "protocol_type", "service", "flag"]
    cells = np.array([[1, b"udp", b"x", b"SF"], [2, b"tcp", b"x", b"SF"]], dtype=object)
    kdd = Bunch(data=cells, target=np.array([b"smurf.", b"normal."], object), feature_names=names)
    fakes = {"california_housing": plain, "covtype": plain, "openml": images, "kddcup99": kdd}
    for name, bunch in fakes.items():
        monkeypatch.setattr(datasets.public, f"fetch_{name}", lambda *a, b=bunch, **k: b)
    monkeypatch.setattr(datasets, "MNIST_TRAIN", 4)
    for name in ("california", "covtype"):
        table, test = load_dataset(name)
        np.testing.assert_array_equal(table.features, x)
        assert test is None
    train, test = load_dataset("mnist")
    assert test is not None
    assert train.features.shape == (4, 28, 28, 1)
    assert test.targets.tolist() == [4, 5]
    table, _ = load_dataset("kddcup99")
    np.testing.assert_array_equal(table.features, [[1, 1, 0, 0], [2, 0, 0, 0]])
    assert table.categories["protocol_type"] == ("tcp", "udp")
    assert table.targets.tolist() == ["smurf", "normal"]


def test_cifar_residuals_decode(monkeypatch, tmp_path):
    """Encode random images with the predictor, and see them come back."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    red, green, blue = (images[..., c].astype(int) for c in range(3))
    residual = np.zeros((3, 4, 32, 32), np.uint8)
    for c, plane in enumerate((green, red - green, blue - green)):
        left, up, both = np.zeros((3, *plane.shape), int)
        left[:, :, 1:], up[:, 1:], both[:, 1:, 1:] = (
            plane[:, :, :-1],
            plane[:, :-1],
            plane[:, :-1, :-1],
        )
        middle = np.sort([left, up, left + up - both], axis=0)[1]
        middle[:, 0], middle[:, :, 0] = left[:, 0], up[:, :, 0]
        residual[c] = (plane - middle) % 256
    for file in DATASETS["cifar10"].files:
        np.savez(tmp_path / file, residual=residual, y=np.arange(4, dtype=np.uint8))
    monkeypatch.setenv("SILODP_DATA", str(tmp_path))
    train, test = load_dataset("cifar10")
    assert train.features.shape == (20, 32, 32, 3)
    assert test is not None
    np.testing.assert_array_equal(test.features, images)


@pytest.mark.parametrize(
    ("name", "train", "test", "labels"),
    [
        ("a9a", (32561, 123), (16281, 123), [24720, 7841]),
        ("california", (20640, 8), None, None),
        ("gas-turbine", (36733, 9), None, None),
        ("blogfeedback", (52397, 280), (7624, 280), None),
    ],
)
def test_real_tables(name, train, test, labels, real):
    real(name)
    table, held_out = load_dataset(name)
    assert table.features.shape == train
    assert (None if held_out is None else held_out.features.shape) == test
    assert labels is None or counts(table) == labels


def test_real_mnist(real):
    real("mnist")
    train, test = load_dataset("mnist")
    assert counts(train) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test is not None
    assert counts(test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert train.features.shape == (60000, 28, 28, 1)
    assert train.features[:6000].max() == 255


def test_diff2_california(real):
    real("california")
    steps = ["standardise", "target-max"]
    data = load_data("california", 10, test=0.2, records=1651, preprocess=steps)
    assert data.sizes == (1651,) * 10
    assert data.test is not None
    assert len(data.test) == 4128
    assert max(s.targets.max() for s in data.silos) == 1
    assert data.task == "regression"


def test_soteria_a9a(real):
    real("a9a")
    steps = ["bias", "divide:1.34856"]
    data = load_data("a9a", 10, "by-label", records=3256, preprocess=steps)
    assert data.sizes == (3256,) * 10
    assert data.input_shape == (124,)
    assert [set(s.targets.tolist()) for s in data.silos] == [{0}] * 7 + [{0, 1}] + [{1}] * 2


def test_spider_mnist(real):
    real("mnist")
    steps = ["standardise", "pca:50", "target-parity"]
    data = load_data("mnist", partition="label-pairs", per_class=774, test=0.2, preprocess=steps)
    assert len(data.silos) == 25
    assert sum(data.sizes) == 6192
    assert data.test is not None
    assert len(data.test) == 1548
    assert data.input_shape == (50,)
    assert data.classes == ("even", "odd")
    assert all(0.3 < s.targets.mean() < 0.7 for s in data.silos)


@pytest.mark.slow
def test_real_covtype_and_kddcup99(real):
    real("covtype")
    real("kddcup99")
    table, _ = load_dataset("covtype")
    assert counts(table) == [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    table, _ = load_dataset("kddcup99")
    assert sorted(counts(table))[-3:] == [97278, 107201, 280790]
    steps = ["standardise", "one-hot:protocol_type,service,flag"]
    data = load_data("kddcup99", 10, test=0.2, limit=20000, preprocess=steps)
    assert data.input_shape == (118,)


@pytest.mark.slow
def test_real_cifar10_has_the_published_bytes(real):
    """The test part, rewritten in CIFAR's binary format, has the published checksum."""
    real("cifar10")
    train, test = load_dataset("cifar10")
    assert counts(train) == [5000] * 10
    assert test is not None
    planes = test.features.astype(np.uint8).transpose(0, 3, 1, 2).reshape(10000, -1)
    binary = np.column_stack([test.targets, planes]).astype(np.uint8)
    assert hashlib.md5(binary.tobytes()).hexdigest() == "803d5f7f4d78ea53de84dbe85f74fb6d"


def test_wbcd_is_what_scikit_learn_reads():
    from sklearn.datasets import load_breast_cancer

    bunch, table = load_breast_cancer(), load_dataset("wbcd")[0]
    assert np.array_equal(table.features, bunch.data.astype(np.float32))
    assert list(table.names) == list(bunch.feature_names)
    assert np.array_equal(table.targets, bunch.target_names[bunch.target])
