"""`algorithm.name = "auto"`: from public facts alone to a config that leaves nothing to choose.

The recipe was found by measurement (`python -m bench.utility` measures it again): whiten the features by their private
second moment, then few rounds of DP-GD with long steps, a little momentum and the mean of the last iterates. Its
constants are the same for all data.

    nu   = sqrt(features) * |(noise on the average gradient, in clip norms, were it the only release), luck / records|
    dear = (largest eigenvalue of the noise in a full second moment) / (mean eigenvalue of the moment)

nu is the length of the noise relative to the longest signal, for one class. The smaller a task is, the larger nu, and
the lower the clip norms, and with them the length of a step: noise is then worse than bias. Where records are few and
epsilon is large, not noise but what is peculiar to these records is worse than bias (luck, RIDGE). Whitened features
allow for steps in proportion to their directions, but where there is much noise the best step depends on nu alone, on
all tasks and for all ways of whitening: what a step adds to the model's noise is step * clip norm * nu. What noise
hides of a moment is not used (silodp.stages.whiten), so a full one is never much worse than a diagonal, however dear
it is.
Under a shuffler sums of rounded integers and coins are released (P_vec), whose noise is hardly more than a trusted
server's.
Networks: silodp.plan.auto_networks.
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
MOST_FEATURES = 2000  # of a full moment: beyond, its numbers are too many to compute and send
SHARE = 0.05  # of mu^2, for the second moment
NOISE_OF_STEPS, SHORTEST = 0.13, 1.25  # the most that steps are lengthened by, times nu; but no less than this
RIDGE = 15.0  # divided by the number of records: directions that are shorter say little about more than these records
RECORDS_WITHOUT_NOISE = 100  # the same where no noise keeps the lines straight
# P_vec rounds each number to a grid: what this adds to a sum's sensitivity is 2 sqrt(numbers) / levels of it.
LEVELS, FEWEST_LEVELS, MOST_LEVELS = 20, 200, 2000  # a root of the numbers; more make larger tables of coins
LARGEST_SUM = 2**30  # in units of the grid


@dataclass(frozen=True)
class Recipe:
    """Constants of one kind of loss, on whitened features; clip norms are in lengths of a record's features."""

    step: float
    clip: float
    noise: float  # above this nu the clip norm falls,
    power: float  # with this power of it
    luck: float  # what records by themselves are worth in noise, divided by how many there are
    # Numbers become broken lines (an additive model) of the most knots whose features have a moment that is no dearer
    # than stands here. Where noise is larger, the best number of knots is smaller. Classes can gain very much from few
    # knots (ring, which no straight line can tell apart, .14 at 10); numbers that are nearly straight lose by many.
    knots: Mapping[int, float]
    records: int  # for each feature of the lines, at least: fewer are bent to what is peculiar to them
    # What steps may grow by while noised gradients agree (silodp.server): what is left of a target that is nearly a sum
    # of its columns keeps pointing the same way.
    most: float

    def clip_at(self, nu: float) -> float:
        return self.clip * min(1.0, (self.noise / nu) ** self.power)


CLASSES = Recipe(16.0, 0.25, 0.01, 0.4, 2.5, {9: 2.0, 5: 3.0, 3: 12.0}, 20, 1.0)
SQUARES = Recipe(0.5, 5.5, 0.003, 2 / 3, 4.0, {9: 1.0, 5: 2.0, 3: 12.0}, 80, 4.0)  # of loss r^2
RECIPES = {
    "logistic": CLASSES,
    "softmax": CLASSES,
    "linear": SQUARES,
    "ridge": SQUARES,
}


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
        "optimiser": OPTIMISER | ({"kind": "growing", "most": recipe.most} if private and recipe.most > 1 else {}),
        **sums_of(config, facts),
    }
    std = 0.0
    if private:
        std = noise(single_release(config, options))
        options["clip"] = recipe.clip_at(nu_of(config, facts, std))
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
    nu = nu_of(config, facts, std)
    recipe = RECIPES[config.model.kind]
    alone = "noise of the whole budget in one release, with what is peculiar to the records"
    clip = f"{alone}, is {nu:.2g} of the longest gradient"
    lower = f"clip norms are {recipe.clip_at(nu) / recipe.clip:.0%} of those of large tasks: {clip}"
    full = f"clip norms are those of large tasks: {clip} (limit {recipe.noise:g})"
    section = config.whiten or WhitenConfig()
    given, clip_norm = "moment" in section.model_fields_set, section.clip
    features = features_of(facts)
    lines = lines_reason(recipe, features, sum(facts.sizes), std, clip_norm)
    ridge = [ridge_reason(sum(facts.sizes))] if features <= MOST_FEATURES and section.ridge is None else []
    moment = [] if given else [moment_reason(features, std, clip_norm), *ridge, lines]
    steps = f"steps grow with the whitened directions, at most {longest_steps(nu):.3g} times: noise grows with them"
    if recipe.most > 1 and "optimiser" not in config.algorithm.model_fields_set:
        steps += f", and while releases agree by more than noise makes them, {recipe.most:g} times at most"
    return [*moment, full if nu <= recipe.noise else lower, steps]


def moment_reason(features: int, std: float, clip: float) -> str:
    if features > MOST_FEATURES:
        return f"a full second moment of {features} features has too many numbers (limit {MOST_FEATURES})"
    noise = f"its noise is {dear(features, std, clip):.2g} times its mean eigenvalue"
    return f"a full second moment of {features} features: {noise}, and pairs count by what their noise is worth"


def ridge_reason(records: int) -> str:
    return f"directions of mean squares below {RIDGE / records:.2g} stay short: {records} records say little of them"


