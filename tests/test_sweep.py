"""A sweep gives what its settings give one by one, in one program for one shape."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

from silodp import sweep
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.gradients import structured
from silodp.gradients.blocks import RUN
from silodp.parse import parse_config
from silodp.run import group
from silodp.run.directory import RunDirectory
from silodp.run.prepare import prepare, prepared_on
from silodp.run.runner import train as run
from silodp.run.sweep import best_of, run_configs, save_sweep, with_values
from tests.cases import case
from tests.conftest import made_data

DATA = made_data()

GRID = {
    "algorithm.step_size": [0.1, 0.5],
    "algorithm.clip": [0.5, 1.0],
    "privacy.epsilon": [1.0, 8.0],
    "run.seed": [0.0, 1.0],
}


def swept(grid: dict[str, list[float]], **options: Any) -> Config:
    algorithm = {"name": "spider", "rounds": 4, "step_size": 0.3, "clip": 1.0, "clip_difference": 0.7, "restart": 2}
    tree = {
        "privacy": {"epsilon": 4.0, "delta": 1e-4},
        "algorithm": algorithm,
        "run": {"every": 2},
        "sweep": {"grid": grid} | options,
    }
    return parse_config(tree)


@pytest.fixture
def compiles(monkeypatch) -> list[int]:
    """Sizes of the groups that were compiled."""
    monkeypatch.setattr(group, "cores", lambda: 1)
    sizes: list[int] = []

    def counted(problem, setting, carry, *, sweep):
        sizes.append(len(setting.x0))
        return original(problem, setting, carry, sweep=sweep)

    original = group.compile_run
    monkeypatch.setattr(group, "compile_run", counted)
    return sizes


def test_settings_share_the_program_that_makes_their_start(data):
    network = {"model": {"kind": "mlp", "hidden": [3]}}
    config = parse_config(swept({"run.seed": [0.0, 1.0]}).model_dump(exclude_unset=True) | network)
    first = prepare(config, data)
    second = prepared_on(first.ground, with_values(config, {"run.seed": 1}))
    assert first.ground.first_point._cache_size() == 1
    assert not np.array_equal(first.setting.x0, second.setting.x0)


def test_every_outcome_is_that_of_a_single_run(data, compiles, tmp_path):
    config = swept(GRID)
    outcomes = sweep(config, data=data)
    assert compiles == [16]
    assert [o.values["run.seed"] for o in outcomes[:3]] == [0, 1, 0]  # the last key turns fastest
    for i in (5, 10):  # two settings that differ in every key
        single = run(with_values(config, outcomes[i].values), data=data, out=tmp_path / str(i))
        flat = jax.flatten_util.ravel_pytree(single.params)[0]
        np.testing.assert_allclose(outcomes[i].x, np.asarray(flat), rtol=1e-4, atol=1e-5)
        assert outcomes[i].epsilon == pytest.approx(single.summary["epsilon"])
        assert len(outcomes[i].history) == len(single.history)
        for mine, theirs in zip(outcomes[i].history, single.history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    assert len({o.x.tobytes() for o in outcomes}) == 16


@pytest.mark.slow
def test_settings_whose_snapshots_fall_in_different_rounds_each_keep_their_own(data, tmp_path):
    """SVRG's full gradients are computed for all settings when one of them needs it: the others must not take them."""
    tree = swept({"run.seed": [0.0, 1.0, 2.0, 3.0]}).model_dump(exclude_none=True)
    tree["privacy"] = {"trust": "untrusted", "epsilon": 4.0, "delta": 1e-4}
    tree["algorithm"] = {"name": "ldp-svrg", "rounds": 12, "step_size": 0.3, "clip": 1.0, "batch": 8}
    tree["algorithm"]["snapshot_probability"] = 0.2
    config = parse_config(tree)
    outcomes = sweep(config, data=data)
    assert len({o.history[-1]["record_gradients"] for o in outcomes}) > 1  # they differ in when and how often
    for i, outcome in enumerate(outcomes):
        single = run(with_values(config, outcome.values), data=data, out=tmp_path / str(i))
        flat = jax.flatten_util.ravel_pytree(single.params)[0]
        np.testing.assert_allclose(outcome.x, np.asarray(flat), rtol=1e-4, atol=1e-5)
        assert outcome.history[-1]["record_gradients"] == single.history[-1]["record_gradients"]


def test_what_shapes_the_program_is_grouped(data, compiles):
    outcomes = sweep(swept({"algorithm.rounds": [2.0, 3.0], "algorithm.step_size": [0.1, 0.5]}), data=data)
    assert compiles == [2, 2]
    assert [o.history[-1]["round"] for o in outcomes] == [2, 2, 3, 3]


def test_every_setting_averages_the_iterates_that_it_asks_for(data, compiles):
    """The run is the same, its result is not: both cannot come from one program."""
    last, mean = sweep(swept({"algorithm.average": [1.0, 3.0]}), data=data)
    assert compiles == [1, 1]
    assert not np.allclose(last.x, mean.x)


