"""Models: shapes, starts, losses written out by hand, the engine they get, and errors that name the field."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from silodp.doubles import highs
from silodp.gradients import clipped_sum, engine_for
from silodp.models import KINDS, build_model, from_loss
from silodp.networks import group_norm
from silodp.views import read_views, viewed

KEY = jax.random.key(0)
OPTIONS = {
    "linear": {"inputs": 5},
    "ridge": {"inputs": 5, "regulariser": 0.3},
    "logistic": {"inputs": 5, "outputs": 2, "regulariser": 0.2},
    "softmax": {"inputs": (5, 2), "outputs": 3},
    "mlp": {"inputs": 5, "outputs": 3, "hidden": (7, 6), "activation": "tanh"},
    "cnn": {"inputs": (3, 32, 32), "outputs": 10},
}


def batch(model_inputs, outputs=1, n=6):
    shape = (model_inputs,) if isinstance(model_inputs, int) else model_inputs
    features = jax.random.normal(jax.random.key(1), (n, *shape))
    return features, jnp.arange(n) % max(outputs, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_predicts_and_gets_the_structured_engine(kind):
    model = build_model(kind, **OPTIONS[kind])
    features, targets = batch(OPTIONS[kind]["inputs"], OPTIONS[kind].get("outputs", 1))
    params = model.init(KEY)
    assert engine_for(model.loss, params, (features[0], targets[0]))[0] == "structured"
    mean = lambda p: jnp.mean(jax.vmap(model.loss, in_axes=(None, 0))(p, (features, targets)))
    step = jax.jit(jax.value_and_grad(mean))
    before, down = step(params)
    after, _ = step(jax.tree.map(lambda x, g: x - 1e-3 * g, params, down))
    assert after < before
    assert jax.jit(model.predict)(params, features).shape == (6,)
    assert jax.jit(model.evaluate)(params, features, targets).shape == ()
    hash(model)  # runs keep it as a static field


def test_lenet_has_the_tutorials_parameters():
    params = build_model("cnn", **OPTIONS["cnn"]).init(KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 62_006
    assert params["dense1"]["weight"].shape == (120, 400)


def test_losses_are_what_the_table_says():
    w, a = np.array([[0.3, -0.2]]), np.array([1.5, 2.0])
    params = {"dense1": {"weight": jnp.array(w), "bias": jnp.array([0.1])}}
    score = float((w @ a)[0] + 0.1)
    entries = np.array([0.3, -0.2, 0.1])
    record = lambda t: (jnp.array(a), jnp.asarray(t))
    value = lambda kind, t, **kw: float(build_model(kind, inputs=2, **kw).inside.loss(params, record(t)))
    assert value("linear", 0.7) == pytest.approx((score - 0.7) ** 2, rel=1e-5)
    assert value("ridge", 0.7, regulariser=0.4) == pytest.approx(
        (score - 0.7) ** 2 + 0.2 * (entries**2).sum(), rel=1e-5
    )
    assert value("logistic", 1) == pytest.approx(np.log1p(np.exp(-score)), rel=1e-5)
    assert value("logistic", 0) == value("logistic", -1) == pytest.approx(np.log1p(np.exp(score)), rel=1e-5)
    penalty = 0.2 * (entries**2 / (1 + entries**2)).sum()
    assert value("logistic", 1, regulariser=0.2) == pytest.approx(np.log1p(np.exp(-score)) + penalty, rel=1e-5)
    logits = np.array([[0.3, -0.2], [1.0, 0.5]]) @ a
    two = {"dense1": {"weight": jnp.array([[0.3, -0.2], [1.0, 0.5]])}}
    softmax = build_model("softmax", inputs=2, outputs=2, bias=False)
    want = np.log(np.exp(logits).sum()) - logits[1]
    assert float(softmax.loss(two, record(1))) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("activation", ["softplus", "sigmoid", "relu", "tanh"])
def test_mlp_by_hand(activation):
    model = build_model("mlp", inputs=3, hidden=(4,), activation=activation)
    params = model.init(KEY)
    a = np.array([0.2, -1.0, 0.5])
    sigma = {
        "softplus": lambda z: np.log1p(np.exp(z)),
        "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
        "relu": lambda z: np.maximum(z, 0),
        "tanh": np.tanh,
    }[activation]
    (w1, b1), (w2, b2) = (
        (np.asarray(p["weight"]), np.asarray(p["bias"])) for p in (params["dense1"], params["dense2"])
    )
    score = (w2 @ sigma(w1 @ a + b1) + b2)[0]
    assert float(model.loss(params, (jnp.array(a), jnp.array(2.0)))) == pytest.approx((score - 2) ** 2, rel=1e-4)
    assert model.metric == "mse"
    assert model.evaluate(params, jnp.array([a]), jnp.array([2.0])) == pytest.approx((score - 2) ** 2, rel=1e-4)


def test_starts():
    wide = {"inputs": 400, "outputs": 3, "hidden": (100,)}
    first = build_model("mlp", **wide).init(KEY)["dense1"]
    assert 0.049 < float(jnp.abs(first["weight"]).max()) <= 0.05
    assert 0.045 < float(jnp.abs(first["bias"]).max()) <= 0.05
    assert not any(leaf.any() for leaf in jax.tree.leaves(build_model("mlp", initial="zeros", **wide).init(KEY)))
    assert not any(leaf.any() for leaf in jax.tree.leaves(build_model("softmax", inputs=4, outputs=3).init(KEY)))
    normal = build_model("mlp", initial="normal", initial_scale=0.2, **wide).init(KEY)["dense1"]["weight"]
    assert float(normal.std()) == pytest.approx(0.2, rel=0.02)


def test_accuracy_takes_both_label_conventions():
    model = build_model("logistic", inputs=1, outputs=2)
    params = {"dense1": {"weight": jnp.ones((1, 1)), "bias": jnp.zeros(1)}}
    features = jnp.array([[1.0], [-1.0], [2.0], [-2.0]])
    assert model.evaluate(params, features, jnp.array([1, 0, 0, 0])) == 0.75
    assert model.evaluate(params, features, jnp.array([1, -1, -1, -1])) == 0.75


def test_a_users_loss():
    model = from_loss(lambda p, r: jnp.sum(jnp.cosh(p["a"] - r)), lambda key: {"a": jax.random.normal(key, (3,))})
    params, records = model.init(KEY), jnp.zeros((4, 3))
    assert engine_for(model.loss, params, records[0])[0] == "general"
    got = highs(clipped_sum(model.loss, [params], [1.0], records, jnp.ones(4), jnp.inf))
    np.testing.assert_allclose(got["a"], 4 * np.sinh(params["a"]), rtol=1e-5)
    with pytest.raises(ValueError, match="scores"):
        model.predict(params, records)
    with pytest.raises(ValueError, match=r"^metric:"):
        from_loss(model.loss, model.init, metric="accuracy")


@pytest.mark.parametrize(
    ("field", "kind", "options"),
    [
        ("kind", "forest", {"inputs": 3}),
        ("kind", "linear", {"inputs": 3, "outputs": 4}),
        ("kind", "logistic", {"inputs": 3, "outputs": 3}),
        ("kind", "softmax", {"inputs": 3, "outputs": 3, "task": "regression"}),
        ("inputs", "linear", {"inputs": 0}),
        ("kind", "cnn", {"inputs": 3072, "outputs": 10}),
        ("kind", "cnn", {"inputs": (3, 8, 8), "outputs": 10}),
        ("outputs", "softmax", {"inputs": 3, "outputs": 1}),
        ("hidden", "mlp", {"inputs": 3}),
        ("hidden", "mlp", {"inputs": 3, "hidden": (4, 0)}),
        ("hidden", "linear", {"inputs": 3, "hidden": (4,)}),
        ("activation", "mlp", {"inputs": 3, "hidden": (4,), "activation": "swish"}),
        ("activation", "softmax", {"inputs": 3, "outputs": 3, "activation": "relu"}),
        ("norm", "mlp", {"inputs": 3, "hidden": (4,), "norm": "batch"}),
        ("norm", "linear", {"inputs": 3, "norm": "group"}),
        ("loss", "mlp", {"inputs": 3, "hidden": (4,), "loss": "hinge"}),
        ("loss", "mlp", {"inputs": 3, "hidden": (4,), "outputs": 3, "loss": "squared"}),
        ("loss", "linear", {"inputs": 3, "loss": "cross-entropy"}),
        ("regulariser", "ridge", {"inputs": 3}),
        ("regulariser", "logistic", {"inputs": 3, "regulariser": float("nan")}),
        ("regulariser", "mlp", {"inputs": 3, "hidden": (4,), "regulariser": 0.1}),
        ("initial", "linear", {"inputs": 3, "initial": "ones"}),
        ("initial_scale", "linear", {"inputs": 3, "initial_scale": 0.2}),
        ("task", "linear", {"inputs": 3, "task": "ranking"}),
    ],
)
def test_bad_options_are_named(field, kind, options):
    with pytest.raises(ValueError, match=f"^{field}:"):
        build_model(kind, **options)


def test_a_normalised_hidden_layer_by_hand():
    model = build_model("mlp", inputs=3, hidden=(4,), activation="tanh", norm="group")
    params, a = model.init(KEY), np.array([0.2, -1.0, 0.5])
    hidden = np.asarray(params["dense1"]["weight"]) @ a + np.asarray(params["dense1"]["bias"])
    hidden = np.tanh((hidden - hidden.mean()) / np.sqrt(hidden.var() + 1e-5))
    score = (np.asarray(params["dense2"]["weight"]) @ hidden + np.asarray(params["dense2"]["bias"]))[0]
    assert float(model.loss(params, (jnp.array(a), jnp.array(2.0)))) == pytest.approx((score - 2) ** 2, rel=1e-4)
    layer = jax.random.normal(KEY, (6, 3, 5))
    groups = np.asarray(layer).reshape(2, -1)  # channels 0 to 2, and 3 to 5
    expected = (groups - groups.mean(1, keepdims=True)) / np.sqrt(groups.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(group_norm(layer).reshape(2, -1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5, 3), (4, 5)])
def test_views_are_those_of_the_definition_in_every_layout(shape):
    image = np.asarray(jax.random.normal(KEY, shape))
    rows_first = image if shape[0] == 4 else np.moveaxis(image, 0, -1)
    back = (lambda x: x) if shape[0] == 4 else (lambda x: np.moveaxis(x, -1, 0))
    same = viewed(jnp.asarray(image), (False, 0, 0))
    np.testing.assert_array_equal(same, image)
    np.testing.assert_array_equal(viewed(jnp.asarray(image), (True, 0, 0)), back(rows_first[:, ::-1]))
    np.testing.assert_array_equal(viewed(jnp.asarray(image), (False, 1, 0)), back(rows_first[[0, 0, 1, 2]]))
    np.testing.assert_array_equal(viewed(jnp.asarray(image), (False, 0, -2)), back(rows_first[:, [2, 3, 4, 4, 4]]))
    assert len(read_views(["flip", "shift:2"])) == len(set(read_views(["flip", "shift:2"]))) == 10


def test_a_record_has_the_mean_of_its_views_gradients_clipped_once():
    """The clip bounds the mean over the views, not each of them: one record moves a sum as far as with one view."""
    options = {"inputs": (1, 6, 6), "outputs": 3, "hidden": (4,)}
    plain, several = build_model("mlp", **options), build_model("mlp", views=["flip", "shift:2"], **options)
    params = plain.init(KEY)
    images, labels = 3 * jax.random.normal(KEY, (3, 1, 6, 6)), jnp.array([0, 1, 2])
    views = read_views(["flip", "shift:2"])
    gradient = lambda x, y: ravel_pytree(jax.grad(plain.loss)(params, (x, y)))[0]
    seen = lambda image: jnp.stack([viewed(image, view) for view in views])
    means = np.asarray(
        jax.jit(jax.vmap(lambda x, y: jax.vmap(gradient, (0, None))(seen(x), y).mean(0)))(images, labels)
    )
    summed = jax.jit(lambda clip: clipped_sum(several.loss, [params], [1.0], (images, labels), jnp.ones(3), clip))
    lengths = np.linalg.norm(means, axis=1)
    for clip in (0.5 * lengths.min(), np.median(lengths), 2 * lengths.max()):
        expected = (means * np.minimum(1, clip / lengths)[:, None]).sum(axis=0)
        np.testing.assert_allclose(ravel_pytree(highs(summed(clip)))[0], expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(several.predict(params, images), plain.predict(params, images))


@pytest.mark.parametrize("views", [["turn"], ["shift"], ["shift:0"], ["flip:2"]])
def test_unknown_views_are_named(views):
    with pytest.raises(ValueError, match=r"^views: .* is unknown; possible: flip, shift:PIXELS"):
        build_model("mlp", inputs=(1, 6, 6), outputs=3, hidden=(4,), views=views)
    with pytest.raises(ValueError, match=r"^views: .* are of images"):
        build_model("softmax", inputs=4, outputs=3, views=["flip"])


def test_a_cnn_takes_images_with_channels_first_or_last():
    first = build_model("cnn", inputs=(3, 32, 32), outputs=10)
    last = build_model("cnn", inputs=(32, 32, 3), outputs=10)
    params = first.init(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (3, 32, 32))
    target = jnp.int32(4)
    expected = first.loss(params, (image, target))
    np.testing.assert_allclose(last.loss(params, (jnp.moveaxis(image, 0, -1), target)), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="kind: 'cnn' needs images"):
        build_model("cnn", inputs=(8, 8, 3), outputs=10)
