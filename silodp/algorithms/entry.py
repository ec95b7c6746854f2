"""What the library knows about an algorithm beside its code, and how the options of a config become one.

Each class's fields are named as the options are. An algorithm from outside is a class with an `entry` of its own, or
none: then it is taken to run under every trust model, with no theorem and no paper.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from silodp import registry
from silodp.config import SHARED_KEYS, THEORY_CONSTANTS, AlgorithmConfig
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.prox import Prox, build_prox, build_sum
from silodp.sampling import BatchRule, FixedSize, Full, Share, build_rule
from silodp.server import build_decay, build_optimiser

if TYPE_CHECKING:
    from silodp.algorithms.proofs import Condition
    from silodp.algorithms.theory import Choice
    from silodp.channels import Channel

BOTH = ("trusted", "untrusted")
MEANS = (*BOTH, "aggregated")  # releases are means with Gaussian noise
ALL = (*MEANS, "shuffled")
SERVER_KEYS = {"optimiser", "step_decay"}  # for algorithms that step as the library's own do
PLACEHOLDER = 0.5  # for numbers that a run needs but a privacy statement does not depend on


@dataclass(frozen=True)
class Case:
    """What a printed formula may depend on."""

    options: AlgorithmConfig
    epsilon: float
    delta: float
    records: int
    silos: int
    gdp: float | None = None

    @property
    def batch(self) -> int:
        share = self.options.batch_share
        return self.options.batch or (self.records if share is None else max(1, round(share * self.records)))


@dataclass(frozen=True)
class Printed:
    """A paper's own calibration: noise multipliers (std over our sensitivity) by stream, as its formula gives them."""

    formula: str
    noise: Callable[[Case], dict[str, float]]
    trusts: tuple[str, ...] = BOTH
    claims_gdp: bool = False  # the paper's target is a Gaussian-DP mu


