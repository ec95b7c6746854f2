"""Whole runs of every algorithm on two silos that differ in one record: no release moves beyond its `bound`.

The two worlds run side by side (vmap with a named axis), with the same coins. Where a silo would send or use a noised
release, both worlds go on with the same one: that is the condition under which adaptive composition looks at a
release. What silos remember by themselves may differ, as it does in reality.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.algorithms import REGISTRY
from silodp.algorithms.gradient import GradientDescent
from silodp.channels import Untrusted, privatise
from silodp.core import Silo
from silodp.releases import Answer, Release, Vector
from silodp.run.prepare import prepare
from silodp.run.simulate import Problem, Setting, one_round, start
from tests.cases import case
from tests.conftest import made_data

DATA = made_data((14, 12), features=3)
PAIRS = 12  # pairs of neighbours tried at once
NAMES = [name for name, entry in REGISTRY.items() if entry.private and "untrusted" in (entry.trusts or ())]


class TwinChannel(Untrusted):
    """Spends, in place of a multiplier, bound over distance: the account keeps the smallest of each stream."""

    def privatise_local(self, release: Release, silo: Silo, step: Any = 0) -> Vector:
        values, rests = (jax.lax.all_gather(each, "world") for each in (release.exact.high, release.exact.low))
        bound = jax.lax.all_gather(release.bound, "world").min()
        distance = jnp.linalg.norm((values[0] - values[1]) + (rests[0] - rests[1]))
        room = jnp.where(distance > 0, bound / jnp.where(distance > 0, distance, 1.0), jnp.inf)
        silo.account = silo.account.spend(release.stream, room)
        return privatise(Release(values[0], bound, release.stream), 0.1, silo.randomness, step)


def neighbours(seed: int = 0) -> tuple[Any, Any]:
    """Records [pair, world, silo, record]: in the second world one record of silo 0 is replaced, often by its
    opposite, of any magnitude or not a number at all."""
    features, targets, _ = DATA.stack()
    rng = np.random.default_rng(seed)
    x = np.tile(features, (PAIRS, 2, 1, 1, 1)) * 5  # most gradients are clipped
    y = np.tile(targets, (PAIRS, 2, 1, 1))
    for pair in range(PAIRS):
        place = rng.integers(min(DATA.sizes))
        x[pair, 1, 0, place] *= [1, -1, 1e6, 1e30, np.nan, 0][pair % 6]
        y[pair, 1, 0, place] = 1 - y[pair, 0, 0, place]
    return jnp.asarray(x), jnp.asarray(y)


@eqx.filter_jit
def room(problem: Problem, setting: Setting, records: Any) -> dict[str, jax.Array]:
    """For every stream, pair and silo the smallest bound over distance in the whole run."""

    def world(records: Any) -> dict[str, jax.Array]:
        own = eqx.tree_at(lambda p: p.silos.records, problem, records)
        step = lambda _, carry: one_round(own, setting, carry)
        carry = jax.lax.fori_loop(0, own.rounds, step, start(own, setting))
        return {name: tally.multiplier for name, tally in carry.ends.accounts.tallies.items()}

    both = jax.vmap(jax.vmap(world, axis_name="world"))(records)
    return {name: least[:, 0] for name, least in both.items()}


def least_room(name: str, algorithm: Any = None) -> dict[str, float]:
    prepared = prepare(case(name, "untrusted", prox="none"), DATA)
    setting = prepared.setting
    twin = TwinChannel()
    setting = Setting(algorithm or setting.algorithm, twin, setting.key, setting.x0)
    return {stream: float(np.min(least)) for stream, least in room(prepared.problem, setting, neighbours()).items()}


QUICK = ("spider", "diff2-bvr-l-sgd", "ce-psgm", "soteria-saga", "soteria-svrg", "mu2", "local-sgd")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]
)  # families share their queries
def test_no_release_of_a_run_moves_beyond_its_bound(name):
    found = least_room(name)
    assert all(least >= 1 for least in found.values()), found
    # SVRG and SAGA need the worst of three gradients at once for their whole bound; the others come close to it.
    # SVRG's has room for a gradient that rounding turns (tests/rounding/test_worst_neighbours.py has such records).
    most = 5 if name in ("soteria-svrg", "ldp-svrg") else 2.6
    assert min(found.values()) < most, f"these neighbours do not test the bound: {found}"


class Doubled(GradientDescent):
    """A mutant: releases twice the mean under the bound of the mean."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        honest = silo.mean([x], [1.0], self.clip, "value", self.batch).release()
        return Release(2 * honest.value, honest.bound, honest.stream)


def test_a_mutant_is_caught():
    honest = prepare(case("dp-gd", "untrusted"), DATA).setting.algorithm
    assert isinstance(honest, GradientDescent)
    mutant = Doubled(honest.step_size, honest.prox, honest.clip, honest.batch)
    assert least_room("dp-gd", mutant)["value"] < 0.9
