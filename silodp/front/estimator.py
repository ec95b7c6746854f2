"""What classifier and regressor share: the way of a fit, checks of rows, and what a bundle keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from jaxtyping import Float64
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from silodp.config import AlgorithmConfig, ModelConfig
from silodp.data.schema import Schema
from silodp.data.types import FederatedData
from silodp.errors import ConfigError
from silodp.front import bundle, export, onnx_out, records, silos
from silodp.front.asked import check_options, config_of, knots_for
from silodp.front.fitting import fitted
from silodp.front.predictor import OFFSETS, predictor_of
from silodp.front.records import Rows, SchemaLike
from silodp.front.report import report
from silodp.plan import advice
from silodp.report.notebook import Certificate, of_story
from silodp.report.story import Story
from silodp.run.progress import Progress, silent

if TYPE_CHECKING:
    from silodp.models import Model


# Errors of scikit-learn that quote cells, rows or names of columns, by their words, and what is told in their place.
TEXT = "X or y: holds text where numbers are needed; give schema=, or numbers"
OTHER = "X: other columns than at fit, not named because the first line looks like a record"
QUOTING = {
    "could not convert": TEXT,
    "bytes/strings": TEXT,
    "feature names": OTHER,
    "Expected 2D array": "X: Expected 2D array, a row a record. Reshape your data: X.reshape(1, -1) holds one record",
    "Complex data not supported": "X or y: Complex data not supported; give real numbers",
}


class SiloEstimator(BaseEstimator):
    """All but what classes and numbers differ in."""

    epsilon: float | None
    delta: float | None
    trust: str
    algorithm: AlgorithmConfig | Mapping[str, Any] | str
    model: Model | ModelConfig | Mapping[str, Any] | str | None
    weights: str | None
    held_out: float | str | None
    largest_weight: float
    random_state: Any
    _task: str

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        silo: Any = None,
        schema: SchemaLike | None = None,
        sample_weight: Any = None,
    ) -> Self:
        """Train on all silos' records, in a simulation on this machine.

        Args:
            X: a DataFrame of raw rows, or an array of numbers about 1 in size.
            y: the target's column of X, or one label or number for each row; left out, the schema's target.
            silo: the column of X that names each record's silo, or one label for each row; left out, one silo.
            schema: path, dict or `Schema`: the public description of raw rows. Without one, features are used as given.
            sample_weight: how much each record counts, from 0 to `largest_weight`; left out, all count the same.
        """
        return fit_with(self, silent, X, y, silo, schema, sample_weight)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_predictor")

    def _html_repr(self) -> str:
        """scikit-learn's diagram and, once fitted, the report: what a notebook shows."""
        diagram: str = super()._html_repr()  # pyright: ignore[reportAttributeAccessIssue]
        if not self.__sklearn_is_fitted__():
            return diagram
        title, history = self.report_.partition("\n")[0], getattr(self, "history_", ())  # no bundle holds a history
        return diagram + of_story(Story(title, self.certificate_, history=history, held_out=self.held_out_))

    def _rows(self, X: Any, y: Any, silo: Any) -> Rows:
        """Records of arrays or of a frame of numbers, as scikit-learn checks them."""
        rows = records.plain_rows(X, y, silo)
        if rows.targets is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        records.check_there(rows.targets)
        features, targets = self._checked(rows.features, rows.targets)
        return Rows(np.asarray(features, np.float32), targets, rows.silos)

    def _checked(self, X: Any, *y: Any, reset: bool = True) -> Any:
        numbers = {"y_numeric": self._task == "regression"} if y else {}
        try:
            return validate_data(self, X, *y, reset=reset, **numbers)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            columns = [str(name) for name in getattr(X, "columns", ())]
            said = next((own for theirs, own in QUOTING.items() if theirs in str(error)), None)
            if said is None or (said is OTHER and not records.looks_like_a_record(columns)):
                raise
        raise ConfigError(said)

    def _features(self, X: Any) -> Any:
        check_is_fitted(self)
        return self._checked(X, reset=False) if self.schema_ is None else self.schema_.features(X)

    def _scores(self, X: Any, silo: Any = None) -> Float64[np.ndarray, "n k"]:
        features = self._features(silos.without(X, silo))  # first: it tells when nothing is fitted
        scores = self._predictor.scores(features)
        if silo is None:
            return scores
        if self._silo_names is None:
            raise ConfigError("silo: this model has no intercepts of silos; leave it out, or fit with silo_intercepts")
        return scores + silos.added(self._arrays[OFFSETS], self._silo_names, X, silo, scores.shape[1])

    def _truth(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Rows to predict and what is true of them, where y may be a column's name."""
        check_is_fitted(self)
        if self.schema_ is not None:
            if isinstance(y, str) and y != self.schema_.target.name:
                raise ConfigError(f"y = {y!r}: the schema's target is {self.schema_.target.name!r}; give this one")
            table = records.with_target(self.schema_, X, y)
            return table, self._original(self.schema_.targets(table))
        if isinstance(y, str):
            records.check_column(X, y, "y")
            columns = getattr(self, "feature_names_in_", None)
            return (X.drop(columns=y) if columns is None else X[list(columns)]), X[y]
        return X, y

    def _original(self, targets: Any) -> Any:
        raise NotImplementedError

    def save(self, directory: Path | str) -> Path:
        """Write a bundle: model, bundle.json, certificate.txt, report.txt, report.html. No seed and no history."""
        check_is_fitted(self)
        return bundle.write(Path(directory), self._told(), self._arrays, self.report_)

    def _told(self) -> dict[str, Any]:
        """All of the estimator that a bundle keeps, as JSON."""
        if not self._arrays:
            raise ConfigError("model: one of your own cannot be saved; use a kind of the library, e.g. model='mlp'")
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "options": self._options,
            "model": self._section,
            "schema": None if self.schema_ is None else self.schema_.to_dict(),
            "features": {"count": int(self.n_features_in_), "names": None if names is None else list(names)},
            "inputs": self._inputs,
            "plan": self.plan_fingerprint_,
            "certificate": self.certificate_,
            "held_out": self.held_out_,
            **({} if self._silo_names is None else {"silos": list(self._silo_names)}),
        }

    def _asked(self) -> dict[str, Any]:
        """The options of a fit, as JSON; they can be set to others afterwards, which say nothing about this model."""
        plain = lambda part: part.model_dump(exclude_unset=True) if hasattr(part, "model_dump") else part
        return {name: plain(value) for name, value in self.get_params().items() if name != "random_state"}

    def _take(self, told: Mapping[str, Any], arrays: dict[str, np.ndarray], text: str) -> None:
        """What a bundle kept; the reverse of `_told`."""
        self.schema_ = None if told["schema"] is None else Schema.read(told["schema"])
        self.n_features_in_, names = told["features"]["count"], told["features"]["names"]
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        self.certificate_ = None if told["certificate"] is None else Certificate(told["certificate"])
        self.report_, self.plan_fingerprint_ = text, told["plan"]
        self.held_out_, self._silo_names = told.get("held_out"), told.get("silos")
        self._section, self._inputs, self._arrays = told["model"], told["inputs"], arrays
        self._options = told["options"]
        self._predictor = predictor_of(self._section, arrays, self._inputs, self._outputs)

    @property
    def _outputs(self) -> int:
        return 1

    def _class_weights(self) -> list[float] | None:
        return None

    def _stages(self) -> dict[str, Any]:
        """Sections of the config that the estimator's own options ask for."""
        return {}

    @property
    def encoded_feature_names_(self) -> tuple[str, ...]:
        """Of the columns that the model sees: those of the schema, or X's own."""
        if self.schema_ is not None:
            return self.schema_.feature_names
        names = getattr(self, "feature_names_in_", None)
        return tuple(f"x{i}" for i in range(self.n_features_in_)) if names is None else tuple(names)

    def raw_coefficients(self) -> pd.DataFrame:
        """Coefficients of a linear model, with those of numbers in the columns' own units.

        A row for each encoded column and one for the intercept. A number out of its public range counts as the range's
        end; categories, flags, days and orders stay as they are encoded.
        """
        coef, intercept = self._linear()
        constants = {} if self.schema_ is None else records.raw_constants(self.schema_)
        return export.raw_table(coef, intercept, self.encoded_feature_names_, constants, self._columns())

    def to_onnx(self, path: Path | str) -> Path:
        """Write the model as an ONNX graph on encoded columns (`encoded_feature_names_`); extra `onnx`."""
        check_is_fitted(self)
        return onnx_out.write(self, Path(path))

    def _raw_linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        """Coefficients for raw rows, where every column is a plain number."""
        constants = {} if self.schema_ is None else records.raw_constants(self.schema_)
        other = [name for name in self.encoded_feature_names_ if self.schema_ is not None and name not in constants]
        if other:
            raise ConfigError(
                f"to_sklearn: raw = True: {other[0]!r} is no plain number of the table; leave raw out, and encode rows "
                "with schema_.features (numbers stay plain when `model` is named, as in model='linear')"
            )
        table = self.raw_coefficients().to_numpy()
        return table[:-1].T, table[-1]

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        raise NotImplementedError

    def _columns(self) -> list[Any]:
        raise NotImplementedError


