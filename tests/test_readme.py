"""What README, CONTRIBUTING and docs say is true: their programs run, their tables are those of the code."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import silodp
from silodp import demo, registry
from silodp.algorithms import REGISTRY
from silodp.audit.table import audit
from silodp.parse import parse_config
from silodp.plan.certificate import Context, certificate
from silodp.plan.make import make_plan
from tests.conftest import made_data
from tests.pages import problems

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(silodp.__file__).resolve().parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
DOCS += [path for path in (ROOT / "docs").rglob("*.md") if path.name != "reproduction.md"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# --- programs, run beside the clone ------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path) -> Path:
    """A folder that is not the clone, with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    subprocess.run([sys.executable, "examples/make_hospitals.py"], cwd=tmp_path, check=True)
    return tmp_path


def started(command: list[str], folder: Path) -> str:
    """What the command prints in that folder, where only the installed package is found, not the clone's folder."""
    found = {
        "PYTHONPATH": str(PACKAGE.parent),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=os.environ | found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


INSTALLED = """
import silodp
assert silodp.__file__.startswith({package!r}), silodp.__file__
"""
CHECKED = """
assert run.history[-1]["test_accuracy"] > 0.8, run.history[-1]
assert run.directory.is_relative_to("runs")
"""


@pytest.mark.slow
def test_the_readmes_python_runs_beside_the_clone(beside):
    first, *programs = (program + INSTALLED.format(package=str(PACKAGE)) for program in blocks(README, "python"))
    assert len(programs) == 2
    for program in programs:
        started([sys.executable, "-c", program + CHECKED], beside)
    told = started([sys.executable, "-c", first + "assert clf.score(patients, 'outcome') > 0.8\n"], beside)
    assert "Promise for every record of every silo: epsilon 1, delta 1e-05" in told
    assert (beside / "model" / "bundle.json").is_file()


@pytest.mark.slow
def test_the_readmes_commands_run_beside_the_clone(beside):
    (script,) = blocks(README, "sh")
    told = started(["bash", "-e", "-c", script], beside)
    assert "(2, 1e-05)-DP" in told
    assert "The guarantee assumes that these are honest" in told
    assert "best by objective: not private" in told
    assert "model in runs/model" in told and (beside / "runs" / "predictions.csv").is_file()
    assert REGISTRY["spider"].summary in told


def test_the_errata_are_those_of_the_table(tmp_path):
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 00\d .*\| ([\d., ]+) \|$", text, re.MULTILINE)
    (program,) = blocks(text, "python")
    printed = [ast.literal_eval(line) for line in started([sys.executable, "-c", program], tmp_path).splitlines()]
    assert len(printed) == len(rows) == 7
    for row, values in zip(rows, printed, strict=True):
        stated = row.split(", ")
        digits = [len(number.partition(".")[2]) for number in stated]
        assert [f"{value:.{n}f}" for value, n in zip(values, digits, strict=True)] == stated


# --- tables ------------------------------------------------------------------------------------------


def test_the_readmes_table_has_every_family():
    """The names themselves are told by `silodp list`: tests/test_startup.py."""
    rows = re.findall(r"^\| \[([\w-]+)\]\((docs/algorithms/[\w-]+\.md)\) \| (.*?) \|", README, re.MULTILINE)
    assert {family: sentence for family, _, sentence in rows} == registry.SENTENCES
    assert all((ROOT / page).is_file() for _, page, _ in rows)


def test_the_first_screen_says_what_matters():
    first = "\n".join(README.splitlines()[:10])
    assert "simulation is the default, and it is not private" in first
    assert 'run.mode = "messages"' in first
    screen = "\n".join(README.splitlines()[:42])
    assert "docs/demo.png" in screen and "pip install" in screen and "make demo" in screen
    assert f"| {' | '.join(demo.HEADS)} |" in screen
    odds = [demo.Outcome(epsilon, (0.5,)).odds for epsilon in demo.EPSILONS]
    assert [row[1] for row in readme_rows()] == [*odds, "nothing is released"]


def readme_rows() -> list[list[str]]:
    table = README[README.index(f"| {demo.HEADS[0]}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


@pytest.mark.slow
def test_the_readmes_table_is_the_demos(tmp_path):
    outcomes = demo.run_demo(tmp_path / "demo", Console(quiet=True))
    chance = demo.majority(tmp_path / "demo", sorted((tmp_path / "demo" / "hospitals").iterdir()))
    found = [float(row[2].split(" ")[0]) for row in demo.rows_of(outcomes, chance)]
    stated = [float(row[2].split(" ")[0]) for row in readme_rows()]
    assert stated == pytest.approx(found, abs=0.01)  # another CPU rounds otherwise
    assert problems((tmp_path / "demo" / "report.html").read_text(encoding="utf-8")) == []


def test_the_demos_picture_is_small():
    picture = (ROOT / "docs" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 50_000


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for path in re.findall(r"`((?:silodp|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    for dotted in re.findall(r"`(silodp(?:\.[a-z_]+)+)`", text):
        assert is_known(dotted), dotted


def is_known(dotted: str) -> bool:
    """Whether it is a module, an attribute of one, or the group of an entry point."""
    *parents, last = dotted.split(".")
    path = ROOT.joinpath(*parents)
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    module = (path / f"{last}.py").is_file() or (path / last).is_dir()
    groups = [f"silodp.{kind}s" for kind in registry.KINDS]
    return (
        module or dotted in groups or (source.is_file() and re.search(rf"\b{last}\b", source.read_text()) is not None)
    )


# --- CONTRIBUTING ------------------------------------------------------------------------------------

FOLDERS = (
    "data",
    "privacy",
    "channels",
    "algorithms",
    "plan",
    "stages",
    "run",
    "deploy",
    "audit",
    "reproduce",
    "report",
    "front",
)


def first_sentence(folder: str) -> str:
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(re.split(r"\.(?:\s|$)", text, maxsplit=1)[0].split()) + "."


def test_the_map_says_of_every_folder_what_the_folder_says_of_itself():
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*?) \|$", CONTRIBUTING, re.MULTILINE))
    assert rows == {folder: first_sentence(folder) for folder in FOLDERS}


def test_the_map_names_files_that_exist():
    steps = CONTRIBUTING[CONTRIBUTING.index("| it is read") : CONTRIBUTING.index("An algorithm sees data only")]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", steps)
    assert len(named) > 15
    here = lambda name: [PACKAGE / name, PACKAGE / "channels" / name]  # `channel.py` of a row about channels/
    assert [name for name in named if not any(path.exists() for path in here(name))] == []


def test_the_algorithm_and_the_trust_model_of_contributing_run(tmp_path, monkeypatch):
    algorithm, trust = blocks(CONTRIBUTING, "python")
    (tmp_path / "halving.py").write_text(algorithm)
    (tmp_path / "cautious.py").write_text(trust)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.OWN["algorithm"], "halving", "halving:ENTRIES")
    run = silodp.train(
        algorithm={"name": "halving", "rounds": 4, "step_size": 0.5, **REGISTRY["halving"].example},
        channel="untrusted",
        epsilon=2.0,
        data=made_data(),
        out=tmp_path / "library",
    )
    assert run.summary["epsilon"] == pytest.approx(2.0, rel=1e-3)
    outside = {"name": "halving:Halving", "rounds": 4, "step_size": 0.5, "clip": 1.0, "restart": 2}
    cautious = silodp.train(
        algorithm=outside, channel="cautious:Cautious", epsilon=2.0, data=made_data(), out=tmp_path / "outside"
    )
    assert 0.5 < cautious.summary["epsilon"] < 1.2  # twice the noise
    assert audit(["halving"], ["trusted"])[0].verdict == "ok"


# --- language ----------------------------------------------------------------------------------------

STUMBLED_OVER = (
    "every so many rounds", "of which theorems speak", "least options", "end here a run", "hiding what they drop",
    "silos weigh as many records", "shuffled server", "does not exist here", "silodp.run:",
)  # fmt: skip


def test_no_text_has_what_readers_stumbled_over():
    texts = {path: path.read_text(encoding="utf-8") for path in [*DOCS, *PACKAGE.rglob("*.py")]}
    found = [(path.name, phrase) for path, text in texts.items() for phrase in STUMBLED_OVER if phrase in text]
    assert found == []


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        ("trusted", "under a trusted server"),
        ("untrusted", "under an untrusted server"),
        ("shuffled", "in the shuffle model"),
        ("tests.outside.relay:Relay", "with the trust model 'tests.outside.relay:Relay'"),
    ],
)
def test_a_certificate_says_in_which_setting(trust, words):
    options = {"name": "dp-gd", "rounds": 2, "step_size": 0.1, "clip": 1.0, "weights": "size"}
    config = parse_config({"privacy": {"trust": trust, "epsilon": 1.0}, "algorithm": options})
    plan = make_plan(config, silodp.Facts((40, 40), ("a", "b"), parameters=5))
    told = lambda stamp: certificate(plan, [plan.spent(i) for i in range(2)], Context(stamp=stamp))["statement"]
    assert told(None).startswith(f"dp-gd {words}: every record")
    assert told("seeded").startswith(f"Simulation of dp-gd {words}: run for real, every record")
