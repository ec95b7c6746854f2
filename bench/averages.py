"""Linear models from noised averages of clipped gradients, many settings at once: what `python -m bench.utility` runs.

Plans, noise, stages and constants are the library's. Only the silos are not simulated one by one: the clipped mean over
all their records is computed at once, and noise of the size that the plan gives the average of all silos is added.
`python -m bench.utility --check` compares the result with whole runs of the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.tasks import LONGEST, Arrays
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.releases import packed
from silodp.server import OPTIMISERS, growing, read
from silodp.stages.blocks import Blocks
from silodp.stages.whiten import CENTRE, MOMENT, Centre, Moment, shift_of

DELTA = 1e-5
FACTOR = OPTIMISERS["growing"]["factor"][-1]
TOGETHER, MOST_ROUNDS = 16, 60  # settings of one program, which all tasks of the same shapes share


@dataclass(frozen=True)
class Setting:
    """One run. `matrix`: of (features, 1). Squared losses are r^2 / 2 here, half of the library's."""

    matrix: np.ndarray
    step: float
    clip: float
    std: float  # of the noise on the average gradient, in clip norms
    momentum: float
    rounds: int
    average: int  # of the last iterates
    seed: int
    most: float = 1.0  # what steps may grow by (silodp.server.growing)

    def weights(self) -> np.ndarray:
        last, rounds = min(self.average, self.rounds), np.arange(MOST_ROUNDS)
        return np.where((rounds >= self.rounds - last) & (rounds < self.rounds), 1 / last, 0.0)


@dataclass(frozen=True)
class Ground:
    """Training and test records of one split, with the constant beside the features."""

    kind: str
    train: Arrays
    test: Arrays
    sizes: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return int(max(self.train[1].max(), self.test[1].max())) + 1 if self.kind == "softmax" else 1

    @cached_property
    def moment(self) -> np.ndarray:
        """Of (features, 1). That centred records may be a little longer than the clip norm is not looked at."""
        rows = with_constant(self.train[0], LONGEST).astype(np.float64)
        return rows.T @ rows / len(rows)

    def facts(self) -> Facts:
        record = (f"float32[{self.train[0].shape[1]}]", "float32[]" if self.kind == "linear" else "int32[]")
        task = "regression" if self.kind == "linear" else "classification"
        count = (self.train[0].shape[1] + 1) * self.outputs
        outputs = 1 if self.kind == "linear" else max(2, self.outputs)
        return Facts.of_sizes(self.sizes, record=record, outputs=outputs, task=task, parameters=count)

    def plan(self, epsilon: float, trust: str, algorithm: dict[str, Any], whiten: dict[str, Any] | None = None) -> Plan:
        privacy = {"epsilon": epsilon, "delta": DELTA, "trust": trust}
        tree: dict[str, Any] = {"model": {"kind": self.kind}, "privacy": privacy, "algorithm": algorithm}
        return make_plan(parse_config(tree | ({} if whiten is None else {"whiten": whiten})), self.facts())


def with_constant(features: np.ndarray, reach: float) -> np.ndarray:
    length = np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return np.hstack([features * np.minimum(1, reach / length), np.ones((len(features), 1))]).astype(np.float32)


def auto_setting(ground: Ground, plan: Plan, seed: int) -> Setting:
    """A plan of `auto` with its stages done: what they release is noised as the plan says."""
    rng = np.random.default_rng([seed, round(1000 * float(plan.config.privacy.epsilon or 0))])
    options: Any = plan.config.algorithm  # of `auto`, which leaves nothing open
    centre = noised_centre(plan, ground.moment[-1, :-1], rng)
    stage = plan.at("whiten")
    asked: Any = stage.algorithm
    shift = np.eye(len(centre) + 1)
    shift[:-1, -1] = -centre
    moment = shift @ ground.moment @ shift.T
    released = released_of(asked, moment)
    std = stage.std_of_average(MOMENT) * asked.unit
    section = plan.config.whiten
    assert section is not None
    noised = jnp.asarray(released + std * rng.normal(size=released.shape), jnp.float32)
    made = replace(asked.whitening(noised, std, section.ridge or 0.0), lengthen=section.lengthen)
    matrix = np.diag(made.matrix) if made.matrix.ndim == 1 else np.array(made.matrix)
    matrix = np.hstack([matrix[:, :-1], (matrix[:, -1] - matrix[:, :-1] @ centre)[:, None]])
    half = 2.0 if ground.kind == "linear" else 1.0
    _, numbers = read("optimiser", options.optimiser, OPTIMISERS)
    most = numbers.get("most", 1.0)
    return Setting(
        matrix, half * options.step_size * made.longer, options.clip / half, plan.training.std_of_average("value"),
        options.optimiser["momentum"], options.performed, options.average, seed, most,
    )  # fmt: skip


def released_of(asked: Any, moment: np.ndarray) -> np.ndarray:
    """What a stage asks for of the moment of (features, 1)."""
    pairs = lambda matrix: np.asarray(packed(jnp.asarray(matrix, jnp.float32)), np.float64)
    if isinstance(asked, Blocks):
        return np.concatenate([pairs(moment[np.ix_(block, block)]) for block in asked.blocks])
    return pairs(moment[:-1, :-1]) if isinstance(asked, Moment) else np.asarray(np.diag(moment)[:-1], np.float64)


