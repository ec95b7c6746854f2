"""The benchmark's own machinery: turns that are shared, and tables that are written from what was measured."""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import bench.__main__ as main
from bench import constants, shapes
from bench.summary import BEGIN, END, write_tables
from bench.synthetic import Rounds, records
from bench.targets import Reached, Target, outcome, paired
from bench.timing import Samples, interleaved, summaries
from silodp.plan import auto as recipe

WITH_PYTORCH = ("gradients", "loops", "brought_torch", "peers_torch", "runs")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


@pytest.mark.parametrize("part", sorted(path.stem for path in Path(main.__file__).parent.glob("[a-z]*.py")))
def test_what_a_part_takes_from_the_library_is_there(part):
    """Parts are imported when they are measured: nothing else would notice that a name has moved."""
    if part in WITH_PYTORCH:
        pytest.importorskip("torch")
    if part == "front_diffprivlib":
        pytest.importorskip("diffprivlib")
    importlib.import_module(f"bench.{part}")


def test_a_round_of_synthetic_records_can_be_timed():
    rounds = Rounds(records(silos=2, size=8, width=3), hidden=2, longest=4)
    assert rounds.parameters == 3 * 2 + 2 + 2 + 1
    assert int(rounds.run(2)[0].round) == 4


def test_whoever_pauses_more_is_timed_beside_all_who_pause_less():
    waits = {"base": 0.0, "slow": 0.012, "slower": 0.025, "slowest": 0.05}
    programs = {name: (lambda seconds=seconds: time.sleep(seconds)) for name, seconds in waits.items()}
    turns = [set(own.cpu) for own in interleaved(programs, 24, 1.0).values()]
    turns.sort(key=len)
    assert len(turns[0]) >= 3
    assert all(few <= many for few, many in pairwise(turns))


def test_a_slow_base_takes_part_in_every_turn():
    programs = {"base": lambda: time.sleep(0.02), "slow": lambda: time.sleep(0.02)}
    found = interleaved(programs, 24, 0.1, base="base")
    assert len(found["base"].cpu) == 24 and len(found["slow"].cpu) < 24


def test_quartiles_of_ratios_within_turns_are_kept_and_no_samples():
    base, other = Samples(), Samples()
    for turn, busy in {0: 1.0, 1: 50.0, 4: 10.0, 8: 2.0}.items():
        base.add(turn, (busy, busy))
    for turn, busy in {0: 1.0, 4: 10.0, 8: 2.0}.items():
        other.add(turn, (busy, 2 * busy), scale=3.0)
    kept = {"cpu": [3.0, 3.0, 3.0], "wall": [6.0, 6.0, 6.0], "samples": 3}
    rows = summaries({"base": base, "other": other}, ["base", "absent"])
    assert rows["other"] == {"cpu_s": [4.5, 6.0, 18.0], "wall_s": [9.0, 12.0, 36.0], "over": {"base": kept}}
    assert paired(rows, "other", "base", "wall") == Reached([6.0, 6.0, 6.0], 3)


def test_results_are_json_with_quartiles_on_one_line():
    found = {"a": {"b": {"q": [1.0, 2.0], "none": None}, "c": 0.5}, "empty": {}}
    text = main.as_json(found)
    assert json.loads(text) == found
    assert '  "b": {"q": [1.0, 2.0], "none": null},' in text.splitlines()


def test_a_verdict_says_where_the_limit_lies_within_the_spread():
    target = Target("values", "", "", lambda found: None, 2.0, at_most=True)
    spreads = [[1.0, 1.5, 1.9], [1.0, 1.9, 2.1], [1.9, 3.0, 4.0], [3.0, 4.0, 5.0]]
    verdicts = [outcome(target, Reached(quartiles, 5))[-1] for quartiles in spreads]
    assert verdicts == ["yes", "yes, within the spread", "NO, by 1.50x, within the spread", "NO, by 2.00x"]


def test_a_verdict_needs_cpu_and_wall_time():
    target = Target("values", "", "", lambda found: None, 2.0, at_most=True)
    assert outcome(target, Reached([1.0, 1.5, 1.9], 5, [1.0, 1.6, 1.9]))[-1] == "yes"
    assert outcome(target, Reached([1.0, 1.5, 1.9], 5, [2.0, 3.0, 4.0]))[-1] == "NO: CPU yes; wall NO, by 1.50x"


