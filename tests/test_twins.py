"""The papers' algorithms beside noise-free twins in float64 numpy, line by line, with the library's own coins.

Clips, caps, batches, absent silos, local steps, projections and shifts are all at work; what is left out is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from silodp.channels.compressed import coins
from silodp.compressors import RandK, shift_rate
from silodp.core import Silo, Site
from silodp.data import FederatedData
from silodp.doubles import Double
from silodp.models import build_model
from silodp.objective import build_objective
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.objects import facts_of
from silodp.prox import build_prox
from silodp.randomness import SERVER, SeededRandomness, party_key
from silodp.releases import Account
from silodp.run.runner import Prepared, prepare
from silodp.run.simulate import Carry, drawn_round
from silodp.sampling import MOVES, FixedSize
from tests.conftest import made_data
from tests.test_algorithms import all_rounds
from tests.textbook import soft_threshold

DATA, SEED, ETA = made_data(), 5, 0.4
CLIP, DIFFERENCE = 0.9, 0.8  # both bind for some records
KEY = jax.random.key(SEED)


def ran(name: str, rounds: int, *, data: FederatedData = DATA, **options: Any) -> tuple[Prepared, Carry]:
    trust = options.pop("trust", "untrusted")
    tree = {
        "privacy": {"trust": trust},
        "algorithm": {"name": name, "rounds": rounds, "step_size": ETA, "clip": CLIP, "weights": "equal"} | options,
        "run": {"seed": SEED, "every": rounds},
    }
    prepared = prepare(parse_config(tree), data)
    return prepared, all_rounds(prepared.problem, prepared.setting)


def gradients(silo: int, x: np.ndarray, rows: Any = slice(None)) -> np.ndarray:
    """Each record's gradient of the logistic loss at (bias, weights)."""
    features = DATA.silos[silo].features[rows].astype(np.float64)
    table = np.hstack([np.ones((len(features), 1)), features])
    labels = np.where(DATA.silos[silo].targets[rows] > 0, 1.0, -1.0)
    return -(labels / (1 + np.exp(labels * (table @ x))))[:, None] * table


def clipped(vectors: np.ndarray, bound: float) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors * np.minimum(1, bound / np.maximum(norms, 1e-300))).mean(axis=0)


def mean(silos: Any, each: Callable[[int], np.ndarray]) -> np.ndarray:
    return np.mean([each(int(i)) for i in silos], axis=0)


def value(x: np.ndarray, silos: Any, rows: Callable[[int], Any] = lambda _: slice(None)) -> np.ndarray:
    return mean(silos, lambda i: clipped(gradients(i, x, rows(i)), CLIP))


def capped(x: np.ndarray, y: np.ndarray, silos: Any) -> np.ndarray:
    bound = min(DIFFERENCE * float(np.linalg.norm(x - y)), 2 * CLIP)
    return mean(silos, lambda i: clipped(gradients(i, x) - gradients(i, y), bound))


def rows_of(batch: int, silo: int, round: int, purpose: str, step: int = 0) -> np.ndarray:
    """The rows that the library's coins draw."""
    records = jnp.pad(jnp.asarray(DATA.silos[silo].features), ((0, 40 - DATA.sizes[silo]), (0, 0)))
    randomness = SeededRandomness(party_key(KEY, round, silo))
    drawer = SimpleNamespace(records=records, size=jnp.int32(DATA.sizes[silo]), round=round, randomness=randomness)
    return np.asarray(FixedSize(batch).draw(drawer, purpose, step).rows)


def coin(round: int, purpose: str) -> float:
    return float(SeededRandomness(party_key(KEY, round, SERVER)).uniform(f"coin/{purpose}", ()))


def agrees(found: Any, twin: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found), twin, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("silos", [2, (1, 3)])
def test_spider_with_a_prox_and_absent_silos(silos):
    """M of them, or a random number."""
    prepared, carry = ran(
        "spider", 7, restart=3, clip_difference=DIFFERENCE, participation=silos, prox={"kind": "l1", "strength": 0.02}
    )
    x = y = v = np.zeros(6)
    points = []
    for r in range(7):
        present = prepared.plan.facts.present(r)
        v = value(x, present) if r % 3 == 0 else v + capped(x, y, present)
        y, x = x, soft_threshold(x - ETA * v, ETA * 0.02)
        points.append(x)
    agrees(carry.state.x, x)
    agrees(carry.drawn, points[int(drawn_round(KEY, 7))])  # w_1 .. w_R