def test_the_best_is_chosen_and_said_to_be_not_private(data, tmp_path):
    outcomes = sweep(swept({"algorithm.step_size": [1e-4, 0.5]}), data=data)
    assert best_of(outcomes, "objective") == 1
    for outcome, accuracy in zip(outcomes, (0.9, 0.8), strict=True):
        outcome.history[-1]["test_accuracy"] = accuracy
    assert best_of(outcomes, "test_accuracy") == 0  # the largest, unlike an objective
    outcomes[1].history[-1]["objective"] = float("nan")  # a diverged setting is never the best
    assert best_of(outcomes, "objective") == 0
    outcomes[0].history[-1]["objective"] = float("inf")
    directory = RunDirectory.create(tmp_path / "kept", swept({}), "made")
    with pytest.raises(ConfigError, match="every setting diverged"):
        save_sweep(directory, swept({}), outcomes, outcomes[0].prepared.ground)
    assert not directory.complete
    outcomes[0].history[-1]["objective"] = 0.5
    save_sweep(directory, swept({}), outcomes, outcomes[0].prepared.ground)
    page = (directory.path / "report.html").read_text(encoding="utf-8")
    assert (
        "covered by none" in page and "Best by objective (mean loss of a record): algorithm.step_size = 0.0001" in page
    )


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({}, "sweep.grid is empty"),
        ({"step_size": [1.0]}, "only algorithm, privacy, run keys can be swept"),
        ({"data.silos": [1.0]}, "only algorithm, privacy, run keys can be swept"),
        ({"algorithm.step_size": []}, "give at least one value"),
        ({"algorithm.stepsize": [1.0]}, "algorithm.stepsize: unknown key (did you mean step_size?)"),
        ({"algorithm.step_size": [0.1, -1.0]}, "algorithm.step_size = -1.0: must be"),
        ({"algorithm.rounds": [2.5]}, "algorithm.rounds = 2.5: must be a valid integer"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(grid, told, data, compiles):
    with pytest.raises(ConfigError) as caught:
        sweep(swept(grid), data=data)
    assert told in str(caught.value)
    assert compiles == []


def test_a_column_that_is_not_measured_is_refused_before_anything_is_compiled(data, compiles):
    with pytest.raises(ConfigError, match=r"sweep.select = 'test_mse': not measured; measured: .*test_accuracy"):
        sweep(swept({"algorithm.step_size": [0.1]}, select="test_mse"), data=data)
    assert compiles == []


def test_parts_in_threads_give_each_setting_its_own_run(monkeypatch):
    """Seven settings in parts of three: the last part is filled up, and nothing of that shows."""
    base = case("dp-gd", "untrusted")
    points = [{"algorithm.step_size": 0.1 * (i + 1), "run.seed": float(i)} for i in range(7)]
    configs = [with_values(base, point) for point in points]
    monkeypatch.setattr(group, "cores", lambda: 1)
    alone = run_configs(configs, DATA)
    monkeypatch.setattr(group, "cores", lambda: 3)
    parted = run_configs(configs, DATA, together=3)
    for one, other in zip(alone, parted, strict=True):
        np.testing.assert_allclose(one.x, other.x, rtol=1e-5, atol=1e-6)
        assert one.epsilon == other.epsilon
        assert [row["round"] for row in one.history] == [row["round"] for row in other.history]


def test_a_setting_alone_is_not_stacked(tmp_path, monkeypatch):
    """Of a start, a history and an account it has what a stack would have."""
    monkeypatch.setattr("silodp.run.simulate.eqx.filter_vmap", lambda *_, **__: pytest.fail("stacked"))
    config = case("diff2-gd", "trusted")
    ((history, x, account),) = group.Group([prepare(config, DATA)], 1).run(lambda round, row: None)
    whole = run(config, data=DATA, out=tmp_path / "run")
    np.testing.assert_allclose(x, jax.flatten_util.ravel_pytree(whole.params)[0], rtol=1e-4, atol=1e-5)
    assert [row["round"] for row in history] == [row["round"] for row in whole.history]
    assert [row["objective"] for row in history] == pytest.approx([row["objective"] for row in whole.history], rel=1e-4)
    assert prepare(config, DATA).settled(account)


def test_stacked_networks_take_few_records_at_a_time(monkeypatch):
    """Each setting has activations of its own: together they would leave the caches."""
    asked: list[tuple[int, int]] = []
    size_of = structured.block_size
    told = lambda *given: asked.append((given[2], size_of(*given))) or size_of(*given)
    monkeypatch.setattr(structured, "block_size", told)
    network = lambda tree: parse_config(case("dp-gd", "trusted").model_dump(exclude_unset=True) | {"model": tree})
    for model, stacked_size in ({"kind": "mlp", "hidden": [4]}, RUN), ({"kind": "logistic"}, 8 * RUN):
        for settings in (1, 3):
            asked.clear()
            group.Group([prepare(network(model), DATA)] * settings, settings).run(lambda round, row: None)
            assert set(asked) == {(settings, 8 * RUN if settings == 1 else stacked_size)}


def test_a_sweep_that_is_given_up_ends_its_threads():
    members = [prepare(case("dp-gd", "untrusted"), DATA)] * 4

    def bar(round, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.Group(members, 1).run(bar)
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor") and t.is_alive()]


def test_a_look_ahead_has_the_noise_of_the_whole_run_and_no_epsilon():
    config = case("dp-gd", "untrusted")
    (whole,), (short,) = (run_configs([config], DATA, stop=stop) for stop in (None, 2))
    assert short.epsilon is None and short.history[-1]["round"] == 2
    early = next(row for row in whole.history if row["round"] == 2)
    assert short.history[-1]["objective"] == pytest.approx(early["objective"], rel=1e-5)
    assert short.prepared.plan.multipliers == whole.prepared.plan.multipliers
