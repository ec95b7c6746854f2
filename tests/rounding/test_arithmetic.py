"""The bound of a sum over records as float32 computes it: crafted neighbours, runs that do not see each other."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp import gradients
from silodp.algorithms.mu2 import Mu2
from silodp.algorithms.soteria import RENEWED, SHORT_RUN
from silodp.channels.trusted import Trusted, weighted
from silodp.core import Silo, distance
from silodp.doubles import Double, exact, two_product
from silodp.errors import ConfigError
from silodp.gradients import MOST_POINTS, Regularised, conv2d, dense, embed, max_pool, structured
from silodp.gradients.blocks import (
    FEW_BLOCKS,
    MOST_OF_FEWER,
    MOST_RECORDS,
    PAIRED,
    RUN,
    SLACK,
    SMALLEST_BLOCK,
    UNIT,
    clip_factor,
    in_runs,
    paired,
    sum_in_blocks,
    whole_runs,
)
from silodp.gradients.difference import Combination
from silodp.gradients.factors import DenseFactors, Term, computed
from silodp.gradients.structure import find_structure
from silodp.gradients.structured import CANCELLED, MOST_IN_BLOCK, PENALISED_RUN, block_size
from silodp.prox import build_prox
from silodp.randomness import SystemRandomness
from silodp.releases import MOST_DRAWN_POINTS, Gradients, RecordMean, Release, Squares, Statistic
from silodp.sampling import (
    MOST_ADDED,
    MOST_CHANGED,
    SQUARES_MOVE,
    Batch,
    Cumulative,
    FixedSize,
    Full,
    OnePass,
    Poisson,
    Share,
    TwoLevel,
)

ENGINES = ("general", "structured")
PLAIN = {25_000: 4, 50_000: 8, 200_000: 32}  # times its bound that a plain float32 sum moves (docs/privacy.md)
CLIP = 1.001  # above the norm of every crafted record: clipping leaves their bits as they are


def linear(weight, record):
    """A loss whose gradient is the record."""
    return dense(weight, None, record)[0]


@cache
def crafted(n: int, shift: int, start: int = 13) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of numbers that differ in number `shift`, and whose float32 sums, one after the other, grow apart.

    Ones until one sum has crossed a power of two (2^start or later) and the other has not; then numbers just above half
    a step of the upper sum, which it rounds up to a whole step; when the lower sum has crossed as well, ones again.
    """
    one, other = np.ones(n), np.ones(n)
    other[shift] = -1.0
    high = low = np.float32(0)
    for i in range(n):
        power = 2.0 ** np.floor(np.log2(max(high, 1.0)))
        if i > shift and power >= 2.0**start and low < power:
            one[i] = other[i] = power * UNIT * (1 + 2.0**-20)
        high, low = high + np.float32(one[i]), low + np.float32(other[i])
    return one, other


