"""A researcher's habits: a look at every row, own metrics, silos' columns, trajectories, tables, sweeps over names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from typer.testing import CliRunner

import silodp
from silodp.cli import app
from silodp.data import read_data
from silodp.errors import ConfigError
from silodp.parse import load_config, parse_config, to_toml
from silodp.plan import auto
from silodp.plan.identity import fingerprint
from silodp.plan.make import make_plan, resolved
from silodp.plan.objects import config_from, facts_of
from silodp.privacy.kinds import Full, Poisson, Releases, Spent
from silodp.privacy.selection import Trials, mixed_selection_epsilon, selection_epsilon
from silodp.reproduce import driver, names
from silodp.run import group, parts
from silodp.run.directory import RunDirectory
from silodp.run.prepare import prepare
from silodp.run.runner import resume, train
from silodp.run.selection import select_privately
from silodp.run.sweep import Sweep, sweep, with_values
from silodp.show import shown
from tests.conftest import made_data

DATA = made_data()
ROWS = 4  # of a history: its start and every second of six rounds


def tree(**changes: dict[str, Any]) -> dict[str, Any]:
    base = {
        "privacy": {"epsilon": 4.0, "delta": 1e-4},
        "algorithm": {"name": "dp-gd", "rounds": 6, "step_size": 0.3, "clip": 1.0},
        "run": {"every": 2},
    }
    return {name: base.get(name, {}) | changes.get(name, {}) for name in base | changes}


def flat(run: silodp.Run) -> np.ndarray:
    return np.asarray(ravel_pytree(run.params)[0])


# --- a look at every row -------------------------------------------------------------------------------------


def test_on_round_sees_every_row_with_its_point_and_changes_nothing(tmp_path):
    seen: list[tuple[np.ndarray, dict[str, float]]] = []

    def look(x, row):
        seen.append((x.copy(), dict(row)))
        x[:], row["objective"] = 0.0, -1.0  # both are the caller's own

    looked = train(tree(run={"trajectory": True}), data=DATA, out=tmp_path / "looked", on_round=look)
    plain = train(tree(), data=DATA, out=tmp_path / "plain")
    assert [row for _, row in seen] == looked.history == plain.history
    assert len(seen) == ROWS and isinstance(seen[0][0], np.ndarray)
    np.testing.assert_array_equal(seen[-1][0], flat(plain))
    assert looked.trajectory.shape == (ROWS, flat(plain).size)
    np.testing.assert_array_equal(looked.trajectory, np.stack([x for x, _ in seen]))
    assert sorted(file.name for file in looked.directory.glob("trajectory*")) == ["trajectory.safetensors"]


class Enough(Exception):
    pass


@pytest.mark.parametrize("last", [0, 2, 6])
def test_what_on_round_raises_stops_the_run_and_resume_goes_on(last, tmp_path):
    metrics = {"norm": lambda params, data: jnp.sum(ravel_pytree(params)[0] ** 2)}
    whole = train(tree(run={"trajectory": True}), data=DATA, out=tmp_path / "whole", metrics=metrics)
    rounds: list[float] = []

    def stop(x, row):
        rounds.append(row["round"])
        if row["round"] == last and rounds.count(last) == 1:
            raise Enough

    out = tmp_path / "stopped"
    with pytest.raises(Enough):
        train(tree(run={"trajectory": True}), data=DATA, out=out, on_round=stop, metrics=metrics)
    assert not (out / "summary.json").exists()
    if last:
        with pytest.raises(ConfigError, match="'norm' is measured in one part of the run only"):
            resume(out, data=DATA)
    finished = resume(out, data=DATA, on_round=stop, metrics=metrics)
    assert finished.history == whole.history
    np.testing.assert_array_equal(finished.trajectory, whole.trajectory)
    np.testing.assert_array_equal(flat(finished), flat(whole))
    assert rounds == ([0, 0, 2, 4, 6] if last == 0 else [0, 2, 4, 6])  # a start without a checkpoint starts again


@pytest.mark.parametrize("model", [{}, {"kind": "mlp", "hidden": [3]}])
def test_a_run_of_auto_that_was_stopped_goes_on_and_can_be_repeated(model, tmp_path):
    """What `auto` found left to it must still be left to it in the run's own config."""
    asked = {"privacy": {"epsilon": 4.0, "delta": 1e-4}, "model": model, "algorithm": {"name": "auto"}}
    asked |= {"run": {"every": 2}}
    whole = train(asked, data=DATA, out=tmp_path / "whole")

    def stop(x, row):
        if row["round"] >= 4:
            raise Enough

    with pytest.raises(Enough):
        train(asked, data=DATA, out=tmp_path / "stopped", on_round=stop)
    assert resume(tmp_path / "stopped", data=DATA).history == whole.history
    again = train(str(tmp_path / "whole" / "config.toml"), data=DATA, out=tmp_path / "again")
    assert again.history == whole.history


