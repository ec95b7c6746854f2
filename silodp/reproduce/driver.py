"""Runs a whole experiment unit by unit, and writes its table, figure and compact results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from silodp.cluster import Place
from silodp.data import FederatedData, read_data
from silodp.errors import ConfigError
from silodp.plots import check_format
from silodp.reproduce.checks import check
from silodp.reproduce.experiment import WORDS, Column, Experiment, Unit
from silodp.reproduce.figures import draw
from silodp.reproduce.lines import run_lines
from silodp.reproduce.page import report_page
from silodp.reproduce.report import Results
from silodp.reproduce.summary import pages
from silodp.reproduce.text import as_markdown
from silodp.reproduce.units import certificate_name, read_json, run_unit, write_json, write_text
from silodp.run.progress import Progress, silent

Announce = Callable[[str], None]
POINTS = 40  # of a curve in the compact results
ROOT = Path("runs/reproduction")
QUICK_ROOT = Path("runs/reproduction-quick")
FULL_ROOT = Path("runs/reproduction-full")
COLUMNS: dict[str, tuple[Column, ...]] = {"exact": ("exact", "best"), "paper": ("paper",)}


def reproduce(
    experiment: Experiment,
    out: Path,
    *,
    units: Path | None = None,
    calibration: str | None = None,
    formats: Sequence[str] = ("png",),
    progress: Progress = silent,
    announce: Announce = lambda text: None,
    place: Place | None = None,
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Every unit of the experiment, those already done read from `units`; the report is written to `out` at the end.

    formats: of the figure, among png, pdf and svg. place: a cluster that runs them line by line.
    """
    wanted = wanted_units(experiment, calibration)
    folder, figures = units or out / "units", [out / f"figure.{ending}" for ending in formats]
    for figure in figures:
        check_format(figure)
    check(experiment)
    if place is None:
        run_here(wanted, folder, out / "programs", progress, announce)
    else:
        run_lines(wanted, folder, place, announce)
    results = finished(experiment, folder)  # with what earlier calls have done of the other columns
    save_report(experiment, results, out, figures)
    save_certificates(experiment, folder, out / "certificates")
    return results


def run_here(units: Sequence[Unit], folder: Path, programs: Path, progress: Progress, announce: Announce) -> None:
    data = DataCache()
    with programs_kept(programs):
        for number, unit in enumerate(units, 1):
            where = f"{unit.experiment.name}: {unit.panel.name}, {unit.line.name}, {WORDS[unit.column]}"
            announce(f"[{number}/{len(units)}] {where}")
            run_unit(unit, data.of(unit), folder, progress)


def wanted_units(experiment: Experiment, calibration: str | None) -> list[Unit]:
    if calibration is not None and calibration not in COLUMNS:
        raise ConfigError(f"--calibration {calibration!r}: must be exact or paper")
    wanted = [u for u in experiment.units() if calibration is None or u.column in COLUMNS[calibration]]
    if not wanted:
        raise ConfigError(f"--calibration {calibration}: {experiment.name} has no such runs")
    return wanted


