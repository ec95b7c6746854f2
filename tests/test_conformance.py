"""Every registered algorithm, on every channel it has: runs; resumes bit-equal; message mode = simulation;
declared releases = counted ones; noise 0 and clip infinite = the textbook method."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest

from silodp.channels import Summed
from silodp.config import Config
from silodp.data import FederatedData
from silodp.deploy.coordinator import MessageFederation
from silodp.deploy.pipes import joined
from silodp.plan.certificate import settle
from silodp.run.directory import RunDirectory
from silodp.run.history import rows_of
from silodp.run.prepare import Prepared, prepare
from silodp.run.simulate import Carry, Compiled, begin, compile_run, simulate
from tests.cases import CASES, OPTIONS, ROUNDS, case, once_each, with_test_seed
from tests.conftest import made_data
from tests.textbook import textbook

DATA, BALANCED = made_data(), made_data((30, 30, 30))
VARIANCE_REDUCED = ("soteria-svrg", "soteria-saga", "ldp-svrg")
PARTIAL = [("dp-gd", "trusted"), ("spider", "untrusted"), ("prox-svrg", "untrusted"), ("soteria-svrg", "untrusted"),
           ("soteria-saga", "untrusted"), ("local-sgd", "untrusted"), ("sdp-spider", "shuffled"),
           ("spider", "aggregated")]  # fmt: skip


@dataclass
class Finished:
    """One compiled run: the carry after every chunk, by round, and the rows."""

    prepared: Prepared
    compiled: Compiled
    carries: dict[int, Carry] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def last(self) -> Carry:
        return self.carries[max(self.carries)]


def finish(config: Config, data: FederatedData = DATA) -> Finished:
    prepared = prepare(config, data)
    carry, first = begin(prepared.problem, prepared.setting, sweep=False)
    done = Finished(prepared, compile_run(prepared.problem, prepared.setting, carry, sweep=False), rows=rows_of(first))

    def on_chunk(chunk):
        done.carries[chunk.round] = chunk.carry
        done.rows += rows_of(chunk.rows)

    simulate(prepared.problem, prepared.setting, carry, done.compiled, on_chunk)
    return done


@functools.lru_cache(maxsize=2)
def finished(name: str, trust: str, participation: int | None) -> Finished:
    return finish(case(name, trust, participation=participation))


@pytest.mark.parametrize(("name", "trust"), once_each(list(CASES)))
def test_runs_and_releases_what_it_declares(name, trust):
    done = finished(name, trust, None)
    assert done.rows[-1]["round"] == ROUNDS
    assert np.isfinite([row["objective"] for row in done.rows]).all()
    assert done.rows[-1]["bits_up"] > 0
    account = done.last.ends.accounts
    for silo in range(len(DATA.silos)):
        for stream in done.prepared.plan.releases(silo):
            assert int(account.tallies[stream.name].count[silo]) == stream.count
    if done.prepared.plan.private:
        settle(done.prepared.plan, account)
        for silo in range(len(DATA.silos)):
            assert done.prepared.plan.epsilon(silo) <= 4.0 + 1e-6


@pytest.mark.parametrize(("name", "trust"), once_each(list(CASES)))
def test_resumes_bit_equal(name, trust, tmp_path):
    done = finished(name, trust, None)
    first = min(done.carries)
    directory = RunDirectory.create(tmp_path / "run", done.prepared.config, name)
    directory.save_checkpoint(done.carries[first], 1)
    loaded, rows = directory.load_checkpoint(done.last)
    assert (int(loaded.round), rows) == (first, 1)
    problem, setting = done.prepared.problem, done.prepared.setting
    resumed = simulate(problem, setting, loaded, done.compiled, lambda chunk: None)
    np.testing.assert_array_equal(np.asarray(resumed.state.x), np.asarray(done.last.state.x))
    np.testing.assert_array_equal(np.asarray(resumed.drawn), np.asarray(done.last.drawn))


def also_untrusted(name: str, trust: str) -> bool:
    """A trusted server's silos run the untrusted ones' code without noise, and families share theirs: processes are
    dear, one of each kind will do."""
    return trust == "trusted" and (name, "untrusted") in CASES and name != "dp-gd"


QUICK = ("dp-gd", "spider", "soteria-saga", "soteria-svrg", "ce-psgm", "mu2", "sdp-spider", "diff2-bvr-l-sgd")
ABSENT = ("soteria-svrg", "sdp-spider")  # with a memory in the silo, and past a shuffler


def dear(row: Any) -> Any:
    """A row of message mode, marked slow unless it is one of its kind."""
    name, _, participation = values = getattr(row, "values", row)
    return (
        row if name in (QUICK if participation is None else ABSENT) else pytest.param(*values, marks=pytest.mark.slow)
    )


@pytest.mark.parametrize(
    ("name", "trust", "participation"),
    [
        dear(row)
        for row in once_each([(n, t, None) for n, t in CASES], also_untrusted) + [(n, t, 2) for n, t in PARTIAL]
    ],
)
def test_message_mode_is_the_simulation(name, trust, participation, silo_processes):
    done = finished(name, trust, participation)
    prepared = done.prepared
    plan, seed = with_test_seed(prepared.plan), prepared.config.run.seed
    records = [{"features": silo.features, "targets": silo.targets} for silo in DATA.silos]
    with joined(plan, silo_processes, records, seed) as fed:
        state, counted, costs = message_run(fed, prepared)
    expected = done.last
    # On another processor one of P_vec's roundings may fall the other way: 2 / 200 of a clip among 96 records.
    atol = 2e-4 if isinstance(prepared.plan.channel, Summed) else 1e-5
    np.testing.assert_allclose(np.asarray(state.x), np.asarray(expected.state.x), rtol=1e-5, atol=atol)
    for stream, tally in expected.ends.accounts.tallies.items():
        np.testing.assert_array_equal(np.asarray(counted.tallies[stream].count), np.asarray(tally.count))
    simulated = {column: sum(row[column] for row in done.rows) for column in costs}
    if name == "soteria-svrg" and participation:
        # A silo that was present last time keeps its snapshot; the simulation renews all present ones together.
        assert costs.pop("record_gradients") <= simulated.pop("record_gradients")
    assert costs == simulated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trust", "options"),
    [
        ("sdp-prox-svrg", "shuffled", {"batch_share": 0.4}),
        ("soteria-gd", "untrusted", {"shift_rate": 0.3, "shift_decay": "linear"}),
        ("soteria-svrg", "untrusted", {"participation": (1, 3)}),
    ],
)
def test_options_beyond_the_examples_are_the_simulation_too(name, trust, options, silo_processes):
    done = finish(case(name, trust, **options))
    plan, seed = with_test_seed(done.prepared.plan), done.prepared.config.run.seed
    records = [{"features": silo.features, "targets": silo.targets} for silo in DATA.silos]
    with joined(plan, silo_processes, records, seed) as fed:
        state, _, _ = message_run(fed, done.prepared)
    atol = 2e-4 if isinstance(plan.channel, Summed) else 1e-5
    np.testing.assert_allclose(np.asarray(state.x), np.asarray(done.last.state.x), rtol=1e-5, atol=atol)


def message_run(fed: MessageFederation, prepared: Prepared):
    fed.start(prepared.setting.x0)
    state = prepared.plan.algorithm.init(prepared.setting.x0)
    for r in range(ROUNDS):
        fed.begin_round(r)
        state = prepared.plan.algorithm.round(state, fed)
    return state, fed.final_accounts(), fed.take_costs()


# P_vec rounds every vector to its grid, noise or not; its algorithms are tested on the other channels.
@pytest.mark.parametrize(("name", "trust"), once_each([c for c in CASES if not c[0].startswith("sdp-")]))
def test_without_noise_and_clip_it_is_the_textbook_method(name, trust):
    changes = {key: 1e6 for key in OPTIONS[name] if key.startswith("clip")} | deterministic(name) | {"weights": "equal"}
    config = case(name, trust, private=False, **changes)
    data = BALANCED if name in VARIANCE_REDUCED else DATA
    expected = textbook(name, config, data)
    np.testing.assert_allclose(np.asarray(finish(config, data).last.state.x), expected, rtol=3e-4, atol=3e-5)


def deterministic(name: str) -> dict:
    """Every record in every round, nothing compressed: then the textbook form has no randomness either."""
    changes: dict = {}
    if "compressor" in OPTIONS[name]:
        changes |= {"compressor": "identity", "keep": None}
    if name in VARIANCE_REDUCED:
        return changes | {"batch": BALANCED.sizes[0]}
    if "epochs" in OPTIONS[name]:
        changes |= {"epochs": 3}  # one stage: the next would start from a random iterate
    if "batch" in OPTIONS[name] and name != "mu2":
        changes |= {"batch": None, "sampling": "full"}
    if "batch_local" in OPTIONS[name]:
        changes |= {"batch_local": None}
    return changes
