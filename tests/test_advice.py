"""Warnings of what is allowed and costs more than it seems to: by the estimators, by runs, sweeps, plans, commands."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.config import AlgorithmConfig
from silodp.data import FederatedData
from silodp.errors import ConfigError, SilodpWarning
from silodp.plan import advice
from tests.patients import SCHEMA, raw


def silos(*sizes: int, lacking: bool = False) -> FederatedData:
    half = lambda n: np.arange(n) % 2
    pairs = {str(i): (np.zeros((n, 1)), half(n)) for i, n in enumerate(sizes)}
    if lacking:
        pairs["0"] = (pairs["0"][0], np.zeros(sizes[0], int))
    return FederatedData.of(pairs, classes=["x", "y"])


WARNINGS = {
    "a large epsilon": ((silos(100), 10.5, 1e-5), r"epsilon = 10\.5: a 1 % suspicion .* 99\.73 %"),
    "a large delta": ((silos(100), 1.0, 0.02), r"delta = 0\.02: above 1/n = 0\.01"),
    "a small silo": ((silos(951, 49), 1.0, 1e-5), r"silo: 1 of 2 have fewer than 50 records \(4\.9 % of all\); where"),
    "a large clip norm": (
        (silos(100), 1.0, 1e-5, AlgorithmConfig(name="dp-gd", clip=1e9)), r"algorithm\.clip = 1e\+09: the noise grows"),
    "a class that is missing": ((silos(60, 60, lacking=True), 1.0, 1e-5), "silo: 1 of 2 lack a class"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_what_costs_more_than_it_seems_is_told(case):
    given, match = WARNINGS[case]
    with pytest.warns(SilodpWarning, match=match) as caught:
        advice.warn(*given)
    assert len(caught) == 1


def test_many_numbers_as_classes_are_told():
    with pytest.warns(SilodpWarning, match="y: 12 different numbers are taken as classes; for a quantity take Silo"):
        advice.warn_of_numbers(np.arange(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.warn_of_numbers(np.array([f"class {i}" for i in range(12)]))
        advice.warn_of_numbers(np.arange(9))


def test_nothing_is_told_of_what_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.warn(silos(50, 50), 10.0, 0.01)
    assert advice.default_delta(100) == 1e-5 and advice.default_delta(100_000) == 1e-6


GOOD = {"algorithm": {"name": "dp-gd", "rounds": 2, "step_size": 0.5, "clip": 1.0}, "privacy": {"epsilon": 1.0}}
UNSAFE = {
    "epsilon": ({"privacy": {"epsilon": 100.0}}, "epsilon = 100: a 1 % suspicion"),
    "delta": ({"privacy": {"epsilon": 1.0, "delta": 0.5}}, "delta = 0.5: above 1/n"),
    "clip": ({"algorithm": GOOD["algorithm"] | {"clip": 1e9}}, "algorithm.clip = 1e\\+09: the noise grows with it"),
    "silo": ({}, "silo: 1 of 2 have fewer than 50 records"),
    "class": ({}, "silo: 1 of 2 lack a class"),
}


def data_of(case: str) -> FederatedData:
    return silos(60, 30 if case == "silo" else 60, lacking=case == "class")


@pytest.mark.parametrize("case", UNSAFE)
def test_a_run_tells_what_is_unsafe(case, tmp_path):
    changes, match = UNSAFE[case]
    with pytest.warns(SilodpWarning, match=match) as caught:
        silodp.train(GOOD | changes, data=data_of(case), out=tmp_path / "run")
    assert len(caught) == 1


@pytest.mark.parametrize("case", ["epsilon", "delta", "clip", "silo"])
def test_an_account_tells_what_is_unsafe(case):
    changes, match = UNSAFE[case]
    with pytest.warns(SilodpWarning, match=match):
        silodp.account(GOOD | changes, data=data_of(case))


def test_a_sweep_tells_what_is_unsafe():
    changes, match = UNSAFE["delta"]
    with pytest.warns(SilodpWarning, match=match):
        silodp.sweep(GOOD | changes | {"sweep": {"grid": {"algorithm.step_size": [0.1]}}}, data=data_of("delta"))


def test_commands_tell_it_on_lines_of_their_own(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('[data]\nsizes = [100, 30]\n[algorithm]\nname = "dp-gd"\nrounds = 2\nclip = 1e9\n'
                      "[privacy]\nepsilon = 100\ndelta = 0.5\n")  # fmt: skip
    told = CliRunner().invoke(app, ["account", str(config)])
    lines = [line for line in told.stderr.splitlines() if line.startswith("warning: ")]
    assert told.exit_code == 0 and len(lines) == 4
    assert [line.split()[1] for line in lines] == ["epsilon", "delta", "algorithm.clip", "silo:"]


def test_what_was_fitted_on_records_is_refused_with_real_noise(tmp_path: Path):
    tree: dict[str, Any] = GOOD | {"run": {"mode": "messages"}}
    for step in ("standardise", "pca:2"):
        data = silodp.load_data("wbcd", silos=2, preprocess=[step])
        with pytest.raises(ConfigError, match=f"data.preprocess: {step}: fitted on the records, which no epsilon"):
            silodp.train(tree, data=data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_fit_warns(recwarn):
    warnings.simplefilter("always")
    few = raw().iloc[::10]
    silodp.SiloClassifier(epsilon=20.0, random_state=0).fit(few, "outcome", silo="hospital", schema=SCHEMA)
    told = [str(each.message) for each in recwarn if each.category is SilodpWarning]
    assert [text.split()[0] for text in told] == ["epsilon", "silo:"]
