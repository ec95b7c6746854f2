"""The papers' figures redrawn: mean and deviation over seeds, one colour per line, one stroke per column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from silodp.plots import finish, save
from silodp.reproduce.experiment import Experiment, Line
from silodp.reproduce.report import Results, deviation, numbers

STROKES = {"exact": "-", "published": "--", "best": ":"}
X_LABELS = {"rounds": "round", "bits": "megabytes sent by the silos"}


def draw(experiment: Experiment, results: Results, path: Path) -> None:
    """A row of axes for each panel, a column for each metric and x axis."""
    columns = [(m, axis) for m in range(len(experiment.metrics)) for axis in experiment.axes]
    rows = len(experiment.panels)
    figure = Figure(figsize=(4.3 * len(columns), 3.3 * rows), layout="constrained")
    for r, panel in enumerate(experiment.panels):
        for c, (metric, axis) in enumerate(columns):
            axes = figure.add_subplot(rows, len(columns), r * len(columns) + c + 1)
            axes.set_title(panel.name + last_level(experiment, axis), fontsize="medium")
            draw_lines(axes, experiment, results, panel.name, metric, axis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", fontsize="small")
    save(figure, path)


def last_level(experiment: Experiment, axis: str) -> str:
    """A run's rounds are drawn at one level only."""
    levels = experiment.levels
    return "" if levels is None or axis == "levels" else f", {levels.label} {levels.values[-1]:g}"


def draw_lines(axes: Axes, experiment: Experiment, results: Results, panel: str, metric: int, axis: str) -> None:
    shown = experiment.metrics[metric]
    for number, line in enumerate(experiment.lines_of(panel)):
        for column in line.columns:
            result = results.get((panel, line.name, column))
            if result is not None:
                stroke: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": STROKES[column]}
                stroke["label"] = f"{line.name}, {column}" if line.levels else line.name
                draw_line(axes, result, metric, axis, experiment.level_values, stroke)
        if axis == "levels":
            draw_published(axes, experiment, panel, line, metric, f"C{number % 10}")
    if shown.log:
        axes.set_yscale("log")
    if axis in ("levels", "bits"):
        axes.set_xscale("log")
    label = experiment.levels.label if axis == "levels" and experiment.levels else X_LABELS.get(axis, axis)
    finish(axes, label, shown.label, legend=False)


def draw_line(
    axes: Axes, result: dict[str, Any], metric: int, axis: str, levels: list[float | None], stroke: dict[str, Any]
) -> None:
    if axis == "levels":
        found = {each["level"]: each["metrics"][metric]["values"] for each in result["levels"]}
        whole = [found.get(level, found.get(None)) for level in levels]
        values = [numbers(each) for each in whole if each is not None]
        x = np.array([level for level, each in zip(levels, whole, strict=True) if each is not None], float)
        y, spread = np.array([v.mean() for v in values]), np.array([deviation(v) for v in values])
        axes.plot(x, y, marker="o", markersize=3, **stroke)
    else:
        last = result["levels"][-1]
        x = np.array(last["rounds"] if axis == "rounds" else [b / 8e6 for b in last["bits_up"]], float)
        y, spread = (numbers(last["metrics"][metric][key]) for key in ("mean", "deviation"))
        axes.plot(x, y, **stroke)
    axes.fill_between(x, y - spread, y + spread, alpha=0.15, color=stroke["color"], linewidth=0)


def draw_published(axes: Axes, experiment: Experiment, panel: str, line: Line, metric: int, color: str) -> None:
    """What the paper prints, as crosses."""
    points = [
        (p.level, p.value)
        for p in experiment.published
        if (p.panel, p.line, p.metric) == (panel, line.name, metric) and p.level is not None
    ]
    if points:
        axes.scatter(*zip(*points, strict=True), marker="x", color=color)
