"""`algorithm.name = "auto"`: from public facts alone to a config that leaves nothing to choose.

The recipe was found by measurement (`python -m bench.utility` measures it again): whiten the features by their private
second moment, then few rounds of DP-GD with long steps and the mean of the last iterates. Its constants are the same
for all data.

    nu = sqrt(parameters) * (noise on the average gradient, in clip norms, were it the only release)

is the length of the noise relative to the longest signal. The smaller a task is, the larger nu, and the lower the clip
norms: noise is then worse than bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from silodp import registry
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.parse import parse_config
from silodp.registry import AUTO_IS

ROUNDS, AVERAGE = 20, 10


@dataclass(frozen=True)
class Recipe:
    """Constants of one kind of loss, on whitened features; clip norms are in lengths of a record's features."""

    step: float
    clip: float
    noise: float  # above this nu the clip norm falls,
    power: float  # with this power of it

    def clip_at(self, nu: float) -> float:
        return self.clip * min(1.0, (self.noise / nu) ** self.power)


SQUARES = Recipe(0.4, 4.0, 0.005, 1 / 2)  # of loss r^2
RECIPES = {
    "logistic": Recipe(8.0, 0.5, 0.02, 1 / 3),
    "softmax": Recipe(8.0, 0.5, 0.02, 1 / 3),
    "linear": SQUARES,
    "ridge": SQUARES,
}


def chosen_config(config: Config, facts: Facts, noise: Callable[[Config], float]) -> Config:
    """The config with everything that it leaves to `auto`; what the user has given stays.

    noise(trial): std of the noise, in clip norms, on the average over all silos of a config's `value` stream.
    """
    kind = config.model.kind
    if kind not in RECIPES:
        raise ConfigError(f"algorithm.name = 'auto': no recipe for model.kind = {kind!r}; known: {', '.join(RECIPES)}")
    trust = config.privacy.trust
    if not getattr(registry.find("channel", trust), "gaussian", True):
        raise ConfigError(
            f"algorithm.name = 'auto': not under trust {trust!r}, which hides record by record; name an algorithm"
        )
    if config.privacy.multipliers is not None:
        raise ConfigError("privacy.multipliers: algorithm 'auto' sets the noise itself; give privacy.epsilon, or gdp")
    recipe, private = RECIPES[kind], config.privacy.private
    options: dict[str, Any] = {
        "name": AUTO_IS if private else "gd",
        "rounds": ROUNDS,
        "average": AVERAGE,
        "step_size": recipe.step,
        "weights": "size",
    }
    if private:
        once = parse_config(tree_of(config, {**options, "clip": 1.0, "rounds": 1}))
        options["clip"] = recipe.clip_at(math.sqrt(parameters_of(config, facts)) * noise(once))
    given = config.algorithm.model_dump(exclude_unset=True, exclude={"name"})
    return parse_config(tree_of(config, options | given) | {"whiten": config.whiten or {}})


def tree_of(config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    return config.model_dump(exclude_unset=True) | {"algorithm": options}


def parameters_of(config: Config, facts: Facts) -> int:
    """Of the model on whitened features; 1 where no data is known yet, and nothing but an account can be asked."""
    if facts.record is None:
        return facts.parameters or 1
    outputs = facts.outputs if config.model.kind == "softmax" else 1
    return (math.prod(facts.input_shape) + 1) * outputs
