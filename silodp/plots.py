"""Figures of runs, as PNG, PDF or SVG. Drawn with matplotlib's own canvas, so that no screen is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.report.found import LABELS, LOGARITHMIC

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
MOST_TICKS = 8  # that a logarithmic axis names one by one
DATES = {"pdf": "CreationDate", "svg": "Date"}


def history_figure(
    path: Path,
    histories: Mapping[str, Sequence[Mapping[str, float]]],
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> None:
    """Every measured column against rounds, one line per run; `baselines`: level lines by column."""
    first = next(iter(histories.values()))
    columns = [name for name in LABELS if first and name in first[0]]
    figure = new_figure(4.2 * len(columns), 3.4, layout=None)  # placing by what is drawn draws everything three times
    figure.subplots_adjust(0.16 / len(columns), 0.15, 1 - 0.03 / len(columns), 0.88, wspace=0.3)
    for position, column in enumerate(columns):
        axes = figure.add_subplot(1, len(columns), position + 1)
        for label, rows in histories.items():
            axes.plot([r["round"] for r in rows], [r[column] for r in rows], label=label)
        levels = (baselines or {}).get(column, {})
        draw_levels(axes, levels)
        finish(axes, "round", LABELS[column], legend=len(histories) + len(levels) > 1)
        if column in LOGARITHMIC:
            axes.set_yscale("log")
    figure.suptitle(title)
    save(figure, path)


def run_figure(path: Path, summary: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> None:
    """The history of a run, from what its summary says about it."""
    promise = "not private" if summary["epsilon"] is None else f"epsilon {rounded_up(summary['epsilon'])}"
    title = f"{summary['algorithm']}, trust model {summary['trust']}, {promise}, one draw of the noise"
    history_figure(path, {summary["algorithm"]: history}, summary["baselines"], title)


def curve_figure(
    path: Path,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    title: str,
    errors: Mapping[str, Sequence[float]] | None = None,
    levels: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
) -> None:
    """Lines (x, y) by label; `errors`: a line's bars, up and down; `levels`: what to compare with, such as chance."""
    figure = new_figure(5, 3.6)
    axes = figure.add_subplot()
    for label, (x, y) in lines.items():
        bars = (errors or {}).get(label)
        axes.errorbar(x, y, yerr=bars, marker="o" if markers else None, label=label, capsize=3)
    draw_levels(axes, levels or {})
    if log_x:
        axes.set_xscale("log")
        ticks = sorted({value for x, _ in lines.values() for value in x})
        if len(ticks) <= MOST_TICKS:
            axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
            axes.xaxis.minorticks_off()
    if log_y:
        axes.set_yscale("log")
    axes.set_title(title, fontsize="medium")
    finish(axes, x_label, y_label, legend=len(lines) + len(levels or {}) > 1)
    save(figure, path)


def draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    for number, (label, level) in enumerate(levels.items()):
        axes.axhline(level, color="0.4", linestyle=("--", ":", "-.")[number % 3], label=label)


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """matplotlib is imported here: it takes longer than most of what does not draw."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def finish(axes: Axes, x_label: str, y_label: str, *, legend: bool) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small")


def save(figure: Figure, path: Path) -> None:
    """In the format that the path ends with; the same figure gives the same bytes."""
    ending = check_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_dpi(110)
    if ending == "png":
        save_pixels(figure, path)
    else:
        save_vectors(figure, path, ending)


def check_format(path: Path) -> str:
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise ConfigError(
            f"figure {str(path)!r}: cannot be drawn as {ending!r}; end its name with .{', .'.join(FORMATS)}"
        )
    return ending


def save_pixels(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # Few colours make a file of a fifth of the size: the repository keeps the figures. A thin line's colour counts.
    drawn.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def save_vectors(figure: Figure, path: Path, ending: str) -> None:
    from matplotlib import rc_context

    # Names inside an SVG are random and both formats carry the date, unless told otherwise. Publishers refuse the
    # fonts that matplotlib puts into a PDF by default (type 3).
    with rc_context({"svg.hashsalt": "silodp", "pdf.fonttype": 42}):
        figure.savefig(path, format=ending, metadata={"Creator": "silodp", DATES[ending]: None})
