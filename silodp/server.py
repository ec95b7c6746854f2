"""What a server may do with private estimates beside a plain step: momentum, Adam, and steps that shrink.

DIFF2 (Alg. 1, line 17) leaves the routine that uses the private gradient open, and SoteriaFL (Alg. 2) takes its step
sizes as inputs. An optimiser here turns an estimate v into a direction, and x = prox(x - step_size * direction).
It sees what is public already, so it costs no privacy, whatever the estimator and the trust model.

    heavy-ball  m = momentum * m + v;                  direction m
    nesterov    m = momentum * m + v;                  direction momentum * m + v
    adam        m, s: running means of v and v^2;      direction m / (sqrt(s) + small), both corrected for their start
    growing     as nesterov, times `factor` for every round (from the 7th to the 20th) whose last five v agree: their
                mean inner product is more than noise makes of it; times `most` in the end at most

The first three are optax's. `small` keeps coordinates that see little but noise from being blown up. `growing` is for
private estimates: where steps are short for the noise, and the signal is strong, releases keep pointing the same way.
Estimates that share their noise, as SPIDER's do between restarts, agree by that as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from silodp.errors import ConfigError
from silodp.later import Later

if TYPE_CHECKING:
    import optax
else:
    optax = Later("optax")

Vector = Float[Array, " d"]
Given = str | Mapping[str, Any] | list[float]  # a kind, a table with its numbers, or a number for every round


class Optimiser(eqx.Module):
    """A direction from an estimate and what was kept: one of optax's transformations.

    Its numbers are traced, so that settings of a sweep share a program.
    """

    kind: str = eqx.field(static=True)
    numbers: dict[str, Any]

    def open(self, x0: Vector) -> PyTree:
        """What is kept before the first step."""
        return self.rule.init(x0)

    def __call__(self, v: Vector, kept: PyTree) -> tuple[Vector, PyTree]:
        return self.rule.update(v, kept)

    @property
    def rule(self) -> Any:
        return RULES[self.kind](**self.numbers)


WINDOW, FROM, UNTIL = 5, 7, 20  # v that are compared; rounds after which steps may grow
CLEARLY = 0.04  # the least agreement that is worth a longer step, in what noise and change make of one v


def agree(window: Float[Array, "q d"]) -> Array:
    """Whether so many estimates have a mean inner product beyond that of noise alone, by one deviation of it."""
    count, size = window.shape
    pairs = count * (count - 1)
    mean = jnp.mean(window, axis=0)
    between = (jnp.sum((count * mean) ** 2) - jnp.sum(window**2)) / pairs
    apart = jnp.sum((window - mean) ** 2) / (count - 1)
    return between > (CLEARLY + math.sqrt(2 / (pairs * size))) * apart


class Growth(NamedTuple):
    """What `growing` keeps."""

    plain: Any  # of Nesterov's momentum
    window: Float[Array, "q d"]  # the last v
    done: Array  # rounds
    longer: Array


def growing(momentum: Any, factor: Any, most: Any) -> optax.GradientTransformation:
    """Nesterov's momentum, with longer steps where releases keep agreeing."""
    plain = optax.trace(momentum, nesterov=True)

    def init(params: Any) -> Growth:
        return Growth(plain.init(params), jnp.zeros((WINDOW, params.size)), jnp.int32(0), jnp.float32(1))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Growth]:
        window, done = jnp.roll(state.window, -1, axis=0).at[-1].set(updates), state.done + 1
        asked = (done >= FROM) & (done <= UNTIL)
        longer = jnp.where(asked & agree(window), jnp.minimum(most, factor * state.longer), state.longer)
        direction: Any
        direction, own = plain.update(updates, state.plain)
        return longer * direction, Growth(own, window, done, longer)

    return optax.GradientTransformation(init, update)


RULES: dict[str, Callable[..., Any]] = {
    "heavy-ball": lambda momentum: optax.trace(momentum),
    "nesterov": lambda momentum: optax.trace(momentum, nesterov=True),
    "adam": lambda first, second, small: optax.scale_by_adam(first, second, small),
    "growing": growing,
}


