"""Raw rows of three hospitals, with categories, missing cells and untidy texts, and the schema that describes them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd

import silodp

SCHEMA: dict[str, Any] = {
    "target": {"name": "outcome", "classes": ["well", "ill"]},
    "columns": {
        "patient_id": {"kind": "ignore"},
        "age": {"kind": "number", "range": [18, 100], "missing": 60},
        "sex": {"kind": "category", "values": ["female", "male"]},
        "creatinine": {"kind": "number", "centre": 1.0, "scale": 0.5, "missing": 1.0},
        "pain": {"kind": "ordered", "values": ["none", "mild", "severe"], "missing": "none"},
        "smoker": {"kind": "flag", "missing": False},
    },
}
SIZES = {"north": 300, "south": 200, "lake": 100}


def raw(seed: int = 0) -> pd.DataFrame:
    """As a CSV file gives them: every cell a text."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES.values())
    age, creatinine = rng.integers(18, 95, n), np.exp(rng.normal(0, 0.4, n))
    smoker, pain = rng.random(n) < 0.3, rng.choice(3, n)
    ill = 0.08 * (age - 56) + 1.5 * (creatinine - 1) + 0.8 * smoker + 0.5 * (pain - 1) + rng.normal(0, 0.7, n) > 0
    frame = pd.DataFrame({
        "patient_id": [f"P{i:05d}" for i in range(n)],
        "hospital": np.repeat(list(SIZES), list(SIZES.values())),
        "age": age.astype(str),
        "sex": rng.choice(["female", "Male", "MALE ", "unknown"], n, p=[0.5, 0.2, 0.25, 0.05]),
        "creatinine": [f"{value:.2f}" for value in creatinine],
        "pain": np.array(["none", "mild", "severe"])[pain],
        "smoker": np.where(smoker, "yes", "no"),
        "outcome": np.where(ill, "ill", "Well"),
    })  # fmt: skip
    for name, share in (("age", 0.03), ("creatinine", 0.2), ("pain", 0.1), ("smoker", 0.05)):
        frame[name] = frame[name].where(rng.random(n) >= share, "")
    return frame


@cache
def fitted() -> silodp.SiloClassifier:
    """One fit for all tests: compiling takes longer than they do."""
    clf = silodp.SiloClassifier(epsilon=3.0, random_state=0)
    return clf.fit(raw(), "outcome", silo="hospital", schema=SCHEMA)
