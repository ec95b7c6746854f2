"""What a silo keeps from round to round: sums that grow for long, and SAGA's table over its refreshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from silodp.algorithms.mu2 import Mu2
from silodp.algorithms.soteria import RENEWED, SAGA
from silodp.channels import Untrusted
from silodp.core import Silo, Site
from silodp.doubles import Double, exact
from silodp.gradients import SLACK
from silodp.gradients.blocks import MOST_RECORDS, RUN, UNIT
from silodp.models import build_model, from_loss
from silodp.objective import build_objective
from silodp.prox import NoProx, build_prox
from silodp.randomness import SeededRandomness
from silodp.releases import Account
from silodp.sampling import Cumulative, TwoLevel
from tests.rounding.test_arithmetic import crafted

CLIP = 1.001


def test_a_running_sum_of_many_rounds_moves_by_no_more_than_its_bound():
    """mu2's sum of one record a round, crafted so that float32 rounds two neighbours apart: by 4 bounds here."""
    rounds = 25_000
    objective = build_objective(from_loss(lambda x, r: x[0] * r[0], lambda key: jnp.zeros(1)), (jnp.zeros(()),))
    algorithm = Mu2(jnp.float32(1), build_prox("none"), CLIP, Cumulative(rounds, 1), 1.0)

    @jax.jit
    def released(records):
        site = Site(objective, Untrusted(), (records,), jnp.int32(rounds), jnp.int32(0), alone=True)

        def answer(memory: Double, round):
            silo = Silo(site, round, SeededRandomness(jax.random.key(0)), memory, Account.empty(["value"]))
            release = algorithm.corrected(silo, jnp.zeros(1), jnp.zeros(1))
            return silo.memory, (release.exact.high, release.exact.low, release.bound)

        return jax.lax.scan(answer, Double.of(jnp.zeros(1)), jnp.arange(rounds))[1]

    one, other = (released(jnp.float32(numbers)) for numbers in crafted(rounds, 0))
    moved = np.abs(exact(Double(*one[:2])) - exact(Double(*other[:2]))).ravel()
    assert np.all(moved <= np.asarray(one[2]))
    assert moved.max() > 0.98 * 2  # they are neighbours
    apart = [np.cumsum(numbers, dtype=np.float32)[-1] for numbers in crafted(rounds, 0)]
    assert abs(float(apart[0]) - float(apart[1])) > 7  # a plain sum


def test_sagas_estimates_move_by_no_more_than_their_bound_over_all_refreshes():
    """A sum is kept up to date for 64 answers, then computed anew: twice here."""
    n, d, batch, rng = 60, 5, 20, np.random.default_rng(0)
    objective = build_objective(build_model("linear", inputs=d, outputs=1, bias=False), (jnp.zeros(d), jnp.zeros(())))
    algorithm = SAGA(jnp.float32(1), NoProx(), jnp.float32(CLIP), TwoLevel(batch))

    def silo_of(features, targets, memory, round):
        site = Site(objective, Untrusted(), (features, targets), jnp.int32(n), jnp.int32(0), alone=True)
        coins = SeededRandomness(jax.random.fold_in(jax.random.key(3), round))
        return Silo(site, round, coins, memory, Account.empty(["value"]))

    @jax.jit
    def answers(features, targets, points):
        def answer(memory, asked):
            silo = silo_of(features, targets, memory, asked[0])
            release = algorithm.estimate(silo, asked[1])
            return silo.memory, (release.exact.high, release.exact.low, release.bound, silo.memory.age)

        first = algorithm.remember(silo_of(features, targets, (), jnp.int32(0)), points[0])
        return jax.lax.scan(answer, first, (jnp.arange(len(points)), points))[1]

    points = np.float32(3 * rng.normal(size=(2 * RENEWED + 10, d)))
    features, targets = (
        np.float32(10.0 ** rng.integers(-3, 4, (n, 1)) * rng.normal(size=(n, d))),
        np.zeros(n, np.float32),
    )
    before = answers(features, targets, points)
    assert np.asarray(before[3]).max() == RENEWED
    reached = []
    for replaced in (-7 * features[0], np.float32(1e20) * features[0], np.full(d, np.nan, np.float32)):
        other = features.copy()
        other[0] = replaced
        after = answers(other, targets, points)
        moved = np.linalg.norm(exact(Double(*before[:2])) - exact(Double(*after[:2])), axis=1)
        reached.append(moved / np.asarray(before[2]))
    assert np.max(reached) <= 1
    assert np.max(reached) > 1 / 2 - SLACK  # a drawn record whose gradient turns


def test_the_outer_sum_of_the_most_records_is_off_by_no_more_than_is_proven():
    """2^22 records in runs of 256: as long a sum as there may be, of runs that all pull one way."""
    runs = MOST_RECORDS // RUN
    proven = 2 * UNIT**2 * MOST_RECORDS**2 / RUN  # in units of two clips, of both neighbours together
    add = jax.jit(lambda parts: jax.lax.scan(lambda t, p: (t.plus(p[None]), None), Double.of(jnp.zeros(64)), parts)[0])
    rng = np.random.default_rng(5)
    parts = np.float32(rng.uniform(0.99 * RUN, RUN, (runs, 64)))
    replaced = np.concatenate([np.float32(parts[:1] - rng.uniform(1.9, 2, (1, 64))), parts[1:]])
    truth = parts[0].astype(np.float64) - replaced[0]
    moved = exact(add(parts)) - exact(add(replaced))
    assert np.abs(moved - truth).max() <= 2 * proven <= 2 * SLACK / 8
    plain = [np.cumsum(each, axis=0, dtype=np.float32)[-1].astype(np.float64) for each in (parts, replaced)]
    assert np.abs(plain[0] - plain[1] - truth).max() > 2 * SLACK  # in float32 it would not do
