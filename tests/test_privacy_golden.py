"""Values computed independently of this library (0.5%), and the errata of the papers."""

import math
from typing import Any

import pytest

from silodp import sampling
from silodp.algorithms.entry import Case
from silodp.algorithms.papers import bvr_local, lowy_batch, with_replacement_epsilon
from silodp.config import AlgorithmConfig
from silodp.parse import parse_config
from silodp.plan.account import account, paper_row
from silodp.privacy import accountant
from silodp.privacy.accountant import calibrate, calibrate_gdp, epsilon, optimal_share
from silodp.privacy.gaussian import epsilon_of, mu_of
from silodp.privacy.kinds import Disjoint, FixedSize, Full, Masked, Poisson, Releases, Spent
from silodp.privacy.mixture import mirrored

within = lambda value: pytest.approx(value, rel=0.005)
printed_digits = lambda value, digits: pytest.approx(value, abs=0.51 * 10**-digits)

SILO = 1234  # records per silo in 001's MNIST experiment
SILO_DELTA = 1 / SILO**2


def config(name: str, privacy: dict[str, Any], silos: int, records: int, **options: Any):
    return parse_config(
        {
            "data": {"silos": silos, "records": records},
            "privacy": privacy,
            "algorithm": {"name": name} | options,
        }
    )


def paper(
    name: str, claim: float, delta: float, rounds: int, *, records: int = SILO, silos: int = 1, **options: Any
) -> dict[str, Any]:
    """What `silodp account` says about the noise that the paper prints for this claim."""
    row = paper_row(config(name, {"epsilon": claim, "delta": delta}, silos, records, rounds=rounds, **options))
    assert row is not None
    return row


def multipliers(row: dict[str, Any]) -> dict[str, float]:
    return {release["stream"]: release["multiplier"] for release in row["releases"]}


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {release["stream"]: release["count"] for release in row["releases"]}


def test_gaussian_conversions():
    assert mu_of(1, 1e-5) == pytest.approx(0.2681, abs=5e-5)
    assert mu_of(3, 1e-5) == pytest.approx(0.71912, abs=5e-6)
    assert epsilon_of(1e-5, 4) == pytest.approx(24.38, abs=5e-3)


@pytest.mark.parametrize(
    ("restart", "printed", "exact"),
    [
        (1, (0.009383,), (0.007534,)),
        (20, (0.002346, 0.020451), (0.001883, 0.016419)),
        (200, (0.000742, 0.020929), (0.000596, 0.016803)),
    ],
)
def test_diff2(restart, printed, exact):
    values = math.ceil(2000 / restart)
    releases = [Releases("value", values, Full()), Releases("difference", 2000 - values, Full())]
    noise = calibrate(releases, 3, 1e-5, {"value": 0.8, "difference": 0.2})
    stds = [noise[stream] * 2 / 16510 for stream in ("value", "difference")]
    assert stds[: len(exact)] == [within(std) for std in exact]
    told = multipliers(paper("diff2-gd", 3, 1e-5, 2000, restart=restart))
    assert [m * 2 / 16510 for m in told.values()] == [within(std) for std in printed]


def test_diff2_wastes_a_fifth():
    assert paper("diff2-gd", 3, 1e-5, 2000, restart=20)["true_epsilon"] == pytest.approx(2.341, abs=5e-4)
    assert paper("diff2-gd", 5, 1e-5, 2000, restart=20)["true_epsilon"] == pytest.approx(3.940, abs=5e-4)
    assert not paper("diff2-gd", 5, 1e-5, 2000, restart=20)["violated"]


def test_dp_gd_is_diff2_that_always_restarts():
    plain, told = paper("dp-gd", 3, 1e-5, 2000), paper("diff2-gd", 3, 1e-5, 2000, restart=1)
    assert multipliers(plain) == multipliers(told)
    assert multipliers(plain)["value"] * 2 / 16510 == within(0.009383)


