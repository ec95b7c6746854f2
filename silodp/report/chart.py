"""Line charts as inline SVG: text stays text, lines differ by colour and dash, words for who sees none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from silodp.report.html import Html, tag

WIDTH, HEIGHT = 680, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 34, 56
COLOURS = ("#0b5394", "#a64d00", "#38761d", "#741b47", "#444444", "#0c7c7c")
DASHES = (None, "7 3", "2 3", "9 3 2 3", "4 4", "1 3")
LEGEND = 20  # height of a line
LETTERS = 80  # that fit below the x axis
MARGIN = 0.03  # of the range, on both sides: a level at its end is seen


@dataclass(frozen=True)
class Line:
    """Points with a name; `errors`: half the height of the bar at each point, where it is known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the same axes, and level lines such as baselines; `names`: of the places 1, 2, ... of the x axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    levels: Sequence[tuple[str, float]] = field(default_factory=tuple)
    log_x: bool = False
    log_y: bool = False
    names: Sequence[str] = ()
    joined: bool = True  # the points of a line


def drawn(chart: Chart, words: str) -> Html:
    """The chart; `words` say what it shows."""
    name = f"chart-{crc32((chart.title + words).encode()):08x}"  # the same page has the same bytes
    across = [x for line in chart.lines for x in line.x]
    up = [y + s * e for line in chart.lines for y, e in zip(line.y, errors_of(line), strict=True) for s in (-1, 1)]
    x = scale(across, chart.log_x, LEFT, WIDTH - RIGHT)
    y = scale([*up, *(level for _, level in chart.levels)], chart.log_y, HEIGHT - BOTTOM, TOP)
    parts = [*axis_marks(chart, x, y), *level_marks(chart, y), *line_marks(chart, x, y)]
    height = HEIGHT + LEGEND * (len(chart.lines) + len(chart.levels)) + 10
    return tag(
        "svg", tag("title", chart.title, id=name), tag("desc", words, id=f"{name}-words"), *parts,
        viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img",
        aria_labelledby=f"{name} {name}-words", xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip


def errors_of(line: Line) -> Sequence[float]:
    return line.errors or [0.0] * len(line.y)


@dataclass(frozen=True)
class Scale:
    """Numbers to places on the page, and where to put ticks."""

    place: Callable[[float], float]
    ticks: Sequence[float]


def scale(values: Sequence[float], logarithmic: bool, first: float, last: float) -> Scale:
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)] or [1.0]
    low, high = min(finite), max(finite)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    low, high = low - MARGIN * (high - low), high + MARGIN * (high - low)
    at = lambda v: first + (last - first) * (v - low) / (high - low)
    if logarithmic:
        return Scale(lambda v: at(math.log10(v)) if v > 0 else first, decades(low, high))
    return Scale(at, nice(low, high))


def nice(low: float, high: float) -> list[float]:
    """About five round numbers between the two."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    tens = [10.0**i for i in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    if len(tens) > 6:
        return tens[:: -(-len(tens) // 6)]
    return tens if len(tens) > 1 else [10**low, 10**high]


def axis_marks(chart: Chart, x: Scale, y: Scale) -> Iterator[Html]:
    floor = HEIGHT - BOTTOM
    yield text(chart.title, WIDTH / 2, 18, "middle", font_weight="600")
    for tick, words in named_ticks(chart, x):
        place = x.place(tick)
        yield stroke(place, floor, place, floor + 5, "#55555f")
        yield text(words, place, floor + 20, "middle")
    for tick in y.ticks:
        place = y.place(tick)
        yield stroke(LEFT, place, WIDTH - RIGHT, place, "#e3e3ea")
        yield text(f"{tick:.4g}", LEFT - 8, place + 4, "end")
    yield stroke(LEFT, floor, WIDTH - RIGHT, floor, "#55555f")
    yield text(chart.x_label, (LEFT + WIDTH - RIGHT) / 2, floor + 42, "middle")
    middle = (TOP + floor) / 2
    yield text(chart.y_label, 16, middle, "middle", transform=f"rotate(-90 16 {middle:g})")


def named_ticks(chart: Chart, x: Scale) -> list[tuple[float, str]]:
    """Names where there is room for them, else numbers."""
    if chart.names and len(chart.names) * max(map(len, chart.names)) <= LETTERS:
        return [(float(number), name) for number, name in enumerate(chart.names, start=1)]
    whole = [tick for tick in x.ticks if not chart.names or tick == round(tick)]
    return [(tick, f"{tick:.4g}") for tick in whole]


def level_marks(chart: Chart, y: Scale) -> Iterator[Html]:
    for number, (label, level) in enumerate(chart.levels):
        if math.isfinite(level):
            yield stroke(LEFT, y.place(level), WIDTH - RIGHT, y.place(level), "#77777f", DASHES[1 + number % 5])
        below = HEIGHT + LEGEND * (len(chart.lines) + number) + 10
        yield stroke(LEFT, below - 4, LEFT + 34, below - 4, "#77777f", DASHES[1 + number % 5])
        yield text(label, LEFT + 44, below, "start")


def line_marks(chart: Chart, x: Scale, y: Scale) -> Iterator[Html]:
    for number, line in enumerate(chart.lines):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        points = [
            (x.place(a), y.place(b), y.place(b - e), y.place(b + e))
            for a, b, e in zip(line.x, line.y, errors_of(line), strict=True)
            if math.isfinite(a) and math.isfinite(b) and (b > 0 or not chart.log_y)
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in points)
        if chart.joined:
            yield tag("polyline", points=path, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash)
        for a, b, low, high in points if line.marked or line.errors else ():
            yield tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=3.5, fill=colour)
            if low != high:
                yield stroke(a, low, a, high, colour)
        below = HEIGHT + LEGEND * number + 10
        yield stroke(LEFT, below - 4, LEFT + 34, below - 4, colour, dash, 2)
        yield text(line.label, LEFT + 44, below, "start")


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str | None = None, width: int = 1) -> Html:
    places = {name: f"{value:.1f}" for name, value in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2))}
    return tag("line", **places, stroke=colour, stroke_width=width, stroke_dasharray=dash)


def text(words: str, x: float, y: float, anchor: str, **more: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **more)
