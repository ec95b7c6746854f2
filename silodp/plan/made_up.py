"""What `auto` may be expected to reach before there is data: it learns a made-up task with the noise of a real plan.

    features   independent, standard normal
    classes    P(second class) = sigmoid(2.5 s), s: the features along one direction; nobody errs in less than 18.9 %
    numbers    the features along one direction and as much noise again: half of the variance can be explained

All silos have records of one kind. Plan, stages and algorithm are the library's own; only the silos are not: their
clipped means are computed at once, and noise of the size that the plan gives the average of all silos is added.
Real columns are related and real silos differ. What is found is an order of magnitude, and a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from silodp.core import Algorithm, Federation, Silo, averaged
from silodp.facts import Facts
from silodp.models import Model
from silodp.objective import penalised
from silodp.plan.parts import trained_model
from silodp.plan.plan import Plan
from silodp.releases import Release, Vector, packed
from silodp.server import build_average
from silodp.stages.maps import Map, mapped, with_steps

SLOPE, SPREAD = 2.5, 0.3  # of the margin; of a number, in half ranges of the target
TESTS, DRAWS = 4000, 3
NUMBERS, MOST_FEATURES = 200_000, 300  # of made-up records: what takes a few seconds
KINDS = ("logistic", "linear")


class MadeUpSilo(Silo):
    """All silos' records as if they were one silo's; it answers what stages and gradient descent ask.

    The bound of what it returns is the clip norm, in whose units the plan's noise is; 0 where nothing is clipped.
    """

    def __init__(self, features: Array, targets: Array, gradient: Callable[[Vector, Any], Vector] | None = None):
        self.made_up, self.gradient = (features, targets), gradient

    def mean(self, points: Any, coefficients: Any, clip: Any, stream: str, *_: Any) -> Release:  # pyright: ignore
        gradient = self.gradient
        assert gradient is not None and len(points) == 1
        return self.statistic(lambda record: gradient(points[0], record), clip, stream)

    def statistic(self, function: Callable[[Any], Vector], clip: Any, stream: str, *_: Any) -> Release:  # pyright: ignore
        vectors = jax.vmap(function)(self.made_up)
        return Release(jnp.mean(shortened(vectors, clip), 0), jnp.float32(0 if clip is None else clip), stream)

    def squares(self, function: Callable[[Any], Vector], clip: Any, stream: str, *_: Any) -> Release:  # pyright: ignore
        vectors = shortened(jax.vmap(function)(self.made_up), jnp.sqrt(clip))
        return Release(packed(vectors.T @ vectors / len(vectors)), jnp.float32(clip), stream)


def shortened(vectors: Float[Array, "n k"], clip: Any) -> Float[Array, "n k"]:
    if clip is None:
        return vectors
    return vectors * jnp.minimum(1, clip / jnp.maximum(jnp.linalg.norm(vectors, axis=1, keepdims=True), 1e-30))


class MadeUpFederation(Federation):
    """What an algorithm's round sees. `stds`: by stream, of the noise on the average of all silos, in clip norms."""

    silos, present = 1, (0,)

    def __init__(self, silo: MadeUpSilo, stds: dict[str, Any], key: Any):
        self.silo, self.stds, self.key, self.round = silo, stds, key, 0

    def mean(self, query: Callable[..., Any], *public: Array) -> Vector:
        told: Release = query(self.silo, *public)
        self.key, drawn = jax.random.split(self.key)
        size = self.stds[told.stream] * told.bound
        return told.value + size * jax.random.normal(drawn, told.value.shape)