def neighbours(n: int, d: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The crafted numbers along one direction of d coordinates."""
    one, other = crafted(n, shift)
    direction = np.zeros(d)
    direction[0] = 1.0
    return np.float32(one[:, None] * direction), np.float32(other[:, None] * direction)


def one_after_the_other(records: np.ndarray) -> np.ndarray:
    return np.cumsum(records, axis=0, dtype=np.float32)[-1].astype(np.float64)


@pytest.fixture(scope="module", params=ENGINES)
def summed(request):
    run = jax.jit(
        lambda records, n: gradients.clipped_sum(
            linear, [jnp.zeros((1, records.shape[1]))], [1.0], records, (jnp.arange(len(records)) < n) * 1.0, CLIP,
            engine=request.param,
        )
    )  # fmt: skip
    return lambda records: exact(run(records, len(records))).ravel()


@pytest.mark.parametrize(("n", "d"), [(3_000, 2), (25_000, 32), (50_000, 2), (200_000, 2)])
def test_crafted_neighbours_do_not_move_a_sum_beyond_its_bound(summed, n, d):
    bound = 2 * CLIP * (1 + SLACK)
    for shift in (0, 255, 1795):
        one, other = neighbours(n, d, shift)
        assert (one != other).any(axis=1).sum() == 1  # they are neighbours
        assert np.linalg.norm(summed(one) - summed(other)) <= bound
    if n in PLAIN:  # and the craft is worth something
        plain = np.linalg.norm(one_after_the_other(one) - one_after_the_other(other))
        assert plain / (2 * CLIP) == pytest.approx(PLAIN[n], rel=0.01)


def test_a_run_at_its_worst_stays_within_the_bound(summed):
    """Within one run: the sums lie on both sides of a power of two while all others are added."""
    ones = np.ones((RUN, 2), np.float32) * np.float32([1, 0])
    for crossed in (4, 16, 64, 128):
        small = np.float32(crossed * UNIT * (1 + 2.0**-20))
        one = np.where(np.arange(RUN)[:, None] < crossed, ones, small * ones)
        other = one.copy()
        other[0] = -one[0]
        assert np.linalg.norm(summed(one) - summed(other)) <= 2 * CLIP * (1 + SLACK)


def test_what_is_proven_fits_the_slack():
    """docs/privacy.md: roundings of a run, of up to three terms of a difference, of pairs, of a penalty, of the outer
    sums."""
    # Coordinates that are added in different orders, and 8 roundings of each record of its own.
    added = lambda run: run**2 / np.sqrt(3) + 8 * run
    within = lambda run, size, terms: added(run) * UNIT * size * np.sqrt(terms) / (1 - RUN * UNIT)
    # Terms that are added, and every pair that a run is in: each is rounded by u of what it is the sum of.
    lengths = lambda run: run * 2 ** np.arange(1, 1 + np.floor(np.log2(PAIRED / run)))
    pairs = lambda run, size, terms: (lengths(run).sum() + (MOST_POINTS - 1) * run) * UNIT * size * np.sqrt(terms)
    of_run = lambda *each: within(*each) + pairs(*each)
    # A penalty's share is a product of doubles, added as a double.
    outer = lambda block, n: 2 * UNIT**2 * n**2 / block + 16 * UNIT**2 * n
    few = lambda n: (FEW_BLOCKS + 2) ** 2 * UNIT**2 * n / 2  # blocks whose low halves are added as they come
    plain = RUN, 1, MOST_POINTS, MOST_RECORDS
    penalised = PENALISED_RUN, 1 / CANCELLED, MOST_POINTS + 1, MOST_OF_FEWER
    for longest, size, terms, n in (plain, penalised):
        for run in (SMALLEST_BLOCK, longest):
            assert of_run(run, size, terms) + size * (outer(run, n) + few(n)) <= SLACK * 0.98
            # A batch and the same without a record: one clip norm, and the roundings of both.
            outside = size * (outer(run, MOST_OF_FEWER) + few(MOST_OF_FEWER))
            drawn = terms - MOST_POINTS + MOST_DRAWN_POINTS
            assert 2 * (of_run(run, size, drawn) + outside) <= SLACK * 0.98
        # mu2's running sum, of pairs of gradients, with those of all its rounds
        assert of_run(longest, size, terms - 1) + size * outer(longest, n) + 2 * UNIT**2 * MOST_ADDED <= SLACK * 0.98
        # A record that is not finite turns a whole block to another branch, and leaves one of the bound's two clips to
        # it. The last block begins early: a record may be in two.
        of_pairs = (len(lengths(longest)) + MOST_POINTS - 1) * UNIT * MOST_IN_BLOCK * size * np.sqrt(terms)
        assert 2 * 2 * (MOST_IN_BLOCK / longest * within(longest, size, terms) + of_pairs) <= 0.98
    assert block_size(find_structure(linear, jnp.zeros((1, 2)), jnp.zeros(2)), 1) <= MOST_IN_BLOCK
    # SAGA: the whole table once, and the changes of 64 rounds, which come and go, in short runs.
    table = within(RUN, 1, 1) + outer(RUN, MOST_RECORDS) + few(MOST_RECORDS)
    changes = 2 * RENEWED * (within(SHORT_RUN, 1, 1) + outer(SHORT_RUN, MOST_CHANGED) + few(MOST_CHANGED))
    assert table + changes <= SLACK * 0.98


@pytest.mark.parametrize("run", [RUN, PENALISED_RUN, 100, 2 * PAIRED])
@pytest.mark.parametrize("runs", [1, 2, 7, 13, 24, 96])
def test_pairs_are_of_no_more_records_than_the_proof_has(runs, run):
    """Every run is in one sum. Each sum is of the runs of its row."""
    found = np.asarray(paired(jnp.eye(runs), run))
    assert (found.sum(axis=0) == 1).all() and set(np.unique(found)) <= {0.0, 1.0}
    assert found.sum(axis=1).max() <= max(1, PAIRED // run)
    assert len(found) <= -(-runs // 2 ** int(np.log2(max(1, PAIRED // run))))  # and no more of them than needed


def test_more_points_than_the_proof_has_are_refused():
    points = [jnp.zeros((1, 2))] * (MOST_POINTS + 1)
    with pytest.raises(ValueError, match="points: 4 given; the rounding of sums is proven for 3"):
        gradients.clipped_sum(linear, points, [1.0, -2.0, 2.0, -1.0], jnp.ones((4, 2)), jnp.ones(4), 1.0)


def test_several_parts_are_added_to_each_other_before_they_meet_a_long_sum():
    """One after the other they would round what the sum has lost so far four times: by up to 9 u^2 of it."""
    rng, n = np.random.default_rng(4), 20_000
    long = Double(jnp.float32(rng.uniform(1, 2, n)), jnp.float32(rng.uniform(-1, 1, n) * UNIT))
    parts = np.float32(rng.uniform(-1, 1, (4, n)) * 2 * UNIT)
    total = jax.jit(lambda d, p: d.plus(p))(long, parts)
    lost = (
        (np.asarray(long.high, np.float64) - np.asarray(total.high)) + np.asarray(long.low) + parts.sum(0, np.float64)
    )
    assert np.abs(lost - np.asarray(total.low, np.float64)).max() <= 4 * UNIT**2


def test_what_a_record_computes_before_its_first_layer_is_computed_once():
    """Features as they came may be read twice. A difference of products may be two numbers, if it is computed twice."""
    layer = lambda features: find_structure(
        lambda w, r: dense(w, None, features(r))[0], jnp.zeros((1, 4)), jnp.zeros((2, 2))
    ).layers[0]  # fmt: skip
    for features, came in [
        (jnp.ravel, True), (lambda r: jnp.append(r[0], r[1].astype("float16")), True),
        (lambda r: jnp.ravel(r * r - 0.3), False), (lambda r: jnp.append(r[0], jnp.tanh(r[1])), False),
    ]:  # fmt: skip
        assert (layer(features).on_record, layer(features).as_it_came) == (True, came)
        factors = DenseFactors((Term(jnp.ones((4, 3)), jnp.ones(3), jnp.ones((1, 3))),), False, True)
        assert computed(layer(features), factors).terms[0].inputs is not came


@pytest.mark.parametrize("engine", ENGINES)
def test_no_compiler_removes_the_loop_that_computes_once(engine):
    """Nor where every weight is known to be 1: the inputs of a bias are then constants."""
    loss = lambda p, r: jax.nn.softplus(dense(p["weight"], p["bias"], r)[0])
    at = {"bias": jnp.zeros(1), "weight": jnp.ones((1, 3))}
    run = lambda p, r: gradients.clipped_sum(loss, [p], [1.0], r, jnp.ones(8), 1.0, engine=engine)
    loops = {"structured": 1, "general": 2}[engine]  # the other one sets to zero what is not finite
    assert jax.jit(run).lower(at, jnp.ones((8, 3))).compile().as_text().count(" while(") == loops


def test_a_penalty_is_computed_once():
    """Its gradient enters every norm and every sum; of nearly equal points it is what rounding leaves."""
    loops = lambda loss: str(
        jax.make_jaxpr(lambda r: gradients.clipped_sum(loss, [jnp.ones((1, 2))], [1.0], r, jnp.ones(4), 1.0))(
            jnp.ones((4, 2))
        )
    ).count("while[")  # fmt: skip
    assert loops(Regularised(linear, lambda w: jnp.sum(w**2))) == loops(linear) + 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replaced_record_changes_no_other_run(engine):
    n, d = 5 * RUN, 7
    rng = np.random.default_rng(3)
    records = np.float32(rng.normal(size=(n, d)))
    replaced = records.copy()
    replaced[RUN + 5] = np.float32([np.nan, *np.full(d - 1, 1e30)])  # the worst kind

    def sums(rows):
        parts = [rows[i : i + RUN] for i in range(0, n, RUN)]
        without = lambda i: jnp.where(np.arange(n) // RUN == i, 1.0, 0.0)
        run = jax.jit(lambda r, w: gradients.clipped_sum(linear, [jnp.zeros((1, d))], [1.0], r, w, 1.0, engine=engine))
        return [exact(run(rows, without(i))) for i in range(len(parts))]

    for i, (one, other) in enumerate(zip(sums(records), sums(replaced), strict=True)):
        assert np.array_equal(one, other) == (i != 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_is_that_of_its_runs_to_twice_the_digits(engine):
    n, d = 3 * RUN + 17, 5
    records = np.float32(np.random.default_rng(0).normal(size=(n, d)) * 1e3)
    whole = lambda r, w: gradients.clipped_sum(linear, [jnp.zeros((1, d))], [1.0], r, w, 0.3, engine=engine)
    got = exact(jax.jit(whole)(records, jnp.ones(n))).ravel()
    scaled = records.astype(np.float64)
    want = (scaled * np.minimum(1, 0.3 / np.linalg.norm(scaled, axis=1))[:, None]).sum(0)
    assert np.abs(got - want).max() < 3e-6 * n * 0.3


def test_runs_are_cut_by_position():
    assert [whole_runs(n) for n in (1, RUN, RUN + 1, 1000, 50_000)] == [1, RUN, RUN + 2, 1000, 50_000]
    for n in range(1, 5 * RUN, 37):
        assert whole_runs(whole_runs(n)) == whole_runs(n)
        assert in_runs(jnp.ones(n), 0).shape[1] <= RUN
        assert float(in_runs(jnp.ones(n), 0).sum()) == n


def test_products_are_rounded_before_they_are_added():
    """A product that a compiler contracts into the addition is not the number that the run has."""
    rng = np.random.default_rng(1)
    rows = np.float32(rng.normal(size=(1000, 50)) * 10.0 ** rng.integers(-6, 6, (1000, 1)))
    weights = np.float32(rng.normal(size=1000))
    each = lambda r, w: jax.lax.scan(lambda total, rw: (total + Double.of(rw[0] * rw[1]), None), zeros, (r, w))[0]
    zeros = Double.of(jnp.zeros(50))
    got = exact(jax.jit(each)(rows, weights))
    want = (rows * weights[:, None]).astype(np.float64).sum(0)
    assert np.abs(got - want).max() < 1e-12 * np.abs(rows).sum()


@pytest.mark.parametrize("factor", [3.0, 0.1, 77_777.0])
def test_doubles_keep_twice_the_digits(factor):
    parts = np.float32(np.random.default_rng(2).normal(size=(300, 40)) * 1e4)
    factor = np.float32(factor)
    total = jax.jit(Double.sum_of)(parts)
    want = parts.astype(np.float64).sum(0)
    assert np.abs(exact(total) - want).max() < 1e-13 * np.abs(parts).sum(0).max()
    few = exact(jax.jit(Double.sum_of)(parts[:4])) - parts[:4].astype(np.float64).sum(0)  # one after the other
    assert np.abs(few).max() < 1e-13 * np.abs(parts[:4]).sum(0).max()
    for found, wanted in [
        (jax.jit(lambda d: d * factor)(total), exact(total) * float(factor)),
        (jax.jit(lambda d: d / factor)(total), exact(total) / float(factor)),
        (jax.jit(lambda d: d - Double.of(d.high))(total), np.asarray(total.low, np.float64)),
    ]:
        np.testing.assert_allclose(exact(found), wanted, rtol=1e-13)
    high, low = jax.jit(two_product)(parts, factor)
    np.testing.assert_allclose(exact(Double(high, low)), parts.astype(np.float64) * float(factor), rtol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_that_a_penalty_nearly_cancels_moves_the_sum_no_further(engine):
    """Gradient and penalty are summed apart: a small sum of two large vectors must not bring their rounding along."""
    d, n, clip = 4, RUN, 1e-3
    strength = 300.0
    loss = Regularised(linear, lambda w: strength * jnp.sum(w**2) / 2)
    point = jnp.ones((1, d))
    rng = np.random.default_rng(5)
    opposite = np.float32(-strength * (1 + 1e-6 * rng.normal(size=(n, d))))
    replaced = opposite.copy()
    replaced[0] *= -1
    run = jax.jit(lambda r: gradients.clipped_sum(loss, [point], [1.0], r, jnp.ones(n), clip, engine=engine))
    assert np.linalg.norm(exact(run(opposite)) - exact(run(replaced))) <= 2 * clip * (1 + SLACK)
    alone = jax.jit(lambda r: gradients.clipped_sum(loss, [point], [1.0], r, jnp.ones(1), clip, engine=engine))
    worst = max(np.linalg.norm(exact(alone(row[None]))) for row in opposite[:20])
    assert worst <= clip * (1 + 1e-6)


def test_tokens_that_cancel_within_a_record_are_not_rounded_against_others():
    """Two positions of one row with opposite cotangents: only their sum may meet other records."""
    loss = lambda table, record: jnp.sum(embed(table, record[0])[:, 0] * record[1])
    index, clip = jnp.zeros((3, 2), jnp.int32).at[0, 1].set(1), 0.97

    @jax.jit
    @jax.vmap
    def summed(own):
        values = jnp.array([[0.0, 0.0], [1e7, -1e7], [1e7, -1e7]]).at[0, 0].set(own)
        table = jnp.zeros((2, 1))
        return gradients.clipped_sum(loss, [table], [1.0], (index, values), jnp.ones(3), clip, engine="structured")

    sums = exact(summed(jnp.linspace(-clip, clip, 401)))[:, 0, 0]
    assert sums.max() - sums.min() <= 2 * clip * (1 + SLACK)


def test_tokens_of_one_row_are_added_before_they_are_clipped():
    """Squared apart, four that pull one way would count for half of their length."""
    loss = lambda table, record: jnp.sum(embed(table, record[0])[:, 0] * record[1])
    records, clip = (jnp.zeros((1, 4), jnp.int32), jnp.full((1, 4), 1e3)), 0.97
    total = gradients.clipped_sum(loss, [jnp.zeros((2, 1))], [1.0], records, jnp.ones(1), clip, engine="structured")
    assert 0.99 * clip < np.abs(exact(total)).max() <= clip


@pytest.mark.parametrize(
    ("rule", "most"),
    [
        *(
            (rule, MOST_RECORDS)
            for rule in (Full(), TwoLevel(5), OnePass(1), OnePass(1, MOST_RECORDS + 1), Cumulative(1))
        ),
        *((kind(MOST_OF_FEWER + 1), MOST_OF_FEWER) for kind in (Poisson, FixedSize, TwoLevel)),
        (TwoLevel(MOST_CHANGED + 1), MOST_CHANGED),
        (Share(0, rate=0.5), MOST_OF_FEWER),
    ],
)
def test_a_sum_that_is_too_long_for_the_proof_is_refused(rule, most):
    with pytest.raises(
        ValueError, match=rf"silo 'large' has \d+ records in a sum; its rounding is proven up to {most}:"
    ):
        rule.check("large", MOST_RECORDS + (most == MOST_RECORDS))


def test_a_drawn_batch_of_more_points_than_the_proof_has_is_refused():
    gradients_of = lambda points: Gradients(SimpleNamespace(), (jnp.zeros(2),) * points, (1.0,) * points)
    batch = Batch(jnp.ones((4, 2)), jnp.ones(4), jnp.float32(4), jnp.arange(4), drawn=True)
    mean = RecordMean(gradients_of(3), batch, jnp.float32(1), "value")
    with pytest.raises(ValueError, match="points: 3 given; the rounding of a drawn batch is proven for 2"):
        mean.release()


def test_a_long_sum_with_a_penalty_inside_is_refused():
    loss = Regularised(linear, lambda x: jnp.sum(x**2))
    summed = lambda n: (
        lambda: gradients.clipped_sum(loss, [jnp.ones((1, 2))], [1.0], jnp.ones((n, 2)), jnp.ones(n), 1.0)
    )
    jax.eval_shape(summed(MOST_OF_FEWER))
    with pytest.raises(ConfigError, match="with a penalty inside the clip: its rounding is proven up to 1048576"):
        jax.eval_shape(summed(MOST_OF_FEWER + 1))


def test_an_empty_slot_does_not_decide_how_its_block_is_summed():
    """A loss that is no number at a record of zeros, which is what empty slots hold."""
    unit_length = lambda x, record: dense(x, None, record / jnp.linalg.norm(record))[0]
    point, records, taken = jnp.ones((1, 2)), jnp.ones((8, 2)).at[3].set(0), jnp.ones(8).at[3].set(0)
    question = structured.Question([point], Combination.of([1.0]), jnp.float32(1), None)
    finite = lambda kept: (
        structured.clip_block(find_structure(unit_length, point, records[0]), question, records, kept).finite
    )
    assert finite(taken > 0) and not finite(jnp.ones(8, bool))
    total = gradients.clipped_sum(unit_length, [point], [1.0], records, taken, 1.0, engine="structured")
    assert exact(total) == pytest.approx(np.full((1, 2), 7 * 0.5**0.5), rel=1e-5)


def test_a_running_sum_of_too_many_rounds_for_the_proof_is_refused():
    Cumulative(370_000, 1).check("large", 370_000)
    with pytest.raises(ValueError, match=r"rounds = 371000: .* proven for 370727 rounds"):
        Cumulative(371_000).check("large", 371_000)


def test_a_sum_of_blocks_that_are_too_small_for_the_proof_is_refused():
    """Large vectors are summed a few at a time, in more additions than the proof allows for with the most records."""
    words = "of 2000000 records of so many numbers: its rounding is proven up to 262144"
    many = jax.ShapeDtypeStruct((2_000_000,), jnp.float32)
    added = lambda size: lambda rows: sum_in_blocks(lambda r, w: r[:1] * w[:1], rows, rows, size)
    with pytest.raises(ConfigError, match=words):
        jax.eval_shape(added(2), many)
    jax.eval_shape(added(32), jax.ShapeDtypeStruct((MOST_RECORDS,), jnp.float32))


def flat_sum(tree) -> np.ndarray:
    parts = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Double))
    return np.concatenate([exact(part).ravel() for part in parts])


def crafted_loss(kind):
    """A loss whose gradient is a record's number, through a layer of this kind; its parameters, and its records."""
    if kind == "conv":
        image = lambda numbers: jnp.zeros((len(numbers), 1, 2, 2)).at[:, 0, 0, 0].set(numbers)
        return lambda kernel, record: conv2d(kernel, None, record)[0, 0, 0], jnp.zeros((1, 1, 2, 2)), image
    if kind == "leaf":  # beside a larger layer that sees nothing
        loss = lambda p, record: p["scale"][0] * record + dense(p["w"], None, jnp.zeros(2))[0]
        return loss, {"scale": jnp.zeros(1), "w": jnp.zeros((1, 2))}, lambda numbers: numbers
    index = lambda numbers: (jnp.zeros(len(numbers), jnp.int32), numbers)
    return lambda table, record: embed(table, record[0])[0] * record[1], jnp.zeros((2, 1)), index


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["conv", "embed", "leaf"])
def test_crafted_neighbours_do_not_move_sums_through_other_layers_beyond_their_bound(kind, engine):
    loss, point, records = crafted_loss(kind)
    run = jax.jit(lambda r: gradients.clipped_sum(loss, [point], [1.0], r, jnp.ones(25_000), CLIP, engine=engine))
    for shift in (0, 49, 1795):
        one, other = (flat_sum(run(records(jnp.float32(numbers)))) for numbers in crafted(25_000, shift))
        assert np.linalg.norm(one - other) <= 2 * CLIP * (1 + SLACK)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("coefficients", "clip"), [((1.0, -1.0), 1e-3), ((7.0, -6.0), 1e-18), ((7.0, -6.0), 1.0)])