@pytest.mark.parametrize("rate", [None, DIFFERENCE])
def test_spiders_differences_are_capped(rate):
    """Steps so long that some records' gradients turn round: their differences are longer than 2 * clip, and so is
    what a clip_difference would allow."""
    eta = 20.0
    _, carry = ran("spider", 3, restart=3, step_size=eta, clip_difference=rate)
    x = y = v = np.zeros(6)
    for r in range(3):
        change = lambda i, x=x, y=y: gradients(i, x) - gradients(i, y)
        assert r == 0 or any((np.linalg.norm(change(i), axis=1) > 2 * CLIP).any() for i in range(3))
        v = value(x, range(3)) if r == 0 else v + mean(range(3), lambda i, own=change: clipped(own(i), 2 * CLIP))
        y, x = x, x - eta * v
    agrees(carry.state.x, x)


@pytest.mark.parametrize("name", ["prox-svrg", "prox-pl-svrg"])
def test_prox_svrg_asks_the_same_silos_through_an_epoch(name):
    stages: dict[str, Any] = {"epochs": 1} if name == "prox-pl-svrg" else {}
    prepared, carry = ran(name, 6, restart=3, clip_difference=DIFFERENCE, participation=2, **stages)
    x = anchor = g = drawn = np.zeros(6)
    groups, points = [], []
    for r in range(6):
        if stages and r == 3:
            x = drawn
        present = prepared.plan.facts.present(r)
        groups.append(tuple(present))
        if r % 3 == 0:
            anchor, g = x, value(x, present)
        x = x - ETA * (g + capped(x, anchor, present))
        points.append(x)
        drawn = x if coin(r, "stage") * (r % 3 + 1) < 1 else drawn
    agrees(carry.state.x, x)
    if not stages:
        agrees(carry.drawn, points[int(drawn_round(KEY, 6))])  # w_1 .. w_R
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1 < len(set(groups))
    if stages:
        agrees(carry.output, drawn)  # w_S is the result, and what the theorem speaks of
        agrees(carry.drawn, drawn)


def local_steps(x: np.ndarray, v: np.ndarray, r: int, K: int, b: int) -> list[np.ndarray]:
    """Points of the round: where it begins, and after each step of silo r mod N."""
    silo = r % 3
    points = [x, x - ETA * v]
    for k in range(K - 1):
        x, y = points[-1], points[-2]
        rows = rows_of(b, silo, r, "local", k)
        change = gradients(silo, x, rows) - gradients(silo, y, rows)
        v = v + clipped(change, DIFFERENCE * float(np.linalg.norm(x - y)))
        points.append(x - ETA * v)
    return points


LOCAL: dict[str, Any] = {"clip_local": DIFFERENCE, "local_steps": 3, "batch_local": 8}


