"""More twins, of what draws batches, compresses or keeps a table: float64 numpy with the library's own coins.

As in test_twins.py everything but noise is at work.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from silodp.channels.compressed import coins
from silodp.compressors import RandK, shift_rate
from silodp.randomness import SeededRandomness, party_key
from silodp.sampling import BatchRule, Poisson, TwoLevel
from tests.test_twins import CLIP, DATA, DIFFERENCE, ETA, KEY, agrees, clipped, coin, gradients, mean, ran, rows_of
from tests.textbook import soft_threshold

SILOS, KEEP = range(3), 3
L1 = {"kind": "l1", "strength": 0.02}
FINE = 100_000  # levels of P_vec's grid: what is left of it is small beside a mistake


def drawn(rule: BatchRule, silo: int, round: int, purpose: str, step: int = 0) -> tuple[np.ndarray, float]:
    """The rows that the library's coins draw, and the public number that their sum is divided by."""
    records = jnp.pad(jnp.asarray(DATA.silos[silo].features), ((0, 40 - DATA.sizes[silo]), (0, 0)))
    randomness = SeededRandomness(party_key(KEY, round, silo))
    drawer: Any = SimpleNamespace(records=records, size=jnp.int32(DATA.sizes[silo]), round=round, randomness=randomness)
    batch = rule.draw(drawer, purpose, step)
    return np.asarray(batch.rows)[np.asarray(batch.weights) > 0], float(batch.divisor)


def each_clipped(vectors: np.ndarray, bound: float) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors * np.minimum(1, bound / np.maximum(norms, 1e-300))


def value(silo: int, x: np.ndarray, batch: int, round: int, purpose: str = "value", step: int = 0) -> np.ndarray:
    rows, divisor = drawn(Poisson(batch), silo, round, purpose, step)
    return each_clipped(gradients(silo, x, rows), CLIP).sum(axis=0) / divisor


def difference(silo: int, x: np.ndarray, y: np.ndarray, bound: float, batch: int, round: int) -> np.ndarray:
    rows, divisor = drawn(Poisson(batch), silo, round, "difference")
    change = gradients(silo, x, rows) - gradients(silo, y, rows)
    return each_clipped(change, bound).sum(axis=0) / divisor


def compressed(vector: np.ndarray, silo: int, round: int) -> np.ndarray:
    seed = SeededRandomness(party_key(KEY, round, silo)).bits("compress/value", (2,))
    return np.asarray(RandK(KEEP)(jnp.asarray(vector, jnp.float32), coins(seed)), np.float64)


def test_cdp_sgd_compresses_what_it_sends():
    """SoteriaFL, Alg. 1."""
    _, carry = ran("cdp-sgd", 5, batch=8, compressor="rand-k", keep=KEEP)
    x = np.zeros(6)
    for t in range(5):
        x = x - ETA * mean(SILOS, lambda i, x=x, t=t: compressed(value(i, x, 8, t), i, t))
    agrees(carry.state.x, x)


@pytest.mark.parametrize("kind", [pytest.param("svrg", marks=pytest.mark.slow), "saga"])
def test_soterias_estimators_with_shifted_compression(kind):
    """SoteriaFL, Alg. 3, options II and III: batches, clips, one coin for all snapshots, a table of every record."""
    rounds, b, p = 9, 8, 0.4
    own: dict[str, Any] = {"snapshot_probability": p} if kind == "svrg" else {}
    _, carry = ran(f"soteria-{kind}", rounds, batch=b, compressor="rand-k", keep=KEEP, **own)
    gamma, x, anchor, s = shift_rate(6 / KEEP - 1), np.zeros(6), np.zeros(6), np.zeros((3, 6))
    table = [each_clipped(gradients(i, x), CLIP) for i in SILOS]
    for t in range(rounds):
        sent = []
        for i in SILOS:
            rows, divisor = drawn(TwoLevel(b), i, t, "value")
            new = each_clipped(gradients(i, x, rows), CLIP)
            old = each_clipped(gradients(i, anchor, rows), CLIP) if kind == "svrg" else table[i][rows]
            whole = clipped(gradients(i, anchor), CLIP) if kind == "svrg" else table[i].mean(axis=0)
            sent.append(compressed((new - old).sum(axis=0) / divisor + whole - s[i], i, t))
            table[i][rows] = new
        step = s.mean(axis=0) + np.mean(sent, axis=0)
        anchor = x if kind == "svrg" and coin(t, "snapshot") < p else anchor
        x, s = x - ETA * step, s + gamma * np.array(sent)
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_alternate_spider_goes_in_pairs_of_rounds():
    """Lowy et al., Alg. 11, on Poisson batches."""
    _, carry = ran("spider-alt", 6, batch=8, clip_difference=DIFFERENCE)
    w = np.zeros(6)
    for r in range(0, 6, 2):
        v = mean(SILOS, lambda i, w=w, r=r: value(i, w, 8, r))
        ahead = w - ETA * v
        bound = min(DIFFERENCE * float(np.linalg.norm(ahead - w)), 2 * CLIP)
        change = lambda i, w=w, ahead=ahead, bound=bound, r=r: difference(i, ahead, w, bound, 8, r + 1)
        w = ahead - ETA * (v + mean(SILOS, change))
    agrees(carry.state.x, w)


