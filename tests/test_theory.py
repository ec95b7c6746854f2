"""What the theorems choose: their formulas, what is kept, what is missing, and that every entry sees the same."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import pytest

from silodp.algorithms import REGISTRY
from silodp.algorithms.assumption3 import Estimator, lemma_1, theorem_3
from silodp.algorithms.soteria import SVRG, TWO_LEVEL
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config, to_toml
from silodp.plan.account import account
from silodp.plan.make import choose, make_plan, with_options
from silodp.plan.parts import built, settled_facts
from silodp.plan.plan import Plan
from silodp.privacy.gaussian import mu_of
from silodp.run.directory import RunDirectory
from silodp.run.prepare import prepare, prepared_on
from silodp.run.runner import train as run
from silodp.run.sweep import with_values
from tests.conftest import made_data

SIZES, D_MODEL = (3000, 2500, 4000, 3500), 100
N, M = 2500, 4
LOG = math.log(1e5)
KEPT = ("compressor", "keep", "local_steps", "batch_local", "diameter")


def asked(name: str, trust: str = "untrusted", epsilon: float | None = 2.0, **options: Any) -> Config:
    constants = {"smoothness": 0.8, "gradient_bound": 1.5, "pl_constant": 0.1, "theory": True}
    privacy = {"trust": trust, "epsilon": epsilon} if epsilon else {"trust": trust}
    given = {k: v for k, v in (constants | options).items() if v is not None}
    return parse_config({"privacy": privacy, "algorithm": {"name": name} | given})


def facts(sizes: tuple[int, ...] = SIZES, parameters: int | None = D_MODEL) -> Facts:
    return Facts(sizes, ("a", "b", "c", "d"), parameters=parameters)


def choices(config: Config, known: Facts) -> dict[str, Any]:
    return choose(config, settled_facts(config, known))


def chosen(name: str, trust: str = "untrusted", **options: Any) -> dict[str, Any]:
    return choices(asked(name, trust, **options), facts())


@pytest.mark.parametrize(("name", "trust"), [(n, t) for n, e in REGISTRY.items() for t in e.trusts])
def test_every_algorithm_has_a_theorem_and_can_be_built_from_its_choices(name, trust):
    entry = REGISTRY[name]
    example = {key: value for key, value in entry.example.items() if key in KEPT}
    config = asked(name, trust, 2.0 if entry.private else None, **example)
    alike = facts((3000,) * M)
    resolved = with_options(config, choices(config, alike))
    built(resolved, settled_facts(resolved, alike))
    assert resolved.algorithm.step_size
    assert choices(resolved, alike) == {}, "nothing is left to choose"


@pytest.mark.parametrize(("trust", "silos"), [("untrusted", math.sqrt(M)), ("trusted", M)])
def test_mu2_takes_the_papers_step_and_bound(trust, silos):
    S, T = 1.5 + 2 * 0.8 * 3.0, 7
    noisy = mu_of(2.0, 1e-5) * 3.0 * silos / (2 * S * T * math.sqrt(D_MODEL))
    values = chosen("mu2", trust, diameter=3.0, rounds=T, batch=1, pl_constant=None, theory=None)
    assert values == {"clip": S, "step_size": pytest.approx(min(noisy, 1 / (4 * 0.8 * T)), rel=1e-12)}
    assert noisy < 1 / (4 * 0.8 * T), "the case is about the noisy branch"
    loud = parse_config({"privacy": {"trust": trust, "gdp": 1e6}, "algorithm": asked("mu2").algorithm.model_dump()
                         | {"diameter": 3.0, "rounds": T}})  # fmt: skip
    assert choices(loud, facts())["step_size"] == pytest.approx(1 / (4 * 0.8 * T))


def test_mu2s_step_follows_from_given_multipliers():
    """rho = sqrt(T)/s: a record of the first round is in all T releases."""
    S, T, given = 1.5 + 2 * 0.8 * 3.0, 7, 40.0
    options = asked("mu2", epsilon=None).algorithm.model_dump() | {"diameter": 3.0, "rounds": T, "batch": 1}
    config = parse_config({"privacy": {"multipliers": {"value": given}}, "algorithm": options})
    noisy = math.sqrt(T) / given * 3.0 * math.sqrt(M) / (2 * S * T * math.sqrt(D_MODEL))
    assert choices(config, facts())["step_size"] == pytest.approx(noisy, rel=1e-9)
    assert noisy < 1 / (4 * 0.8 * T)


def test_heterogeneity_is_at_most_twice_the_smoothness():
    given: dict[str, Any] = {"epsilon": 1e3, "local_steps": 10, "rounds": 5, "batch_local": 1000}
    unknown, twice = (chosen("diff2-bvr-l-sgd", "trusted", **given, **more) for more in ({}, {"heterogeneity": 1.6}))
    assert unknown == twice


def test_mu2_chooses_its_rounds_only_when_asked_and_chunks_are_less_noisy():
    plain = chosen("mu2", diameter=3.0)
    assert plain["rounds"] == N
    chunks = chosen("mu2", diameter=3.0, batch=10)
    assert chunks["rounds"] == N // 10
    assert chunks["step_size"] == pytest.approx(100 * plain["step_size"])
    assert "rounds" not in chosen("mu2", diameter=3.0, theory=None, pl_constant=None)


def test_psgm_chooses_a_first_batch_that_meets_the_theorem():
    """1/(R b0) <= momentum^2 / batch, with b0 no more than a silo has."""
    found = chosen("mb-psgm", "shuffled", batch=50, rounds=2000, momentum=0.01)
    assert found["batch_first"] == math.ceil(50 / (2000 * 0.01**2))
    assert "batch_first" not in chosen("mb-psgm", "shuffled", batch=50, rounds=2000, momentum=0.5)
    assert chosen("mb-psgm", "shuffled", batch=50, rounds=10, momentum=0.01)["batch_first"] == N


def test_bvr_divides_only_the_noisy_part_of_the_step_by_k():
    """Thm F.4: with next to no noise the step is 1/(2 L) or what zeta and the batch allow, not 1/(2 L K)."""
    step = chosen(
        "diff2-bvr-l-sgd", "trusted", epsilon=1e3, local_steps=10, heterogeneity=1e-3, rounds=5, batch_local=1000
    )["step_size"]
    assert step == pytest.approx(1 / (2 * 0.8), rel=1e-3)


def test_soteria_takes_the_corollaries_numbers():
    omega = 100 / 20 - 1
    tau = (1 + omega) ** 1.5 / math.sqrt(M)
    rounds = math.sqrt(M * 0.8) * N * 2.0 / (1.5 * math.sqrt((1 + omega) * 100 * LOG))
    rand: dict[str, Any] = {"compressor": "rand-k", "keep": 20}
    sgd = chosen("soteria-sgd", **rand)
    assert sgd["step_size"] == pytest.approx(1 / ((1 + 2 * math.sqrt((1 + omega) ** 3 / M)) * 0.8))
    batch = N * 2.0 * 1.5 * math.sqrt(tau / (2 * (1 + omega))) / math.sqrt((1 + omega) * 0.8 * 100 * LOG)
    assert sgd["batch"] == math.ceil(batch)
    assert sgd["rounds"] == math.ceil(rounds * (1 + math.sqrt(tau)))
    svrg = chosen("soteria-svrg", **rand)
    b = math.ceil(N ** (2 / 3) / 4)
    assert (svrg["batch"], svrg["snapshot_probability"]) == (b, b / N)
    assert svrg["step_size"] == pytest.approx(0.25 * math.sqrt(M / (1 + omega) ** 3) / (2 * 0.8), rel=0.02)
    assert svrg["rounds"] == math.ceil(rounds * tau)
    saga = chosen("soteria-saga", **rand)
    assert saga["batch"] == math.ceil(3 * N ** (2 / 3))
    assert saga["step_size"] == pytest.approx(math.sqrt(M / (1 + omega) ** 3) / (3 * 0.8))
    assert chosen("ldp-svrg")["step_size"] == pytest.approx(0.25 / (2 * 0.8), rel=0.02)


class OwnEstimator(SVRG):
    """SVRG as somebody outside would bring it: with the constants of Assumption 3."""

    entry: ClassVar = TWO_LEVEL | {"compression": "shifted"} | theorem_3(lemma_1("svrg"))


def test_theorem_3_covers_an_estimator_of_ones_own():
    """Its longest step is at least the corollary's, which is one choice of beta; longer steps get no label."""
    own = {"compressor": "rand-k", "keep": 20, "batch": 46, "snapshot_probability": 46 / N, "pl_constant": None}
    name = "tests.test_theory:OwnEstimator"
    corollary, general = chosen("soteria-svrg", **own), chosen(name, **own)
    assert general["step_size"] > corollary["step_size"]
    alike = facts((N,) * M)
    plan = make_plan(asked(name, **own), alike)
    assert plan.theorem.name == "Thm 3" and "step_size <= the minimum of Thm 3" in plan.theorem.checked
    too_long = asked(name, **own, step_size=1.01 * plan.config.algorithm.step_size)
    assert make_plan(too_long, alike).theorem.fails == "not met: step_size <= the minimum of Thm 3"


