"""Models: initial parameters, the loss of one record, predictions, and a metric.

A record is (features, target); for a model from `from_loss`, each may be a dict or tuple of arrays. All kinds are built
on `silodp.gradients.dense` and `conv2d`, so that the structured engine takes them. Parameters are a dictionary of
layers, each {"weight": ..., "bias": ...}.

| kind | scores | loss of one record | metric |
|---|---|---|---|
| linear | w.a + b | (score - target)^2 | mse |
| ridge | w.a + b | (score - target)^2 + regulariser/2 * sum x^2 | mse |
| logistic | w.a + b | log(1 + exp(-label * score)) [+ regulariser * sum x^2/(1+x^2)]; label -1/+1 or 0/1 | accuracy |
| softmax | W a + b | cross-entropy; target a class number | accuracy |
| mlp | hidden layers of `activation` | squared or cross-entropy | mse or accuracy |
| cnn | LeNet as in PyTorch's CIFAR-10 tutorial, images, channels first or last | cross-entropy | accuracy |

An mlp and a cnn may have normalised hidden layers (`norm`), any kind several views of each image (`views`).

Regularisers run over all parameters, biases included. A regulariser depends on no record: its gradient is added after
clipping and noise (`Model.penalty`), so the clip norm bounds what records say and nothing else. The papers have it
inside every record's loss; `regulariser_clip = "inside"` does as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from silodp import registry
from silodp.config import ModelConfig
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.gradients import Regularised
from silodp.gradients.softplus import softplus
from silodp.networks import NORMS, Params, Shapes, between, cnn_scores, cnn_shapes, dense_scores, dense_shapes
from silodp.records import Kind, has_weight, moved, target_of
from silodp.views import with_views
from silodp.weights import weighted

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "softplus": softplus,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}
KINDS = tuple(registry.OWN["model"])
BUILT_FROM = {
    "activation", "norm", "views", "loss", "regulariser", "regulariser_clip", "bias", "initial", "initial_scale",
}  # fmt: skip
INITIALS = ("default", "zeros", "normal")
NETWORKS = ("mlp", "cnn")


@dataclass(frozen=True)
class Model:
    """`init(key)` and `loss(params, record)` are all that training needs; the rest is for evaluation.

    Args:
        name: for reports. init: gives parameters for a random key. loss: of one record (features, target).
        scores: of one record's features. metric: "accuracy" or "mse", of the scores.
        penalty: a function of the parameters that is added to the mean loss; outside of what is clipped.
        weight: of one record: what its clipped gradient counts, from 0 to 1 (silodp.weights). None: all count 1.

    Example:
        >>> import jax, silodp
        >>> model = silodp.build_model("logistic", inputs=3)
        >>> isinstance(model, silodp.Model), model.predict(model.init(jax.random.key(0)), jax.numpy.ones((2, 3))).shape
        (True, (2,))
    """

    name: str
    init: Callable[[Key[Array, ""]], PyTree]
    loss: Callable[[PyTree, PyTree], Float[Array, ""]]
    scores: Callable[[PyTree, PyTree], PyTree[Array]] | None = None
    metric: str | None = None  # "accuracy" or "mse"
    penalty: Callable[[PyTree], Float[Array, ""]] | None = None
    weight: Callable[[PyTree], Float[Array, ""]] | None = None

    @property
    def inside(self) -> Model:
        """The same model with its penalty in every record's loss."""
        return self if self.penalty is None else replace(self, loss=Regularised(self.loss, self.penalty), penalty=None)

    def predict(self, params: PyTree, features: PyTree[Array]) -> PyTree[Array]:
        """Class numbers (0/1 for one score) if the metric is accuracy, else the scores themselves."""
        return self._predicted(params, features, None)

    def _predicted(self, params: PyTree, features: PyTree[Array], targets: PyTree[Array] | None) -> PyTree[Array]:
        if self.scores is None:
            raise ValueError(f"scores: model {self.name!r} was given a loss only; it cannot predict")
        _check_arrays(features)
        scores = moved(jax.vmap(partial(self.scores, params))(features), targets)
        return jax.tree.map(_class_numbers, scores) if self.metric == "accuracy" else scores

    def evaluate(self, params: PyTree, features: PyTree[Array], targets: PyTree[Array]) -> Float[Array, ""]:
        """Accuracy, or the mean squared error; of several targets, the mean of theirs."""
        predicted, targets = self._predicted(params, features, targets), target_of(targets)
        if jax.tree.structure(predicted) != jax.tree.structure(targets):
            raise ValueError(f"scores: model {self.name!r} must give the same dict or tuple as the targets are")
        measured = _right if self.metric == "accuracy" else _squared_error
        each = jax.tree.leaves(jax.tree.map(measured, predicted, targets))
        return sum(each[1:], each[0]) / jnp.float32(len(each))


