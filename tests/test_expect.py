"""`silodp plan`: what would be run, and what other trust models would buy."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.parse import parse_config
from silodp.plan import landscape, made_up
from silodp.plan.expect import expectations
from silodp.plan.make import make_plan
from silodp.show import by_choice

TREE = {
    "data": {"silos": 4, "records": 500},
    "model": {"parameters": 9},
    "privacy": {"epsilon": 1.0},
    "algorithm": {"name": "auto"},
}


def test_noise_is_that_of_the_plan_and_a_trusted_server_needs_less():
    told = expectations(parse_config(TREE))
    assert told["chosen"]["name"] == "dp-gd" and told["whiten"]["moment"] == "full" and told["whiten"]["share"] == 0.05
    assert len(told["why"]) == 5
    for word, why in zip(("second moment", "stay short", "broken lines"), told["why"], strict=False):
        assert word in why
    relative = {row["trust"]: row["relative"] for row in told["trust"]}
    assert relative["untrusted"] == 1
    assert relative["trusted"] == pytest.approx(1 / math.sqrt(4), rel=1e-3)
    assert relative["trusted"] < relative["shuffled"] < 1.1 * relative["trusted"]  # sums of coins


def test_lengths_grow_with_the_numbers_in_a_release():
    from silodp.plan.expect import known_facts, length

    config = parse_config(TREE)
    plan = make_plan(config, known_facts(config))
    assert length(plan, "value") == pytest.approx(3 * plan.std_of_average("value"))


def test_the_command_tells_it_and_refuses_a_run_without_a_target(tmp_path):
    from silodp.parse import to_toml

    file = tmp_path / "config.toml"
    file.write_text(to_toml(parse_config(TREE)), encoding="utf-8")
    told = CliRunner().invoke(app, ["plan", str(file)])
    assert told.exit_code == 0 and "5% of the budget" in told.output and "trusted" in told.output
    assert json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).output)["silos"] == 4
    file.write_text(to_toml(parse_config(TREE | {"privacy": {}})), encoding="utf-8")
    refused = CliRunner().invoke(app, ["plan", str(file)])
    assert refused.exit_code == 2


def test_numbers_alone_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(made_up, "DRAWS", 2)
    monkeypatch.setattr(landscape, "EPSILONS", (0.25, 1.0, 8.0))
    monkeypatch.setattr(landscape, "OTHER_SILOS", (10, 50))
    picture = tmp_path / "plan.png"
    asked = ["plan", "--records", "5000", "--silos", "4", "--features", "30", "--figure", str(picture), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["records"], told["silos"], told["parameters"]) == (5000, 4, 31) and told["chosen"]["name"] == "dp-gd"
    nu = told["landscape"]["nu"]
    at_one = told["landscape"]["epsilons"].index(1.0)
    mu = 0.26805  # of (1, 1e-5)
    assert nu["trusted, 4 silos"][at_one] == pytest.approx(2 * math.sqrt(31) / (5000 * mu), rel=0.02)
    assert nu["untrusted, 4 silos"][at_one] == pytest.approx(2 * nu["trusted, 4 silos"][at_one], rel=1e-3)
    assert nu["untrusted, 50 silos"][at_one] > nu["untrusted, 10 silos"][at_one] > nu["untrusted, 4 silos"][at_one]
    assert all(row == sorted(row, reverse=True) for row in nu.values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    noise = {row["stream"]: row["length"] for row in told["noise"]}
    assert noise["moment"] > noise["centre"] * 0.5  # of 31 x 31 numbers, not of one feature
    check_errors(told["error"])


def check_errors(found):
    means = {name: [each["mean"] for each in row] for name, row in found["lines"].items()}
    assert all(0.189 < each[-1] < each[0] < 0.5 for each in means.values())
    strict = {name: row[0] for name, row in means.items()}
    assert strict["trusted, 4 silos"] < strict["aggregated, 4 silos"] < strict["untrusted, 4 silos"]
    assert strict["untrusted, 4 silos"] < strict["untrusted, 10 silos"] < strict["untrusted, 50 silos"]
    assert found["levels"] == {"without privacy": pytest.approx(0.19, abs=0.003), "guessing": 0.5}
    assert {choice.split()[0] for row in found["takes"].values() for choice in row} == {"dp-gd"}
    assert by_choice(found | {"takes": {"a": ["x", "x", "y"]}}) == {
        "x": "everywhere but there", "y": "a at epsilon 8"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "epsilon"), [("logistic", 1.0), ("linear", 4.0)])
def test_the_expected_error_is_that_of_a_real_fit_on_the_same_task(kind, epsilon):
    task, sizes = made_up.Task(kind, 8, 1200), (300, 300, 300, 300)
    config = landscape.described(1200, 4, 8, epsilon, 1e-5, "untrusted", kind)
    plan = landscape.auto_plan(config, "untrusted", task.facts(sizes), epsilon)
    trial = made_up.Trial(task)
    expected = [trial.error(plan, jax.random.key(draw)) for draw in range(12)]
    X, y, tests = (np.asarray(part) for part in (task.x, task.y, task.tests))
    silo = np.repeat([0, 1, 2, 3], 300)
    options = {"epsilon": epsilon, "delta": 1e-5, "held_out": None}
    if kind == "linear":
        make = lambda seed: silodp.SiloRegressor(**options, target_range=(-1, 1), random_state=seed).fit(
            X, y, silo=silo
        )
        found = [task.error(make(seed).predict(tests)) for seed in range(6)]
    else:
        make = lambda seed: silodp.SiloClassifier(**options, random_state=seed).fit(X, y, silo=silo)
        found = [task.error(make(seed).decision_function(tests)) for seed in range(6)]
    error = 3 * math.hypot(np.std(expected) / math.sqrt(12), np.std(found) / math.sqrt(6))
    assert np.mean(found) == pytest.approx(np.mean(expected), abs=error + 0.003)


@pytest.mark.parametrize("wrong", [[], ["--records", "9", "--silos", "5"], ["none.toml", "--records", "9"]])
def test_too_little_or_too_much_is_told(wrong):
    done = CliRunner().invoke(app, ["plan", *(wrong or ["--silos", "3"])])
    assert done.exit_code == 2 and "error:" in done.output
