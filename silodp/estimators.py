"""The front door: epsilon in, a model that can be used out, by scikit-learn's contract.

A fit simulates all silos on this machine and writes nothing. `save` writes a bundle that `load` reads, in another
process and another year.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float64, Shaped
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from silodp.config import AlgorithmConfig, ModelConfig
from silodp.data.types import FederatedData, Note
from silodp.errors import ConfigError
from silodp.front import bundle, export, records, silos
from silodp.front.estimator import SiloEstimator
from silodp.front.labels import labels_of, names, sorted_classes, texts_among
from silodp.front.predictor import margins, probabilities
from silodp.front.records import Rows
from silodp.plan import advice

if TYPE_CHECKING:
    from silodp.models import Model


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
        weights: of the silos: by their "size", or "equal". None: by size, unless the algorithm asks for others.
        held_out: part of every silo's records that is not trained on, for a private look at the model in `report_`;
            "auto": a tenth where that look is accurate to 0.02, else none; None: none.
        class_weight: how much records of a class count, as {label: weight}, known beforehand; others count 1. The
            clip norm bounds what is weighted, so the heaviest class counts fully and the others less.
        largest_weight: that `sample_weight` may hold, known beforehand; larger ones count as it.
        silo_intercepts: every silo gets an intercept of its own, made of its private label rates (a twentieth of the
            budget), which everybody then knows. `predict(X, silo=...)` uses it; without `silo` all have the common one.
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
    # Unless a user asks for it, `silo` is routed to `fit` alone.
    __metadata_request__predict: ClassVar = {"silo": False}
    __metadata_request__predict_proba: ClassVar = {"silo": False}
    __metadata_request__decision_function: ClassVar = {"silo": False}
    __metadata_request__score: ClassVar = {"silo": False}

    def __init__(
        self,
        epsilon: float | None = 1.0,
        *,
        delta: float | None = None,
        trust: str = "untrusted",
        algorithm: AlgorithmConfig | Mapping[str, Any] | str = "auto",
        model: Model | ModelConfig | Mapping[str, Any] | str | None = None,
        weights: Literal["size", "equal"] | None = None,
        held_out: float | str | None = "auto",
        class_weight: Mapping[Any, float] | None = None,
        largest_weight: float = 1.0,
        silo_intercepts: bool = False,
        random_state: Any = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.trust = trust
        self.algorithm = algorithm
        self.model = model
        self.weights = weights
        self.held_out = held_out
        self.class_weight = class_weight
        self.largest_weight = largest_weight
        self.silo_intercepts = silo_intercepts
        self.random_state = random_state

    def _silos(self, rows: Rows) -> FederatedData:
        """Targets as numbers of `classes_`, which are sorted: scikit-learn's metrics rely on it."""
        if self.schema_ is not None:
            self.classes_, codes = sorted_classes(self.schema_)
            note = Note(True, f"encoded by the schema {self.schema_.fingerprint[:12]}")
            return records.federated(rows._replace(targets=codes[rows.targets]), names(self.classes_), (note,))
        targets = column_or_1d(rows.targets, warn=True)
        if len(texts_among(targets)) > 1:
            raise ConfigError("y: texts beside numbers; give labels of one kind")
        check_classification_targets(targets)
        self.classes_, codes = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ConfigError("y: one class only; give records of two or more classes")
        advice.warn_of_numbers(self.classes_)
        note = Note(True, f"{len(self.classes_)} labels that occur in the records, taken as known beforehand")
        found = rows._replace(targets=codes.astype(np.int32))
        return records.federated(found, names(self.classes_), (records.AS_GIVEN, note))

    @property
    def _outputs(self) -> int:
        return len(self.classes_)

    def _class_weights(self) -> list[float] | None:
        """In the order of `classes_`."""
        given = self.class_weight
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(
                "class_weight: give {label: weight}, known beforehand; 'balanced' would count the classes of records, "
                "which no epsilon covers"
            )
        known = self.classes_.tolist()
        unknown = [label for label in given if label not in known]
        if unknown:
            raise ConfigError(
                f"class_weight: {len(unknown)} of its labels are no classes of the target; leave them out"
            )
        if not all(isinstance(w, int | float | np.number) and 0 < w < math.inf for w in given.values()):
            raise ConfigError("class_weight: give positive numbers")
        return [float(given.get(label, 1.0)) for label in known]

    def _stages(self) -> dict[str, Any]:
        return {"intercepts": {}} if self.silo_intercepts else {}

    def decision_function(self, X: Any, silo: Any = None) -> Float64[np.ndarray, "n ..."]:
        """Log odds of the second of two classes, or a score for each of more. `silo`: see `predict`."""
        return margins(self._scores(X, silo))

    def predict_proba(self, X: Any, silo: Any = None) -> Float64[np.ndarray, "n k"]:
        """Of every class, in the order of `classes_`; the model's own, not calibrated. `silo`: see `predict`."""
        return probabilities(self.decision_function(X, silo))

    def predict(self, X: Any, silo: Any = None) -> Shaped[np.ndarray, " n"]:
        """Labels as y or the schema gave them.

        Args:
            X: rows as `fit` took them.
            silo: whose rows they are, for a model with `silo_intercepts`: the column of X that names each row's silo,
                one label for each row, or the silo that all rows are of. Left out: the common model.
        """
        margin = self.decision_function(X, silo)
        return self.classes_[margin.argmax(axis=1) if margin.ndim == 2 else (margin > 0).astype(int)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, silo: Any = None) -> float:
        """Accuracy; y may be a column's name, or left out with a schema. Measured on records: no epsilon covers it."""
        from sklearn.metrics import accuracy_score

        rows, truth = self._truth(X, y)
        if self.schema_ is None and texts_among(truth) != texts_among(self.classes_):  # scikit-learn would quote them
            raise ConfigError("y: texts where fit had numbers, or the other way round; give labels as fit had them")
        found = self.predict(rows, None if silo is None else silos.given(X, silo))
        return float(accuracy_score(truth, found, sample_weight=sample_weight))

    def _original(self, targets: Any) -> Any:
        assert self.schema_ is not None
        return self.schema_.labels(targets)

    def _told(self) -> dict[str, Any]:
        return super()._told() | {"classes": self.classes_.tolist(), "classes_type": self.classes_.dtype.str}

    def _asked(self) -> dict[str, Any]:
        if self.class_weight is None:
            return super()._asked()
        # JSON's keys are texts, labels may be numbers
        return super()._asked() | {"class_weight": [[label, weight] for label, weight in self.class_weight.items()]}

    def _take(self, told: Mapping[str, Any], arrays: dict[str, np.ndarray], text: str) -> None:
        self.classes_ = labels_of(told["classes"], told["classes_type"])
        super()._take(told, arrays, text)

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        return export.one_margin(export.matrix_of(self))

    def _columns(self) -> list[Any]:
        coef, _ = self._linear()
        return list(self.classes_) if len(coef) > 1 else [self.classes_[1]]

    def to_sklearn(self, *, raw: bool = False) -> Any:
        """A `LogisticRegression` on encoded columns (`encoded_feature_names_`) that predicts the same.

        raw: on the table's own columns instead, where all are plain numbers; the same within their public ranges.
        """
        return export.logistic(*(self._raw_linear() if raw else self._linear()), self.classes_)