def noised_centre(plan: Plan, mean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    stage = plan.at("centre")
    asked = stage.algorithm
    assert isinstance(asked, Centre)
    std = stage.std_of_average(CENTRE) * float(asked.clip)
    told = mean + std * rng.normal(size=mean.shape)
    return np.asarray(shift_of(jnp.asarray(told, jnp.float32), std, np.asarray(asked.scale)).centre, np.float64)


def plain_setting(ground: Ground, std: float, rounds: int, step: float, clip: float, momentum: float, average: int,
                  seed: int) -> Setting:  # fmt: skip
    """DP-GD on the features as they are; std: of one round's noise."""
    return Setting(np.eye(ground.train[0].shape[1] + 1), step, clip, std, momentum, rounds, average, seed)


def scores(ground: Ground, settings: Sequence[Setting], reach: float = math.inf) -> list[float]:
    """Accuracy, or R^2, on the test records, for every setting."""
    found: list[float] = []
    arrays = [jnp.asarray(with_constant(x, reach)) for x in (ground.train[0], ground.test[0])]
    kind = np.int32 if ground.kind == "softmax" else np.float32
    targets = [jnp.asarray(np.asarray(y, kind)) for y in (ground.train[1], ground.test[1])]
    for start in range(0, len(settings), TOGETHER):
        own = list(settings[start : start + TOGETHER])
        padded = own + [replace(own[-1], rounds=1, average=1)] * (TOGETHER - len(own))
        told = trained(*arrays, *targets, stacked(padded), max(s.rounds for s in own), ground.kind, ground.outputs)
        found += np.nan_to_num(np.asarray(told)[: len(own)], nan=-9.0).tolist()
    return found


def stacked(settings: Sequence[Setting]) -> dict[str, Any]:
    columns = {
        name: np.array([getattr(s, name) for s in settings], np.float32)
        for name in ("step", "clip", "momentum", "most")
    }
    return columns | {
        "std": np.array([s.std * s.clip for s in settings], np.float32),
        "matrix": np.array([s.matrix for s in settings], np.float32),
        "average": np.array([s.weights() for s in settings], np.float32),
        "seed": np.array([s.seed * 1009 + i for i, s in enumerate(settings)], np.uint32),
    }


@partial(jax.jit, static_argnames=("kind", "outputs"))
def trained(
    rows: Array, tests: Array, y: Array, wanted: Array, given: dict[str, Array], rounds: Any, kind: str, outputs: int
) -> Array:
    """Nesterov's momentum, growing where `most` is above 1, on x -> matrix x; a record's gradient is
    (residual) (matrix x)^T, clipped as a whole."""
    matrix = given["matrix"]
    metric = jnp.einsum("rij,rik->rjk", matrix, matrix)
    lengths = jnp.sqrt(jnp.maximum(jax.lax.map(lambda m: jnp.sum((rows @ m) * rows, 1), metric), 1e-20))
    column = lambda name: given[name][:, None, None]
    keys = jax.vmap(jax.random.key)(given["seed"])
    labels = jax.nn.one_hot(y, outputs) if kind == "softmax" else y[:, None]

    def residual(w: Array) -> Array:
        told = jnp.einsum("nk,rkc->rnc", rows, jnp.einsum("rij,ric->rjc", matrix, w))
        link = {"softmax": jax.nn.softmax, "logistic": jax.nn.sigmoid, "linear": lambda s: s}[kind]
        return link(told) - labels

    begun = lambda momentum, most, zero: growing(momentum, FACTOR, most).init(zero)
    moved = lambda momentum, most, g, kept: growing(momentum, FACTOR, most).update(g, kept)

    def step(t: Any, carry: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
        w, kept, output = carry
        r = residual(w)
        long = jnp.sqrt(jnp.sum(r * r, -1)) * lengths
        r = r * jnp.minimum(1, given["clip"][:, None] / jnp.maximum(long, 1e-20))[..., None]
        mean = jnp.einsum("rij,rjc->ric", matrix, jnp.einsum("nk,rnc->rkc", rows, r) / len(rows))
        drawn = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, t), w.shape[1:]))(keys)
        g = mean + column("std") * drawn
        directions, kept = jax.vmap(moved)(given["momentum"], given["most"], g.reshape(len(g), -1), kept)
        w = w - column("step") * directions.reshape(w.shape)
        return w, kept, output + given["average"][:, t][:, None, None] * w

    zero = jnp.zeros((matrix.shape[0], rows.shape[1], outputs))
    kept = jax.vmap(begun)(given["momentum"], given["most"], zero.reshape(len(zero), -1))
    output = jax.lax.fori_loop(0, rounds, step, (zero, kept, zero))[2]
    told = jnp.einsum("nk,rkc->rnc", tests, jnp.einsum("rij,ric->rjc", matrix, output))
    if kind == "softmax":
        return jnp.mean(jnp.argmax(told, -1) == wanted, 1)
    if kind == "logistic":
        return jnp.mean((told[..., 0] > 0) == (wanted > 0), 1)
    return 1 - jnp.mean((told[..., 0] - wanted) ** 2, 1) / jnp.var(wanted)


def others(setting: Setting, factors: Sequence[tuple[float, float]]) -> list[Setting]:
    """The same with steps and clip norms that are so many times as long."""
    return [replace(setting, step=a * setting.step, clip=b * setting.clip) for a, b in factors]
