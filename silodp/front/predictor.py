"""Scores of encoded rows, from trained parameters as they are saved.

Linear models are one matrix, whitening included. Its product is summed column by column in float64: a row has the same
score in every batch, process and year, to the last bit, and no JAX is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float64

from silodp.errors import ConfigError
from silodp.registry import LINEAR

if TYPE_CHECKING:
    from silodp.config import ModelConfig
    from silodp.models import Model

PARAMS, SCALING, CENTRE, WHITENING, OFFSETS = "params/", "scaling", "centre", "whitening", "offsets"
WEIGHT, BIAS = PARAMS + "dense1/weight", PARAMS + "dense1/bias"  # of a linear model


def product(left: Float[np.ndarray, "n d"], right: Float[np.ndarray, "d k"]) -> Float64[np.ndarray, "n k"]:
    """left @ right in one order of sums, whatever the shapes: a matrix product's rounding depends on them."""
    columns = np.asarray(left.T, np.float64, order="C")
    total = np.zeros((left.shape[0], right.shape[1]))
    for column, row in zip(columns, np.asarray(right, np.float64), strict=True):
        total += column[:, None] * row
    return total


@dataclass(frozen=True)
class Linear:
    """Scores X coef^T + intercept, on features as the schema encodes them."""

    coef: Float64[np.ndarray, "k d"]
    intercept: Float64[np.ndarray, " k"]

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> Linear:
        weight = np.asarray(arrays[WEIGHT], np.float64)
        bias = np.asarray(arrays.get(BIAS, np.zeros(len(weight))), np.float64)
        if WHITENING not in arrays:
            return Linear(weight, bias)
        whitening = arrays[WHITENING]
        folded = weight * whitening if whitening.ndim == 1 else product(weight, whitening)
        coef = folded[:, :-1]
        moved = product(coef, arrays[CENTRE][:, None])[:, 0] if CENTRE in arrays else 0.0
        return Linear(coef, folded[:, -1] + bias - moved)

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n k"]:
        return product(features, self.coef.T) + self.intercept


@dataclass(frozen=True)
class Network:
    """Scores of any other model of the library, in float32 by JAX."""

    section: Mapping[str, Any]  # of the model
    arrays: Mapping[str, np.ndarray]
    inputs: int
    outputs: int

    @cached_property
    def compiled(self) -> Any:
        import jax

        model = network_of(self.section, self.inputs, self.outputs)
        params: dict[str, Any] = {}
        for path, array in self.arrays.items():
            _, layer, part = path.split("/")
            params.setdefault(layer, {})[part] = array
        return jax.jit(jax.vmap(partial(model.scores, params)))  # pyright: ignore[reportArgumentType]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "compiled"}

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n k"]:
        return as_matrix(self.compiled(np.asarray(features, np.float32)))


@dataclass(frozen=True)
class Own:
    """Scores of a model that the user made; it cannot be saved."""

    model: Any
    params: Any

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n k"]:
        import jax

        return as_matrix(jax.vmap(partial(self.model.scores, self.params))(np.asarray(features, np.float32)))


Predictor = Linear | Network | Own


def as_matrix(scores: Any) -> Float64[np.ndarray, "n k"]:
    found = np.asarray(scores, np.float64)
    return found.reshape(len(found), -1)


def predictor_of(section: Mapping[str, Any], arrays: Mapping[str, np.ndarray], inputs: int, outputs: int) -> Predictor:
    if section["kind"] in LINEAR:
        return Linear.of(arrays)
    params = {name: array for name, array in arrays.items() if name.startswith(PARAMS)}
    return Network(section, params, inputs, outputs)


def network_of(section: Mapping[str, Any], inputs: int, outputs: int) -> Model:
    from silodp.models import BUILT_FROM, build_model

    given: dict[str, Any] = {name: section[name] for name in section if name in BUILT_FROM}
    return build_model(
        section["kind"], inputs=inputs, outputs=outputs, hidden=tuple(section.get("hidden", ())), **given
    )


def check_arrays(
    section: ModelConfig, arrays: Mapping[str, np.ndarray], inputs: int, outputs: int, silos: int = 0
) -> None:
    """That a file holds the numbers of this model, all of them finite. silos: that have intercepts."""
    found = {name: array.shape for name, array in arrays.items()}
    whitening = found.get(WHITENING)
    if section.kind in LINEAR:
        wanted = linear_shapes(section, inputs, outputs, None if whitening is None else len(whitening), CENTRE in found)
    else:
        wanted = network_shapes(section, inputs, outputs)
    wanted |= {OFFSETS: (silos, outputs)} if silos else {}
    for name in sorted(wanted | found):
        if wanted.get(name) != found.get(name):
            raise ConfigError(f"{name!r} has shape {found.get(name)}, the model's has {wanted.get(name)}")
        if arrays[name].dtype.kind != "f" or not np.isfinite(arrays[name]).all():
            raise ConfigError(f"{name!r} holds NaN, infinity or no numbers")


def linear_shapes(
    section: ModelConfig, inputs: int, outputs: int, whitened: int | None, centred: bool
) -> dict[str, tuple[int, ...]]:
    """`whitened`: how many dimensions the map has; whitened features hold a constant, and no bias is beside it."""
    fits = {"logistic": outputs == 2, "softmax": outputs >= 2}.get(section.kind, outputs == 1)
    if not fits:
        raise ConfigError(f"model.kind = {section.kind!r} has not {outputs} outputs")
    rows = outputs if section.kind == "softmax" else 1
    if whitened is None:
        return {WEIGHT: (rows, inputs)} | ({BIAS: (rows,)} if section.bias else {})
    wide = inputs + 1
    maps = {WHITENING: (wide,) if whitened == 1 else (wide, wide)} | ({CENTRE: (inputs,)} if centred else {})
    return {WEIGHT: (rows, wide)} | maps


def network_shapes(section: ModelConfig, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    import jax

    try:
        model = network_of(section.model_dump(exclude_unset=True), inputs, outputs)
        layers: Any = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"no such model: model.{error}") from None
    return {f"{PARAMS}{layer}/{part}": array.shape for layer, parts in layers.items() for part, array in parts.items()}


def margins(scores: Float64[np.ndarray, "n k"]) -> Float64[np.ndarray, "n ..."]:
    """Of two classes the log odds of the second, else the scores of all."""
    if scores.shape[1] == 1:
        return scores[:, 0]
    return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores


def probabilities(margin: Float64[np.ndarray, "n ..."]) -> Float64[np.ndarray, "n k"]:
    from scipy.special import expit, softmax

    if margin.ndim == 2:
        return softmax(margin, axis=1)
    return np.column_stack([expit(-margin), expit(margin)])
