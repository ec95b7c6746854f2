"""Pages in a real browser: they render without a complaint, can be read by everybody, and print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from silodp.report.compare import comparison_page, read_all
from silodp.report.html import Html, page
from tests.browser import Browser, needs_browser
from tests.pages import Reader
from tests.test_report import open_, private, run  # noqa: F401 (fixtures)

pytestmark = needs_browser
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(run, open_, tmp_path_factory) -> dict[str, Path]:  # noqa: F811
    folder = tmp_path_factory.mktemp("pages")
    compared = comparison_page(read_all([run.directory, open_]))
    texts = {"compare": compared, "notebook": page("In a notebook", Html(run._repr_html_()))}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts} | {"report": run.directory / "report.html"}


@pytest.mark.parametrize("name", ["report", "compare", "notebook"])
def test_a_page_of_ours_renders_can_be_read_and_prints(name, browser, pages):
    file = pages[name]
    browser.open(file.as_uri())
    assert browser.complaints == [] and browser.fetched == [file.as_uri()]
    assert browser.low_contrast() == [] and browser.run("document.documentElement.lang") == "en"
    read = Reader(file.read_text(encoding="utf-8"))
    drawings, tables = (browser.run(f"document.querySelectorAll('{name}').length") for name in ("svg", "table"))
    assert (drawings, tables) == (len(read.named("svg")), len(read.named("table"))) and drawings and tables
    if name != "notebook":  # where most is folded
        assert browser.run("[...document.querySelectorAll('svg')].every(e => e.getBoundingClientRect().height > 200)")
        assert len(browser.spoken("image")) == drawings and all(browser.spoken("image"))
        assert len(browser.spoken("table")) == tables and all(browser.spoken("table"))
    headings = browser.spoken("heading")
    assert headings and len(headings) == len(set(headings))
    assert browser.printed().startswith(b"%PDF")
    browser.open(file.as_uri(), width=360)  # a telephone
    assert not browser.wider_than_the_window()


def test_the_browser_finds_what_is_wrong(browser, tmp_path):
    wrong = tmp_path / "wrong.html"
    wrong.write_text("<body style='width: 9000px'><p style='color: #aaa'>pale</p><script>console.error('no')</script>")
    browser.open(wrong.as_uri())
    assert browser.complaints == ["['no']"] and browser.low_contrast() == ["pale 2.32"]
    assert browser.wider_than_the_window()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed (pip install -e '.[docs]')")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_can_be_walked_through(browser, site):
    """Every page: no complaint, nothing fetched from elsewhere, one first heading, words for every picture."""
    for file in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which knows its server's root only
        browser.open(file.as_uri())
        name = file.relative_to(site).as_posix()
        assert browser.complaints == [], name
        assert [url for url in browser.fetched if not url.startswith(("file:", "data:", "blob:"))] == [], name
        assert browser.run("document.querySelectorAll('article h1').length") == 1, name
        assert browser.run("[...document.querySelectorAll('article img')].every(e => e.alt && e.naturalWidth > 0)"), (
            name
        )
        assert browser.run("[...document.querySelectorAll('article table')].every(e => e.querySelector('th'))"), name
        assert not browser.wider_than_the_window(), name