@pytest.mark.parametrize("omega", [0.0, 4.0, 19.0])
def test_the_corollaries_are_cases_of_theorem_3(omega):
    """With the corollaries' own beta the minimum of Theorem 3 admits their steps."""
    L, silos, tau = 0.8, 10, (1 + omega) ** 1.5 / math.sqrt(10)
    first = Estimator(beta=tau / (2 * (1 + omega)))
    assert first.limits(first.free(L, omega, silos), L, omega, silos)[0] == pytest.approx(1 / ((1 + 2 * tau) * L))
    b, p = 46, 46 / 2500
    pace = p ** (2 / 3) * b ** (1 / 3)
    beta = pace**2 * (1 + omega) ** 2 * min(1, silos / (1 + omega) ** 3) / silos
    second = Estimator(L**2 / b, 0.0, 2 * (1 - p) / p, 1.0, p / 2, beta)
    assert second.step(L, omega, silos) >= pace * min(1, 1 / tau) / (2 * L)
    best = Estimator(L**2 / b, 0.0, 2 * (1 - p) / p, 1.0, p / 2)
    assert best.step(L, omega, silos) >= second.step(L, omega, silos)


def test_sums_on_unequal_silos_take_a_share_of_each():
    """Alg. 8 with theory: K of the smallest silo's n, and the same part of the others'."""
    made = make_plan(asked("sdp-prox-svrg", "shuffled", weights="size"), facts()).config.algorithm
    batch = math.ceil((N**2 / M) ** (1 / 3))
    assert made.batch is None and made.batch_share == pytest.approx(batch / N) and made.restart == N // batch


