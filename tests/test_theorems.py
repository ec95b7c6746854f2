"""Labels: the right theorem, and only where its conditions hold."""

from __future__ import annotations

from typing import Any

import pytest

from silodp.algorithms import REGISTRY
from silodp.algorithms.proofs import Verdict, verdict
from silodp.algorithms.theory import Choice
from silodp.facts import Facts
from silodp.plan.make import channel_of, make_plan
from silodp.plan.parts import settled_facts
from tests.cases import case

PROVED: dict[str, Any] = {
    "smoothness": 0.2,
    "gradient_bound": 0.9,
}  # the examples' clips and steps are within the theorems' limits
L1 = {"kind": "l1", "strength": 0.1}
EQUAL = {"weights": "equal"}
MU2 = {"clip": 9.0, "step_size": 1e-3}


@pytest.mark.parametrize(
    ("name", "trust", "options", "theorem"),
    [
        ("spider", "untrusted", {"prox": L1}, "Thm 3.1"),
        ("spider", "untrusted", {"participation": 2}, "Thm F.1"),
        ("spider", "untrusted", {"clip_difference": None}, "Thm 3.1"),
        ("spider", "trusted", {}, "no theorem for spider under this trust model"),
        ("spider", "untrusted", {"step_size": 3.0}, "not met: step_size <= 1/(2 L)"),
        ("spider", "untrusted", {"clip": 0.5}, "not met: clip >= G"),
        ("spider", "untrusted", {"batch": 10}, "not met: all records in every round"),
        ("spider", "untrusted", {"optimiser": "adam"}, "not met: plain steps"),
        ("spider", "untrusted", {"smoothness": None}, "algorithm.smoothness is missing"),
        ("sdp-spider", "shuffled", {}, "Thm 3.2"),
        ("sdp-spider", "shuffled", {"participation": 2}, "Thm F.2"),
        ("diff2-gd", "trusted", {}, "Thm 4.3"),
        ("diff2-gd", "trusted", {"prox": L1}, "not met: no prox"),
        ("diff2-gd", "untrusted", {"compressor": "rand-k", "keep": 3}, "no theorem for diff2-gd"),
        ("diff2-bvr-l-sgd", "trusted", {"batch_local": 5}, "Thm 5.3"),
        ("diff2-bvr-l-sgd", "trusted", {"batch_local": 300},
         "not met: batch_local <= n / (2 e alpha), alpha the order of Prop. 5.1"),
        ("prox-sgd", "untrusted", {"pl_constant": 0.1}, "Thm 2.1"),
        ("prox-sgd", "untrusted", {}, "algorithm.pl_constant is missing: the theorem of prox-sgd needs it"),
        ("prox-pl-svrg", "untrusted",
         {"pl_constant": 0.1, "batch": 100, "restart": 4, "epochs": 6, "rounds": 480}, "Thm 2.2"),
        ("prox-pl-svrg", "untrusted", {"pl_constant": 0.1, "batch": 100, "restart": 4, "epochs": 1, "rounds": 480},
         "not met: 12 kappa rounds a stage"),
        ("prox-sgd", "untrusted", {"pl_constant": 0.1, "clip": 0.5}, "not met: clip >= G"),
        ("sdp-prox-sgd", "shuffled", {"pl_constant": 0.1}, "Thm 2.1"),
        ("sdp-prox-svrg", "shuffled", {"pl_constant": 0.1, "batch": 100, "restart": 4, "rounds": 80},
         "Thm 2.2 (one stage)"),
        ("sdp-prox-svrg", "shuffled", {"pl_constant": 0.1, "batch": 100, "restart": 4, "rounds": 20},
         "not met: 12 kappa rounds"),
        ("sdp-prox-pl-svrg", "shuffled",
         {"pl_constant": 0.1, "batch": 100, "restart": 4, "epochs": 6, "rounds": 480}, "Thm 2.2"),
        ("soteria-saga", "untrusted", {"compressor": "natural", "keep": None, "batch": 200}, "Cor. 3"),
        ("soteria-saga", "untrusted", {"compressor": "natural", "keep": None, "batch": 20}, "not met: batch >= 3 n"),
        ("soteria-svrg", "untrusted", {"batch": 10, "snapshot_probability": 0.02, "step_size": 0.01}, "Cor. 2"),
        ("soteria-sgd", "untrusted", {}, "Cor. 1"),
        ("mu2", "trusted", MU2 | {"diameter": 4.0}, "Thm 6.2"),
        ("mu2", "untrusted", MU2 | {"prox": {"kind": "box", "low": -1.0, "high": 1.0}}, "Thm 5.2"),
        ("mu2", "untrusted", MU2 | {"prox": L1}, "not met: K a bounded set, no penalty on it"),
        ("mu2", "trusted", {"clip": 9.0, "step_size": 9.0}, "not met: step_size <= min(rho D sqrt(N) chunk/"),
        ("mb-psgm", "shuffled", {"momentum": 0.5}, "Thm A.4"),
        ("mb-psgm", "shuffled", {"momentum": 0.5, "batch": 50, **EQUAL}, "Thm A.3"),
        ("mb-psgm", "shuffled", {"momentum": 0.05, "batch": 50, **EQUAL}, "not met: 1/(R b0) <="),
        ("mb-psgm", "shuffled", {"momentum": 0.05, "batch": 50, "batch_first": 400, "rounds": 60, **EQUAL},
         "Thm A.3"),
        ("mb-psgm-fg", "shuffled", {"fused": True}, "not met: Duchi's randomizer, two messages"),
        ("mb-psgm-fg", "shuffled", {"randomizer": "privunit"}, "not met: Duchi's randomizer, two messages"),
        ("ce-psgm", "shuffled", {"momentum": 0.9, "batch": 24, **EQUAL}, "Thm 4.2"),
        ("ce-psgm", "shuffled", {"momentum": 0.9, "batch": 30, **EQUAL},
         "not met: batch = K batch_local or all records"),
        ("ce-psgm-fg", "shuffled", {}, "Thm A.2"),
        ("dp-gd", "trusted", {"smoothness": None, "gradient_bound": None}, "no theorem for dp-gd"),
    ],
)  # fmt: skip
def test_a_theorem_is_named_only_where_its_conditions_hold(name, trust, options, theorem):
    """Every condition can fail: each of the labels above is refused to a neighbouring run."""
    config = case(name, trust, **(PROVED | options))
    verdict = make_plan(config, Facts((400, 400, 400), ("a", "b", "c"), parameters=6)).theorem
    assert (verdict.name or (verdict.fails or "")[: len(theorem)]) == theorem
    assert (verdict.name is None) == (verdict.label is None)


