"""An experiment's lines in the workers of a cluster: each takes all columns of one line, and gives back their files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from silodp.cache import keep_own_programs
from silodp.cluster import Place, spread
from silodp.reproduce.experiment import Experiment, Quick, Unit
from silodp.reproduce.units import run_unit, write_text
from silodp.run.parts import data_of
from silodp.run.progress import silent

JOB = "silodp.reproduce.lines:run_line"


def run_lines(units: Sequence[Unit], folder: Path, place: Place, announce: Callable[[str], None]) -> None:
    """All units, those of one line in one job: columns share settings and programs. What is done is kept at once."""
    left = [unit for unit in units if not unit.file(folder).is_file()]
    lines: dict[tuple[str, str], list[Unit]] = {}
    for unit in left:
        lines.setdefault((unit.panel.name, unit.line.name), []).append(unit)
    names = list(lines)
    announce(f"{len(units) - len(left)} of {len(units)} runs are there already; {len(names)} lines go to the cluster")
    jobs = [job_of(lines[name], folder) for name in names]
    for done, (number, text) in enumerate(spread(JOB, jobs, place), 1):
        for name, content in json.loads(text).items():
            write_text(folder / name, content)
        announce(f"[{done}/{len(names)}] {', '.join(names[number])}: done")


def job_of(units: Sequence[Unit], folder: Path) -> str:
    """A line's columns, as a description of nothing else, with what is known of it already."""
    known = [unit.searched.file(folder) for unit in units]
    known += [file.with_suffix(".search.json") for file in [*known, *(unit.file(folder) for unit in units)]]
    return json.dumps({
        "experiment": alone(units[0]).model_dump(mode="json"),
        "columns": [unit.column for unit in units],
        "files": {file.name: file.read_text(encoding="utf-8") for file in known if file.is_file()},
    })  # fmt: skip


def alone(unit: Unit) -> Experiment:
    """The experiment with this line in this panel, and nothing that speaks of others. Its fingerprint is the same."""
    by_panel = {name: own for name, own in unit.line.by_panel.items() if name == unit.panel.name}
    line = unit.line.model_copy(update={"panels": None, "by_panel": by_panel})
    nothing = {"published": [], "claims": [], "notes": [], "only": None, "quick": Quick()}
    return unit.experiment.model_copy(update=nothing | {"panels": [unit.panel], "lines": [line]})


def run_line(text: str) -> str:
    """In a worker: the units of one line, and the files that they leave."""
    asked = json.loads(text)
    units = [u for u in Experiment.model_validate(asked["experiment"]).units() if u.column in asked["columns"]]
    config = units[0].config(0)
    keep_own_programs(config)
    data = data_of(config.data.model_dump_json(exclude_unset=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in asked["files"].items():
            write_text(folder / file, content)
        for unit in units:
            run_unit(unit, data, folder, silent)
        return json.dumps(contents(folder, folder.rglob("*")))


def contents(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files if file.is_file()}
