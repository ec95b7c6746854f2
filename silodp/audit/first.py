"""The stage before training: is the noise of the whitening's second moment what its claim needs?

A record's part of the moment is a a^T, and two of them are furthest apart when their vectors are orthogonal. So each
canary has two features of its own and lies along one or the other, as its secret sign says: the difference of two
entries of the diagonal then shows the sign with exactly the claim's mu. Entries off the diagonal carry noise alone.
"""

from __future__ import annotations

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from silodp.audit import attack
from silodp.audit.observe import Programs, Traces
from silodp.audit.rows import CORRELATED, Further, Row, attained_row
from silodp.data import FederatedData, Note, SiloData
from silodp.parse import parse_config
from silodp.plan.certificate import settle
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import accountant
from silodp.releases import unpacked
from silodp.run.prepare import Ground, stage_problem

SILOS, CANARIES, RUNS = 2, 100, 16
LENGTH = 1e6  # of a canary's features: beyond every clip
EPSILON, DELTA = 30.0, 1e-5  # what leaks is large against the standard error

Signs = Float[np.ndarray, "silos m"]


def rows() -> list[Further]:
    return [Further(trust, partial(moment_row, trust)) for trust in ("trusted", "untrusted")]


def moment_row(trust: str) -> Row:
    signs = np.random.default_rng(3).choice([-1.0, 1.0], (RUNS, SILOS, CANARIES))
    config = parse_config(
        {
            "privacy": {"trust": trust, "epsilon": EPSILON, "delta": DELTA},
            "algorithm": {"name": "dp-gd", "rounds": 1, "step_size": 1.0, "clip": 1.0},
            "model": {"kind": "logistic", "bias": False},
            "whiten": {"share": 0.5, "centre": 0.0},
        }
    )
    ground = Ground.of(config, canary_data(signs[0]))
    stage = make_plan(config, ground.facts).at("whiten")
    moments = moments_of(ground, stage, signs)
    claim = float(np.mean([accountant.nearest_gdp(stage.spent(i)) for i in range(SILOS)]))  # type: ignore[arg-type]
    views = [np.stack(view) for view in zip(*moments, strict=True)]
    groups = [scores(views[min(i, len(views) - 1)], i, signs[:, i]) for i in range(SILOS)]
    reading = attack.separation(groups)
    noise = [np.stack([blank(moment) for moment in view]) for view in views]
    rounds = max(attack.repeated_noise(each) for each in noise)
    shared = attack.shared_noise(noise[0], noise[1]) if len(views) == SILOS else None
    repeated = max(rounds, shared or 0.0) > CORRELATED / math.sqrt(noise[0].shape[1])
    return attained_row(("dp-gd", trust, "moment (whitening)"), claim, reading, repeated, rounds, shared)


def canary_data(signs: Signs) -> FederatedData:
    silos = tuple(
        SiloData(f"silo {i}", canary_features(i, own), np.zeros(CANARIES, np.int32)) for i, own in enumerate(signs)
    )
    notes = (Note(True, "made for an audit"),)
    return FederatedData("moments", silos, None, "classification", ("0", "1"), notes)


def canary_features(silo: int, signs: Float[np.ndarray, " m"]) -> Float[np.ndarray, "m k"]:
    rows = np.zeros((CANARIES, 2 * SILOS * CANARIES), np.float32)
    rows[np.arange(CANARIES), pairs(silo)[(signs < 0).astype(int), np.arange(CANARIES)]] = LENGTH
    return rows


def pairs(silo: int) -> np.ndarray:
    """The two features of each of a silo's canaries."""
    first = 2 * (silo * CANARIES + np.arange(CANARIES))
    return np.stack([first, first + 1])


def moments_of(ground: Ground, stage: Plan, signs: Float[np.ndarray, "runs silos m"]) -> list[list[np.ndarray]]:
    """What is seen in runs with other signs and other noise: a moment of each silo, or one of all."""
    problem, setting = stage_problem(ground, stage, ground.records, jnp.zeros(ground.objective.parameters))
    programs = Programs(dear=False, traces=Traces())
    seen = []
    for run, own in enumerate(signs):
        records = jax.tree.map(jnp.asarray, canary_data(own).stack()[:2])
        asked = eqx.tree_at(lambda p: p.silos.records, problem, records)
        drawn = eqx.tree_at(lambda s: s.key, setting, jax.random.fold_in(setting.key, run))
        ends = programs.start(asked, drawn)
        query = drawn.algorithm.moment  # type: ignore[attr-defined]
        _, ends, released = programs.mean((asked, drawn, jnp.int32(0)), ends, query, ())
        settle(stage, ends.accounts)
        (views,) = released
        seen.append([np.asarray(unpacked(view)) for view in views])
    return seen


def scores(moments: Float[np.ndarray, "runs k k"], silo: int, signs: Float[np.ndarray, "runs m"]) -> attack.Scores:
    """sign * difference of a canary's two entries, in units of the noise of such a difference.

    Off the diagonal the noise of an unpacked entry is smaller by sqrt(2): it stands there twice.
    """
    first, second = pairs(silo)
    diagonal = np.diagonal(moments, axis1=1, axis2=2).astype(np.float64)
    spread = np.concatenate([blank(moment) for moment in moments]).std()
    return (signs * (diagonal[:, first] - diagonal[:, second]) / (2 * spread)).ravel()


def blank(moment: Float[np.ndarray, "k k"]) -> Float[np.ndarray, " b"]:
    """Entries off the diagonal: no canary has any part in them."""
    return moment[np.triu_indices(len(moment), 1)].astype(np.float64)