def fit_with(
    estimator: Any,
    progress: Progress,
    X: Any,
    y: Any = None,
    silo: Any = None,
    schema: SchemaLike | None = None,
    sample_weight: Any = None,
) -> Any:
    """`estimator.fit`, showing how far it is."""
    vars(estimator).pop("_predictor", None)  # a fit that fails leaves nothing to predict with
    check_options(estimator)
    known = None if schema is None else records.schema_for(schema, y, silo, estimator._task)
    data, delta = described(estimator, known, X, y, silo, sample_weight)
    config, own = config_of(estimator, data, delta)
    knots = knots_for(estimator, config, data)
    if knots and known is not None:
        known = known.in_pieces(knots)
        data, delta = described(estimator, known, X, y, silo, sample_weight)
        config, own = config_of(estimator, data, delta)
    advice.warn(data, config.privacy.epsilon, delta, config.algorithm)
    done = fitted(config, data, own, progress)
    if known is not None:
        estimator.schema_ = known.closed(dict(zip(known.private, done.ranges, strict=True)))
    estimator._arrays, estimator._predictor, estimator._section = done.arrays, done.predictor, done.section
    estimator._inputs, estimator.plan_fingerprint_ = data.input_shape[0], done.fingerprint
    estimator._silo_names = None if config.intercepts is None else [silo.name for silo in data.silos]
    estimator.history_, estimator._options = done.history, estimator._asked()
    estimator.certificate_ = None if done.certificate is None else Certificate(done.certificate)
    title = (
        f"{type(estimator).__name__}: {config.model.kind if own is None else own.name} model by {done.algorithm}, "
        f"trust {config.privacy.trust}, silos: {len(data.silos)}, records: {sum(data.sizes)}"
    )
    estimator.held_out_ = done.held_out
    lines = f"Numbers of public ranges are broken lines of {knots} knots: records are enough for an additive model.\n"
    estimator.report_ = report(title, done.certificate, estimator.delta is None, done.held_out) + (
        lines if knots else ""
    )
    return estimator


def described(
    estimator: Any, known: Schema | None, X: Any, y: Any, silo: Any, sample_weight: Any
) -> tuple[FederatedData, float]:
    """The records of all silos, and delta; the estimator learns what its rows are."""
    rows = estimator._rows(X, y, silo) if known is None else records.encoded_rows(known, X, y, silo)
    rows = rows._replace(weights=records.weights_of(sample_weight, len(rows.targets), estimator.largest_weight))
    estimator.schema_ = known
    if known is not None:
        estimator.feature_names_in_ = np.array(list(known.used), dtype=object)
        estimator.n_features_in_ = len(known.used)
    data = estimator._silos(rows)
    return data, advice.default_delta(sum(data.sizes)) if estimator.delta is None else estimator.delta
