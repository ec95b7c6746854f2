"""The page on utility: what counts as regret, and which numbers are kept."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import utility
from bench.families import DEFAULTS, prescribed_under
from bench.tasks import SMALL, TASKS, TINY
from bench.utility_page import (
    CONSTANTS,
    best,
    cells_of,
    defaults_table,
    ends_told,
    luck_of,
    methods_table,
    regrets,
    splits_table,
    summary,
    too_far_ahead,
    variants_table,
    with_variants,
)

FOUND = {
    "wbcd|1|trusted|auto|0": 0.90,
    "wbcd|1|trusted|auto|1": 0.94,
    "wbcd|1|trusted|dp-gd|0": [0.80, 0.93],
    "wbcd|1|trusted|dp-gd|1": [0.96, 0.85],
    "wbcd|1|none|local|0": 0.70,
    "turnout|1|trusted|auto|0": 0.5,
    "turnout|1|trusted|dp-gd|0": [0.6],
    "turnout|none|none|linear|0": 0.9,
    "constants of auto": "told elsewhere",
}


def test_a_search_is_as_good_as_one_setting_is_over_all_splits():
    assert best({0: np.array([0.80, 0.93]), 1: np.array([0.96, 0.85])}) == pytest.approx(0.89)


def test_regret_is_against_the_best_other_of_the_same_promise():
    found = regrets(cells_of(FOUND))
    assert found["wbcd", "1", "trusted"] == (pytest.approx(0.89 - 0.92), "dp-gd")
    assert found["turnout", "1", "trusted"] == (pytest.approx(0.1), "dp-gd")  # not against no privacy
    row = summary(cells_of(FOUND)).splitlines()[-1]
    assert (
        "+0.100 (turnout) | -0.030, -0.030 | +0.100, +0.100 | 1, 0 | **missed** |" in row
    )  # nobody has looked at turnout


def test_luck_is_that_of_the_best_setting_beside_auto():
    splits = {"0": (0.5, [0.9, 0.52]), "1": (0.6, [0.1, 0.66]), "2": (0.7, [0.2, 0.80])}
    found = {
        f"turnout|1|trusted|{m}|{i}": pair[k] for i, pair in splits.items() for k, m in enumerate(("auto", "dp-gd"))
    }
    cells = cells_of(found)
    key = ("turnout", "1", "trusted")
    assert luck_of(cells, key, "dp-gd") == pytest.approx(np.std([0.02, 0.06, 0.10], ddof=1) / 3**0.5)
    assert "| 1, 0 |" in summary(cells)  # .06 on average, give or take .046
    closer = found | {"turnout|1|trusted|dp-gd|0": [0.9, 0.56], "turnout|1|trusted|dp-gd|2": [0.2, 0.77]}
    assert "| 1, 1 |" in summary(cells_of(closer))


def test_a_target_is_kept_if_median_and_worst_are():
    kept = {"turnout|1|trusted|auto|0": 0.6, "turnout|1|trusted|dp-gd|0": 0.602}
    assert summary(cells_of(kept)).endswith("| kept |")
    worse = {"food|1|trusted|auto|0": 0.6, "food|1|trusted|dp-gd|0": 0.61}  # the worst is fine, the median is not
    assert summary(cells_of(kept | worse)).endswith("| **missed** |")


def test_a_method_with_fewer_splits_is_compared_on_those():
    """On all its splits `auto` is .92; the rival's only split was one on which `auto` has .90."""
    found = FOUND | {"wbcd|1|trusted|opacus|0": [0.7, 0.91]}
    assert regrets(cells_of(found))["wbcd", "1", "trusted"] == (pytest.approx(0.01), "opacus")
    assert "0.920 | 0.890 | 0.720 | 0.930 |" in methods_table(cells_of(found), "trusted").splitlines()[2]
    never = FOUND | {"wbcd|1|trusted|opacus|7": [0.99]}  # a split that `auto` does not have
    assert regrets(cells_of(never)) == regrets(cells_of(FOUND))


def test_auto_with_other_constants_is_no_rival_of_auto():
    once_more = {f"wbcd|1|trusted|{CONSTANTS}|{i}": [0.5, 0.95, 0.91, 0.93] for i in (0, 1)}
    cells = cells_of(FOUND | once_more | {f"turnout|1|trusted|{CONSTANTS}|0": [0.4, 0.51, 0.5, 0.5]})
    assert regrets(cells) == regrets(cells_of(FOUND))
    lines = variants_table(cells).splitlines()
    assert "| steps x 0.5 | - | -0.260 (0, 2 of 2) |" in lines[2]
    assert with_variants(cells) == "medians would be +0.065 to +0.065, and 2 cells above .02"  # .03, .1
    assert "| steps x 2 | - | +0.020 (1, 0 of 2) |" in lines[3]
    assert with_variants(cells_of(FOUND | once_more)) == "nothing is known yet: 1 tasks lack them"


def test_what_is_too_far_ahead_gets_more_splits():
    found = FOUND | {"wbcd|1|trusted|opacus|0": [0.7, 0.91]}  # ahead by .01
    assert too_far_ahead(found) == {("turnout", "dp-gd")}
    jobs = list(utility.doubtful_jobs(["wbcd", "turnout"], found))
    assert {(job["name"], job["method"]) for job in jobs} == {("turnout", "auto"), ("turnout", "dp-gd")}
    assert len(jobs) == 2 * utility.DOUBTFUL
    assert not list(utility.doubtful_jobs(["wbcd"], found))


