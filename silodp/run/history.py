"""A run's history: rows of what was measured, with running totals of what was sent and computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from silodp.run.directory import RunDirectory

Row = dict[str, float]
TOTALS = ("bits_up", "bits_down", "record_gradients")


def rows_of(columns: Mapping[str, np.ndarray]) -> list[Row]:
    """Columns as they come from a program, turned into rows."""
    length = len(next(iter(columns.values())))
    return [{name: float(values[i]) for name, values in columns.items()} for i in range(length)]


def with_totals(rows: Sequence[Row], last: Row | None = None) -> list[Row]:
    """Rows that hold the costs since the row before, as rows that hold their totals; `last`: the row before these."""
    totalled: list[Row] = []
    for row in rows:
        before = totalled[-1] if totalled else last or dict.fromkeys(TOTALS, 0.0)
        totalled.append(row | {name: before[name] + row[name] for name in TOTALS})
    return totalled


class History:
    """Rows kept on disk as they come."""

    def __init__(self, directory: RunDirectory):
        self.directory = directory
        self.rows: list[Row] = []

    def reload(self) -> None:
        self.rows = self.directory.history()

    def add(self, rows: Sequence[Row]) -> None:
        fresh = with_totals(rows, self.rows[-1] if self.rows else None)
        self.rows += fresh
        self.directory.append_history(fresh)
