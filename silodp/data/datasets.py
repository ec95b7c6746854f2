"""Public datasets by name, read from the directory in the environment variable SILODP_DATA.

`wbcd` comes with scikit-learn. Where the file is missing, california, covtype, kddcup99 and mnist
are downloaded by scikit-learn (and cached where it caches); the others tell which file to provide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt8

from silodp.data.tables import from_arrays, load_npz
from silodp.data.types import Table, Task
from silodp.later import Later

public = Later("sklearn.datasets")

Tables = tuple[Table, Table | None]  # training records; test records where a split is customary
DIRECTORY = "SILODP_DATA"
KDD_CATEGORIES = ("protocol_type", "service", "flag")
MNIST_TRAIN = 60_000
# wbcd: what was measured of the nuclei of cells, and the statistics of it, in the order of its columns
CELLS = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points", "symmetry",
    "fractal dimension",
)  # fmt: skip
CELL_FORMS = ("mean {}", "{} error", "worst {}")


@dataclass(frozen=True)
class Dataset:
    task: Task
    files: tuple[str, ...]
    read: Callable[[list[Path]], Tables]
    fetch: Callable[[], Tables] | None = None


def load_dataset(name: str) -> Tables:
    """Training table and, where the dataset has one, the customary test table."""
    if name not in DATASETS:
        raise ValueError(f"dataset '{name}': need one of {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    directory = os.environ.get(DIRECTORY, "")
    paths = [Path(directory) / file for file in dataset.files]
    if not dataset.files or (directory and all(path.is_file() for path in paths)):
        return dataset.read(paths)
    return _fetch(name, dataset, directory)


def _fetch(name: str, dataset: Dataset, directory: str) -> Tables:
    where = f"{DIRECTORY} = '{directory}'" if directory else f"{DIRECTORY} is not set"
    wanted = f"set {DIRECTORY} to a folder that holds {', '.join(dataset.files)}"
    if dataset.fetch is None:
        raise ValueError(f"dataset '{name}': not found ({where}); {wanted}")
    try:
        return dataset.fetch()
    except OSError as fault:  # urllib's errors are OSErrors
        reason = " ".join(str(fault).split())
        raise ValueError(
            f"dataset '{name}': not found ({where}) and the download failed ({reason}); {wanted}"
        ) from fault


def _wbcd(paths: list[Path]) -> Tables:
    """scikit-learn's file, read without importing scikit-learn: that takes longer than the first run itself."""
    with (_sklearn_folder() / "datasets" / "data" / "breast_cancer.csv").open(encoding="utf-8") as lines:
        classes = np.array(next(lines).strip().split(",")[2:])
        rows = np.array([line.split(",") for line in lines], np.float64)
    names = [form.format(measured) for form in CELL_FORMS for measured in CELLS]
    return from_arrays("wbcd", rows[:, :-1], classes[rows[:, -1].astype(int)], names), None


def _sklearn_folder() -> Path:
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None, "scikit-learn is required by silodp"
    return Path(spec.origin).parent


def _two_parts(name: str) -> Callable[[list[Path]], Tables]:
    """A file with X_train, y_train, X_test, y_test; images get a channel axis."""

    def read(paths: list[Path]) -> Tables:
        arrays = load_npz(paths[0])
        train, test = (
            from_arrays(name, _with_channel(arrays[f"X_{part}"]), arrays[f"y_{part}"]) for part in ("train", "test")
        )
        return train, test

    return read


def _with_channel(x: Shaped[np.ndarray, "n ..."]) -> Shaped[np.ndarray, "n ..."]:
    return x[..., None] if x.ndim == 3 else x


def _one_part(name: str) -> Callable[[list[Path]], Tables]:
    """A file with X, y and maybe feature_names."""

    def read(paths: list[Path]) -> Tables:
        arrays = load_npz(paths[0])
        names = [str(n) for n in arrays.get("feature_names", ())]
        return from_arrays(name, arrays["X"], arrays["y"], names), None

    return read


def _kddcup99(paths: list[Path]) -> Tables:
    arrays = load_npz(paths[0])
    names = [str(n) for n in arrays["feature_names"]]
    table = from_arrays("kddcup99", arrays["X"], arrays["y_names"][arrays["y"]], names)
    values = {key: tuple(map(str, arrays[f"cat_{key}"])) for key in KDD_CATEGORIES}
    return replace(table, categories=values), None


