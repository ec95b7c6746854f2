"""What is printed of a guarantee holds: never less than it is."""

from __future__ import annotations

import math
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silodp.channels.channel import SMALLEST_BOUND, privatise
from silodp.deploy.status import row, spent_text
from silodp.digits import rounded_up
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.randomness import SeededRandomness, SystemRandomness
from silodp.releases import Release


@given(st.floats(1e-30, 1e30), st.integers(2, 6))
def test_a_printed_guarantee_is_never_less_than_the_real_one(number, digits):
    printed = float(rounded_up(number, digits))
    assert number <= printed <= number * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)


def test_numbers_of_few_digits_stay_as_they_are():
    assert [rounded_up(x) for x in (1.0, 0.1, 1e-5, 2.5, 8.0, 0.3)] == ["1", "0.1", "1e-05", "2.5", "8", "0.3"]
    assert rounded_up(1.12724) == "1.128"
    assert rounded_up(math.inf) == "inf"
    assert rounded_up(0.0) == "0"
    assert rounded_up(np.float64(1.12724)) == "1.128"


def test_a_status_page_rounds_what_is_spent_up_and_what_is_left_down():
    budget = {"run_spent": 1.12724, "run_reserved": 2.00001, "total": 3.00001, "limit": 10.0, "delta": 1.00001e-5}
    site = {"site": "a", "records": 3, "epsilon": 0.500001, "budget": budget, "heard_at": None}
    site |= {"bytes_up": 0, "bytes_down": 0}
    assert spent_text(site) == "epsilon 1.128 of 2.001 in this run, 3.001 of 10 in all runs at delta 1.001e-05"
    assert spent_text(site | {"budget": None}) == "epsilon 0.5001 planned"
    page = row(site, 6.56705e-7)
    assert "1.128 spent of 2.001, delta 6.568e-07" in page
    assert "3.001 of 10 reserved, 6.999 left, delta 1.001e-05" in page


@pytest.mark.parametrize("field", ["clip", "clip_difference", "clip_local"])
@pytest.mark.parametrize("value", [4e-37, 0.0, 1e30])
def test_a_clip_norm_that_float32_cannot_work_with_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"algorithm.{field}"):
        parse_config({"algorithm": {"name": "dp-gd", field: value}})


@pytest.mark.parametrize("bound", [0.0, 1e-45, 1e-38])
def test_a_bound_that_vanishes_still_gets_noise(bound):
    release = Release(jnp.zeros(100), jnp.float32(bound), "value")
    for randomness in (SeededRandomness(jax.random.key(0)), SystemRandomness()):
        noised = np.asarray(privatise(release, jnp.float32(2.0), randomness), np.float64)
        assert noised.std() / SMALLEST_BOUND == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize("bound", [np.inf, np.nan, -1.0])
@pytest.mark.parametrize(
    "randomness", [SeededRandomness(jax.random.key(0)), SystemRandomness()], ids=["seeded", "real"]
)
def test_a_bound_that_is_none_lets_nothing_out(bound, randomness):
    release = Release(jnp.ones(3), jnp.float32(bound), "value")
    with pytest.raises(ValueError, match="release 'value': its bound must be a finite number >= 0"):
        privatise(release, jnp.float32(2.0), randomness)
    with pytest.raises(ValueError, match="so must its noise"):
        privatise(replace(release, bound=jnp.float32(1.0)), jnp.float32(np.inf), randomness)


@pytest.mark.parametrize("bound", [np.inf, np.nan, -1.0])
def test_in_a_compiled_program_too(bound):
    release = Release(jnp.ones(3), jnp.float32(bound), "value")
    draw = eqx.filter_jit(lambda release, randomness: privatise(release, jnp.float32(2.0), randomness))
    assert np.isnan(draw(release, SeededRandomness(jax.random.key(0)))).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="std"):
        draw(release, SystemRandomness()).block_until_ready()
