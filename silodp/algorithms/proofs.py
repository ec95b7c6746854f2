"""Which theorem covers a run's utility, and which of its conditions were checked for it.

A theorem speaks of one algorithm under one trust model, with constants G and L of the loss, and only for steps, clips
and batches that satisfy its conditions. A run gets its name when every condition holds. A constant that the config does
not give (`smoothness`, `gradient_bound`, ...) leaves a condition open, and then there is no label either. That the loss
is what the theorem assumes (smooth, Lipschitz, convex or PL) nobody can check: it is the user's word. Privacy does not
depend on any of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from silodp.algorithms.entry import prox_of
from silodp.errors import ConfigError
from silodp.prox import NoProx

if TYPE_CHECKING:
    from silodp.algorithms.entry import Entry
    from silodp.algorithms.theory import Choice

NEAR = 1 + 1e-6  # numbers pass through float32
Condition = tuple[str, Callable[["Choice"], bool]]


@dataclass(frozen=True)
class Verdict:
    """The theorem, or what it fails by."""

    name: str | None
    checked: tuple[str, ...] = ()
    fails: str | None = None

    @property
    def label(self) -> str | None:
        return None if self.name is None else f"{self.name} (checked: {', '.join(self.checked)})"


def verdict(entry: Entry, c: Choice) -> Verdict:
    """The theorem that covers these options, if all its conditions hold."""
    name = entry.proved.get(c.channel.name)
    if name is None:
        return Verdict(None, fails=f"no theorem for {c.options.name} under this trust model")
    try:
        conditions = [*usual(entry, c), *entry.conditions]
        failed = next((words for words, holds in conditions if not holds(c)), None)
    except ConfigError as missing:
        return Verdict(None, fails=str(missing))
    if failed is not None:
        return Verdict(None, fails=f"not met: {failed}")
    return Verdict(entry.case(c) if entry.case else name, tuple(words for words, _ in conditions))


def usual(entry: Entry, c: Choice) -> Iterable[Condition]:
    """What all theorems assume."""
    options, facts = c.options, c.facts
    compressor = getattr(c.channel, "compressor", None)
    yield "one target for all silos", lambda _: not c.privacy.silo_targets
    yield "plain steps", lambda _: options.optimiser is None and options.step_decay is None
    alike = facts.alike or c.channel.weighs_by_size
    yield "silos weigh alike", lambda _: alike
    if entry.any_prox:
        yield "any prox", lambda _: True
    else:
        yield "no prox", lambda _: isinstance(prox_of(options.prox), NoProx)
    if entry.compression in ("plain", "shifted"):
        yield "an unbiased compressor", lambda _: compressor is not None and compressor.unbiased
        yield "the theorem's gamma", lambda _: options.shift_rate is None and options.shift_decay is None
    else:
        yield "no compressor", lambda _: compressor is None
    if not entry.some_silos:
        yield "all silos in every round", lambda _: facts.everyone
    if not c.privacy.private and entry.private:
        yield "noise for a target", lambda _: False


def at_most(words: str, number: Callable[[Choice], float | None], limit: Callable[[Choice], float]) -> Condition:
    """`number` is given and no larger than the limit."""

    def holds(c: Choice) -> bool:
        value, most = number(c), limit(c)
        return value is not None and value <= most * NEAR

    return words, holds


def step(words: str, limit: Callable[[Choice], float]) -> Condition:
    return at_most(f"step_size <= {words}", lambda c: c.options.step_size, limit)


def at_least(words: str, number: Callable[[Choice], float | None], limit: Callable[[Choice], float]) -> Condition:
    return words, lambda c: (number(c) or 0.0) * NEAR >= limit(c)


CLIP = at_least("clip >= G", lambda c: c.options.clip, lambda c: c.G)
DIFFERENCE = at_least("clip_difference >= L", lambda c: c.options.clip_difference, lambda c: c.L)
CAPPED = at_least(  # the cap 2 * clip alone is as good as any L
    "clip_difference >= L or left out",
    lambda c: math.inf if c.options.clip_difference is None else c.options.clip_difference,
    lambda c: c.L,
)
LOCAL = at_least("clip_local >= L", lambda c: c.options.clip_local if c.steps > 1 else math.inf, lambda c: c.L)
HALF_STEP = step("1/(2 L)", lambda c: 1 / (2 * c.L))
WHOLE_STEP = step("1/L", lambda c: 1 / c.L)
FULL: Condition = (
    "all records in every round",
    lambda c: c.options.batch is None and c.options.batch_difference is None,
)


def small_epsilon(words: str, limit: Callable[[float], float]) -> Condition:
    """`limit` of ln(1/delta)."""
    return at_most(f"epsilon <= {words}", lambda c: c.epsilon, lambda c: limit(math.log(1 / c.privacy.delta)))


MODEST = small_epsilon("ln(1/delta)", lambda log: log)


def noise_step(words: str, span: Callable[[Choice], float]) -> Condition:
    """1/(K sqrt(span) L sigma2 sqrt(d)) with DIFF2's sigma2 = sqrt(R)/(n N epsilon), constant 1: noise of differences,
    gathered over so many rounds, stays below the descent."""
    reach = lambda c: c.n * c.silos * c.epsilon
    return step(words, lambda c: reach(c) / (c.steps * c.L * math.sqrt(span(c) * c.options.rounds * c.d)))


# What DIFF2 and PSGM assume of the sizes: conditions of their labels, and of their bounds as numbers.
ENOUGH = at_least(
    "n N >= G^2 sqrt(d) / (L epsilon)",
    lambda c: c.n * c.silos,
    lambda c: c.G**2 * math.sqrt(c.d) / (c.L * c.epsilon),
)
EVERYBODY: Condition = ("all silos in every round", lambda c: c.facts.everyone)


def order(c: Choice) -> int:
    """alpha of Prop. 5.1."""
    return 1 + math.ceil(2 * math.log(1 / c.privacy.delta) / c.epsilon)


def local_variance(c: Choice) -> float:
    """sigma3^2 of Prop. 5.1, with constant 1."""
    local = c.options.batch_local or c.n
    return max(c.steps * c.options.rounds / (c.silos * (c.n * c.epsilon) ** 2), 1 / (local**2 * c.epsilon))


LOCAL_NOISE = step(
    "1/(sqrt(K d) L sigma3)",
    lambda c: 1 / (math.sqrt(c.steps * c.d * local_variance(c)) * c.L) if c.steps > 1 else math.inf,
)
SMALL_LOCAL_BATCH = (
    at_least(
        "batch_local <= n / (2 e alpha), alpha the order of Prop. 5.1",
        lambda c: c.n / (2 * math.e * order(c)),
        lambda c: c.options.batch_local or c.n,
    ),
    at_least(
        "batch_local <= (4 n / (alpha sigma3^2))^(1/3)",
        lambda c: (4 * c.n / (order(c) * local_variance(c))) ** (1 / 3),
        lambda c: c.options.batch_local or c.n,
    ),
)


def first_batch(c: Choice) -> int:
    return c.options.batch_first or c.options.batch or c.n


ENOUGH_MESSAGES = at_least(
    "N min(b0, batch) >= ln(1/delta)/epsilon",
    lambda c: c.silos * min(first_batch(c), c.options.batch or c.n),
    lambda c: math.log(1 / c.privacy.delta) / c.epsilon,
)