def stopped_at_four(asked: dict[str, Any], out: Path) -> None:
    def stop(x, row):
        if row["round"] >= 4:
            raise Enough

    with pytest.raises(Enough):
        train(asked, data=DATA, out=out, on_round=stop)


def test_a_stopped_run_goes_on_under_the_plan_that_it_began_with_or_not_at_all(tmp_path, monkeypatch):
    """Another plan's noise and steps on what was released so far would be of no account."""
    asked = tree(algorithm={"name": "auto"}, run={"every": 2})
    del asked["algorithm"]["step_size"], asked["algorithm"]["clip"], asked["algorithm"]["rounds"]
    for out in (tmp_path / "recipe", tmp_path / "data"):
        stopped_at_four(asked, out)
    monkeypatch.setattr(auto, "SHARE", 2 * auto.SHARE)
    with pytest.raises(
        ConfigError, match=r"checkpoint\.safetensors: begun by another plan than config\.toml gives now"
    ):
        resume(tmp_path / "recipe", data=DATA)
    monkeypatch.undo()
    assert resume(tmp_path / "recipe", data=DATA).history
    with pytest.raises(ConfigError, match="begun by another plan"):
        resume(tmp_path / "data", data=made_data(sizes=(40, 25, 33)))


def test_a_runs_own_config_is_what_was_asked(tmp_path):
    """Weights that are left out follow from the rest; written out they would clash with what they do not suit."""
    asked = parse_config(tree(privacy={"unit": "user"}))
    own = load_config(train(asked, data=DATA, out=tmp_path / "run").directory / "config.toml")
    assert "weights" not in own.algorithm.model_fields_set and own == asked
    facts = facts_of(DATA)
    assert fingerprint(make_plan(own, facts)) == fingerprint(make_plan(asked, facts))


def test_none_beside_an_object_says_nothing():
    told = config_from(algorithm="auto", epsilon=3.0, privacy={"epsilon": None, "delta": 1e-4})
    assert told.privacy.epsilon == 3.0


@pytest.mark.parametrize(("section", "key"), [("algorithm", "step_size"), ("algorithm", "rounds"), ("model", "hidden")])
def test_none_says_nothing(section, key):
    """`auto` takes what is said for a choice, and a run's config.toml cannot say None: it would go on otherwise."""
    base = {"privacy": {"epsilon": 4.0, "delta": 1e-4}, "model": {"kind": "mlp"}, "algorithm": {"name": "auto"}}
    asked = parse_config(base | {section: base[section] | {key: None}})
    assert asked == parse_config(base) and key not in getattr(asked, section).model_fields_set
    assert resolved(asked, facts_of(DATA)) == resolved(parse_config(tomllib.loads(to_toml(asked))), facts_of(DATA))


def test_a_run_that_kept_no_trajectory_says_how_to_keep_one(tmp_path):
    run = train(tree(), data=DATA, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"set run\.trajectory = true"):
        run.trajectory  # noqa: B018


# --- own metrics and silos' columns --------------------------------------------------------------------------


