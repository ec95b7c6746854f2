"""The numbers that a theorem may choose an algorithm's options from, and what it has chosen so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from silodp.compressors import build_compressor
from silodp.config import AlgorithmConfig, ConfigError, PrivacyConfig
from silodp.privacy import gaussian


@dataclass(frozen=True)
class Choice:
    """Missing constants are named when a formula first needs them."""

    options: AlgorithmConfig
    privacy: PrivacyConfig
    sizes: tuple[int, ...]
    parameters: int | None
    chosen: dict[str, Any] = field(default_factory=dict)

    def pick(self, name: str, formula: Callable[[], Any]) -> Any:
        """What the config gives, or else what the formula says; only then are its constants needed."""
        given = getattr(self.options, name)
        if given is None or (name == "rounds" and "rounds" not in self.options.model_fields_set):
            given = self.chosen[name] = formula()
        return given

    def constant(self, name: str) -> float:
        value = getattr(self.options, name)
        if value is None:
            raise ConfigError(f"algorithm.{name} is missing: the theorem of {self.options.name} needs it")
        return value

    @property
    def L(self) -> float:
        return self.constant("smoothness")

    @property
    def G(self) -> float:
        return self.constant("gradient_bound")

    @property
    def d(self) -> int:
        if self.parameters is None:
            raise ConfigError(f"model.parameters is missing: the theorem of {self.options.name} needs it")
        return self.parameters

    @property
    def n(self) -> int:
        return min(self.sizes)

    @property
    def silos(self) -> int:
        return self.options.participation or len(self.sizes)

    @property
    def reach(self) -> float:
        return self.n * (math.sqrt(self.silos) if self.privacy.trust == "untrusted" else self.silos)

    @property
    def steps(self) -> int:
        return self.options.local_steps or 1

    @property
    def rho(self) -> float:
        """The target as a Gaussian-DP mu."""
        if self.privacy.gdp is not None:
            return self.privacy.gdp
        return gaussian.mu_of(self.target("epsilon"), self.privacy.delta)

    @property
    def epsilon(self) -> float:
        if self.privacy.gdp is not None:
            return gaussian.epsilon_of(self.privacy.delta, self.privacy.gdp)
        return self.target("epsilon")

    def target(self, name: str) -> float:
        value = getattr(self.privacy, name)
        if value is None:
            raise ConfigError(f"privacy.{name} is missing: the theorem of {self.options.name} needs it")
        return value

    @property
    def noise(self) -> float:
        """d ln(1/delta) / (reach epsilon)^2: what privacy costs every one of the rates, up to G, L and a power."""
        return self.d * math.log(1 / self.privacy.delta) / (self.reach * self.epsilon) ** 2

    @property
    def omega(self) -> float:
        options = self.options
        if options.compressor is None:
            return 0.0
        try:
            return build_compressor(options.compressor, options.keep, options.levels).omega(self.d)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from None


def whole(value: float, most: float = math.inf) -> int:
    return max(1, math.ceil(min(value, most)))
