"""A run's history: rows of what was measured, with running totals of what was sent and computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from silodp.errors import ConfigError
from silodp.run.directory import RunDirectory

Row = dict[str, float]
OnRound = Callable[[np.ndarray, Row], Any]  # what it returns is not looked at
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
    """Rows kept on disk as they come, with the points they were measured at when these are wanted."""

    def __init__(self, directory: RunDirectory, *, trajectory: bool = False, on_round: OnRound | None = None):
        self.directory, self.trajectory, self.on_round = directory, trajectory, on_round
        self.rows: list[Row] = []

    @property
    def one_by_one(self) -> bool:
        """Whether every row needs its own point."""
        return self.trajectory or self.on_round is not None

    def cut(self, rows: int, parameters: int) -> None:
        """Go back to so many rows: what came after them will be computed again."""
        self.directory.cut_history(rows)
        self.directory.cut_points(rows, parameters)
        self.rows = self.directory.history()

    def check_columns(self, measured: Sequence[str]) -> None:
        """A run that goes on must measure what it has measured before."""
        if self.rows and set(self.rows[-1]) != set(measured):
            different = sorted(set(self.rows[-1]) ^ set(measured))
            raise ConfigError(f"metrics: {different[0]!r} is measured in one part of the run only; give the same again")

    def add(self, rows: Sequence[Row], x: Any) -> None:
        """Rows, and the point of the last one."""
        fresh = with_totals(rows, self.rows[-1] if self.rows else None)
        self.rows += fresh
        self.directory.append_history(fresh)
        if self.trajectory:
            self.directory.append_point(np.asarray(x))

    def tell(self, x: Any) -> None:
        """Hand the last row and its point to the user, as copies that may be changed."""
        if self.on_round is not None:
            self.on_round(np.array(x), dict(self.rows[-1]))