def error_of(params, data):
    """The mean squared score on the test records, plus the number of records of silo 1."""
    scores = data.test.features @ params["dense1"]["weight"].reshape(-1)
    return jnp.mean(scores**2) + data.silos["silo 1"].targets.shape[0]


METRICS = {"error": error_of, "records": lambda params, data: data.train.features.shape[0]}


@pytest.mark.parametrize("mode", ["simulation", "messages"])
def test_own_metrics_are_measured_in_every_row(mode, tmp_path):
    seen: list[dict[str, float]] = []
    config = tree(run={"mode": mode, "test_seed": mode == "messages", "trajectory": True, "per_silo": True})
    look = lambda x, row: seen.append(row)
    run = train(config, data=DATA, out=tmp_path / "run", metrics=METRICS, on_round=look)
    assert seen == run.history and len(seen) == len(run.trajectory) == ROWS
    assert {row["records"] for row in run.history} == {96.0}
    unravel = ravel_pytree(run.params)[1]
    weights = [np.asarray(unravel(jnp.asarray(x))["dense1"]["weight"]).reshape(-1) for x in run.trajectory]
    expected = [np.mean((DATA.test.features @ w) ** 2) + 25 for w in weights]
    np.testing.assert_allclose([row["error"] for row in run.history], expected, rtol=1e-5)
    silos = [f"objective/{silo.name}" for silo in DATA.silos]
    assert [np.mean([row[name] for name in silos]) for row in seen] == pytest.approx([r["objective"] for r in seen])
    assert json.loads((run.directory / "history.jsonl").read_text().splitlines()[-1]) == run.history[-1]


