"""The front door: epsilon in, a model that can be used out, by scikit-learn's contract.

A fit simulates all silos on this machine and writes nothing. `save` writes a bundle that `load` reads, in another
process and another year.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from silodp.config import AlgorithmConfig, Config, ModelConfig, parse_config
from silodp.data.schema import Schema
from silodp.data.types import FederatedData, Note
from silodp.errors import ConfigError
from silodp.front import advice, bundle, export, records
from silodp.front.fitting import fitted
from silodp.front.predictor import margins, predictor_of, probabilities
from silodp.front.records import Rows, SchemaLike
from silodp.front.report import report
from silodp.run.progress import Progress, silent

if TYPE_CHECKING:
    from silodp.models import Model

LARGEST_SEED = 2**31 - 1


class SiloEstimator(BaseEstimator):
    """What classifier and regressor share."""

    epsilon: float | None
    delta: float | None
    trust: str
    algorithm: AlgorithmConfig | Mapping[str, Any] | str
    model: Model | ModelConfig | Mapping[str, Any] | str | None
    weights: str
    random_state: Any
    _task: str

    def fit(self, X: Any, y: Any = None, *, silo: Any = None, schema: SchemaLike | None = None) -> Self:
        """Train on all silos' records, in a simulation on this machine.

        Args:
            X: a DataFrame of raw rows, or an array of numbers about 1 in size.
            y: the target's column of X, or one label or number for each row; left out, the schema's target.
            silo: the column of X that names each record's silo, or one label for each row; left out, one silo.
            schema: path, dict or `Schema`: the public description of raw rows. Without one, features are used as given.
        """
        return fit_with(self, silent, X, y, silo, schema)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_predictor")

    def _rows(self, X: Any, y: Any, silo: Any) -> Rows:
        """Records of arrays or of a frame of numbers, as scikit-learn checks them."""
        rows = records.plain_rows(X, y, silo)
        if rows.targets is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        features, targets = self._checked(rows.features, rows.targets)
        return Rows(np.asarray(features, np.float32), targets, rows.silos)

    def _checked(self, X: Any, *y: Any, reset: bool = True) -> Any:
        numbers = {"y_numeric": self._task == "regression"} if y else {}
        try:
            return validate_data(self, X, *y, reset=reset, **numbers)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            if not any(words in str(error) for words in ("could not convert", "bytes/strings")):
                raise
        # scikit-learn quotes the cell
        raise ConfigError("X or y: holds text where numbers are needed; give schema=, or numbers")

    def _features(self, X: Any) -> Any:
        check_is_fitted(self)
        return self._checked(X, reset=False) if self.schema_ is None else self.schema_.features(X)

    def _scores(self, X: Any) -> Float64[np.ndarray, "n k"]:
        features = self._features(X)  # first: it tells when nothing is fitted
        return self._predictor.scores(features)

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
        """Write a bundle: model.safetensors, bundle.json, certificate.txt and report.txt. No seed and no history."""
        check_is_fitted(self)
        return bundle.write(Path(directory), self._told(), self._arrays, self.report_)

    def _told(self) -> dict[str, Any]:
        """All of the estimator that a bundle keeps, as JSON."""
        if not self._arrays:
            raise ConfigError("model: one of your own cannot be saved; use a kind of the library, e.g. model='mlp'")
        plain = lambda part: part.model_dump(exclude_unset=True) if hasattr(part, "model_dump") else part
        options = {name: plain(value) for name, value in self.get_params().items() if name != "random_state"}
        names = getattr(self, "feature_names_in_", None)
        return {
            "estimator": type(self).__name__,
            "options": options,
            "model": self._section,
            "schema": None if self.schema_ is None else self.schema_.to_dict(),
            "features": {"count": int(self.n_features_in_), "names": None if names is None else list(names)},
            "inputs": self._inputs,
            "plan": self.plan_fingerprint_,
            "certificate": self.certificate_,
        }

    def _take(self, told: Mapping[str, Any], arrays: dict[str, np.ndarray], text: str) -> None:
        """What a bundle kept; the reverse of `_told`."""
        self.schema_ = None if told["schema"] is None else Schema.read(told["schema"])
        self.n_features_in_, names = told["features"]["count"], told["features"]["names"]
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        self.certificate_, self.report_, self.plan_fingerprint_ = told["certificate"], text, told["plan"]
        self._section, self._inputs, self._arrays = told["model"], told["inputs"], arrays
        self._predictor = predictor_of(self._section, arrays, self._inputs, self._outputs)

    @property
    def _outputs(self) -> int:
        return 1

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

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        raise NotImplementedError

    def _columns(self) -> list[Any]:
        raise NotImplementedError


def fit_with(
    estimator: Any, progress: Progress, X: Any, y: Any = None, silo: Any = None, schema: SchemaLike | None = None
) -> Any:
    """`estimator.fit`, showing how far it is."""
    vars(estimator).pop("_predictor", None)  # a fit that fails leaves nothing to predict with
    known = None if schema is None else records.schema_for(schema, y, silo, estimator._task)
    rows = estimator._rows(X, y, silo) if known is None else records.encoded_rows(known, X, y, silo)
    estimator.schema_ = known
    if known is not None:
        estimator.feature_names_in_ = np.array(list(known.used), dtype=object)
        estimator.n_features_in_ = len(known.used)
    data = estimator._silos(rows)
    delta = advice.default_delta(sum(data.sizes)) if estimator.delta is None else estimator.delta
    config, own = config_of(estimator, data, delta)
    advice.warn(data, config.privacy.epsilon, delta)
    done = fitted(config, data, own, progress)
    estimator._arrays, estimator._predictor, estimator._section = done.arrays, done.predictor, done.section
    estimator._inputs, estimator.plan_fingerprint_ = data.input_shape[0], done.fingerprint
    estimator.history_, estimator.certificate_ = done.history, done.certificate
    title = (
        f"{type(estimator).__name__}: {config.model.kind if own is None else own.name} model by {done.algorithm}, "
        f"trust {config.privacy.trust}, silos: {len(data.silos)}, records: {sum(data.sizes)}"
    )
    estimator.report_ = report(title, done.certificate, estimator.delta is None)
    return estimator


def config_of(estimator: Any, data: FederatedData, delta: float) -> tuple[Config, Model | None]:
    """What the estimator asks for, and the model where it is an object."""
    from silodp.models import Model
    from silodp.plan.objects import config_from

    own = estimator.model if isinstance(estimator.model, Model) else None
    kind = estimator.model or default_kind(data)
    section = {} if own is not None else plain_section(kind, "kind")
    algorithm = {"weights": estimator.weights} | plain_section(estimator.algorithm, "name")
    config = config_from(
        algorithm=algorithm, channel=estimator.trust, epsilon=estimator.epsilon, delta=delta, model=section,
        seed=seed_of(estimator.random_state),
    )  # fmt: skip
    if algorithm.get("name") != "auto" or estimator.schema_ is None:
        return config, own
    whiten = {"scale": records.public_scale(estimator.schema_)}
    return parse_config(config.model_dump(exclude_unset=True) | {"whiten": whiten}), own


def plain_section(given: Any, key: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {key: given}
    if hasattr(given, "model_dump"):
        return given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping):
        what = {"name": "algorithm", "kind": "model"}[key]
        raise ConfigError(f"{what}: a {type(given).__name__}; give a name, or a dict of the {what} section")
    return dict(given)


def default_kind(data: FederatedData) -> str:
    return "linear" if not data.classes else "logistic" if len(data.classes) == 2 else "softmax"


def seed_of(random_state: Any) -> int:
    """A whole number as it is; from the operating system when there is none."""
    if random_state is None:
        return secrets.randbelow(LARGEST_SEED)
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(LARGEST_SEED))


class SiloClassifier(ClassifierMixin, SiloEstimator):
    """A private classifier across silos, from epsilon alone.

    A fit is a simulation on this machine: it shows what silos would get, and protects nobody (see `report_`).

    Args:
        epsilon: of every record, in every silo. None: not private. delta: min(1e-5, 1/(10 n)) when left out.
        trust: who is trusted: "untrusted" (nobody but one's own silo), "trusted" (the server), or another trust model.
        algorithm: "auto" leaves nothing to choose; or a name, a dict of the algorithm section, what
            `silodp.algorithms.Spider(...)` and the like give.
        model: logistic for two classes and softmax for more when left out; or a kind, a dict of the model section, a
            `silodp.Model`.
        weights: of the silos: by their "size", or "equal".
        random_state: seeds the simulation; a fresh seed when left out.

    After `fit`: `classes_`, `report_` (plain words), `certificate_`, `history_` (measured on the records, not private),
    `predict`, `predict_proba`, `score`, `save`, `to_sklearn`.

    Example:
        >>> import numpy as np, pandas as pd, silodp
        >>> rng = np.random.default_rng(0)
        >>> patients = pd.DataFrame({"age": rng.integers(20, 90, 600), "sex": rng.choice(["f", "m"], 600)})
        >>> patients["hospital"] = rng.choice(["north", "south", "lake"], 600)
        >>> patients["outcome"] = np.where(patients["age"] + rng.normal(0, 9, 600) > 55, "ill", "well")
        >>> schema = {
        ...     "target": {"name": "outcome", "classes": ["well", "ill"]},
        ...     "columns": {"age": {"kind": "number", "range": [0, 120]},
        ...                 "sex": {"kind": "category", "values": ["f", "m"]}},
        ... }
        >>> clf = silodp.SiloClassifier(epsilon=3.0, random_state=0)
        >>> clf = clf.fit(patients, "outcome", silo="hospital", schema=schema)
        >>> clf.predict(pd.DataFrame({"sex": ["m", "f"], "age": [85, 25]})).tolist()
        ['ill', 'well']
        >>> print(clf.report_.splitlines()[0])
        SiloClassifier: logistic model by dp-gd, trust untrusted, silos: 3, records: 600
    """

    _task = "classification"

    def __init__(
        self,
        epsilon: float | None = 1.0,
        *,
        delta: float | None = None,
        trust: str = "untrusted",
        algorithm: AlgorithmConfig | Mapping[str, Any] | str = "auto",
        model: Model | ModelConfig | Mapping[str, Any] | str | None = None,
        weights: Literal["size", "equal"] = "size",
        random_state: Any = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.trust = trust
        self.algorithm = algorithm
        self.model = model
        self.weights = weights
        self.random_state = random_state

    def _silos(self, rows: Rows) -> FederatedData:
        """Targets as numbers of `classes_`, which are sorted: scikit-learn's metrics rely on it."""
        if self.schema_ is not None:
            self.classes_, codes = sorted_classes(self.schema_)
            note = Note(True, f"encoded by the schema {self.schema_.fingerprint[:12]}")
            return records.federated(rows._replace(targets=codes[rows.targets]), names(self.classes_), (note,))
        targets = column_or_1d(rows.targets, warn=True)
        check_classification_targets(targets)
        self.classes_, codes = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ConfigError("y: one class only; give records of two or more classes")
        note = Note(True, f"{len(self.classes_)} labels that occur in the records, taken as known beforehand")
        found = rows._replace(targets=codes.astype(np.int32))
        return records.federated(found, names(self.classes_), (records.AS_GIVEN, note))

    @property
    def _outputs(self) -> int:
        return len(self.classes_)

    def decision_function(self, X: Any) -> Float64[np.ndarray, "n ..."]:
        """Log odds of the second of two classes, or a score for each of more."""
        return margins(self._scores(X))

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "n k"]:
        """Of every class, in the order of `classes_`. They are the model's own, not calibrated."""
        return probabilities(self.decision_function(X))

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """Labels as y or the schema gave them."""
        margin = self.decision_function(X)
        return self.classes_[margin.argmax(axis=1) if margin.ndim == 2 else (margin > 0).astype(int)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy; y may be a column's name, or left out with a schema. Measured on records: no epsilon covers it."""
        return float(super().score(*self._truth(X, y), sample_weight=sample_weight))

    def _original(self, targets: Any) -> Any:
        assert self.schema_ is not None
        return self.schema_.labels(targets)

    def _told(self) -> dict[str, Any]:
        return super()._told() | {"classes": self.classes_.tolist(), "classes_type": self.classes_.dtype.str}

    def _take(self, told: Mapping[str, Any], arrays: dict[str, np.ndarray], text: str) -> None:
        kind = told["classes_type"]
        self.classes_ = np.array(told["classes"], dtype=object if "O" in kind else kind)
        super()._take(told, arrays, text)

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        return export.one_margin(export.matrix_of(self))

    def _columns(self) -> list[Any]:
        coef, _ = self._linear()
        return list(self.classes_) if len(coef) > 1 else [self.classes_[1]]

    def to_sklearn(self) -> Any:
        """A `LogisticRegression` on encoded columns (`encoded_feature_names_`) that predicts the same."""
        return export.logistic(*self._linear(), self.classes_)


class SiloRegressor(RegressorMixin, SiloEstimator):
    """A private linear regression across silos, from epsilon alone.

    The target needs a public range, in the schema or as `target_range`: a range found in records would tell about them.

    Args:
        epsilon, delta, trust, algorithm, weights, random_state: as for `SiloClassifier`.
        model: linear when left out; or a kind, a dict of the model section, a `silodp.Model`.
        target_range: (lowest, highest) that the target can have, known beforehand; what lies outside is clipped. Not
            needed with a schema.

    Example:
        >>> import numpy as np, silodp
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(600, 2))
        >>> y = 50 + 10 * X[:, 0] + rng.normal(size=600)
        >>> model = silodp.SiloRegressor(epsilon=3.0, target_range=(0, 100), random_state=0)
        >>> model = model.fit(X, y, silo=rng.choice(["a", "b"], 600))
        >>> model.score(X, y) > 0.9, model.predict(X[:3]).shape
        (True, (3,))
    """

    _task = "regression"

    def __init__(
        self,
        epsilon: float | None = 1.0,
        *,
        delta: float | None = None,
        trust: str = "untrusted",
        algorithm: AlgorithmConfig | Mapping[str, Any] | str = "auto",
        model: Model | ModelConfig | Mapping[str, Any] | str | None = None,
        weights: Literal["size", "equal"] = "size",
        target_range: Sequence[float] | None = None,
        random_state: Any = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.trust = trust
        self.algorithm = algorithm
        self.model = model
        self.weights = weights
        self.target_range = target_range
        self.random_state = random_state

    def _silos(self, rows: Rows) -> FederatedData:
        if self.schema_ is not None:
            if self.target_range is not None:
                raise ConfigError("target_range: the schema has the target's range; leave it out")
            note = Note(True, f"encoded by the schema {self.schema_.fingerprint[:12]}")
            return records.federated(rows, (), (note,))
        targets = column_or_1d(rows.targets, warn=True).astype(np.float64)
        centre, half = self._centre_and_half()
        scaled = np.clip((targets - centre) / half, -1, 1).astype(np.float32)
        note = Note(True, "targets clipped to target_range")
        return records.federated(rows._replace(targets=scaled), (), (records.AS_GIVEN, note))

    def _centre_and_half(self) -> tuple[float, float]:
        if self.schema_ is not None and self.schema_.target.range is not None:
            lowest, highest = self.schema_.target.range
        else:
            lowest, highest = export.interval_of(self.target_range)
        return (lowest + highest) / 2, (highest - lowest) / 2

    def predict(self, X: Any) -> Float64[np.ndarray, " n"]:
        """Numbers in the target's own unit."""
        return self._original(self._scores(X)[:, 0])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R^2; y may be a column's name, or left out with a schema. Measured on records: no epsilon covers it."""
        return float(super().score(*self._truth(X, y), sample_weight=sample_weight))

    def _original(self, targets: Any) -> Any:
        centre, half = self._centre_and_half()
        return np.asarray(targets, np.float64) * half + centre

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        coef, intercept = export.matrix_of(self)
        centre, half = self._centre_and_half()
        return coef * half, intercept * half + centre

    def _columns(self) -> list[Any]:
        return ["coefficient"]

    def to_sklearn(self) -> Any:
        """A `LinearRegression` on encoded columns (`encoded_feature_names_`) that predicts the same."""
        return export.linear(*self._linear())


def sorted_classes(schema: Schema) -> tuple[np.ndarray, Shaped[np.ndarray, " k"]]:
    """Classes in sorted order where they can be sorted, and the new number of each of the schema's."""
    assert schema.target.classes is not None
    classes = schema.labels(np.arange(len(schema.target.classes)))
    order = np.arange(len(classes)) if classes.dtype == object else np.argsort(classes)
    return classes[order], np.argsort(order).astype(np.int32)


def names(classes: np.ndarray) -> tuple[str, ...]:
    return tuple(map(str, classes))


ESTIMATORS = {"SiloClassifier": SiloClassifier, "SiloRegressor": SiloRegressor}


def load(directory: Path | str) -> SiloClassifier | SiloRegressor:
    """The estimator that `save` wrote, ready to predict on raw rows exactly as the one that was fitted.

    Args:
        directory: of the bundle.

    Returns:
        The `SiloClassifier` or `SiloRegressor`, without its history and its seed, which no bundle holds.

    Example:
        >>> import numpy as np, silodp, tempfile
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(600, 2))
        >>> clf = silodp.SiloClassifier(epsilon=3.0, random_state=0).fit(X, X[:, 0] > 0)
        >>> folder = clf.save(tempfile.mkdtemp())
        >>> bool((silodp.load(folder).predict_proba(X) == clf.predict_proba(X)).all())
        True
    """
    told, arrays, text = bundle.read(Path(directory), set(ESTIMATORS))
    estimator = ESTIMATORS[told["estimator"]](**told["options"])
    estimator._take(told, arrays, text)
    return estimator
