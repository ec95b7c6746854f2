"""From the units' results to what a reader wants: published | ours | difference | verdict, and the paper's claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from silodp.reproduce.experiment import Claim, Column, Experiment, Metric

Results = Mapping[tuple[str, str, str], dict[str, Any]]  # (panel, line, column) -> the unit's result


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
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        spread = f" ± {self.deviation:.2g}" if len(self.values) > 1 else ""
        return f"{self.mean:.4g}{spread}"


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

    @property
    def ours(self) -> Cell | None:
        """What stands against the published value: the run with the paper's own noise, where there is one."""
        return self.cells.get("published") or self.cells.get("exact")

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
        if self.published is None or self.best is None:
            return None
        gain = self.published - self.best.mean
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
    best = best_cell(experiment, results, panel, level, number)
    for line in experiment.lines_of(panel):
        cells: dict[Column, Cell] = {}
        for column in line.columns:
            cell = cell_of(results.get((panel, line.name, column)), level, number)
            if cell is not None and column != "best":
                cells[column] = cell
        value = published_value(experiment, panel, line.name, level, number)
        if cells or value is not None:
            yield Row(panel, level, line.name, metric, value, cells, best)


def published_value(experiment: Experiment, panel: str, line: str, level: float | None, metric: int) -> float | None:
    wanted = (panel, line, level, metric)
    return next((p.value for p in experiment.published if (p.panel, p.line, p.level, p.metric) == wanted), None)


def cell_of(result: dict[str, Any] | None, level: float | None, metric: int) -> Cell | None:
    """A reference line has one level, which stands for all."""
    if result is None:
        return None
    levels = result["levels"]
    found = levels[0] if len(levels) == 1 else next((each for each in levels if each["level"] == level), None)
    if found is None:
        return None
    values = tuple(float("nan") if v is None else float(v) for v in found["metrics"][metric]["values"])
    return Cell(result["line"], values, found["epsilon"])


def best_cell(experiment: Experiment, results: Results, panel: str, level: float | None, metric: int) -> Cell | None:
    """The best private line with exact noise: the paper's own or one that silodp adds."""
    cells = [
        cell_of(results.get((panel, line.name, column)), level, metric)
        for line in experiment.lines_of(panel)
        for column in line.columns
        if column != "published"
    ]
    private = [cell for cell in cells if cell is not None and cell.epsilon is not None and np.isfinite(cell.mean)]
    sign = -1.0 if experiment.metrics[metric].larger_is_better else 1.0
    return min(private, key=lambda cell: sign * cell.mean, default=None)


@dataclass(frozen=True)
class Judgement:
    """How a claim fares in one column: wins among the places where both sides were run, and a one-sided test."""

    claim: Claim
    column: Column
    wins: int
    places: int
    significant: int  # places where the paired one-sided t-test gives p < 0.05
    p_values: tuple[float, ...]

    @property
    def verdict(self) -> str:
        if self.places == 0:
            return "not run"
        tested = [p for p in self.p_values if not np.isnan(p)]
        if self.wins == self.places:
            return "holds" if self.significant == len(tested) else "holds in the mean, not significantly"
        return "does not hold" if self.wins == 0 else f"holds in {self.wins} of {self.places}"


def judgements(experiment: Experiment, results: Results) -> list[Judgement]:
    columns: tuple[Column, ...] = ("published", "exact")
    found = [judge(experiment, results, claim, column) for claim in experiment.claims for column in columns]
    return [judgement for judgement in found if judgement.places]


def judge(experiment: Experiment, results: Results, claim: Claim, column: Column) -> Judgement:
    metric = experiment.metrics[claim.metric]
    sign = -1.0 if metric.larger_is_better else 1.0
    wins, p_values = 0, []
    for panel in experiment.panels:
        for level in experiment.level_values:
            where = (panel.name, column, level, claim.metric, sign)
            first, second = (side(results, lines, *where) for lines in (claim.better, claim.than))
            if first is None or second is None:
                continue
            ours, theirs = sign * np.array(first.values), sign * np.array(second.values)
            wins += bool(ours.mean() <= theirs.mean())
            p_values.append(p_value(ours, theirs))
    significant = sum(p < 0.05 for p in p_values)
    return Judgement(claim, column, wins, len(p_values), significant, tuple(p_values))


def side(
    results: Results, lines: Sequence[str], panel: str, column: str, level: float | None, metric: int, sign: float
) -> Cell | None:
    """The best of the lines on one side of a claim."""
    cells = [cell_of(results.get((panel, line, column)), level, metric) for line in lines]
    finite = [cell for cell in cells if cell is not None and np.isfinite(cell.mean)]
    return min(finite, key=lambda cell: sign * cell.mean, default=None)


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """That the first is smaller: one-sided paired t-test, a sample per seed, as in DIFF2; NaN for one seed."""
    if len(first) != len(second) or len(first) < 2 or np.all(first == second):
        return float("nan")
    return float(stats.ttest_rel(first, second, alternative="less").pvalue)  # type: ignore[attr-defined]


def false_claims(results: Results) -> list[tuple[str, str, float, float]]:
    """(panel, line, claimed epsilon, true epsilon) wherever the paper's own noise does not give what it claims."""
    return [claim for claim in epsilon_claims(results) if claim[3] > claim[2] * 1.001]


def epsilon_claims(results: Results) -> list[tuple[str, str, float, float]]:
    """(panel, line, claimed epsilon, true epsilon) of every run with the paper's own noise."""
    return [
        (panel, line, level["claimed_epsilon"], level["epsilon"])
        for (panel, line, column), result in results.items()
        for level in result["levels"]
        if column == "published" and None not in (level["claimed_epsilon"], level["epsilon"])
    ]
