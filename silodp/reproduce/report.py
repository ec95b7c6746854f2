"""From the units' results to what a reader wants: published | ours | difference | verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.reproduce.experiment import Column, Experiment, Line, Metric

WIDE = 0.2  # seeds that differ by more than this part of their mean are shown by their ends too

Results = Mapping[tuple[str, str, str], dict[str, Any]]  # (panel, line, column) -> the unit's result


def deviation(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Cell:
    """One number over its seeds; NaN for a run that diverged."""

    line: str
    values: tuple[float, ...]
    epsilon: float | None

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float:
        return deviation(np.array(self.values))

    def __str__(self) -> str:
        spread = f" ± {self.deviation:.2g}" if len(self.values) > 1 else ""
        wide = len(self.values) > 2 and self.deviation > WIDE * abs(self.mean)
        ends = f" ({min(self.values):.3g} to {max(self.values):.3g})" if wide else ""
        return f"{self.mean:.4g}{spread}{ends}"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    panel: str
    level: float | None
    line: str
    metric: Metric
    published: float | None
    cells: dict[Column, Cell]
    best: Cell | None
    best_alike: Cell | None = None  # the best that trains the paper's own model

    @property
    def ours(self) -> Cell | None:
        """What stands against the published value: the run with the paper's own noise, where there is one."""
        return self.cells.get("paper") or self.cells.get("exact")

    @property
    def reproduced(self) -> str:
        """The published value against a run of the authors' program's own way, where there is one: not private.

        It should be the same number: one that is better is missed as well.
        """
        cell = self.cells.get("authors")
        if self.published is None or cell is None:
            return ""
        difference = cell.mean - self.published
        if judged(difference, self.metric) == "match":
            return "match"
        return "within the seeds' spread" if abs(difference) <= cell.deviation else "miss"

    @property
    def difference(self) -> float | None:
        return None if self.published is None or self.ours is None else self.ours.mean - self.published

    @property
    def verdict(self) -> str:
        if self.difference is None or self.ours is None:
            return ""
        verdict = judged(self.difference, self.metric)
        within = verdict == "worse" and abs(self.difference) <= self.ours.deviation
        return "worse, within the seeds' spread" if within else verdict

    @property
    def beaten(self) -> bool | None:
        """Whether the best of silodp, at the claimed epsilon, is at least as good as the published value."""
        return self.reached_by(self.best)

    @property
    def beaten_alike(self) -> bool | None:
        """The same with the paper's own model."""
        return self.reached_by(self.best_alike)

    def reached_by(self, best: Cell | None) -> bool | None:
        if self.published is None or best is None:
            return None
        gain = self.published - best.mean
        return (-gain if self.metric.larger_is_better else gain) >= 0


def judged(difference: float, metric: Metric) -> str:
    if not np.isfinite(difference):
        return "diverged"
    if abs(difference) <= metric.tolerance:
        return "match"
    return "better" if (difference > 0) == metric.larger_is_better else "worse"


def rows_of(experiment: Experiment, results: Results) -> list[Row]:
    return [
        row
        for panel in experiment.panels
        for level in experiment.level_values
        for number, metric in enumerate(experiment.metrics)
        for row in panel_rows(experiment, results, panel.name, level, number, metric)
    ]


def panel_rows(
    experiment: Experiment, results: Results, panel: str, level: float | None, number: int, metric: Metric
) -> Iterator[Row]:
    lines = experiment.lines_of(panel)
    best = best_cell(experiment, results, panel, level, number, lines)
    alike = best_cell(experiment, results, panel, level, number, [line for line in lines if line.papers_model])
    for line in lines:
        cells: dict[Column, Cell] = {}
        for column in line.columns:
            cell = cell_of(results.get((panel, line.name, column)), level, number)
            if cell is not None:  # silodp's own lines have exact noise, as everything that is not said to be a paper's
                cells["exact" if column == "best" else column] = cell
        value = published_value(experiment, panel, line.name, level, number)
        if cells or value is not None:
            yield Row(panel, level, line.name, metric, value, cells, best, alike)


def published_value(experiment: Experiment, panel: str, line: str, level: float | None, metric: int) -> float | None:
    wanted = (panel, line, level, metric)
    return next((p.value for p in experiment.published if (p.panel, p.line, p.level, p.metric) == wanted), None)


def level_of(result: dict[str, Any] | None, level: float | None) -> dict[str, Any] | None:
    """A unit's result at a level; a reference line has one level, which stands for all."""
    levels = [] if result is None else result["levels"]
    return levels[0] if len(levels) == 1 else next((each for each in levels if each["level"] == level), None)


def cell_of(result: dict[str, Any] | None, level: float | None, metric: int) -> Cell | None:
    found = level_of(result, level)
    if result is None or found is None:
        return None
    return Cell(result["line"], tuple(numbers(found["metrics"][metric]["values"]).tolist()), found["epsilon"])


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """JSON's null is a diverged run's NaN."""
    return np.array([np.nan if value is None else value for value in values], float)


def best_cell(
    experiment: Experiment, results: Results, panel: str, level: float | None, metric: int, lines: Sequence[Line]
) -> Cell | None:
    """The best private one of these lines with exact noise: the paper's own or one that silodp adds."""
    cells = [
        cell_of(results.get((panel, line.name, column)), level, metric)
        for line in lines
        for column in line.columns
        if column != "paper"
    ]
    private = [cell for cell in cells if cell is not None and cell.epsilon is not None and np.isfinite(cell.mean)]
    sign = -1.0 if experiment.metrics[metric].larger_is_better else 1.0
    return min(private, key=lambda cell: sign * cell.mean, default=None)


def false_claims(results: Results) -> list[tuple[str, str, float, float]]:
    """(panel, line, claimed epsilon, true epsilon) wherever the paper's own noise does not give what it claims."""
    return [claim for claim in epsilon_claims(results) if claim[3] > claim[2] * 1.001]


def epsilon_claims(results: Results) -> list[tuple[str, str, float, float]]:
    """(panel, line, claimed epsilon, true epsilon) of every run with the paper's own noise."""
    return [
        (panel, line, level["claimed_epsilon"], level["epsilon"])
        for (panel, line, column), result in results.items()
        for level in result["levels"]
        if column == "paper" and None not in (level["claimed_epsilon"], level["epsilon"])
    ]
