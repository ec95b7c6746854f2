"""PyTorch modules as models: the same forward pass, the same clipped sums, weights there and back."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import silodp
from silodp.errors import ConfigError
from silodp.gradients import clipped_sum, engine_for

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed (pip install 'silodp[torch]')")


def test_without_pytorch_the_error_says_what_to_install(monkeypatch):
    for name in ("torch", "torch.fx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"from_torch: needs PyTorch; pip install 'silodp\[torch\]'"):
        silodp.from_torch(None)


if torch is not None:

    class LeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
            self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

        def forward(self, x):
            x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
            x = functional.max_pool2d(functional.relu(self.conv2(x)), kernel_size=2)
            x = x.view(x.size(0), -1)
            return self.fc3(functional.relu(self.fc2(torch.relu(self.fc1(x)))))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x):
            return self.out(torch.flatten(self.norm(x + self.inner(x).tanh()), 1))

    def mlp():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 12), nn.GELU(),
            nn.Linear(12, 9), nn.SiLU(), nn.Linear(9, 9), nn.Softplus(beta=2), nn.Linear(9, 7, bias=False),
            nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), nn.Sigmoid(), nn.Linear(5, 3),
        )  # fmt: skip

    def normed():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(8, 4, (1, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    def words():
        return nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 4), nn.GELU("tanh"), nn.Flatten(), nn.Linear(20, 3))

    numbers = lambda *shape: np.random.default_rng(0).normal(size=(5, *shape)).astype(np.float32)
    tokens = np.random.default_rng(0).integers(0, 20, (5, 5)).astype(np.int32)
    CASES = {
        "mlp": (mlp, numbers(8)), "lenet": (LeNet, numbers(1, 28, 28)), "residual": (Residual, numbers(8)),
        "normed": (normed, numbers(3, 12, 12)), "words": (words, tokens),
    }  # fmt: skip
else:
    CASES = dict.fromkeys(("mlp", "lenet", "residual", "normed", "words"))


def case(name: str):
    torch.manual_seed(0)
    make, features = CASES[name]
    return make().eval(), features


@needs_torch
@pytest.mark.parametrize("name", CASES)
def test_the_forward_pass_is_the_same(name):
    module, features = case(name)
    model = silodp.from_torch(module)
    params = model.init(jax.random.key(0))
    scores = jax.vmap(lambda record: model.scores(params, record))(jnp.asarray(features))
    expected = module(torch.from_numpy(features)).detach().numpy()
    assert scores == pytest.approx(expected, abs=1e-5)
    assert set(params) == set(module.state_dict())


@needs_torch
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_plain_networks_take_the_structured_engine(name):
    module, features = case(name)
    model = silodp.from_torch(module)
    record = (jnp.asarray(features[0]), jnp.int32(1))
    assert engine_for(model.loss, model.init(jax.random.key(0)), record)[0] == "structured"


@needs_torch
def test_what_was_trained_goes_back_into_the_module(tmp_path):
    module, _ = case("residual")
    for weight in module.inner.parameters():
        weight.requires_grad = False
    before = module.inner.weight.detach().clone()
    rng = np.random.default_rng(1)
    features = rng.normal(size=(90, 8)).astype(np.float32)
    targets = (features[:, 0] > 0).astype(np.int32) + (features[:, 1] > 1)
    halves = {"a": (features[:50], targets[:50]), "b": (features[50:], targets[50:])}
    data = silodp.FederatedData.of(halves)
    options = {"name": "dp-gd", "rounds": 3, "step_size": 0.5, "clip": 1.0}
    model = silodp.from_torch(module)
    run = silodp.train(algorithm=options, epsilon=5.0, data=data, model=model, out=tmp_path / "run")
    assert "inner.weight" not in run.params
    old = module(torch.from_numpy(features)).detach().numpy()
    silodp.to_torch(run.params, module)
    fresh = module(torch.from_numpy(features)).detach().numpy()
    assert abs(fresh - old).max() > 1e-3 and torch.equal(module.inner.weight, before)
    assert (fresh.argmax(1) == np.asarray(run.predict(features))).all()
    with pytest.raises(ConfigError, match="to_torch: 'other' does not fit"):
        silodp.to_torch({"other": np.zeros(1)}, module)


if torch is not None:

    class Clever(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x).view(3, -1)

    def hooked():
        module = nn.Sequential(nn.Linear(3, 3))
        module[0].register_forward_hook(lambda layer, given, out: 2 * out)
        return module

    def tied():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        return module

    REFUSED = {
        "hook": (hooked, r"layer '0' \(Linear\) has a forward hook, which would be left out; remove it"),
        "tied": (tied, r"'1.weight' is the weight of two layers"),
        "batch norm": (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            "mixes the records of a batch.*GroupNorm",
        ),
        "unknown": (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)),
            r"layer '1' \(Softmax\) has no form.*frozen|freeze",
        ),
        "recurrent": (lambda: nn.Sequential(nn.LSTM(3, 3)), r"\(LSTM\) has no form here; freeze it"),
        "groups": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "has groups = 2"),
        "overlap": (lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(3, 2)), "side by side"),
        "branches": (lambda: nn.Sequential(nn.Linear(3, 3), Clever()), "cannot be traced"),
        "batch moved": (Transposed, "must keep the batch as it is"),
        "nothing": (lambda: nn.Sequential(nn.ReLU()), "nothing would be trained"),
    }
else:
    REFUSED = {"none": None}


@needs_torch
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_named(name):
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        silodp.from_torch(make())
    with pytest.raises(ConfigError, match="loss = 'hinge'"):
        silodp.from_torch(nn.Linear(3, 3), loss="hinge")


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lenet", "normed"])
@pytest.mark.filterwarnings("ignore")  # PyTorch's and Opacus' own
def test_clipped_sums_are_those_of_opacus(name):
    opacus = pytest.importorskip("opacus", reason="Opacus is not installed; .venv-bench has it")
    module, features = case(name)
    targets = np.array([0, 1, 2, 1, 0], np.int32)
    model = silodp.from_torch(module)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    wrapped = opacus.GradSampleModule(module.train(), loss_reduction="sum")  # its hooks work in training only
    scores, truth = wrapped(torch.from_numpy(features)), torch.from_numpy(targets).long()
    losses = functional.cross_entropy(scores, truth, reduction="sum")
    losses.backward()
    each = {path: weight.grad_sample.numpy() for path, weight in module.named_parameters()}
    norms = np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in each.values()))
    clip = float(np.median(norms))
    factor = np.minimum(1, clip / norms)
    expected = {path: np.tensordot(factor, g, 1) for path, g in each.items()}
    records = (jnp.asarray(features), jnp.asarray(targets))
    found = clipped_sum(model.loss, [model.init(jax.random.key(0))], [1.0], records, jnp.ones(5), clip)
    for path, sums in expected.items():
        assert np.asarray(found[path].high) == pytest.approx(sums, abs=1e-4)
