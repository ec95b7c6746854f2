"""Figures of runs, as PNG, PDF or SVG. Drawn with matplotlib's own canvas, so that no screen is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from silodp.errors import ConfigError
from silodp.report.found import LABELS, LOGARITHMIC

FORMATS = ("png", "pdf", "svg")
DATES = {"pdf": "CreationDate", "svg": "Date"}


def history_figure(path: Path, histories: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Every measured column against rounds, one line per run."""
    first = next(iter(histories.values()))
    columns = [name for name in LABELS if first and name in first[0]]
    figure = Figure(figsize=(4.2 * len(columns), 3.4), layout="constrained")
    for position, column in enumerate(columns):
        axes = figure.add_subplot(1, len(columns), position + 1)
        for label, rows in histories.items():
            axes.plot([r["round"] for r in rows], [r[column] for r in rows], label=label)
        finish(axes, "round", LABELS[column], legend=len(histories) > 1)
        if column in LOGARITHMIC:
            axes.set_yscale("log")
    save(figure, path)


def curve_figure(
    path: Path,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
) -> None:
    """Lines (x, y) by label."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, (x, y) in lines.items():
        axes.plot(x, y, marker="o" if markers else None, label=label)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    finish(axes, x_label, y_label, legend=len(lines) > 1)
    save(figure, path)


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
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # Few colours make a file of a fifth of the size: the repository keeps the figures. A thin line's colour counts.
    drawn.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def save_vectors(figure: Figure, path: Path, ending: str) -> None:
    # Names inside an SVG are random and both formats carry the date, unless told otherwise. Publishers refuse the
    # fonts that matplotlib puts into a PDF by default (type 3).
    with rc_context({"svg.hashsalt": "silodp", "pdf.fonttype": 42}):
        figure.savefig(path, format=ending, metadata={"Creator": "silodp", DATES[ending]: None})
