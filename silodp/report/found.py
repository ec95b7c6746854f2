"""What was measured, with an error where one is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LABELS = {
    "objective": "objective (mean loss of a record)",
    "gradient_norm2": "squared gradient norm",
    "test_loss": "test loss (mean of a record)",
    "test_accuracy": "test accuracy (share)",
    "test_mse": "test mean squared error (target units squared)",
}
LOGARITHMIC = ("gradient_norm2",)
NORMAL = 1.959964  # 95 %


@dataclass(frozen=True)
class Measured:
    """A number of a report; `error`: half the width of its 95 % interval."""

    name: str
    value: float
    error: float | None
    on: str

    @property
    def shown(self) -> str:
        return f"{self.value:.4g}" if math.isfinite(self.value) else "diverged"

    @property
    def error_shown(self) -> str:
        return "not known" if self.error is None else f"± {self.error:.2g}"


def share_error(share: float, records: int) -> float:
    """Half the width of Wilson's interval of a share of so many records."""
    z2 = NORMAL**2 / records
    return NORMAL * math.sqrt(share * (1 - share) / records + z2 / (4 * records)) / (1 + z2)


def found_in(final: Mapping[str, float], test_records: int | None) -> list[Measured]:
    """The columns of a run's last row."""
    return [of_column(name, final[name], test_records) for name in LABELS if name in final]


def of_column(name: str, value: float, test_records: int | None) -> Measured:
    if not name.startswith("test_"):
        return Measured(LABELS[name], value, None, "the silos' records")
    known = name == "test_accuracy" and test_records and 0 <= value <= 1
    error = share_error(value, test_records) if known and test_records else None
    return Measured(LABELS[name], value, error, "test records" if not test_records else f"{test_records} test records")


def baseline_rows(baselines: Mapping[str, Mapping[str, float]], test_records: int | None) -> list[Measured]:
    """The same columns of predictors that one would compare with."""
    rows: list[Any] = [(name, label, value) for name, each in baselines.items() for label, value in each.items()]
    plain = [(label, of_column(name, value, test_records)) for name, label, value in rows]
    return [Measured(f"{row.name}, {label}", row.value, row.error, row.on) for label, row in plain]