def finished(experiment: Experiment, folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The results that are there, each with the fingerprint of its description."""
    return {
        (unit.panel.name, unit.line.name, unit.column): read_json(file) | {"fingerprint": unit.fingerprint}
        for unit in experiment.units()
        if (file := unit.file(folder)).is_file()
    }


def save_certificates(experiment: Experiment, folder: Path, out: Path) -> None:
    """Beside the report, under names without fingerprints."""
    for unit in experiment.units():
        for level in range(len(unit.levels)):
            for kind in ("txt", "json"):
                file = folder / "certificates" / f"{certificate_name(unit, level)}.{kind}"
                if file.is_file():
                    name = file.name.replace(f"-{unit.fingerprint}", "")
                    write_text(out / name, file.read_text(encoding="utf-8"))


@contextmanager
def programs_kept(folder: Path) -> Iterator[None]:
    """Columns of one line run the same programs with other noise: they are compiled once, and let go at the end."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:  # the user keeps all programs anyway
        yield
        return
    keep_programs_in(folder)
    try:
        yield
    finally:
        keep_programs_in(None)
        shutil.rmtree(folder, ignore_errors=True)


def keep_programs_in(folder: Path | None) -> None:
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    compilation_cache.reset_cache()  # JAX looks only once where its cache is


class DataCache:
    """The last panel's data: units come panel by panel."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.data: FederatedData | None = None

    def of(self, unit: Unit) -> FederatedData:
        config = unit.config(0)
        key = config.data.model_dump_json()
        if self.data is None or key != self.key:
            self.data, self.key = read_data(config.data), key
        return self.data


def save_report(experiment: Experiment, results: Results, out: Path, figures: Sequence[Path]) -> None:
    for figure in figures:
        draw(experiment, results, figure)
    markdown = as_markdown(experiment, results)
    write_text(out / "table.md", markdown)
    drawn = next((figure for figure in figures if figure.suffix == ".png"), None)
    write_text(out / "report.html", report_page(experiment, markdown, drawn))
    write_json(out / "results.json", compact(results))


def compact(results: Results) -> list[dict[str, Any]]:
    """All that the table and the figure need, curves thinned."""
    return [
        {name: value for name, value in result.items() if name != "levels"}
        | {"levels": [thinned(level) for level in result["levels"]]}
        for result in results.values()
    ]


def thinned(level: dict[str, Any]) -> dict[str, Any]:
    count = len(level["rounds"])
    step = max(1, -(-count // POINTS))
    kept = sorted({*range(0, count, step), count - 1})
    pick = lambda values: [values[i] for i in kept]
    metrics = [m | {"mean": pick(m["mean"]), "deviation": pick(m["deviation"])} for m in level["metrics"]]
    return level | {"rounds": pick(level["rounds"]), "bits_up": pick(level["bits_up"]), "metrics": metrics}


def load_results(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    results = json.loads(file.read_text(encoding="utf-8"))
    return {(r["panel"], r["line"], r["column"]): r for r in results}


def write_docs(experiments: Sequence[Experiment], root: Path, docs: Path) -> list[str]:
    """docs/reproduction.md, a page for each paper, figures and results; returns the experiments that lack some.

    Each run's result is taken from the run directories under `root`, or from what an earlier call left in the docs;
    results of another description than today's do not count.
    """
    folder, sections, missing = docs / "reproduction", [], []
    for experiment in experiments:
        results = known_results(experiment, root, folder)
        left = len(fingerprints(experiment)) - len(results)
        if results:
            sections.append((experiment, results))
        if left:
            missing.append(f"{experiment.name} ({left} runs)" if results else experiment.name)
    if not sections:
        raise ConfigError(f"--docs: no results in {root}; run silodp reproduce NAME first")
    for experiment, results in sections:
        write_json(folder / f"{experiment.name}.json", compact(results))
        draw(experiment, results, folder / f"{experiment.name}.png")
    for path, text in pages(sections, missing).items():
        write_text(docs / path, text)
    return missing


def known_results(experiment: Experiment, root: Path, folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What is known of each run as it is described now, in the order of the description."""
    files = (folder / f"{experiment.name}.json", root / experiment.name / "results.json")
    found = [load_results(file) for file in files if file.is_file()] + [finished(experiment, root / "units")]
    known: dict[tuple[str, str, str], dict[str, Any]] = {}
    for key, fingerprint in fingerprints(experiment).items():
        current = [results[key] for results in found if results.get(key, {}).get("fingerprint") == fingerprint]
        if current:
            known[key] = current[-1]
    return known


def fingerprints(experiment: Experiment) -> dict[tuple[str, str, str], str]:
    return {(unit.panel.name, unit.line.name, unit.column): unit.fingerprint for unit in experiment.units()}