def test_no_image_moves_a_networks_sum_beyond_its_bound(engine, coefficients, clip):
    """Differences, and mu2's combinations; images that are huge, tiny, or no numbers."""

    def loss(p, record):
        hidden = max_pool(jnp.tanh(conv2d(p["k"], p["c"], record[0])), 2).ravel()
        out = dense(p["w"], p["b"], hidden)
        return jax.nn.logsumexp(out) - out[record[1]]

    rng, n = np.random.default_rng(0), 300
    draw = lambda *shape: jnp.float32(rng.normal(size=shape))
    point = {"k": draw(3, 1, 3, 3), "c": jnp.zeros(3), "w": draw(4, 12), "b": jnp.zeros(4)}
    points = [jax.tree.map(lambda leaf: leaf + 0.01, point), point]
    images, labels = np.array(draw(n, 1, 6, 6)), rng.integers(0, 4, n)
    run = jax.jit(lambda r: gradients.clipped_sum(loss, points, coefficients, r, jnp.ones(n), clip, engine=engine))
    summed = lambda images: np.concatenate([exact(leaf).ravel() for leaf in run((images, labels)).values()])
    before = summed(images)
    for replaced in (np.nan, np.inf, 1e30, 1e15, 1e3, -1e3, 1e-30, 0.0):
        images[37] = replaced
        assert np.linalg.norm(summed(images) - before) <= 2 * clip * (1 + SLACK)


