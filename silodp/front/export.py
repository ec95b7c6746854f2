"""Linear models as others know them: scikit-learn's, and a table of coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from silodp.errors import ConfigError
from silodp.front.predictor import Linear

Matrix = tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]


def matrix_of(estimator: Any) -> Matrix:
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    predictor = estimator._predictor
    if not isinstance(predictor, Linear):
        raise ConfigError("model: only linear, ridge, logistic and softmax have coefficients; use predict, or save")
    return predictor.coef, predictor.intercept


def one_margin(matrix: Matrix) -> Matrix:
    """Of two classes one score is enough: what the second has more than the first."""
    coef, intercept = matrix
    return (coef[1:] - coef[:1], intercept[1:] - intercept[:1]) if len(coef) == 2 else matrix


def logistic(coef: Float64[np.ndarray, "k d"], intercept: Float64[np.ndarray, " k"], classes: np.ndarray) -> Any:
    from sklearn.linear_model import LogisticRegression

    return _filled(LogisticRegression(), coef, intercept, classes_=classes, n_iter_=np.array([0]))


def linear(coef: Float64[np.ndarray, "k d"], intercept: Float64[np.ndarray, " k"]) -> Any:
    from sklearn.linear_model import LinearRegression

    return _filled(LinearRegression(), coef[0], float(intercept[0]))


def _filled(model: Any, coef: np.ndarray, intercept: Any, **more: Any) -> Any:
    model.coef_, model.intercept_, model.n_features_in_ = coef.copy(), intercept, coef.shape[-1]
    for name, value in more.items():
        setattr(model, name, value)
    return model


def raw_table(
    coef: Float64[np.ndarray, "k d"],
    intercept: Float64[np.ndarray, " k"],
    names: Sequence[str],
    constants: Mapping[str, tuple[float, float]],
    columns: Sequence[Any],
) -> pd.DataFrame:
    """Rows by encoded name, then the intercept; constants: (centre, scale) of those that are a raw number scaled."""
    centres, scales = (np.array([constants.get(name, (0.0, 1.0))[i] for name in names]) for i in (0, 1))
    raw = coef / scales
    shifted = intercept - raw @ centres
    index = pd.Index([*names, "intercept"], name="feature")
    return pd.DataFrame(np.vstack([raw.T, shifted]), index=index, columns=list(columns))


def interval_of(given: Any) -> tuple[float, float]:
    if given is None:
        raise ConfigError(
            "target_range is missing: give the lowest and highest target, known beforehand, or a schema with its range"
        )
    numbers = [float(x) for x in given if isinstance(x, int | float | np.number)] if np.shape(given) == (2,) else []
    if len(numbers) != 2 or not 0 < numbers[1] - numbers[0] < math.inf:
        raise ConfigError("target_range: give two finite numbers, the lowest first, e.g. (0, 100)")
    return numbers[0], numbers[1]
