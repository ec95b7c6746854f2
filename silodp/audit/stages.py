"""Other stages: a record is replaced by its worst neighbour, and many releases tell which of the two it was.

Every release is read along the line between the means of the two worlds, learnt from the other half of the releases.
A record's numbers of `middle` turn from all 1 to all -1, which reaches the claim. Those of `metric` turn from right to
wrong: a share of the squared distance is in bins, of which one is left and one entered, so it reaches .91 of the claim.
Those of `rates` turn from one class to the other of two, which reaches the claim; the silo noises them under any trust.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.audit import attack
from silodp.audit.observe import QUICKLY_COMPILED, ask_everyone, ask_one
from silodp.audit.rows import Further, Row, attained_row
from silodp.data import FederatedData, Note, SiloData
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import accountant
from silodp.run.prepare import Ground, stage_problem
from silodp.run.simulate import start
from silodp.stages import rates
from silodp.stages.evaluate import STREAM, Metrics
from silodp.stages.rates import Rates
from silodp.stages.scale import Ranges

SILOS, RECORDS, COLUMNS = 2, 40, 3
DRAWS = 1000  # releases in each world
EPSILON, DELTA = 30.0, 1e-5  # what leaks is large against the standard error
FAR = 1e6  # beyond every clip

Releases = Float[np.ndarray, "draws d"]


def rows() -> list[Further]:
    return [Further("trusted", middle_row), Further("untrusted", metric_row), Further("trusted", rates_row)]


def middle_row() -> Row:
    ground, plan = stages_of({"scale": {"share": 0.5}}, "trusted")
    stage = plan.at("scale")
    assert isinstance(stage.algorithm, Ranges)
    asked = (stage.algorithm.middle, (jnp.ones(COLUMNS),))
    worlds = [with_first(ground.records, far) for far in (FAR, -FAR)]
    seen = [releases(ground, stage, records, i, asked) for i, records in enumerate(worlds)]
    return pair_row(("dp-gd", "trusted", "middle (scale)"), stage, "middle", seen)


def metric_row() -> Row:
    """Of a model that is sure of the second class: the label turns."""
    ground, plan = stages_of({"evaluate": {"held_out": 0.5}}, "untrusted")
    stage = plan.evaluation
    assert stage is not None
    assert isinstance(stage.algorithm, Metrics)
    model = jnp.full(ground.objective.parameters, 1.0)
    asked = (stage.algorithm.metric, (model,))
    worlds = [with_first(ground.held_out, FAR, label) for label in (1, 0)]
    seen = [releases(ground, stage, records, i, asked, ask_one) for i, records in enumerate(worlds)]
    return pair_row(("dp-gd", "untrusted", "metric (evaluate)"), stage, STREAM, seen)


def rates_row() -> Row:
    ground, plan = stages_of({"intercepts": {"share": 0.5}}, "trusted")
    stage = plan.at("intercepts")
    assert isinstance(stage.algorithm, Rates)
    worlds = [with_first(ground.records, 0.0, label) for label in (1, 0)]
    asked = (stage.algorithm.rates, ())
    seen = [releases(ground, stage, records, i, asked, ask_one) for i, records in enumerate(worlds)]
    return pair_row(("dp-gd", "trusted", "rates (intercepts)"), stage, rates.STREAM, seen)


def stages_of(section: dict[str, Any], trust: str) -> tuple[Ground, Plan]:
    config = parse_config(
        {
            "privacy": {"trust": trust, "epsilon": EPSILON, "delta": DELTA},
            "algorithm": {"name": "dp-gd", "rounds": 1, "step_size": 1.0, "clip": 1.0},
            "model": {"kind": "logistic", "bias": False},
            **section,
        }
    )
    features, targets = np.zeros((RECORDS, COLUMNS), np.float32), np.arange(RECORDS, dtype=np.int32) % 2
    silos = tuple(SiloData(f"silo {i}", features, targets) for i in range(SILOS))
    data = FederatedData("worst neighbours", silos, None, "classification", ("0", "1"), (Note(True, "made"),))
    ground = Ground.of(config, data)
    return ground, make_plan(config, ground.facts)


def with_first(records: PyTree, feature: float, label: int = 0) -> PyTree:
    """With another first record of the first silo."""
    features, targets = records
    return features.at[0, 0].set(feature), targets.at[0, 0].set(label)


def releases(
    ground: Ground,
    stage: Plan,
    records: PyTree,
    world: int,
    asked: tuple[Any, tuple[Array, ...]],
    ask: Callable[..., tuple[Any, ...]] = ask_everyone,
) -> Releases:
    """What the first silo releases, or all together, drawn many times."""
    problem, setting = stage_problem(ground, stage, records, asked[1][0] if asked[1] else jnp.zeros(0))
    ends = start(problem, setting).ends
    silo = (jnp.int32(0),) if ask is ask_one else ()

    def once(key: Array) -> Array:
        drawn = eqx.tree_at(lambda s: s.key, setting, key)
        seen = ask((problem, drawn, jnp.int32(0)), ends, *silo, *asked)[2][0]
        return seen if ask is ask_one else seen[0]

    keys = jax.random.split(jax.random.fold_in(setting.key, world), DRAWS)
    return np.asarray(jax.jit(jax.vmap(once), compiler_options=QUICKLY_COMPILED)(keys), np.float64)


def pair_row(what: tuple[str, str, str], stage: Plan, stream: str, worlds: list[Releases]) -> Row:
    own = [spent for spent in stage.spent(0) if spent.releases.stream == stream]
    claim = accountant.nearest_gdp(own)
    assert claim is not None
    return attained_row(what, claim, attack.separation([told_apart(worlds, half) for half in (0, 1)]), False, 0.0, None)


def told_apart(worlds: list[Releases], half: int) -> attack.Scores:
    """Of one half of the releases, along the line that the other half shows."""
    one, other = (world[1 - half :: 2].mean(axis=0) for world in worlds)
    line = (one - other) / np.linalg.norm(one - other)
    along = [(world[half::2] - (one + other) / 2) @ line for world in worlds]
    return np.concatenate([along[0], -along[1]])
