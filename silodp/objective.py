"""A model's per-record loss on flat parameter vectors, as the algorithms see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from silodp.doubles import Double
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.gradients import clipped_sum, engine_for, leaf_methods, per_record, record_factors, sum_factors
from silodp.gradients.blocks import RUN
from silodp.models import Model
from silodp.records import map_parts
from silodp.weights import bounded

if TYPE_CHECKING:
    from silodp.core import Algorithm

Vector = Float[Array, " d"]


@runtime_checkable
class Objective(Protocol):
    """All that algorithms, channels and measurements ask of a loss; another backend may stand behind it.

    Points are flat vectors, records any pytree of arrays with the records first.
    """

    @property
    def parameters(self) -> int: ...

    def clipped_sum(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, weights: Array, clip: Any
    ) -> Double:
        """sum_j weights_j * clip(sum_k c_k grad f(x_k; z_j), clip); `clip` None: the plain weighted sum.

        When one record of weight 1 is replaced it moves by at most 2 * clip * (1 + silodp.gradients.SLACK).
        """
        ...

    def per_record(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, clip: Any
    ) -> Float[Array, "n d"]:
        """Each record's clipped combination as a row; memory grows with the records given."""
        ...

    def record_factors(self, x: Vector, records: PyTree, weights: Array, clip: Any) -> PyTree:
        """Each record's clipped gradient, in the form that is cheapest to keep; records first."""
        ...

    def sum_factors(self, factors: PyTree, weights: Array, run: int = RUN) -> Double:
        """sum_j weights_j * (what `record_factors` kept of record j), with the same bound.

        run: records that are added in float32, at most; rounding is (run / RUN)^2 times as large as SLACK allows.
        """
        ...

    def losses(self, x: Vector, records: PyTree) -> Float[Array, " n"]:
        """Every record's loss, the penalty included."""
        ...


class ModelObjective(eqx.Module):
    """The objective of a `Model`. Pytrees outside, one flat vector inside: only `unravel` knows both."""

    model: Model = eqx.field(static=True)
    unravel: Callable[[Vector], PyTree] = eqx.field(static=True)
    parameters: int = eqx.field(static=True)
    engine: str = eqx.field(static=True)
    engine_reason: str = eqx.field(static=True)
    penalty: Callable[[Vector], Array] | None = eqx.field(static=True, default=None)  # outside of what is clipped

    @property
    def inside(self) -> ModelObjective:
        """The same objective with its penalty in every record's loss."""
        return dataclasses.replace(self, model=self.model.inside, penalty=None)

    def clipped_sum(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, weights: Array, clip: Any
    ) -> Double:
        if clip is None:
            # Not through the structured engine: it drops records that overflow, and a diverged run would stay finite.
            return Double.of(self._plain_sum(points, coefficients, records, weights))
        trees = [self.unravel(x) for x in points]
        counted = self._counted(weights, records)
        return flat(clipped_sum(self.model.loss, trees, coefficients, records, counted, clip, engine=self.engine))

    def per_record(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, clip: Any
    ) -> Float[Array, "n d"]:
        trees = [self.unravel(x) for x in points]
        bound = jnp.inf if clip is None else clip
        rows = per_record(self.model.loss, trees, coefficients, records, bound)
        found = jax.vmap(lambda tree: ravel_pytree(tree)[0])(rows)
        return self._counted(found.T, records).T

    def record_factors(self, x: Vector, records: PyTree, weights: Array, clip: Any) -> PyTree:
        if self.model.weight is not None:
            raise ConfigError("weights of records or classes: not with an algorithm that keeps a table of gradients")
        bound = jnp.inf if clip is None else clip
        return record_factors(self.model.loss, self.unravel(x), records, weights, bound)

    def sum_factors(self, factors: PyTree, weights: Array, run: int = RUN) -> Double:
        return flat(sum_factors(self.unravel(jnp.zeros(self.parameters)), factors, weights, run))

    def _plain_sum(
        self, points: Sequence[Vector], coefficients: Sequence[Any], records: PyTree, weights: Array
    ) -> Vector:
        total = lambda x: jnp.sum(weights * self._record_losses(x, records))
        return sum((c * jax.grad(total)(x) for c, x in zip(coefficients, points, strict=True)), jnp.zeros(()))

    def _counted(self, numbers: Float[Array, "*d n"], records: PyTree) -> Float[Array, "*d n"]:
        """The records' numbers times what each counts: at most 1, whatever it holds."""
        weight = self.model.weight
        return numbers if weight is None else numbers * bounded(jax.vmap(weight)(records))

    def _record_losses(self, x: Vector, records: PyTree) -> Float[Array, " n"]:
        return self._counted(jax.vmap(self.model.loss, in_axes=(None, 0))(self.unravel(x), records), records)

    def losses(self, x: Vector, records: PyTree) -> Float[Array, " n"]:
        own = self._record_losses(x, records)
        return own if self.penalty is None else own + self.penalty(x)


