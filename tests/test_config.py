"""A mistake in a config is one line that names the key, the value and what would be right; nothing is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.config import Config
from silodp.data import FederatedData
from silodp.errors import ConfigError
from silodp.parse import load_config, parse_config, to_toml, toml_value, with_overrides
from silodp.run.prepare import prepare
from tests.conftest import made_data, write_silos

SPIDER: dict[str, Any] = {"name": "spider", "rounds": 4, "step_size": 0.1, "clip": 1.0, "clip_difference": 1.0}
GOOD: dict[str, Any] = {"privacy": {"epsilon": 1.0}, "algorithm": SPIDER | {"restart": 2}}


def refusal(*changes: str, tree: dict[str, Any] = GOOD, data: FederatedData | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(parse_config(with_overrides(tree, list(changes))), data or made_data())
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("privacy.epsilo=1", "privacy.epsilo: unknown key (did you mean epsilon?); known: trust, epsilon, delta"),
        ("privac.epsilon=1", "privac: unknown key (did you mean privacy?)"),
        ("privacy.epsilon=-1", "privacy.epsilon = -1: must be a finite number greater than 0"),
        ("privacy.epsilon=0", "privacy.epsilon = 0: must be a finite number greater than 0"),
        ("privacy.epsilon=nan", "privacy.epsilon = nan: must be a finite number greater than 0"),
        ("privacy.epsilon=inf", "privacy.epsilon = inf: must be a finite number greater than 0"),
        ("privacy.epsilon=true", "privacy.epsilon = True: true and false are for switches"),
        ("privacy.epsilon=three", "privacy.epsilon = 'three': must be a valid number"),
        ("privacy.delta=0", "privacy.delta = 0: must be a finite number greater than 0 and less than 1"),
        ("privacy.delta=1", "privacy.delta = 1: must be a finite number greater than 0 and less than 1"),
        ("privacy.delta=nan", "privacy.delta = nan: must be a finite number greater than 0 and less than 1"),
        (
            "privacy.trust=anyone",
            "privacy.trust = 'anyone': unknown; known: trusted, untrusted, aggregated, shuffled, or",
        ),
        ("privacy.gdp=1.0", "privacy: epsilon and gdp are given together; give one of them"),
        ("privacy.split=2.0", "privacy.split = 2.0: give a share between 0 and 1, or 'optimal'"),
        ("privacy.split=nan", "privacy.split = nan: must be a finite number or 'optimal'"),
        ("algorithm.name=spyder", "algorithm.name = 'spyder': unknown (did you mean spider?); known: auto, gd, dp-gd"),
        ("algorithm.rounds=0", "algorithm.rounds = 0: must be a finite number at least 1"),
        ("algorithm.rounds=1.5", "algorithm.rounds = 1.5: must be a valid integer"),
        ("algorithm.clip=inf", "algorithm.clip = inf: must be a finite number at least 1e-18 and at most 1e+18"),
        ("algorithm.step_size=-1", "algorithm.step_size = -1: must be a finite number greater than 0"),
        ("algorithm.batch=1000", "algorithm.batch = 1000 exceeds the 25 records of silo 'silo 1'; give at most 25"),
        ("algorithm.participation=4", "algorithm.participation = 4 exceeds the 3 silos"),
        ("algorithm.momentum=0.5", "algorithm.momentum = 0.5: spider does not use it; leave it out"),
        ("algorithm.sampling=fixed", "algorithm: sampling = 'fixed' has no effect without a batch"),
        ("algorithm.schedule=fixed", "algorithm: schedule = 'fixed' has no effect when all silos take part"),
        ("algorithm.stepsize=1.0", "algorithm.stepsize: unknown key (did you mean step_size?)"),
        ("algorithm.keep=3", "algorithm: keep = 3 has no effect without compressor = 'rand-k'"),
        ("algorithm.shifted=true", "algorithm: shifted has no effect without a compressor"),
        ("algorithm.prox=3", "algorithm.prox = 3: must be a valid string or a valid dictionary"),
        ("algorithm.prox={kind='l1', strength=[1]}", "algorithm.prox.strength = [1]: must be a valid"),
        ("algorithm.prox=l1", "algorithm.prox 'l1': got options (), needs exactly (strength)"),
        ("run.seed=-1", "run.seed = -1: must be a finite number at least 0"),
        ("run.test_seed=true", "run: test_seed = true has no effect in a simulation"),
        ("model.kind=tree", "model.kind = 'tree': unknown; known: linear, ridge, logistic, softmax, mlp"),
        ("model.kind=linear", "model.kind: 'linear' predicts one number; use logistic, softmax or mlp for classes"),
        ("model.kind=nowhere:build", "model.kind = 'nowhere:build': cannot be imported"),
        ("model.kind=builtins:str", "model.kind = 'builtins:str': gave a str; must give a silodp.Model"),
        ("model.hidden=[5]", "model.hidden: (5,) widths: an mlp needs at least one, other kinds have none"),
        ("data.source=3", "data.source = 3: must be a valid string or a valid list"),
        ("data.sizes=[3, 'four']", "data.sizes.1 = 'four': must be a valid integer"),
        ("epsilon=3", "--set 'epsilon=3': write section.key=value"),
    ],
)
def test_a_wrong_value_is_named(change, told):
    assert told in refusal(change)


def test_both_missing_and_conflicting_options_are_named():
    without = {k: v for k, v in GOOD["algorithm"].items() if k != "clip"}
    assert refusal(tree={**GOOD, "algorithm": without}) == "algorithm.clip is missing: spider needs it"
    assert "gd adds no noise" in refusal(tree={**GOOD, "algorithm": {"name": "gd", "step_size": 1.0}})
    local = {"name": "local-sgd", "step_size": 1.0, "clip": 1.0, "local_steps": 2}
    told = refusal(tree={"privacy": {"epsilon": 1.0, "trust": "trusted"}, "algorithm": local})
    assert told == "privacy.trust = 'trusted': local-sgd runs under untrusted or aggregated"
    told = refusal("algorithm.sampling=one-pass", "algorithm.rounds=100")
    assert "algorithm.rounds = 100: one pass uses each record once" in told
    assert "must be a section" in refusal("privacy.epsilon=1", tree={"privacy": 3})


def test_an_infinite_clip_is_not_a_way_around_noise():
    """Without a target a run may do without a clip; with one it may not."""
    assert "algorithm.clip" in refusal("algorithm.clip=inf")
    told = refusal(tree={"privacy": {"epsilon": 1.0}, "algorithm": {"name": "dp-gd", "step_size": 1.0}})
    assert told == "algorithm.clip is missing: dp-gd needs it"


def test_multipliers_are_checked_against_the_streams():
    tree = {"privacy": {"multipliers": {"value": 1.0}}, "algorithm": GOOD["algorithm"]}
    assert "difference is missing; this run releases value, difference" in refusal(tree=tree)
    tree = {"privacy": {"multipliers": {"value": 0.0}}, "algorithm": GOOD["algorithm"]}
    assert "value = 0.0: give a positive number" in refusal(tree=tree)


@pytest.mark.parametrize(
    "value", ['a "quoted" \\ word', 3, 0.1, 1e-7, True, [1, 2], ["a", "b"], {"kind": "l1", "x": 2.5}]
)
def test_toml_literals_read_back(value):
    from silodp.parse import toml_literal

    assert toml_value(toml_literal(value)) == value


def test_a_written_config_is_the_same_config(tmp_path):
    tree = {
        "data": {"source": ["a.csv", "b.csv"], "test": 0.25, "classes": ["x", 1]},
        "model": {"kind": "mlp", "hidden": [8, 4], "activation": "tanh"},
        "privacy": {"multipliers": {"value": 2.0, "difference": 3.5}, "delta": 1e-7},
        "algorithm": GOOD["algorithm"] | {"prox": {"kind": "l1", "strength": 0.5}},
        "run": {"seed": 7},
        "sweep": {"grid": {"algorithm.step_size": [0.1, 1.0]}},
    }
    config = parse_config(tree)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file) == config
    assert 'name = "spider"' in to_toml(Config())  # also what was left at its default


def test_overrides_do_not_touch_the_original():
    tree = {"privacy": {"epsilon": 1.0}}
    changed = with_overrides(tree, ["privacy.epsilon=2", "run.output=elsewhere"])
    assert changed == {"privacy": {"epsilon": 2}, "run": {"output": "elsewhere"}}
    assert tree == {"privacy": {"epsilon": 1.0}}
    assert math.isnan(with_overrides({}, ["privacy.epsilon=nan"])["privacy"]["epsilon"])


# --- the same through the command line: exit code 2, one line, nothing written -----------------------


def break_column(folder: Path) -> None:
    file = folder / "silo1.csv"
    file.write_text(file.read_text().replace("f0", "other", 1))


def break_label(folder: Path) -> None:
    file = folder / "silo1.csv"
    file.write_text(file.read_text().replace("well", "who knows", 1))


def keep_lines(count: int):
    def keep(folder: Path) -> None:
        file = folder / "silo1.csv"
        file.write_text("\n".join(file.read_text().splitlines()[:count]) + "\n")

    return keep


def nothing(folder: Path) -> None:
    del folder


@pytest.mark.parametrize(
    ("damage", "change", "told"),
    [
        (nothing, "privacy.epsilon=-1", "privacy.epsilon = -1"),
        (nothing, "algorithm.batch=99", "algorithm.batch = 99 exceeds"),
        (nothing, "data.target=outcom", "target = 'outcom' is not a column; there are: f0"),
        (nothing, "data.source=nowhere", "'nowhere': no such file or folder, and no dataset"),
        (nothing, "data.source=nowhere.csv", "nowhere.csv: no such file"),
        (nothing, "data.classes=['ill', 'fine']", "has an unknown label; need one of ill, fine"),
        (nothing, "data.test=2.0", "2.0"),
        (nothing, "data.preprocess=['standardize']", "preprocess step 'standardize': unknown; need one of"),
        (break_column, "run.seed=1", "silo1.csv: compared with"),
        (break_label, "data.classes=['ill', 'well']", "silo1.csv: record"),
        (keep_lines(1), "run.seed=1", "silo1.csv: no feature columns or no records"),
        (keep_lines(2), "run.seed=1", "silo 'silo1' has 1 training record(s); needs 2"),
    ],
)
def test_the_command_line_refuses_in_one_line(damage, change, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_silos(tmp_path, GOOD)
    damage(tmp_path / "silos")
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["run", str(config), "--set", change])
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_or_broken_file_is_one_line(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = ")
    for file, told in ((tmp_path / "none.toml", "does not exist"), (broken, "not valid TOML")):
        result = CliRunner().invoke(app, ["run", str(file)])
        assert result.exit_code == 2
        assert told in result.stderr
        assert result.stderr.strip().count("\n") == 0
