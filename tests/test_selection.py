"""Private selection: one winner, the price of the theorem, and refusals of what it does not cover."""

from __future__ import annotations

import pytest

from silodp.config import parse_config
from silodp.errors import ConfigError
from silodp.privacy.selection import Trials, selection_epsilon
from silodp.run.selection import save_selection, select_privately
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
