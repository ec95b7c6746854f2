"""Pages in a real browser: they render without a complaint, can be read by everybody, and print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from silodp.deploy.status import page_server
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


BUDGET = {"run_spent": 0.63, "run_reserved": 1.0, "total": 1.7, "limit": 4.0, "delta": 1e-5}
SITE = {"site": "north", "records": 20, "epsilon": 1.0, "heard_at": 0.0, "bytes_up": 5200, "bytes_down": 2_100_000}
STATUS = {
    "run": "0" * 32, "plan": "sibham gonjap", "state": "running", "algorithm": "spider", "trust": "shuffled",
    "parameters": 11, "round": 4, "rounds": 10, "seconds_a_round": 0.18, "delta": 1e-5, "at": 0.0,
    "sites": [SITE | {"budget": BUDGET}, SITE | {"site": "mixer", "records": None, "epsilon": None, "budget": None}],
    "refusals": [],
}  # fmt: skip


def test_the_status_page_shows_a_run_as_it_goes(browser, tmp_path):
    """From before it begins to a refusal: bars are as long as the ledgers say, and nothing is fetched."""
    with page_server(tmp_path, "127.0.0.1:0") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        browser.open(address)
        assert "has not begun" in browser.run("document.body.innerText")
        (tmp_path / "status.json").write_text(json.dumps(STATUS))
        browser.open(address)
        text = browser.run("document.body.innerText")
        assert "Round 4 of 10, 0.18 s a round" in text and "0.63 spent of 1" in text and "2.3 left" in text
        widths = browser.run(
            "[...document.querySelectorAll('.bar')].map(e => [...e.children].map(c => c.offsetWidth / e.offsetWidth))"
        )
        shares = [0.4, 0.63, 0.37, 0.0, 0.425]
        assert [each for bar in widths for each in bar] == pytest.approx(shares, abs=0.02)
        assert browser.complaints == [] and browser.low_contrast() == []
        assert {url for url in browser.fetched if not url.endswith("/favicon.ico")} == {address}
        refused = [{"at": 0.0, "text": "silo 'north' in round 3: a silo refused: <b>total</b>"}]
        (tmp_path / "status.json").write_text(json.dumps(STATUS | {"state": "stopped", "refusals": refused}))
        browser.open(address, width=360)
        assert "<b>total</b>" in browser.run("document.body.innerText")
        assert not browser.wider_than_the_window() and browser.low_contrast() == []
        server.shutdown()


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
