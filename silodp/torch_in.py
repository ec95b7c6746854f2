"""PyTorch modules as models: the same forward pass in JAX, one record at a time, and the weights back again.

`torch.fx` writes down what a module does. Every step is then carried out for one record: what mixes the records of a
batch has no such form and is refused. Layers of the structured engine (`silodp.gradients`) are used where they fit.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from silodp.errors import ConfigError
from silodp.models import LOSSES, Model
from silodp.torch_layers import INSTEAD, Step, Weights, function_step, is_batch_size, is_shape, layer_step, refused

MIXES = "mixes the records of a batch, so that no record has a gradient of its own to clip; use GroupNorm or LayerNorm"


def from_torch(
    module: Any,  # a torch.nn.Module
    *,
    loss: str | Callable[[Array, Array], Array] = "cross-entropy",
    name: str | None = None,
) -> Model:
    """A model that computes what a PyTorch module computes and starts from its weights (extra `torch`).

    Taken are modules that torch.fx can trace: Linear, Conv2d, Embedding, LayerNorm, GroupNorm, max and average pooling,
    Flatten, ReLU, GELU, SiLU, Tanh, Sigmoid, Softplus, Dropout (off), and sums of branches. Others are named in the
    error. Weights that need no gradient stay as they are.

    Args:
        module: takes a batch, records first. loss: "cross-entropy" for class numbers, "logistic" for one score and two
            classes, "squared" for a number, or a function (scores, target) -> number of one record.
        name: for reports; the module's class when left out.

    Returns:
        A `Model`. Its parameters are named as in the module's state_dict: `silodp.to_torch` puts them back.

    Example:
        >>> import silodp
        >>> silodp.from_torch("a text")
        Traceback (most recent call last):
        silodp.errors.ConfigError: from_torch: ...
    """
    torch = pytorch("from_torch")
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"from_torch: a {type(module).__name__}; give a torch.nn.Module")
    if isinstance(loss, str) and loss not in LOSSES:
        raise ConfigError(f"from_torch: loss = {loss!r} is not {', '.join(LOSSES)} or a function")
    trained, frozen = weights_of(module)
    if not trained:
        raise ConfigError("from_torch: no weight needs a gradient; nothing would be trained")
    forward = Forward(torch, module, frozen)
    metric = {"cross-entropy": "accuracy", "logistic": "accuracy", "squared": "mse"}.get(str(loss))
    scores: Any = forward
    of_record = partial(LOSSES[loss], scores) if isinstance(loss, str) else partial(_own_loss, loss, forward)
    start = lambda key: {path: jnp.asarray(array) for path, array in trained.items()}
    return Model(name or type(module).__name__, start, of_record, forward if metric else None, metric)


def to_torch(params: Weights, module: Any) -> Any:
    """Put trained parameters back into the module that `from_torch` took.

    Args:
        params: `run.params` of a run with that model. module: of the same layers; its weights are overwritten.

    Returns:
        The module.

    Example:
        >>> import silodp
        >>> silodp.to_torch({}, "a text")
        Traceback (most recent call last):
        silodp.errors.ConfigError: to_torch: ...
    """
    torch = pytorch("to_torch")
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"to_torch: a {type(module).__name__}; give the torch.nn.Module that from_torch took")
    known = module.state_dict()
    unknown = sorted(set(params) - set(known))
    wrong = [path for path in params if path in known and tuple(known[path].shape) != tuple(np.shape(params[path]))]
    if unknown or wrong:
        raise ConfigError(f"to_torch: {(unknown + wrong)[0]!r} does not fit the module; give the one from_torch took")
    fresh = {path: torch.from_numpy(np.array(array)).to(known[path].dtype) for path, array in params.items()}
    module.load_state_dict(known | fresh)
    return module


def pytorch(asked: str) -> Any:
    try:
        importlib.import_module("torch.fx")
        return importlib.import_module("torch")
    except ImportError:
        raise ConfigError(f"{asked}: needs PyTorch; pip install 'silodp[torch]'") from None


def weights_of(module: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By their name in the state_dict: those that are trained, and those that are not."""
    arrays = {path: (weight.requires_grad, weight.detach().cpu().float().numpy().copy())
              for path, weight in module.named_parameters()}  # fmt: skip
    held = (name for path, layer in module.named_modules() for name, _ in layer.named_parameters(path, recurse=False))
    twice = [name for name in held if name not in arrays]
    if twice:
        raise ConfigError(f"from_torch: {twice[0]!r} is the weight of two layers, which has no form here; {INSTEAD}")
    pick = lambda wanted: {path: array for path, (needed, array) in arrays.items() if needed is wanted}
    return pick(True), pick(False)


def _own_loss(loss: Callable[[Array, Array], Array], forward: Forward, params: Weights, record: Any) -> Array:
    features, target = record
    return loss(forward(params, features), target)


class Forward:
    """Scores of one record: the steps that torch.fx found, in order."""

    def __init__(self, torch: Any, module: Any, frozen: Mapping[str, np.ndarray]):
        self.frozen = frozen
        self.steps: list[tuple[str, Step, tuple[str, ...]]] = []
        layers = dict(module.named_modules())
        for path, layer in layers.items():
            if is_batch_norm(layer):
                raise refused(path, layer, MIXES)
            if layer._forward_hooks or layer._forward_pre_hooks:  # torch.fx does not see what they do
                raise refused(path, layer, "has a forward hook, which would be left out; remove it")
        for node in traced(torch, module).nodes:
            if node.op == "output":
                (self.result,) = inputs_of(node, 1)
            elif is_batch_size(node) or is_shape(node):
                continue  # only `view` asks for it, and knows
            elif node.op != "placeholder":
                self.steps.append((node.name, *step_of(torch, node, layers)))
            else:
                self.source = node.name

    def __call__(self, params: Weights, features: Array) -> Array:
        weights = {**self.frozen, **params}
        known = {self.source: features}
        for name, step, arguments in self.steps:
            known[name] = step(weights, *(known[each] for each in arguments))
        scores = known[self.result]
        return scores[0] if scores.shape == (1,) else scores


def traced(torch: Any, module: Any) -> Any:
    try:
        return torch.fx.symbolic_trace(module).graph
    except Exception as error:  # torch.fx raises many kinds for code that depends on values
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"from_torch: the module's forward cannot be traced ({reason}); {INSTEAD}") from None


def inputs_of(node: Any, count: int) -> tuple[str, ...]:
    """Names of the arrays that a step takes; anything else in their place is refused."""
    found = node.args[:count]
    if len(found) < count or not all(hasattr(each, "name") for each in found):
        raise ConfigError(f"from_torch: {node.name}: takes something else than arrays of the record; {INSTEAD}")
    return tuple(each.name for each in found)


def is_batch_norm(layer: Any) -> bool:
    return "BatchNorm" in type(layer).__name__ or ("InstanceNorm" in type(layer).__name__ and layer.track_running_stats)


def step_of(torch: Any, node: Any, layers: Mapping[str, Any]) -> tuple[Step, tuple[str, ...]]:
    if node.op == "call_module":
        return layer_step(node.target, layers[node.target]), inputs_of(node, 1)
    if node.op in ("call_function", "call_method"):
        if node.target in (operator.add, torch.add):
            return (lambda weights, a, b: a + b), inputs_of(node, 2)
        return function_step(torch, node), inputs_of(node, 1)
    raise ConfigError(f"from_torch: {node.name}: a {node.op.replace('_', ' ')} has no form here; {INSTEAD}")
