"""Which records join: the quick search for them finds what numpy finds."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.randomness import SeededRandomness
from silodp.sampling import BLOCK, Cumulative, OnePass, Poisson, Share, places_of


@pytest.mark.parametrize("blocks", [1, 2, 51, 300])  # the last by binary search
@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.9, 1.0])
def test_places_are_those_of_nonzero(blocks, rate):
    rng = np.random.default_rng(blocks)
    joins = rng.random((5, blocks * BLOCK)) < rate
    for slots in (1, 7, min(150, blocks * BLOCK), blocks * BLOCK):
        expected = [np.append(np.flatnonzero(row), [10**6] * slots)[:slots] for row in joins]
        found = jax.jit(jax.vmap(lambda row, slots=slots: places_of(row, slots, 10**6)))(jnp.asarray(joins))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rule", [Poisson(3), OnePass(7), Cumulative(7)])
def test_padding_shows_no_record_that_was_not_drawn(rule):
    """Not even as a record of weight 0: if it is no number, its sum takes another way."""

    @jax.jit
    def drawn(seed):
        own = {"records": 1 + jnp.arange(24), "size": jnp.int32(20), "round": seed % 5}
        return rule.draw(SimpleNamespace(**own, randomness=SeededRandomness(jax.random.key(seed))), "value")

    batches = [drawn(seed) for seed in range(20)]
    for batch in batches:
        assert not np.asarray(batch.records)[np.asarray(batch.weights) == 0].any()
    assert any((np.asarray(batch.weights) == 0).any() for batch in batches)


def test_a_share_just_below_one_still_tosses_coins():
    """In float32 it is 1, where everybody joins without a coin; it is accounted as a share."""

    class Unlucky:
        bits = staticmethod(lambda purpose, shape, step=0: jnp.full(shape, 2**32 - 1, jnp.uint32))
        scattered = staticmethod(lambda purpose, rows, step=0: rows)

    silo = SimpleNamespace(records=jnp.ones(100), size=jnp.int32(100), round=jnp.int32(0), randomness=Unlucky())
    assert Share(0, rate=1 - 2.0**-26).draw(silo, "value").weights.sum() == 0
    assert Share(0, rate=1.0).draw(silo, "value").weights.sum() == 100
    assert Poisson(100).draw(silo, "value").weights.sum() == 100
