"""Drawn records stand side by side: one that is drawn, or not, moves all behind it, and their sum is rounded anew."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.doubles import exact
from silodp.facts import Stream
from silodp.gradients import SLACK, Regularised, clipped_sum, dense
from silodp.gradients.blocks import MOST_RECORDS, RUN, SHORTEST_RUN, order_error, run_count, sampled_run
from silodp.releases import Gradients, RecordMean, Squares, Statistic
from silodp.sampling import FixedSize, Poisson, Recomputed, Share, TwoLevel

SAFE = np.float32(1 - 2.0**-18)  # as long as a record may be
WHOLE_RUNS = 1893  # has 9 * RUN slots, as many as there may be without a charge


def hovering(n: int, run: int) -> np.ndarray:
    """Vectors of which every run comes just above, or just below, a power of two: small ones then round up, or down."""
    top = 2 ** (run.bit_length() - 2)
    own = np.full(run, top * 2.0**-24 * (1 + 2.0**-10), np.float32)
    own[: top + 1] = [SAFE, 0.5, *[1 - 2.0**-14] * (top - 1)]
    vectors = np.zeros((n, 2), np.float32)
    vectors[:, 0] = np.resize(own, n)
    return vectors


class Chosen:
    """Coins with which one record is left out and all others are drawn."""

    def __init__(self, out: int | None):
        self.out = out

    def bits(self, purpose, shape, step=0):
        coins = np.zeros(shape, np.uint32)
        if self.out is not None:
            coins[self.out] = 2**32 - 1
        return jnp.asarray(coins)

    def uniform(self, purpose, shape, step=0):
        tickets = np.full(shape, 0.5, np.float32)
        tickets[0, self.out] = 0.1
        return jnp.asarray(tickets)


class Summed:
    """Stands where an objective stands: gradients are the records themselves, through an engine."""

    def __init__(self, engine: str):
        self.engine = engine

    def clipped_sum(self, points, coefficients, records, weights, clip, run=RUN):
        loss = lambda x, record: dense(x, None, record)[0]
        found = clipped_sum(loss, [jnp.zeros((1, 2))], [1.0], records, weights, clip, engine=self.engine, run=run)
        return jax.tree.map(lambda leaf: leaf[0], found)


VECTORS = {
    "statistic": Statistic(lambda z: z, 2),
    "general": Gradients(Summed("general"), (jnp.zeros(2),), (1.0,)),
    "structured": Gradients(Summed("structured"), (jnp.zeros(2),), (1.0,)),
}


def drawn_from(rule, records, out):
    silo = SimpleNamespace(
        records=jnp.asarray(records), size=jnp.int32(len(records)), round=jnp.int32(0), randomness=Chosen(out)
    )
    return rule.draw(silo, "value")


def released(rule, vectors, records, out):
    release = RecordMean(vectors, drawn_from(rule, records, out), jnp.float32(1), "value").release()
    return np.asarray(release.value, np.float64) + np.asarray(release.rest, np.float64), float(release.bound)


def run_of(rule, n: int) -> int:
    """The runs that are really summed."""
    batch = drawn_from(rule, np.zeros((n, 2), np.float32), n - 1)
    slots = batch.weights.shape[0]
    return slots // run_count(slots, batch.run)


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
@pytest.mark.parametrize("batch", [100, WHOLE_RUNS, 20_000])
def test_a_record_that_is_drawn_moves_a_poisson_batch_by_half_the_bound(batch, vectors):
    rule = Poisson(batch)
    n = rule.most(batch)  # all slots are taken
    records = hovering(n, run_of(rule, n))
    drawn, bound = released(rule, vectors, records, None)
    undrawn, _ = released(rule, vectors, records, 0)
    assert 0.4 * bound <= np.linalg.norm(drawn - undrawn) <= bound / 2
    assert bound == pytest.approx(rule.bound_over_clip(n))


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
def test_another_record_of_a_fixed_batch_moves_it_by_no_more_than_the_bound(vectors):
    n, rule = 20_001, FixedSize(20_000)
    records = hovering(n, run_of(rule, n))
    records[-1] = -records[0]
    first, bound = released(rule, vectors, records, n - 1)
    last, _ = released(rule, vectors, records, 0)
    assert 0.9 * bound <= np.linalg.norm(first - last) <= bound


def test_a_drawn_square_is_no_nearer_to_a_batch_without_it_than_any_vector():
    records, rule = np.zeros((50, 2), np.float32), Poisson(40)
    records[0, 0] = SAFE
    drawn, bound = released(rule, Squares(lambda z: z, 2), records, None)
    undrawn, _ = released(rule, Squares(lambda z: z, 2), records, 0)
    assert 0.9 * bound / 2 <= np.linalg.norm(drawn - undrawn) <= bound / 2
    assert Stream("moment", 1, rule, squares=True).bound_over_clip(50) == pytest.approx(bound)


@pytest.mark.parametrize("slots", [1, 100, 300, 1000, 2000, 20_000, MOST_RECORDS])
def test_runs_are_as_long_as_the_slack_allows_and_the_rest_is_charged(slots):
    run = sampled_run(slots)
    assert SHORTEST_RUN <= run < RUN
    assert order_error(slots, run) <= SLACK or run == SHORTEST_RUN
    assert run == RUN // 2 or order_error(slots, 2 * run) > SLACK


@pytest.mark.parametrize("rule", [Poisson(500), Share(0, rate=0.5), FixedSize(500), TwoLevel(500), Recomputed(500)])
def test_every_rule_that_draws_has_short_runs(rule):
    batch = drawn_from(rule, np.zeros((1000, 2), np.float32), 999)
    assert batch.run == sampled_run(rule.most(1000)) < RUN and batch.loose == 0


def test_every_rule_that_draws_charges_what_its_runs_leave():
    for rule, records in ((Poisson(20_000), 30_000), (Share(0, rate=0.5), 40_000), (FixedSize(20_000), 30_000)):
        charged = order_error(rule.most(records), SHORTEST_RUN)
        assert rule.bound_over_clip(records) * rule.divisor(records) == pytest.approx(2 * (1 + charged))
    plain, twice = TwoLevel(20_000).moves(30_000), Recomputed(20_000).moves(30_000)
    charged = order_error(TwoLevel(20_000).most(30_000), SHORTEST_RUN)
    assert sum(twice) >= 4 * (1 + charged) / 20_000
    assert sum(plain) >= 4 * (1 + charged) / 20_000 and plain[0] >= 2 * (1 + 64 * charged) / 30_000


def test_a_penalty_inside_is_not_summed_apart_in_batches_that_are_drawn():
    loss = Regularised(lambda x, record: dense(x, None, record)[0], lambda x: jnp.sum(x**2))
    records, weights, point = jnp.ones((4, 2)), jnp.ones(4), [jnp.ones((1, 2))]
    short = clipped_sum(loss, point, [1.0], records, weights, 1.0, run=64)
    general = clipped_sum(loss, point, [1.0], records, weights, 1.0, engine="general")
    assert np.array_equal(exact(short), exact(general))
