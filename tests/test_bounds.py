"""The papers' bounds as numbers, for one setting by hand."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from silodp.cli import app

CONFIG = """
[data]
silos = 10
records = 1000
[model]
parameters = 100
[privacy]
epsilon = 1.0
delta = 1e-5
[algorithm]
name = "spider"
theory = true
smoothness = 2.0
gradient_bound = 1.5
diameter = 2.0
"""


def rows(tmp_path, *options: str) -> dict[str, dict]:
    file = tmp_path / "setting.toml"
    file.write_text(CONFIG)
    done = CliRunner().invoke(app, ["bounds", str(file), "--json", *options])
    assert done.exit_code == 0, done.output
    return {row["method"]: row for row in json.loads(done.output)}


def test_bounds_are_what_the_papers_print(tmp_path):
    told = rows(tmp_path)
    noise = 100 * math.log(1e5) / (1000**2 * 10)
    G, L = 1.5, 2.0
    value = lambda method: told[method]["value"]
    assert value("spider, Thm 3.1") == pytest.approx((G * L * noise) ** (2 / 3) + G**2 * noise)
    assert value("any, Thm 3.3 and F.3") == pytest.approx(G**2 * noise)
    assert value("any, Thm 3.3") == pytest.approx(G**2 * noise / 10)
    assert value("diff2-gd, Thm 4.3") == pytest.approx((G * L * 100) ** (2 / 3) / 10_000 ** (4 / 3))
    assert value("soteria-gd and -sgd, Cor. 1") == pytest.approx(G * math.sqrt(L * noise) * (1 + 10**-0.25))
    assert told["mu2, Thm 5.2"]["value"] > told["mu2, Thm 6.2"]["value"]
    assert all(row["value"] >= told["any, Thm 3.3"]["value"] for row in told.values() if row["of"].startswith("squared")
               and row["value"] is not None)  # fmt: skip


def test_a_constant_that_is_not_given_is_named_in_its_row(tmp_path):
    assert rows(tmp_path)["prox-sgd, Thm 2.1"]["missing"] == "algorithm.pl_constant"
    assert rows(tmp_path, "--set", "algorithm.pl_constant=0.1")["prox-sgd, Thm 2.1"]["value"] > 0
