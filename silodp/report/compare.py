"""Runs and saved models side by side: a table for the terminal, and the same as a page with their histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.digits import rounded_up
from silodp.report.chart import Chart, Line, drawn
from silodp.report.files import story_of
from silodp.report.found import LABELS, LOGARITHMIC
from silodp.report.html import Html, items, page, section, table, tag
from silodp.report.story import ON_RECORDS, Story
from silodp.report.words import percent_up, suspicion, worst

Rows = list[tuple[str, ...]]  # a heading, then a cell for each directory


def read_all(directories: Sequence[Path], read: Callable[[Path], Story] = story_of) -> dict[str, Story]:
    """By a short name, which is the whole path where several have the same."""
    names = [path.resolve().name for path in directories]
    short = len(set(names)) == len(names)
    return {name if short else str(path): read(path) for name, path in zip(names, directories, strict=True)}


def compared(stories: Mapping[str, Story]) -> Rows:
    """What differs and what one would ask for; a row that says nothing of any of them is left out."""
    columns = [dict(each_row(story)) for story in stories.values()]
    heads = list(dict.fromkeys(head for column in columns for head in column))
    return [(head, *(column.get(head, "-") for column in columns)) for head in heads]


def each_row(story: Story) -> Iterator[tuple[str, str]]:
    made: dict[str, Any] = dict(story.made)
    for name in ("algorithm", "estimator", "model", "trust model", "records", "rounds"):
        if made.get(name):
            yield name, str(made[name])
    certificate = story.certificate
    if certificate is None:
        yield "epsilon", "not private"
    else:
        silo = worst(certificate)
        yield "epsilon", rounded_up(silo["epsilon"])
        yield "delta", rounded_up(silo["delta"])
        yield "a 1 % suspicion becomes", f"at most {percent_up(suspicion(silo['epsilon']))}"
        yield "really private", "no: a simulation" if certificate["stamp"] else "yes"
    for each in story.found:
        yield each.name, each.shown + ("" if each.error is None else f" {each.error_shown}")
    for name in ("sent to the server", "date (UTC)", "run"):
        if made.get(name):
            yield name, str(made[name])


def comparison_page(stories: Mapping[str, Story]) -> str:
    heads = ("", *stories)
    return page(
        "Runs side by side",
        tag("p", ON_RECORDS, class_="soft"),
        section("Numbers", table("What was run and what came out", heads, compared(stories))),
        *charts(stories),
        *left_out(stories),
    )


def charts(stories: Mapping[str, Story]) -> Iterator[Html]:
    for column, label in LABELS.items():
        kept = {name: story for name, story in stories.items() if story.history and column in story.history[0]}
        if not kept:
            continue
        lines = [
            Line(name, [row["round"] for row in story.history], [row[column] for row in story.history])
            for name, story in kept.items()
        ]
        levels = dict(pair for story in kept.values() for pair in story.baselines.get(column, {}).items())
        words = "; ".join(f"{line.label} ends at {line.y[-1]:.4g}" for line in lines)
        chart = Chart(label.capitalize(), "round", label, lines, list(levels.items()), log_y=column in LOGARITHMIC)
        yield section(label.capitalize(), tag("figure", drawn(chart, words), tag("figcaption", words + ".")))


def left_out(stories: Mapping[str, Story]) -> Iterator[Html]:
    lines = [
        line for story in stories.values() if story.certificate is not None
        for line in story.certificate["outside_the_guarantee"]
    ]  # fmt: skip
    if lines:
        yield section("What is NOT covered", items(dict.fromkeys(lines)))
