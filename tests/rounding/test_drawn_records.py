"""A record that is drawn, or not, moves no other: each stands in a slot that it drew at random.

The proof compares two batches that differ in one record and in no other's slot; so do these tests. That slots are drawn
so that this is the whole story (each order has the same chance, whoever is drawn) is tested on the real source.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.facts import Stream
from silodp.gradients import clipped_sum, dense
from silodp.gradients.blocks import run_count, whole_runs
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.randomness import SharedBatch, SystemRandomness, _system_order
from silodp.releases import Gradients, RecordMean, Squares, Statistic
from silodp.sampling import FixedSize, Poisson, Recomputed, Share, TwoLevel

SAFE = np.float32(1 - 2.0**-18)  # as long as a record may be


def hovering(n: int, run: int) -> np.ndarray:
    """Vectors of which every run comes just above, or just below, a power of two: small ones then round up, or down."""
    top = 2 ** (run.bit_length() - 2)
    own = np.full(run, top * 2.0**-24 * (1 + 2.0**-10), np.float32)
    own[: top + 1] = [SAFE, 0.5, *[1 - 2.0**-14] * (top - 1)]
    vectors = np.zeros((n, 2), np.float32)
    vectors[:, 0] = np.resize(own, n)
    return vectors


class Chosen:
    """Coins with which one record is left out and all others are drawn. `at_home`: each has its own slot, and one that
    takes another's place in a batch takes its slot too; else records stand side by side."""

    def __init__(self, out: int | None, at_home: bool = True):
        self.out, self.at_home = out, at_home

    def bits(self, purpose, shape, step=0):
        coins = np.zeros(shape, np.uint32)
        if self.out is not None:
            coins[self.out] = 2**32 - 1
        return jnp.asarray(coins)

    def uniform(self, purpose, shape, step=0):
        tickets = np.full(shape, 0.5, np.float32)
        tickets[0, self.out] = 0.1
        return jnp.asarray(tickets)

    def scattered(self, purpose, rows, step=0):
        if not self.at_home:
            return rows
        there = np.arange(len(rows))
        homes = np.where(there == self.out, len(there), there)
        return jnp.asarray(homes, jnp.int32)


class Summed:
    """Stands where an objective stands: gradients are the records themselves, through an engine."""

    def __init__(self, engine: str):
        self.engine = engine

    def clipped_sum(self, points, coefficients, records, weights, clip):
        loss = lambda x, record: dense(x, None, record)[0]
        found = clipped_sum(loss, [jnp.zeros((1, 2))], [1.0], records, weights, clip, engine=self.engine)
        return jax.tree.map(lambda leaf: leaf[0], found)


VECTORS = {
    "statistic": Statistic(lambda z: z, 2),
    "general": Gradients(Summed("general"), (jnp.zeros(2),), (1.0,)),
    "structured": Gradients(Summed("structured"), (jnp.zeros(2),), (1.0,)),
}


def drawn_from(rule, records, coins, step=0):
    first = jax.tree.leaves(records)[0]
    silo = SimpleNamespace(records=records, size=jnp.int32(len(first)), round=jnp.int32(0), randomness=coins)
    return rule.draw(silo, "value", step)


def released(rule, vectors, records, coins):
    release = RecordMean(vectors, drawn_from(rule, records, coins), jnp.float32(1), "value").release()
    return np.asarray(release.value, np.float64) + np.asarray(release.rest, np.float64), float(release.bound)


def run_of(slots: int) -> int:
    """The runs that are really summed."""
    return slots // run_count(slots)


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
@pytest.mark.parametrize("batch", [100, 1893, 20_000])
def test_a_record_that_is_drawn_moves_a_poisson_batch_by_half_the_bound(batch, vectors):
    rule = Poisson(batch)
    n = whole_runs(rule.most(batch))  # all slots are taken
    records = jnp.asarray(hovering(n, run_of(n)))
    drawn, bound = released(rule, vectors, records, Chosen(None))
    undrawn, _ = released(rule, vectors, records, Chosen(0))
    assert 0.4 * bound <= np.linalg.norm(drawn - undrawn) <= bound / 2
    assert bound == pytest.approx(rule.bound_over_clip(n))


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
def test_another_record_of_a_fixed_batch_moves_it_by_no_more_than_the_bound(vectors):
    class Replaced(Chosen):
        def scattered(self, purpose, rows, step=0):
            return jnp.concatenate([jnp.int32([n - 1 if self.out == 0 else 0]), jnp.arange(1, n - 1)])

    n, rule = 20_001, FixedSize(20_000)
    records = hovering(n, run_of(n - 1))
    records[-1] = -records[0]
    first, bound = released(rule, vectors, jnp.asarray(records), Replaced(n - 1))
    last, _ = released(rule, vectors, jnp.asarray(records), Replaced(0))
    assert 0.9 * bound <= np.linalg.norm(first - last) <= bound


def test_a_drawn_square_is_no_nearer_to_a_batch_without_it_than_any_vector():
    records, rule = np.zeros((50, 2), np.float32), Poisson(40)
    records[0, 0] = SAFE
    drawn, bound = released(rule, Squares(lambda z: z, 2), jnp.asarray(records), Chosen(None))
    undrawn, _ = released(rule, Squares(lambda z: z, 2), jnp.asarray(records), Chosen(0))
    assert 0.9 * bound / 2 <= np.linalg.norm(drawn - undrawn) <= bound / 2
    assert Stream("moment", 1, rule, squares=True).bound_over_clip(50) == pytest.approx(bound)


