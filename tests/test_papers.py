"""docs/papers.md: what it says is shown somewhere is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "| verdict |" not in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_a_row_has_a_verdict_and_no_dead_reference(row):
    point, verdict, shown = (cell.strip() for cell in row)
    assert point
    assert verdict.startswith(("ok", "decided: ", "open: ", "open", "see "))
    named = re.findall(r"`([^`]+)`", shown)
    assert named or (shown == "-" and verdict.startswith(("decided", "open")))
    for each in named:
        assert exists(each), each


def exists(reference: str) -> bool:
    """A test, a command, or a file."""
    if reference.startswith("silodp "):
        return re.search(rf"\ndef {reference.split()[1]}\(", (ROOT / "silodp" / "cli.py").read_text()) is not None
    file, _, name = reference.partition("::")
    path = ROOT / "tests" / file if file.startswith("test_") else ROOT / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text())
