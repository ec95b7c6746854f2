"""What is built and installed works away from the clone; the metadata says one thing everywhere; types reach a user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_readme import blocks

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {version}( |$)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_extra_is_pinned_or_said_not_to_be():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    named = [re.split(r"[\[<>=]", each)[0] for extra, deps in PROJECT["optional-dependencies"].items()
             for each in deps if extra not in ("bench", "torch")]  # fmt: skip
    assert [name for name in named if name.lower() not in pinned] == []
    assert PROJECT["optional-dependencies"]["torch"] == ["torch==2.13.0"]


def run(command: list[object], folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(c) for c in command], cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """sdist and wheel of a copy of the tracked files, built by the backend alone: no network."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or later is not installed")
    base = tmp_path_factory.mktemp("build")
    tracked = run(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (base / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (base / "src" / name).write_bytes((ROOT / name).read_bytes())
    for what in ("build_sdist", "build_wheel"):
        run([sys.executable, "-c", BUILD, what, base / "dist"], base / "src")
    (sdist,), (wheel,) = (base / "dist").glob("*.tar.gz"), (base / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory) -> Path:
    """The interpreter of a new environment with the wheel; it finds dependencies where these tests have theirs."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(site)
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    return folder / "bin" / "python"


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_they_should(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    data = {"silodp/py.typed", "silodp/reproduce/papers/mu2-table1.toml"}
    assert {"README.md", "LICENSE", "pyproject.toml"} | data <= names
    with zipfile.ZipFile(built[1]) as archive:
        held = set(archive.namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "silodp").rglob("*.py")}
    assert code | data <= held
    assert not [name for name in held if name.startswith(("tests/", "bench/", "docs/"))]


@pytest.mark.slow
def test_the_readmes_example_runs_in_a_fresh_environment_and_an_empty_folder(fresh, tmp_path):
    program = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")[1]
    where = "import silodp; print(silodp.__file__)\n"
    told = run([fresh, "-c", where + program], tmp_path)
    assert Path(told.splitlines()[0]).is_relative_to(fresh.parents[1]) and "files in" in told
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert "In plain words" in report.read_text(encoding="utf-8")
    assert "mu2-table1" in run([fresh, "-m", "silodp.cli", "reproduce", "--list"], tmp_path)


USER = """
import numpy as np
import silodp

clf = silodp.SiloClassifier(epsilon=1.0, random_state=0)
fitted: silodp.SiloClassifier = clf.fit(np.zeros((4, 2)), np.array([0, 1, 0, 1]))
labels: np.ndarray = fitted.predict(np.zeros((1, 2)))
run = silodp.train({"algorithm": {"name": "dp-gd"}}, seed=0)
rows: list[dict[str, float]] = run.history
"""


@pytest.mark.slow
def test_a_users_file_is_type_checked(tmp_path):
    """py.typed: pyright reads the library's own types, and a wrong argument is found."""
    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(USER + "silodp.SiloClassifier(epsilon='one')\n")
    check = lambda name: subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, name],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    right, wrong = check("right.py"), check("wrong.py")
    assert right.returncode == 0, right.stdout
    assert wrong.returncode == 1 and '"epsilon"' in wrong.stdout
