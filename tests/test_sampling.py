"""Which records join: the quick search for them finds what numpy finds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.sampling import BLOCK, places_of


@pytest.mark.parametrize("blocks", [1, 2, 51, 300])  # the last by binary search
@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.9, 1.0])
def test_places_are_those_of_nonzero(blocks, rate):
    rng = np.random.default_rng(blocks)
    joins = rng.random((5, blocks * BLOCK)) < rate
    for slots in (1, 7, min(150, blocks * BLOCK), blocks * BLOCK):
        expected = [np.append(np.flatnonzero(row), [10**6] * slots)[:slots] for row in joins]
        found = jax.jit(jax.vmap(lambda row, slots=slots: places_of(row, slots, 10**6)))(jnp.asarray(joins))
        np.testing.assert_array_equal(found, expected)
