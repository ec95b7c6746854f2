"""What `auto` chooses for an mlp and a cnn, from public facts alone.

Hidden layers are smooth and normalised. Every silo draws a part RATE of the smallest silo's records by coins: that
carries the noise of all records for a tenth of the computation. Gradients are clipped low. A round's step moves
parameters by its length at most, all rounds together by the path. The result is a running mean of the iterates. The
more noise there is for so many parameters, the shorter the path, and the fewer rounds pay:

    nu = sqrt(parameters) * (noise on the average gradient, in clip norms, were it the only release)

A squared loss gets steeper the further off it is, so its steps, and its path, are much shorter than cross-entropy's.
Without an epsilon nothing is clipped, and a step is a fixed multiple of the gradient.

The constants were chosen by grids on a few tasks: `python -m bench.network_rule`, docs/networks.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from silodp.config import Config, ModelConfig
from silodp.facts import Facts
from silodp.models import NETWORKS, Model, model_of
from silodp.objective import parameter_count

RATE, CLIP = 0.1, 0.5
ROUNDS, MORE_ROUNDS, STILL = 100, 300, 0.05  # more where nu is no larger than this
AVERAGE = {"kind": "exponential", "decay": 0.9}
MODEL, HIDDEN = {"activation": "tanh", "norm": "group"}, [32]


@dataclass(frozen=True)
class Path:
    """Of one kind of loss."""

    longest: float
    quiet: float  # above this nu the path falls,
    power: float  # with this power of it
    step: float  # of one round, at most
    unclipped: float  # step size without an epsilon

    def at(self, nu: float) -> float:
        return self.longest * min(1.0, (self.quiet / max(nu, 1e-30)) ** self.power)


CROSS_ENTROPY = Path(longest=600.0, quiet=0.03, power=1 / 2, step=math.inf, unclipped=0.3)
SQUARED = Path(longest=50.0, quiet=0.02, power=1.0, step=0.5, unclipped=0.1)


def is_network(config: Config) -> bool:
    return config.model.kind in NETWORKS


def network_tree(config: Config, facts: Facts, std: float) -> dict[str, Any]:
    """The sections that `auto` fills in; std: on the average gradient, in clip norms, of the budget in one release."""
    rounds = chosen_rounds(config, facts, std)
    given = config.algorithm.model_dump(exclude_unset=True, exclude={"name"})
    options: dict[str, Any] = {
        "name": "dp-sgd" if config.privacy.private else "mb-sgd",
        "rounds": rounds,
        "batch": batch_of(facts),
        "step_size": path_for(config, facts).unclipped,
        "average": AVERAGE,
    }
    if config.privacy.private:
        options |= {"clip": CLIP, "step_size": step_of(config, facts, std) / (given.get("clip") or CLIP)}
    return {"algorithm": options | given, "model": model_tree(config)}


def model_tree(config: Config) -> dict[str, Any]:
    hidden = {"hidden": HIDDEN} if config.model.kind == "mlp" else {}
    return hidden | MODEL | config.model.model_dump(exclude_unset=True)


def network_reasons(config: Config, facts: Facts, std: float) -> list[str]:
    nu, rounds = nu_of(config, facts, std), chosen_rounds(config, facts, std)
    few = "more would pay with less noise" if nu > STILL else f"noise is below {STILL:g}, so that many pay"
    path, step = path_for(config, facts), step_of(config, facts, std)
    noise = f"noise of the whole budget in one release is {nu:.2g} of the longest gradient"
    shorter = f", {path.at(nu) / path.longest:.0%} of that of large tasks" if nu > path.quiet else ""
    steps = f"steps of {step:.2g}, a path of {rounds * step:.3g}{shorter}: {noise}"
    if not config.privacy.private:
        steps, few = f"{path.unclipped:g} of the gradient a step: nothing is clipped or noised", "as with little noise"
    if "step_size" in config.algorithm.model_fields_set:
        steps = "the step size that is given"
    return [
        f"batches of {batch_of(facts)} records a silo, {RATE:.0%} of the smallest: noise as of all, for less work",
        f"hidden layers with {MODEL['activation']} and {MODEL['norm']} norm, unless they are given: one step suits all",
        f"{rounds} rounds with {steps}",
        "as many rounds as are given" if rounds_given(config) else f"{rounds} rounds: {few}",
    ]


def batch_of(facts: Facts) -> int:
    return max(1, round(RATE * min(facts.sizes)))


def nu_of(config: Config, facts: Facts, std: float) -> float:
    model = built(config, facts)
    return math.sqrt((facts.parameters or 1) if model is None else parameter_count(model)) * std


def built(config: Config, facts: Facts) -> Model | None:
    """None where nobody knows what a record is."""
    return None if facts.record is None else model_of(ModelConfig(**model_tree(config)), facts)


def path_for(config: Config, facts: Facts) -> Path:
    model = built(config, facts)
    squared = facts.task == "regression" if model is None else model.metric == "mse"
    return SQUARED if squared else CROSS_ENTROPY


def step_of(config: Config, facts: Facts, std: float) -> float:
    """The furthest that one round moves the parameters."""
    path = path_for(config, facts)
    return min(path.step, path.at(nu_of(config, facts, std)) / chosen_rounds(config, facts, std))


def chosen_rounds(config: Config, facts: Facts, std: float) -> int:
    """Those that are given; they share the path."""
    return config.algorithm.rounds if rounds_given(config) else rounds_of(nu_of(config, facts, std))


def rounds_given(config: Config) -> bool:
    return "rounds" in config.algorithm.model_fields_set


def rounds_of(nu: float) -> int:
    return MORE_ROUNDS if nu <= STILL else ROUNDS
