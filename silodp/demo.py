"""The demo: raw CSV files of four hospitals in, models with an epsilon out, and what that costs in accuracy.

The records are those of the Wisconsin breast cancer study. All that a user would do is here: files, a schema with
public ranges, `SiloClassifier`, predictions on patients that no hospital had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from silodp.cli_fit import read_files
from silodp.data import Schema, load_dataset
from silodp.data.frames import read_frame
from silodp.estimators import SiloClassifier
from silodp.plots import curve_figure
from silodp.report.chart import Chart, Line, drawn
from silodp.report.html import items, page, section, table, tag
from silodp.report.words import SIMULATION, percent_up, suspicion
from silodp.run.directory import free_path, versions

EPSILONS: tuple[float | None, ...] = (1.0, 3.0, 10.0, None)
SEEDS = 5  # draws of the noise
HOSPITALS = {"north": 150, "south": 130, "east": 100, "west": 75}  # records; the rest are new patients
TARGET, CLASSES = "diagnosis", ["benign", "malignant"]
# Lowest and highest value of mean, standard error and worst, as the study's public description gives them, rounded
# outwards. They are public constants here; a hospital would take them from a textbook.
RANGES = {
    "radius": ((6, 30), (0, 3), (7, 40)),
    "texture": ((9, 40), (0, 5), (10, 50)),
    "perimeter": ((40, 190), (0, 22), (50, 260)),
    "area": ((140, 2600), (0, 550), (180, 4300)),
    "smoothness": ((0.05, 0.17), (0, 0.04), (0.07, 0.23)),
    "compactness": ((0, 0.35), (0, 0.14), (0, 1.1)),
    "concavity": ((0, 0.43), (0, 0.4), (0, 1.3)),
    "concave points": ((0, 0.21), (0, 0.06), (0, 0.3)),
    "symmetry": ((0.1, 0.31), (0, 0.08), (0.15, 0.67)),
    "fractal dimension": ((0.04, 0.1), (0, 0.03), (0.05, 0.21)),
}
PLACES = ("mean {}", "{} error", "worst {}")
COVERED = "Each hospital adds its own noise: the guarantee holds even if the server and all other hospitals collude."
NOT_COVERED = (
    "A simulation on one machine with seeded noise, so that it can be repeated: it protects nobody.",
    "Accuracy is measured on 114 patients that no hospital had; no epsilon covers them.",
    "They are few, and there is one split of the records: by that alone an accuracy is known to about 0.04.",
)


def schema_of_study() -> Schema:
    """All columns with their public ranges; nothing in it was computed from records."""
    columns = {
        place.format(measure): {"kind": "number", "range": [float(low), float(high)]}
        for i, place in enumerate(PLACES)
        for measure, ranges in RANGES.items()
        for low, high in [ranges[i]]
    }
    return Schema.read({"target": {"name": TARGET, "classes": CLASSES}, "columns": columns})


def write_hospitals(base: Path) -> list[Path]:
    """A CSV file for each hospital and one of new patients, all raw, and the schema."""
    study, _ = load_dataset("wbcd")
    frame = pd.DataFrame(study.features.astype(float), columns=list(study.names)).assign(**{TARGET: study.targets})
    frame = frame.sample(frac=1, random_state=0)
    (base / "hospitals").mkdir(parents=True)
    (base / "schema.toml").write_text(schema_of_study().to_toml(), encoding="utf-8")
    first = 0
    for name, count in HOSPITALS.items():
        frame.iloc[first : first + count].to_csv(base / "hospitals" / f"{name}.csv", index=False, float_format="%.6g")
        first += count
    frame.iloc[first:].to_csv(base / "new_patients.csv", index=False, float_format="%.6g")
    return [base / "hospitals" / f"{name}.csv" for name in HOSPITALS]


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the new patients at one epsilon, for each draw of the noise."""

    epsilon: float | None
    accuracies: tuple[float, ...]

    @property
    def name(self) -> str:
        return "no privacy" if self.epsilon is None else f"epsilon {self.epsilon:g}"

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0

    @property
    def shown(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.deviation:.3f}" if len(self.accuracies) > 1 else "")

    @property
    def odds(self) -> str:
        return "no promise" if self.epsilon is None else f"at most {percent_up(suspicion(self.epsilon))}"