# One change for every condition of a label: without it a run that satisfies all others must lose the label. L = 0.2,
# G = 0.9, d = 6, three silos of 400 records, epsilon 4, 6 rounds of step size 0.3 unless changed.
Changes = dict[str, dict[str, Any]]
MANY = 10**9  # rounds, after which their noise alone asks for shorter steps
FULL_ONLY: Changes = {"all records in every round": {"batch": 10}}
CLIPPED: Changes = {"clip >= G": {"clip": 0.5}}
DIFFERENCES: Changes = {"clip_difference >= L": {"clip_difference": 0.1}}
SPIDERS: Changes = (
    FULL_ONLY
    | CLIPPED
    | {
        "clip_difference >= L or left out": {"clip_difference": 0.1},
        "step_size <= 1/(2 L)": {"step_size": 3.0},
    }
)
DIFF2: Changes = (
    FULL_ONLY
    | CLIPPED
    | DIFFERENCES
    | {
        "step_size <= 1/(2 L)": {"step_size": 3.0},
        "step_size <= n N epsilon/(K L sqrt(restart R d))": {"rounds": MANY},
        "n N >= G^2 sqrt(d) / (L epsilon)": {"gradient_bound": 30.0, "clip": 30.0},
    }
)
MANY_LOCAL = {"batch_local": 1, "local_steps": 300, "heterogeneity": 0.001}
LOCAL: Changes = {
    "clip_local >= L": {"clip_local": 0.1},
    "step_size <= sqrt(b/K)/L": MANY_LOCAL,
    "step_size <= 1/(sqrt(K d) L sigma3)": {"rounds": MANY // 20},
}
PSGM: Changes = (
    CLIPPED
    | DIFFERENCES
    | {
        "Duchi's randomizer, two messages": {"fused": True},
        "step_size <= 1/L": {"step_size": 5.5},
        "epsilon <= ln(1/delta)": {"epsilon": 10.0},
        "step_size <= sqrt(momentum) n N epsilon/(K L sqrt(R d))": {"rounds": 10 * MANY},
    }
)
PSGM_LOCAL: Changes = PSGM | LOCAL | {"step_size <= 1/(K tau)": {"heterogeneity": 2.0}}
FIRST, MESSAGES = "1/(R b0) <= momentum^2/batch", "N min(b0, batch) >= ln(1/delta)/epsilon"
DRAWN, AS_LOCAL = "step_size <= sqrt(momentum N batch)/(K L)", "batch = K batch_local or all records"
FEW = {"batch": 1, "momentum": 0.3, "rounds": 100}
LABELS: list[tuple[str, str, dict[str, Any], Changes]] = [
    ("spider", "untrusted", {}, SPIDERS | {"epsilon <= 2 ln(1/delta)": {"epsilon": 19.0}}),
    ("sdp-spider", "shuffled", {}, SPIDERS | {"epsilon <= ln(1/delta)": {"epsilon": 10.0}}),
    ("diff2-gd", "trusted", {}, DIFF2),
    ("diff2-bvr-l-sgd", "trusted", {"batch_local": 5}, DIFF2 | LOCAL | {
        "step_size <= 1/(sqrt(K d) L sigma3)": {"rounds": MANY // 20, "restart": 1},
        "step_size <= 1/(K zeta)": {"heterogeneity": 2.0},
        "batch_local <= n / (2 e alpha), alpha the order of Prop. 5.1": {"batch_local": 300},
        "batch_local <= (4 n / (alpha sigma3^2))^(1/3)": {"rounds": MANY // 100},
    }),
    ("mb-psgm", "shuffled", {"momentum": 0.5, "batch": 50, **EQUAL}, PSGM | {
        FIRST: {"momentum": 0.05},
        MESSAGES: {"batch": 3, "epsilon": 1.0},
        DRAWN: FEW | {"step_size": 4.9},
    }),
    ("ce-psgm", "shuffled", {"momentum": 0.9, "batch": 24, **EQUAL}, PSGM_LOCAL | {
        FIRST: {"momentum": 0.05},
        MESSAGES: {"batch": 3, "batch_local": 1, "epsilon": 1.0},
        DRAWN: FEW | {"step_size": 2.0},
        "step_size <= sqrt(b/K)/L": MANY_LOCAL | {"batch": 300},
        AS_LOCAL: {"batch": 30},
    }),
    ("mb-psgm-fg", "shuffled", {}, PSGM | {MESSAGES: {"epsilon": 0.005}}),
    ("ce-psgm-fg", "shuffled", {"momentum": 0.9}, PSGM_LOCAL | {MESSAGES: {"epsilon": 0.005}}),
]  # fmt: skip
OF_BATCHES = {FIRST, DRAWN, AS_LOCAL}  # hold by themselves for all records


def judged(name: str, trust: str, options: dict[str, Any]) -> Verdict:
    """A label without a plan: nothing is calibrated."""
    epsilon = options.get("epsilon", 4.0)
    config = case(name, trust, **{key: value for key, value in (PROVED | options).items() if key != "epsilon"})
    privacy, facts = (
        config.privacy.model_copy(update={"epsilon": epsilon}),
        Facts((400,) * 3, ("a", "b", "c"), parameters=6),
    )
    entry = REGISTRY[name]
    asked = Choice(
        config.algorithm, privacy, settled_facts(config, facts), channel_of(config, entry), lambda *_: (0, 1.0)
    )
    return verdict(entry, asked)


@pytest.mark.parametrize(("name", "trust", "options", "changes"), LABELS, ids=[label[0] for label in LABELS])
def test_every_condition_of_a_label_can_lose_it(name, trust, options, changes):
    assert judged(name, trust, options).name is not None, judged(name, trust, options).fails
    for words, change in changes.items():
        assert judged(name, trust, options | change).fails == f"not met: {words}"
    conditions = {words for words, _ in REGISTRY[name].conditions}
    assert conditions == changes.keys() | (OF_BATCHES & conditions)
