"""Small points of the papers that no other test shows: what is counted, refused, printed and measured."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from silodp.channels.sealed import Terms
from silodp.deploy.shuffler import Batches
from silodp.deploy.wire import decode
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import gaussian
from silodp.run.prepare import prepare
from silodp.run.runner import train
from silodp.run.simulate import measure_point
from tests.conftest import made_data

FACTS = Facts((40, 40, 40), ("a", "b", "c"), parameters=6)


def planned(name: str, privacy: dict[str, Any], **options: Any) -> Plan:
    given = {"name": name, "step_size": 0.1, "clip": 1.0} | options
    return make_plan(parse_config({"privacy": privacy, "algorithm": given}), FACTS)


def test_the_difference_at_an_anchor_is_not_charged():
    """Restart 2, 20 rounds: 10 values and 10 differences, at 14.1 and not the 20 that 20 of them would need."""
    plan = planned("prox-svrg", {"gdp": 0.5}, rounds=20, restart=2)
    assert {s.name: s.count for s in plan.releases(0)} == {"value": 10, "difference": 10}
    assert plan.multipliers["difference"][0] == pytest.approx(math.sqrt(10 / 0.2) / 0.5, rel=1e-6)


def test_a_stage_is_whole():
    with pytest.raises(ConfigError, match=r"stages have epochs \* restart = 9 rounds.*use 9"):
        planned("prox-pl-svrg", {"gdp": 0.5}, rounds=11, restart=3, epochs=3)


def test_only_prox_pl_svrg_has_epochs():
    with pytest.raises(ConfigError, match=r"algorithm\.epochs is missing: prox-pl-svrg needs it"):
        planned("prox-pl-svrg", {"gdp": 0.5}, rounds=9, restart=3)
    with pytest.raises(ConfigError, match=r"algorithm\.epochs = 3: prox-svrg does not use it"):
        planned("prox-svrg", {"gdp": 0.5}, rounds=9, restart=3, epochs=3)


def test_values_and_differences_may_have_batches_of_their_own():
    plan = planned("spider", {"epsilon": 2.0}, rounds=6, restart=3, sampling="poisson", batch=10, batch_difference=20)
    assert {s.name: s.batch.divisor(40) for s in plan.releases(0)} == {"value": 10.0, "difference": 20.0}


@pytest.mark.parametrize(
    ("name", "options", "called"),
    [
        ("sdp-prox-sgd", {"rounds": 4}, {"value": (1.0, 1e-5)}),  # Alg. 7: N/(2M) epsilon, and all silos answer
        ("sdp-prox-svrg", {"rounds": 6, "restart": 3},  # Alg. 8, with E Q = 6
         dict.fromkeys(("value", "difference"), (2.0 / (8 * math.sqrt(24 * math.log(2e5))), 1e-5 / 12))),
        ("sdp-prox-pl-svrg", {"rounds": 6, "restart": 3, "epochs": 1},  # Alg. 9: Alg. 8 twice, with E Q = 3 and eps/4
         dict.fromkeys(("value", "difference"), (0.5 / (8 * math.sqrt(12 * math.log(8e5))), 2.5e-6 / 6))),
        ("sdp-spider", {"rounds": 7, "restart": 3, "clip_difference": 0.7},  # Alg. 10, with R = 6
         {"value": (2.0 / (4 * math.sqrt(2 * math.log(1e5))), 1e-5 / 4),
          "difference": (2.0 / (4 * math.sqrt(12 * math.log(1e5))), 1e-5 / 12)}),
    ],
)  # fmt: skip
def test_the_sums_printed_noise_is_taken_and_judged(name, options, called):
    """P_vec is called with the (epsilon, delta) of the algorithms' lines; what that really gives is said beside it."""
    privacy = {"trust": "shuffled", "epsilon": 2.0, "delta": 1e-5, "calibration": "paper"}
    plan = planned(name, privacy, **options)
    for stream, (epsilon, delta) in called.items():
        assert plan.multipliers[stream][0] == pytest.approx(1 / gaussian.mu_of(epsilon, delta), rel=1e-6)
    if name == "sdp-prox-sgd":
        assert plan.epsilon(0) == pytest.approx(1.0, rel=0.02)  # each record is in one sum only
    else:
        assert plan.epsilon(0) < 2.0


def test_the_two_messages_of_a_record_are_shuffled_apart():
    """CE-PSGM, line 8: where a value comes out says nothing of where its record's difference does."""

    ledger = MagicMock()  # what is kept of the answers is not looked at
    ledger.given.return_value, ledger.event.return_value = None, nullcontext([0, ""])
    messages = b"".join(bytes([i]) for i in range(8))
    terms = dict.fromkeys(("value", "difference"), Terms(1, (8,), 1))
    shuffler = Batches(ledger, "run", terms, lambda parcel, silo, batch: messages)

    def place(query: str) -> int:
        """Where the first record's message comes out."""
        _, arrays = decode(shuffler.shuffle({"round": 0, "query": query}, {"0": np.zeros(1, np.uint8)}))
        return arrays["sealed"][:, 0].tolist().index(0)

    pairs = np.array([(place("value"), place("difference")) for _ in range(2000)])
    counts = np.histogram2d(*pairs.T, bins=8)[0]
    assert counts.min() > 5  # each of 64 pairs has a chance of 1/64: fewer than 6 of 31 happens once in 1e6 runs
    assert np.mean(pairs[:, 0] == pairs[:, 1]) < 0.125 + 5 * math.sqrt(0.125 * 0.875 / 2000)


def test_stationarity_is_that_of_the_set():
    """On the border of K, where the gradient points outwards, nothing is left to gain."""
    tree: dict[str, Any] = {
        "algorithm": {"name": "mu2", "rounds": 5, "step_size": 1e-3, "prox": {"kind": "box", "low": 0.0, "high": 1e-4}}
    }
    prepared = prepare(parse_config(tree), made_data())
    problem, algorithm = prepared.problem, prepared.setting.algorithm
    norm = lambda x: float(measure_point(problem, algorithm, x)["gradient_norm2"])
    corners = [jnp.asarray(1e-4 * np.array(list(np.binary_repr(i, 6)), float), jnp.float32) for i in range(64)]
    free = norm(jnp.full(6, 5e-5))
    assert min(norm(x) for x in corners) < 1e-6 * free


def test_sagas_first_table_is_counted():
    """SoteriaFL, Table 2: a gradient of every record for the table, then one of every record of a batch."""
    tree: dict[str, Any] = {
        "algorithm": {"name": "soteria-saga", "rounds": 4, "batch": 8, "compressor": "identity", "step_size": 0.1},
        "run": {"every": 1},
    }
    data = made_data()
    counts = [row["record_gradients"] for row in train(tree, data=data).history]
    assert counts == [sum(data.sizes) + 8 * len(data.sizes) * t for t in range(5)]


def test_the_drawn_iterate_is_measured():
    """A seed whose draw is neither the first nor the last of the rounds."""
    tree: dict[str, Any] = {
        "algorithm": {
            "name": "spider",
            "rounds": 6,
            "restart": 3,
            "step_size": 0.3,
            "prox": {"kind": "l1", "strength": 0.01},
        },
        "run": {"every": 1, "seed": 3},
    }
    done = train(tree, data=made_data())
    told, rows = done.summary, {int(row["round"]): row for row in done.history}
    at = told["drawn_round"]
    assert 0 < at < 6
    for name in ("objective", "gradient_norm2"):
        assert told["drawn"][name] == pytest.approx(rows[at][name], rel=1e-5)
        assert told["drawn"][name] != pytest.approx(rows[6][name], rel=1e-2)
