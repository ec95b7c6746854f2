"""The papers' bounds as numbers, for one setting by hand."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from silodp.cli import app
from silodp.privacy import gaussian

CONFIG = """
[data]
silos = 10
records = 1000
[model]
parameters = 100
[privacy]
epsilon = 1.0
delta = 1e-5
[algorithm]
name = "spider"
theory = true
smoothness = 2.0
gradient_bound = 1.5
diameter = 2.0
"""


def printed(tmp_path, *options: str) -> str:
    file = tmp_path / "setting.toml"
    file.write_text(CONFIG)
    done = CliRunner().invoke(app, ["bounds", str(file), *options])
    assert done.exit_code == 0, done.output
    return done.output


def rows(tmp_path, *options: str) -> dict[str, dict]:
    return {row["method"]: row for row in json.loads(printed(tmp_path, "--json", *options))["bounds"]}


def test_bounds_are_what_the_papers_print(tmp_path):
    told = rows(tmp_path)
    noise = 100 * math.log(1e5) / (1000**2 * 10)
    G, L = 1.5, 2.0
    value = lambda method: told[method]["value"]
    assert value("spider, Thm 3.1") == pytest.approx((G * L * noise) ** (2 / 3) + G**2 * noise)
    assert value("any, Thm 3.3 and F.3") == pytest.approx(G**2 * noise)
    assert value("any, Thm 3.3") == pytest.approx(G**2 * noise / 10)
    assert value("diff2-gd, Thm 4.3") == pytest.approx((G * L * 100) ** (2 / 3) / 10_000 ** (4 / 3))
    assert value("soteria-gd and -sgd, Cor. 1") == pytest.approx(G * math.sqrt(L * noise) * (1 + 10**-0.25))
    rho, S = gaussian.mu_of(1.0, 1e-5), G + 2 * L * 2.0
    mu2 = lambda spread: 4 * 2.0 * (S / 1000 + 2 * S * math.sqrt(100) / (rho * 1000 * spread) + S / math.sqrt(10_000))
    assert value("mu2, Thm 5.2") == pytest.approx(mu2(math.sqrt(10)))
    assert value("mu2, Thm 6.2") == pytest.approx(mu2(10))
    assert all(row["value"] >= told["any, Thm 3.3"]["value"] for row in told.values() if row["of"].startswith("squared")
               and row["value"] is not None)  # fmt: skip


def test_psgms_bounds_are_those_of_its_table_1(tmp_path):
    """With R = 40, K = 4 and b = 25."""
    options = [f"algorithm.{key}" for key in ("rounds=40", "local_steps=4", "batch_local=25", "heterogeneity=0.5")]
    told = rows(tmp_path, "--set", "algorithm.name=ce-psgm", *(word for each in options for word in ("--set", each)))
    G, L, d, server = 1.5, 2.0, 100, 10 * 1000 * 1.0
    private = (d * L * G) ** (2 / 3) / server ** (4 / 3) + d * G**2 / server**2
    assert told["mb-psgm-fg, Thm A.4"]["value"] == pytest.approx(L / 40 + private)
    local = 0.5 / 40 + L / (40 * 4) + L / (40 * math.sqrt(4 * 25))
    local += L * math.sqrt(d) / (40 * math.sqrt(4) * 25) + L * math.sqrt(d) / (math.sqrt(40 * 10) * 1000)
    assert told["ce-psgm-fg, Thm A.2"]["value"] == pytest.approx(local + private)
    assert told["mb-psgm, Thm A.3"]["missing"] == "algorithm.batch"
    first = ["--set", "algorithm.batch=100", "--set", "algorithm.batch_first=900"]
    told = rows(tmp_path, "--set", "algorithm.name=ce-psgm", *(w for each in options for w in ("--set", each)), *first)
    drawn = 10 * 100
    ratio = server / math.sqrt(40 * d * drawn)
    sampling = (L * G) ** (2 / 3) / drawn ** (2 / 3) + G**2 / (drawn * 40)
    batches = sampling + private + (ratio + ratio ** (1 / 3)) * (d * L * G) ** (2 / 3) / server ** (4 / 3)
    assert told["mb-psgm, Thm A.3"]["value"] == pytest.approx(L / 40 + batches)
    assert told["ce-psgm, Thm 4.2"]["value"] == pytest.approx(local + batches)
    assert not told["mb-psgm, Thm A.3"]["unmet"] and not told["ce-psgm, Thm 4.2"]["unmet"]


def test_bvrs_bound_is_that_of_theorem_5_3_and_f_4(tmp_path):
    """With R = 40, K = 4 and b = 5."""
    options = [f"algorithm.{key}" for key in ("rounds=40", "local_steps=4", "batch_local=5", "heterogeneity=0.5")]
    told = rows(tmp_path, "--set", "algorithm.name=diff2-bvr-l-sgd", *(w for each in options for w in ("--set", each)))
    G, L, d = 1.5, 2.0, 100
    optimum = (L * G * d) ** (2 / 3) / 10_000 ** (4 / 3)
    descent = L / 4 + 0.5 + L / math.sqrt(4 * 5) + L * math.sqrt(d) / (math.sqrt(4) * 5)
    lasting = L * math.sqrt(d) / (1000 * math.sqrt(10) * math.sqrt(40))
    assert told["diff2-bvr-l-sgd, Thm 5.3"]["value"] == pytest.approx(optimum)
    assert told["diff2-bvr-l-sgd, Thm F.4"]["value"] == pytest.approx(descent / 40 + lasting + optimum)
    assert not told["diff2-bvr-l-sgd, Thm F.4"]["unmet"]


@pytest.mark.parametrize(
    ("method", "options", "unmet"),
    [
        (
            "diff2-bvr-l-sgd, Thm 5.3",
            ["batch_local=50"],
            "batch_local <= n / (2 e alpha), alpha the order of Prop. 5.1",
        ),
        ("diff2-gd, Thm 4.3", ["gradient_bound=1000"], "n N >= G^2 sqrt(d) / (L epsilon)"),
        ("mb-psgm, Thm A.3", ["batch=100", "rounds=10000"], "1/(R b0) <= beta^2/batch"),
        ("mb-psgm, Thm A.3", ["batch=1", "rounds=1"], "N min(b0, batch) >= ln(1/delta)/epsilon"),
        ("mb-psgm, Thm A.3", ["batch=100", "rounds=1", "smoothness=9"], "beta <= 1"),
        (
            "diff2-bvr-l-sgd, Thm F.4",
            ["batch_local=5", "local_steps=100", "rounds=100000000"],
            "batch_local <= (4 n / (alpha sigma3^2))^(1/3)",
        ),
        ("mb-psgm-fg, Thm A.4", ["rounds=1", "smoothness=9"], "beta <= 1"),
        ("ce-psgm-fg, Thm A.2", ["rounds=1", "smoothness=9"], "beta <= 1"),
        ("any, Thm 3.3 and F.3", [], "N >= 16 ln(2/(delta n))"),
        ("any, Thm 3.3 and F.3", ["participation=5"], "all silos in every round"),
        ("spider, Thm 3.1", ["participation=5"], "all silos in every round"),
        ("sdp-spider, Thm 3.2", ["participation=5"], "all silos in every round"),
        ("prox-pl-svrg, Thm 2.2", ["participation=5", "pl_constant=0.1"], "all silos in every round"),
        ("sdp-prox-pl-svrg, Thm 2.2", ["participation=5", "pl_constant=0.1"], "all silos in every round"),
        ("prox-sgd, Thm 2.1", ["pl_constant=0.001"], "n >= kappa"),
        ("ce-psgm, Thm 4.2", ["batch=100", "local_steps=4", "batch_local=30"], "batch = K batch_local"),
        ("ce-psgm, Thm 4.2", ["batch=1000", "local_steps=4", "batch_local=250"], "batch < n, b0 < n"),
    ],
)
def test_a_bound_whose_assumption_fails_says_so(tmp_path, method, options, unmet):
    row = rows(tmp_path, *(word for each in options for word in ("--set", f"algorithm.{each}")))[method]
    assert unmet in row["unmet"]


def test_where_a_statement_and_its_proof_differ_the_row_says_which_is_taken(tmp_path):
    told = rows(tmp_path)
    assert "the statement has l^2" in told["mb-psgm, Thm A.3"]["formula"]
    assert "the statement has L/(sqrt(K) b)" in told["diff2-bvr-l-sgd, Thm F.4"]["formula"]


def test_epsilons_beyond_a_theorem_are_named(tmp_path):
    told = rows(tmp_path, "--set", "privacy.epsilon=14.0")
    assert "epsilon <= ln(1/delta)" in told["mb-psgm-fg, Thm A.4"]["unmet"]
    assert told["sdp-spider, Thm 3.2"]["unmet"] == ["epsilon <= ln(1/delta)"] and not told["spider, Thm 3.1"]["unmet"]
    assert "epsilon <= sqrt(N)" in told["any, Thm 3.3 and F.3"]["unmet"]
    assert "says nothing here, not met: epsilon <= sqrt(N)" in " ".join(
        printed(tmp_path, "--set", "privacy.epsilon=14.0").split()
    )


def test_the_table_says_what_it_is_for_and_cuts_nothing(tmp_path):
    text = " ".join(printed(tmp_path).split())
    assert text.startswith("n = 1000, N = 10, d = 100, epsilon = 1, delta = 1e-05, ")
    assert "L = 2, G = 1.5, D = 2" in text and "needs algorithm.pl_constant" in text and "…" not in text


def test_a_constant_that_is_not_given_is_named_in_its_row(tmp_path):
    assert rows(tmp_path)["prox-sgd, Thm 2.1"]["missing"] == "algorithm.pl_constant"
    assert rows(tmp_path, "--set", "algorithm.pl_constant=0.1")["prox-sgd, Thm 2.1"]["value"] > 0