@pytest.mark.parametrize(
    ("name", "trust", "reach"), [("prox-sgd", "untrusted", N * 2), ("sdp-prox-sgd", "shuffled", N * M)]
)
def test_prox_sgd_takes_theorem_e_1s_rounds(name, trust, reach):
    """R = 2 kappa ln(mu / G^2 min(N n, (eps reach)^2 / (d ln(1/delta)))); the batches are what n / R leaves."""
    made = chosen(name, trust)
    least = min(M * N, (2.0 * reach) ** 2 / (D_MODEL * LOG))
    assert made["rounds"] == math.ceil(2 * 8 * math.log(0.1 / 1.5**2 * least))
    assert (made["clip"], made["step_size"]) == (1.5, pytest.approx(1 / (2 * 0.8)))


def test_prox_svrg_takes_the_theorems_epochs():
    pl = chosen("prox-pl-svrg")
    batch = math.ceil((N**2 / M) ** (1 / 3))
    assert (pl["batch"], pl["restart"]) == (batch, N // batch)
    assert pl["epochs"] == math.ceil(12 * 8 / (N // batch))
    assert pl["rounds"] % (pl["epochs"] * pl["restart"]) == 0
    assert chosen("prox-svrg")["rounds"] == pl["epochs"] * pl["restart"]
    assert pl["step_size"] == pytest.approx(1 / (8 * 0.8))


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
@pytest.mark.parametrize("name", ["spider", "diff2-gd", "mb-psgm"])
def test_differences_keep_the_theorems_condition_under_the_noise_of_the_plan(name, trust):
    """q <= 1 / (tau2 eta)^2 with tau2^2 = 8 d sigma^2 and the std that the plan's mean difference really has."""
    plan = make_plan(asked(name, trust), facts((N,) * M))
    step = plan.config.algorithm.step_size
    assert step
    assert restart_or_forget(plan) > 1
    assert restart_or_forget(plan) * 8 * D_MODEL * (mean_noise(plan, trust) * step) ** 2 <= 1.0001
    assert step <= 1 / (2 * 0.8)


def restart_or_forget(plan: Plan) -> float:
    """Over how many rounds noise gathers: momentum forgets as a restart does."""
    options = plan.config.algorithm
    return options.restart or 1 / (options.momentum or 1.0)


def mean_noise(plan: Plan, trust: str) -> float:
    """Std of the mean difference's noise per unit of |x - y|, as the plan adds it."""
    return float(plan.std_over_clip("difference")[0]) * 0.8 / (1 if trust == "trusted" else math.sqrt(M))


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
@pytest.mark.parametrize(
    ("name", "options", "split", "records", "near"),
    [
        ("mb-psgm", {"batch_first": 50, "rounds": 60, "momentum": 0.1}, None, 50, 1e-4),
        # A sampled first round has no mu of its own: there shares of mu^2 are the plan's up to this.
        ("mb-psgm", {"batch_first": 50, "rounds": 60, "momentum": 0.1}, None, N, 0.03),
        ("ce-psgm", {"rounds": 60, "momentum": 0.1, "local_steps": 1}, None, N, 1e-4),
        ("spider", {"rounds": 60, "restart": 10}, "optimal", N, 1e-4),
        ("diff2-gd", {"rounds": 60, "restart": 10}, 0.3, N, 1e-4),
        ("spider-alt", {"rounds": 60}, None, N, 1e-4),
    ],
)
def test_the_theorem_uses_the_noise_that_the_plan_adds(name, options, split, records, near, trust):
    """Where noise bounds the step, eta^2 = 1 / (8 d span sigma^2): the step says which sigma the theorem thought of.

    A batch of its own for the first round, and a split that depends on the step, are where two computations of the
    streams' shares would differ. Little epsilon, so that the noise is what bounds the step.
    """
    config = asked(name, trust, 0.05, **options)
    privacy = config.privacy.model_copy(update={"split": split})
    plan = make_plan(config.model_copy(update={"privacy": privacy}), facts((records,) * M))
    step = plan.chosen["step_size"]
    assert step < 0.3 / 0.8
    span = 2 if name == "spider-alt" else restart_or_forget(plan)
    assert 1 / math.sqrt(8 * D_MODEL * span) / step == pytest.approx(mean_noise(plan, trust), rel=near)


def test_what_is_given_is_kept_and_the_rest_goes_with_it():
    free = chosen("diff2-gd")
    held = chosen("diff2-gd", rounds=200, clip=0.3)
    assert set(free) - set(held) == {"rounds", "clip"}
    tau = (1.5**2 * math.sqrt(D_MODEL * LOG) / (0.8 * N * math.sqrt(M) * 2.0)) ** (2 / 3)
    assert (free["restart"], held["restart"]) == (math.ceil(tau * free["rounds"]), math.ceil(tau * 200))
    assert held["step_size"] > free["step_size"], "fewer rounds, less noise, longer steps"
    assert chosen("dp-gd", rounds=10)["step_size"] == pytest.approx(1 / 0.8)
    assert chosen("dp-gd", rounds=10**6)["step_size"] < 0.01 / 0.8


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("spider", {"smoothness": None}, "algorithm.smoothness"),
        ("diff2-gd", {"gradient_bound": None}, "algorithm.gradient_bound"),
        ("prox-sgd", {"pl_constant": None}, "algorithm.pl_constant"),
        ("mu2", {}, "algorithm.diameter"),
        ("soteria-gd", {"epsilon": None, "compressor": "natural"}, "privacy.epsilon"),
        ("soteria-gd", {"compressor": "rand-k", "keep": 101}, "algorithm.keep = 101"),
    ],
)
def test_a_missing_constant_is_named(name, options, key):
    with pytest.raises(ConfigError, match=rf"^{key}"):
        chosen(name, **options)


def test_parameters_are_asked_for_and_constants_without_effect_refused():
    with pytest.raises(ConfigError, match=r"^model.parameters is missing"):
        choices(asked("spider"), facts(parameters=None))
    with pytest.raises(ConfigError, match=r"gradient_bound = 1.0 has no effect without theory = true"):
        built(parse_config({"algorithm": {"name": "dp-gd", "gradient_bound": 1.0}}), facts())
    with pytest.raises(ConfigError, match=r"algorithm.diameter = 1.0: dp-gd does not use it"):
        built(asked("dp-gd", clip=1.0, step_size=1.0, diameter=1.0), facts())


def test_run_account_sweep_resume_and_silos_see_the_same_choices(tmp_path):
    data = made_data()
    options = {"name": "mu2", "theory": True, "smoothness": 1.5, "gradient_bound": 2.5, "diameter": 1.0}
    tree = {"privacy": {"epsilon": 4.0, "delta": 1e-4}, "algorithm": options, "run": {"every": 25}}
    finished = run(tree, data=data, out=tmp_path / "run")
    picked = finished.summary["chosen_by_theory"]
    assert picked["rounds"] == min(data.sizes) == finished.history[-1]["round"]
    assert picked["clip"] == 2.5 + 2 * 1.5
    assert finished.summary["theorem"].startswith("Thm 5.2 (checked: ")
    assert finished.summary["drawn_round"] == picked["rounds"], "mu2's theorems speak of its last iterate"
    assert {"test_loss", "test_accuracy"} <= finished.history[-1].keys()
    drawn = finished.summary["drawn"]
    assert all(drawn[name] == pytest.approx(finished.history[-1][name]) for name in ("objective", "gradient_norm2"))

    written = RunDirectory.open(tmp_path / "run").config
    assert not picked.keys() & written.algorithm.model_fields_set, "config.toml keeps what was asked"
    again = prepare(written, data)
    assert again.plan.chosen == picked
    changed = prepared_on(again.ground, with_values(written, {"privacy.epsilon": 8.0}))
    assert changed.config.algorithm.rounds == picked["rounds"]
    assert changed.plan.chosen["step_size"] > picked["step_size"]
    silo = Plan.from_json(json.loads(json.dumps(again.plan.to_json())))
    assert float(silo.algorithm.step_size) == pytest.approx(picked["step_size"])
    assert silo.chosen == picked

    bare = parse_config(tree | {"data": {"sizes": list(data.sizes)}, "model": {"parameters": 6}})
    assert {row["count"] for silo in account(bare)["silos"] for row in silo["releases"]} == {picked["rounds"]}


def test_rounds_are_written_unless_the_theorem_chooses_them():
    assert "rounds = 50" in to_toml(parse_config({}))
    assert "rounds" not in to_toml(asked("spider"))
    assert "rounds = 9" in to_toml(asked("spider", rounds=9))