class Task:
    """Made-up records and a test of what was learnt from them."""

    def __init__(self, kind: str, features: int, records: int):
        rng = np.random.default_rng(0)
        kept = int(min(records, max(50, NUMBERS // (features + 1))))
        self.kind, self.features = kind, features
        self.x, self.tests = (jnp.asarray(rng.normal(size=(n, features)), jnp.float32) for n in (kept, TESTS))
        signal = np.asarray(self.x[:, 0])
        if kind == "logistic":
            self.y = jnp.asarray(rng.random(kept) < 1 / (1 + np.exp(-SLOPE * signal)), jnp.int32)
        else:
            self.y = jnp.asarray(SPREAD * np.sqrt(0.5) * (signal + rng.normal(size=kept)), jnp.float32)

    def facts(self, sizes: Sequence[int]) -> Facts:
        record = (f"float32[{self.features}]", "int32[]" if self.kind == "logistic" else "float32[]")
        outputs, task = (2, "classification") if self.kind == "logistic" else (1, "regression")
        return Facts.of_sizes(sizes, record=record, outputs=outputs, task=task)

    def error(self, scores: Any) -> float:
        """The share of wrong classes, or the unexplained share of a number's variance."""
        signal, found = np.asarray(self.tests[:, 0], np.float64), np.asarray(scores, np.float64).reshape(-1)
        if self.kind == "logistic":
            return float(np.mean(1 / (1 + np.exp(SLOPE * np.where(found > 0, signal, -signal)))))
        return float(np.mean((found / SPREAD - np.sqrt(0.5) * signal) ** 2) + 0.5)

    @property
    def chance(self) -> tuple[str, float]:
        return ("guessing", 0.5) if self.kind == "logistic" else ("mean predictor", 1.0)


class Trial:
    """`auto` on a task. Programs are shared by plans that differ in numbers only."""

    def __init__(self, task: Task):
        self.task = task
        self.programs: dict[tuple[str, int], tuple[Model, Vector, Any]] = {}  # by algorithm and number of features

    def errors(self, plan: Plan) -> list[float]:
        return [self.error(plan, jax.random.key(draw)) for draw in range(DRAWS if plan.private else 1)]

    def error(self, plan: Plan, key: Any) -> float:
        maps: list[Map] = []
        for name in plan.before:
            key, own = jax.random.split(key)
            stage: Any = plan.at(name)
            silo = MadeUpSilo(mapped(maps, self.task.x), self.task.y)
            fed = MadeUpFederation(silo, stds_of(stage), own)  # pyright: ignore[reportAbstractUsage]
            maps.append(plan.derived(name, stage.algorithm.round(stage.algorithm.init(jnp.zeros(0)), fed).x))
        features = mapped(maps, self.task.x)
        model, x0, train = self.program(plan, features.shape[1])
        unravel = ravel_pytree(model.init(key))[1]
        algorithm = with_steps(maps, penalised(model, unravel, plan.training.algorithm))
        x = train(algorithm, stds_of(plan.training), features, key, x0)
        scores = model.scores
        assert scores is not None  # of KINDS
        return self.task.error(jax.vmap(lambda each: scores(unravel(x), each))(mapped(maps, self.task.tests)))

    def program(self, plan: Plan, features: int) -> tuple[Model, Vector, Any]:
        known = plan.config.algorithm.name, features
        if known not in self.programs:
            model = trained_model(plan.config, plan.facts)
            x0, unravel = ravel_pytree(model.init(jax.random.key(0)))
            self.programs[known] = model, x0, compiled(plan, model, unravel, self.task.y)
        return self.programs[known]


def stds_of(plan: Plan) -> dict[str, Any]:
    return {s.name: jnp.float32(plan.std_of_average(s.name)) if plan.private else 0.0 for s in plan.releases(0)}


def compiled(plan: Plan, model: Model, unravel: Callable[[Vector], Any], targets: Array) -> Any:
    rounds = plan.training.facts.rounds
    average = build_average(plan.config.algorithm.average, rounds)
    gradient = jax.grad(lambda x, record: model.loss(unravel(x), record))

    @eqx.filter_jit
    def train(algorithm: Algorithm, stds: dict[str, Any], features: Array, key: Any, x0: Vector) -> Vector:
        fed = MadeUpFederation(MadeUpSilo(features, targets, gradient), stds, key)  # pyright: ignore[reportAbstractUsage]

        def step(r: Any, carry: tuple[Any, Vector, Any]) -> tuple[Any, Vector, Any]:
            state, output, fed.key = carry
            fed.round = r
            state = algorithm.round(state, fed)  # pyright: ignore[reportArgumentType]
            return state, averaged(output, algorithm.result(state), r + 1, rounds, average), fed.key

        state = algorithm.init(x0)
        return jax.lax.fori_loop(0, rounds, step, (state, algorithm.result(state), key))[1]

    return train
