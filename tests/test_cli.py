"""The commands as a user types them, on three small CSV files; the files of a run; stop and resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from silodp import data, demo
from silodp.algorithms import REGISTRY
from silodp.cli import app
from silodp.cli_fit import read_files
from silodp.data import DATASETS
from silodp.parse import load_config
from silodp.run import progress, simulate
from silodp.run import runner as runs
from silodp.run.directory import load_model
from tests.conftest import write_silos
from tests.pages import problems

TREE: dict[str, Any] = {
    "model": {"kind": "logistic"},
    "privacy": {"epsilon": 4.0, "delta": 1e-4},
    "algorithm": {
        "name": "spider",
        "rounds": 6,
        "step_size": 0.3,
        "clip": 1.0,
        "clip_difference": 0.7,
        "restart": 3,
    },
    "run": {"every": 1, "seed": 3},
}


def silodp(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_silos(folder, TREE)
    return folder


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run from the command line that nobody stopped."""
    result = silodp("run", folder / "config.toml", "--out", folder / "whole")
    assert result.exit_code == 0, result.output
    assert "structured" in result.output
    assert "(4, 0.0001)-DP" in result.output
    return folder / "whole"


def test_the_files_of_a_run(whole):
    assert sorted(p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()) == [
        "certificate.json",
        "certificate.txt",
        "config.toml",
        "history.jsonl",
        "lock",
        "model.safetensors",
        "report.html",
        "summary.json",
    ]
    rows = [json.loads(line) for line in (whole / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert {"objective", "gradient_norm2", "bits_up", "bits_down", "record_gradients"} <= rows[0].keys()
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["final"] == rows[-1]
    assert summary["stamp"] == "simulation: seeded noise, not private"
    assert summary["versions"]["jax"] == jax.__version__
    certificate = json.loads((whole / "certificate.json").read_text())
    assert max(s["epsilon"] for s in certificate["silos"]) == summary["epsilon"] <= 4.0


def test_the_model_loads_in_its_own_shape(whole):
    config = load_config(whole / "config.toml")
    prepared = runs.prepare(config)
    like = prepared.ground.objective.unravel(prepared.setting.x0)
    params = load_model(whole / "model.safetensors", like)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, like)
    assert not np.array_equal(jax.tree.leaves(params)[0], jax.tree.leaves(like)[0])


def test_a_run_runs_again_from_its_own_config(whole, folder):
    result = silodp("run", whole / "config.toml", "--out", folder / "again")
    assert result.exit_code == 0, result.output
    assert models_equal(whole, folder / "again")


def models_equal(one: Path, other: Path) -> bool:
    left, right = (load_file(d / "model.safetensors") for d in (one, other))
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


@contextmanager
def stopping(total: int, done: int, title: str):
    """Progress that presses Ctrl-C when the first chunk with round 2 or later arrives."""

    def update(round: int, row: Any) -> None:
        if round >= 2:
            raise KeyboardInterrupt

    yield update


def recording(begun: list[int]) -> progress.Progress:
    """Progress that notes the round a run begins with."""

    @contextmanager
    def shown(total: int, done: int, title: str):
        begun.append(done)
        yield lambda round, row: None

    return shown


def test_ctrl_c_leaves_a_run_that_resumes_to_the_same_bits(whole, folder, monkeypatch):
    directory = folder / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(progress, "bars", lambda console: stopping)
        patch.setattr(simulate, "SECONDS_PER_CALL", 0.0)  # one round a chunk
        result = silodp("run", folder / "config.toml", "--out", directory)
    assert result.exit_code == 130
    assert f"silodp resume {directory}" in result.stderr
    assert (directory / "checkpoint.safetensors").is_file()
    assert not (directory / "summary.json").exists()

    shown = silodp("show", directory)
    assert shown.exit_code == 2
    assert f"silodp resume {directory}" in shown.stderr

    # A row written after the checkpoint, as by a crash between the two: it is computed again.
    with (directory / "history.jsonl").open("a") as file:
        file.write(json.dumps({"round": 99.0}) + "\n")
    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(progress, "bars", lambda console: recording(begun))
        resumed = silodp("resume", directory)
    assert resumed.exit_code == 0, resumed.output
    assert begun == [2]  # continued, not run again
    assert models_equal(whole, directory)
    assert (directory / "history.jsonl").read_text() == (whole / "history.jsonl").read_text()
    assert not (directory / "checkpoint.safetensors").exists()


def test_ctrl_c_before_the_run_begins_leaves_nothing(folder, monkeypatch):
    def interrupted(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "read_data", interrupted)
    result = silodp("run", folder / "config.toml", "--out", folder / "never")
    assert (result.exit_code, result.stderr.strip()) == (130, "stopped; nothing is kept")
    assert not (folder / "never").exists()


def test_what_cannot_be_resumed_is_said(whole, tmp_path):
    assert "is complete; nothing to resume" in silodp("resume", whole).stderr
    assert "is not a run: it has no config.toml" in silodp("resume", tmp_path).stderr


def test_a_broken_checkpoint_is_refused(folder, whole):
    directory = folder / "broken"
    directory.mkdir()
    (directory / "config.toml").write_text((whole / "config.toml").read_text())
    (directory / "checkpoint.safetensors").write_bytes(b"not safetensors")
    result = silodp("resume", directory)
    assert result.exit_code == 2
    assert "checkpoint.safetensors: cannot be read" in result.stderr


def test_an_existing_run_is_never_overwritten(whole, folder):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    for command in ("run", "sweep"):
        result = silodp(command, folder / "config.toml", "--out", whole)
        assert result.exit_code == 2
        assert "already holds a run; give another directory" in result.stderr
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before
    assert "is a file" in silodp("run", folder / "config.toml", "--out", folder / "config.toml").stderr


def test_set_changes_the_run_and_the_default_directory_is_new(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "algorithm.name=dp-gd", "--set", "algorithm.rounds=2", "--set", "run.output=here"]
    config = folder / "gd.toml"
    config.write_text(re.sub(r"(clip_difference|restart) = .*\n", "", (folder / "config.toml").read_text()))
    result = silodp("run", config, *changes)
    assert result.exit_code == 0, result.output
    (directory,) = (tmp_path / "here").iterdir()
    assert directory.name.startswith("dp-gd-3-tables")
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["algorithm"], summary["final"]["round"]) == ("dp-gd", 2)