@pytest.mark.parametrize("coefficients", [(2.0, -1.0), (1.0, 0.0), (1.0, 1.0, -1.0)])
def test_products_of_terms_that_underflow_count_as_the_largest_they_may_have_been(coefficients):
    """Hidden units just too small to be squared, and a target that makes up for it: a record counted for 1.7 clips."""

    def loss(p, record):
        return (dense(p["b"], None, dense(p["a"], None, record[0]))[0] - record[1]) ** 2 / 2

    scales = [2.0] * (len(coefficients) - 1) + [1.0]
    points = [{"a": jnp.full((50, 1), scale), "b": jnp.zeros((1, 50))} for scale in scales]
    features, targets = np.zeros((2, 1), np.float32), np.zeros(2, np.float32)
    features[0], targets[0] = 1.08e-19, 5e18
    run = jax.jit(
        lambda *r: gradients.clipped_sum(loss, points, coefficients, r, jnp.ones(2), 1.0, engine="structured")
    )
    summed = np.concatenate([exact(leaf).ravel() for leaf in run(features, targets).values()])
    assert 0.1 < np.linalg.norm(summed) <= 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("t", [2.0, 1000.0])
def test_gradients_that_a_combination_cancels_do_not_move_its_sum_beyond_its_bound(engine, t):
    """mu2's t g(x) - (t - 1) g(y), of records whose labels make it what rounding leaves: up to thousands of clips.

    Compiled this way, the vector of a norm and the vector of the sum were two: one record counted for 1.40 clips.
    """
    rng, n, d = np.random.default_rng(0), RUN, 8
    x = np.float32(rng.normal(size=(1, d)))
    y = np.float32(x + 0.01 * rng.normal(size=(1, d)))
    features = np.float32(1e3 * rng.normal(size=(n, d)))
    outputs = [features.astype(np.float64) @ point[0] for point in (x, y)]
    targets = np.float32(t * outputs[0] - (t - 1) * outputs[1])
    loss = lambda w, record: (dense(w, None, record[0])[0] - record[1]) ** 2 / 2
    weights = [jnp.ones(n), jnp.float32(np.arange(n) < 1)]
    compute = lambda r, w: gradients.clipped_sum(loss, [x, y], [t, 1 - t], r, w, 1.0, engine=engine)
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    run = jax.jit(compute, compiler_options=options)
    summed = lambda own, w: exact(run(own, w))
    before = summed((features, targets), weights[0])
    for i in range(0, n, 37):
        others, labels = features.copy(), targets.copy()
        others[i], labels[i] = -7 * features[i], 1e6
        assert np.linalg.norm(summed((others, labels), weights[0]) - before) <= 2 * (1 + SLACK)
        alone = np.roll(features, -i, axis=0), np.roll(targets, -i)
        assert np.linalg.norm(summed(alone, weights[1])) <= 1