def _check_arrays(features: PyTree) -> None:
    """JAX quotes what it cannot take, hence a table's rows."""
    for leaf in jax.tree.leaves(features):
        numbers = isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub")
        if not numbers or not leaf.ndim:
            kind = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
            raise TypeError(f"features: {kind}; give an array of numbers, records first (schema.features makes one)")


def _class_numbers(scores: Array) -> Array:
    return jnp.argmax(scores, axis=-1) if scores.ndim == 2 else (scores > 0).astype(jnp.int32)


def _right(predicted: Array, targets: Array) -> Array:
    # A label of -1 means the same as 0.
    return jnp.mean(predicted == jnp.maximum(targets, 0))


def _squared_error(predicted: Array, targets: Array) -> Array:
    return jnp.mean(jnp.square(predicted - targets.reshape(predicted.shape)))


def from_loss(
    loss: Callable[[PyTree, PyTree], Float[Array, ""]],
    init: Callable[[Key[Array, ""]], PyTree],
    *,
    scores: Callable[[PyTree, PyTree], PyTree[Array]] | None = None,
    metric: str | None = None,
    penalty: Callable[[PyTree], Float[Array, ""]] | None = None,
    name: str = "user",
) -> Model:
    """A model from any differentiable loss(params, record) on pytrees; a record is (features, targets).

    Args:
        loss: of one record, a number. init: gives the parameters, any pytree, for a random key.
        scores: scores(params, features) gives what `predict` returns: for several targets, in the same dict or tuple as
            these. metric: "accuracy" or "mse" of the scores.
        penalty: penalty(params) is added to the mean loss. It sees no record, so it is neither clipped nor noised.
        name: for reports.

    Returns:
        A `Model` for `silodp.train(model=...)`.

    Example:
        >>> import jax.numpy as jnp, silodp
        >>> absolute = lambda params, record: jnp.sqrt(1 + jnp.square(record[0] @ params - record[1]))
        >>> silodp.from_loss(absolute, lambda key: jnp.zeros(3), name="absolute").name
        'absolute'
    """
    if metric not in (None, "accuracy", "mse"):
        raise ValueError(f"metric: {metric!r} is not accuracy or mse")
    if (scores is None) != (metric is None):
        raise ValueError("metric: it needs scores(params, features), and scores need a metric")
    return Model(name, init, loss, scores, metric, penalty)


def build_model(
    kind: str,
    *,
    inputs: int | tuple[int, ...],
    outputs: int = 1,
    task: str | None = None,
    hidden: tuple[int, ...] = (),
    activation: str | None = None,
    norm: str = "none",
    views: Sequence[str] = (),
    loss: str | None = None,
    regulariser: float = 0.0,
    regulariser_clip: str = "outside",
    bias: bool = True,
    initial: str = "default",
    initial_scale: float | None = None,
) -> Model:
    """A model of one of the `KINDS`.

    Args:
        kind: linear, ridge, logistic, softmax, mlp or cnn.
        inputs: number of features, or their shape. outputs: classes, or 1 for a number.
        task: classification or regression. hidden, loss: of an mlp. activation, norm ("none" or "group"): of networks.
        views: of images, e.g. ["flip", "shift:2"]; a record's loss is the mean over them (silodp.views).
        regulariser: of ridge and logistic.
        regulariser_clip: "outside" or "inside" of what is clipped record by record.
        bias: whether layers have one.
        initial: "default" (zeros for linear, ridge, logistic and softmax; uniform in +-1/sqrt(fan-in) for networks),
            "zeros", or "normal" with standard deviation `initial_scale` (1 unless given; SoteriaFL starts at 0.2).

    Returns:
        A `Model`.

    Example:
        >>> import jax, silodp
        >>> params = silodp.build_model("mlp", inputs=4, outputs=3, hidden=(8,)).init(jax.random.key(0))
        >>> params["dense1"]["weight"].shape, params["dense2"]["bias"].shape
        ((8, 4), (3,))
    """
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    _check(kind, shape, outputs, task, hidden, activation, norm, regulariser, initial, initial_scale)
    single = kind in ("linear", "ridge", "logistic")
    squared = kind in ("linear", "ridge") or (kind == "mlp" and _loss_of(loss, task, outputs) == "squared")
    if kind not in ("mlp",) and loss not in (None, "squared" if squared else "cross-entropy"):
        raise ValueError(f"loss: {loss!r} is not the loss of a {kind} model; leave it out")
    shapes = (
        cnn_shapes(shape, outputs) if kind == "cnn" else dense_shapes(prod(shape), hidden, 1 if single else outputs)
    )
    own = between(ACTIVATIONS[activation or "relu"], norm)
    scores = partial(cnn_scores, own, shape) if kind == "cnn" else partial(dense_scores, own, len(shapes))
    record_loss = partial(_squared if squared else _logistic if kind == "logistic" else _cross_entropy, scores)
    start = "zeros" if initial == "default" and kind not in NETWORKS else initial
    model = Model(
        kind,
        partial(_initialise, shapes, bias, start, initial_scale or 1.0),
        record_loss,
        scores,
        "mse" if squared else "accuracy",
        partial(_half_square if kind == "ridge" else _bounded, regulariser) if regulariser else None,
    )
    if regulariser_clip not in ("inside", "outside"):
        raise ValueError(f"regulariser_clip: {regulariser_clip!r} is not inside or outside")
    model = with_views(model, views, shape)
    return model if regulariser_clip == "outside" else model.inside


