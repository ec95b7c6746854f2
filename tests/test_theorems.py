"""Labels: the right theorem, and only where its conditions hold."""

from __future__ import annotations

import pytest

from silodp.facts import Facts
from silodp.plan.make import make_plan
from tests.cases import case

PROVED = {"smoothness": 0.2, "gradient_bound": 0.9}  # the examples' clips and steps are within the theorems' limits
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
