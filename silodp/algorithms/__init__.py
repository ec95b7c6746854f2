"""Every algorithm by name. A line here is enough for it to be listed, run, accounted, audited and tested."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from silodp.algorithms.differences import RecursiveDifference
from silodp.algorithms.gradient import GradientDescent
from silodp.algorithms.local import LocalSGD
from silodp.core import Algorithm
from silodp.prox import build_prox
from silodp.config import AlgorithmConfig, ConfigError
from silodp.sampling import build_rule

LOWY = "Lowy, Ghafelebashi, Razaviyayn: Private Non-Convex Federated Learning Without a Trusted Server"
DIFF2 = "Murata, Suzuki: DIFF2"


@dataclass(frozen=True)
class Entry:
    """One registered algorithm: its class, what a config may not change, and what is known about it."""

    build: type[Algorithm]
    trusts: tuple[str, ...]
    summary: str
    paper: str = "folklore"
    theorem: str = ""
    private: bool = True
    fixed: dict[str, Any] = field(default_factory=dict)  # options that make the name what it is
    sampling: str | None = None  # how a batch is drawn unless the config says otherwise


BOTH = ("trusted", "untrusted")
FREE = {"clip": None, "clip_difference": None}

REGISTRY: dict[str, Entry] = {
    "gd": Entry(GradientDescent, BOTH, "gradient descent", private=False),
    "dp-gd": Entry(GradientDescent, BOTH, "full-batch clipped gradients, noised", DIFF2, "baseline"),
    "mb-sgd": Entry(GradientDescent, BOTH, "minibatch SGD", private=False, sampling="poisson"),
    "dp-sgd": Entry(
        GradientDescent, BOTH, "minibatch clipped gradients, noised", LOWY, "baseline (MB-SGD)", sampling="poisson"
    ),
    "local-sgd": Entry(
        LocalSGD, ("untrusted",), "silos train locally with noise, models are averaged", LOWY, "baseline (Local SGD)",
        sampling="poisson",
    ),
    "diff2-gd": Entry(
        RecursiveDifference, BOTH, "private gradient differences with restarts", DIFF2, "Alg. 1, 3; Thm 4.1",
        fixed={"capped": False},
    ),
    "spider": Entry(
        RecursiveDifference, BOTH, "private gradient differences with restarts, any prox", LOWY, "Alg. 3; Thm 3.1"
    ),
}  # fmt: skip

# What every algorithm takes, and what the run takes care of: never "not used".
COMMON = {"name", "rounds", "step_size", "participation", "schedule", "weights", "prox", "batch", "sampling"}
COMPRESSION = {"compressor", "keep", "levels", "shifted"}


def find(name: str) -> Entry:
    if name not in REGISTRY:
        raise ConfigError(f"algorithm.name = {name!r}: unknown; known: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def build_algorithm(options: AlgorithmConfig) -> Algorithm:
    """The algorithm a config describes; a missing or unused option is named."""
    entry = find(options.name)
    fields = {f.name: f for f in dataclasses.fields(entry.build)}
    refuse_unused(options, entry, set(fields))
    values = {name: option(name, options, entry, f) for name, f in fields.items()}
    return entry.build(**values)


def option(name: str, options: AlgorithmConfig, entry: Entry, spec: dataclasses.Field) -> Any:
    if name in entry.fixed:
        return entry.fixed[name]
    if name == "prox":
        return prox_of(options.prox)
    if name == "batch":
        return build_rule(options.sampling or entry.sampling, options.batch, options.rounds)
    value = getattr(options, name)
    if value is None and not entry.private and name.startswith("clip"):
        return None  # a method without privacy does not clip
    if value is None and spec.default is dataclasses.MISSING:
        raise ConfigError(f"algorithm.{name} is missing: {options.name} needs it")
    if value is None:
        return spec.default
    return value if spec.metadata.get("static", False) else jnp.float32(value)


def refuse_unused(options: AlgorithmConfig, entry: Entry, used: set[str]) -> None:
    for name in sorted(options.model_fields_set - COMMON - COMPRESSION - (used - set(entry.fixed))):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"algorithm.{name} = {getattr(options, name)!r}: {options.name} does not use it; leave it out"
            )


def prox_of(given: str | dict[str, Any]) -> Any:
    kind, rest = (given, {}) if isinstance(given, str) else (given.get("kind", ""), {**given})
    rest.pop("kind", None)
    try:
        return build_prox(str(kind), **rest)
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None