@pytest.mark.parametrize("type_", ["float32", "int32", "int8", "float16"])
@pytest.mark.parametrize("clip", [1e-18, 1.0])
def test_squares_of_any_type_of_number_move_by_at_most_their_bound(type_, clip):
    rng = np.random.default_rng(2)
    rows = (100 * rng.normal(size=(600, 3))).astype(type_)
    run = jax.jit(lambda r: Squares(lambda v: v, 3).clipped_sum(r, jnp.ones(600), jnp.float32(clip)))
    before = exact(run(rows))
    for replaced in ((100, 0, 0), (0, -100, 3), (127, 127, 127), (0, 0, 0)):
        rows[5] = np.array(replaced, type_)
        assert np.linalg.norm(exact(run(rows)) - before) <= SQUARES_MOVE * clip


@pytest.mark.parametrize(("type_", "value"), [("int32", 65_536), ("int32", 50_000), ("int8", 16), ("float16", 1e-4)])
def test_a_statistic_of_any_type_of_number_is_clipped(type_, value):
    """In its own type the square of 2^16 is 0, and that of 1e-4 as well."""
    n, d, clip = 2, 400, jnp.float32(1e-3)
    records = jnp.zeros((n, d), type_).at[0].set(jnp.asarray(value, type_))
    batch = Batch(records, jnp.ones(n), jnp.float32(n), jnp.arange(n))
    made = RecordMean(Statistic(lambda record: record, d), batch, clip, "value").release()
    assert np.linalg.norm(exact(made.exact)) <= float(made.bound) / 2