def test_spider_with_two_sizes_of_batches_absent_silos_and_adam():
    """Lowy et al., Alg. 3 with K1 != K2, and DIFF2's open routine on it."""
    adam: dict[str, Any] = {"kind": "adam", "first": 0.8, "second": 0.9, "small": 1e-3}
    sizes: dict[str, Any] = {"batch": 6, "batch_difference": 12, "sampling": "poisson"}
    prepared, carry = ran("spider", 7, restart=3, clip_difference=DIFFERENCE, participation=2, optimiser=adam, **sizes)
    x = y = v = m = s = np.zeros(6)
    for r in range(7):
        present = prepared.plan.facts.present(r)
        if r % 3 == 0:
            v = mean(present, lambda i, x=x, r=r: value(i, x, 6, r))
        else:
            bound = min(DIFFERENCE * float(np.linalg.norm(x - y)), 2 * CLIP)
            v = v + mean(present, lambda i, x=x, y=y, bound=bound, r=r: difference(i, x, y, bound, 12, r))
        m, s = 0.8 * m + 0.2 * v, 0.9 * s + 0.1 * v**2
        unbiased = m / (1 - 0.8 ** (r + 1)), s / (1 - 0.9 ** (r + 1))
        y, x = x, x - ETA * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-3)
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_prox_svrg_on_batches():
    """Lowy et al., Alg. 1 with K < n: the anchor's value is of all records, differences are of a batch, clipped to 2
    clip (steps so long that some are longer)."""
    eta, longest = 10.0, 0.0
    _, carry = ran("prox-svrg", 7, batch=8, restart=3, prox=L1, step_size=eta)
    x = anchor = g = np.zeros(6)
    for r in range(7):
        if r % 3 == 0:
            anchor, g = x, mean(SILOS, lambda i, x=x: clipped(gradients(i, x), CLIP))
            v = g
        else:
            v = g + mean(SILOS, lambda i, x=x, a=anchor, r=r: difference(i, x, a, 2 * CLIP, 8, r))
            turned = [gradients(i, x, rows) - gradients(i, anchor, rows) for i in SILOS
                      for rows in [drawn(Poisson(8), i, r, "difference")[0]]]  # fmt: skip
            longest = max(longest, *(np.linalg.norm(each, axis=1).max(initial=0.0) for each in turned))
        x = soft_threshold(x - eta * v, eta * 0.02)
    agrees(carry.state.x, x)
    assert longest > 2 * CLIP


