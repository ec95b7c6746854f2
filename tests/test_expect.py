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
    assert told["chosen"]["name"] == "dp-gd" and told["whiten"] == {"share": 0.2, "clip": 1.5}
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
