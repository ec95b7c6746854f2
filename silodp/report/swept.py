"""The report of a sweep: what was tried, what came out of each setting, and that the choice is not private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from silodp.digits import rounded_up, several
from silodp.report.chart import Chart, Line, drawn
from silodp.report.found import LABELS, LOGARITHMIC, Measured
from silodp.report.html import Html, facts, page, section, table, tag
from silodp.report.story import ON_RECORDS

SEED = "run.seed"
NOT_PRIVATE = (
    "This was a simulation, and the best of its settings was found by looking at the records. The epsilon of a setting "
    "is that of its run alone, for silos that run it themselves and look at nothing else. The whole table, and the "
    "choice, are covered by none. sweep.private_trials makes a choice that is."
)


def swept_page(swept: Mapping[str, Any]) -> str:
    """Of what sweep.json holds."""
    settings, column = swept["settings"], swept["selected_by"]
    best = ", ".join(f"{key} = {value}" for key, value in swept["best"].items())
    columns = [name for name in settings[0]["final"] if name in LABELS or name == column]
    heads = ("setting", *swept["best"], "epsilon", *(label_of(name) for name in columns))
    rows = [row(number, setting, columns) for number, setting in enumerate(settings, start=1)]
    return page(
        f"Sweep report: {several(len(settings), 'setting')}",
        tag("p", NOT_PRIVATE, class_="stamp"),
        section(
            "What was found",
            tag("p", f"Best by {label_of(column)}: {best}.", class_="lead"),
            tag("p", ON_RECORDS, class_="soft"),
            figure(settings, column, swept.get("baselines", {}).get(column, {})),
            table("Settings, and the last row of each one's history", heads, rows, range(1, len(heads))),
        ),
        section("How it was made", facts("Software", list(swept["versions"].items()))),
    )


def label_of(column: str) -> str:
    return LABELS.get(column, column.replace("_", " "))


def row(number: int, setting: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    epsilon = "not private" if setting["epsilon"] is None else rounded_up(setting["epsilon"])
    return [str(number), *map(str, setting["values"].values()), epsilon, *(shown(setting["final"][c]) for c in columns)]


def shown(value: float) -> str:
    return Measured("", value, None, "").shown


def figure(settings: Sequence[Mapping[str, Any]], column: str, baselines: Mapping[str, float]) -> Html:
    """A point for each setting; seeds of the same setting are one point, with an error bar."""
    alike: dict[tuple[Any, ...], dict[int, float]] = {}
    for number, setting in enumerate(settings, start=1):
        same = tuple(pair for pair in setting["values"].items() if pair[0] != SEED)
        alike.setdefault(same, {})[number] = setting["final"][column]
    groups = list(alike.values())
    names = tuple("+".join(map(str, group)) for group in groups)
    means = [float(np.mean(list(group.values()))) for group in groups]
    errors = [float(np.std(list(group.values()), ddof=1)) if len(group) > 1 else 0.0 for group in groups]
    what = "settings by their numbers in the table" + (": mean and deviation over seeds" if any(errors) else "")
    line = Line(what, range(1, len(groups) + 1), means, errors)
    label, levels = label_of(column), list(baselines.items())
    logarithmic = column in LOGARITHMIC
    chart = Chart("The settings", "setting", label, [line], levels, log_y=logarithmic, names=names, joined=False)
    told = [f"{name}: {shown(mean)}" for name, mean in [*zip(names, means, strict=True), *levels]]
    words = "; ".join(told)
    return tag("figure", drawn(chart, words), tag("figcaption", words + "."))
