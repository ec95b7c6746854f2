"""Predictions for rows of the silos that a model was fitted on: each silo's intercept is added to the scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Float64, Int

from silodp.data.cells import labels
from silodp.data.inspection import silo_names
from silodp.errors import ConfigError
from silodp.front.records import column_of, rows_of


def added(
    offsets: Float[np.ndarray, "silos k"], names: Sequence[str], X: Any, silo: Any, scores: int
) -> Float64[np.ndarray, "n j"]:
    """To as many scores as the model has; one stands for two classes.

    silo: the column of X that names each row's silo, one label for each row, or the silo that all rows are of.
    """
    own = np.asarray(offsets, np.float64)[places(names, X, silo)]
    return own if own.shape[1] == scores else own[:, 1:] - own[:, :1]


def places(names: Sequence[str], X: Any, silo: Any) -> Int[np.ndarray, " n"]:
    """Of each row's silo among the names. Other labels are not told: the column may be the wrong one."""
    known = labels(names, case=True)
    found = [known.get(label, -1) for label in given(X, silo)]
    unknown = found.count(-1)
    if unknown:
        told = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise ConfigError(
            f"silo: {unknown} of {len(found)} rows are of no silo of the fit, which had {told}; leave silo out for them"
        )
    return np.array(found, np.int64)


def given(X: Any, silo: Any) -> list[str]:
    """A label for each row, as labels are compared."""
    if is_column(X, silo):
        silo = X[silo]
    values = [silo] * rows_of(X) if isinstance(silo, str) else column_of(silo, rows_of(X), "silo")
    return list(silo_names(pd.Series(values)))


def without(X: Any, silo: Any) -> Any:
    """Rows without the column of their silos, which is no feature."""
    return X.drop(columns=silo) if is_column(X, silo) else X


def is_column(X: Any, silo: Any) -> bool:
    return isinstance(silo, str) and isinstance(X, pd.DataFrame) and silo in X.columns
