"""Parts of a sweep and lines of an experiment in workers: the same results, kept as they come; texts travel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from silodp import cluster, compiler
from silodp.cluster import Place, called, place_of, spread, versions, workers_at
from silodp.data import read_data
from silodp.errors import ConfigError
from silodp.parse import load_config
from silodp.reproduce.driver import reproduce
from silodp.reproduce.lines import alone, job_of, run_line
from silodp.reproduce.units import read_json
from silodp.run import parts
from silodp.run.directory import RunDirectory
from silodp.run.parts import resume_sweep, sweep_in
from tests.conftest import write_silos
from tests.test_reproduce import small

GRID = {"algorithm.step_size": [0.1, 0.3], "run.seed": [0.0, 1.0]}
TREE = {
    "privacy": {"epsilon": 4.0, "delta": 1e-4},
    "algorithm": {"name": "dp-gd", "rounds": 3, "step_size": 0.3, "clip": 1.0},
    "sweep": {"grid": GRID},
}


@pytest.fixture(scope="module")
def place():
    """A scheduler and two workers that are threads of this process: quick, and spoken to as any other."""
    distributed = pytest.importorskip("distributed")
    # None would listen on every address, at a port that another scheduler may have
    own = {"processes": False, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, **own) as here:
        yield Place(here.scheduler_address)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, str]:
    """A config, and what a sweep of it gives in this process."""
    folder = tmp_path_factory.mktemp("swept")
    config = load_config(write_silos(folder, TREE))
    directory, _ = sweep_in(folder / "here", config, read_data(config.data))
    return folder, (directory.path / "histories.jsonl").read_text()


def shouted(text: str) -> str:
    return text.upper()


def refusing(text: str) -> str:
    raise ConfigError(f"data.source = {text!r}:\nnot here")


def test_texts_go_and_come_back_with_their_numbers(place, monkeypatch):
    monkeypatch.setattr(cluster, "OURS", ("tests.",))
    found = dict(spread("tests.test_cluster:shouted", ["a", "b", "c"], place))
    assert found == {0: "A", 1: "B", 2: "C"} and workers_at(place) == 2


def test_what_a_job_refuses_is_refused_in_its_words(place, monkeypatch):
    monkeypatch.setattr(cluster, "OURS", ("tests.",))
    with pytest.raises(ConfigError, match=r"in a worker: data\.source = 'x': not here"):
        list(spread("tests.test_cluster:refusing", ["x"], place))


def test_a_worker_runs_functions_of_the_project_and_of_its_own_versions_only():
    assert "only functions of silodp" in called("os:system", json.dumps(versions()), "true")
    assert "other versions" in called("silodp.run.parts:run_part", json.dumps(versions() | {"jax": "0.1"}), "{}")


def test_workers_of_this_machine_share_its_cores(monkeypatch):
    """XLA would start a thread for each core in each of them."""
    asked = {}
    distributed = SimpleNamespace(
        LocalCluster=lambda **options: asked.update(options), Security=SimpleNamespace(temporary=lambda: None)
    )
    monkeypatch.delenv(compiler.THREADS, raising=False)
    monkeypatch.setattr(compiler, "cores", lambda: 4)
    for workers, threads in ((1, "4"), (2, "2"), (3, "1"), (8, "1")):
        cluster.started(distributed, workers)
        assert asked["n_workers"] == workers and asked["env"] == {compiler.THREADS: threads}
    monkeypatch.setenv(compiler.THREADS, "3")  # the user's own
    assert compiler.share_of_cores(2) == {compiler.THREADS: "3"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux only")
def test_xla_has_as_many_threads_as_it_is_told():
    count = "import jax, pathlib; jax.devices(); print(sum('XLAEigen' in (task / 'comm').read_text() for task in \
        pathlib.Path('/proc/self/task').iterdir()))"
    own = os.environ | {compiler.THREADS: "1", "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", count], env=own, capture_output=True, text=True).stdout.strip() == "1"


def test_options_that_contradict_each_other_and_a_scheduler_that_is_not_there(monkeypatch):
    assert place_of(None, None) is None and place_of(None, 2) == Place(workers=2)
    with pytest.raises(ConfigError, match="give one of the two"):
        place_of("tcp://127.0.0.1:1", 2)
    with pytest.raises(ConfigError, match="--workers 0: give at least 1"):
        place_of(None, 0)
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)
    with pytest.raises(ConfigError, match="no scheduler with a worker answers there"):
        list(spread("silodp.run.parts:run_part", ["{}"], Place("tcp://127.0.0.1:1")))


def test_a_sweep_on_a_cluster_is_the_sweep_bit_for_bit(place, swept):
    folder, here = swept
    config = load_config(folder / "config.toml")
    directory, tried = sweep_in(folder / "there", config, read_data(config.data), place=place)
    assert (directory.path / "histories.jsonl").read_text() == here
    assert [each.values["run.seed"] for each in tried] == [0, 1, 0, 1]
    assert not (directory.path / "parts").exists() and directory.complete


def test_a_stopped_sweep_goes_on_with_the_parts_that_are_missing(swept, monkeypatch):
    """And stacks them as it began to, whatever the machine has now."""
    folder, here = swept
    config = load_config(folder / "config.toml")
    monkeypatch.setattr(parts, "cores", lambda: 2)

    def stopping(job, texts, place):
        yield 0, parts.run_part(texts[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts, "spread", stopping)
        sweep_in(folder / "stopped", config, read_data(config.data), place=Place(workers=2))
    monkeypatch.setattr(parts, "cores", lambda: 4)
    directory = RunDirectory.open(folder / "stopped")
    assert [file.name for file in (directory.path / "parts").iterdir()] == ["0.json"]
    ran = []
    run_group = parts.run_group
    monkeypatch.setattr(
        parts, "run_group", lambda members, *rest: ran.append(len(members)) or run_group(members, *rest)
    )
    resume_sweep(directory)
    assert ran == [2] and (directory.path / "histories.jsonl").read_text() == here


def test_a_line_that_travels_alone_is_the_same_run():
    for unit in small().units():
        (same,) = [own for own in alone(unit).units() if own.column == unit.column]
        assert same.fingerprint == unit.fingerprint and same.file(Path()) == unit.file(Path())


@pytest.mark.slow
def test_an_experiment_on_a_cluster_has_the_same_results(place, tmp_path):
    here, there = (reproduce(small(), tmp_path / name, place=where) for name, where in (("a", None), ("b", place)))
    timeless = lambda results: [{k: v for k, v in own.items() if k != "cpu_seconds"} for own in results.values()]
    assert timeless(here) == timeless(there)
    assert reproduce(small(), tmp_path / "b", place=Place("tcp://127.0.0.1:1")) == there  # nothing is left to run


@pytest.mark.slow
def test_workers_in_processes_of_their_own(swept):
    pytest.importorskip("distributed")
    folder, here = swept
    config = load_config(folder / "config.toml")
    directory, _ = sweep_in(folder / "processes", config, read_data(config.data), place=Place(workers=2))
    assert (directory.path / "histories.jsonl").read_text() == here


def test_a_line_brings_its_files_and_leaves_others_alone(tmp_path):
    """What is known of it already goes with it: nothing is run twice."""
    unit = next(iter(small().units()))
    known = {"panel": unit.panel.name, "line": unit.line.name, "column": unit.column, "levels": []}
    unit.file(tmp_path).write_text(json.dumps(known))
    files = json.loads(run_line(job_of([unit], tmp_path)))
    assert list(files) == [unit.file(tmp_path).name] and read_json(unit.file(tmp_path)) == known
