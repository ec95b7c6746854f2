"""Runs one unit of an experiment: search the settings, then run the best ones with every seed, and keep the result.

A unit's result is a small JSON file; its name carries a fingerprint of all that describes it, so that nothing is run
twice and no result of another description is used. A new version of silodp does not discard results: delete them. The
page says how many were drawn with normal numbers that are made otherwise now.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from silodp.config import Config
from silodp.data import FederatedData
from silodp.plan.certificate import as_text, certificate
from silodp.reproduce.experiment import HistoryColumn, Metric, Rung, Statistic, Unit, Values
from silodp.run.progress import Progress
from silodp.run.runner import context_of
from silodp.run.sweep import Outcome, run_configs
from silodp.threefry import NORMALS

NOT_PRIVATE = "not private: chosen on private data"
DIGITS = 6  # that a result keeps


@dataclass(frozen=True)
class Point:
    """A setting of a unit at one of its levels."""

    level: int
    values: tuple[tuple[str, Any], ...]

    def config(self, unit: Unit, seed: int) -> Config:
        return unit.config(self.level, dict(self.values) | {"run.seed": seed})


def run_unit(unit: Unit, data: FederatedData, folder: Path, progress: Progress) -> dict[str, Any]:
    """The unit's result, from its file when it is there already."""
    file = unit.file(folder)
    if file.is_file():
        return read_json(file)
    points, searched = settings_of(unit, data, folder, progress)
    began = time.process_time()
    result: dict[str, Any] = {
        "panel": unit.panel.name,
        "line": unit.line.name,
        "column": unit.column,
        "levels": finals(unit, points, data, folder, progress),
        "tuning": f"{len(grid(unit))} settings tried; {NOT_PRIVATE}" if unit.search else None,
        "normals": NORMALS,
    }
    result["cpu_seconds"] = round(time.process_time() - began + searched, 1)  # whatever else the machine was doing
    write_json(file, result)
    return result


def settings_of(unit: Unit, data: FederatedData, folder: Path, progress: Progress) -> tuple[list[Point], float]:
    """The settings of the final runs and the CPU seconds it took to find them."""
    if unit.searched.column == unit.column:
        return search(unit, data, folder, progress)
    levels = run_unit(unit.searched, data, folder, progress)["levels"]
    chosen = [(i, setting) for i, level in enumerate(levels) for setting in settings_in(level)]
    points = [Point(i, tuple((key, setting[key]) for key in unit.search)) for i, setting in chosen]
    return list(dict.fromkeys(points)), 0.0


def settings_in(level: dict[str, Any]) -> list[Values]:
    """One for all metrics, or one for each."""
    return level.get("settings", [level["setting"]])


def grid(unit: Unit) -> list[Values]:
    keys = list(unit.search)
    return [dict(zip(keys, values, strict=True)) for values in product(*unit.search.values())]


def search(unit: Unit, data: FederatedData, folder: Path, progress: Progress) -> tuple[list[Point], float]:
    """The settings that go on to the final runs, at every level the best of the last rung, and the CPU seconds."""
    points = [Point(level, tuple(values.items())) for level in range(len(unit.levels)) for values in grid(unit)]
    if len(points) == len(unit.levels):
        return points, 0.0
    file = unit.file(folder).with_suffix(".search.json")
    if file.is_file():
        known = read_json(file)
        return [Point(p["level"], tuple(p["values"].items())) for p in known["kept"]], known["cpu_seconds"]
    began = time.process_time()
    for rung in unit.rungs:
        points = climb(unit, rung, points, data, progress)
    kept = [{"level": p.level, "values": dict(p.values)} for p in points]
    seconds = round(time.process_time() - began, 1)
    write_json(file, {"kept": kept, "cpu_seconds": seconds})
    return points, seconds


def climb(unit: Unit, rung: Rung, points: Sequence[Point], data: FederatedData, progress: Progress) -> list[Point]:
    seed = unit.experiment.seeds[0]
    outcomes = run(unit, [point.config(unit, seed) for point in points], data, progress, rung.rounds)
    kept = [
        points[i]
        for level in range(len(unit.levels))
        for measure in measures(unit)
        for i in sorted(at_level(points, level), key=lambda i, by=measure: score(outcomes[i], *by))[: rung.keep]
    ]
    return list(dict.fromkeys(kept))


def at_level(points: Sequence[Point], level: int) -> list[int]:
    return [i for i, point in enumerate(points) if point.level == level]


def measures(unit: Unit) -> list[tuple[HistoryColumn, Statistic]]:
    """What settings are chosen by: one measure for all metrics, or each metric for itself."""
    how, metrics = unit.experiment.search, unit.experiment.metrics
    return [(metric.column, metric.statistic) for metric in metrics] if how.each else [(how.column, how.statistic)]


def run(
    unit: Unit, configs: list[Config], data: FederatedData, progress: Progress, stop: int | None = None
) -> list[Outcome]:
    return run_configs(configs, data, progress=progress, together=unit.experiment.search.together, stop=stop)