def test_papers_defaults_are_told_one_by_one():
    values = np.linspace(0.1, 0.3, len(prescribed_under("untrusted"))).tolist()
    found = {"wbcd|1|untrusted|auto|0": 0.9, f"wbcd|1|untrusted|{DEFAULTS}|0": values}
    assert regrets(cells_of(found))["wbcd", "1", "untrusted"] == (pytest.approx(-0.6), DEFAULTS)
    assert defaults_table(cells_of(found)).splitlines()[-1].startswith("| wbcd | untrusted | 1 | 0.900 | 0.100 | ")


def test_what_was_not_measured_is_said():
    told = splits_table(
        cells_of(FOUND), {"dp-gd": [5, 15, 60], "opacus": [2, 6, 6], "no privacy": [5, 15, 60]}
    ).splitlines()
    assert told[2:] == [
        "| dp-gd | 5 | 15 | 60 | 2 | 1 to 2 |",
        "| opacus | 2 | 6 | 6 | **none** | 0 |",
        "| no privacy | 5 | 15 | 60 | 1 | 1 to 1 |",
    ]


def test_numbers_of_other_constants_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "KEPT", tmp_path / "kept.json")
    (tmp_path / "kept.json").write_text(json.dumps(FOUND))
    kept = utility.Kept()
    assert "wbcd|1|trusted|dp-gd|0" in kept.found and "wbcd|1|trusted|auto|0" not in kept.found
    kept.keep({"wbcd|1|trusted|auto|0": 0.9})
    assert "wbcd|1|trusted|auto|0" in utility.Kept().found
    monkeypatch.setattr(utility.recipe, "RIDGE", 11.0)
    assert "wbcd|1|trusted|auto|0" not in utility.Kept().found


def test_numbers_of_another_search_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(utility, "KEPT", tmp_path / "kept.json")
    utility.Kept().keep({"wbcd|1|trusted|dp-gd|0": [0.5], "wbcd|1|trusted|opacus|0": [0.6]})
    monkeypatch.setattr(utility.rivals_torch, "ROUNDS", 41)
    assert "wbcd|1|trusted|dp-gd|0" in utility.Kept().found
    assert "wbcd|1|trusted|opacus|0" not in utility.Kept().found


def test_a_job_carries_what_is_known_of_it_alone():
    known = utility.known_by_job(FOUND)
    assert known["wbcd", "dp-gd", 1] == {"wbcd|1|trusted|dp-gd|1": [0.96, 0.85]}
    assert known["turnout", "no privacy", 0] == {"turnout|none|none|linear|0": 0.9}
    assert sum(map(len, known.values())) == len(FOUND) - 1


def test_a_stopped_run_has_all_tasks_and_what_counts_most():
    names = ["wbcd", "magic"]
    jobs = [(job["seed"], job["name"], job["method"]) for job in utility.jobs_of(names, utility.METHODS, None, (1.0,))]
    first = len(names) * len(utility.FIRST)
    assert {job[1:] for job in jobs[:first]} == {(name, method) for name in names for method in utility.FIRST}
    assert {job[0] for job in jobs[: 5 * first]} == set(range(5))
    assert jobs[5 * first][2] in utility.LATER
    early = [method for seed, _, method in jobs if seed < 5]
    assert early.index(DEFAULTS) > max(i for i, method in enumerate(early) if method in utility.LATER)
    splits = lambda *job: sum(each[1:] == job for each in jobs)
    assert (splits("magic", "auto"), splits("wbcd", "auto")) == (5, 60)
    assert (splits("magic", "spider"), splits("wbcd", "spider")) == (5, 5)


def test_splits_of_a_task_go_to_one_worker_and_none_is_lost():
    jobs = list(utility.jobs_of(["wbcd", "magic"], ["auto", "spider"], None, (1.0,)))
    together = list(utility.batches(jobs))
    assert [job for each in together for job in each] == jobs
    assert all(len({(job["name"], job["method"]) for job in each}) == 1 for each in together)
    count = [len(each) for each in together]
    assert max(count) == utility.SPLITS and len(count) == 4 + 4 + 55 // 5  # first splits, the next four, wbcd's others


def test_small_tasks_are_those_of_few_records():
    there = {name: len(task.read()[0]) for name, task in TASKS.items() if "bunch" in task.read.__qualname__}
    assert there.keys() >= {"wbcd", "digits", "wine", "diabetes"}
    told = {name: TINY if count <= 1000 else SMALL if count < 2500 else 1 for name, count in there.items()}
    assert {name: TASKS[name].times for name in there} == told


def test_it_is_told_how_often_the_largest_step_was_the_best():
    found = FOUND | {
        "turnout|3|trusted|dp-gd|0": [0.1, 0.2, 0.3, 0.5],
        "turnout|8|trusted|dp-gd|0": [0.5, 0.2, 0.3, 0.4],
    }
    told = ends_told({key: rows for key, rows in cells_of(found).items() if key[1] in "38"}, {"dp-gd": [4.0, 16.0]})
    assert told == "50% of dp-gd"
    assert len(utility.points_of("dp-gd")) == 18 and utility.points_of("dp-gd")[3]["step"] == 16.0
