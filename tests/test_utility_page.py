"""The page on utility: what counts as regret, and which numbers of `auto` are kept."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import utility
from bench.utility_page import best, cells_of, regrets, summary

FOUND = {
    "wbcd|1|trusted|auto|0": 0.90,
    "wbcd|1|trusted|auto|1": 0.94,
    "wbcd|1|trusted|dp-gd|0": [0.80, 0.93],
    "wbcd|1|trusted|dp-gd|1": [0.96, 0.85],
    "wbcd|1|none|local|0": 0.70,
    "magic|1|trusted|auto|0": 0.5,
    "magic|1|trusted|dp-gd|0": [0.6],
    "magic|none|none|linear|0": 0.9,
    "constants of auto": "told elsewhere",
}


def test_a_search_is_as_good_as_one_setting_is_over_all_splits():
    assert best(np.array([[0.80, 0.93], [0.96, 0.85]])) == pytest.approx(0.89)


def test_regret_is_against_the_best_other_of_the_same_promise():
    found = regrets(cells_of(FOUND))
    assert found["wbcd", "1", "trusted"] == (pytest.approx(0.89 - 0.92), "dp-gd")
    assert found["magic", "1", "trusted"] == (pytest.approx(0.1), "dp-gd")  # not against no privacy
    row = summary(cells_of(FOUND)).splitlines()[-1]
    assert "+0.100 (magic) | +0.100 | +0.100" in row  # magic is the only one that nobody looked at


def test_numbers_of_other_constants_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "KEPT", tmp_path / "kept.json")
    (tmp_path / "kept.json").write_text(json.dumps(FOUND))
    kept = utility.Kept()
    assert "wbcd|1|trusted|dp-gd|0" in kept.found and "wbcd|1|trusted|auto|0" not in kept.found
    kept.keep({"wbcd|1|trusted|auto|0": 0.9})
    assert "wbcd|1|trusted|auto|0" in utility.Kept().found
    monkeypatch.setattr(utility.recipe, "DEAR", 11.0)
    assert "wbcd|1|trusted|auto|0" not in utility.Kept().found