class SiloRegressor(RegressorMixin, SiloEstimator):
    """A private linear regression across silos, from epsilon alone.

    The target needs a public range, in the schema or as `target_range`: a range found in records would tell about them.

    Args:
        epsilon, delta, trust, algorithm, weights, held_out, largest_weight, random_state: as for `SiloClassifier`.
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
        weights: Literal["size", "equal"] | None = None,
        held_out: float | str | None = "auto",
        largest_weight: float = 1.0,
        target_range: Sequence[float] | None = None,
        random_state: Any = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.trust = trust
        self.algorithm = algorithm
        self.model = model
        self.weights = weights
        self.held_out = held_out
        self.largest_weight = largest_weight
        self.target_range = target_range
        self.random_state = random_state

    def _silos(self, rows: Rows) -> FederatedData:
        self._bounds = self._asked_bounds()
        if self.schema_ is not None:
            if self.target_range is not None:
                raise ConfigError("target_range: the schema has the target's range; leave it out")
            note = Note(True, f"encoded by the schema {self.schema_.fingerprint[:12]}")
            return records.federated(rows, (), (note,))
        targets = column_or_1d(records.numbers_of(rows.targets, "y"), warn=True)
        centre, half = self._centre_and_half()
        scaled = np.clip((targets - centre) / half, -1, 1).astype(np.float32)
        note = Note(True, "targets clipped to target_range")
        return records.federated(rows._replace(targets=scaled), (), (records.AS_GIVEN, note))

    def _asked_bounds(self) -> tuple[float, float]:
        if self.schema_ is not None and self.schema_.target.range is not None:
            return self.schema_.target.range
        return export.interval_of(self.target_range)

    def _take(self, told: Mapping[str, Any], arrays: dict[str, np.ndarray], text: str) -> None:
        super()._take(told, arrays, text)
        self._bounds = self._asked_bounds()

    def _centre_and_half(self) -> tuple[float, float]:
        lowest, highest = self._bounds  # those of the fit, whatever has been set since
        return (lowest + highest) / 2, (highest - lowest) / 2

    def predict(self, X: Any) -> Float64[np.ndarray, " n"]:
        """Numbers in the target's own unit."""
        return self._original(self._scores(X)[:, 0])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R^2; y may be a column's name, or left out with a schema. Measured on records: no epsilon covers it."""
        rows, truth = self._truth(X, y)
        return float(super().score(rows, records.numbers_of(truth, "y"), sample_weight=sample_weight))

    def _original(self, targets: Any) -> Any:
        centre, half = self._centre_and_half()
        return np.asarray(targets, np.float64) * half + centre

    def _linear(self) -> tuple[Float64[np.ndarray, "k d"], Float64[np.ndarray, " k"]]:
        coef, intercept = export.matrix_of(self)
        centre, half = self._centre_and_half()
        return coef * half, intercept * half + centre

    def _columns(self) -> list[Any]:
        return ["coefficient"]

    def to_sklearn(self, *, raw: bool = False) -> Any:
        """A `LinearRegression` on encoded columns (`encoded_feature_names_`) that predicts the same.

        raw: on the table's own columns instead, where all are plain numbers; the same within their public ranges.
        """
        return export.linear(*(self._raw_linear() if raw else self._linear()))


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
    told, arrays, text = bundle.read(Path(directory), ESTIMATORS)
    options = dict(told["options"])
    if options.get("class_weight") is not None:
        options["class_weight"] = dict(options["class_weight"])
    estimator = ESTIMATORS[told["estimator"]](**options)
    estimator._take(told, arrays, text)
    return estimator