def score(outcome: Outcome, column: str, statistic: Statistic) -> float:
    """What the search makes small; a run that diverged comes last."""
    rows = rows_of_column(outcome, column)
    if not np.isfinite(rows).all():
        return float("inf")
    value = value_of(rows, statistic)
    return -value if "accuracy" in column else value


def rows_of_column(outcome: Outcome, column: str) -> np.ndarray:
    if column == "test_error":
        return 1 - rows_of_column(outcome, "test_accuracy")
    return np.array([row[column] for row in outcome.history])


def value_of(rows: np.ndarray, statistic: Statistic) -> float:
    return float({"last": rows[-1], "min": rows.min(), "mean": rows.mean()}[statistic])


def curve_of(rows: np.ndarray, statistic: Statistic) -> np.ndarray:
    """What the figure shows against rounds: the running mean where the papers do."""
    return np.cumsum(rows) / np.arange(1, len(rows) + 1) if statistic == "mean" else rows


def finals(
    unit: Unit, points: Sequence[Point], data: FederatedData, folder: Path, progress: Progress
) -> list[dict[str, Any]]:
    """At every level the setting that is best in the mean over all seeds (or that of each metric), with its numbers."""
    seeds = unit.seeds
    outcomes = run(unit, [point.config(unit, seed) for point in points for seed in seeds], data, progress)
    of_point = [outcomes[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(points))]
    mean = lambda i, by: float(np.mean([score(outcome, *by) for outcome in of_point[i]]))
    results = []
    for level in range(len(unit.levels)):
        best = [min(at_level(points, level), key=lambda i, by=by: mean(i, by)) for by in measures(unit)]
        results.append(summary(unit, [points[i] for i in best], [of_point[i] for i in best]))
        save_certificate(unit, level, of_point[best[0]][0], folder)
    return results


def summary(unit: Unit, chosen: Sequence[Point], ran: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """One level: the setting, its epsilon, every seed's value and the mean curve of each metric."""
    point, outcomes, wanted = chosen[0], ran[0], unit.experiment.metrics
    config = outcomes[0].prepared.config
    each = len(chosen) > 1  # a setting for each metric
    metrics = [of_metric(metric, ran[i] if each else outcomes) for i, metric in enumerate(wanted)]
    return {
        "level": unit.levels[point.level],
        "setting": {"algorithm.name": config.algorithm.name, **dict(point.values)},
        **({"settings": [dict(own.values) for own in chosen]} if each else {}),
        "claimed_epsilon": claimed_epsilon(unit, point.level, config),
        "epsilon": rounded(outcomes[0].epsilon),
        "delta": config.privacy.delta if config.privacy.private else None,
        "rounds": [int(row["round"]) for row in outcomes[0].history],
        "bits_up": [rounded(row["bits_up"]) for row in outcomes[0].history],
        "metrics": metrics,
    }


def claimed_epsilon(unit: Unit, level: int, config: Config) -> float | None:
    """What the figure calls epsilon, also where a run is made from the noise."""
    levels = unit.experiment.levels
    if levels is not None and levels.key == "privacy.epsilon":
        return unit.levels[level]
    return config.privacy.epsilon


def of_metric(metric: Metric, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = [rows_of_column(outcome, metric.column) for outcome in outcomes]
    curves = np.array([curve_of(each, metric.statistic) for each in rows])
    return {
        "values": [rounded(value_of(each, metric.statistic)) for each in rows],
        "mean": [rounded(v) for v in curves.mean(axis=0)],
        "deviation": [rounded(v) for v in curves.std(axis=0, ddof=1 if len(rows) > 1 else 0)],
    }


def rounded(value: float | None) -> float | None:
    """A diverged run's infinities and NaNs become null: JSON has no word for them."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{DIGITS}g}")


def save_certificate(unit: Unit, level: int, outcome: Outcome, folder: Path) -> None:
    plan, spent = outcome.prepared.plan, outcome.spent
    if spent is None:
        return
    statement = certificate(plan, spent, context_of(outcome.prepared))
    name = certificate_name(unit, level)
    write_text(folder / "certificates" / f"{name}.txt", as_text(statement))
    write_json(folder / "certificates" / f"{name}.json", statement)


def certificate_name(unit: Unit, level: int) -> str:
    """Experiments share a folder, and two may give their lines the same names: the fingerprint tells them apart."""
    value = unit.levels[level]
    return f"{unit.slug}-{unit.fingerprint}" + ("" if value is None else f"-{value:g}")


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def write_json(file: Path, tree: Any) -> None:
    write_text(file, json.dumps(tree, default=float) + "\n")


def write_text(file: Path, text: str) -> None:
    """Whole or not at all: a file that is there is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(file.name + ".part")
    half.write_text(text, encoding="utf-8")
    half.replace(file)
