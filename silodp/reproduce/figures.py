"""The papers' figures redrawn: mean and deviation over seeds, one colour per line, one stroke per column."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp.plots import finish, new_figure, save
from silodp.reproduce.experiment import WORDS, Experiment, Line
from silodp.reproduce.report import Results, deviation, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STROKES = {"exact": "-", "paper": "--", "best": ":", "authors": (0, (1, 3))}
COLOURS = [*(f"C{i}" for i in range(10)), "black", "gold", "navy", "lime"]
X_LABELS = {"rounds": "round", "bits": "megabytes sent by the silos"}


def draw(experiment: Experiment, results: Results, path: Path) -> None:
    """A row of axes for each panel; of a single panel, one for each metric."""
    numbered, axes_of = range(len(experiment.metrics)), experiment.axes
    places = [(panel.name, metric, axis) for panel in experiment.panels for metric in numbered for axis in axes_of]
    width = len(axes_of) if len(experiment.panels) == 1 and len(axes_of) > 1 else len(numbered) * len(axes_of)
    rows = len(places) // width
    figure = new_figure(4.3 * width, 3.3 * rows)
    for place, (panel, metric, axis) in enumerate(places, 1):
        axes = figure.add_subplot(rows, width, place)
        axes.set_title(panel + last_level(experiment, axis), fontsize="medium")
        draw_lines(axes, experiment, results, panel, metric, axis)
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
        colour = COLOURS[number % len(COLOURS)]
        for column in line.columns:
            result = results.get((panel, line.name, column))
            if result is not None:
                reference = line.set.get("privacy.epsilon") == "none"
                stroke: dict[str, Any] = {"color": colour, "linestyle": "-." if reference else STROKES[column]}
                stroke["label"] = line.name if reference else f"{line.name}, {WORDS[column]}"
                x, y, spread = curve(result, metric, axis, experiment.level_values)
                axes.plot(x, y, **stroke, **({"marker": "o", "markersize": 3} if axis == "levels" else {}))
                low = y * y / (y + spread) if shown.log else y - spread  # as far below as above, as the axis shows it
                axes.fill_between(x, low, y + spread, alpha=0.15, color=stroke["color"], linewidth=0)
        if axis == "levels":
            draw_published(axes, experiment, panel, line, metric, colour)
    if shown.log:
        axes.set_yscale("log")
    if axis in ("levels", "bits"):
        axes.set_xscale("log")
    if axis == "levels" and experiment.levels is not None:
        axes.set_xticks(experiment.levels.values, [f"{value:g}" for value in experiment.levels.values])
        axes.xaxis.minorticks_off()
    label = experiment.levels.label if axis == "levels" and experiment.levels else X_LABELS.get(axis, axis)
    finish(axes, label, shown.label, legend=False)


def curve(result: dict[str, Any], metric: int, axis: str, levels: list[float | None]) -> tuple[np.ndarray, ...]:
    """x, mean and deviation over seeds."""
    if axis == "levels":
        found = {each["level"]: each["metrics"][metric]["values"] for each in result["levels"]}
        whole = [(level, found.get(level, found.get(None))) for level in levels]
        known = [(level, numbers(values)) for level, values in whole if values is not None]
        columns = ([level for level, _ in known], [v.mean() for _, v in known], [deviation(v) for _, v in known])
        return tuple(np.array(column, float) for column in columns)
    last = result["levels"][-1]
    x = np.array(last["rounds"] if axis == "rounds" else [b / 8e6 for b in last["bits_up"]], float)
    return x, numbers(last["metrics"][metric]["mean"]), numbers(last["metrics"][metric]["deviation"])


def draw_published(axes: Axes, experiment: Experiment, panel: str, line: Line, metric: int, color: str) -> None:
    """What the paper prints, as crosses."""
    points = [
        (p.level, p.value)
        for p in experiment.published
        if (p.panel, p.line, p.metric) == (panel, line.name, metric) and p.level is not None
    ]
    if points:
        axes.scatter(*zip(*points, strict=True), marker="x", color=color)