@dataclass(frozen=True)
class Entry:
    """One registered algorithm: its class, what a config may not change, and what is known about it."""

    build: type[Algorithm]
    trusts: tuple[str, ...] | None = None  # None: every one that there is
    summary: str = ""
    paper: str = "folklore"
    proved: Mapping[str, str] = field(default_factory=dict)  # trust model -> theorem that covers it
    conditions: tuple[Condition, ...] = ()  # under which it does (silodp.algorithms.proofs)
    case: Callable[[Choice], str] | None = None  # which theorem it is, where that depends on the options
    some_silos: bool = False  # whether the theorem lets silos be absent
    example: Mapping[str, Any] = field(default_factory=dict)  # minimal options, for tests and audits on small data
    private: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that make the name what it is
    sampling: str | None = None  # how a batch is drawn unless the config says otherwise
    samplings: tuple[str, ...] = ("full", "poisson", "fixed", "one-pass")
    compression: str = "optional"  # "optional", "plain" or "shifted": what the name implies, or "none"
    any_prox: bool = False  # whether the theorem covers any prox
    randomizer: str = "duchi"  # what hides a record before a shuffler, unless the config says otherwise
    everyone: bool = False  # every silo must take part in every round
    theory: Callable[[Choice], None] | None = None  # what the theorem chooses
    asked_by: tuple[str, ...] = ()  # constants that, given together, ask the theorem without `theory = true`
    printed: Printed | None = None
    rate: str = ""  # of the squared gradient norm, or of the excess loss for convex and PL losses
    cost: str = ""  # record gradients of a silo in a round
    bits: str = "32 d"  # that a silo sends in a round
    output: str = "after"  # what the theorem's output is drawn from (silodp.core.Algorithm.output)
    same_silos: str | None = None  # the option that says through how many rounds the same silos answer

    def runs_under(self, trust: str) -> bool:
        """A trust model from outside says itself, in its `check`, what it cannot keep."""
        return self.trusts is None or trust in self.trusts or not registry.is_own("channel", trust)

    def printed_for(self, trust: str) -> Printed | None:
        return self.printed if self.printed is not None and trust in self.printed.trusts else None

    def algorithm(self, options: AlgorithmConfig, channel: Channel, silos: int, *, private: bool) -> Algorithm:
        """The algorithm that a config describes; a missing or unused option is named."""
        fields = {f.name: f for f in dataclasses.fields(self.build)}
        self._refuse_unused(options, set(fields))
        clipless = not (self.private and private)  # a run without privacy need not clip
        made = {
            "silos": lambda: silos,
            "prox": lambda: prox_of(options.prox),
            "batch": lambda: self._batch(options, channel, "batch"),
            "batch_difference": lambda: (
                None if options.batch_difference is None else self._batch(options, channel, "batch_difference")
            ),
            "batch_local": lambda: sized(options.batch_local, "batch_local") or Full(),
            "batch_first": lambda: sized(options.batch_first, "batch_first"),
            "output": lambda: self.output,
            "optimiser": lambda: build_optimiser(options.optimiser),
            "step_decay": lambda: build_decay(options.step_decay, options.rounds),
            "penalty": lambda: None,  # the model's; see silodp.objective.with_penalty
        }

        def value(name: str) -> Any:
            if name in self.fixed:
                return self.fixed[name]
            return made[name]() if name in made else option(options, fields[name], clipless=clipless)

        algorithm = self.build(**{name: value(name) for name in fields})
        algorithm.check(options.rounds)
        return algorithm

    def with_placeholders(self, options: AlgorithmConfig) -> AlgorithmConfig:
        """Numbers that do not shape the program need not be given where only its cost is asked, nor a compressor:
        noise is added before it."""
        given = options.given
        missing: dict[str, Any] = {
            f.name: PLACEHOLDER
            for f in dataclasses.fields(self.build)
            if not f.metadata.get("static") and f.name not in ("prox", "batch", "optimiser", *self.fixed, *given)
            and (f.default is dataclasses.MISSING or f.name.startswith(("clip", "diameter")))
        }  # fmt: skip
        if self.compression in ("plain", "shifted"):
            missing["compressor"] = "identity"
        return AlgorithmConfig.model_validate(missing | options.model_dump(exclude_unset=True, exclude_none=True))

    def _batch(self, options: AlgorithmConfig, channel: Channel, key: str) -> BatchRule:
        if key == "batch" and options.batch_share is not None:
            if self.samplings == ("full",) or "poisson" not in self.samplings or not channel.hides_sizes:
                raise ConfigError(
                    f"algorithm.batch_share = {options.batch_share:g}: {options.name} has none under this trust model, "
                    "where batches have an agreed size; give batch"
                )
            return Share(0, rate=options.batch_share)
        batch = getattr(options, key)
        if options.sampling is not None and options.sampling not in self.samplings:
            allowed = " or ".join(self.samplings)
            raise ConfigError(f"algorithm.sampling = {options.sampling!r}: {options.name} samples {allowed}")
        kind = channel.batches(options.sampling or self.sampling, asked=options.sampling is not None)
        if kind == "two-level" and batch is None:
            raise ConfigError(f"algorithm.batch is missing: {options.name} needs it")
        if batch is not None and self.samplings == ("full",):
            raise ConfigError(f"algorithm.{key} = {batch}: {options.name} uses all records; leave it out")
        return build_rule(kind, batch, options.rounds, key)

    def _refuse_unused(self, options: AlgorithmConfig, fields: set[str]) -> None:
        for constant in THEORY_CONSTANTS:
            needed = options.theory or constant in self.asked_by or bool(self.conditions)
            if getattr(options, constant) is not None and not needed:
                raise ConfigError(
                    f"algorithm.{constant} = {getattr(options, constant)} has no effect without theory = true"
                )
        kept = set(self.fixed) | (set() if self.build.steps else SERVER_KEYS)
        used = (SHARED_KEYS | fields | compressor_fields(options)) - kept
        for name in sorted(options.model_fields_set - used):
            value = getattr(options, name)
            if name in options.own:
                close = difflib.get_close_matches(name, sorted(used), n=1)
                meant = f" (did you mean {close[0]}?)" if close else ""
                own = ", ".join(sorted(fields - kept - {"output", "penalty"}))
                raise ConfigError(f"algorithm.{name}: unknown key{meant}; {options.name} takes {own}")
            if value is not None:
                raise ConfigError(f"algorithm.{name} = {value!r}: {options.name} does not use it; leave it out")


def compressor_fields(options: AlgorithmConfig) -> set[str]:
    """Options that belong to a compressor from outside."""
    if options.compressor is None or registry.is_own("compressor", options.compressor):
        return set()
    return {f.name for f in dataclasses.fields(registry.find("compressor", options.compressor))}


def option(options: AlgorithmConfig, spec: dataclasses.Field, *, clipless: bool) -> Any:
    """A field's value: a number that may be swept is traced, what shapes the program stays as it is."""
    value = getattr(options, spec.name, None)
    if value is None and spec.name.startswith("clip") and clipless:
        return None
    if value is None and spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
        raise ConfigError(f"algorithm.{spec.name} is missing: {options.name} needs it")
    if value is None:
        value = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        return traced(value) if isinstance(value, float) and not spec.metadata.get("static") else value
    if spec.metadata.get("static", False):
        registry.check_option(f"algorithm.{spec.name}", value, spec.type)
        return value
    if not isinstance(value, int | float):
        raise ConfigError(f"algorithm.{spec.name} = {value!r}: must be a number")
    return traced(value)


def traced(value: float) -> jax.Array:
    """A number that programs take as an argument, made without a program of its own."""
    return jax.device_put(np.float32(value))


def sized(batch: int | None, key: str) -> BatchRule | None:
    return None if batch is None else FixedSize(batch, key)


def prox_kind(given: Any) -> str:
    if isinstance(given, list):
        return " + ".join(prox_kind(part) for part in given)
    return given if isinstance(given, str) else str(given.get("kind", ""))


def prox_of(given: Any) -> Prox:
    """A kind, a table with its numbers, or a list of a penalty and a set."""
    try:
        if isinstance(given, list):
            return build_sum(given)
        return build_prox(given) if isinstance(given, str) else build_prox(**given)
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None