@pytest.mark.slow
def test_local_sgd_on_batches():
    _, carry = ran("local-sgd", 4, batch=8, local_steps=3)
    x = np.zeros(6)
    for r in range(4):
        ends = []
        for i in SILOS:
            w = x
            for k in range(3):
                w = w - ETA * value(i, w, 8, r, "local", k)
            ends.append(w)
        x = np.mean(ends, axis=0)
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_one_pass_of_prox_sgd():
    """Lowy et al., Alg. 6: R disjoint batches of floor(n/R)."""
    _, carry = ran("prox-sgd", 5, prox=L1)
    x = np.zeros(6)
    for r in range(5):
        chunk = lambda i, r=r: slice(r * (DATA.sizes[i] // 5), (r + 1) * (DATA.sizes[i] // 5))
        v = mean(SILOS, lambda i, x=x, chunk=chunk: clipped(gradients(i, x, chunk(i)), CLIP))
        x = soft_threshold(x - ETA * v, ETA * 0.02)
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_mb_psgm_on_batches_weighted_by_size_with_nesterov_and_shorter_steps():
    beta, weights = 0.3, np.array(DATA.sizes) / sum(DATA.sizes)
    decay = {"kind": "polynomial", "power": 0.5}
    server: dict[str, Any] = {"optimiser": {"kind": "nesterov", "momentum": 0.6}, "step_decay": decay}
    _, carry = ran(
        "mb-psgm", 6, batch=8, sampling="poisson", momentum=beta, clip_difference=DIFFERENCE, weights="size", **server
    )
    x = y = v = m = np.zeros(6)
    for r in range(6):
        fresh = sum(weights[i] * value(i, x, 8, r) for i in SILOS)
        bound = DIFFERENCE * float(np.linalg.norm(x - y))
        change = sum(weights[i] * difference(i, x, y, bound, 8, r) for i in SILOS) if r else 0.0
        v = (1 - beta) * (v + change) + beta * fresh if r else fresh
        m = 0.6 * m + v
        y, x = x, x - ETA * (1 + r) ** -0.5 * (0.6 * m + v)
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_fused_messages_of_mb_psgm():
    beta = 0.3
    _, carry = ran("mb-psgm-fg", 6, fused=True, momentum=beta, clip_difference=DIFFERENCE)
    x = y = v = np.zeros(6)
    for r in range(6):
        rho = beta if r else 1.0
        bound = (1 - rho) * DIFFERENCE * float(np.linalg.norm(x - y)) + rho * CLIP
        part = lambda i, x=x, y=y, rho=rho, bound=bound: clipped(gradients(i, x) - (1 - rho) * gradients(i, y), bound)
        v = (1 - rho) * v + mean(SILOS, part)
        y, x = x, x - ETA * v
    agrees(carry.state.x, x)


@pytest.mark.slow
def test_mu2_with_faster_growing_weights():
    """alpha_t = t^2: x is the weighted mean of the w, and the clip grows with t as corrections do."""
    rounds, eta = 7, 0.05
    _, carry = ran("mu2", rounds, trust="trusted", diameter=1.0, weight_power=2.0, step_size=eta)
    ends = [np.cumsum([n // rounds + (r < n % rounds) for r in range(rounds)]) for n in DATA.sizes]
    w = x = y = q = np.zeros(6)
    for t in range(1, rounds + 1):
        chunk = lambda i, t=t: slice(0 if t == 1 else ends[i][t - 2], ends[i][t - 1])
        part = lambda i, t=t, x=x, y=y, chunk=chunk: clipped(
            t**2 * gradients(i, x, chunk(i)) - (t - 1) ** 2 * gradients(i, y, chunk(i)), CLIP * t
        )
        q = q + mean(SILOS, part)
        w = w - eta * q
        w = w * min(1, 0.5 / max(float(np.linalg.norm(w)), 1e-300))
        y, x = x, x + (t + 1) ** 2 / sum(k**2 for k in range(1, t + 2)) * (w - x)
    agrees(carry.state.x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prox-sgd", {"batch": 4, "weights": "equal"}),
        ("prox-svrg", {"restart": 3, "clip_difference": DIFFERENCE}),
        ("prox-pl-svrg", {"restart": 3, "epochs": 1, "clip_difference": DIFFERENCE}),
        ("spider", {"restart": 3, "clip_difference": DIFFERENCE, "participation": 2}),
    ],
)
def test_on_sums_it_is_the_same_method_up_to_their_grid(name, options):
    """Lowy et al., Alg. 7 to 10: P_vec rounds every vector to its grid, noise or not, and keeps the mean."""
    own: dict[str, Any] = {"weights": "size", "prox": L1, "step_size": 2.0} | options
    means, sums = (
        np.asarray(ran(prefix + name, 6, trust=trust, **own, **more)[1].output)
        for prefix, trust, more in (("", "trusted", {}), ("sdp-", "shuffled", {"grid": FINE}))
    )
    np.testing.assert_allclose(sums, means, atol=5e-5)
    assert np.linalg.norm(means) > 0.5 and (sums != means).any()


@pytest.mark.slow
def test_sums_of_a_share_of_every_silos_records():
    """Lowy et al., Alg. 8 with K < n, on silos of different sizes: every record drawn counts alike."""
    own: dict[str, Any] = {"restart": 3, "clip_difference": DIFFERENCE, "batch_share": 0.3, "grid": FINE}
    prepared, carry = ran("sdp-prox-svrg", 6, trust="shuffled", weights="size", **own)
    rule = next(stream.batch for stream in prepared.plan.releases(0) if stream.name == "difference")
    x = anchor = g = np.zeros(6)
    for r in range(6):
        if r % 3 == 0:
            anchor, g = x, sum(each_clipped(gradients(i, x), CLIP).sum(axis=0) for i in SILOS) / sum(DATA.sizes)
        bound = min(DIFFERENCE * float(np.linalg.norm(x - anchor)), 2 * CLIP)
        batches = [drawn(rule, i, r, "difference") for i in SILOS]
        changes = [gradients(i, x, rows) - gradients(i, anchor, rows) for i, (rows, _) in enumerate(batches)]
        total = sum(each_clipped(change, bound).sum(axis=0) for change in changes)
        x = x - ETA * (g + total / sum(divisor for _, divisor in batches))
    np.testing.assert_allclose(np.asarray(carry.state.x), x, atol=2e-5)


def test_a_shuffled_records_messages_are_of_one_batch():
    """CE-PSGM, Alg. 1, lines 3, 6 and 7: B0 records in round 0, then B1, and value and difference of the same ones."""
    rounds, beta = 4, 0.3
    own: dict[str, Any] = {"clip_difference": DIFFERENCE, "momentum": beta, "batch": 8, "batch_first": 12}
    _, carry = ran("mb-psgm", rounds, trust="shuffled", weights="equal", **own)
    x = y = v = np.zeros(6)
    for r in range(rounds):
        rows = [rows_of(8 if r else 12, i, r, "round") for i in SILOS]
        fresh = mean(SILOS, lambda i, x=x, rows=rows: clipped(gradients(i, x, rows[i]), CLIP))
        bound = DIFFERENCE * float(np.linalg.norm(x - y))
        change = lambda i, x=x, y=y, rows=rows: gradients(i, x, rows[i]) - gradients(i, y, rows[i])
        moved = mean(SILOS, lambda i, bound=bound, change=change: clipped(change(i), bound))
        v = fresh if r == 0 else (1 - beta) * (v + moved) + beta * fresh
        y, x = x, x - ETA * v
    agrees(carry.state.x, x)