CALLBACKS = ("pure_callback", "io_callback")


def sees_several(traced: Any) -> str | None:
    """An operation in a record's (traced) function to which a batch is shown as a whole; None: there is none.

    Only what is computed record by record can be clipped record by record.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("custom_vmap_call", *CALLBACKS):
            return equation.primitive.name
        inner = jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"))
        for part in inner:
            found = sees_several(part) if hasattr(getattr(part, "jaxpr", part), "eqns") else None
            if found is not None:
                return found
    return None


def refuse_shared_loss(objective: ModelObjective, record: PyTree) -> None:
    loss = lambda x, record: objective.model.loss(objective.unravel(x), record)
    several = sees_several(jax.make_jaxpr(loss)(np.zeros(objective.parameters, np.float32), record))
    if several is not None:
        raise ConfigError(
            f"model {objective.model.name!r}: its loss uses {several}, which sees several records at once; "
            "a record's gradient must be its own"
        )


def flat(doubles: PyTree) -> Double:
    """A tree of doubles as one vector of them."""
    part = lambda which: jax.tree.map(which, doubles, is_leaf=lambda leaf: isinstance(leaf, Double))
    return Double(ravel_pytree(part(lambda d: d.high))[0], ravel_pytree(part(lambda d: d.low))[0])


def parameter_shapes(model: Model) -> PyTree:
    """Shapes and types of a model's parameters. Nothing is drawn: every small program that runs would be compiled."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def parameter_count(model: Model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(model)))


def layout(params: PyTree) -> Callable[[Vector], PyTree]:
    """From flat parameters to a tree of these."""
    found: list[Callable[[Vector], PyTree]] = []

    def flattened(params: PyTree) -> Vector:
        flat, unravel = ravel_pytree(params)
        found.append(unravel)  # it knows shapes and types, and no values
        return flat

    jax.eval_shape(flattened, params)
    return found[0]


def example_record(facts: Facts) -> PyTree:
    """A record of the right shapes and types, for tracing."""
    if facts.record is None:
        raise ValueError("facts.record is unknown: a plan made without data cannot be run")
    kinds = facts.kinds
    return map_parts(lambda name, _: np.zeros(kinds[name].shape, kinds[name].dtype), facts.record)


def build_objective(model: Model, record: PyTree, engine: str = "auto") -> ModelObjective:
    """Fix the flat layout of a model's parameters and choose the gradient engine for one of its records."""
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(model))
    unravel = layout(params)
    chosen, reason = engine_for(model.loss, params, record) if engine == "auto" else (engine, "forced by the user")
    penalty = None if model.penalty is None else Flattened(model.penalty, unravel)
    return ModelObjective(model, unravel, parameter_count(model), chosen, reason, penalty)


def methods_of(objective: ModelObjective, record: PyTree) -> dict[str, str]:
    """What the engine does with each parameter, by its name, and why."""
    params = objective.unravel(jnp.zeros(objective.parameters))
    told = leaf_methods(objective.model.loss, params, record)
    if objective.engine == "general":
        return dict.fromkeys(told, f"per-record gradient: {objective.engine_reason}")
    return told


@dataclass(frozen=True)
class Flattened:
    """A model's penalty as a function of the flat parameters."""

    penalty: Callable[[PyTree], Array]
    unravel: Callable[[Vector], PyTree]

    def __call__(self, x: Vector) -> Array:
        return self.penalty(self.unravel(x))


def penalised(model: Model, unravel: Callable[[Vector], PyTree], algorithm: Algorithm) -> Algorithm:
    """The algorithm with the penalty that is its to add, where there is one."""
    if model.penalty is None or not algorithm.steps:
        return algorithm
    return dataclasses.replace(algorithm, penalty=Flattened(model.penalty, unravel))


def with_penalty(objective: ModelObjective, algorithm: Algorithm) -> tuple[ModelObjective, Algorithm]:
    """Who takes care of the penalty: an algorithm that steps as the library's own do, or else every record's loss."""
    if objective.penalty is not None and not algorithm.steps:
        return objective.inside, algorithm
    return objective, penalised(objective.model, objective.unravel, algorithm)
