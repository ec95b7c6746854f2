"""Rows of real message mode: they pass the code as it is, and convict it once it is broken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.audit import attack, real
from silodp.audit.lowbits import reached
from silodp.audit.rows import EXCEEDED, OK, REPEATED
from silodp.channels import channel
from silodp.channels import trusted as trusted_module
from silodp.deploy import coordinator, silo
from silodp.randomness import SERVER, SeededRandomness, SystemRandomness, party_key
from tests.repeatable import once_in_two


@pytest.mark.parametrize(("name", "trust"), [("dp-gd", "trusted"), ("local-sgd", "untrusted")])
def test_real_noise_is_read_at_its_claim(name, trust):
    def passes():
        row = real.noise_row(name, trust, silos=1, at_server=trust == "trusted")
        near = abs(row.measured_mu - row.claim_mu) < 4 * row.standard_error
        return row.verdict == OK and row.convicts_from < 1.25 and near

    assert once_in_two(passes)


def test_silos_in_processes_pass():
    def passes():
        row = real.noise_row("dp-gd", "untrusted", silos=2, in_processes=True)
        return row.verdict == OK and row.noise_correlation_silos is not None

    assert once_in_two(passes)


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_real_noise_that_is_too_small_is_caught(monkeypatch, trust):
    honest = channel.privatise
    smaller = lambda release, multiplier, *rest: honest(release, multiplier / 1.3, *rest)
    for module in (channel, trusted_module):
        monkeypatch.setattr(module, "privatise", smaller)
    assert real.noise_row("dp-gd", trust, silos=1, at_server=trust == "trusted").verdict == EXCEEDED


def test_a_servers_noise_from_the_public_seed_is_caught(monkeypatch):
    honest = coordinator.MessageFederation.begin_round

    def begin_round(self, round):
        honest(self, round)
        self.randomness = SeededRandomness(party_key(jax.random.key(self.plan.config.run.seed), round, SERVER))

    monkeypatch.setattr(coordinator.MessageFederation, "begin_round", begin_round)
    assert real.noise_row("dp-gd", "trusted", silos=1, at_server=True).verdict == REPEATED


def test_a_silos_noise_from_the_public_seed_is_caught(monkeypatch):
    seeded = lambda self, round, _: SeededRandomness(party_key(jax.random.key(0), round, self.index))
    monkeypatch.setattr(silo.SiloServer, "_randomness", seeded)
    assert real.noise_row("local-sgd", "untrusted", silos=1).verdict == REPEATED


def test_batches_that_are_never_redrawn_are_caught(monkeypatch):
    assert once_in_two(lambda: real.batches_row().verdict == OK)
    monkeypatch.setattr(silo, "fresh_seed", lambda: np.zeros(2, np.uint32))
    assert real.batches_row().verdict == REPEATED


# The lowest bits.


def test_low_bits_of_real_answers_are_at_chance():
    def passes():
        _, scores = real.low_bits()
        reading = attack.guessing([scores])
        return scores.size == 400 and abs(reading.mu) < 3.5 * reading.error  # by chance beyond in 5 of 10,000 runs

    assert once_in_two(passes)


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_low_bits_of_naive_noise_tell_the_data_sets_apart(monkeypatch, epsilon):
    naive = lambda self, purpose, value, std, step=0: value.high + std * self.normal(purpose, value.high.shape, step)
    monkeypatch.setattr(SystemRandomness, "noised", naive)
    monkeypatch.setattr(SystemRandomness, "step_of", lambda *_: jnp.float32(0))  # sent as floats, on no grid
    _, scores = real.low_bits(rounds=50, epsilon=epsilon)
    assert np.mean(scores > 0) > 0.98  # guessing is right in half; 1,600 of 1,600 answers named their data set


def test_naive_noise_always_reaches_what_it_made():
    rng = np.random.default_rng(0)
    value, std = rng.normal(size=1000).astype(np.float32), np.float32(0.3)
    z = rng.normal(size=1000).astype(np.float32)
    fused = (value.astype(np.float64) + np.float64(std) * z).astype(np.float32)
    for answer in (value + std * z, fused):
        assert reached(answer.astype(np.float64), value, std) == 1000
        assert reached(answer.astype(np.float64), value + np.float32(1e-3), std) < 970


def test_an_attack_knows_a_silos_mean_to_the_last_bit(monkeypatch):
    """Else it reaches less from the right data set than naive noise does, and finds nothing where something is."""
    monkeypatch.setattr(SystemRandomness, "noised", lambda self, purpose, value, std, step=0: value.high)
    monkeypatch.setattr(SystemRandomness, "step_of", lambda *_: jnp.float32(0))
    prepared, values = real.low_bits_run(rounds=1, epsilon=8.0)
    for answer, (value, _) in zip(real.answers(prepared).arrived[0], values, strict=True):
        np.testing.assert_array_equal(answer.astype(np.float32), value)
