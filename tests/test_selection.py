"""Private selection: one winner, the price of the theorem, and refusals of what it does not cover."""

from __future__ import annotations

import pytest

from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.privacy.kinds import Full, Poisson, Releases, Spent
from silodp.privacy.selection import Trials, mixed_selection_epsilon, selection_epsilon
from silodp.run.selection import price_of, save_selection, select_privately
from silodp.run.sweep import grid_of, with_values
from tests.cases import case
from tests.conftest import made_data


def config(**sweep):
    tree = case("dp-gd", "untrusted", rounds=3).model_dump(exclude_unset=True)
    settings = {"grid": {"algorithm.step_size": [0.1, 0.5]}, "select": "test_accuracy", "private_trials": 3.0}
    return parse_config(tree | {"sweep": settings | sweep})


def test_the_winner_costs_what_the_theorem_says(tmp_path):
    chosen = select_privately(config(), data=made_data())
    assert chosen.outcome.values["algorithm.step_size"] in (0.1, 0.5)
    assert chosen.outcome.epsilon == pytest.approx(4.0, rel=1e-3)
    assert chosen.epsilon == pytest.approx(selection_epsilon(chosen.outcome.spent[0], 1e-4, Trials(3.0)))
    assert chosen.epsilon > chosen.outcome.epsilon
    saved = save_selection(config(), chosen, "made", tmp_path / "out").read_json("sweep.json")
    assert saved["epsilon"] == chosen.epsilon
    assert "settings" not in saved, "losing trials must not be kept"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"select": "objective"}, "sweep.select"),
        ({"grid": {"privacy.epsilon": [1.0, 2.0]}}, "privacy.epsilon"),
        ({"grid": {"run.seed": [1.0, 2.0]}}, "run.seed"),
    ],
)
def test_refuses_what_is_not_covered(changes, named):
    with pytest.raises(ConfigError, match=named):
        select_privately(config(**changes), data=made_data())


def costs(trust: str, rounds: list[int], **privacy):
    """The price of choosing between numbers of rounds, and what each silo would pay for each of them alone."""
    tree = case("dp-gd", trust, rounds=3).model_dump(exclude_unset=True)
    tree["privacy"] = {"trust": trust, "delta": 1e-4} | privacy
    settings = {"grid": {"algorithm.rounds": rounds}, "select": "test_accuracy", "private_trials": 3.0}
    base, data, trials = parse_config(tree | {"sweep": settings}), made_data(), Trials(3.0)
    facts = Facts(data.sizes, tuple(silo.name for silo in data.silos), parameters=6)
    plans = [make_plan(with_values(base, point), facts) for point in grid_of(base)]
    alone = [[selection_epsilon(plan.spent(i), 1e-4, trials) for plan in plans] for i in range(3)]
    return price_of(base, grid_of(base), trials, data, None), alone


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
