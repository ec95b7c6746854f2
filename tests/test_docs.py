"""The documentation site: every key and name is in it, every link leads somewhere, every program runs."""

from __future__ import annotations

import ast
import importlib.util
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import silodp
from silodp.algorithms import REGISTRY
from silodp.cli import app
from silodp.config import AlgorithmConfig, Config
from tests.test_readme import blocks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def loaded():
    spec = importlib.util.spec_from_file_location("documentation_site", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = loaded()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page of the site as mkdocs gets it."""
    files = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    return {name: site.led_here(text, f"docs/{name}") for name, text in files.items()} | site.generated()


def test_every_config_key_is_there_with_its_meaning(pages):
    text = pages["reference/config.md"]
    for name, field in Config.model_fields.items():
        section = next(kind for kind in site.kinds(field.annotation) if hasattr(kind, "model_fields"))
        assert f"## [{name}]" in text
        for key, each in section.model_fields.items():
            assert each.description, f"{name}.{key} has no description"
            assert re.search(rf"^\| `{key}` \| .+ \| .* \| .+ \|$", text, re.MULTILINE), f"{name}.{key}"
    assert "Optional" not in text and "typing" not in text


def test_every_algorithm_is_there_with_the_keys_it_takes(pages):
    text = pages["reference/config.md"]
    for name, entry in REGISTRY.items():
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \| .* \|$", text, re.MULTILINE)
        listed = set(re.findall(r"`(\w+)", row))
        assert listed <= set(AlgorithmConfig.model_fields)
        assert set(entry.example) - site.SHARED_KEYS <= listed, name
    assert "`clip_difference`" in re.findall(r"^\| `spider` \|.*$", text, re.MULTILINE)[0]


def test_every_public_name_and_command_is_there(pages):
    assert all(f"## silodp.{name}\n" in pages["reference/python.md"] for name in set(silodp.__all__) - {"__version__"})
    commands = [each.name or each.callback.__name__.rstrip("_") for each in app.registered_commands]  # type: ignore[union-attr]
    assert all(f"## silodp {name}\n" in pages["reference/commands.md"] for name in commands)


def test_links_lead_to_pages_and_pictures(pages):
    known = set(pages) | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png")}
    for name, text in pages.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for _, _, target in site.LINK.findall(prose):
            path = target.partition("#")[0]
            if path and "://" not in target:
                assert posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in known, (name, target)


def test_a_link_out_of_the_site_keeps_its_words_only():
    assert site.led_here("[a](../silodp/config.py) [b](privacy.md#x) [c](https://e.org)", "docs/schema.md") == (
        "a [b](privacy.md#x) [c](https://e.org)"
    )
    led = site.led_here("![d](docs/demo.png) [e](CONTRIBUTING.md)", "README.md")
    assert led == "![d](demo.png) [e](contributing.md)"


def test_the_navigation_has_every_page(pages):
    named = set(re.findall(r"[ :]([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named | set(site.LATER) == set(pages) | set(site.LATER)


RUN = [DOCS / "estimators.md", *sorted((DOCS / "tutorials").glob("*.md"))]  # others: test_readme, test_reproduce_files


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_programs_on_pages_can_be_read(page):
    for program in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(program)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_pages_programs_run(page, tmp_path):
    """All of a page in one process, one after another, away from the clone."""
    programs = blocks(page.read_text(encoding="utf-8"), "python")
    assert programs
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    subprocess.run([sys.executable, "examples/make_hospitals.py"], cwd=tmp_path, check=True)
    found = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(programs)]
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mkdocs") is None, reason="mkdocs is not installed (pip install -e '.[docs]')")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = re.compile(r'(?:src|href)="(https?://[^"]+)"')
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert [url for url in fetched.findall(index) if "mkdocs-material" not in url] == []  # a link in the footer