def lines_reason(recipe: Recipe, features: int, records: int, std: float, clip: float) -> str:
    """Of numbers alone: a schema says which features are numbers, and the estimators ask it."""
    in_pieces = lambda knots: (knots - 1) * features
    knots = paying_knots(recipe, in_pieces, records, std, clip)
    fewest = knots or min(recipe.knots)
    count = in_pieces(fewest)
    noise = f"a second moment of all knots has noise of {dear(count, std, clip):.2g} times its mean eigenvalue"
    limits = recipe.knots[fewest], recipe.records
    why = f"{noise} (limit {limits[0]:g}), with {records / count:.3g} records for each (limit {limits[1]})"
    verdict = f"broken lines of {knots} knots pay" if knots else "broken lines do not pay"
    return f"{verdict}, were all features numbers: {why}"


def whole(config: Config, noise: Callable[[Config], float]) -> float:
    """The noise on the average gradient, in clip norms, of the whole budget in one release."""
    if not config.privacy.private:
        return 0.0
    options = {"name": AUTO_IS, "step_size": 1.0}
    return noise(single_release(config, options | SUMMED.get(config.privacy.trust, {})))


def knots_that_pay(
    config: Config, facts: Facts, features: Callable[[int], int], noise: Callable[[Config], float]
) -> int:
    """Of the broken lines that numbers become; 0 where they do not. features(knots): how many there would be."""
    check_recipe(config)
    if is_network(config):
        return 0  # which bends by itself
    recipe, records = RECIPES[config.model.kind], sum(facts.sizes)
    if not config.privacy.private:
        return next((knots for knots in recipe.knots if records >= RECORDS_WITHOUT_NOISE * features(knots)), 0)
    return paying_knots(recipe, features, records, whole(config, noise), (config.whiten or WhitenConfig()).clip)


def paying_knots(recipe: Recipe, features: Callable[[int], int], records: int, std: float, clip: float) -> int:
    for knots, dearest in recipe.knots.items():
        count = features(knots)
        if dear(count, std, clip) <= dearest and records >= recipe.records * count:
            return knots
    return 0


def dear(features: int, std: float, clip: float) -> float:
    """std: of the whole budget in one gradient, as for `chosen_config`."""
    return dearness(features, std / math.sqrt(SHARE), clip)


def check_recipe(config: Config) -> None:
    kind, trust = config.model.kind, config.privacy.trust
    if kind not in RECIPES and not is_network(config):
        known = ", ".join((*RECIPES, *NETWORKS))
        raise ConfigError(f"algorithm.name = 'auto': no recipe for model.kind = {kind!r}; known: {known}")
    known = trust in SUMMED and not is_network(config)
    if not known and not getattr(registry.find("channel", trust), "gaussian", True):
        raise ConfigError(
            f"algorithm.name = 'auto': not under trust {trust!r}, which hides record by record; name an algorithm"
        )
    if config.privacy.multipliers is not None:
        raise ConfigError("privacy.multipliers: algorithm 'auto' sets the noise itself; give privacy.epsilon, or gdp")


# What asks for sums where a trust model could also hide record by record.
SUMMED = {"shuffled": {"randomizer": "pvec"}}


def sums_of(config: Config, facts: Facts) -> dict[str, Any]:
    """The options of P_vec: the finest grid that its tables and whole numbers allow, and that is worth it."""
    found = SUMMED.get(config.privacy.trust, {})
    if not found:
        return {}
    most = min(MOST_LEVELS, LARGEST_SUM // sum(facts.sizes))
    levels = max(FEWEST_LEVELS, min(most, LEVELS * math.isqrt(features_of(facts) ** 2 // 2)))
    return found | {"grid": levels - levels % 2}


def single_release(config: Config, options: Mapping[str, Any]) -> Config:
    """The whole budget in one gradient, and in nothing before it."""
    weights = {} if config.algorithm.weights is None else {"weights": config.algorithm.weights}
    tree = tree_of(config, {**options, **weights, "clip": 1.0, "rounds": 1})
    return parse_config({key: value for key, value in tree.items() if key not in ("scale", "whiten", "intercepts")})


def whiten_of(config: Config, facts: Facts, std: float) -> dict[str, Any]:
    given = {} if config.whiten is None else config.whiten.model_dump(exclude_unset=True)
    moment = given.get("moment") or ("full" if features_of(facts) <= MOST_FEATURES else "diagonal")
    from silodp.data.preprocess import unit_length  # here: most plans have nothing to choose

    scale = {"scale": 1.0} if unit_length(config.data.preprocess) else {}
    noisy: dict[str, Any] = {"lengthen": longest_steps(nu_of(config, facts, std))} if std else {}
    if std and moment == "full":
        noisy["ridge"] = RIDGE / sum(facts.sizes)
    return {"moment": moment, "share": SHARE} | noisy | scale | given


def longest_steps(nu: float) -> float:
    return max(SHORTEST, NOISE_OF_STEPS / nu)


def tree_of(config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    return config.model_dump(exclude_unset=True) | {"algorithm": options}


def nu_of(config: Config, facts: Facts, std: float) -> float:
    return math.sqrt(weight_of(config, facts) + 1) * math.hypot(std, RECIPES[config.model.kind].luck / sum(facts.sizes))


def weight_of(config: Config, facts: Facts) -> float:
    """How many features there are; those that a schema expects to be short (of missing cells) count by their square."""
    scale = None if config.whiten is None else config.whiten.scale
    return sum((each / max(scale)) ** 2 for each in scale) if isinstance(scale, list) else features_of(facts)


def features_of(facts: Facts) -> int:
    """1 where no data is known yet, and nothing but an account can be asked."""
    return math.prod(facts.input_shape) if facts.record is not None else max(1, (facts.parameters or 2) - 1)
