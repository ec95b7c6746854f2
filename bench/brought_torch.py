"""The networks of the gradient parts in PyTorch, as modules that Opacus knows; layers are named as in JAX."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.brought import HIDDEN
from bench.workloads import Tree, Workload

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"relu": F.relu, "sigmoid": torch.sigmoid, "softplus": F.softplus}


def module_of(name: str, weight: np.ndarray) -> nn.Module:
    if name == "embed":
        return nn.Embedding(*weight.shape)
    if name == "norm":
        return nn.LayerNorm(weight.shape[0])
    return nn.Conv2d(weight.shape[1], weight.shape[0], 5) if weight.ndim == 4 else nn.Linear(*weight.T.shape)


class Net(nn.Module):
    """The workload's network with the given weights."""

    def __init__(self, params: Tree, work: Workload):
        super().__init__()
        self.work, self.names = work, list(params)
        for name, layer in params.items():
            built = module_of(name, layer["weight"])
            built.load_state_dict({key: torch.from_numpy(np.array(leaf)) for key, leaf in layer.items()})
            self.add_module(name, built)

    def forward(self, h: Tensor) -> Tensor:
        return FORWARD.get(self.work.kind, stack)(self, h)

    def layer(self, name: str) -> Any:
        return self.get_submodule(name)


def stack(net: Net, h: Tensor) -> Tensor:
    for name in (n for n in net.names if n.startswith("conv")):
        h = F.max_pool2d(F.relu(net.layer(name)(h)), 2)
    h, names = h.flatten(1), [n for n in net.names if n.startswith("dense")]
    for name in names[:-1]:
        h = ACTIVATIONS[net.work.activation](net.layer(name)(h))
    return net.layer(names[-1])(h)


def words(net: Net, h: Tensor) -> Tensor:
    return net.layer("dense")(net.layer("embed")(h).mean(dim=1))


def normed(net: Net, h: Tensor) -> Tensor:
    return net.layer("dense2")(F.relu(net.layer("norm")(net.layer("dense1")(h))))


def attention(net: Net, x: Tensor) -> Tensor:
    query, key, value = (net.layer(name)(x) for name in ("query", "key", "value"))
    mixed = torch.softmax(query @ key.transpose(1, 2) / sqrt(x.shape[-1]), dim=-1) @ value
    return net.layer("dense")((x + net.layer("out")(mixed)).mean(dim=1))


def gru(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), HIDDEN)
    for step in range(x.shape[1]):
        update, reset, fresh = net.layer("input")(x[:, step]).chunk(3, dim=1)
        old_update, old_reset, old = net.layer("hidden")(h).chunk(3, dim=1)
        gate = torch.sigmoid(update + old_update)
        h = gate * h + (1 - gate) * torch.tanh(fresh + torch.sigmoid(reset + old_reset) * old)
    return net.layer("dense")(h)


FORWARD: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "words": words, "normed": normed, "attention": attention, "gru": gru
}  # fmt: skip
