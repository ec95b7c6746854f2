"""What cannot run is refused before anything does: file, place, value, and what would be right."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.data.datasets import DATASETS
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.reproduce import load_experiment, names
from silodp.reproduce.checks import WITH_TEST_RECORDS, check, measured
from silodp.reproduce.driver import reproduce
from silodp.reproduce.experiment import Experiment
from tests.test_reproduce import small

LAST = "panel 'all', line 'last', column exact"


def with_last(line: dict | None = None, config: dict | None = None, **changes) -> Experiment:
    """The small experiment with one more line at the end, and keys of its config changed."""
    tree = small().model_dump()
    options = copy.deepcopy(tree["config"])
    for key, value in (config or {}).items():
        section, _, name = key.partition(".")
        options.setdefault(section, {})[name] = value
    last = {"name": "last", "columns": ["exact"], "set": {"algorithm.name": "dp-gd", "algorithm.clip": 1.0}}
    last |= {
        key: last.get(key, {}) | value if isinstance(value, dict) else value for key, value in (line or {}).items()
    }
    return small(lines=[*tree["lines"], last], config=options, **changes)


def put(**values):
    return {"set": {key.replace("__", "."): value for key, value in values.items()}}


PSGM = put(algorithm__name="mb-psgm-fg", algorithm__clip_difference=1.0, algorithm__momentum=0.1)
FIRST = "panel 'all', line 'GD', column exact: "
PUBLISHED = "panel 'all', line 'last', column paper, epsilon 1: "
MISTAKES = {  # of a line, of the config, and what is said
    "algorithm": (
        put(algorithm__name="dp-gdd"),
        {},
        f"{LAST}, epsilon 1: algorithm.name = 'dp-gdd': unknown (did you mean dp-gd?); known:",
    ),
    "key": (put(algorithm__stepsize=1.0), {}, "algorithm.stepsize: unknown key (did you mean step_size?); known: name"),
    "section": (put(algoritm__clip=1.0), {}, "algoritm: unknown key (did you mean algorithm?); known: data, model"),
    "no dot": ({"set": {"clip": 1.0}}, {}, f"{LAST}, epsilon 1: 'clip': write section.key"),
    "value": (put(algorithm__rounds=0), {}, "algorithm.rounds = 0: must be a finite number at least 1"),
    "unused": (put(algorithm__momentum=0.1), {}, "algorithm.momentum = 0.1: dp-gd does not use it"),
    "missing": (put(algorithm__clip="none"), {}, "algorithm.clip is missing: dp-gd needs it"),
    "prox": (put(algorithm__prox="l3"), {}, "algorithm.prox"),
    "compressor": (
        put(algorithm__compressor="randk"),
        {},
        "algorithm.compressor = 'randk': unknown (did you mean rand-k?)",
    ),
    "kind": (put(model__kind="logitic"), {}, "model.kind = 'logitic': unknown (did you mean logistic?); known: linear"),
    "activation": (put(model__activation="rellu"), {}, "model.activation = 'rellu': unknown; known: softplus"),
    "loss": (put(model__loss="square"), {}, "model.loss = 'square': unknown; known: squared, cross-entropy"),
    "dataset": ({}, {"data.source": "wbdc"}, FIRST + "data.source = 'wbdc': no such file, and no dataset: wbcd, "),
    "files": ({}, {"data.source": ["a.csv"]}, "data.source = 'a.csv': no such file"),
    "no data": ({}, {"data.source": None}, "data.source is missing"),
    "partition": ({}, {"data.partition": "idd"}, "data.partition = 'idd': unknown; known: iid, by-label"),
    "step": ({}, {"data.preprocess": ["standardize"]}, "preprocess step 'standardize': unknown; need one of flatten, "),
    "one-hot": ({}, {"data.preprocess": ["one-hot"]}, "preprocess step 'one-hot': name the columns"),
    "select": ({}, {"sweep.select": "test_error"}, "sweep.select = 'test_error': unknown; known: round, objective"),
    "point": (
        {"search": {"algorithm.clip": [1.0, -1.0]}},
        {},
        f"{LAST}, epsilon 1, algorithm.clip = -1.0: algorithm.c",
    ),
    "name in a search": ({"search": {"algorithm.name": ["dp-gd", "x"]}}, {}, "algorithm.name = 'x': unknown; known:"),
    "data in a search": ({"search": {"data.silos": [2, 4]}}, {}, f"{LAST}, epsilon 1: data.silos: a search and levels"),
    "empty search": ({"search": {"algorithm.clip": []}}, {}, "search: algorithm.clip = []: give at least one value"),
    "seeds": ({"search": {"run.seed": [1, 2]}}, {}, "search: run.seed = [1, 2]: settings are run with the experiment"),
    "model by level": ({"by_level": {"model.bias": [True, False]}}, {}, "model.bias: a search and levels vary keys of"),
    "level": ({"by_level": {"algorithm.rounds": [5, 0]}}, {}, f"{LAST}, epsilon 8: algorithm.rounds = 0: must be"),
    "paper": (PSGM | {"columns": ["paper"]}, {}, PUBLISHED + "privacy.calibration = 'paper': no paper prints one"),
    "published": (
        {"columns": ["paper"], "paper": {"algorithm.nmae": 1}},
        {},
        PUBLISHED + "algorithm.nmae: unk",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_any_unit_is_found_before_the_first_runs(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr("silodp.reproduce.driver.run_unit", lambda *a, **k: pytest.fail("ran"))
    line, config, words = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=re.escape(words)) as refusal:
        reproduce(with_last(line, config), tmp_path / "out")
    assert str(refusal.value).startswith("experiment small: panel 'all', line ")
    assert not (tmp_path / "out").exists()


def test_what_is_right_is_not_refused():
    check(small())
    check(with_last({"search": {"algorithm.clip": [0.1, 1.0], "algorithm.momentum": ["none"]}}))
    check(with_last({"set": {"model.kind": "models:mine"}}))
    left_out = put(algorithm__name="mu2", algorithm__diameter=1.0, algorithm__step_size="none")
    check(with_last(left_out))  # a theorem may choose it, once the sizes are known
    check(with_last(put(algorithm__theory=True, algorithm__smoothness=1.0, algorithm__step_size="none")))


@pytest.mark.parametrize("name", [name for name in names() if any(line.full for line in load_experiment(name).lines)])
def test_the_whole_grids_of_the_papers_can_run(name):
    check(load_experiment(name).fully())


COLUMNS = {
    "accuracy of a number": ({"model.kind": "linear"}, "test_accuracy"),
    "error of a number": ({"model.kind": "mlp", "model.hidden": [2], "model.loss": "squared"}, "test_error"),
    "by the dataset": ({"data.source": "california", "model.kind": "mlp"}, "test_accuracy"),
    "by the task": ({"data.source": "pyproject.toml", "data.task": "regression", "model.kind": "mlp"}, "test_accuracy"),
    "mse of classes": ({"model.kind": "softmax"}, "test_mse"),
    "no test records": ({"data.test": None}, "test_loss"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_that_is_never_measured_is_refused(case, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    config, column = COLUMNS[case]
    metrics = [{"column": "objective", "label": "loss"}, {"column": column, "label": "x"}]
    with pytest.raises(ConfigError, match=f"metrics.1.column = '{column}': never measured here; measured: round, obj"):
        check(with_last({}, config, metrics=metrics))
    with pytest.raises(ConfigError, match=f"search.column = '{column}': never measured here"):
        check(with_last({}, config, metrics=metrics[:1], claims=[], search={"column": column}))


def test_a_column_that_the_records_decide_is_not_refused():
    for column in ("test_accuracy", "test_mse"):
        metrics = [{"column": column, "label": "x"}]
        check(with_last({}, {"model.kind": "models:mine"}, metrics=metrics, claims=[]))
    check(with_last({}, {"data.source": "mnist", "data.test": None}))  # comes with test records


def records(task: str) -> silodp.FederatedData:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 2, 40) if task == "classification" else rng.normal(size=40)
    return silodp.load_data((rng.normal(size=(40, 3)), targets), 2, task=task, test=0.2)


@pytest.mark.parametrize(("task", "kind"), [("classification", "logistic"), ("regression", "linear")])
def test_the_columns_are_those_of_a_history(task, kind, tmp_path):
    tree = {
        "data": {"task": task, "test": 0.2},
        "model": {"kind": kind},
        "algorithm": {"name": "gd", "rounds": 1, "step_size": 0.1},
    }
    history = silodp.train(tree, data=records(task), out=tmp_path / "run").history
    assert set(history[-1]) == {*measured(parse_config(tree))} - {"test_error"}


@pytest.mark.skipif("SILODP_DATA" not in os.environ, reason="needs the datasets")
def test_which_datasets_come_with_test_records():
    for name, dataset in DATASETS.items():
        files = [Path(os.environ["SILODP_DATA"]) / file for file in dataset.files]
        parts = [part for file in files for part in (file.name, *np.load(file).files)]
        assert (name in WITH_TEST_RECORDS) == any("test" in part for part in parts), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": [{"column": "test_acuracy", "label": "x"}]}, "metrics.0.column"),
        (
            {"published": [{"panel": "al", "line": "GD", "level": 8.0, "value": 1}]},
            "published.0.panel = 'al': no such pan",
        ),
        (
            {"published": [{"panel": "all", "line": "GD", "level": 2.0, "value": 1}]},
            "level = 2.0: no such level; known: 1",
        ),
        ({"published": [{"panel": "all", "line": "GD", "value": 1}]}, "published.0.level = None: no such level"),
        (
            {"claims": [{"text": "", "better": ["DPGD"], "than": []}]},
            "claims.0.better = 'DPGD': no such line; known: GD",
        ),
        (
            {"claims": [{"text": "", "better": [], "than": ["G"]}]},
            "claims.0.than = 'G': no such line; known: GD, DP-GD",
        ),
        ({"claims": [{"text": "", "better": [], "than": [], "metric": 2}]}, "metric = 2: no such metric; known: 0, 1"),
        ({"only": ["al"]}, "only = 'al': no such panel; known: all"),
        ({"quick": {"panels": ["al"]}}, "quick.panels = 'al': no such panel; known: all"),
        ({"quick": {"lines": ["G"]}}, "quick.lines = 'G': no such line; known: GD, DP-GD"),
        ({"quick": {"levels": [3.0]}}, "quick.levels = 3.0: no such level; known: 1.0, 8.0"),
        (
            {"panels": [{"name": "all"}, {"name": "b"}], "only": ["b"], "quick": {"panels": ["all"]}},
            "leaves none of them",
        ),
        ({"panels": [{"name": "all"}, {"name": "all"}]}, "two are called 'all'"),
        (
            {"levels": {"values": [1.0]}, "lines": [{"name": "GD", "by_level": {"a.b": [1, 2]}}]},
            "a.b has 2 values; need 1",
        ),
    ],
)
def test_names_of_the_experiments_own_parts_are_looked_up(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        small(**({"published": [], "claims": []} | changes))


def test_an_unknown_panel_of_a_line_is_named():
    for key, value in (("by_panel", {"al": {}}), ("panels", ["al"])):
        with pytest.raises(ValueError, match=f"line 'last': {key} = 'al': no such panel; known: all"):
            with_last({key: value})


def test_the_command_names_the_file_and_writes_nothing(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "spider-fig8"\n[config.data]\npartition = "by-clas"\n')
    answer = CliRunner().invoke(app, ["reproduce", str(file), "--quick", "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"experiment {file}: panel 'R = 25', line 'MB-SGD', column paper, epsilon 3" in answer.output
    file.write_text('extends = "spider-fig8"\n[search]\ncolumn = "test_acuracy"\n')
    answer = CliRunner().invoke(app, ["reproduce", str(file)])
    assert answer.exit_code == 2 and f"experiment {file}: search.column = 'test_acuracy': " in answer.output
    assert "'test_accuracy'" in answer.output
