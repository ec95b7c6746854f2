"""Private selection: one winner, the price of the theorem, and refusals of what it does not cover."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import silodp
from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.privacy.kinds import Full, Poisson, Releases, Spent
from silodp.privacy.selection import Trials, mixed_selection_epsilon, selection_epsilon
from silodp.randomness import seeded
from silodp.run.selection import plans_of, price_of, save_selection, select_privately
from silodp.run.sweep import grid_of, with_values
from tests.cases import case
from tests.conftest import made_data


def config(trust="untrusted", **sweep):
    tree = case("dp-gd", trust, rounds=3, weights="equal").model_dump(exclude_unset=True)
    settings = {"grid": {"algorithm.step_size": [0.1, 0.5]}, "select": "test_accuracy", "private_trials": 3.0}
    return parse_config(tree | {"sweep": settings | sweep})


def test_settings_with_models_of_their_own_are_refused_whichever_are_drawn():
    """What is tried is drawn; what it costs is of all settings on one model."""
    options = {"name": "dp-sgd", "batch": 5, "rounds": 2, "clip": 1.0, "step_size": 0.1}
    asked = parse_config(
        {
            "model": {"kind": "mlp", "hidden": [3]},
            "privacy": {"epsilon": 3.0, "delta": 1e-4},
            "algorithm": options,
            "sweep": {"grid": {"algorithm.name": ["auto", "dp-sgd"]}},
        }
    )
    with pytest.raises(ConfigError, match="sweep them apart"):
        plans_of(asked, grid_of(asked), made_data(), None)


def test_the_winner_costs_what_the_theorem_says(tmp_path):
    chosen = select_privately(config("trusted"), data=made_data())
    assert chosen.outcome.values["algorithm.step_size"] in (0.1, 0.5)
    assert chosen.outcome.epsilon == pytest.approx(4.0, rel=1e-3)
    prices = [selection_epsilon(spent, 1e-4, Trials(3.0)) for spent in chosen.outcome.spent]
    assert chosen.epsilon == pytest.approx(max(prices)) and max(prices) > 1.2 * min(prices)
    assert chosen.certificate["selection"]["price"] == chosen.epsilon
    assert chosen.epsilon > chosen.outcome.epsilon
    saved = save_selection(config(), chosen, "made", tmp_path / "out").read_json("sweep.json")
    assert saved["epsilon"] == chosen.epsilon
    assert "settings" not in saved, "losing trials must not be kept"


def held_out(**sweep):
    tree = config().model_dump(exclude_unset=True)
    tree["evaluate"] = {"held_out": 0.3}
    tree["sweep"] = {**tree["sweep"], "select": "held_out_accuracy"} | sweep
    return parse_config(tree)


def test_a_selection_on_held_out_records_ends_with_a_model_a_certificate_and_its_price(tmp_path):
    """And needs no public records."""
    data = replace(made_data(), test=None)
    found = silodp.sweep(held_out(), data=data)
    chosen = found.selection
    assert len(found) == 1 and chosen is not None and "run.seed" not in found[0].values
    shown = set(found.to_pandas(histories=True).columns) - {"algorithm.step_size", "epsilon"}
    assert {name for name in shown if not name.startswith("held_out_")} == {"round", "bits_up", "bits_down"}
    plan = found[0].prepared.plan
    for silo, told in enumerate(chosen.certificate["silos"]):
        each = [selection_epsilon(part, 1e-4, Trials(3.0)) for part in plan.apart(plan.spent(silo))]
        assert told["epsilon"] == pytest.approx(max(each)) and told["epsilon_of_one_run"] <= 4.0
    directory = save_selection(held_out(), chosen, "made", tmp_path / "out").path
    assert {"model.safetensors", "certificate.txt", "report.html"} <= {file.name for file in directory.iterdir()}
    first = (directory / "certificate.txt").read_text().splitlines()[0]
    assert "the best of a random number of runs" in first and f"({rounded_up(chosen.epsilon)}, " in first
    saved = json.loads((directory / "sweep.json").read_text())
    assert set(saved["final"]) == {"held_out_accuracy", "held_out_log_loss", "held_out_auc", "held_out_majority"}
    assert json.loads((directory / "summary.json").read_text())["drawn_round"] is None


def test_the_number_of_trials_is_shown_nowhere(tmp_path, monkeypatch):
    """The same run with other numbers of trials leaves files of the same size and keys."""
    monkeypatch.setattr(Trials, "draw", lambda self, generator: 7777 % 9 + 4)
    chosen = select_privately(held_out(), data=made_data())
    directory = save_selection(held_out(), chosen, "made", tmp_path / "out").path
    prepared = chosen.outcome.prepared
    assert prepared.config.run.seed == held_out().run.seed, "a seed of its own tells the winner's noise"
    assert (prepared.setting.key == seeded(held_out().run.seed)).all()
    for file in ("sweep.json", "summary.json", "certificate.json"):
        assert '"trials"' not in (directory / file).read_text()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"select": "objective"}, "sweep.select"),
        ({"select": "held_out_accuracy"}, r"nothing is held out; add \[evaluate\]"),
        ({"grid": {"privacy.epsilon": [1.0, 2.0]}}, "privacy.epsilon"),
        ({"grid": {"run.seed": [1.0, 2.0]}}, "run.seed"),
    ],
)
def test_refuses_what_is_not_covered(changes, named):
    with pytest.raises(ConfigError, match=named):
        select_privately(config(**changes), data=made_data())


def costs(trust: str, rounds: list[int], **privacy):
    """The price of choosing between numbers of rounds, and what each silo would pay for each of them alone."""
    tree = case("dp-gd", trust, rounds=3, weights="equal").model_dump(exclude_unset=True)
    tree["privacy"] = {"trust": trust, "delta": 1e-4} | privacy
    settings = {"grid": {"algorithm.rounds": rounds}, "select": "test_accuracy", "private_trials": 3.0}
    base, data, trials = parse_config(tree | {"sweep": settings}), made_data(), Trials(3.0)
    facts = Facts(data.sizes, tuple(silo.name for silo in data.silos), parameters=6)
    plans = [make_plan(with_values(base, point), facts) for point in grid_of(base)]
    alone = [[selection_epsilon(plan.spent(i), 1e-4, trials) for plan in plans] for i in range(3)]
    made = plans_of(base, grid_of(base), data, None)
    return max(price_of(made, silo, trials) for silo in range(3)), alone


def test_the_price_is_that_of_the_dearest_setting():
    price, alone = costs("untrusted", [2, 8], multipliers={"value": 5.0})
    assert alone[0][1] > 1.5 * alone[0][0]
    assert price == pytest.approx(alone[0][1])


def test_the_price_is_that_of_the_dearest_silo():
    price, alone = costs("trusted", [3], epsilon=4.0)
    assert price == pytest.approx(alone[1][0]) and alone[1][0] > 1.2 * alone[0][0]  # silo 1 is the smallest


def test_settings_that_cross_cost_more_than_either():
    """At every order the dearer of the two: no single setting's epsilon is a bound."""
    many = [Spent(Releases("value", 40, Poisson(0.05)), 0.9)]
    few = [Spent(Releases("value", 4, Full()), 3.0)]
    each = [selection_epsilon(spent, 1e-4, Trials(3.0)) for spent in (many, few)]
    assert mixed_selection_epsilon([many, few], 1e-4, Trials(3.0)) >= max(each)


@pytest.mark.parametrize("multipliers", [(2.0, 9.0), (9.0, 2.0)])
def test_a_selections_price_is_that_of_the_records_that_pay_more(multipliers):
    """Trained on or held out: the dearer part counts."""
    parts = [[Spent(Releases("value", 1, Full()), multiplier)] for multiplier in multipliers]
    config = SimpleNamespace(privacy=SimpleNamespace(delta=1e-5))
    plan: Any = SimpleNamespace(spent=lambda silo: [], apart=lambda spent: parts, config=config)
    dear = [Spent(Releases("value", 1, Full()), 2.0)]
    assert price_of([plan], 0, Trials(3.0)) == pytest.approx(selection_epsilon(dear, 1e-5, Trials(3.0)))


def test_a_price_of_a_record_is_not_sold_as_one_of_a_group():
    asked = config()
    asked = asked.model_copy(update={"privacy": asked.privacy.model_copy(update={"unit": "user"})})
    with pytest.raises(ConfigError, match=r"not with privacy.unit = 'user'"):
        select_privately(asked, data=made_data())
