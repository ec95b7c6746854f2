"""Reproductions: every description is sound, and the machinery is run on one small experiment."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.plan.make import choose, make_plan, with_options
from silodp.plan.parts import built, settled_facts
from silodp.reproduce import load_experiment, names
from silodp.reproduce.checks import check
from silodp.reproduce.claims import Judgement, judgements, p_value
from silodp.reproduce.driver import compact, load_results, reproduce, write_docs
from silodp.reproduce.experiment import Experiment, Line, Metric, Published, changed, thinned
from silodp.reproduce.report import Cell, Row, judged, rows_of
from silodp.reproduce.summary import chosen_apart, claims_told, miss, overview, published_once, verdict
from silodp.reproduce.text import across_levels, as_markdown
from silodp.reproduce.units import run_unit
from silodp.run.progress import silent
from silodp.run.sweep import Outcome

X = np.zeros(3)
WANTED = [
    *("mu2-table1", "mu2-table2", "psgm-fig1", "diff2-fig1", "diff2-fig2", "diff2-fig3"),
    *(f"soteria-fig{i}" for i in range(1, 9)),
    *(f"spider-fig{i}" for i in range(4, 11)),
]


def test_every_table_and_figure_is_described():
    assert set(WANTED) <= set(names())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("quick", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "quick"])
def test_a_description_makes_configs_that_can_be_accounted(name, quick):
    """Every unit's first and last setting: names of keys, options the algorithm knows; of the best lines, the plan."""
    experiment = load_experiment(name).quickly() if quick else load_experiment(name)
    units = list(experiment.units())
    assert units
    assert len({(u.panel.name, u.line.name, u.column) for u in units}) == len(units)
    check(experiment)
    for unit in units:
        for level in {0, len(unit.levels) - 1}:
            for pick in (0, -1):
                config = unit.config(level, {key: values[pick] for key, values in unit.line.search.items()})
                silos = config.data.silos or 25
                names = tuple(str(i) for i in range(silos))
                facts = Facts((60_000 // silos,) * silos, names, parameters=7850)
                config = with_options(config, choose(config, settled_facts(config, facts)))  # what mu2 leaves open
                built(config, settled_facts(config, facts))
                if unit.column == "best" and config.privacy.trust != "shuffled":
                    make_plan(config, replace(facts, parameters=500))


def small(**changes) -> Experiment:
    tree = {
        "name": "small",
        "paper": "a paper",
        "title": "a figure",
        "axes": ["rounds", "levels"],
        "metrics": [{"column": "test_error", "label": "test error"}, {"column": "objective", "label": "loss"}],
        "levels": {"values": [1.0, 8.0]},
        "seeds": [0, 1],
        "panels": [{"name": "all"}],
        "lines": [
            {
                "name": "GD",
                "columns": ["exact"],
                "levels": False,
                "set": {"algorithm.name": "gd", "privacy.epsilon": "none"},
            },
            {
                "name": "DP-GD",
                "set": {"algorithm.name": "dp-gd", "algorithm.clip": 1.0},
                "search": {"algorithm.step_size": [0.01, 1.0]},
            },
        ],
        "published": [{"panel": "all", "line": "DP-GD", "level": 8.0, "value": 0.9}],
        "claims": [{"text": "Privacy is free.", "better": ["DP-GD"], "than": ["GD"], "metric": 1}],
        "config": {
            "data": {"source": "wbcd", "silos": 2, "test": 0.2, "preprocess": ["standardise"]},
            "model": {"kind": "logistic"},
            "privacy": {"trust": "untrusted", "delta": 1e-4},
            "algorithm": {"rounds": 10, "step_size": 1.0},
            "run": {"every": 5},
        },
    }
    return Experiment.model_validate(tree | changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("small")
    return small(), reproduce(small(), out), out


def test_a_unit_holds_the_best_setting_every_seed_and_the_true_epsilon(done):
    _, results, out = done
    exact, paper = results["all", "DP-GD", "exact"], results["all", "DP-GD", "paper"]
    for level, epsilon in zip(exact["levels"], (1.0, 8.0), strict=True):
        assert level["setting"]["algorithm.step_size"] == 1.0
        assert level["epsilon"] == pytest.approx(epsilon, rel=1e-4)
        assert len(level["metrics"][0]["values"]) == 2
        assert level["rounds"] == [0, 5, 10]
    assert [level["setting"] for level in paper["levels"]] == [level["setting"] for level in exact["levels"]]
    assert len(list((out / "units").glob("*.search.json"))) == 1  # the columns share it
    assert all(level["epsilon"] != pytest.approx(level["claimed_epsilon"]) for level in paper["levels"])
    assert exact["tuning"].endswith("not private: chosen on private data")
    for folder in (out / "units" / "certificates", out / "certificates"):
        assert len(list(folder.iterdir())) == 2 * 2 * 2  # columns x levels x (txt, json)
    assert (out / "certificates" / "all-dp-gd-exact-8.txt").is_file()
    assert [file.name for file in out.glob("figure.*")] == ["figure.png"]
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_is_drawn_in_the_formats_asked_for(done, tmp_path):
    experiment, results, out = done
    assert reproduce(experiment, tmp_path, units=out / "units", formats=("pdf", "svg")) == results
    assert sorted(file.name for file in tmp_path.glob("figure.*")) == ["figure.pdf", "figure.svg"]
    with pytest.raises(ConfigError, match=r"cannot be drawn as 'gif'; end its name with \.png, \.pdf, \.svg"):
        reproduce(experiment, tmp_path / "other", formats=("png", "gif"))
    assert not (tmp_path / "other").exists()  # told before anything runs


def test_each_metric_may_have_a_setting_of_its_own(monkeypatch, tmp_path):
    """The small step has the smaller error, the long one the smaller loss."""
    ends = {0.01: (0.9, 0.5), 1.0: (0.8, 0.4)}  # test accuracy and loss

    def fake(configs, *_, **__):
        rows = [dict(zip(("test_accuracy", "objective"), ends[c.algorithm.step_size], strict=True)) for c in configs]
        made: Any = lambda config: SimpleNamespace(config=config, plan=None)
        start = {"round": 10, "bits_up": 0}
        return [Outcome(made(c), {}, [start | row], 1.0, X) for c, row in zip(configs, rows, strict=True)]

    monkeypatch.setattr("silodp.reproduce.units.run_configs", fake)
    found, no_data = {}, cast(Any, None)
    for each in (False, True):
        experiment = small(search={"each": each, "rungs": [{"keep": 1}]}, levels=None, published=[], claims=[])
        units = {unit.column: unit for unit in experiment.units() if unit.line.name == "DP-GD"}
        for column in ("exact", "paper"):  # the second takes what the first has found
            result = run_unit(units[column], no_data, tmp_path / str(each), silent)
            found[each, column] = [metric["values"][0] for metric in result["levels"][0]["metrics"]]
        assert len({unit.fingerprint for unit in units.values()}) == 2
    own = run_unit(units["exact"], no_data, tmp_path / "True", silent)
    told = as_markdown(experiment, {("all", "DP-GD", "exact"): own})
    assert "- DP-GD, by test error (2 tried): step_size 0.01" in told
    assert "- DP-GD, by loss (2 tried): step_size 1" in told
    assert found[True, "exact"] == found[True, "paper"] == pytest.approx([0.1, 0.4])
    assert found[False, "exact"] == found[False, "paper"] == pytest.approx([0.2, 0.4])


def test_the_best_with_the_papers_own_model_is_told_apart(done):
    experiment, results, _ = done
    other = experiment.lines[1].model_dump() | {"name": "HOG", "columns": ["best"], "set": {"model.kind": "softmax"}}
    with_other = experiment.model_copy(update={"lines": [*experiment.lines, Line.model_validate(other)]})
    better = json.loads(json.dumps(results["all", "DP-GD", "exact"])) | {"line": "HOG", "column": "best"}
    for level in better["levels"]:
        level["metrics"][0]["values"] = [0.0, 0.0]
    published = [Published(panel="all", line="DP-GD", level=8.0, value=0.0)]
    with_other = with_other.model_copy(update={"published": published})
    found = dict(results) | {("all", "HOG", "best"): better}
    row = next(row for row in rows_of(with_other, found) if row.published is not None)
    assert row.beaten and not row.beaten_alike
    assert "| small | 1 |  | 0 | 1 | 0 |" in overview([(with_other, found)])
    assert "with the paper's own model misses 1 of 1 published values" in as_markdown(with_other, found)


def test_full_is_the_whole_grid_to_the_end_with_every_seed():
    line = small().lines[1].model_copy(update={"full": {"algorithm.step_size": [0.01, 0.1, 1.0]}})
    whole = small(lines=[line.model_dump()], claims=[]).fully()
    assert whole.lines[0].search == {"algorithm.step_size": [0.01, 0.1, 1.0]}
    assert whole.search.rungs == [] and whole.seeds == [0, 1]
    answer = CliRunner().invoke(app, ["reproduce", "diff2-fig1", "--quick", "--full"])
    assert answer.exit_code == 2 and "choose one" in answer.output


def test_nothing_is_run_twice_unless_its_description_changed(done, monkeypatch):
    experiment, results, out = done
    monkeypatch.setattr("silodp.reproduce.units.run_configs", lambda *a, **k: pytest.fail("ran again"))
    assert reproduce(experiment, out) == results
    with pytest.raises(pytest.fail.Exception, match="ran again"):
        reproduce(small(seeds=[0, 2]), out)


def test_two_lines_of_one_name_in_a_panel_are_refused():
    line = small().lines[0].model_dump()
    with pytest.raises(ValueError, match="two of its lines have one name"):
        small(lines=[line, line], claims=[], published=[])


def test_quick_leaves_out_what_it_is_told_to():
    quick = small(quick={"lines": ["DP-GD"], "levels": [8.0], "search_points": 1}).quickly()
    assert [line.name for line in quick.lines] == ["DP-GD"] and quick.level_values == [8.0]
    assert quick.seeds == [0] and quick.lines[0].search == {"algorithm.step_size": [1.0]}
    lines = [line.model_dump() | {"finalists": 3} for line in small().lines]
    assert all(line.finalists is None for line in small(lines=lines).quickly().lines)  # its own rungs say how many


def test_a_line_may_say_how_many_settings_go_to_the_final_runs():
    rungs = {"rungs": [{"rounds": 5, "keep": 6}, {"keep": 3}]}
    line = small().lines[0].model_dump()
    one, three = (
        next(iter(small(search=rungs, lines=[line | {"finalists": n}], claims=[], published=[]).units()))
        for n in (1, None)
    )
    assert [r.keep for r in one.rungs] == [6, 1] and [r.keep for r in three.rungs] == [6, 3]
    assert one.fingerprint != three.fingerprint


def test_one_column_alone_keeps_what_is_known_of_the_others(done, tmp_path):
    experiment, results, out = done
    assert reproduce(experiment, out, calibration="paper") == results
    with pytest.raises(ConfigError, match="small has no such runs"):
        reproduce(small(lines=[experiment.lines[0].model_dump()], claims=[], published=[]), out, calibration="paper")
    with pytest.raises(ConfigError, match="no results"):
        write_docs([experiment], tmp_path / "nothing", tmp_path / "docs")
    answer = CliRunner().invoke(app, ["reproduce", "diff2-fig1", "--docs"])
    assert answer.exit_code == 2 and "no name" in answer.output


def test_results_of_another_description_are_not_shown(done, tmp_path):
    _, results, _ = done
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "results.json").write_text(json.dumps(compact(results)))
    other = small().model_copy(update={"name": "other"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text(json.dumps(compact(results)))
    changed_lines = [line.model_dump() | {"search": {}} for line in small().lines]
    stale = small(lines=changed_lines)
    assert write_docs([stale, other], tmp_path, tmp_path / "docs") == ["small (2 runs)"]
    assert "Not run yet, or not as they are described now: small" in (tmp_path / "docs" / "reproduction.md").read_text()
    told = (tmp_path / "docs" / "reproduction" / "small.md").read_text()
    assert "Not run yet, or not as described now: all, DP-GD, paper's noise; all, DP-GD, exact noise." in told
    assert "(2 tried)" not in told


def test_the_settings_chosen_are_shown_and_marked_at_an_end_of_their_grid(done):
    experiment, results, _ = done
    assert "- DP-GD (2 tried): step_size 1\n" in as_markdown(experiment, results)  # of two values both are ends
    chosen = {"levels": [{"setting": {"algorithm.step_size": 1.0}}]}
    assert across_levels(chosen, "algorithm.step_size", [0.3, 1.0, 3.0]) == "step_size 1"
    assert across_levels(chosen, "algorithm.step_size", [0.1, 0.3, 1.0]) == "step_size 1\\*"


def test_the_table_says_what_was_published_and_what_we_found(done):
    experiment, results, out = done
    rows = rows_of(experiment, results)
    row = next(r for r in rows if r.line == "DP-GD" and r.level == 8.0 and r.published is not None)
    assert row.verdict == "better" and row.beaten
    assert row.best is not None and row.best.line == "DP-GD"  # a line without privacy is never the best
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "Privacy is free." in text and "| DP-GD | test error | 0.9 |" in text
    judgement = next(j for j in judgements(experiment, results) if j.column == "exact")
    assert len(judgement.gains) == 2


def test_runs_that_two_figures_share_are_timed_once(done):
    experiment, results, _ = done
    once, twice = (overview([(experiment, results)] * count).splitlines()[-1] for count in (1, 2))
    slow = {key: result | {"cpu_seconds": 600.0} for key, result in results.items()}
    assert once == twice and f"took {10 * len(slow):.1f} CPU minutes" in overview([(experiment, slow)] * 2)
    old = {key: {**result, "seconds": 600.0, "cpu_seconds": 0.0} for key, result in results.items()}
    assert f"took {10 * len(old):.1f} minutes by the clock" in overview([(experiment, old)])


def test_the_overview_tells_of_results_that_were_drawn_with_other_normals(done):
    experiment, results = done[:2]
    assert "the same law" not in overview([(experiment, results)])
    key = next(iter(results))
    older = results | {key: {name: value for name, value in results[key].items() if name != "normals"}}
    assert f"1 of {len(results)} were drawn before" in overview([(experiment, older)])


def test_the_overview_counts_values_reached_and_noise_that_is_too_small(done):
    experiment, results, _ = done
    assert "| small | 1 |  | 1 | 1 | 1 | 0 of 2 |" in overview([(experiment, results)])
    less = json.loads(json.dumps(results["all", "DP-GD", "paper"]))
    less["levels"][0]["epsilon"] = 1.5  # its claim is 1
    changed_results = dict(results) | {("all", "DP-GD", "paper"): less}
    better = small(published=[{"panel": "all", "line": "DP-GD", "level": 8.0, "value": 0.0}])
    assert "| small | 1 |  | 0 | 0 | 0 | 1 of 2 |" in overview([(better, changed_results)])
    assert "| small | none |  |  |  |  | 0 of 2 |" in overview([(small(published=[]), results)])


def test_without_published_values_the_levels_stand_side_by_side(done):
    _, results, _ = done
    lines = as_markdown(small(published=[]), results).splitlines()
    assert "| all: test error | 1 | 8 |" in lines and "| all: loss | 1 | 8 |" in lines
    paper = next(line for line in lines if line.startswith("| DP-GD, paper's noise |"))
    epsilons = [level["epsilon"] for level in results["all", "DP-GD", "paper"]["levels"]]
    assert all(f"[{rounded_up(epsilon, 3)}]" in paper for epsilon in epsilons)
    assert lines.count("| best of silodp | DP-GD | DP-GD |") == 2


def test_the_page_is_written_from_results_and_again_from_itself(done, tmp_path):
    experiment, results, _ = done
    root = tmp_path / "runs"
    (root / "small").mkdir(parents=True)
    (root / "small" / "results.json").write_text(json.dumps(compact(results)))
    assert write_docs([experiment], root, tmp_path / "docs") == []
    page = (tmp_path / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert write_docs([experiment], tmp_path / "nothing", tmp_path / "docs") == []
    assert (tmp_path / "docs" / "reproduction.md").read_text(encoding="utf-8") == page
    assert (tmp_path / "docs" / "reproduction" / "small.png").is_file()
    assert load_results(tmp_path / "docs" / "reproduction" / "small.json").keys() == results.keys()


def test_the_authors_way_is_a_run_of_its_own_and_never_the_best():
    line = small().lines[-1].model_dump() | {
        "columns": ["exact", "authors"], "authors": {"privacy.epsilon": "none"}, "authors_seeds": 1,
    }  # fmt: skip
    units = {unit.column: unit for unit in small(lines=[line], claims=[]).units()}
    assert units["exact"].search and not units["authors"].search
    assert len(units["authors"].seeds) == 1 < len(units["exact"].seeds)
    assert "epsilon" not in units["authors"].tree(0)["privacy"]
    metric = Metric(column="test_error", label="test error")
    cells = {"authors": Cell("DP-GD", (0.2, 0.3), None), "exact": Cell("DP-GD", (0.4, 0.4), 1.0)}
    told = lambda value: Row("all", 1.0, "DP-GD", metric, value, cells, None).reproduced
    assert (told(0.25), told(0.2), told(0.1), told(0.6)) == ("match", "within the seeds' spread", "miss", "miss")


def test_verdicts():
    experiment = small()
    error = experiment.metrics[0]
    assert [judged(d, error) for d in (0.005, -0.2, 0.2, float("nan"))] == ["match", "better", "worse", "diverged"]
    worse = Row("all", 1.0, "DP-GD", error, 0.1, {"exact": Cell("DP-GD", (0.2, 0.3), 1.0)}, Cell("DP-GD", (0.05,), 1.0))
    assert worse.verdict == "worse" and worse.beaten and worse.difference == pytest.approx(0.15)
    spread = Row("all", 1.0, "DP-GD", error, 0.2, {"exact": Cell("DP-GD", (0.1, 0.35), 1.0)}, None)
    assert spread.verdict == "worse, within the seeds' spread"
    assert p_value(np.array([1.0, 1.1, 0.9]), np.array([2.0, 2.3, 2.1])) < 0.05


def test_a_claim_holds_only_where_the_difference_is_more_than_chance():
    claim = small().claims[0]
    assert Judgement(claim, "exact", (0.1, 0.2), (0.01, 0.02)).verdict == "holds"
    assert Judgement(claim, "exact", (0.1, 0.2), (0.01, 0.5)).verdict == "holds in the mean, not significantly"
    assert Judgement(claim, "exact", (0.1, -0.2), (0.01, 0.99)).verdict == "holds in 1 of 2"
    assert Judgement(claim, "exact", (0.0, -0.1), (0.9, 0.99)).verdict == "does not hold"  # a tie is no gain
    assert Judgement(claim, "exact", (0.1,), (float("nan"),)).verdict == "holds in the mean, not tested"
    assert Judgement(claim, "exact", (0.1, -0.1), (float("nan"),) * 2).verdict == "holds in 1 of 2, not tested"


def test_places_where_the_better_side_is_another_algorithm_are_told_apart():
    lines = [{"name": name} for name in ("A", "B")]
    claim = {"text": "A wins", "better": ["A"], "than": ["B"], "unless": {"algorithm.restart": 1}}
    better, worse = run_with([0.1, 0.11, 0.13], [0.5, 0.5, 0.51]), run_with([0.2, 0.21, 0.22], [0.6, 0.6, 0.62])

    def told(*restarts, by=claims_told):
        panels = [f"p{i}" for i in range(len(restarts))]
        results = {(panel, "B", "exact"): worse for panel in panels}
        for panel, restart in zip(panels, restarts, strict=True):
            level = better["levels"][0] | {"setting": {"algorithm.restart": restart}}
            results[panel, "A", "exact"] = {"line": "A", "levels": [level]}
        shown = [{"name": panel} for panel in panels]
        experiment = small(lines=lines, panels=shown, claims=[claim], published=[], levels=None)
        return by([(experiment, results)])

    assert "holds in 2 of 2 places (1 of these 2 and 1 of all 2 at restart 1; p < 0.05 in 2 of 2" in told(1, 4)
    assert "0 of these 1 and 0 of all 1 at restart 1" in told(2)
    apart = "The search chose restart 1 for A in 1 of 3 places. In the other 2, A by itself beats B in 2 (exact noise)."
    assert told(4, 1, 2, by=chosen_apart) == apart


def test_a_number_that_the_paper_prints_twice_counts_once(done):
    experiment, results, _ = done
    other = experiment.model_copy(update={"name": "other"})
    once = published_once([(experiment, results)])
    assert once and published_once([(experiment, results), (other, results)]) == once
    moved = [p.model_copy(update={"value": p.value + 1}) for p in experiment.published]
    other = other.model_copy(update={"published": moved})
    assert len(published_once([(experiment, results), (other, results)])) == 2 * len(once)


def test_claims_judged_again_are_not_counted_twice():
    lines = [{"name": name} for name in ("A", "B")]
    claim = {"text": "A wins.", "better": ["A"], "than": ["B"]}
    wins = {("all", "A", "exact"): run_with([0.1], [0.5]), ("all", "B", "exact"): run_with([0.2], [0.6])}
    loses = {("all", "A", "exact"): run_with([0.3], [0.5]), ("all", "B", "exact"): run_with([0.2], [0.6])}
    once = small(lines=lines, claims=[claim], published=[], levels=None)
    again = once.model_copy(update={"again": "tuned anew"})
    sections = [(once, wins), (again, loses)]
    assert verdict(sections) == "Of 1 claims 1 hold everywhere, 0 in some places and 0 nowhere."
    assert "| A wins. |  | holds in 1 of 1 places |" in claims_told(sections)
    assert "| A wins (tuned anew). |  | holds in 0 of 1 places |" in claims_told(sections)


def test_the_authors_own_way_misses_what_it_does_not_give_again():
    """Also where it is better: the program that made the figure should give the figure."""
    accuracy = Metric(column="test_accuracy", label="accuracy", tolerance=0.02)
    row = lambda value: Row("all", None, "CDP", accuracy, 0.68, {"authors": Cell("CDP", (value,), None)}, None)
    assert row(0.69).reproduced == "match" and row(0.7414).reproduced == row(0.6).reproduced == "miss"
    assert miss("fig", row(0.7414)) == "CDP in fig: 0.741 for 0.68"


def test_two_seeds_are_too_few_for_a_test():
    first, second = np.array([0.1, 0.11, 0.12]), np.array([0.2, 0.21, 0.221])
    assert p_value(first, second) < 0.01
    assert np.isnan(p_value(first[:2], second[:2]))


def run_with(errors, losses, bits=(0.0, 1.0)):
    """A unit's result whose curves fall in a straight line from 1 to the last value."""
    metric = lambda values: {"values": values, "mean": [1.0, float(np.mean(values))]}
    level = {"level": None, "epsilon": 1.0, "bits_up": list(bits), "metrics": [metric(errors), metric(losses)]}
    return {"line": "", "levels": [level]}


def test_a_side_of_several_lines_is_chosen_as_a_search_would_choose():
    """By the training loss: the form that happens to have the lower test error is not to be known."""
    lines = [{"name": name} for name in ("A", "B", "C")]
    claim = {"text": "A or B is better than C", "better": ["A", "B"], "than": ["C"]}
    results = {
        ("all", "A", "exact"): run_with([0.1, 0.11, 0.13], [0.5, 0.5, 0.51]),
        ("all", "B", "exact"): run_with([0.3, 0.3, 0.31], [0.4, 0.4, 0.41]),
        ("all", "C", "exact"): run_with([0.2, 0.21, 0.22], [0.6, 0.6, 0.62]),
    }
    verdict = lambda **more: (
        judgements(small(lines=lines, claims=[claim | more], published=[], levels=None), results)[0].verdict
    )
    assert verdict() == "does not hold"
    assert verdict(metric=1) == "holds"
    assert verdict(each=True) == "does not hold"  # B is worse than C
    assert verdict(better=["A"], each=True) == "holds"


def test_a_line_that_diverged_loses():
    lines = [{"name": name} for name in ("A", "B", "C")]
    claim = {"text": "A and B are better than C", "better": ["A", "B"], "than": ["C"], "each": True}
    fine, lost = run_with([0.1, 0.11, 0.13], [0.5, 0.5, 0.51]), run_with([0.1, 0.11, 0.13], [0.5, 0.5, 0.51])
    lost["levels"][0]["metrics"][0]["values"] = [0.1, 0.11, None]
    place = lambda name: ("all", name, "exact")
    verdict = lambda **runs: (
        judgements(
            small(lines=lines, claims=[claim], published=[], levels=None),
            {place(name): run for name, run in runs.items()},
        )[0].verdict
    )
    worse = run_with([0.2, 0.22, 0.24], [0.6, 0.6, 0.62])
    assert verdict(A=fine, B=fine, C=worse) == "holds"
    assert verdict(A=fine, B=lost, C=worse) == "does not hold, not tested"
    assert verdict(A=fine, B=fine, C=lost) == "holds in the mean, not tested"


def test_a_claim_per_bit_compares_where_both_have_sent_the_same():
    lines = [{"name": name} for name in ("small", "large")]
    claim = {"text": "small messages win", "better": ["small"], "than": ["large"]}
    results = {
        ("all", "small", "exact"): run_with([0.48, 0.5, 0.52], [0.5, 0.5, 0.52], bits=(0.0, 1.0)),
        ("all", "large", "exact"): run_with([0.19, 0.2, 0.21], [0.2, 0.2, 0.23], bits=(0.0, 20.0)),
    }
    judged_as = lambda **more: judgements(
        small(lines=lines, claims=[claim | more], published=[], levels=None), results
    )[0]
    assert judged_as().verdict == "does not hold"
    assert judged_as(per_bit=True).verdict == "holds in the mean, not tested"
    assert judged_as(per_bit=True).gains[0] == pytest.approx(1 - 0.5 / 0.96)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="unknown; known"):
        load_experiment("diff3-fig1")
    with pytest.raises(ValueError, match=r"published\.0\.line = 'DP-DG': no such line; known: GD, DP-GD"):
        small(published=[{"panel": "all", "line": "DP-DG", "value": 1.0}])
    assert CliRunner().invoke(app, ["reproduce", "nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["reproduce", "mu2-table1", "--calibration", "loose"]).exit_code == 2
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in WANTED)


def test_helpers():
    assert thinned([1, 2, 3, 4, 5], 3) == [1, 3, 5] and thinned([1, 2, 3], 1) == [2]
    assert changed({"a": {"b": 1}}, {"a.b": "none", "a.c": 2}) == {"a": {"c": 2}}