def test_a_shape_is_held_against_its_limit_and_the_quickest_private_peer():
    over = lambda *medians: {name: {"cpu": [m, m, m], "wall": [m, 2 * m, m]} for name, m in medians}
    rows = {
        "silodp": {"over": over(("plain gradient, JAX", 1.1), ("silodp", 1.0))},
        "Opacus hooks": {"over": over(("silodp", 30.0))},
        "torch.func vmap": {"over": over(("silodp", 0.8))},
        "plain gradient, PyTorch": {"over": over(("silodp", 0.1))},
    }
    found = shapes.row("values", "MLP", rows)
    assert found[1:4] == ["<= 1.15x", "1.10 (1.10-1.10)", "2.20 (1.10-1.10)"]
    assert found[4:] == ["0.8 (torch.func vmap)", "1.6 (torch.func vmap)", "NO: CPU, wall"]
    assert shapes.row("networks", "embedding 5,000", rows)[-1] == "NO: CPU, wall"
    assert shapes.row("networks", "GRU", rows)[1] == ""


def test_an_interrupted_run_leaves_the_last_results_and_can_be_resumed(tmp_path, monkeypatch):
    tried: list[str] = []

    def measured(part: str, quick: bool) -> dict[str, int]:
        tried.append(part)
        if tried == ["values", "runs"]:
            raise KeyboardInterrupt
        return {"found": len(tried)}

    monkeypatch.setattr(main, "HERE", tmp_path)
    monkeypatch.setattr(main, "measured", measured)
    monkeypatch.setattr(main, "publish", lambda found, quick: None)
    monkeypatch.setenv("SILODP_DATA", "somewhere")
    results = tmp_path / "results.json"
    results.write_text('{"growth": {"found": 0}, "runs": {"found": 0}}')
    before = results.read_text()
    monkeypatch.setattr(sys, "argv", ["bench", "values", "runs"])
    with pytest.raises(KeyboardInterrupt):
        main.main()
    assert results.read_text() == before
    monkeypatch.setattr(sys, "argv", ["bench", "values", "runs", "--resume"])
    main.main()
    assert tried == ["values", "runs", "runs"]
    assert json.loads(results.read_text()) == {"growth": {"found": 0}, "runs": {"found": 3}, "values": {"found": 1}}
    assert list(tmp_path.iterdir()) == [results]


def test_the_tables_of_the_page_are_written_between_their_marks(tmp_path):
    many = {"ratio": {"silos, untrusted": [1.0, 1.5, 2.5], "silos, trusted": [1.0, 1.25, 1.5]}, "samples": 5}
    found = {"records": {"slope": 0.987, "memory_slope": None}, "many silos": many}
    part = {"found": found, "machine": "1 core", "when": "2026-01-01 00:00", "load_before": 0.5}
    part |= {"seconds": 90.0, "commit": "abc with changes"}
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    for _ in range(2):
        write_tables({"growth": part}, page)
    before, rest = page.read_text().split(BEGIN)
    tables, after = rest.split(END)
    assert PAGE.read_text().startswith(before) and PAGE.read_text().endswith(after)
    assert tables.count("| records | 0.99 |  |") == 1
    assert "| <= 2x | 1.5x | 1-2.5 |  | 5 | yes, within the spread |" in tables
    assert "not measured" in tables and "commit abc with changes" in tables


def test_another_constant_of_auto_holds_until_the_end_of_the_block():
    before = recipe.RIDGE, recipe.SQUARES, recipe.RECIPES
    with constants.changed("RIDGE", 0.0), constants.changed("SQUARES.luck", 9.0):
        assert recipe.RIDGE == 0.0 and recipe.RECIPES["ridge"].luck == recipe.SQUARES.luck == 9.0
        assert recipe.RECIPES["logistic"] is recipe.CLASSES
    assert before == (recipe.RIDGE, recipe.SQUARES, recipe.RECIPES)
    with pytest.raises(ValueError, match="no constant"), constants.changed("math", 1.0):
        pass
    with pytest.raises(TypeError), constants.changed("CLASSES.lucky", 1.0):
        pass
