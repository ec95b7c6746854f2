"""The notebooks: small, without outputs, and they run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def programs(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs: they may show records"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_are_three_and_they_can_be_read():
    assert [notebook.stem for notebook in NOTEBOOKS] == ["auditor", "hospitals", "research"]
    for notebook in NOTEBOOKS:
        assert notebook.stat().st_size < 20_000
        for program in programs(notebook):
            ast.parse(program)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = [sys.executable, "-c", "\n".join(programs(notebook))]
    found = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
