"""The benchmark's own machinery: turns that are shared, and tables that are written from what was measured."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from bench.summary import BEGIN, END, write_tables
from bench.timing import interleaved

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def test_whoever_pauses_more_is_timed_beside_all_who_pause_less():
    waits = {"base": 0.0, "slow": 0.012, "slower": 0.025, "slowest": 0.05}
    programs = {name: (lambda seconds=seconds: time.sleep(seconds)) for name, seconds in waits.items()}
    turns = [set(own.cpu) for own in interleaved(programs, 24, 1.0).values()]
    turns.sort(key=len)
    assert len(turns[0]) >= 3
    assert all(few <= many for few, many in pairwise(turns))


def test_the_tables_of_the_page_are_written_between_their_marks(tmp_path):
    limits = {"GEMM, JAX, Gflop/s": 123.0, "triad in place, JAX, GB/s": 45.6}
    part = {"found": {"1 thread": limits}, "machine": "1 core", "when": "2026-01-01 00:00", "load_before": 0.5}
    part |= {"seconds": 90.0, "commit": "abc with changes"}
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    for _ in range(2):
        write_tables({"machine": part}, page)
    before, rest = page.read_text().split(BEGIN)
    tables, after = rest.split(END)
    assert PAGE.read_text().startswith(before) and PAGE.read_text().endswith(after)
    assert tables.count("| GEMM, JAX, Gflop/s | 123 |") == 1
    assert "not measured" in tables
