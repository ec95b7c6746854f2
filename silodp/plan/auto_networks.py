"""What `auto` chooses for an mlp and a cnn, from public facts alone.

Hidden layers are smooth and normalised. Every silo draws a part RATE of the smallest silo's records by coins: that
carries the noise of all records for a tenth of the computation. Gradients are clipped low. A round's step moves
parameters by its length at most, all rounds together by the path. The result is a running mean of the iterates. The
more noise there is for so many parameters, the shorter the path, and the fewer rounds pay:

    nu = sqrt(parameters) * (noise on the average gradient, in clip norms, were it the only release)

The constants were chosen by a grid on two tasks: `python -m bench.network_rule`, docs/networks.md.
"""

from __future__ import annotations

import math
from typing import Any

from silodp.config import Config, ModelConfig
from silodp.facts import Facts
from silodp.models import NETWORKS, model_of
from silodp.objective import parameter_count

RATE, CLIP = 0.1, 0.5
ROUNDS, MORE_ROUNDS, STILL = 100, 300, 0.05  # more where nu is no larger than this
PATH, QUIET, POWER = 600.0, 0.03, 1 / 2  # above this nu the path falls, with this power of it
AVERAGE = {"kind": "exponential", "decay": 0.9}
MODEL, HIDDEN = {"activation": "tanh", "norm": "group"}, [32]


def is_network(config: Config) -> bool:
    return config.model.kind in NETWORKS


def network_tree(config: Config, facts: Facts, std: float) -> dict[str, Any]:
    """The sections that `auto` fills in; std: on the average gradient, in clip norms, of the budget in one release."""
    nu, rounds = nu_of(config, facts, std), chosen_rounds(config, facts, std)
    options: dict[str, Any] = {
        "name": "dp-sgd" if config.privacy.private else "mb-sgd",
        "rounds": rounds,
        "batch": batch_of(facts),
        "step_size": path_of(nu) / rounds / CLIP,
        "average": AVERAGE,
    }
    if config.privacy.private:
        options["clip"] = CLIP
    given = config.algorithm.model_dump(exclude_unset=True, exclude={"name"})
    return {"algorithm": options | given, "model": model_tree(config)}


def model_tree(config: Config) -> dict[str, Any]:
    hidden = {"hidden": HIDDEN} if config.model.kind == "mlp" else {}
    return hidden | MODEL | config.model.model_dump(exclude_unset=True)


def network_reasons(config: Config, facts: Facts, std: float) -> list[str]:
    nu, rounds = nu_of(config, facts, std), chosen_rounds(config, facts, std)
    noise = f"noise of the whole budget in one release is {nu:.2g} of the longest gradient"
    path = f"{path_of(nu):.3g}, {path_of(nu) / PATH:.0%} of that of large tasks" if nu > QUIET else f"{PATH:g}"
    few = "more would pay with less noise" if nu > STILL else f"noise is below {STILL:g}, so that many pay"
    return [
        f"batches of {batch_of(facts)} records a silo, {RATE:.0%} of the smallest: noise as of all, for less work",
        f"hidden layers with {MODEL['activation']} and {MODEL['norm']} norm, unless they are given: one step suits all",
        f"{rounds} rounds with steps of {path_of(nu) / rounds:.2g}, a path of {path}: {noise}",
        "as many rounds as are given" if rounds_given(config) else f"{rounds} rounds: {few}",
    ]


def batch_of(facts: Facts) -> int:
    return max(1, round(RATE * min(facts.sizes)))


def nu_of(config: Config, facts: Facts, std: float) -> float:
    parameters = facts.parameters or 1
    if facts.record is not None:
        parameters = parameter_count(model_of(ModelConfig(**model_tree(config)), facts))
    return math.sqrt(parameters) * std


def chosen_rounds(config: Config, facts: Facts, std: float) -> int:
    """Those that are given; they share the path."""
    return config.algorithm.rounds if rounds_given(config) else rounds_of(nu_of(config, facts, std))


def rounds_given(config: Config) -> bool:
    return "rounds" in config.algorithm.model_fields_set


def rounds_of(nu: float) -> int:
    return MORE_ROUNDS if nu <= STILL else ROUNDS


def path_of(nu: float) -> float:
    return PATH * min(1.0, (QUIET / max(nu, 1e-30)) ** POWER)