def test_own_metrics_in_a_sweep_can_choose_the_best():
    grid = {"algorithm.step_size": [0.1, 0.5], "run.seed": [0.0, 1.0]}
    outcomes = sweep(tree(sweep={"grid": grid, "select": "error"}), data=DATA, metrics=METRICS)
    assert all(row["records"] == 96 and row["error"] >= 25 for o in outcomes for row in o.history)
    assert len({o.history[-1]["error"] for o in outcomes}) == 4


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"objective": error_of}, "'objective' is a name of the library's own"),
        ({"test_mine": error_of}, "'test_mine' is a name of the library's own"),
        ({"a/b": error_of}, "'a/b' is a name of the library's own"),
        ({"mine": 3}, "'mine' is int; give a function"),
        ({"mine": lambda params, data: data.test.targets}, r"'mine' gives shape \(50,\); return one number"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused_before_anything_is_written(metrics, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        train(tree(), data=DATA, out=tmp_path / "run", metrics=metrics)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("prox", ["none", {"kind": "l1", "strength": 0.1}])
def test_silos_columns_are_those_of_each_silo_alone(prox, tmp_path):
    run = train(tree(algorithm={"prox": prox}), data=DATA, out=tmp_path / "run", per_silo=True)
    assert silodp.Config.model_validate(run.config).run.per_silo
    last = run.history[-1]
    names = [silo.name for silo in DATA.silos]
    assert np.mean([last[f"objective/{name}"] for name in names]) == pytest.approx(last["objective"], rel=1e-5)
    for silo in DATA.silos:
        right = np.mean(np.asarray(run.predict(silo.features)) == silo.targets)
        assert last[f"accuracy/{silo.name}"] == pytest.approx(right)
    grid = {"grid": {"run.seed": [0.0]}}
    swept = sweep(tree(algorithm={"prox": prox}, run={"per_silo": True}, sweep=grid), data=DATA)
    assert swept[0].history[-1] == pytest.approx(last, rel=1e-4)


def test_a_run_without_wishes_measures_what_it_always_did(tmp_path):
    run = train(tree(), data=DATA, out=tmp_path / "run")
    usual = {"round", "objective", "gradient_norm2", "test_loss", "test_accuracy"}
    assert set(run.history[0]) == usual | {"bits_up", "bits_down", "record_gradients"}


# --- tables and figures --------------------------------------------------------------------------------------


def test_histories_and_sweeps_as_tables(tmp_path):
    run = train(tree(), data=DATA, out=tmp_path / "run")
    table = run.to_pandas()
    assert table.to_dict("records") == run.history
    outcomes = sweep(tree(sweep={"grid": {"algorithm.step_size": [0.1, 0.5], "run.seed": [0.0, 1.0]}}), data=DATA)
    assert isinstance(outcomes, Sweep) and isinstance(outcomes, list) and len(outcomes) == 4
    rows = outcomes.to_pandas()
    assert rows["algorithm.step_size"].tolist() == [0.1, 0.1, 0.5, 0.5]
    assert rows["objective"].tolist() == [o.history[-1]["objective"] for o in outcomes]
    assert rows["epsilon"].tolist() == [o.epsilon for o in outcomes]
    long = outcomes.to_pandas(histories=True)
    assert len(long) == 4 * ROWS
    assert long[long["run.seed"] == 1.0]["round"].tolist() == [0, 2, 4, 6] * 2


def test_figures_in_every_format_that_is_asked_for(tmp_path):
    run = train(tree(run={"figures": ["svg", "pdf"]}), data=DATA, out=tmp_path / "run")
    files = {file.name: file.read_bytes()[:5] for file in (run.directory / "figures").iterdir()}
    assert files == {"history.svg": b"<?xml", "history.pdf": b"%PDF-"}
    with pytest.raises(ConfigError, match=r"run\.figures"):
        parse_config({"run": {"figures": ["gif"]}})


def test_reproduce_draws_in_the_formats_that_are_asked_for(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "table.md").write_text("the table")
    command = ["reproduce", names()[0], "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, [*command, "--formats", "png,gif"])
    assert refused.exit_code == 2 and "cannot be drawn as 'gif'" in refused.output
    monkeypatch.setattr(driver, "reproduce", lambda *given, formats, **how: asked.append(formats))
    assert CliRunner().invoke(app, [*command, "--formats", "svg, pdf"]).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 0
    assert asked == [["svg", "pdf"], ["png"]]


# --- sweeps over names ---------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch) -> list[int]:
    """How many settings each compiled program holds."""
    monkeypatch.setattr(group, "cores", lambda: 1)
    sizes, original = [], group.compile_run
    monkeypatch.setattr(
        group, "compile_run", lambda *given, **how: sizes.append(len(given[1].x0)) or original(*given, **how)
    )
    return sizes


NAMES = {
    "algorithm.name": ["dp-gd", "prox-sgd"],
    "privacy.trust": ["trusted", "untrusted"],
    "algorithm.step_size": [0.1, 0.3],
}


def test_settings_of_different_names_have_programs_of_their_own(compiled, tmp_path):
    config = tree(sweep={"grid": NAMES})
    outcomes = sweep(config, data=DATA)
    assert compiled == [2] * 4
    for i in (3, 4):
        single = train(with_values(parse_config(config), outcomes[i].values), data=DATA, out=tmp_path / str(i))
        assert outcomes[i].prepared.config.algorithm.name == single.config.algorithm.name
        assert outcomes[i].history[-1] == pytest.approx(single.history[-1], rel=1e-4)
    assert len({o.history[-1]["objective"] for o in outcomes}) == 8
    assert outcomes.to_pandas()["privacy.trust"].tolist()[:4] == ["trusted"] * 2 + ["untrusted"] * 2


@pytest.mark.slow
def test_compressors_samplings_and_switches_can_be_swept(compiled):
    spider = {"name": "spider", "clip": 0.01, "clip_difference": 100.0, "restart": 2}  # a cap that is felt
    soteria = {"name": "soteria-gd", "rounds": 4, "compressor": "natural"}
    for algorithm, grid in (
        (soteria, {"algorithm.compressor": ["natural", "identity"]}),
        ({"name": "dp-sgd", "batch": 8}, {"algorithm.sampling": ["poisson", "fixed"]}),
        ({}, {"algorithm.weights": ["equal", "size"]}),
        (spider, {"algorithm.capped": [True, False]}),
    ):
        outcomes = sweep(tree(algorithm=algorithm, sweep={"grid": grid}), data=DATA)
        settings = [tuple(o.values.values()) for o in outcomes]
        assert len({o.x.tobytes() for o in outcomes}) == len(settings) == len(set(settings))


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({"algorithm.name": ["dp-gd", "dp-gdd"]}, "algorithm.name = 'dp-gdd': unknown (did you mean dp-gd?)"),
        ({"privacy.trust": ["trusted", "nobody"]}, "privacy.trust = 'nobody': unknown"),
        ({"algorithm.compressor": ["natural", "rand"]}, "algorithm.compressor = 'rand': unknown"),
        ({"algorithm.sampling": ["poison"]}, "algorithm.sampling = 'poison': must be"),
        ({"algorithm.step_size": [0.1, "large"]}, "algorithm.step_size = 'large': must be"),
        ({"algorithm.step_size": [0.1, True]}, "true and false are for switches"),
        ({"algorithm.nmae": ["dp-gd"]}, "algorithm.nmae: unknown key (did you mean name?)"),
        ({"run.mode": ["simulation", "messages"]}, "run.mode = 'messages': a sweep is a simulation"),
        ({"run.trajectory": [True]}, "run.trajectory = true: a sweep keeps no trajectories"),
        ({"algorithm.name": ["dp-gd", "spider"]}, "algorithm.restart is missing: spider needs it"),
    ],
)
def test_a_wrong_name_is_found_before_anything_runs(grid, told, compiled):
    with pytest.raises(ConfigError) as caught:
        sweep(tree(sweep={"grid": grid}), data=DATA)
    assert told in str(caught.value)
    assert compiled == []


def test_auto_stands_in_a_sweep_beside_others_but_not_where_it_makes_the_model(compiled, tmp_path):
    grid = {"sweep": {"grid": {"algorithm.name": ["auto", "dp-gd"]}}}
    with pytest.raises(ConfigError, match="auto chooses parts of the model, others do not; sweep them apart"):
        sweep(tree(model={"kind": "mlp"}, **grid), data=DATA)
    assert compiled == []
    asked = parse_config(tree(model={"kind": "mlp"}, **grid))  # and what a sweep keeps says what it was asked
    kept = parse_config(tomllib.loads(to_toml(asked)))
    for setting in ({"algorithm.name": "auto"}, {"algorithm.name": "dp-gd"}):
        mine, own = (resolved(with_values(config, setting), facts_of(DATA)) for config in (asked, kept))
        assert mine == own


def test_a_stopped_sweep_goes_on_under_the_plans_that_it_began_with(tmp_path, monkeypatch):
    asked = parse_config(tree(data={"source": "wbcd", "silos": 3}, sweep={"grid": {"algorithm.rounds": [2, 3]}}))
    monkeypatch.setattr(parts, "told", interrupted := OneOf(parts.told))
    with pytest.raises(KeyboardInterrupt):
        parts.sweep_in(tmp_path / "sweep", asked, read_data(asked.data))
    assert interrupted.calls == 2
    file = tmp_path / "sweep" / "config.toml"
    begun = file.read_text()
    file.write_text(begun.replace("epsilon = 4.0", "epsilon = 9.0"))
    with pytest.raises(ConfigError, match=r"parts\.json: begun by another plan"):
        parts.resume_sweep(RunDirectory.open(tmp_path / "sweep"))
    file.write_text(begun)
    found = parts.resume_sweep(RunDirectory.open(tmp_path / "sweep"))
    assert [each.epsilon for each in found] == [pytest.approx(4.0, rel=1e-3)] * 2


class OneOf:
    """The function once; the second call is interrupted, and after that it is the function again."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *given):
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return self.function(*given)


def test_numbers_stay_numbers_and_are_shown_as_a_config_writes_them():
    config = parse_config({"sweep": {"grid": {"algorithm.rounds": [1, 2.0], "algorithm.capped": [True]}}})
    assert list(map(type, config.sweep.grid["algorithm.rounds"])) == [float, float]
    assert config.sweep.grid["algorithm.capped"] == [True]
    assert [shown(value) for value in (True, False, 0.1, 3.0, "dp-gd")] == ["true", "false", "0.1", "3", "dp-gd"]


def test_a_private_selection_over_names_is_charged_for_the_mixture():
    grid = {"algorithm.name": ["dp-gd", "prox-sgd"], "algorithm.step_size": [0.1, 0.5]}
    config = tree(sweep={"grid": grid, "select": "test_accuracy", "private_trials": 3.0})
    chosen = select_privately(config, data=DATA)
    named = [with_values(parse_config(config), {"algorithm.name": name}) for name in grid["algorithm.name"]]
    plans = [prepare(each, DATA).plan for each in named]
    expected = max(mixed_selection_epsilon([plan.spent(i) for plan in plans], 1e-4, Trials(3.0)) for i in range(3))
    assert chosen.epsilon == pytest.approx(expected)
    for key, values in (("privacy.trust", ["trusted", "untrusted"]), ("run.per_silo", [True, False])):
        with pytest.raises(ConfigError, match=key):
            select_privately(tree(sweep=config["sweep"] | {"grid": {key: values}}), data=DATA)


def test_a_mixed_grid_can_cost_more_than_each_of_its_settings():
    """Renyi curves that cross: a setting alone is charged at the order that suits it, the mixture at one for both."""
    once, often = Spent(Releases("value", 1, Full()), 3.0), Spent(Releases("value", 100, Poisson(0.01)), 0.5)
    alone = max(selection_epsilon([spent], 1e-5, Trials(10.0)) for spent in (once, often))
    assert mixed_selection_epsilon([[once], [often]], 1e-5, Trials(10.0)) > 1.05 * alone
    assert mixed_selection_epsilon([[once], [once]], 1e-5, Trials(10.0)) == selection_epsilon(
        [once], 1e-5, Trials(10.0)
    )


# --- LAPACK --------------------------------------------------------------------------------------------------

SWEEP_WITH_LAPACK = """
import equinox as eqx, jax.numpy as jnp, silodp
from silodp.algorithms.gradient import GradientDescent
from silodp.run import group
from tests.conftest import made_data

class Decomposing(GradientDescent):
    def round(self, state, fed):
        state = super().round(state, fed)
        matrix = jnp.outer(state.x, state.x) + jnp.eye(state.x.size)
        ones = [jnp.linalg.eigh(matrix * k)[0].sum() + jnp.linalg.inv(matrix * k).sum() for k in (1.0, 2.0, 3.0)]
        return eqx.tree_at(lambda s: s.x, state, state.x * (1 + 1e-9 * sum(ones)))

silodp.register("decomposing", Decomposing)
group.cores = lambda: 2
outcomes = silodp.sweep(
    {"privacy": {"epsilon": 4.0, "delta": 1e-4},
     "algorithm": {"name": "decomposing", "rounds": 60, "step_size": 0.1, "clip": 1.0},
     "run": {"every": 20},
     "sweep": {"grid": {"algorithm.step_size": [0.1, 0.2, 0.3, 0.4]}}},
    data=made_data(features=60))
print(len({o.x.tobytes() for o in outcomes}), "settings done")
"""


def test_a_sweep_whose_rounds_call_lapack_ends():
    """With settings stacked, jaxlib 0.10 waits for ever for threads of the pool that it occupies."""
    there = {"cwd": Path(__file__).parents[1], "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}}
    done = subprocess.run(
        [sys.executable, "-c", SWEEP_WITH_LAPACK], capture_output=True, text=True, timeout=300, **there
    )
    assert done.stdout.strip() == "4 settings done", done.stderr[-2000:]
