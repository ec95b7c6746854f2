"""Targets for more than a record, and a delta that follows from the sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.front.report import promise
from silodp.parse import parse_config
from silodp.plan.account import account
from silodp.plan.certificate import Context, as_text, certificate
from silodp.plan.claim import claim_of
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import accountant, gaussian
from silodp.run.runner import train
from silodp.show import print_summary
from tests.conftest import made_data

SIZES = (30, 20)


def planned(sizes: tuple[int, int] = SIZES, **privacy: Any) -> Plan:
    batch = {"batch": privacy.pop("batch")} if "batch" in privacy else {}
    name = "dp-sgd" if batch else "dp-gd"
    tree = {
        "privacy": {"epsilon": 2.0, "delta": 1e-6} | privacy,
        "algorithm": {"name": name, "rounds": 5, "step_size": 0.1, "clip": 1.0} | batch,
    }
    return make_plan(parse_config(tree), Facts(sizes, ("a", "b")))


def test_the_target_is_kept_for_the_whole_group_and_used_up():
    for unit, sizes in ((4, (4, 4)), ("user", SIZES)):
        plan = planned(unit=unit)
        for silo, k in enumerate(sizes):
            mu = accountant.gdp(plan.spent(silo))
            assert mu is not None
            assert k * mu == pytest.approx(gaussian.mu_of(2.0, 1e-6), rel=1e-6)
            assert plan.epsilon(silo) == pytest.approx(2.0, rel=1e-4)


def test_releases_on_batches_keep_it_too():
    plan = planned(unit=3, batch=4)
    assert accountant.group_epsilon(plan.spent(0), 1e-6, 3) == plan.epsilon(0) <= 2.0
    assert accountant.epsilon(plan.spent(0), 1e-6) < 2.0 / 3


def test_batches_of_a_whole_silo_have_an_epsilon_too():
    """The search went through 1, 2, 4, ... and stepped over the few epsilons that hold: infinity was what it said."""
    for sizes in (SIZES, (200, 200)):
        plan = planned(unit="user", batch=4, sizes=sizes)
        assert 1.9 < max(plan.epsilon(silo) for silo in range(2)) <= 2.0


def test_noise_that_hides_no_whole_silo_is_refused():
    with pytest.raises(ConfigError, match=r"privacy\.unit = 'user': no epsilon holds for so many records together"):
        planned(unit="user", batch=4, epsilon=None, multipliers={"value": 1.0})
    with pytest.raises(ConfigError, match=r"privacy\.unit = 'user': no epsilon holds for so many records together"):
        planned(unit="user", batch=4, calibration="paper")


def test_the_certificate_says_what_is_protected_and_shows_the_whole_curve():
    plan = planned(unit="user")
    told = certificate(plan, [plan.spent(0), plan.spent(1)], Context())
    assert "all records together of every silo" in told["statement"]
    silo = told["silos"][0]
    assert [group["records"] for group in silo["groups"]] == [1, 2, 5, 10, 20, 30]
    assert silo["groups"][0]["epsilon"] == pytest.approx(silo["record_epsilon"], rel=1e-6)
    assert silo["groups"][-1]["epsilon"] == silo["epsilon"] == pytest.approx(2.0, rel=1e-4)
    record = certificate(planned(), [planned().spent(0), planned().spent(1)], Context())
    assert "every record of every silo" in record["statement"] and "record_epsilon" not in record["silos"][0]
    curve = record["silos"][0]["groups"]
    assert [group["records"] for group in curve] == [1, 2, 5, 10, 20, 30] and curve[0]["epsilon"] <= 2.0
    assert f"for 20, {rounded_up(curve[-1]['epsilon'])} for 30" in as_text(record)
    sampled = planned(batch=5)  # a search for every size: only where groups are asked for
    assert "groups" not in certificate(sampled, [sampled.spent(0), sampled.spent(1)], Context())["silos"][0]


@pytest.mark.parametrize(("unit", "batch"), [(4, None), ("user", None), (3, 4)])
def test_every_line_of_the_certificate_speaks_of_the_unit(unit, batch):
    plan = planned(unit=unit, **({} if batch is None else {"batch": batch}))
    told = certificate(plan, [plan.spent(0), plan.spent(1)], Context())
    whose = {4: "up to 4 records", "user": "all records", 3: "up to 3 records"}[unit]
    assert told["neighbours"].startswith(f"{whose} of one silo are replaced by any others")
    for silo, k in zip(told["silos"], SIZES if unit == "user" else (unit, unit), strict=True):
        if batch is None:
            assert silo["gdp_mu"] == pytest.approx(gaussian.mu_of(2.0, 1e-6), rel=1e-6)
        deltas = {point["epsilon"]: point["delta"] for point in silo["curve"]}
        assert deltas[silo["epsilon"]] == pytest.approx(1e-6, rel=1e-4)
        text = as_text(told)
        assert f"{k} records of a silo together" in text and "one record of one silo" not in text
        assert f"one record alone: epsilon {rounded_up(silo['record_epsilon'])}" in text
    assert told["protects"] in promise(told, delta_by_default=False)[0]
    assert "records of a silo together" in promise(told, delta_by_default=False)[1]


@pytest.mark.parametrize("unit", ["record", 3, "user"])
def test_a_papers_claim_is_of_single_records(unit):
    tree = {
        "data": {"sizes": list(SIZES)},
        "privacy": {"epsilon": 2.0, "unit": unit},
        "algorithm": {"name": "dp-gd", "rounds": 5, "clip": 1.0, "step_size": 0.1},
    }
    paper = account(tree)["paper"]
    assert paper["true_epsilon"] < 2.0 and not paper["violated"]
    taken = planned(unit=unit, delta=1e-5, calibration="paper")
    told = certificate(taken, [taken.spent(0), taken.spent(1)], Context(claim=claim_of(taken.config)))
    assert told["claim"]["true_epsilon"] == pytest.approx(paper["true_epsilon"], rel=1e-4)


def test_a_run_says_what_its_guarantee_covers(capsys):
    tree = {
        "privacy": {"epsilon": 2.0, "unit": 3},
        "algorithm": {"name": "dp-gd", "rounds": 2, "clip": 1.0, "step_size": 0.1},
    }
    run = train(tree, data=made_data())
    print_summary(run.summary, Path("somewhere"))
    assert "any 3 records together of every silo" in " ".join(capsys.readouterr().out.split())


def test_delta_may_follow_from_the_largest_silo():
    plan = planned(delta="1/n^2")
    assert plan.config.privacy.delta == pytest.approx(1 / 900)
    assert plan.epsilon(0) == pytest.approx(2.0, rel=1e-4)
    tree = {
        "data": {"sizes": list(SIZES)},
        "privacy": {"gdp": 1.0, "delta": "1/n^2"},
        "algorithm": {"name": "mu2", "rounds": 5, "diameter": 1.0, "clip": 1.0, "step_size": 0.1},
    }
    told = account(tree)
    assert told["delta"] == pytest.approx(1 / 900)
    assert told["paper"]["claimed_epsilon"] == pytest.approx(gaussian.epsilon_of(1 / 900, 1.0))
    assert math.isclose(plan.epsilon(0, 1e-6), planned(epsilon=plan.epsilon(0, 1e-6)).epsilon(0), rel_tol=1e-3)


@pytest.mark.parametrize("unit", [0, "group", 1.5])
def test_a_wrong_unit_is_named(unit):
    with pytest.raises(ConfigError, match=r"^privacy.unit"):
        planned(unit=unit)


@pytest.mark.parametrize(("trust", "loose"), [("untrusted", 2.0), ("trusted", 0.8)])
def test_silos_may_have_targets_of_their_own(trust, loose):
    """mu2's rho_i: under an untrusted server each silo's noise is its own; noise in common serves the strictest."""
    plan = planned(trust=trust, silo_targets={"a": 0.5})
    assert plan.epsilon(0) == pytest.approx(0.5, rel=1e-4)
    assert plan.epsilon(1) <= loose * (1 + 1e-4) and (trust == "trusted" or plan.epsilon(1) > 1.99)
    strict = planned(trust=trust, epsilon=None, gdp=1.0, silo_targets={"a": 0.25})
    assert accountant.gdp(strict.spent(0)) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"silo_targets": {"c": 1.0}}, "privacy.silo_targets.c: there is no such silo; known: a, b"),
        ({"silo_targets": {"a": -1.0}}, "give a positive number"),
        ({"epsilon": None, "silo_targets": {"a": 1.0}}, "silo_targets go with epsilon or gdp"),
    ],
)
def test_mistakes_in_targets_are_named(privacy, words):
    with pytest.raises(ConfigError, match=words):
        planned(**privacy)
