"""How often a record is in a batch: as often as the account says, and independently of every other batch.

Frequencies over many draws, as normal deviates. The largest of n of them exceeds 5 with probability n * 6e-7, and the
seeds are fixed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.channels import Untrusted
from silodp.core import Silo, Site
from silodp.randomness import SeededRandomness, party_key
from silodp.releases import Account
from silodp.sampling import BatchRule, FixedSize, OnePass, Poisson, TwoLevel

SIZE, PADDED, DRAWS = 10, 13, 40_000
RULES = {"poisson": Poisson(3), "fixed": FixedSize(3), "two-level": TwoLevel(3)}


def drawer(key: Any, round: Any = 0) -> Any:
    records = (jnp.arange(PADDED),)
    return SimpleNamespace(records=records, size=jnp.int32(SIZE), round=round, randomness=SeededRandomness(key))


def inclusions(rule: BatchRule, steps: tuple[int, ...] = (0,), purpose: str = "value") -> np.ndarray:
    """[draws, steps, records]: whether the record was in the batch of a step."""

    def one(seed: Any) -> Any:
        silo = drawer(jax.random.key(seed))
        drawn = [rule.draw(silo, purpose, step) for step in steps]
        return jnp.stack([jnp.zeros(PADDED).at[b.rows].add(b.weights, mode="drop") for b in drawn])

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(DRAWS)))


def deviates(measured: np.ndarray, expected: float) -> np.ndarray:
    """Of frequencies of DRAWS independent events."""
    return (measured - expected) / np.sqrt(expected * (1 - expected) / DRAWS)


@pytest.mark.parametrize("rule", RULES)
def test_every_record_is_drawn_as_often_as_it_is_accounted(rule):
    joined = inclusions(RULES[rule])[:, 0]
    assert set(np.unique(joined)) == {0.0, 1.0}
    assert (joined[:, SIZE:] == 0).all(), "padding was drawn"
    accounted = RULES[rule].batch / SIZE
    if rule != "two-level":
        assert RULES[rule].sampling(SIZE).exposure == pytest.approx(accounted)
    assert np.abs(deviates(joined[:, :SIZE].mean(0), accounted)).max() < 5


@pytest.mark.parametrize("rule", ["poisson", "two-level"])
def test_poisson_coins_are_independent_and_the_batch_is_never_cut(rule):
    joined = inclusions(RULES[rule])[:, 0, :SIZE]
    pairs = (joined.T @ joined / DRAWS)[np.triu_indices(SIZE, 1)]
    assert np.abs(deviates(pairs, 0.3**2)).max() < 5
    sizes = joined.sum(1)
    assert sizes.var() == pytest.approx(SIZE * 0.3 * 0.7, rel=0.05)
    assert sizes.max() >= 8  # 0.2 percent of the draws: a batch cut at any number near its mean shows here


def test_a_fixed_batch_has_its_size_and_every_pair_alike():
    joined = inclusions(RULES["fixed"])[:, 0, :SIZE]
    assert (joined.sum(1) == 3).all()
    pairs = (joined.T @ joined / DRAWS)[np.triu_indices(SIZE, 1)]
    assert np.abs(deviates(pairs, 3 / 10 * 2 / 9)).max() < 5


def test_ties_between_tickets_favour_nobody(monkeypatch):
    """Of 2^24 tickets a million records share some: the first record would be drawn 3 percent too often."""
    fine = SeededRandomness.uniform
    few = lambda self, *what: fine(self, *what).at[0].mul(4).at[0].apply(jnp.floor)
    monkeypatch.setattr(SeededRandomness, "uniform", few)
    joined = inclusions(RULES["fixed"])[:, 0]
    assert (joined[:, SIZE:] == 0).all() and (joined.sum(1) == 3).all()
    assert np.abs(deviates(joined[:, :SIZE].mean(0), 0.3)).max() < 5


@pytest.mark.parametrize("rule", RULES)
def test_batches_of_two_steps_are_independent(rule):
    """One batch for all local steps would be charged as many: only independent draws are amplified."""
    joined = inclusions(RULES[rule], steps=(0, 1))[:, :, :SIZE]
    both = (joined[:, 0] * joined[:, 1]).mean(0)
    assert np.abs(deviates(both, 0.3**2)).max() < 5
    assert np.abs(deviates(joined[:, 1].mean(0), 0.3)).max() < 5


@pytest.mark.parametrize("rule", ["poisson", "fixed"])
def test_a_silo_passes_the_step_and_the_stream_on_to_its_batches(rule):
    """Steps, streams, rounds and silos all have batches of their own."""
    records = (jnp.arange(PADDED * 2.0).reshape(PADDED, 2), jnp.zeros(PADDED))
    site = Site(None, Untrusted(), records, jnp.int32(SIZE), jnp.int32(0))  # type: ignore[arg-type]

    def drawn(round: int, index: int, stream: str, step: int) -> tuple[int, ...]:
        coins = SeededRandomness(party_key(jax.random.key(3), round, index))
        silo = Silo(site, jnp.int32(round), coins, (), Account.empty(["a", "b"]))
        batch = silo.mean([jnp.zeros(2)], [1.0], 1.0, stream, RULES[rule], step).batch
        return tuple(np.sort(np.asarray(batch.rows)[np.asarray(batch.weights) > 0]).tolist())

    places = [(r, i, s, k) for r in (0, 1) for i in (0, 1) for s in ("a", "b") for k in (0, 1, 2)]
    batches = [drawn(*place) for place in places]
    assert batches[0] == drawn(*places[0])
    assert len(set(batches)) >= 15  # of 24; by chance some are alike


def test_one_pass_uses_every_record_once():
    used = np.zeros(PADDED)
    for round in range(5):
        batch = OnePass(5).draw(drawer(jax.random.key(0), jnp.int32(round)), "value")
        np.add.at(used, np.asarray(batch.rows)[np.asarray(batch.weights) > 0], 1)
    np.testing.assert_array_equal(used, np.arange(PADDED) < SIZE)
