"""What `auto` chooses for an mlp and a cnn, from public facts alone. `python -m bench.networks` measures its parts.

Hidden layers are smooth and normalised. Gradients are clipped so low that nearly every record counts alike, and a step
has a length that is told in clip norms. Batches are large: every silo draws a part RATE of the smallest silo's records
by coins. The result is a running mean of the iterates. The more noise there is for so many parameters, the shorter the
steps:

    nu = sqrt(parameters) * (noise on the average gradient, in clip norms, were it the only release)
"""

from __future__ import annotations

import math
from typing import Any

from silodp.config import Config, ModelConfig
from silodp.facts import Facts
from silodp.models import NETWORKS, model_of
from silodp.objective import parameter_count

ROUNDS, RATE, CLIP = 100, 0.1, 0.1
STEP, QUIET, POWER = 2.0, 0.05, 1 / 2  # in clip norms; above this nu it falls, with this power of it
AVERAGE = {"kind": "exponential", "decay": 0.9}
MODEL, HIDDEN = {"activation": "tanh", "norm": "group"}, [32]


def is_network(config: Config) -> bool:
    return config.model.kind in NETWORKS


def network_tree(config: Config, facts: Facts, std: float) -> dict[str, Any]:
    """The sections that `auto` fills in; std: on the average gradient, in clip norms, of the budget in one release."""
    options: dict[str, Any] = {
        "name": "dp-sgd" if config.privacy.private else "mb-sgd",
        "rounds": ROUNDS,
        "batch": batch_of(facts),
        "step_size": step_of(nu_of(config, facts, std)) / CLIP,
        "weights": "size",
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
    nu, batch = nu_of(config, facts, std), batch_of(facts)
    noise = f"noise of the whole budget in one release is {nu:.2g} of the longest gradient"
    shorter = f"steps are {step_of(nu):.2g} clip norms long, {step_of(nu) / STEP:.0%} of those of large tasks: {noise}"
    full = f"steps are {STEP:g} clip norms long, as for large tasks: {noise} (limit {QUIET:g})"
    return [
        f"batches of {batch} records a silo, {RATE:.0%} of the smallest: large ones carry less noise for their length",
        f"hidden layers with {MODEL['activation']} and {MODEL['norm']} norm, unless they are given: one step suits all",
        full if nu <= QUIET else shorter,
    ]


def batch_of(facts: Facts) -> int:
    return max(1, round(RATE * min(facts.sizes)))


def nu_of(config: Config, facts: Facts, std: float) -> float:
    parameters = facts.parameters or 1
    if facts.record is not None:
        parameters = parameter_count(model_of(ModelConfig(**model_tree(config)), facts))
    return math.sqrt(parameters) * std


def step_of(nu: float) -> float:
    return STEP * min(1.0, (QUIET / max(nu, 1e-30)) ** POWER)