@dataclass(frozen=True)
class Decay:
    """What a round's step (or the rate of a shift) is multiplied with: a rule, or a factor for every round."""

    kind: str
    number: float
    rounds: int
    factors: tuple[float, ...] = ()

    def __call__(self, round: Any) -> Any:
        t = jnp.float32(round)
        if self.factors:
            return jnp.asarray(self.factors, jnp.float32)[round]
        if self.kind == "polynomial":
            return (1 + t) ** -self.number
        if self.kind == "exponential":
            return self.number**t
        return 1 - t / self.rounds

    @property
    def told(self) -> Given:
        """As a config says it."""
        if self.factors:
            return list(self.factors)
        return {"kind": self.kind} | dict.fromkeys(DECAYS[self.kind], self.number)


# Kinds with their numbers: the smallest and largest value, and the one that is taken when it is left out.
OPTIMISERS: dict[str, dict[str, tuple[float, float, float]]] = {
    "heavy-ball": {"momentum": (0.0, 1.0, 0.9)},
    "nesterov": {"momentum": (0.0, 1.0, 0.9)},
    "adam": {"first": (0.0, 1.0, 0.9), "second": (0.0, 1.0, 0.999), "small": (0.0, math.inf, 1e-8)},
    "growing": {"momentum": (0.0, 1.0, 0.9), "factor": (1.0, math.inf, 1.3), "most": (1.0, math.inf, 4.0)},
}
DECAYS: dict[str, dict[str, tuple[float, float, float]]] = {
    "polynomial": {"power": (0.0, math.inf, 0.5)},
    "exponential": {"factor": (0.0, 1.0, 0.99)},
    "linear": {},
}

AVERAGES: dict[str, dict[str, tuple[float, float, float]]] = {
    "exponential": {"decay": (0.0, 1.0, 0.99)},
    "polynomial": {"power": (0.0, math.inf, 1.0)},
}


@dataclass(frozen=True)
class Averaging:
    """A running mean of all iterates x_1, x_2, ...: weights decay^(t-k), or about k^power (Shamir and Zhang 2013)."""

    kind: str
    number: float

    def __call__(self, done: Any) -> Any:
        """The part of the newest iterate in the mean of so many."""
        if self.kind == "exponential":
            return (1 - self.number) / (1 - self.number ** jnp.float32(done))
        return (1 + self.number) / (jnp.float32(done) + self.number)


def build_average(given: int | str | Mapping[str, Any] | None, rounds: int) -> int | Averaging:
    """A number of last iterates, a kind, or a table."""
    if given is None or isinstance(given, int):
        return min(given or 1, rounds)
    kind, numbers = read("average", given, AVERAGES)
    return Averaging(kind, next(iter(numbers.values())))


def build_optimiser(given: str | Mapping[str, Any] | None) -> Optimiser | None:
    """None, a kind, or a table such as {kind = "adam", first = 0.9}."""
    if given is None:
        return None
    kind, numbers = read("optimiser", given, OPTIMISERS)
    return Optimiser(kind, {name: jnp.float32(value) for name, value in numbers.items()})


def build_decay(given: Given | None, rounds: int, key: str = "step_decay") -> Decay | None:
    if given is None:
        return None
    if isinstance(given, list):
        if len(given) != rounds or not all(factor > 0 for factor in given):
            raise ConfigError(
                f"algorithm.{key}: {len(given)} factors for {rounds} rounds; give a positive one for every round"
            )
        return Decay("given", 0.0, rounds, tuple(given))
    kind, numbers = read(key, given, DECAYS)
    return Decay(kind, next(iter(numbers.values()), 0.0), rounds)


def read(key: str, given: str | Mapping[str, Any], kinds: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The kind and its numbers, checked."""
    table: dict[str, Any] = {"kind": given} if isinstance(given, str) else dict(given)
    kind = str(table.pop("kind", ""))
    if kind not in kinds:
        raise ConfigError(f"algorithm.{key}: {kind!r} is unknown; possible: {', '.join(kinds)}")
    known = kinds[kind]
    for name, value in table.items():
        if name not in known:
            raise ConfigError(
                f"algorithm.{key} {kind!r}: {name} is unknown; it takes {', '.join(known) or 'no numbers'}"
            )
        low, high, _ = known[name]
        if isinstance(value, str) or not low <= value < high:
            raise ConfigError(
                f"algorithm.{key} {kind!r}: {name} = {value!r} must be a number from {low:g} to below {high:g}"
            )
    return kind, {name: float(table.get(name, default)) for name, (_, _, default) in known.items()}