def uncapped(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bound = DIFFERENCE * float(np.linalg.norm(x - y))
    return mean(range(3), lambda i: clipped(gradients(i, x) - gradients(i, y), bound))


def test_ce_psgm_with_local_steps_and_a_first_batch():
    rounds, beta = 5, 0.3
    _, carry = ran("ce-psgm", rounds, clip_difference=DIFFERENCE, momentum=beta, batch_first=10, **LOCAL)
    x = y = v = np.zeros(6)
    eligible = []
    for r in range(rounds):
        if r == 0:
            v = value(x, range(3), lambda i: rows_of(10, i, 0, "first"))
        else:
            v = (1 - beta) * (v + uncapped(x, y)) + beta * value(x, range(3))
        points = local_steps(x, v, r, 3, 8)
        eligible.append(points[int(coin(r, "local iterate") * 3)])
        y, x = x, points[-1]
    agrees(carry.state.x, x)
    agrees(carry.drawn, eligible[int(drawn_round(KEY, rounds))])  # w_{r,k}, k = 1..H


def test_bvr_with_local_steps():
    rounds = 5
    _, carry = ran("diff2-bvr-l-sgd", rounds, restart=3, clip_difference=DIFFERENCE, **LOCAL)
    x = y = v = np.zeros(6)
    eligible = []
    for r in range(rounds):
        v = value(x, range(3)) if r % 3 == 0 else v + uncapped(x, y)
        points = local_steps(x, v, r, 3, 8)
        eligible.append(points[int(coin(r, "local iterate") * 3)])
        y, x = x, points[-1]
    agrees(carry.state.x, x)
    agrees(carry.drawn, eligible[int(drawn_round(KEY, rounds))])


@pytest.mark.parametrize("kind", ["SGD", "SVRG"])
def test_the_authors_of_soteria_clip_the_mean(kind):
    """For comparison only, without its noise here: one record moves what is sent by twice the clip."""
    own: dict[str, Any] = {
        "mean_clip": 0.2,
        "constant": 0.0,
        "claimed_epsilon": 1.0,
        "claimed_delta": 1e-3,
        "batch": 10,
    }
    own |= {"clip": None} | ({"snapshot_probability": 1.0} if kind == "SVRG" else {})
    _, carry = ran(f"silodp.reproduce.authors:ClippedMean{kind}", 3, **own)
    x = anchor = np.zeros(6)
    for r in range(3):
        rows = [rows_of(10, i, r, "value") for i in range(3)]
        estimates = [gradients(i, x, rows[i]).mean(axis=0) for i in range(3)]
        if kind == "SVRG":
            here = [gradients(i, anchor, rows[i]).mean(axis=0) for i in range(3)]
            estimates = [
                e - h + gradients(i, anchor).mean(axis=0) for i, (e, h) in enumerate(zip(estimates, here, strict=True))
            ]
        sent = [e * min(1, 0.2 / np.linalg.norm(e)) for e in estimates]
        anchor, x = x, x - ETA * np.mean(sent, axis=0)
    agrees(carry.state.x, x)


SETS = {
    "trusted": ({"kind": "simplex", "scale": 1.0}, np.full(6, 1 / 6)),
    "untrusted": ({"kind": "box", "low": 0.1, "high": 0.6}, np.full(6, 0.1)),
}


@pytest.mark.parametrize("trust", SETS)
def test_mu2_on_any_bounded_set_uses_every_record(trust):
    """25 records in 7 rounds: chunks of 4 or 3; 40: of 6 or 5; the start is projected into K."""
    kind, start = SETS[trust]
    rounds, eta = 7, 0.05
    _, carry = ran("mu2", rounds, trust=trust, prox=kind, step_size=eta)
    project = build_prox(**kind)
    ends = [np.cumsum([n // rounds + (r < n % rounds) for r in range(rounds)]) for n in DATA.sizes]
    assert [e[-1] for e in ends] == list(DATA.sizes), "no record unused"
    w = x = y = start
    q = np.zeros(6)
    for t in range(1, rounds + 1):
        chunk = lambda i, t=t: slice(0 if t == 1 else ends[i][t - 2], ends[i][t - 1])
        part = lambda i, t=t, x=x, y=y, chunk=chunk: clipped(
            t * gradients(i, x, chunk(i)) - (t - 1) * gradients(i, y, chunk(i)), CLIP
        )
        q = q + mean(range(3), part)
        w = np.asarray(project(jnp.asarray(w - eta * q, jnp.float32), eta), np.float64)
        y, x = x, x + 2 / (t + 2) * (w - x)
    agrees(carry.state.x, y)
    agrees(carry.drawn, y)


def test_mu2s_penalty_counts_as_often_as_its_gradients():
    """q is t times a gradient: with a prox of one step size for all rounds a penalty would fade away."""
    rounds, eta, strength = 7, 0.05, 0.3
    _, carry = ran("mu2", rounds, prox={"kind": "l1", "strength": strength}, diameter=2.0, step_size=eta)
    ends = [np.cumsum([n // rounds + (r < n % rounds) for r in range(rounds)]) for n in DATA.sizes]
    w = x = y = q = np.zeros(6)
    for t in range(1, rounds + 1):
        chunk = lambda i, t=t: slice(0 if t == 1 else ends[i][t - 2], ends[i][t - 1])
        part = lambda i, t=t, x=x, y=y, chunk=chunk: clipped(
            t * gradients(i, x, chunk(i)) - (t - 1) * gradients(i, y, chunk(i)), CLIP
        )
        q = q + mean(range(3), part)
        shrunk = w - eta * q
        shrunk = np.sign(shrunk) * np.maximum(np.abs(shrunk) - eta * t * strength, 0)
        w = shrunk / max(1, np.linalg.norm(shrunk))
        y, x = x, x + 2 / (t + 2) * (w - x)
    agrees(carry.state.x, y)


def test_mu2s_bound_is_that_of_the_smallest_chunk():
    """25 records in 7 rounds: the first chunk has 4, but a later sum also holds records of a chunk of 3."""
    tree = {
        "privacy": {"epsilon": 2.0},
        "algorithm": {"name": "mu2", "rounds": 7, "step_size": ETA, "clip": CLIP, "diameter": 2.0},
    }
    plan = make_plan(parse_config(tree), facts_of(DATA, 6))
    records = jax.tree.map(jnp.asarray, (DATA.silos[1].features, DATA.silos[1].targets))
    objective = build_objective(build_model("logistic", inputs=5), jax.tree.map(lambda leaf: leaf[0], records))
    site = Site(objective, plan.noised, records, jnp.int32(25), jnp.int32(1))
    zero = jnp.zeros(6)
    silo = Silo(site, jnp.int32(0), SeededRandomness(KEY), Double.of(zero), Account.empty(["value"]))
    release = plan.algorithm.corrected(silo, zero, zero)  # type: ignore[attr-defined]
    assert float(release.bound) == pytest.approx(MOVES * CLIP / 3, rel=1e-6)
    assert plan.declared.bounds_over_clip("value")[1] == pytest.approx(MOVES / 3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mu2", {"diameter": 2.0, "step_size": 0.05}),
        ("ce-psgm", {"momentum": 0.3, "local_steps": 3}),
        ("local-sgd", {"local_steps": 2}),
        ("prox-svrg", {"restart": 3}),
    ],
)
def test_where_nothing_is_clipped_a_regulariser_may_be_in_or_out(name, options):
    """Its gradient is added once, at the right points and with the right weight, in every kind of step."""
    ends = []
    for place in ("inside", "outside"):
        tree = {
            "model": {"kind": "logistic", "regulariser": 0.3, "regulariser_clip": place},
            "algorithm": {"name": name, "rounds": 5, "step_size": ETA} | options,
            "run": {"seed": SEED},
        }
        prepared = prepare(parse_config(tree), DATA)
        assert (prepared.setting.algorithm.penalty is None) == (place == "inside")
        ends.append(np.asarray(all_rounds(prepared.problem, prepared.setting).state.x))
    np.testing.assert_allclose(*ends, rtol=1e-4, atol=1e-6)


def test_a_regulariser_outside_is_not_clipped():
    strength = 4.0
    tree = {
        "model": {"kind": "logistic", "regulariser": strength, "initial": "normal"},
        "privacy": {"trust": "untrusted"},
        "algorithm": {"name": "dp-gd", "rounds": 1, "step_size": 0.1, "clip": CLIP, "weights": "equal"},
        "run": {"seed": SEED},
    }
    prepared = prepare(parse_config(tree), DATA)
    x = np.asarray(prepared.setting.x0, np.float64)
    pull = strength * 2 * x / (1 + x**2) ** 2
    agrees(all_rounds(prepared.problem, prepared.setting).state.x, x - 0.1 * (value(x, range(3)) + pull))


@pytest.mark.parametrize("given", [False, True])
def test_soterias_shift(given):
    """With the theorem's gamma, and with gamma_t and eta_t as inputs (Alg. 2)."""
    rounds, keep = 5, 3
    steps, gammas = ([1.0, 0.5, 2.0, 0.1, 1.0], [0.3 * 0.9**t for t in range(5)]) if given else ([1.0] * 5, [])
    inputs: dict[str, Any] = {"shift_rate": 0.3, "shift_decay": {"kind": "exponential", "factor": 0.9}}
    _, carry = ran(
        "soteria-gd", rounds, compressor="rand-k", keep=keep, **(inputs | {"step_decay": steps} if given else {})
    )
    gammas = gammas or [shift_rate(6 / keep - 1)] * rounds
    x, s = np.zeros(6), np.zeros((3, 6))
    points = [x]
    for r in range(rounds):
        sent = []
        for i in range(3):
            seed = SeededRandomness(party_key(KEY, r, i)).bits("compress/value", (2,))
            vector = clipped(gradients(i, x), CLIP) - s[i]
            sent.append(np.asarray(RandK(keep)(jnp.asarray(vector, jnp.float32), coins(seed)), np.float64))
        x = x - ETA * steps[r] * (s.mean(axis=0) + np.mean(sent, axis=0))
        s = s + gammas[r] * np.array(sent)
        points.append(x)
    agrees(carry.state.x, x)
    agrees(carry.drawn, points[int(drawn_round(KEY, rounds))])  # x_0 .. x_{T-1}
