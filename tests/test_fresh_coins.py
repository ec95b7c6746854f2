"""No two draws of a run share their coins, and every silo adds the noise that is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.algorithms.differences import LocalDifference
from silodp.channels import Channel, Compressed, Trusted, Untrusted
from silodp.channels.channel import Noised
from silodp.compressors import Identity, RandK
from silodp.core import Silo, Site
from silodp.parse import parse_config
from silodp.prox import NoProx
from silodp.randomness import Scoped, SeededRandomness, SharedBatch, SystemRandomness
from silodp.releases import Account, RecordMean, Release, Vector
from silodp.run import selection
from silodp.run.federation import SimulatedFederation
from silodp.run.prepare import prepare
from silodp.run.simulate import start
from tests.cases import case
from tests.conftest import made_data

D = 40


def silo_of(channel: Channel, index: int = 0, seed: int = 0) -> Silo:
    site = Site(None, channel, (jnp.zeros((4, 2)),), jnp.int32(4), jnp.int32(index))  # type: ignore[arg-type]
    return Silo(site, jnp.int32(0), SeededRandomness(jax.random.key(seed)), (), Account.empty(["value"]))


def nothing(bound: float = 1.0) -> Release:
    return Release(jnp.zeros(D), jnp.float32(bound), "value")


@pytest.mark.parametrize("channel", [Untrusted(), Compressed(compressor=Identity())], ids=lambda c: type(c).__name__)
def test_a_silo_adds_noise_of_its_own_multiplier_and_counts_it(channel):
    noised = replace(channel, multipliers={"value": jnp.array([1.0, 100.0, 0.0])})
    for index, multiplier in enumerate((1.0, 100.0, 0.0)):
        silo = silo_of(noised, index)
        message, _ = noised.send(nothing(0.5), silo, {})
        sent = np.asarray(message.value if isinstance(message, Noised) else message.vector)
        assert sent.std() == pytest.approx(multiplier * 0.5, rel=0.4)  # of 40 draws
        tally = silo.account.tallies["value"]
        assert (int(tally.count), float(tally.multiplier)) == (1, multiplier)


def test_a_trusted_servers_noise_is_scaled_to_the_record_that_moves_most():
    bounds, weights = jnp.array([0.1, 0.4, 0.2]), jnp.array([0.2, 0.3, 0.5])
    channel = Trusted(multipliers={"value": jnp.full(3, 7.0)})
    messages = jax.vmap(lambda bound: Release(jnp.zeros(2000), bound, "value"))(bounds)
    coins = SeededRandomness(jax.random.key(1))
    mean, _, _ = channel.receive(messages, weights, Account.empty(["value"], (3,)), coins, ())
    assert np.asarray(mean).std() == pytest.approx(7.0 * 0.3 * 0.4, rel=0.1)


def test_steps_of_a_silo_have_noise_of_their_own():
    channel = Untrusted(multipliers={"value": jnp.ones(1)})
    drawn = [np.asarray(silo_of(channel).privatise(nothing(), step)) for step in range(3)]
    assert len(np.unique(np.concatenate(drawn))) == 3 * D


class Steps(Silo):
    """Writes down which steps are drawn and noised; loops are written out."""

    def __init__(self) -> None:
        """It has no records, and is in its first round."""
        self.round = jnp.int32(0)

    def mean(self, points: Any, coefficients: Any, clip: Any, stream: str, batch: Any = None, step: Any = 0) -> Any:
        self.drawn.append(int(step))
        return nothing()

    def privatise(self, answer: RecordMean | Release, step: Any = 0) -> Vector:
        self.noised.append(int(step))
        return jnp.ones(D)

    def loop(self, steps: int, body: Any, carry: Any) -> Any:
        self.drawn, self.noised = [], []
        for k in range(steps):
            carry = body(jnp.int32(k), carry)
        return carry


def test_local_steps_draw_and_noise_each_step_afresh():
    one = jnp.float32(1.0)
    algorithm = LocalDifference(one, NoProx(), one, 3, one, clip_local=one, local_steps=4)
    silo = Steps()
    algorithm.refine(silo, jnp.zeros(D), jnp.ones(D), jnp.ones(D), one)
    assert silo.drawn == silo.noised == [0, 1, 2]


def test_masks_differ_between_rounds_and_silos():
    """The saving by masks counts on a mask that nobody knew beforehand."""
    channel = Compressed(compressor=RandK(5), multipliers={"value": jnp.ones(3)})
    kept = [np.flatnonzero(channel.send(nothing(), silo_of(channel, 0, seed), {})[0].decoded) for seed in range(6)]
    assert len({tuple(each.tolist()) for each in kept}) == 6


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_rounds_of_a_simulation_have_noise_of_their_own(trust):
    """The same question at the same point in three rounds: all that differs is noise."""
    prepared = prepare(case("dp-gd", trust), made_data())
    problem, setting = prepared.problem, prepared.setting
    ends = start(problem, setting).ends

    def asked(round: int) -> np.ndarray:
        fed = SimulatedFederation(
            problem.objective, setting.channel, problem.silos, None, setting.key, jnp.int32(round), ends
        )
        return np.asarray(fed.mean(setting.algorithm.value, setting.x0))  # type: ignore[attr-defined]

    means = np.concatenate([asked(r) for r in range(3)])
    assert len(np.unique(means)) == means.size


def test_silos_of_a_simulation_have_noise_of_their_own():
    """Of silos with the same records each adds its own: the mean over three has noise smaller by sqrt(3)."""
    data = made_data((20, 20, 20))
    prepared = prepare(case("dp-gd", "untrusted"), replace(data, silos=(data.silos[0],) * 3))
    problem, setting = prepared.problem, prepared.setting
    seen: list[np.ndarray] = []

    class Looking(Silo):
        def saw(self, release: Release, noised: Vector) -> None:
            jax.debug.callback(lambda value: seen.append(np.asarray(value)), noised)

    fed = SimulatedFederation(
        problem.objective, setting.channel, problem.silos, None, setting.key, jnp.int32(0), start(problem, setting).ends
    )
    fed.silo_kind = Looking
    fed.mean(setting.algorithm.value, setting.x0)  # type: ignore[attr-defined]
    jax.effects_barrier()
    noised = np.concatenate([np.ravel(each) for each in seen])
    assert len(np.unique(noised)) == noised.size >= 3 * 6


def test_two_users_of_a_source_share_nothing():
    source = SeededRandomness(jax.random.key(0))
    for kind in ("normal", "uniform", "bits"):
        draws = [np.asarray(getattr(Scoped(source, scope), kind)("side", (50,))) for scope in ("value", "difference")]
        draws.append(np.asarray(getattr(source, kind)("side", (50,))))
        assert len(np.unique(np.concatenate(draws))) == 150


def test_only_the_batch_of_a_round_is_shared():
    """Two questions of a round get one batch; all other coins are fresh, also those of the same purpose."""
    shared = SharedBatch(SystemRandomness(), jax.random.key(0), "batch/round")
    twice = lambda kind, purpose: [np.asarray(getattr(shared, kind)(purpose, (50,))) for _ in range(2)]
    for kind in ("uniform", "bits"):
        one, other = twice(kind, "batch/round")
        np.testing.assert_array_equal(one, other)
        assert len(np.unique(np.concatenate(twice(kind, "randomizer side")))) == 100
    assert len(np.unique(np.concatenate(twice("normal", "batch/round")))) == 100  # noise is never shared


def test_trials_of_a_selection_have_seeds_of_their_own(monkeypatch):
    tree = case("dp-gd", "untrusted", rounds=3).model_dump(exclude_unset=True)
    sweep = {"grid": {"algorithm.step_size": [0.1, 0.5]}, "select": "test_accuracy", "private_trials": 30.0}
    seeds: list[float] = []
    honest = selection.run_points

    def spied(base: Any, points: Any, *rest: Any) -> Any:
        seeds.extend(point["run.seed"] for point in points)
        return honest(base, points[:1], *rest)

    monkeypatch.setattr(selection, "run_points", spied)
    selection.select_privately(parse_config(tree | {"sweep": sweep}), data=made_data())
    assert len(seeds) > 3 and len(set(seeds)) == len(seeds)
