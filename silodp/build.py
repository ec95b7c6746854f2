"""From a config and public facts about the data to the parts of a run: the same in a simulation and in a silo."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from silodp.algorithms import build_algorithm, find
from silodp.channels import Channel
from silodp.channels.options import channel_of, check_shuffle
from silodp.config import Config, ConfigError, ModelConfig
from silodp.core import Algorithm, Stream
from silodp.data import FederatedData
from silodp.models import Model, build_model
from silodp.objective import Objective, build_objective
from silodp.run.federation import Silos, attendance


@dataclass(frozen=True)
class Facts:
    """What everybody knows about the data: never a record."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    input_shape: tuple[int, ...]
    outputs: int  # classes, or 1 for a number
    task: str

    def __post_init__(self) -> None:
        for name in ("sizes", "names", "input_shape"):  # JSON brings lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @staticmethod
    def of(data: FederatedData) -> Facts:
        names = tuple(silo.name for silo in data.silos)
        return Facts(data.sizes, names, data.input_shape, max(1, len(data.classes)), data.task)


@dataclass(frozen=True)
class Assembled:
    """The objective, the algorithm and the channel that a config describes for these silos."""

    config: Config
    facts: Facts
    objective: Objective
    algorithm: Algorithm
    channel: Channel

    @property
    def queries(self) -> tuple[str, ...]:
        return self.algorithm.queries

    def releases(self, silo: int) -> list[Stream]:
        schedule = schedule_of(self.config, len(self.facts.sizes))
        rounds = range(self.config.algorithm.performed) if schedule is None else schedule[silo]
        return self.algorithm.releases(silo, self.facts.sizes, rounds)


def assemble(
    config: Config, facts: Facts, multipliers: Mapping[str, Sequence[float]], model: Model | None = None
) -> Assembled:
    """Build and check every part; nothing is computed on records here."""
    model = model or model_of(config.model, facts)
    algorithm = checked_algorithm(config, facts.sizes, facts.names)
    # Rounded up: what float32 makes of a multiplier must not be less than the plan's.
    noise = {
        stream: jnp.asarray(np.asarray(values) * (1 + 2e-7), jnp.float32) for stream, values in multipliers.items()
    }
    objective = build_objective(model, example(facts), config.model.engine)
    channel = channel_of(config, noise, algorithm, facts.sizes, objective.parameters)
    return Assembled(config, facts, objective, algorithm, channel)


def checked_algorithm(config: Config, sizes: Sequence[int], names: Sequence[str]) -> Algorithm:
    """The algorithm, after everything that can be refused without data has been."""
    options, entry = config.algorithm, find(config.algorithm.name)
    if config.privacy.trust not in entry.trusts:
        raise ConfigError(
            f"privacy.trust = {config.privacy.trust!r}: {options.name} runs under {' or '.join(entry.trusts)}"
        )
    if config.privacy.private and not entry.private:
        raise ConfigError(
            f"privacy.epsilon: {options.name} adds no noise; leave the target out or use a private algorithm"
        )
    if options.participation is not None and options.participation > len(sizes):
        raise ConfigError(f"algorithm.participation = {options.participation} exceeds the {len(sizes)} silos")
    if options.participation not in (None, len(sizes)) and entry.everyone:
        raise ConfigError(
            f"algorithm.participation = {options.participation}: {options.name} needs all {len(sizes)} silos "
            "in every round; leave it out"
        )
    try:
        algorithm = build_algorithm(options, len(sizes), config.privacy)
        # The smallest silo first: what it allows, all do.
        for i, (name, size) in sorted(enumerate(zip(names, sizes, strict=True)), key=lambda silo: silo[1][1]):
            for stream in algorithm.releases(i, tuple(sizes), range(options.rounds)):
                stream.batch.check(name, size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_shuffle(config, algorithm, sizes, silo_weights(sizes, options.weights))
    return algorithm


def silo_weights(sizes: Sequence[int], weights: str) -> np.ndarray:
    """Each silo's part of the objective."""
    share = np.asarray(sizes, np.float64) if weights == "size" else np.ones(len(sizes))
    return share / share.sum()


def schedule_of(config: Config, silos: int) -> tuple[tuple[int, ...], ...] | None:
    """The rounds of each silo when they are fixed beforehand; None: a silo may be called in any round."""
    options = config.algorithm
    if options.schedule != "fixed" or options.participation is None:
        return None
    return attendance(config.run.seed, silos, options.participation, options.performed)


def model_of(options: ModelConfig, facts: Facts) -> Model:
    if ":" in options.kind:
        module, _, function = options.kind.partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")  # a model beside the config, as `python -m` would find it
        try:
            built = getattr(importlib.import_module(module), function)(facts)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"model.kind = {options.kind!r}: cannot be imported ({error})") from None
        except TypeError as error:
            raise ConfigError(f"model.kind = {options.kind!r}: must be a function of the facts ({error})") from None
        if not isinstance(built, Model):
            raise ConfigError(f"model.kind = {options.kind!r}: gave a {type(built).__name__}; must give a silodp.Model")
        return built
    inputs = facts.input_shape[0] if len(facts.input_shape) == 1 else facts.input_shape
    given: dict[str, Any] = {
        "hidden": tuple(options.hidden),
        "activation": options.activation,
        "loss": options.loss,
        "regulariser": options.regulariser,
        "bias": options.bias,
        "initial": options.initial,
        "initial_scale": options.initial_scale,
    }
    try:
        return build_model(options.kind, inputs=inputs, outputs=facts.outputs, task=facts.task, **given)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def example(facts: Facts) -> PyTree:
    """A record of the right shape, for tracing."""
    target = jnp.zeros((), jnp.int32 if facts.task == "classification" else jnp.float32)
    return jnp.zeros(facts.input_shape, jnp.float32), target


def stacked(data: FederatedData, weights: str) -> Silos:
    features, targets, sizes = data.stack()
    return Silos(
        (jnp.asarray(features), jnp.asarray(targets)),
        jnp.asarray(sizes, jnp.int32),
        jnp.asarray(silo_weights(sizes.tolist(), weights), jnp.float32),
    )


def initial_point(objective: Objective, seed: int) -> jax.Array:
    from jax.flatten_util import ravel_pytree

    return ravel_pytree(objective.model.init(jax.random.key(seed)))[0]
