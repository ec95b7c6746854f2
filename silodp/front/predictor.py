"""Scores of encoded rows, from trained parameters as they are saved.

Linear models are one matrix, whitening included. Its product is summed column by column in float64: a row has the same
score in every batch, process and year, to the last bit, and no JAX is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from silodp.registry import LINEAR

PARAMS, SCALING, CENTRE, WHITENING = "params/", "scaling", "centre", "whitening"


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
        weight = np.asarray(arrays["params/dense1/weight"], np.float64)
        bias = np.asarray(arrays.get("params/dense1/bias", np.zeros(len(weight))), np.float64)
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

        from silodp.models import build_model

        given: dict[str, Any] = {
            name: self.section[name] for name in self.section if name not in ("kind", "engine", "class_weights")
        }
        given["hidden"] = tuple(given.get("hidden", ()))
        model = build_model(self.section["kind"], inputs=self.inputs, outputs=self.outputs, **given)
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
    return Network(section, arrays, inputs, outputs)


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