@pytest.mark.parametrize("type_", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_half_precision_weights_are_clipped(engine, type_):
    d, clip = 4096, 1e-3
    record = jnp.full((1, d), 1e-4)
    point = jnp.zeros((1, d), type_)
    summed = gradients.clipped_sum(linear, [point], [1.0], record, jnp.ones(1), clip, engine=engine)
    assert np.linalg.norm(exact(summed)) <= clip * (1 + 1e-6)


def test_real_noise_is_added_to_both_halves_on_a_grid_of_its_own():
    real, std = SystemRandomness(), jnp.float32(1e-5)
    noised = np.asarray(real.noised("noise", Double(jnp.zeros(200), jnp.full(200, 3e-3)), std))
    assert abs(noised.mean() - 3e-3) < 1e-5
    assert {float(real.step_of(jnp.full(3, value), std)) for value in (-9.0, 0.0, 1e-9, 7e5)} == {2.0**-25}


def test_a_trusted_server_averages_both_halves():
    release = Release(jnp.ones(3), jnp.float32(1), "value", rest=jnp.full(3, 1e-9))
    arrived = Trusted().unpack(Trusted().pack(release))
    np.testing.assert_allclose(exact(arrived.exact) - 1, 1e-9, rtol=1e-5)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arrived)
    np.testing.assert_allclose(exact(weighted(both, jnp.array([0.5, 0.5]))) - 1, 1e-9, rtol=1e-5)


