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
import tomllib
from pathlib import Path

import pytest

import silodp
from silodp.algorithms import REGISTRY
from silodp.cli import app
from silodp.config import AlgorithmConfig, Config

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


def test_every_key_of_a_federations_files_is_there_with_its_meaning(pages):
    text = pages["reference/config.md"].split("## Files of a real federation")[1]
    for name, model in site.OPERATORS.items():
        part = text.split(f"### {name}\n")[1]
        for key, field in model.model_fields.items():
            inner = getattr(field.annotation, "model_fields", None)
            for own, each in (inner or {key: field}).items():
                assert each.description and each.description in part, f"{name}: {own} has no description"
                assert f"| `{each.alias or own}` |" in part.split(f"[{key}] of {name}")[-1 if inner else 0], own
    assert "Undefined" not in text


def test_every_algorithm_is_there_with_the_keys_it_takes_their_defaults_and_meanings(pages):
    text = pages["reference/config.md"]
    by_key = dict(
        re.findall(r"^\| `(\w+)` \| ((?:`[\w-]+`(?:, )?)*) \|$", text.split("## Who takes which key")[1], re.M)
    )
    for name, entry in REGISTRY.items():
        (part,) = re.findall(rf"^#### {name}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
        rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \| (.+) \|$", part, re.MULTILINE)}
        assert set(entry.example) - site.SHARED_KEYS <= rows.keys() <= set(AlgorithmConfig.model_fields), name
        assert all(
            AlgorithmConfig.model_fields[key].description in meaning.replace("\\|", "|")
            for key, (_, _, meaning) in rows.items()
        )
        assert all(f"`{name}`" in by_key[key] for key in rows)
    spider, gd = (text.split(f"#### {name}\n")[1].split("####")[0] for name in ("spider", "gd"))
    assert "| `clip` | number | **needed** with an epsilon |" in spider and "| `clip` | number | no clipping |" in gd
    assert "| `restart` | whole number | **needed** |" in spider


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
    assert named == set(pages)


# --- what stands on pages as a program or a command -------------------------------------------------------------------

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *DOCS.rglob("*.md"),
]
# Pages whose programs other tests run: beside the clone, as modules, or with their figures compared.
ELSEWHERE = {"README.md": "test_readme", "CONTRIBUTING.md": "test_readme", "docs/privacy.md": "test_readme",
             "docs/experiments.md": "test_reproduce_files"}  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS, OTHERS = {"python", "sh"}, {"toml", "text", "bibtex"}  # text: output, usage, and what sets up a machine


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def programs_of(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


RUN = sorted(
    page for page in PAGES if named(page) not in ELSEWHERE and any(programs_of(page, kind) for kind in PROGRAMS)
)


@pytest.mark.parametrize("page", sorted(PAGES), ids=named)
def test_every_block_says_what_it_is_and_can_be_read(page):
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        assert language in PROGRAMS | OTHERS, f"a block without a language: {text[:60]}"
        if language == "python":
            ast.parse(text)
        if language == "toml":
            tomllib.loads(text)


def test_pages_that_are_run_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / f"{test}.py").read_text(encoding="utf-8")


INLINE = re.compile(r"`(silodp [a-z][^`]*)`|^    +(silodp [a-z].*)$", re.MULTILINE)


def commands_on(page: Path) -> list[str]:
    """In blocks, in indented lines and between prose's backticks; without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    fenced = "\n".join(block for _, block in FENCE.findall(text))
    lines = [line for line in fenced.splitlines() if re.match(r"\s*silodp [a-z]", line)]
    return [line.split("#")[0] for line in (*lines, *("".join(found) for found in INLINE.findall(FENCE.sub("", text))))]


@pytest.mark.parametrize("page", sorted(PAGES), ids=named)
def test_commands_on_pages_exist_with_their_options(page):
    import typer

    whole = typer.main.get_command(app)
    for line in commands_on(page):
        command, words = whole, line.split()[1:]
        while words and getattr(command, "commands", None):
            known = command.commands  # pyright: ignore[reportAttributeAccessIssue]
            if words[0] not in known and "tell" in known:  # silodp plan CONFIG.toml
                command = known["tell"]
                break
            if words[0] in ("COMMAND", "-h") or words[0].startswith("--"):
                break
            assert words[0] in known, line
            command, words = known[words[0]], words[1:]
        options = {option for each in command.params for option in each.opts} | {"--help"}
        given = re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words))
        assert [option for option in given if option not in options] == [], line


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=named)
def test_a_pages_programs_run(page, tmp_path):
    """Commands one after another in one shell, programs one after another in one process, away from the clone."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    subprocess.run([sys.executable, "examples/make_hospitals.py"], cwd=tmp_path, check=True)
    for text in programs_of(page, "toml"):
        if name := re.match(r"# (\w+\.toml)\n", text):  # its first line names a file that commands read
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    for command, language in ((["bash", "-e", "-c"], "sh"), ([sys.executable, "-c"], "python")):
        (folder := tmp_path / language).mkdir()
        for each in (
            *tmp_path.glob("*.toml"),
            *tmp_path.glob("*.csv"),
            *tmp_path.glob("*.npz"),
            tmp_path / "examples",
            tmp_path / "hospitals",
        ):
            (folder / each.name).symlink_to(each)
        program = [*command, "\n".join(programs_of(page, language))]
        done = subprocess.run(program, cwd=folder, env=found, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = re.compile(r'(?:src|href)="(https?://[^"]+)"')
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert [url for url in fetched.findall(index) if "mkdocs-material" not in url] == []  # a link in the footer
