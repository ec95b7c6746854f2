"""What was released about held-out records, as a table and a figure with error bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from silodp.report.chart import Chart, Line, drawn
from silodp.report.found import NORMAL
from silodp.report.html import Html, section, table, tag

NAMES = {
    "accuracy": "accuracy (share)",
    "log_loss": "log loss (nats)",
    "auc": "area under the ROC curve",
    "majority": "accuracy of the majority class (share)",
    "mse": "mean squared error (of the scaled target)",
    "r2": "R² (the mean predictor has 0)",
}
DRAWN = ("accuracy", "r2")  # one figure, of the first that is there
WIDEST = 0.5  # of half a 95 % interval: beyond it nothing is known of a share, nor of a loss or an R^2 worth having
TOO_FEW = "too few records to tell"


OPEN = "No noise was added, and no epsilon covers these numbers."
SEEDED = (
    "Each number has noise of its own. In a real run the epsilon would cover it. The noise of this simulation comes "
    "from a seed: show the numbers only to who may see the records."
)
COVERED = "Each number has noise of its own, and the epsilon covers it: this section may be shown to anybody."


def held_out_section(told: Mapping[str, Any], certificate: Mapping[str, Any] | None) -> Html:
    covered = OPEN if certificate is None else SEEDED if certificate["stamp"] else COVERED
    metrics = [name for name in NAMES if name in told]
    heads = ("silo", "records held out", *(NAMES[name] for name in metrics))
    rows = [row("all", told, metrics), *(row(silo["silo"], silo, metrics) for silo in told["silos"])]
    return section(
        "How good the model is",
        tag("p", f"Measured on {told['records']} records that were not trained on. {covered}"),
        table("Held-out records; ± is half of a 95 % interval", heads, rows, range(1, len(heads))),
        *figure(told, metrics),
    )


def row(name: str, told: Mapping[str, Any], metrics: Sequence[str]) -> tuple[str, ...]:
    cell = lambda metric: shown(told[metric]) if tells(told, metric) else TOO_FEW
    return (name, f"{told['records']:,}", *(cell(metric) if metric in told else "-" for metric in metrics))


def tells(told: Mapping[str, Any], metric: str) -> bool:
    """Whether a metric of a silo, or of all, is known well enough to be shown.

    The first one, accuracy or squared error, decides for all: bins of noise have an area under the curve of 0.5 or so,
    and it does not look uncertain.
    """
    first = next(name for name in NAMES if name in told)
    return all(NORMAL * told[name]["error"] <= WIDEST for name in (first, metric))


def shown(measured: Mapping[str, float]) -> str:
    return f"{measured['value']:.3f} ± {NORMAL * measured['error']:.2g}"


def figure(told: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[Html]:
    metric = next((name for name in DRAWN if name in metrics), None)
    silos = [silo for silo in told["silos"] if metric and metric in silo and tells(silo, metric)]
    if metric is None or len(silos) < 2:
        return
    values, errors = ([silo[metric][part] for silo in silos] for part in ("value", "error"))
    line = Line("a silo, with its 95 % interval", range(1, len(silos) + 1), values, [NORMAL * e for e in errors])
    levels = [("all silos", told[metric]["value"])]
    if metric == "accuracy" and "majority" in told:
        levels.append(("majority class", told["majority"]["value"]))
    if metric == "r2":
        levels.append(("mean predictor", 0.0))
    names = tuple(silo["silo"] for silo in silos)
    chart = Chart("Held-out records of each silo", "silo", NAMES[metric], [line], levels, names=names, joined=False)
    words = "; ".join(f"{silo['silo']} {shown(silo[metric])}" for silo in silos)
    yield tag("figure", drawn(chart, words), tag("figcaption", words + "."))
