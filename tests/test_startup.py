"""What needs no JAX answers without it: help, version, lists, and every mistake in a config's names and keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from silodp import __version__, data, registry
from silodp.algorithms import REGISTRY

ROOT = Path(registry.__file__).resolve().parents[1]
REPORT = """
import sys
from silodp.cli import app
try:
    app(sys.argv[1:], prog_name="silodp")
finally:
    print("JAX" if any(name.split(".")[0] in ("jax", "jaxlib") for name in sys.modules) else "no JAX")
"""


def typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its last line says whether JAX was imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-c", REPORT, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1]


def test_help_and_version_need_no_jax(tmp_path):
    told = typed(tmp_path, "--help")
    assert (told.returncode, last_line(told)) == (0, "no JAX")
    version = typed(tmp_path, "--version")
    assert version.stdout.splitlines() == [f"silodp {__version__}", "no JAX"]


def test_list_tells_every_family_and_every_name_without_jax(tmp_path):
    told = typed(tmp_path, "list")
    assert (told.returncode, last_line(told)) == (0, "no JAX")
    words = set(re.findall(r"[\w-]+", told.stdout))
    assert not (set(registry.FAMILIES) | set(REGISTRY) | set(data.DATASETS) | set(data.PARTITIONS)) - words
    for family, sentence in registry.SENTENCES.items():
        assert f"{family}: {sentence}" in told.stdout


def test_list_of_one_algorithm_tells_its_entry(tmp_path):
    told = typed(tmp_path, "list", "soteria-sgd").stdout
    entry = REGISTRY["soteria-sgd"]
    assert all(text in told for text in (entry.summary, entry.paper, entry.rate, entry.proved["untrusted"]))
    assert "ldp-svrg" not in told


def test_the_names_that_are_listed_are_those_that_there_are():
    assert set(registry.SENTENCES) == set(registry.FAMILIES)
    assert list(registry.DATASETS) == list(data.DATASETS)
    assert list(registry.PARTITIONS) == list(data.PARTITIONS)


MISTAKES = {
    "unknown key": ("[algorithm]\nclipp = 1.0\n", "algorithm.clipp: unknown key (did you mean clip?)"),
    "unknown section": ("[privcy]\nepsilon = 1.0\n", "privcy: unknown key (did you mean privacy?)"),
    "unknown algorithm": ('[algorithm]\nname = "spidr"\n', "algorithm.name = 'spidr': unknown (did you mean spider?)"),
    "unknown trust": ('[privacy]\ntrust = "blind"\n', "privacy.trust = 'blind': unknown"),
    "unknown dataset": ('[data]\nsource = "wbdc"\nsilos = 4\n', "wbdc"),
    "bad TOML": ("[algorithm\n", "not valid TOML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_config_needs_no_jax(tmp_path, mistake):
    text, answer = MISTAKES[mistake]
    (tmp_path / "config.toml").write_text(text)
    told = typed(tmp_path, "run", "config.toml")
    assert (told.returncode, last_line(told)) == (2, "no JAX"), told.stderr
    assert answer in told.stderr


@pytest.mark.parametrize(
    "arguments",
    [("run", "none.toml"), ("sweep", "none.toml"), ("account", "none.toml"), ("resume", "none"), ("show", "none"),
     ("list", "nobody"), ("audit", "nobody")],
)  # fmt: skip
def test_what_does_not_exist_is_told_without_jax(tmp_path, arguments):
    told = typed(tmp_path, *arguments)
    assert (told.returncode, last_line(told)) == (2, "no JAX"), told.stderr
    assert arguments[1] in told.stderr


def test_the_check_can_fail(tmp_path):
    """`silodp list NAME` reads a family's file, which is JAX code: the report must say so."""
    assert last_line(typed(tmp_path, "list", "spider")) == "JAX"


# --- what is imported, and when ---------------------------------------------------------------------------------

HEAVY = {"sklearn", "pandas", "matplotlib", "dp_accounting"}
ACCOUNT = """
[data]
sizes = [100, 130]
[privacy]
trust = "untrusted"
epsilon = 2.0
[algorithm]
name = "dp-gd"
rounds = 12
"""


def imported(folder: Path, *command: str) -> set[str]:
    """Libraries that a process imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_an_account_of_gaussian_releases_imports_no_more_than_it_needs(tmp_path):
    (tmp_path / "account.toml").write_text(ACCOUNT)
    found = imported(tmp_path, "-m", "silodp.cli", "account", "account.toml")
    assert "jax" in found
    assert not found & (HEAVY | {"scipy"})


def test_help_imports_hardly_anything(tmp_path):
    unneeded = {"numpy", "pydantic", "safetensors", "importlib.metadata"}
    assert not imported(tmp_path, "-m", "silodp.cli", "--help") & unneeded


def test_a_silo_imports_no_more_than_it_needs(tmp_path):
    found = imported(tmp_path, "-m", "silodp.deploy.silo_process")
    assert "jax" in found
    assert not found & (HEAVY | {"scipy", "typer", "rich"})
