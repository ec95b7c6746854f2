"""`silodp account` against the golden values, and its refusals."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.gradients.blocks import SLACK
from silodp.parse import parse_config, to_toml
from silodp.plan.account import account

TEN = {"silos": 10, "records": 1651}
A9A = {"silos": 10, "records": 3256}


def config(name: str, data: dict, privacy: dict, **algorithm) -> Config:
    model = algorithm.pop("model", {})
    return parse_config(
        {"data": data, "model": model, "privacy": privacy, "algorithm": {"name": name, "rounds": 2000} | algorithm}
    )


def stds(rows: list[dict]) -> dict[str, float]:
    """As the papers have them, who compute with real numbers: without what a bound allows for rounding."""
    return {row["stream"]: row["std_over_clip"] / (1 + SLACK) for row in rows}


@pytest.mark.parametrize(
    ("restart", "paper", "exact"),
    [
        (1, {"value": 0.009383}, {"value": 0.007534}),
        (20, {"value": 0.002346, "difference": 0.020451}, {"value": 0.001883, "difference": 0.016419}),
        (200, {"value": 0.000742, "difference": 0.020929}, {"value": 0.000596, "difference": 0.016803}),
    ],
)
def test_diff2(restart, paper, exact):
    result = account(config("diff2-gd", TEN, {"trust": "trusted", "epsilon": 3.0}, restart=restart))
    assert stds(result["silos"][0]["releases"]) == pytest.approx(exact, rel=5e-3)
    assert stds(result["paper"]["releases"]) == pytest.approx(paper, rel=5e-3)
    assert result["paper"]["true_epsilon"] == pytest.approx(2.341, rel=5e-3)
    assert result["paper"]["claimed_epsilon"] == 3.0
    assert not result["paper"]["violated"]


def test_spider():
    privacy = {"epsilon": 1.0, "delta": 1 / 1234**2, "split": 0.6}
    result = account(config("spider", {"silos": 25, "records": 1234}, privacy, rounds=51, restart=3))
    assert stds(result["silos"][0]["releases"]) == pytest.approx({"value": 0.0372, "difference": 0.0644}, rel=5e-3)
    assert [row["count"] for row in result["silos"][0]["releases"]] == [17, 34]
    assert stds(result["paper"]["releases"]) == pytest.approx({"value": 0.0499, "difference": 0.1730 / 2}, rel=5e-3)
    assert result["paper"]["true_epsilon"] == pytest.approx(0.729, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "options", "mask", "std"),
    [
        ("soteria-sgd", {"batch": 10}, False, 0.04164),
        ("soteria-gd", {}, False, 0.03536),
        ("soteria-gd", {"compressor": "rand-k", "keep": 6}, True, 0.00891),
    ],
)
def test_soteria(name, options, mask, std):
    privacy = {"epsilon": 1.0, "delta": 1e-3, "mask_amplification": mask}
    result = account(config(name, A9A, privacy, clip=0.5, model={"parameters": 123}, **options))
    assert 0.5 * stds(result["silos"][0]["releases"])["value"] == pytest.approx(std, rel=5e-3)


def test_a_violated_claim_is_flagged():
    """E24: SoteriaFL's constant at T = 25, b = 10, claim 1."""
    result = account(config("soteria-sgd", A9A, {"epsilon": 1.0, "delta": 1e-3}, rounds=25, batch=10))
    assert result["paper"]["true_epsilon"] == pytest.approx(42.6, rel=5e-3)
    assert result["paper"]["violated"]


def test_mu2_takes_a_gdp_target():
    result = account(config("mu2", {"silos": 10, "records": 6000}, {"gdp": 4.0}, rounds=6000))
    assert result["silos"][0]["epsilon"] == pytest.approx(24.38, rel=1e-3)


def test_local_fixed_size_steps():
    one = {"silos": 1, "records": 1651}
    run = config("local-sgd", one, {"epsilon": 3.0}, rounds=1800, local_steps=1, batch=16, sampling="fixed")
    assert account(run)["silos"][0]["releases"][0]["multiplier"] * 2 == pytest.approx(1.972, rel=5e-3)