def test_a_norms_own_rounding_is_counted_against_its_record():
    factor = float(clip_factor(jnp.array([4.0]), jnp.float32(1), 1000)[0])
    assert 0.5 * (1 - 600 * UNIT) < factor < 0.5 * (1 - 500 * UNIT)


def test_a_norm_that_may_have_underflown_counts_as_the_largest_that_could_have():
    factors = clip_factor(jnp.array([0.0, 1e-31]), jnp.float32(1e-16), 1)
    assert float(factors.max()) < 0.1 + 1e-6
    assert float(clip_factor(jnp.zeros(1), jnp.float32(1), 1)[0]) == 1


def test_the_worst_rounding_of_a_penalised_norm_is_counted_against_its_record():
    """Gradient and penalty are partly opposite, and their products are rounded 4,096 times on the way to the norm."""
    d, clip = 4096, 1e-3
    rng = np.random.default_rng(7)
    point = jnp.asarray(np.abs(rng.normal(size=(1, d))), jnp.float32)
    loss = Regularised(linear, lambda w: jnp.sum(w**2) / 2)
    record = np.float32(-np.asarray(point) * (1 + np.abs(rng.normal(size=(1, d)))))
    alone = gradients.clipped_sum(loss, [point], [1.0], record, jnp.ones(1), clip, engine="structured")
    assert np.linalg.norm(exact(alone)) <= clip * (1 - 4 * d * UNIT)


