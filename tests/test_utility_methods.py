"""Other methods of the page on utility: what they are asked, and that they keep the promise they are compared at."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from bench import families, rivals, rivals_torch, utility
from bench.tasks import LONGEST, Split
from silodp.parse import parse_config
from silodp.plan import auto
from silodp.plan.make import make_plan

CELLS = [(1.0, "untrusted"), (8.0, "untrusted")]


def made(kind: str, silos: int = 2, records: int = 400) -> Split:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(records, 3)).astype(np.float32)
    features *= np.minimum(1, LONGEST / np.linalg.norm(features, axis=1))[:, None]
    score = features @ np.array([2.0, -1.0, 0.5])
    targets = {
        "linear": score / score.std(),
        "logistic": (score > 0).astype(int),
        "softmax": np.digitize(score, (-0.5, 0.5)),
    }[kind]
    classes = () if kind == "linear" else tuple(map(str, np.unique(targets)))
    cut = records // 4
    pair = lambda rows: (features[rows], targets[rows])
    return Split(kind, pair(slice(cut, None)), pair(slice(0, cut)), np.ones(3, bool), classes, silos)


@pytest.mark.parametrize("kind", ["logistic", "softmax", "linear"])
def test_every_setting_of_every_family_has_the_epsilon_that_it_is_compared_at(kind):
    split = made(kind)
    facts = families.ground_of(split).facts()
    for method, family in families.FAMILIES.items():
        cells = [(epsilon, trust) for epsilon in (1.0, 8.0) for trust in family.trusts]
        trees = families.trees_of(split, method, cells, 0)
        assert len(trees) == len(cells) * len(family.points)
        for cell, tree in zip(cells, trees[:: len(family.points)], strict=True):
            plan = make_plan(parse_config(tree), facts)
            assert max(plan.epsilon(silo) for silo in range(2)) == pytest.approx(cell[0], rel=1e-3)


@pytest.mark.parametrize("trust", families.BOTH)
def test_papers_defaults_are_their_theorems_choices(trust):
    split = made("logistic")
    facts = families.ground_of(split).facts()
    for name in families.prescribed_under(trust):
        plan = make_plan(parse_config(families.prescribed(split, (3.0, trust), name, 0)), facts)
        assert {"step_size", "clip"} <= plan.chosen.keys()
        assert plan.config.algorithm.rounds <= families.MOST_ROUNDS
        assert max(plan.epsilon(silo) for silo in range(2)) == pytest.approx(3.0, rel=1e-3)


def test_constants_of_the_losses_are_bounds():
    """Of gradients and of their changes, over records of the greatest length and random weights."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 4))
    x = np.column_stack([x / np.linalg.norm(x, axis=1)[:, None] * LONGEST, np.ones(500)])
    told = x @ rng.normal(size=(5, 3)) * 20
    chance = np.exp(told - told.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    long, curved = families.CONSTANTS["softmax"]
    residuals = chance - np.eye(3)[rng.integers(3, size=500)]
    assert (np.linalg.norm(residuals, axis=1) * np.linalg.norm(x, axis=1)).max() <= long
    spectra = [np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1] for p in chance]
    assert 0.4 < max(spectra) * 2.25 / curved <= 1
    assert families.CONSTANTS["logistic"] == (pytest.approx(1.5), pytest.approx(2.25 / 4))


def test_a_family_runs_and_learns():
    rows = np.array(families.searched(made("logistic"), "diff2", CELLS, 0))
    assert rows.shape == (2, 6)
    assert rows[1].max() > 0.8  # where there is little noise


def test_dp_gd_on_broken_lines_tries_both_numbers_of_knots():
    split = made("linear")
    rows = np.array(utility.searched(split, utility.PIECES, CELLS[:1], 0))
    assert rows.shape == (1, 18)
    flags = Split(split.kind, split.train, split.test, np.zeros(3, bool), (), 2)
    assert utility.knots_tried(flags) == []


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_opacus_noise_keeps_epsilon_when_a_record_is_replaced(epsilon):
    def of(relation: dp_accounting.NeighboringRelation) -> float:
        counted = PLDAccountant(relation, value_discretization_interval=1e-3)
        event = dp_accounting.GaussianDpEvent(rivals_torch.noise_multiplier(epsilon))
        counted.compose(dp_accounting.PoissonSampledDpEvent(rivals_torch.SHARE, event), rivals_torch.ROUNDS)
        return counted.get_epsilon(rivals_torch.DELTA)

    assert of(dp_accounting.NeighboringRelation.REPLACE_ONE) == pytest.approx(epsilon, rel=5e-3)
    assert of(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE) < 0.7 * epsilon


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="needs opacus")
@pytest.mark.parametrize("kind", ["logistic", "softmax", "linear"])
def test_opacus_learns(kind):
    split = made(kind, records=2000)
    task = utility.Task(1, kind, lambda: split.train, False)
    rows = rivals_torch.opacus(task, split.train, split.test, 8.0, 0)
    assert len(rows) == 6 and max(rows) > 0.8


def test_methods_that_this_machine_lacks_are_not_asked(monkeypatch):
    task = utility.TASKS["wbcd"]
    monkeypatch.delenv(rivals.front_peers.INTERPRETER, raising=False)
    assert utility.cells_of(task, "diffprivlib", (1.0,)) == []
    monkeypatch.setenv(rivals.front_peers.INTERPRETER, "python")
    assert utility.cells_of(task, "diffprivlib", (1.0,)) == [(1.0, "trusted")]
    assert utility.cells_of(task, families.DEFAULTS, (0.5, 1.0)) == [(1.0, "trusted"), (1.0, "untrusted")]
    assert utility.cells_of(task, "soteria", (0.5,)) == [(0.5, "untrusted")]


def test_a_constant_for_numbers_leaves_what_was_measured_of_classes(monkeypatch):
    before = {kind: utility.constants_of_auto(kind) for kind in auto.RECIPES}
    other = replace(auto.SQUARES, records=auto.SQUARES.records + 1)
    monkeypatch.setattr(auto, "SQUARES", other)
    monkeypatch.setitem(auto.RECIPES, "linear", other)
    assert utility.constants_of_auto("linear") != before["linear"]
    assert utility.constants_of_auto("logistic") == before["logistic"]
    monkeypatch.setattr(auto, "SHARE", 2 * auto.SHARE)
    assert utility.constants_of_auto("logistic") != before["logistic"]
    assert utility.of_auto("wages|1|trusted|auto, other knots|0") and not utility.of_auto("wages|1|trusted|dp-gd|0")