def test_spider():
    told = paper("spider", 1, SILO_DELTA, 51, restart=3)
    assert counts(told) == {"value": 17, "difference": 34}
    assert multipliers(told)["value"] * 2 / SILO == within(0.0499)
    assert multipliers(told)["difference"] * 4 / SILO == within(0.1730)
    assert told["true_epsilon"] == within(0.729)
    releases = [Releases("value", 17, Full()), Releases("difference", 34, Full())]
    noise = calibrate(releases, 1, SILO_DELTA, {"value": 0.6, "difference": 0.4})
    assert noise["value"] * 2 / SILO == within(0.0372)
    assert noise["difference"] * 4 / SILO == within(0.1288)


def test_soteria_a9a():
    std = lambda sampling, batch: calibrate([Releases("value", 2000, sampling)], 1, 1e-3)["value"] * 1.0 / batch
    assert std(Poisson(10 / 3256), 10) == within(0.04164)
    assert std(Full(), 3256) == within(0.03536)
    assert std(Masked(6, 123), 3256) == within(0.00891)


@pytest.mark.parametrize(("uses", "fixed", "poisson"), [(1800, 1.972, 1.187), (2000, 2.030, 1.244)])
def test_local_steps(uses, fixed, poisson):
    noise = lambda sampling: 2 * calibrate([Releases("local", uses, sampling)], 3, 1e-5)["local"]
    assert noise(FixedSize(16, 1651)) == within(fixed)
    assert noise(Poisson(16 / 1651)) == within(poisson)


def test_bvr_local_bound_of_the_paper():
    case = Case(AlgorithmConfig(name="diff2-bvr-l-sgd", rounds=2000), 3, 1e-5, records=1651, silos=10)
    assert 2 * bvr_local(case, 2000, 16 / 1651) == within(3.35)
    options = {"restart": 20, "local_steps": 10, "batch_local": 16}
    whole = paper("diff2-bvr-l-sgd", 3, 1e-5, 2000, records=1651, silos=10, **options)
    assert set(multipliers(whole)) == {"value", "difference", "local"}
    assert counts(whole)["local"] == 9 * 200
    assert not whole["violated"]


@pytest.mark.parametrize(("claim", "true"), [(12, 12.1), (18, 20.0)])
def test_e11_spider_spends_more_than_one_budget(claim, true):
    told = paper("spider", claim, SILO_DELTA, 51, restart=4)
    assert told["true_epsilon"] == printed_digits(true, 1)
    assert told["violated"]


@pytest.mark.parametrize(("claim", "true"), [(12, 13.2), (15, 17.6)])
def test_e12_prox_sgd_halves_its_variance(claim, true):
    assert paper("prox-sgd", claim, 1e-5, 50)["true_epsilon"] == printed_digits(true, 1)


@pytest.mark.parametrize(("claim", "true"), [(3, 4.4), (6, 13.9), (18, 81)])
def test_e13_with_replacement(claim, true):
    batch = lowy_batch(claim, 25, SILO)
    told = multipliers(paper("dp-sgd", claim, SILO_DELTA, 25, batch=batch))["value"]
    assert with_replacement_epsilon(batch, SILO, told, 25, SILO_DELTA) == pytest.approx(true, rel=0.01)


def test_with_replacement_of_one_draw_is_sampling_one_record():
    """With one draw there is no multiple use; then fixed size (an upper bound) is hardly larger."""
    drawn = with_replacement_epsilon(1, 50, 0.7, 20, 1e-5)
    fixed = epsilon([Spent(Releases("value", 20, FixedSize(1, 50)), 0.7)], 1e-5)
    assert 0.97 * fixed < drawn <= fixed


