"""`silodp plan`: what would be run, and what other trust models would buy."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.parse import parse_config
from silodp.plan.expect import expectations
from silodp.plan.make import make_plan

TREE = {
    "data": {"silos": 4, "records": 500},
    "model": {"parameters": 9},
    "privacy": {"epsilon": 1.0},
    "algorithm": {"name": "auto"},
}


def test_noise_is_that_of_the_plan_and_a_trusted_server_needs_less():
    told = expectations(parse_config(TREE))
    assert told["chosen"]["name"] == "dp-gd" and told["whiten"]["moment"] == "full" and told["whiten"]["share"] == 0.2
    assert len(told["why"]) == 2 and "limit" in told["why"][0]
    relative = {row["trust"]: row["relative"] for row in told["trust"]}
    assert relative["untrusted"] == 1
    assert relative["trusted"] == pytest.approx(1 / math.sqrt(4), rel=1e-3)
    assert relative["shuffled"] is None  # second moments do not pass a shuffler


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
    assert told.exit_code == 0 and "20% of the budget" in told.output and "trusted" in told.output
    assert json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).output)["silos"] == 4
    file.write_text(to_toml(parse_config(TREE | {"privacy": {}})), encoding="utf-8")
    refused = CliRunner().invoke(app, ["plan", str(file)])
    assert refused.exit_code == 2


def test_numbers_alone_are_enough(tmp_path):
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


@pytest.mark.parametrize("wrong", [[], ["--records", "9", "--silos", "5"], ["none.toml", "--records", "9"]])
def test_too_little_or_too_much_is_told(wrong):
    done = CliRunner().invoke(app, ["plan", *(wrong or ["--silos", "3"])])
    assert done.exit_code == 2 and "error:" in done.output
