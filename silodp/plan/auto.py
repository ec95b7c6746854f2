"""`algorithm.name = "auto"`: from public facts alone to a config that leaves nothing to choose.

The recipe was found by measurement (`python -m bench.utility` measures it again): whiten the features by their private
second moment, then few rounds of DP-GD with long steps, a little momentum and the mean of the last iterates. Its
constants are the same for all data.

    nu   = sqrt(parameters) * (noise on the average gradient, in clip norms, were it the only release)
    dear = (largest eigenvalue of the noise in a full second moment) / (mean eigenvalue of the moment)

nu is the length of the noise relative to the longest signal. The smaller a task is, the larger nu, and the lower the
clip norms: noise is then worse than bias. A moment that is too dear tells less than it costs: then each feature is
scaled by its own mean square, which is far fewer numbers. Networks: silodp.plan.auto_networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from silodp import registry
from silodp.config import Config, WhitenConfig
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.models import NETWORKS
from silodp.parse import parse_config
from silodp.plan.auto_networks import is_network, network_reasons, network_tree
from silodp.registry import AUTO_IS
from silodp.stages.whiten import dearness

ROUNDS, AVERAGE = 20, 10
OPTIMISER = {"kind": "nesterov", "momentum": 0.5}
DEAR = 10.0  # from here on a diagonal is as good as a full moment, or better
MOST_FEATURES = 2000  # of a full moment: beyond, its numbers are too many to compute and send
SHARES = {"full": 0.2, "diagonal": 0.05}  # of mu^2
# Numbers become broken lines (an additive model) where the moment of all their features is no dearer than this: the gas
# turbine gains .17, diamonds .07, California .03 to .07, covtype .015; a standardised California loses .04 at 7.
DEAR_IN_PIECES = 6.0
RECORDS_FOR_PIECES = 100  # for each feature, where there is no noise


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


@dataclass(frozen=True)
class Reason:
    """Why a second moment was chosen: what everybody may know."""

    features: int
    dear: float
    moment: str

    @property
    def text(self) -> str:
        ratio = f"its noise would be {self.dear:.2g} times its mean eigenvalue"
        if self.moment == "full":
            return f"a full second moment of {self.features} features pays: {ratio} (limit {DEAR:g})"
        if self.features > MOST_FEATURES:
            return f"a full second moment of {self.features} features has too many numbers (limit {MOST_FEATURES})"
        return f"a full second moment of {self.features} features is too dear: {ratio} (limit {DEAR:g})"


def chosen_config(config: Config, facts: Facts, noise: Callable[[Config], float]) -> Config:
    """The config with everything that it leaves to `auto`; what the user has given stays.

    noise(trial): std of the noise, in clip norms, on the average over all silos of a config's `value` stream.
    """
    check_recipe(config)
    if is_network(config):
        return parse_config(config.model_dump(exclude_unset=True) | network_tree(config, facts, whole(config, noise)))
    recipe, private = RECIPES[config.model.kind], config.privacy.private
    options: dict[str, Any] = {
        "name": AUTO_IS if private else "gd",
        "rounds": ROUNDS,
        "average": AVERAGE,
        "step_size": recipe.step,
        "weights": "size",
        "optimiser": OPTIMISER,
    }
    std = 0.0
    if private:
        std = noise(single_release(config, options))
        options["clip"] = recipe.clip_at(math.sqrt(parameters_of(config, facts)) * std)
        if recipe is SQUARES:  # whose gradients are as long as what is left of the target
            options["clip"] *= (config.whiten or WhitenConfig()).target
    given = config.algorithm.model_dump(exclude_unset=True, exclude={"name"})
    return parse_config(tree_of(config, options | given) | {"whiten": whiten_of(config, facts, std)})


def explained(config: Config, facts: Facts, noise: Callable[[Config], float]) -> list[str]:
    """The reasons of `chosen_config`, for people."""
    check_recipe(config)
    if is_network(config):
        return network_reasons(config, facts, whole(config, noise))
    if not config.privacy.private:
        return ["without a target there is no noise: a full second moment costs nothing"]
    std = whole(config, noise)
    nu = math.sqrt(parameters_of(config, facts)) * std
    recipe = RECIPES[config.model.kind]
    clip = f"noise of the whole budget in one release is {nu:.2g} of the longest gradient"
    lower = f"clip norms are {recipe.clip_at(nu) / recipe.clip:.0%} of those of large tasks: {clip}"
    full = f"clip norms are those of large tasks: {clip} (limit {recipe.noise:g})"
    given = config.whiten is not None and "moment" in config.whiten.model_fields_set
    moment = [] if given else [reason_of(facts, std, (config.whiten or WhitenConfig()).clip).text]
    return [*moment, full if nu <= recipe.noise else lower]


def whole(config: Config, noise: Callable[[Config], float]) -> float:
    """The noise on the average gradient, in clip norms, of the whole budget in one release."""
    if not config.privacy.private:
        return 0.0
    return noise(single_release(config, {"name": AUTO_IS, "step_size": 1.0, "weights": "size"}))


def pieces_pay(config: Config, facts: Facts, features: int, noise: Callable[[Config], float]) -> bool:
    """Whether so many features, of broken lines in the place of numbers, are worth what they cost."""
    check_recipe(config)
    if not config.privacy.private:
        return sum(facts.sizes) >= RECORDS_FOR_PIECES * features
    clip = (config.whiten or WhitenConfig()).clip
    return dearness(features + 1, whole(config, noise) / math.sqrt(SHARES["full"]), clip) <= DEAR_IN_PIECES


def check_recipe(config: Config) -> None:
    kind, trust = config.model.kind, config.privacy.trust
    if kind not in RECIPES and not is_network(config):
        known = ", ".join((*RECIPES, *NETWORKS))
        raise ConfigError(f"algorithm.name = 'auto': no recipe for model.kind = {kind!r}; known: {known}")
    if not getattr(registry.find("channel", trust), "gaussian", True):
        raise ConfigError(
            f"algorithm.name = 'auto': not under trust {trust!r}, which hides record by record; name an algorithm"
        )
    if config.privacy.multipliers is not None:
        raise ConfigError("privacy.multipliers: algorithm 'auto' sets the noise itself; give privacy.epsilon, or gdp")


def single_release(config: Config, options: Mapping[str, Any]) -> Config:
    """The whole budget in one gradient, and in nothing before it."""
    tree = tree_of(config, {**options, "clip": 1.0, "rounds": 1})
    return parse_config({key: value for key, value in tree.items() if key not in ("scale", "whiten")})


def whiten_of(config: Config, facts: Facts, std: float) -> dict[str, Any]:
    given = {} if config.whiten is None else config.whiten.model_dump(exclude_unset=True)
    moment = given.get("moment") or reason_of(facts, std, WhitenConfig(**given).clip).moment
    from silodp.data.preprocess import unit_length  # here: most plans have nothing to choose

    scale = {"scale": 1.0} if unit_length(config.data.preprocess) else {}
    return {"moment": moment, "share": SHARES[moment]} | scale | given


def reason_of(facts: Facts, std: float, clip: float) -> Reason:
    """std: as for `chosen_config`, of the whole budget in one gradient."""
    features = math.prod(facts.input_shape) if facts.record is not None else max(1, (facts.parameters or 2) - 1)
    dear = dearness(features + 1, std / math.sqrt(SHARES["full"]), clip)
    return Reason(features, dear, "full" if dear <= DEAR and features <= MOST_FEATURES else "diagonal")


def tree_of(config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    return config.model_dump(exclude_unset=True) | {"algorithm": options}


def parameters_of(config: Config, facts: Facts) -> int:
    """Of the model on whitened features; 1 where no data is known yet, and nothing but an account can be asked."""
    if facts.record is None:
        return facts.parameters or 1
    outputs = facts.outputs if config.model.kind == "softmax" else 1
    return (math.prod(facts.input_shape) + 1) * outputs
