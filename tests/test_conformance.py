"""Every registered algorithm, on every channel it has: runs; resumes bit-equal; message mode = simulation;
declared releases = counted ones; noise 0 and clip infinite = the textbook method."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from silodp.algorithms import REGISTRY
from silodp.config import Config
from silodp.data import FederatedData
from silodp.run.directory import RunDirectory
from silodp.run.messages import MessageFederation, set_up
from silodp.run.runner import prepare, run
from silodp.run.simulate import begin, compile_run, simulate
from tests.cases import CASES, OPTIONS, ROUNDS, case
from tests.textbook import textbook


def test_every_private_algorithm_has_an_example():
    assert [name for name, entry in REGISTRY.items() if entry.private and not entry.example] == []


class Stopped(Exception):
    pass


def finished(config: Config, data: FederatedData, stop_after: int | None = None, carry=None):
    """The carry after the run, or when it is stopped at a chunk's end."""
    prepared = prepare(config, data)
    opening, _ = begin(prepared.problem, prepared.setting, sweep=False)
    carry = opening if carry is None else carry
    compiled = compile_run(prepared.problem, prepared.setting, carry, sweep=False)
    seen = []

    def on_chunk(chunk):
        seen.append(chunk.carry)
        if chunk.round == stop_after:
            raise Stopped

    try:
        simulate(prepared.problem, prepared.setting, carry, compiled, on_chunk)
    except Stopped:
        pass
    return seen[-1]


@pytest.mark.parametrize(("name", "trust"), CASES)
def test_runs_resumes_and_counts(name, trust, data, tmp_path):
    config = case(name, trust)
    whole = run(config, data=data, out=tmp_path / "whole")
    assert np.isfinite([row["objective"] for row in whole.history]).all()
    assert whole.history[-1]["round"] == ROUNDS
    assert whole.history[-1]["bits_up"] > 0

    prepared = prepare(config, data)
    stopped = finished(config, data, stop_after=2)
    directory = RunDirectory.create(tmp_path / "parts", config, name)
    directory.save_checkpoint(stopped, 2)
    loaded, _ = directory.load_checkpoint(stopped)
    resumed = finished(config, data, carry=loaded)
    flat = np.asarray(resumed.state.x)
    np.testing.assert_array_equal(flat, np.asarray(jax.flatten_util.ravel_pytree(whole.params)[0]))

    # `run` has settled the count against the plan; here the declaration is compared with the count itself.
    for silo in range(len(data.silos)):
        for stream in prepared.parts.releases(silo):
            assert int(resumed.ends.accounts.tallies[stream.name].count[silo]) == stream.count


@pytest.mark.parametrize(("name", "trust"), CASES)
def test_message_mode_is_the_simulation(name, trust, data, silo_processes):
    config = case(name, trust)
    prepared = prepare(config, data)
    simulated = finished(config, data)
    multipliers = {} if prepared.plan is None else {k: list(v) for k, v in prepared.plan.multipliers.items()}
    set_up(silo_processes, prepared.parts, multipliers, data, config.run.seed)
    weights = np.asarray(prepared.problem.silos.weights)
    fed = MessageFederation(prepared.parts, silo_processes, weights, config.run.seed, config.run.seed)
    fed.start(prepared.setting.x0)
    state = prepared.parts.algorithm.init(prepared.setting.x0)
    for r in range(ROUNDS):
        fed.begin_round(r)
        state = prepared.parts.algorithm.round(state, fed)
    np.testing.assert_allclose(np.asarray(state.x), np.asarray(simulated.state.x), rtol=1e-5, atol=1e-5)
    counted, expected = fed.final_accounts(), simulated.ends.accounts
    for stream, tally in expected.tallies.items():
        np.testing.assert_array_equal(np.asarray(counted.tallies[stream].count), np.asarray(tally.count))


@pytest.mark.parametrize(("name", "trust"), CASES)
def test_without_noise_and_clip_it_is_the_textbook_method(name, trust, data):
    wide = {key: 1e6 for key in OPTIONS[name] if key.startswith("clip")}
    config = case(name, trust, private=False, **wide, **full_batch(name))
    expected = textbook(name, config, data)
    np.testing.assert_allclose(np.asarray(finished(config, data).state.x), expected, rtol=2e-4, atol=2e-5)


def full_batch(name: str) -> dict:
    """The textbook form is deterministic: every record in every round."""
    fields = {f.name for f in dataclasses.fields(REGISTRY[name].build)}
    return {"batch": None, "sampling": "full"} if "batch" in fields and "batch" in OPTIONS[name] else {}