def model_of(options: ModelConfig, facts: Facts) -> Model:
    """The model that a config describes, for these facts about the data."""
    found = registry.find("model", options.kind)
    try:
        own = registry.is_own("model", options.kind)
        built = _own(options, facts) if own else _from_outside(options.kind, found, facts)
        return weighted(built, _class_weights(options, facts), facts.record is not None and has_weight(facts.record[1]))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def _own(options: ModelConfig, facts: Facts) -> Model:
    _check_record(options.kind, facts)
    given = options.model_dump(include=BUILT_FROM)
    inputs = facts.input_shape[0] if len(facts.input_shape) == 1 else facts.input_shape
    return build_model(
        options.kind, inputs=inputs, outputs=facts.outputs, task=facts.task, hidden=tuple(options.hidden), **given
    )


def _check_record(kind: str, facts: Facts) -> None:
    features, target = (None, None) if facts.record is None else (facts.record[0], target_of(facts.record[1]))
    if not isinstance(features, str) or not isinstance(target, str) or Kind.read(target).shape:
        arrays = ", ".join(f"{name} {of}" for name, of in facts.kinds.items()) or "nothing known"
        raise ValueError(
            f"kind: {kind!r} takes one array of features and one number as target, a record here has {arrays}; "
            "give a model of your own: model.kind = 'MODULE:FUNCTION', or silodp.from_loss"
        )


def _class_weights(options: ModelConfig, facts: Facts) -> tuple[float, ...] | None:
    if options.class_weights is None:
        return None
    if facts.task != "classification" or len(options.class_weights) != facts.outputs:
        found = f"{facts.outputs} classes" if facts.task == "classification" else "a number as target"
        raise ValueError(f"class_weights: {len(options.class_weights)} are given, the data has {found}; give one each")
    return tuple(options.class_weights)


def _from_outside(kind: str, function: Callable[[Facts], Model], facts: Facts) -> Model:
    try:
        built = function(facts)
    except TypeError as error:
        raise ConfigError(f"model.kind = {kind!r}: must be a function of the facts ({error})") from None
    if not isinstance(built, Model):
        raise ConfigError(f"model.kind = {kind!r}: gave a {type(built).__name__}; must give a silodp.Model")
    return built


def _check(
    kind: str,
    shape: tuple[int, ...],
    outputs: int,
    task: str | None,
    hidden: tuple[int, ...],
    activation: str | None,
    norm: str,
    regulariser: float,
    initial: str,
    initial_scale: float | None,
) -> None:
    wrong = lambda field, value, right: ValueError(f"{field}: {value!r} {right}")
    if kind not in KINDS:
        raise wrong("kind", kind, f"is not one of {', '.join(KINDS)}")
    if not shape or min(shape) < 1:
        raise wrong("inputs", shape, "is not a number of features or their shape")
    if outputs < 1:
        raise wrong("outputs", outputs, "must be at least 1")
    if task not in (None, "classification", "regression"):
        raise wrong("task", task, "is not classification or regression")
    if (kind == "mlp") != bool(hidden):
        raise wrong("hidden", hidden, "widths: an mlp needs at least one, other kinds have none")
    if any(width < 1 for width in hidden):
        raise wrong("hidden", hidden, "widths must be at least 1")
    if activation is not None and (kind not in NETWORKS or activation not in ACTIVATIONS):
        raise wrong("activation", activation, f"is for an mlp or a cnn, one of {', '.join(ACTIVATIONS)}")
    if norm not in NORMS or (norm != "none" and kind not in NETWORKS):
        raise wrong("norm", norm, f"is for an mlp or a cnn, one of {', '.join(NORMS)}")
    if not 0 <= regulariser < float("inf") or (regulariser > 0 and kind not in ("ridge", "logistic")):
        raise wrong("regulariser", regulariser, "must be finite and >= 0, and only ridge and logistic have one")
    if kind == "ridge" and regulariser == 0:
        raise wrong("regulariser", regulariser, "is linear regression; ridge needs a positive one")
    if initial not in INITIALS:
        raise wrong("initial", initial, f"is not one of {', '.join(INITIALS)}")
    if initial_scale is not None and (initial != "normal" or not initial_scale > 0):
        raise wrong("initial_scale", initial_scale, "must be positive and goes with initial = normal")
    _check_task(kind, outputs, task)


