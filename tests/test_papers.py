"""docs/papers.md: what it says is shown somewhere is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from silodp.algorithms import REGISTRY

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "| verdict |" not in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_a_row_has_a_verdict_and_no_dead_reference(row):
    point, verdict, shown = (cell.strip() for cell in row)
    assert point
    assert re.match(r"(ok$|ok[:.] |decided: |see )", verdict)
    named = re.findall(r"`([^`]+)`", shown)
    assert named or (shown == "-" and verdict.startswith("decided"))
    for each in named:
        assert exists(each), each


def test_every_point_of_the_reading_has_its_row():
    """30 of CE-PSGM, 57 of Lowy et al., 24 of SoteriaFL, 18 of DIFF2, 17 of mu2, 5 of the pages."""
    counts = {"P": 30, "L": 57, "S": 24, "D": 18, "M": 17, "X": 5}
    numbers = [row[0].strip().partition(".")[0] for row in ROWS]
    assert numbers == [f"{paper}{i}" for paper, count in counts.items() for i in range(1, count + 1)]
    assert len(ROWS) == 151


def test_the_page_says_of_which_iterate_each_theorem_speaks():
    page = (ROOT / "docs" / "algorithms" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ((?:one of|the last).*?) \| (.*) \|$", page, re.MULTILINE))
    named = {
        words: {name for name in REGISTRY if re.search(rf"(?<![\w-]){name}(?![\w-])", rows[words])} for words in rows
    }
    found = {words: {REGISTRY[name].output for name in names} for words, names in named.items()}
    assert list(found.values()) == [{"before"}, {"after"}, {"local"}, {"last"}]
    assert set().union(*named.values()) == set(REGISTRY)


def exists(reference: str) -> bool:
    """A test, a command, or a file."""
    if reference.startswith("silodp "):
        return re.search(rf"\ndef {reference.split()[1]}\(", (ROOT / "silodp" / "cli.py").read_text()) is not None
    file, _, name = reference.partition("::")
    path = ROOT / "tests" / file if file.startswith("test_") else ROOT / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())
