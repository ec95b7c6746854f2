"""Ten made-up hospitals of very different sizes: one CSV file each, and the same records as one table.

python examples/make_hospitals.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

SIZES = {
    "north": 410, "south": 95, "east": 220, "west": 60, "lake": 150,
    "hill": 40, "port": 310, "valley": 80, "forest": 120, "island": 45,
}  # fmt: skip


def hospital(records: int, rng: np.random.Generator) -> pd.DataFrame:
    age, pressure = rng.integers(20, 90, records), rng.normal(130, 15, records)
    cholesterol, smoker = rng.normal(5.2, 1.0, records), rng.integers(0, 2, records)
    risk = (age - 55) / 20 + 0.7 * (pressure - 130) / 15 + 0.5 * (cholesterol - 5.2) + 0.8 * (smoker - 0.5)
    ill = risk + 0.5 * rng.normal(size=records) > 0
    columns = {"age": age, "pressure": pressure.round(), "cholesterol": cholesterol.round(1), "smoker": smoker}
    return pd.DataFrame({**columns, "outcome": np.where(ill, "ill", "well")})


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tables = {name: hospital(records, rng) for name, records in SIZES.items()}
    (folder / "hospitals").mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / "hospitals" / f"{name}.csv", index=False)
    whole = pd.concat([table.assign(hospital=name) for name, table in tables.items()])
    whole.to_csv(folder / "patients.csv", index=False)
    # Round numbers that a doctor would give without looking at any record: public, hence no cost in privacy.
    np.savez(folder / "scales.npz", mean=[55.0, 130.0, 5.0, 0.5], std=[20.0, 15.0, 1.0, 0.5])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