def _cifar10(paths: list[Path]) -> Tables:
    parts = [_cifar10_part(path) for path in paths]
    images = np.concatenate([x for x, _ in parts[:-1]])
    labels = np.concatenate([y for _, y in parts[:-1]])
    return from_arrays("cifar10", images, labels), from_arrays("cifar10", *parts[-1])


def _cifar10_part(path: Path) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    arrays = load_npz(path)
    return _undo_prediction(arrays["residual"]), arrays["y"]


def _undo_prediction(residual: UInt8[np.ndarray, "3 n 32 32"]) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Images from the residuals of a lossless predictor (format: README of the data files).

    Planes are green, red-green, blue-green; each pixel was predicted from its left, upper and
    upper-left neighbours, and stored as the error modulo 256.
    """
    errors = np.moveaxis(residual, (2, 3), (0, 1)).astype(np.int16)
    planes = np.zeros_like(errors)
    for row, column in np.ndindex(planes.shape[:2]):
        value = _predict(planes, row, column) + errors[row, column]
        green = value[0] & 255
        # a difference is only known modulo 256: pick the one whose colour lies in 0..255
        planes[row, column, 1:] = ((value[1:] + green) & 255) - green
        planes[row, column, 0] = green
    green, red, blue = np.moveaxis(planes, 2, 0)
    image = np.stack([red + green, green, blue + green], axis=-1)
    return np.ascontiguousarray(np.moveaxis(image, 2, 0), dtype=np.uint8)


def _predict(planes: Shaped[np.ndarray, "32 32 3 n"], row: int, column: int) -> np.ndarray:
    """The median edge predictor; on the border, the one neighbour there is."""
    if row == 0:
        return planes[0, max(column - 1, 0)]  # still zero at the first pixel
    if column == 0:
        return planes[row - 1, 0]
    left, above = planes[row, column - 1], planes[row - 1, column]
    slope = left + above - planes[row - 1, column - 1]
    return np.clip(slope, np.minimum(left, above), np.maximum(left, above))


def _fetch_california() -> Tables:
    bunch = public.fetch_california_housing()
    return from_arrays("california", bunch.data, bunch.target, bunch.feature_names), None  # pyright: ignore


def _fetch_covtype() -> Tables:
    bunch = public.fetch_covtype()
    return from_arrays("covtype", bunch.data, bunch.target), None  # pyright: ignore


def _fetch_kddcup99() -> Tables:
    bunch = public.fetch_kddcup99(percent10=True)
    names, values = [str(n) for n in bunch.feature_names], {}  # pyright: ignore
    cells = np.array(bunch.data, dtype=object)  # pyright: ignore
    for key in KDD_CATEGORIES:
        at = names.index(key)
        found, codes = np.unique([v.decode() for v in cells[:, at]], return_inverse=True)
        cells[:, at], values[key] = codes, tuple(found.tolist())
    labels = np.array([label.decode().rstrip(".") for label in bunch.target])  # pyright: ignore
    table = from_arrays("kddcup99", cells.astype(np.float64), labels, names)
    return replace(table, categories=values), None


def _fetch_mnist() -> Tables:
    bunch = public.fetch_openml("mnist_784", version=1, as_frame=False)
    images = np.asarray(bunch.data, np.float32).reshape(-1, 28, 28, 1)  # pyright: ignore
    labels = np.asarray(bunch.target).astype(np.int64)  # pyright: ignore
    train = from_arrays("mnist", images[:MNIST_TRAIN], labels[:MNIST_TRAIN])
    return train, from_arrays("mnist", images[MNIST_TRAIN:], labels[MNIST_TRAIN:])


CIFAR_FILES = (*(f"cifar10_train{part}.npz" for part in range(1, 6)), "cifar10_test.npz")
DATASETS: dict[str, Dataset] = {
    "wbcd": Dataset("classification", (), _wbcd),
    "mnist": Dataset("classification", ("mnist.npz",), _two_parts("mnist"), _fetch_mnist),
    "a9a": Dataset("classification", ("a9a.npz",), _two_parts("a9a")),
    "california": Dataset("regression", ("california_housing.npz",), _one_part("california"), _fetch_california),
    "gas-turbine": Dataset("regression", ("gas_turbine.npz",), _one_part("gas-turbine")),
    "blogfeedback": Dataset("regression", ("blogfeedback.npz",), _two_parts("blogfeedback")),
    "covtype": Dataset("classification", ("covtype.npz",), _one_part("covtype"), _fetch_covtype),
    "kddcup99": Dataset("classification", ("kddcup99_10pct.npz",), _kddcup99, _fetch_kddcup99),
    "cifar10": Dataset("classification", CIFAR_FILES, _cifar10),
}
