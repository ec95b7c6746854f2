"""The audit passes the code as it is and convicts it once it is broken: each mutant is one seeded bug."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from silodp.algorithms import REGISTRY
from silodp.algorithms.differences import RecursiveDifference
from silodp.audit import attack, audit, canaries, first, shuffled, table
from silodp.audit.rows import BLIND, EXCEEDED, OK, REPEATED, Row
from silodp.channels import Summed, Untrusted, channel, pvec, trusted
from silodp.channels.channel import Form, Noised, evaluated
from silodp.channels.randomizers import Duchi, PrivUnitG
from silodp.cli import app
from silodp.compressors import RandK
from silodp.deploy import shuffler
from silodp.errors import ConfigError
from silodp.randomness import party_key
from silodp.releases import RecordMean, Release, Squares
from silodp.run import federation
from silodp.sampling import MOVES, SQUARES_MOVE, TwoLevel


def audited(name: str, trust: str = "untrusted") -> Row:
    return audit([name], [trust])[0]


@pytest.mark.parametrize(
    ("name", "trust"),
    [("dp-gd", "trusted"), ("diff2-gd", "trusted"), ("diff2-gd", "untrusted"), ("local-sgd", "untrusted"),
     ("mu2", "untrusted"), ("soteria-gd", "untrusted")],
)  # fmt: skip
def test_clean_code_passes(name, trust):
    row = audited(name, trust)
    assert row.verdict == OK
    assert abs(row.measured_mu - row.claim_mu) < 3.5 * row.standard_error


@pytest.mark.slow
def test_every_algorithm_and_channel_passes():
    rows = audit()
    assert [row for row in rows if row.verdict != OK] == []
    assert [row.trust for row in rows if row.streams == ("moment (whitening)",)] == ["trusted", "untrusted"]
    assert {(r.algorithm, r.trust) for r in rows} == {
        (name, trust) for name, entry in REGISTRY.items() if entry.private for trust in entry.trusts
    }  # fmt: skip
    assert [row.algorithm for row in rows if row.masked] == ["soteria-gd"]


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_the_first_stage_is_audited(monkeypatch, trust):
    row = first.moment_row(trust)
    assert row.verdict == OK and row.convicts_from < 1.2
    assert abs(row.measured_mu - row.claim_mu) < 3.5 * row.standard_error
    monkeypatch.setattr(Squares, "moves", SQUARES_MOVE / 1.2)
    assert first.moment_row(trust).verdict == EXCEEDED


# The mutants of the recipe, one by one.


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_no_noise_is_caught(monkeypatch, trust):
    for module in (channel, trusted):  # a silo's own noise and the server's
        monkeypatch.setattr(module, "privatise", lambda release, *_: release.value)
    assert audited("dp-gd", trust).verdict == EXCEEDED


def test_noise_for_all_silos_records_is_caught(monkeypatch):
    """Each silo adds the noise that would do on the average of all: scaled with N * n in place of n."""

    def send(self, answer, silo, memory):
        release = evaluated(answer)
        silos = self.multipliers["value"].shape[0]
        shrunk = Release(release.value, release.bound / silos, release.stream)
        return Noised(self.privatise_local(shrunk, silo), jnp.float32(0)), memory

    monkeypatch.setattr(Untrusted, "send", send)
    assert audited("dp-gd").verdict == EXCEEDED


@pytest.mark.parametrize(("name", "trust"), [("dp-gd", "trusted"), ("dp-sgd", "untrusted"), ("prox-sgd", "untrusted")])
def test_forgotten_factor_two_of_replacement_is_caught(monkeypatch, name, trust):
    honest = RecordMean.release

    def release(self):
        made = honest(self)
        return Release(made.value, made.bound / 2, made.stream)

    monkeypatch.setattr(RecordMean, "release", release)
    assert audited(name, trust).verdict == EXCEEDED


def test_clipping_the_mean_is_caught(monkeypatch):
    def release(self):
        total = self.vectors.clipped_sum(self.batch.records, self.batch.weights, None)
        mean = total.high / self.batch.divisor
        clipped = mean * jnp.minimum(1.0, self.clip / jnp.linalg.norm(mean))
        return Release(clipped, MOVES * self.clip / self.batch.divisor, self.stream)

    monkeypatch.setattr(RecordMean, "release", release)
    assert audited("dp-gd").verdict == EXCEEDED


def with_keys(monkeypatch, mutant) -> None:
    """`mutant(key, round, index)` in the place of `party_key`, wherever its name is bound."""
    for module in (federation, shuffled):
        monkeypatch.setattr(module, "party_key", mutant)


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_a_key_used_in_two_rounds_is_caught(monkeypatch, trust):
    with_keys(monkeypatch, lambda key, round, index: party_key(key, jnp.maximum(round, 1), index))
    row = audited("dp-gd", trust)
    assert row.verdict in (REPEATED, EXCEEDED)
    assert row.noise_correlation_rounds > 0.99


def test_a_key_used_by_two_silos_is_caught(monkeypatch):
    with_keys(monkeypatch, lambda key, round, index: party_key(key, round, jnp.minimum(index, 0)))
    row = audited("dp-gd")
    assert row.verdict == REPEATED
    assert row.noise_correlation_silos is not None and row.noise_correlation_silos > 0.99


def difference_of(values):
    """A `difference` query with the honest bound and another value."""

    def difference(self, silo, x, y):
        bound = MOVES * self.difference_clip(x, y) / silo.size
        return Release(values(self, silo, x, y), bound, "difference")

    return difference


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_a_difference_that_is_not_clipped_is_caught(monkeypatch, trust):
    loose = difference_of(lambda self, silo, x, y: silo.mean([x, y], [1.0, -1.0], 1e9, "difference").release().value)
    monkeypatch.setattr(RecursiveDifference, "difference", loose)
    assert audited("diff2-gd", trust).verdict == EXCEEDED


def each_clipped(clip):
    """A query that clips both gradients of a difference, and not the difference."""

    def values(self, silo, x, y):
        value = lambda point: silo.mean([point], [1.0], clip(self, x, y), "difference").release().value
        return value(x) - value(y)

    return difference_of(values)


@pytest.mark.parametrize("clip", [lambda self, x, y: self.clip, lambda self, x, y: self.difference_clip(x, y)])
def test_clipping_each_gradient_instead_of_the_difference_is_caught(monkeypatch, clip):
    monkeypatch.setattr(RecursiveDifference, "difference", each_clipped(clip))
    assert audited("diff2-gd").verdict == EXCEEDED


def test_steady_canaries_alone_would_miss_each_gradient_clipped(monkeypatch):
    """Their clipped gradients do not differ: this is what the turning ones are for."""
    monkeypatch.setattr(RecursiveDifference, "difference", each_clipped(lambda self, x, y: self.clip))
    monkeypatch.setattr(table, "KINDS", (canaries.STEADY,))
    assert audited("diff2-gd").verdict == BLIND


def test_a_mask_that_hides_nothing_is_caught(monkeypatch):
    case = table.Case("soteria-gd", "untrusted", Form({"privacy.mask_amplification": True}))
    clean = table.audit_case(case)
    assert clean.verdict == OK
    assert clean.measured_mu > 0.9 * clean.claim_mu
    monkeypatch.setattr(RandK, "__call__", lambda self, v, randomness: v)
    assert table.audit_case(case).verdict == EXCEEDED


@pytest.mark.parametrize("name", ["ldp-svrg", "soteria-saga"])
def test_two_level_noise_that_is_too_small_is_caught(monkeypatch, name):
    clean = audited(name)
    assert clean.verdict == OK and clean.given == "if drawn"
    assert clean.measured_mu > 0.85 * clean.claim_mu
    honest = TwoLevel.bound_over_clip
    monkeypatch.setattr(TwoLevel, "bound_over_clip", lambda self, records, *moves: honest(self, records, *moves) / 1.3)
    assert audited(name).verdict == EXCEEDED


def test_a_batch_drawn_too_often_is_caught(monkeypatch):
    """A rate above the plan's: with the same noise given the coins, so only their frequency tells."""
    honest = TwoLevel.draw

    def draw(self, silo, purpose, step=0):
        drawn = honest(TwoLevel(self.batch * 11 // 10), silo, purpose, step)
        return dataclasses.replace(drawn, divisor=jnp.float32(self.batch))

    monkeypatch.setattr(TwoLevel, "draw", draw)
    row = audited("ldp-svrg")
    assert row.verdict == EXCEEDED and row.measured_mu < row.claim_mu + 4 * row.standard_error


# The power that a row states.


@pytest.mark.parametrize(("name", "trust"), [("dp-gd", "trusted"), ("ldp-svrg", "untrusted")])
def test_noise_is_convicted_above_the_stated_factor_and_not_below(monkeypatch, name, trust):
    honest, stated = channel.privatise, audited(name, trust).convicts_from
    assert 1 < stated < 1.2
    for factor, expected in ((0.97, OK), (1.03, EXCEEDED)):
        smaller = lambda release, multiplier, *rest, f=factor * stated: honest(release, multiplier / f, *rest)
        for module in (channel, trusted):
            monkeypatch.setattr(module, "privatise", smaller)
        assert audited(name, trust).verdict == expected


def test_a_reading_that_shows_nothing_convicts_nothing():
    assert attack.Reading(0.1, 0.1).convicts_from(1.0) == np.inf
    assert attack.Reading(2.0, 0.1).convicts_from(1.0) == 1.0


# Shuffled messages.


@pytest.mark.parametrize("randomizer", [Duchi, PrivUnitG])
def test_a_doubled_local_level_is_caught(monkeypatch, randomizer):
    honest = randomizer.randomize
    doubled = lambda self, *given: honest(randomizer(2 * self.eps0), *given)
    monkeypatch.setattr(randomizer, "randomize", doubled)
    verdicts = [row.verdict for row in audit(["dp-gd"], ["shuffled"])]
    assert verdicts == ([EXCEEDED, OK] if randomizer is Duchi else [OK, EXCEEDED])


def test_a_shuffler_that_keeps_the_order_is_caught(monkeypatch):
    monkeypatch.setattr(shuffler, "permuted", list)
    row = audited("dp-gd", "shuffled")
    assert row.verdict == EXCEEDED
    assert row.measured_eps0 == pytest.approx(row.claim_eps0, rel=0.02)


def test_a_randomizer_that_repeats_its_coins_is_caught(monkeypatch):
    with_keys(monkeypatch, lambda key, round, index: party_key(key, round * 0, index))
    assert audited("dp-gd", "shuffled").verdict == REPEATED


def test_sums_with_too_few_coins_are_caught(monkeypatch):
    assert audited("sdp-prox-sgd", "shuffled").verdict == OK
    honest = pvec.gaussian_multiplier
    monkeypatch.setattr(Summed, "_check_tail", lambda *_: None)
    monkeypatch.setattr(pvec, "sensitivity", lambda levels, dimension: levels / 2)
    monkeypatch.setattr(pvec, "gaussian_multiplier", lambda *given: 3 * honest(*given))
    assert audited("sdp-prox-sgd", "shuffled").verdict == EXCEEDED


def test_weak_canaries_are_not_taken_for_safety(monkeypatch):
    weak = {canaries.STEADY: (0.1, 0.0, 0.0), canaries.TURNING: (0.0, 0.1, 0.0)}
    monkeypatch.setattr(canaries, "FEATURES", canaries.FEATURES | weak)
    assert audited("dp-gd").verdict == BLIND


# The attack, on releases whose mu is known.


def made_releases(mu_each: list[float], canary_count: int = 4000):
    rng = np.random.default_rng(7)
    signs = rng.choice([-1.0, 1.0], canary_count)
    scales = np.array([0.1, 3.0, 1.0])[: len(mu_each), None]
    shift = np.array(mu_each)[:, None] / 2
    releases = scales * (shift * signs + rng.normal(size=(len(mu_each), canary_count)))
    return releases, signs, scales * rng.normal(size=(len(mu_each), 2000))


@pytest.mark.parametrize("mu_each", [[0.0, 0.0, 0.0], [1.0], [0.3, 1.0, 2.0]])
def test_both_readings_find_the_composed_mu(mu_each):
    scores = attack.agreement(*made_releases(mu_each))
    for reading in (attack.separation([scores]), attack.guessing([scores])):
        assert abs(reading.mu - np.linalg.norm(mu_each)) < 3 * reading.error + 0.01


def test_a_release_without_noise_is_seen_and_an_empty_one_is_not():
    releases, signs, noise = made_releases([1.0, 1.0])
    silent = np.zeros((1, signs.size)), np.zeros((1, noise.shape[1]))
    with_empty = attack.agreement(np.vstack([releases, silent[0]]), signs, np.vstack([noise, silent[1]]))
    np.testing.assert_allclose(with_empty, attack.agreement(releases, signs, noise), rtol=1e-6)
    bare = attack.agreement(np.vstack([releases, signs]), signs, np.vstack([noise, silent[1]]))
    assert attack.separation([bare]).mu == np.inf
    assert attack.guessing([bare]).least > 3


def test_repeated_noise_is_found_between_releases_and_between_silos():
    noise = np.random.default_rng(0).normal(size=(4, 1000))
    assert attack.repeated_noise(noise) < 0.15
    assert attack.repeated_noise(np.vstack([noise, -5 * noise[1]])) > 0.999
    other = np.random.default_rng(1).normal(size=(4, 1000))
    assert attack.shared_noise(noise, other) < 0.15
    assert attack.shared_noise(noise, np.vstack([other, noise[2]])) > 0.999


def test_canary_gradients_lie_along_their_own_coordinates():
    made = canaries.make_canaries(0, sizes=(8,))
    data = canaries.canary_data(made).silos[0]
    gradient = jax.vmap(jax.grad(canaries.canary_loss), in_axes=(None, 0))
    for clock in (0.0, canaries.DRIFT):
        params = {"canary": jnp.zeros((8, 1)), "clock": jnp.full((1, 1), clock)}
        found = gradient(params, (jnp.asarray(data.features), jnp.asarray(data.targets)))
        along = np.asarray(found["canary"][:, :, 0])
        assert np.count_nonzero(along - np.diag(np.diag(along))) == 0
        assert np.all(np.diag(along)[made.blank] == 0)
        sides = np.sign(np.diag(along)) * made.sign[0]
        assert np.all(sides[made.kind == canaries.STEADY] == 1)
        assert np.all(sides[made.kind == canaries.TURNING] == (-1 if clock else 1))


# The command.


def test_command_prints_json_and_fails_when_a_claim_is_exceeded(monkeypatch):
    row = Row("dp-gd", "trusted", ("value",), 1.0, 2.0, 0.1, EXCEEDED, 0.0, None, convicts_from=1.1)
    monkeypatch.setattr(table, "audit_one", lambda *_: row)
    result = CliRunner().invoke(app, ["audit", "dp-gd", "--trust", "trusted", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == [json.loads(json.dumps(dataclasses.asdict(row)))]
    monkeypatch.setattr(table, "audit_one", lambda *_: dataclasses.replace(row, verdict=OK))
    assert CliRunner().invoke(app, ["audit", "dp-gd"]).exit_code == 0


@pytest.mark.parametrize(
    ("names", "trusts", "words"),
    [(["gd"], None, "adds no noise"), (["nope"], None, "unknown"), (None, ["blind"], "blind.*shuffled"),
     (["soteria-gd"], ["trusted"], "runs under untrusted")],
)  # fmt: skip
def test_what_cannot_be_audited_is_refused(names, trusts, words):
    with pytest.raises(ConfigError, match=words):
        audit(names, trusts)