def _check_task(kind: str, outputs: int, task: str | None) -> None:
    if kind in ("linear", "ridge") and (outputs != 1 or task == "classification"):
        raise ValueError(f"kind: {kind!r} predicts one number; use logistic, softmax or mlp for classes")
    if kind in ("logistic", "softmax", "cnn") and task == "regression":
        raise ValueError(f"kind: {kind!r} predicts classes; use linear, ridge or mlp for a number")
    if kind == "logistic" and outputs > 2:
        raise ValueError(f"kind: 'logistic' has two classes, the data {outputs}; use softmax")
    if kind in ("softmax", "cnn") and outputs < 2:
        raise ValueError(f"outputs: {outputs}; {kind} needs the number of classes, at least 2")


def _loss_of(loss: str | None, task: str | None, outputs: int) -> str:
    chosen = loss or ("squared" if task == "regression" or outputs == 1 else "cross-entropy")
    if chosen not in ("squared", "cross-entropy"):
        raise ValueError(f"loss: {chosen!r} is not squared or cross-entropy")
    if chosen == "squared" and (task == "classification" or outputs > 1):
        raise ValueError("loss: 'squared' is for one number; classes need cross-entropy")
    if chosen == "cross-entropy" and (task == "regression" or outputs < 2):
        raise ValueError("loss: 'cross-entropy' is for at least 2 classes; a number needs squared")
    return chosen


def _scored(scores: Callable[[Params, Array], Array], params: Params, record: PyTree) -> tuple[Array, Array]:
    """A record's scores, with what its silo adds to them, and its target."""
    features, targets = record
    return moved(scores(params, features), targets), target_of(targets)


def _squared(scores: Callable[[Params, Array], Array], params: Params, record: PyTree) -> Array:
    score, target = _scored(scores, params, record)
    return jnp.square(score - target)


def _logistic(scores: Callable[[Params, Array], Array], params: Params, record: PyTree) -> Array:
    score, target = _scored(scores, params, record)
    label = jnp.where(target > 0, 1.0, -1.0)
    return softplus(-label * score)


def _cross_entropy(scores: Callable[[Params, Array], Array], params: Params, record: PyTree) -> Array:
    z, target = _scored(scores, params, record)
    # A one-hot product instead of z[target]: its derivative needs no scatter, which is slow on CPU.
    chosen = jnp.arange(z.shape[0]) == target.astype(jnp.int32)
    return jax.nn.logsumexp(z) - jnp.sum(jnp.where(chosen, z, 0))


LOSSES = {"cross-entropy": _cross_entropy, "logistic": _logistic, "squared": _squared}


def _half_square(strength: float, params: Params) -> Array:
    return strength / 2 * sum((jnp.sum(x * x) for x in jax.tree.leaves(params)), jnp.zeros(()))


def _bounded(strength: float, params: Params) -> Array:
    """The non-convex regulariser of SoteriaFL's logistic regression."""
    return strength * sum((jnp.sum(x * x / (1 + x * x)) for x in jax.tree.leaves(params)), jnp.zeros(()))


def _initialise(shapes: Shapes, bias: bool, initial: str, scale: float, key: Key[Array, ""]) -> Params:
    params: Params = {}
    for name, shape in shapes.items():
        key, for_weight, for_bias = jax.random.split(key, 3)
        bound = 1 / sqrt(prod(shape[1:]))
        params[name] = {"weight": _draw(initial, bound, scale, for_weight, shape)}
        if bias:
            params[name]["bias"] = _draw(initial, bound, scale, for_bias, shape[:1])
    return params


def _draw(initial: str, bound: float, scale: float, key: Key[Array, ""], shape: tuple[int, ...]) -> Array:
    if initial == "zeros":
        return jnp.zeros(shape)
    if initial == "normal":
        return scale * jax.random.normal(key, shape)
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
