"""What the families' theorems share: the numbers they may choose from, and the rates of private descent.

    [algorithm] theory = true, smoothness = L, gradient_bound = G (diameter, heterogeneity, pl_constant where needed)

fills in what a config leaves out; what it gives is kept, and the rest is chosen to go with it. Only public numbers are
used: the constants, d, the silos' sizes, and the target (epsilon, delta). mu2 needs no `theory = true` for its step
size and clip. Constants that the theorems hide are chosen here, the same for all:

- O(.) and Theta(.) have constant 1; the ln(1/delta) that a tilde hides stands beside d, as in Lowy et al., Thm F.1.
- F(x0) - min F is taken to be 1 (GAP), as DIFF2 assumes up to a constant.
- `reach` is n*sqrt(N) under an untrusted server and n*N under any other, n the smallest silo, N the silos of a round:
  the noise of the mean falls with it, and it turns a theorem for one trust model into one for the other.
- The noise of differences is the one that the plan will really add, not the paper's bound on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from silodp.channels import Channel
from silodp.config import AlgorithmConfig, PrivacyConfig
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.privacy import gaussian
from silodp.sampling import MOVES

GAP = 1.0

Share = Callable[[str, dict[str, Any]], tuple[int, float]]


@dataclass(frozen=True)
class Choice:
    """Missing constants are named when a formula first needs them.

    `share` asks the plan: how often a stream is released, and with which part of mu^2, when the options chosen so far
    are filled in with these.
    """

    options: AlgorithmConfig
    privacy: PrivacyConfig
    facts: Facts
    channel: Channel
    share: Share
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
        if self.facts.parameters is None:
            raise ConfigError(f"model.parameters is missing: the theorem of {self.options.name} needs it")
        return self.facts.parameters

    @property
    def n(self) -> int:
        return min(self.facts.sizes)

    @property
    def silos(self) -> int:
        return self.facts.answering

    @property
    def spread(self) -> float:
        """By how much the noise of the mean is smaller than a silo's own."""
        return self.channel.averaged(self.silos)

    @property
    def reach(self) -> float:
        return self.n * self.spread

    @property
    def steps(self) -> int:
        return self.options.local_steps or 1

    @property
    def rho(self) -> float:
        """The target as a Gaussian-DP mu."""
        if self.privacy.gdp is not None:
            return self.privacy.strictest.gdp or 0.0
        return gaussian.mu_of(self._target, self.privacy.delta)

    @property
    def epsilon(self) -> float:
        if self.privacy.gdp is not None:
            return gaussian.epsilon_of(self.privacy.delta, self.rho)
        return self._target

    @property
    def _target(self) -> float:
        target = self.privacy.strictest.epsilon
        if target is None:
            raise ConfigError(f"privacy.epsilon is missing: the theorem of {self.options.name} needs it")
        return target

    @property
    def noise(self) -> float:
        """d ln(1/delta) / (reach epsilon)^2: what privacy costs every one of the rates, up to G, L and a power."""
        return self.d * math.log(1 / self.privacy.delta) / (self.reach * self.epsilon) ** 2

    @property
    def omega(self) -> float:
        return self.channel.variance(self.d)


def whole(value: float, most: float = math.inf) -> int:
    return max(1, math.ceil(min(value, most)))


def horizon(c: Choice) -> float:
    """Rounds of length 1/L after which the noise has caught up with the descent (SoteriaFL, eq. 47)."""
    return math.sqrt(c.L * GAP / ((1 + c.omega) * c.noise)) / c.G


def gradient(c: Choice) -> None:
    """dp-gd, dp-sgd, ldp-sgd, cdp-sgd: SoteriaFL, Thm 1 and its proof; the papers give the others no theorem.

    The proof's second bound on the rounds is about sampling and compression: full, plain messages do not need it.
    """
    c.pick("clip", lambda: c.G)
    exact = c.options.batch is None and c.options.compressor is None
    least = lambda: 0.0 if exact else 1 / (c.silos * c.noise)
    rounds = c.pick("rounds", lambda: whole(max(horizon(c), least())))
    c.pick("step_size", lambda: min(1.0, horizon(c) / rounds) / c.L)


def difference_clips(c: Choice) -> None:
    c.pick("clip", lambda: c.G)
    c.pick("clip_difference", lambda: c.L)


def difference_noise(c: Choice, stream: str = "difference", **options: int) -> float:
    """Std of the mean difference's noise per unit of |x - y|, over L: the plan's, for full batches."""
    count, share = c.share(stream, c.chosen | options)
    return MOVES * math.sqrt(count / share) / (c.rho * c.reach)


def stable_step(c: Choice, noise: float, span: float, steps: int = 1) -> float:
    """The longest step at which noise gathered over `span` rounds stays below the descent.

    DIFF2, Thm 4.3, min(1/L, 1/(sqrt(T d) L sigma2)), with the constants of Lowy et al.'s proof of Thm F.1. With K local
    steps a round only the second part is divided by K (DIFF2, Thm F.4): what is descent needs no shorter steps.
    """
    return min(0.5, 1 / (steps * math.sqrt(8 * span * c.d * noise**2)) if noise else 0.5) / c.L


def optimum(c: Choice) -> float:
    """The best squared gradient norm that privacy allows to private differences, (L G d)^(2/3) / (reach eps)^(4/3)."""
    return (GAP * c.L * c.G * c.noise) ** (2 / 3)


def heterogeneity(c: Choice) -> float:
    """Hessians bounded by L are never further than 2 L from their mean."""
    return c.options.heterogeneity or 2 * c.L


def local_limits(c: Choice, K: int, b: int, rounds: int) -> tuple[float, ...]:
    """Steps at which a silo's own steps stay close to descent on F (DIFF2, Prop. F.2; PSGM, Thm 4.2)."""
    if K == 1:
        return (1 / c.L,)
    log = math.log(1 / c.privacy.delta)
    variance = log * (K * rounds / (c.silos * (c.n * c.epsilon) ** 2) + 1 / (b**2 * c.epsilon))
    return 1 / (K * heterogeneity(c)), math.sqrt(b / K) / c.L, 1 / (math.sqrt(K * c.d * variance) * c.L)


def condition(c: Choice) -> float:
    """kappa of a proximal PL loss."""
    return c.L / c.constant("pl_constant")