def test_given_multipliers_give_the_epsilon_back():
    target = config("diff2-gd", TEN, {"trust": "trusted", "epsilon": 3.0}, restart=20)
    noise = {row["stream"]: row["multiplier"] for row in account(target)["silos"][0]["releases"]}
    given = config("diff2-gd", TEN, {"trust": "trusted", "multipliers": noise}, restart=20)
    assert account(given)["silos"][0]["epsilon"] == pytest.approx(3.0, rel=1e-6)


def test_unbalanced_silos_have_their_own_statements():
    """Trusted: the server's noise is scaled to the smallest silo, the others are protected by more."""
    result = account(
        config("dp-gd", {"sizes": [100, 400]}, {"trust": "trusted", "epsilon": 2.0}, rounds=50, weights="equal")
    )
    small, large = (silo["epsilon"] for silo in result["silos"])
    assert small == pytest.approx(2.0)
    assert large < 0.5


def test_a_budget_stops_the_run_before_it_is_exceeded():
    privacy = {"multipliers": {"value": 10.0}, "budget": 2.0}
    result = account(config("dp-gd", TEN, privacy))
    (row,) = result["silos"][0]["releases"]
    assert result["silos"][0]["epsilon"] <= 2.0
    one_more = {"multipliers": {"value": 10.0}}
    assert account(config("dp-gd", TEN, one_more, rounds=row["count"] + 1))["silos"][0]["epsilon"] > 2.0
    with pytest.raises(ConfigError, match=r"privacy\.budget = 0\.001"):
        account(config("dp-gd", TEN, privacy | {"budget": 0.001}))


def test_a_budget_holds_for_every_silo():
    """Under a trusted server the records of large silos are better hidden: the smallest silo ends the run."""
    privacy = {"trust": "trusted", "multipliers": {"value": 10.0}, "budget": 2.0}
    told = account(config("dp-gd", {"sizes": [4000, 400, 1000]}, privacy, weights="equal"))
    epsilons = [row["epsilon"] for row in told["silos"]]
    assert 1.9 < max(epsilons) <= 2.0 and min(epsilons) < 0.5


@pytest.mark.parametrize(
    ("privacy", "named"),
    [
        ({}, "privacy.epsilon is missing"),
        ({"multipliers": {"values": 1.0}}, "privacy.multipliers.values"),
        ({"epsilon": 1.0, "calibration": "paper", "trust": "trusted", "split": "optimal"}, "missing"),
        ({"epsilon": 1.0, "mask_amplification": True}, "privacy.mask_amplification = true: needs"),
    ],
)
def test_refusals(privacy, named):
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        account(config("diff2-gd", TEN, privacy, restart=20))


def test_masks_hide_a_part_of_a_known_number_of_coordinates():
    masked = {"epsilon": 1.0, "mask_amplification": True}
    with pytest.raises(ConfigError, match=r"model\.parameters is missing"):
        account(config("diff2-gd", TEN, masked, restart=20, compressor="rand-k", keep=3))


def test_the_command_prints_json_a_table_and_a_figure(tmp_path):
    file, figure = tmp_path / "plan.toml", tmp_path / "delta.png"
    file.write_text(to_toml(config("diff2-gd", TEN, {"trust": "trusted", "epsilon": 3.0}, restart=20)))
    told = CliRunner().invoke(
        app, ["account", str(file), "--json", "--set", "privacy.epsilon=5.0", "--plot", str(figure)]
    )
    result = json.loads(told.stdout)
    assert result["paper"]["true_epsilon"] == pytest.approx(3.94, rel=5e-3)
    assert figure.read_bytes().startswith(b"\x89PNG")
    table = CliRunner().invoke(app, ["account", str(file)])
    assert table.exit_code == 0
    assert "really gives" in table.stdout
    wrong = CliRunner().invoke(app, ["account", str(file), "--set", "privacy.delta=1.5"])
    assert wrong.exit_code == 2


def test_a_target_that_needs_no_noise_says_so():
    """One record in 10^6 is drawn, once: the probability of seeing it is below delta."""
    loose = {"epsilon": 1.0, "delta": 1e-3}
    result = account(config("dp-sgd", {"silos": 1, "records": 10**6}, loose, rounds=1, batch=1))
    assert "no noise is needed" in result["note"]
    assert result["silos"][0]["releases"][0]["multiplier"] == 0.0
    assert "note" not in account(config("dp-gd", TEN, loose, rounds=1))