class Cancelling:
    """Records of a linear model whose products cancel: their gradients turn round if the products are added in another
    order, and the compiler has another order for the last rows of a block."""

    def __init__(self, engine: str, batch: int = 20, d: int = 30):
        self.rng, self.d, self.rule = np.random.default_rng(1), d, Poisson(batch)
        self.n = whole_runs(self.rule.most(batch))
        example = np.zeros(d, np.float32), np.float32(0)
        self.objective = build_objective(build_model("linear", inputs=d, bias=False), example, engine)
        signs = self.rng.choice([-1, 1], size=d)
        self.x = jnp.asarray(signs * self.rng.uniform(0.5, 2, size=d), jnp.float32)
        self.release = jax.jit(self._release, static_argnums=(1, 2))
        self.alone = jax.jit(self._alone)

    def _alone(self, records, slot):
        weights = jnp.zeros(self.n).at[slot].set(1)
        return self.objective.clipped_sum([self.x], [1.0], records, weights, jnp.float32(1e30)).high

    def _release(self, records, out, at_home):
        gradients = Gradients(self.objective, (self.x,), (1.0,))
        made = RecordMean(
            gradients, drawn_from(self.rule, records, Chosen(out, at_home)), jnp.float32(1), "v"
        ).release()
        return made.value, made.rest, made.bound

    def scores(self, features, target):
        """What the program takes the same record's score for, in each slot."""
        alike = (jnp.tile(features, (self.n, 1)), jnp.full(self.n, target, jnp.float32))
        place = int(np.argmax(np.abs(features)))
        return np.array([float(self.alone(alike, i)[place]) for i in range(self.n)]) / (2 * float(features[place]))

    def records(self):
        """Alike, in the slots before which the score has another sign; the first record is one of them, far off."""
        features = np.float32(self.rng.normal(size=self.d) * 1e4)
        features[0] -= np.float32(features.astype(np.float64) @ np.float64(self.x) / float(self.x[0]))
        found = self.scores(features, 0)
        target = np.float32((found.max() + found.min()) / 2)
        above = self.scores(features, target) > 0
        turns = [np.flatnonzero(above[1:] & ~above[:-1]) + 1, np.flatnonzero(~above[1:] & above[:-1]) + 1]
        up = len(turns[0]) >= len(turns[1])
        slots = turns[0] if up else turns[1]
        features_of, targets = np.zeros((self.n, self.d), np.float32), np.zeros(self.n, np.float32)
        features_of[slots], targets[slots] = features, target
        features_of[0], targets[0] = features, -1e6 if up else 1e6
        return (jnp.asarray(features_of), jnp.asarray(targets)), len(slots)

    def moved(self, records, at_home):
        drawn, undrawn = (self.release(records, out, at_home) for out in (None, 0))
        exact_of = lambda made: np.asarray(made[0], np.float64) + np.asarray(made[1], np.float64)
        return np.linalg.norm(exact_of(drawn) - exact_of(undrawn)) / (float(drawn[2]) / 2)


@pytest.mark.parametrize("engine", ["structured", "general"])
def test_records_whose_products_cancel_stay_in_their_slots(engine):
    case = Cancelling(engine)
    records, turned = case.records()
    assert 0.98 <= case.moved(records, at_home=True) <= 1
    if turned:  # else this compiler adds up all rows alike
        assert case.moved(records, at_home=False) > 1.5


RULES = [Poisson(5), Share(0, rate=0.625), FixedSize(5), TwoLevel(5), Recomputed(5)]


SHARED = SharedBatch(SystemRandomness(), jax.random.key(3), "batch/value")
REAL = [*((SystemRandomness(), rule) for rule in RULES), (SHARED, Poisson(5))]


@pytest.mark.parametrize(("coins", "rule"), REAL, ids=lambda part: type(part).__name__)
def test_a_real_batch_has_each_record_in_each_slot_as_often_as_any_other(coins, rule):
    draws, records = 4000, jnp.arange(8.0)[:, None] + 1

    def one(step):
        batch = drawn_from(rule, records, coins, step)
        return batch.rows, batch.records[:, 0], batch.weights

    drawn = jax.jit(lambda: jax.lax.map(one, jnp.arange(draws)))
    rows, shown, weights = (np.asarray(found) for found in drawn())
    assert np.array_equal(shown, np.where(rows < 8, rows + 1, 0)) and np.array_equal(weights, rows < 8)
    slots = rows.shape[1]
    counts = np.array([(rows == row).sum(axis=0) for row in range(8)])
    assert (np.abs(counts / draws - 0.625 / slots) < 6 * np.sqrt(0.625 / slots / draws)).all()
    # Also given that another record is, or is not, in the batch.
    without = (rows != 0).all(axis=1)
    for given in (without, ~without):
        often = np.array([(rows[given] == row).mean(axis=0) for row in range(1, 8)])
        expected = often.sum(axis=1, keepdims=True) / slots
        assert (np.abs(often - expected) < 6 * np.sqrt(expected / given.sum())).all()


def test_an_order_with_words_that_tie_is_drawn_again(monkeypatch):
    words = [np.array([5, 5, 1], np.uint64), np.array([1, 3, 9], np.uint64)]
    monkeypatch.setattr("silodp.randomness.os.urandom", lambda count: words.pop(0).tobytes())
    assert _system_order((3,)).tolist() == [0, 1, 2]