@pytest.mark.parametrize(
    ("claim", "rounds", "batch", "true"), [(1, 25, 10, 42.6), (5, 100, 52, 25.1), (10, 150, 104, 29.1)]
)
def test_e24_soteria_constant(claim, rounds, batch, true):
    told = paper("soteria-sgd", claim, 1e-3, rounds, batch=batch, records=3256)
    assert told["true_epsilon"] == printed_digits(true, 1)
    assert told["violated"]
    for name in ("cdp-sgd", "ldp-sgd"):
        assert multipliers(told) == multipliers(paper(name, claim, 1e-3, rounds, batch=batch, records=3256))


@pytest.mark.parametrize(("rho", "true"), [(4, 24.4), (8, 65.3), (16, 195.4)])
def test_e31_mu2_in_epsilon(rho, true):
    told = account(config("mu2", {"gdp": rho, "delta": 1e-5}, 1, 600, rounds=600))["paper"]
    assert told["true_epsilon"] == printed_digits(true, 1)
    assert told["true_epsilon"] == pytest.approx(told["claimed_epsilon"], rel=1e-9)
    releases = [Releases("value", 600, Full())]
    assert calibrate_gdp(releases, rho)["value"] == pytest.approx(multipliers(told)["value"])


def test_soteria_variance_reduction_uses_both_levels():
    options = {"batch": 54, "records": 3256}
    told = paper("soteria-svrg", 10, 1e-3, 150, snapshot_probability=0.3, **options)
    std = math.sqrt(48 * 2 * 150 * math.log(1e3)) / (3256 * 10)
    assert multipliers(told)["value"] * sampling.Recomputed(54).bound_over_clip(3256) == pytest.approx(std)
    other = multipliers(paper("soteria-saga", 10, 1e-3, 150, **options))
    assert other["value"] * sampling.TwoLevel(54).bound_over_clip(3256) == pytest.approx(std)
    assert told["violated"]


def test_remaining_papers_keep_their_claims():
    """Loose bounds: the printed noise is enough once batches are drawn by coins."""
    epochs = {"records": 1000, "batch": 100, "restart": 10}
    one, two = paper("prox-svrg", 3, 1e-5, 50, **epochs), paper("prox-pl-svrg", 3, 1e-5, 100, epochs=5, **epochs)
    assert not one["violated"]
    assert counts(one) == {"value": 5, "difference": 45}
    assert counts(two) == {"value": 10, "difference": 90}
    twice = {stream: multiplier * math.sqrt(2) for stream, multiplier in multipliers(one).items()}
    assert multipliers(two) == pytest.approx(twice)
    assert not paper("spider-alt", 3, SILO_DELTA, 50, batch=lowy_batch(3, 50, SILO))["violated"]
    assert not paper("local-sgd", 3, SILO_DELTA, 50, local_steps=5, batch=lowy_batch(3, 250, SILO))["violated"]
    assert not paper("soteria-gd", 1, 1e-3, 25, records=3256)["violated"]


def test_goldens_notice_a_forgotten_factor_two(monkeypatch):
    """Seeded mistake: the record removed (shift C) where it is replaced (shift 2C)."""
    halved = lambda self, m: mirrored((1 - self.sampling_rate, self.sampling_rate), (0.0, 1 / (4 * m)))
    monkeypatch.setattr(Poisson, "pair", halved)
    accountant._composed.cache_clear()
    noise = 2 * calibrate([Releases("local", 2000, Poisson(16 / 1651))], 3, 1e-5)["local"]
    accountant._composed.cache_clear()
    assert noise == within(1.244 / 2)


def test_one_pass_costs_one_release():
    once = epsilon([Spent(Releases("value", 1, Full()), 2.0)], 1e-5)
    assert epsilon([Spent(Releases("value", 50, Disjoint()), 2.0)], 1e-5) == once


def test_optimal_share_minimises_the_error():
    """Noise variance of stream i is A_i n_i / share_i: compare with a scan."""
    share = optimal_share(100, 1900, 1.0, 0.02)
    error = lambda s: 1.0 * 100 / s + 0.02 * 1900 / (1 - s)
    assert error(share) <= min(error(s / 1000) for s in range(1, 1000))
