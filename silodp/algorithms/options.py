"""From the options of a config to an algorithm: each class's fields are named as the options are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from silodp.algorithms.registry import Entry, find
from silodp.config import AlgorithmConfig, ConfigError, PrivacyConfig
from silodp.core import Algorithm
from silodp.prox import Prox, build_prox
from silodp.sampling import BatchRule, FixedSize, Full, build_rule

# What every algorithm takes, and what the run takes care of: never "not used".
COMMON = {"name", "rounds", "stop_after", "step_size", "prox", "batch", "sampling"}
SILOS = {"participation", "schedule", "weights"}
COMPRESSION = {"compressor", "keep", "levels", "shifted"}
SHUFFLE = {"randomizer", "grid"}
# Constants of the problem, from which the theorems' defaults follow (silodp.algorithms.theory).
THEORY = {"theory", "gradient_bound", "smoothness", "heterogeneity", "pl_constant"}


def build_algorithm(options: AlgorithmConfig, silos: int, privacy: PrivacyConfig) -> Algorithm:
    """The algorithm a config describes; a missing or unused option is named."""
    entry = find(options.name)
    fields = {f.name: f for f in dataclasses.fields(entry.build)}
    refuse_unused(options, entry, set(fields))
    return entry.build(**{name: option(name, options, entry, f, silos, privacy) for name, f in fields.items()})


def option(
    name: str, options: AlgorithmConfig, entry: Entry, spec: dataclasses.Field, silos: int, privacy: PrivacyConfig
) -> Any:
    if name in entry.fixed:
        return entry.fixed[name]
    if name == "silos":
        return silos
    if name == "prox":
        return prox_of(options.prox)
    if name == "batch":
        return batch_of(options, entry, privacy.trust)
    if name == "batch_local":
        return Full() if options.batch_local is None else FixedSize(options.batch_local)
    if name == "batch_first":
        return None if options.batch_first is None else FixedSize(options.batch_first)
    value = getattr(options, name)
    if value is None and name.startswith("clip") and not (entry.private and privacy.private):
        return None  # a run without privacy need not clip
    if value is None and spec.default is dataclasses.MISSING:
        raise ConfigError(f"algorithm.{name} is missing: {options.name} needs it")
    if value is None:
        return spec.default
    return value if spec.metadata.get("static", False) else jnp.float32(value)


def batch_of(options: AlgorithmConfig, entry: Entry, trust: str) -> BatchRule:
    kind = options.sampling or entry.sampling
    if options.sampling is not None and options.sampling not in entry.samplings:
        allowed = " or ".join(entry.samplings)
        raise ConfigError(f"algorithm.sampling = {options.sampling!r}: {options.name} samples {allowed}")
    if kind == "poisson" and trust == "shuffled":
        if options.sampling == "poisson":
            raise ConfigError(
                "algorithm.sampling = 'poisson': a shuffler releases an agreed number of messages; use 'fixed'"
            )
        kind = "fixed"
    if kind == "two-level" and options.batch is None:
        raise ConfigError(f"algorithm.batch is missing: {options.name} needs it")
    if kind == "cumulative" and options.batch is None:
        return build_rule(kind, 1, options.rounds)  # one fresh record a round
    if options.batch is not None and entry.samplings == ("full",):
        raise ConfigError(f"algorithm.batch = {options.batch}: {options.name} uses all records; leave it out")
    return build_rule(kind, options.batch, options.rounds)


def refuse_unused(options: AlgorithmConfig, entry: Entry, used: set[str]) -> None:
    known = COMMON | SILOS | COMPRESSION | SHUFFLE | THEORY | (used - set(entry.fixed))
    for name in sorted(options.model_fields_set - known):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"algorithm.{name} = {getattr(options, name)!r}: {options.name} does not use it; leave it out"
            )


def prox_kind(given: str | dict[str, Any]) -> str:
    return given if isinstance(given, str) else str(given.get("kind", ""))


def prox_of(given: str | dict[str, Any]) -> Prox:
    rest = {} if isinstance(given, str) else {key: value for key, value in given.items() if key != "kind"}
    try:
        return build_prox(prox_kind(given), **rest)
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None