@pytest.mark.parametrize(("apart", "told"), [(1e-16, False), (2e-15, True)])
def test_points_that_float32_cannot_tell_apart_have_no_distance(apart, told):
    assert bool(distance(jnp.zeros(3), jnp.array([apart, 0, 0])) > 0) is told


def test_mu2_releases_both_halves_of_its_running_sum():
    change = Release(jnp.ones(2), jnp.float32(1), "value", rest=jnp.full(2, 2e-9))
    silo = Silo.__new__(Silo)  # without records: all that it is asked for is told here
    silo.round, silo.memory = jnp.int32(0), Double(jnp.ones(2), jnp.full(2, 1e-9))
    silo.mean = lambda *_: SimpleNamespace(release=lambda: change)
    algorithm = Mu2(jnp.float32(1), build_prox("none"), 1.0, Cumulative(rounds=1, chunk=1), 1.0)
    released = algorithm.corrected(silo, jnp.zeros(2), jnp.zeros(2))
    np.testing.assert_allclose(exact(released.exact) - 2, 3e-9, rtol=1e-5)


def test_a_sum_of_few_blocks_that_cancels_keeps_twice_the_digits():
    """Low halves are added as they come: they may be all that is left of the sum, and must come out normal."""
    rng, n = np.random.default_rng(8), 60
    rows = np.float32(rng.normal(size=(n, 40)) * 10.0 ** rng.integers(-3, 4, (n, 1)))
    rows[n // 2 :] = -rows[: n // 2] * np.float32(1 + 2.0**-20)
    total = jax.jit(lambda r: sum_in_blocks(lambda own, w: (w[0] * own[0])[None], r, jnp.ones(n), 1))(rows)
    want = rows.astype(np.float64).sum(0)
    assert np.abs(exact(total) - want).max() <= (n + 2) ** 2 * UNIT**2 * np.abs(rows).sum(0).max() / 2
    assert np.all(np.abs(total.low) <= UNIT * np.abs(total.high))