def test_show(whole):
    told = silodp("show", whole).output
    assert "(4, 0.0001)-DP" in told
    assert "Neighbouring inputs" in told
    assert json.loads(silodp("show", whole, "--json").output) == json.loads((whole / "summary.json").read_text())


def test_list_names_everything():
    listed = json.loads(silodp("list", "--json").output)
    assert [row["name"] for row in listed["algorithms"]] == ["auto", *REGISTRY]
    assert listed["datasets"] == sorted(DATASETS)
    assert "dirichlet" in listed["partitions"]
    assert "spider" in silodp("list").output


def test_sweep_writes_a_table_and_names_the_best(folder):
    grid = 'sweep.grid={"algorithm.step_size" = [0.01, 0.3], "run.seed" = [0, 1]}'
    result = silodp("sweep", folder / "config.toml", "--set", grid, "--out", folder / "swept")
    assert result.exit_code == 0, result.output
    assert "not private: selected on private data" in result.output
    table = json.loads((folder / "swept" / "sweep.json").read_text())
    assert len(table["settings"]) == 4
    assert table["best"]["algorithm.step_size"] == 0.3
    assert "is complete" in silodp("resume", folder / "swept").stderr
    assert json.loads(silodp("show", folder / "swept").output) == table


# --- the demo, without its fits ----------------------------------------------------------------------


def test_the_demos_files_are_raw_and_fit_its_schema(tmp_path):
    files = demo.write_hospitals(tmp_path)
    assert [file.stem for file in files] == list(demo.HOSPITALS)
    rows, hospitals = read_files(demo.schema_of_study(), [*files, tmp_path / "new_patients.csv"])
    assert len(rows) == 569 and not demo.schema_of_study().problems(rows)
    assert dict(zip(*np.unique(hospitals, return_counts=True), strict=True)) == demo.HOSPITALS | {"new_patients": 114}
    numbers = rows.drop(columns=demo.TARGET).astype(float)
    assert numbers.max().max() > 1000  # raw: nothing is scaled
    ranges = pd.DataFrame({name: column.range for name, column in demo.schema_of_study().used.items()})
    assert (numbers.min() >= ranges.loc[0]).all() and (numbers.max() <= ranges.loc[1]).all()
    assert 0.6 < demo.majority(tmp_path, files) < 0.65


def test_the_demos_table_figure_and_page(tmp_path):
    outcomes = [demo.Outcome(e, (0.9,) if e is None else (0.85, 0.95)) for e in demo.EPSILONS]
    demo.draw(tmp_path / "figure.png", outcomes, 0.6)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=100, record=True)
    console.print(demo.as_table(outcomes, 0.6))
    told = console.export_text()
    assert all(
        word in told for word in ("4 hospitals", "no privacy", "0.900 ± 0.071", "at most 2.7 %", "majority class")
    )
    page = demo.as_page(outcomes, 0.6)
    assert problems(page) == [] and "protects nobody" in page


# --- examples -----------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hospitals(tmp_path, monkeypatch) -> Path:
    """The examples' data in an empty directory, which is then the current one."""
    subprocess.run([sys.executable, ROOT / "examples" / "make_hospitals.py", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_example_is_accepted(hospitals):
    configs = set((ROOT / "examples").glob("*.toml")) - {ROOT / "examples" / "schema.toml"}
    for file in sorted(configs):
        prepared = runs.prepare(load_config(file))
        assert len(prepared.data.silos) == 10
        assert all(note.public for note in prepared.data.notes)
