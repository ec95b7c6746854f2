"""Replace one record by any other: no release moves further than its `bound`, on which all noise is scaled.

Measured on one silo with the same coins, so that batches hold the same places in both worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from silodp.algorithms.differences import RecursiveDifference
from silodp.channels import Untrusted
from silodp.core import Silo, Site
from silodp.doubles import Double, exact
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.prox import NoProx
from silodp.randomness import SeededRandomness
from silodp.releases import Account, RecordMean, Release
from silodp.sampling import BatchRule, FixedSize, Full, Poisson

SIZE, PADDED, FEATURES, CLIP = 6, 8, 3, 0.7
RULES: dict[str, BatchRule] = {"full": Full(), "fixed": FixedSize(4), "poisson": Poisson(3)}

Evaluate = Callable[[RecordMean], Release]
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], tuple[Double, float]]


def silo_of(features, targets, engine: str, coins) -> Silo:
    model = build_model("mlp", inputs=FEATURES, outputs=2, hidden=(3,), activation="tanh")
    example = (jnp.zeros(FEATURES), jnp.zeros((), jnp.int32))
    objective = build_objective(model, example, engine)
    site = Site(objective, Untrusted(), (features, targets), jnp.int32(SIZE), jnp.int32(0))
    randomness = SeededRandomness(jax.random.key(coins))
    return Silo(site, jnp.int32(0), randomness, (), Account.empty(["value", "difference"]))


PARAMETERS = silo_of(None, None, "general", 0).objective.parameters


@cache
def compiled(
    query: str, rule: str, engine: str, release: Callable[[RecordMean], Release] = RecordMean.release
) -> Measure:
    """A silo's release of a query as a function of its records: compiled once, asked by every example."""
    one = jnp.float32(1.0)
    algorithm = RecursiveDifference(one, NoProx(), jnp.float32(CLIP), 3, clip_difference=one, batch=RULES[rule])

    @jax.jit
    def measured(features, targets, x, y, coins):
        points = (x,) if query == "value" else (x, y)
        answer = getattr(algorithm, query)(silo_of(features, targets, engine, coins), *points)
        assert isinstance(answer, RecordMean)
        released = release(answer)
        return released.exact, released.bound

    return measured


@dataclass
class Neighbours:
    """A silo, one of its records replaced, the two public points of a query, and the coins."""

    features: np.ndarray
    targets: np.ndarray
    place: int
    other: np.ndarray
    other_target: int
    x: np.ndarray
    y: np.ndarray
    coins: int


numbers = st.sampled_from([0.0, 1e-30, 1e-3, 1.0, -1.0, 7.5, -300.0, 1e6, -1e20, 3e38])
wild = st.one_of(numbers, st.sampled_from([np.inf, -np.inf, np.nan]))
points = st.lists(st.floats(-3, 3, width=32), min_size=PARAMETERS, max_size=PARAMETERS)


@st.composite
def neighbours(draw) -> Neighbours:
    features = np.zeros((PADDED, FEATURES), np.float32)
    for row in range(SIZE):
        features[row] = draw(st.lists(numbers, min_size=FEATURES, max_size=FEATURES))
    other = np.array(draw(st.lists(wild, min_size=FEATURES, max_size=FEATURES)), np.float32)
    targets = np.array(draw(st.lists(st.integers(0, 1), min_size=PADDED, max_size=PADDED)), np.int32)
    x = np.array(draw(points), np.float32)
    apart = draw(st.sampled_from([0.0, 1e-6, 0.1, 3.0]))
    y = x + np.float32(apart) * np.array(draw(points), np.float32)
    place, target, coins = draw(st.integers(0, SIZE - 1)), draw(st.integers(0, 1)), draw(st.integers(0, 1000))
    return Neighbours(features, targets, place, other, target, x, y, coins)


def excess(measured: Measure, case: Neighbours) -> float:
    """How far the release moves, over its bound: nothing is allowed for rounding, which the bound includes."""
    features, targets = case.features.copy(), case.targets.copy()
    features[case.place], targets[case.place] = case.other, case.other_target
    value, bound = measured(case.features, case.targets, case.x, case.y, case.coins)
    moved, again = measured(features, targets, case.x, case.y, case.coins)
    assert float(bound) == float(again), "the bound itself depends on a record"
    assert np.isfinite(exact(value)).all() and np.isfinite(exact(moved)).all()
    return float(np.linalg.norm(exact(value) - exact(moved))) - float(bound)


@pytest.mark.parametrize("engine", ["structured", "general"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("query", ["value", "difference"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=neighbours())
def test_no_release_moves_beyond_its_bound(query, rule, engine, case):
    assert excess(compiled(query, rule, engine), case) <= 0


def test_the_bound_is_reached():
    """Two records that pull in opposite directions with all their strength: nothing is given away either."""
    features = np.zeros((PADDED, FEATURES), np.float32)
    features[0] = 100.0
    x = np.ones(PARAMETERS, np.float32)
    measured = compiled("value", "full", "structured")
    one, bound = measured(features, np.zeros(PADDED, np.int32), x, x, 0)
    two, _ = measured(features, np.eye(1, PADDED, dtype=np.int32)[0], x, x, 0)
    assert float(np.linalg.norm(exact(one) - exact(two))) > 0.95 * float(bound)


def test_a_statistic_is_clipped_record_by_record():
    """Any function of a record, of any length or not a number at all, moves the mean by no more than the bound."""
    features = np.zeros((PADDED, FEATURES), np.float32)

    def released(first: float) -> Release:
        features[0] = first
        silo = silo_of(jnp.asarray(features), jnp.zeros(PADDED), "general", 1)
        return silo.statistic(lambda record: record[0], jnp.float32(CLIP), "value").release()

    other = released(-1e3)
    moved = [np.linalg.norm(exact(released(far).exact) - exact(other.exact)) for far in (1e3, 3e38, np.nan)]
    assert max(moved) <= float(other.bound)
    assert moved[0] > 0.99 * float(other.bound)


# --- seeded mistakes: each must be found ---------------------------------------------------------------


def clip_of_the_mean(answer: RecordMean) -> Release:
    """Clips the mean of raw gradients and claims the bound of a mean of clipped ones."""
    honest = answer.release()
    far = RecordMean(answer.vectors, answer.batch, 1e6, answer.stream)
    mean = far.release().value
    length = jnp.linalg.norm(mean)
    return Release(mean * jnp.minimum(1.0, answer.clip / jnp.maximum(length, 1e-12)), honest.bound, answer.stream)


def bound_of_addition(answer: RecordMean) -> Release:
    """Forgets that a replaced record leaves as well as comes: half the bound."""
    honest = answer.release()
    return Release(honest.value, honest.bound / 2, honest.stream)


def too_small_a_divisor(answer: RecordMean) -> Release:
    """Divides the sum of six records by five."""
    honest = answer.release()
    return Release(honest.value * 1.2, honest.bound, honest.stream)


@pytest.mark.parametrize("mutant", [clip_of_the_mean, bound_of_addition, too_small_a_divisor])
def test_a_seeded_mistake_is_found(mutant):
    measured = compiled("value", "full", "general", mutant)
    search = settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])
    case = find(neighbours(), lambda case: excess(measured, case) > 0, settings=search)
    assert excess(measured, case) > 0