def outcomes_of(base: Path, files: Sequence[Path], seeds: int) -> Iterator[Outcome]:
    """Fits from the raw files; the first model of every epsilon is saved."""
    schema = Schema.read(base / "schema.toml")
    rows, hospitals = read_files(schema, files)
    patients = read_frame(base / "new_patients.csv")
    for epsilon in EPSILONS:
        found = []
        for seed in range(1 if epsilon is None else seeds):
            model = SiloClassifier(epsilon=epsilon, random_state=seed).fit(rows, silo=hospitals, schema=schema)
            found.append(model.score(patients))
            if seed == 0:
                model.save(base / ("no-privacy" if epsilon is None else f"epsilon-{epsilon:g}"))
        yield Outcome(epsilon, tuple(found))


def majority(base: Path, files: Sequence[Path]) -> float:
    """Accuracy of who always answers with the commonest diagnosis of the hospitals."""
    known = pd.concat([read_frame(file)[TARGET] for file in files])
    return float(np.mean(np.asarray(read_frame(base / "new_patients.csv")[TARGET]) == known.mode()[0]))


def run_demo(out: Path, console: Console, seeds: int = SEEDS) -> list[Outcome]:
    """Write the files, fit, print a table, draw a figure, write a page."""
    base = free_path(out)
    files = write_hospitals(base)
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    say(f"raw files of {len(files)} hospitals in {base / 'hospitals'}, described by {base / 'schema.toml'}")
    outcomes = []
    for outcome in outcomes_of(base, files, seeds):
        say(f"{outcome.name}: accuracy {outcome.shown}")
        outcomes.append(outcome)
    chance = majority(base, files)
    draw(base / "accuracy-epsilon.png", outcomes, chance)
    (base / "report.html").write_text(as_page(outcomes, chance), encoding="utf-8")
    told = {"majority class": chance} | {each.name: each.accuracies for each in outcomes}
    (base / "results.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    console.print(as_table(outcomes, chance))
    for line in (COVERED, *NOT_COVERED, f"models with their certificates, figure and report in {base}"):
        say(line)
    return outcomes


HEADS = ("epsilon of every record", "a 1 % suspicion becomes", "accuracy on new patients")


def rows_of(outcomes: Sequence[Outcome], chance: float) -> list[tuple[str, str, str]]:
    told = [("no privacy" if o.epsilon is None else f"{o.epsilon:g}", o.odds, o.shown) for o in outcomes]
    return [*told, ("majority class", "nothing is released", f"{chance:.3f}")]


def as_table(outcomes: Sequence[Outcome], chance: float) -> Table:
    seeds = max(len(o.accuracies) for o in outcomes)
    shown = Table(*HEADS, title=f"{len(HOSPITALS)} hospitals, untrusted server; ± over {seeds} draws of the noise")
    for row in rows_of(outcomes, chance):
        shown.add_row(*row)
    return shown


def private(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.epsilon is not None]


def compared_with(outcomes: Sequence[Outcome], chance: float) -> dict[str, float]:
    free = [each.mean for each in outcomes if each.epsilon is None]
    return {**({"no privacy": free[0]} if free else {}), "majority class (chance)": chance}


def draw(path: Path, outcomes: Sequence[Outcome], chance: float) -> None:
    noised = private(outcomes)
    label = "SiloClassifier, mean and deviation over draws of the noise"
    line: dict[str, Any] = {label: ([o.epsilon for o in noised], [o.mean for o in noised])}
    curve_figure(
        path, line, "epsilon of every record (logarithmic)", "accuracy on new patients (share)",
        title="Four hospitals, untrusted server (breast cancer)", errors={label: [o.deviation for o in noised]},
        levels=compared_with(outcomes, chance), log_x=True, markers=True,
    )  # fmt: skip


def as_page(outcomes: Sequence[Outcome], chance: float) -> str:
    noised = private(outcomes)
    line = Line(
        "mean and deviation over draws of the noise", [o.epsilon or 0.0 for o in noised], [o.mean for o in noised],
        [o.deviation for o in noised],
    )  # fmt: skip
    title = "Accuracy on new patients against epsilon"
    chart = Chart(title, "epsilon", "accuracy (share)", [line], [*compared_with(outcomes, chance).items()], log_x=True)
    words = "; ".join(f"{each.name}: {each.shown}" for each in outcomes) + f"; majority class: {chance:.3f}."
    return page(
        "Demo: four hospitals that do not trust the server",
        tag("p", SIMULATION, class_="stamp"),
        section(
            "What privacy costs", table("Accuracy", HEADS, rows_of(outcomes, chance)),
            tag("figure", drawn(chart, words), tag("figcaption", words)),
        ),
        section("What is covered", tag("p", COVERED), tag("p", "Each model's own report is in its folder.")),
        section("What is NOT covered", items(NOT_COVERED)),
        section("How it was made", table("Software", ("package", "version"), list(versions().items()))),
    )  # fmt: skip
