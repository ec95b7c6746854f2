"""Audits of the randomizer and of the shuffled release, and the mutants they must catch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.audit.attack import Reading
from silodp.audit.shuffled import advantage, first_on_side, local_level, many_on_side, on_side
from silodp.channels.randomizers import Duchi, PrivUnitG
from silodp.privacy.clones import Shuffled
from silodp.randomness import SeededRandomness

EPS0, DIMENSION, MESSAGES, TRIALS = 1.0, 4, 64, 20_000
DIRECTION = np.eye(DIMENSION)[0]


def _exceeds(reading: Reading, claim: float) -> bool:
    """Whether the claim is refuted at three standard errors."""
    return reading.least > claim


@eqx.filter_jit
def _randomize(randomizer, vectors, seed):
    return randomizer.randomize(vectors, 1.0, SeededRandomness(jax.random.key(seed)))


def _local(randomizer, sign: float, count: int = 400_000) -> np.ndarray:
    vectors = jnp.broadcast_to(jnp.asarray(sign * DIRECTION, jnp.float32), (count, DIMENSION))
    return on_side(np.asarray(_randomize(randomizer, vectors, int(sign) + 5)), DIRECTION)


def _released(randomizer, sign: float, shuffled: bool = True) -> np.ndarray:
    """Batches whose first sender holds +-u; the others are split evenly between u and -u."""
    others = np.where(np.arange(MESSAGES - 1) % 2, 1.0, -1.0)
    signs = jnp.asarray(np.tile(np.append(sign, others), TRIALS), jnp.float32)
    vectors = signs[:, None] * jnp.asarray(DIRECTION, jnp.float32)
    messages = np.asarray(_randomize(randomizer, vectors, int(sign) + 9))
    batches = messages.reshape(TRIALS, MESSAGES, DIMENSION)
    if not shuffled:
        return batches
    return _permute(batches, int(sign) + 1)


def _permute(batches: np.ndarray, seed: int) -> np.ndarray:
    """Permute whole messages, independently in every batch."""
    order = np.random.default_rng(seed).random(batches.shape[:2]).argsort(axis=1)
    return np.take_along_axis(batches, order[:, :, None], axis=1)


def _claimed_advantage() -> float:
    return float(Shuffled(MESSAGES, MESSAGES).pld(EPS0, 1).get_delta_for_epsilon(0.0))


@pytest.mark.parametrize("build", [Duchi, PrivUnitG])
def test_local_randomizer_keeps_its_level(build):
    assert not _exceeds(local_level(_local(build(EPS0), 1), _local(build(EPS0), -1)), EPS0)


def test_local_audit_is_sharp_and_catches_a_doubled_level():
    clean = local_level(_local(Duchi(EPS0), 1), _local(Duchi(EPS0), -1))
    assert clean.mu > 0.98 * EPS0
    assert _exceeds(local_level(_local(Duchi(2 * EPS0), 1), _local(Duchi(2 * EPS0), -1)), EPS0)


def _count_reading(eps0: float):
    return advantage(*many_on_side(np.stack([_released(Duchi(eps0), sign) for sign in (1, -1)]), DIRECTION))


def test_shuffled_count_stays_within_the_claim_and_catches_a_doubled_level():
    clean, claim = _count_reading(EPS0), _claimed_advantage()
    assert not _exceeds(clean, claim)
    assert clean.mu > 0.6 * claim  # the attack is strong enough to notice something
    assert _exceeds(_count_reading(2 * EPS0), claim)


def _first_reading(shuffled: bool):
    events = [first_on_side(_released(Duchi(EPS0), s, shuffled), DIRECTION) for s in (1, -1)]
    return advantage(*events)


def test_first_position_catches_a_missing_shuffle():
    assert not _exceeds(_first_reading(shuffled=True), _claimed_advantage())
    assert _exceeds(_first_reading(shuffled=False), _claimed_advantage())


def test_readings_at_the_edge():
    never, always = np.zeros(10, bool), np.ones(10, bool)
    assert _exceeds(local_level(always, never), 100.0)
    assert not _exceeds(local_level(never, always), 0.0)
    assert advantage(always, never).mu == 1
