"""Where records flow to: a check, before a run, that an algorithm's queries let nothing of them out unnoised.

Each query is traced once, without data, and its program (a jaxpr) is followed from the records on. Whatever is computed
from them is secret, until the silo privatises it. So are a silo's batches, whose coins the account relies on. Refused:

- a `Public` answer made of anything secret,
- a bound, a clip norm or a point that depends on records (a clipped mean at a point that moves with another record has
  no bound of 2 clip / n),
- a count of work or of releases that depends on records: one stands in a message's header, the other in the account,
- a release that is not what `releases()` declares: batches of another rule, other numbers, noise at another place.

What is followed is whole arrays, so the check may refuse what would be harmless; it does not let a leak pass. It also
finds the streams whose bound the author has stated instead of leaving it to `silo.mean` or `silo.statistic`: whatever
these two have not made, unchanged, of a batch that they drew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt32

from silodp.channels import Channel
from silodp.core import Algorithm, Silo, Site
from silodp.doubles import Double
from silodp.errors import ConfigError
from silodp.facts import Declared
from silodp.follow import PRIVATISED, SECRET, Findings, checked, followed_program
from silodp.objective import Objective, sees_several
from silodp.randomness import SeededRandomness, Shape, Step, seeded
from silodp.releases import Account, Answer, Public, RecordMean, Release, Squares, Statistic, Vector
from silodp.sampling import Batch, BatchRule, Full


class Expected(NamedTuple):
    """What is declared of a stream's releases; `size`: of those that pass through the channel."""

    rules: frozenset[BatchRule]
    local: bool
    size: int | None
    squares: bool = False


def expected(declared: Declared) -> dict[str, Expected]:
    streams = [stream for own in declared.streams for stream in own]
    rules = lambda name: frozenset(s.batch for s in streams if s.name == name and s.count)
    size = lambda stream: None if stream.local else declared.dimension(stream.name)
    named = {stream.name: stream for stream in streams}  # of many silos: asked once for each name
    return {name: Expected(rules(name), s.local, size(s), s.squares) for name, s in named.items()}


class Coins(SeededRandomness):
    """A silo's coins; those of its batches and of its noise are secret."""

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        drawn = super().bits(purpose, shape, step)
        return SECRET.bind(drawn) if purpose.startswith(("batch/", "noise/")) else drawn

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        drawn = super().uniform(purpose, shape, step)
        return SECRET.bind(drawn) if purpose.startswith("batch/") else drawn

    def normal(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        drawn = super().normal(purpose, shape, step)
        return SECRET.bind(drawn) if purpose.startswith(("batch/", "noise/")) else drawn


class ChannelCoins(Coins):
    """A silo's coins in the hands of its channel: what it noises with them is private."""

    def noised(self, purpose: str, value: Double, std: Float[Array, ""], step: Step = 0) -> Float[Array, " d"]:
        return PRIVATISED.bind(value.high)


class FollowedMean(RecordMean):
    """A mean that tells its silo what it released: only this very object, not a copy with other parts."""

    silo: FollowedSilo = eqx.field(static=True)

    def mean(self) -> Double:
        """Secret, however it is computed of records, and it depends on all that it is given: no gradient is traced."""
        given = [jnp.ravel(leaf)[:1] for leaf in jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array))]
        return Double.of(SECRET.bind(jnp.zeros(self.vectors.size) + 0 * jnp.sum(jnp.concatenate(given))))

    def release(self) -> Release:
        made = super().release()
        rules = [rule for mean, rule in self.silo.means if mean is self]
        self.silo.computed += [(made, rule) for rule in rules]
        if isinstance(self.vectors, Squares):
            self.silo.moments.append(made)
        return made


class FollowedSilo(Silo):
    """A silo that marks in the program what is checked and what is privatised."""

    def __init__(self, *given: Any, findings: Findings, expected: Mapping[str, Expected], asked: bool):
        super().__init__(*given)
        self.findings, self.expected, self.asked = findings, expected, asked
        self.own_objective = self.objective
        self.means: list[tuple[RecordMean, BatchRule]] = []  # as `mean` and `statistic` gave them
        self.computed: list[tuple[Release, BatchRule]] = []  # and what was made of them
        self.moments: list[Release] = []  # made of means that `squares` gave

    def mean(
        self,
        points: Sequence[Vector],
        coefficients: Sequence[Any],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None = None,
        step: Any = 0,
    ) -> RecordMean:
        points = [checked(x, f"a point of stream {stream!r}") for x in points]
        coefficients = [checked(c, f"a coefficient of stream {stream!r}") for c in coefficients]
        clip = checked(clip, f"the clip of stream {stream!r}")
        return self._made(super().mean(points, coefficients, clip, stream, batch, step), batch)

    def _of_function(
        self,
        kind: type[Statistic | Squares],
        function: Callable[[PyTree], Vector],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None,
        step: Any,
    ) -> RecordMean:
        self._check_function(function, stream)
        clip = checked(clip, f"the clip of stream {stream!r}")
        return self._made(super()._of_function(kind, function, clip, stream, batch, step), batch)

    def _check_function(self, function: Callable[[PyTree], Vector], stream: str) -> None:
        """Of one record, and of nothing that depends on others."""
        record = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), self.records)
        traced = jax.make_jaxpr(function)(record)
        for value in traced.consts:  # what the function has closed over
            checked(value, f"what the statistic of stream {stream!r} is computed with")
        several = sees_several(traced)
        if several is not None:
            self._mistake(stream, f"its function uses {several}, which sees several records at once; leave it out")

    def _made(self, mean: RecordMean, batch: BatchRule | Batch | None) -> RecordMean:
        """The mean; the library answers for its bound if records, batch and clipping are its own work."""
        rule = Full() if batch is None else batch
        followed = FollowedMean(mean.vectors, mean.batch, mean.clip, mean.stream, self)
        if isinstance(rule, BatchRule) and is_own(rule) and self.objective is self.own_objective:
            self.means.append((followed, rule))
        return followed

    def privatise(self, answer: RecordMean | Release, step: Any = 0) -> Vector:
        release = self.followed(answer, local=True)
        if not self.asked:
            self._mistake(release.stream, "is released by `remember`, where nothing is counted; do it in a query")
        self.account = self.account.spend(release.stream, jnp.float32(1.0))
        return PRIVATISED.bind(release.value)

    def followed(self, answer: RecordMean | Release, *, local: bool) -> Release:
        """The release that a channel, or the silo itself, would noise: its bound checked, compared with the plan."""
        release = answer if isinstance(answer, Release) else answer.release()
        rule = next((rule for made, rule in self.computed if made is release), None)
        if rule is None or release.stated:
            self.findings.stated.add(release.stream)
        self._compare(release, rule, local)
        bound = checked(release.bound, f"the bound of stream {release.stream!r}")
        # A bound that is only checked must not be dropped from the program.
        return Release(release.value + 0 * bound, bound, release.stream, release.stated)

    def _compare(self, release: Release, rule: BatchRule | None, local: bool) -> None:
        told = self.expected.get(release.stream)
        if told is None:  # of a query that this run does not ask: the account would refuse it
            return
        for other in told.rules:
            if rule is not None and rule != other:
                self._mistake(release.stream, f"its batches are drawn by {rule}, but releases() declares {other}")
        if local != told.local:
            place = "in the silo" if local else "by the channel"
            self._mistake(release.stream, f"its noise is added {place}, but releases() declares local={told.local}")
        if told.squares != any(made is release for made in self.moments):  # noise over clip would be printed wrong
            right = "is no mean of silo.squares" if told.squares else "is a mean of silo.squares"
            self._mistake(release.stream, f"{right}, but releases() declares squares={told.squares}")
        if told.size is not None and release.value.size != told.size:
            size = release.value.size
            self._mistake(
                release.stream, f"has {size} numbers; declare dimension={size} in releases(), not {told.size}"
            )

    def _mistake(self, stream: str, words: str) -> None:
        self.findings.mistakes.append(f"stream {stream!r}: {words}")


def is_own(rule: BatchRule) -> bool:
    """Of the library: what it says about its batches is so."""
    return type(rule).__module__.startswith("silodp.")


def examine(
    algorithm: Algorithm, objective: Objective, channel: Channel, records: PyTree, declared: Mapping[str, Expected]
) -> Findings:
    """Follow one silo's records (arrays, or only their shapes and types) through every query of an algorithm."""
    findings = Findings()
    x = jax.device_put(np.zeros(objective.parameters, np.float32))
    account = Account.empty(list(declared))

    def silo(records: PyTree, memory: PyTree, account: Account, asked: bool = True) -> FollowedSilo:
        size = jnp.int32(jax.tree.leaves(records)[0].shape[0])
        site = Site(objective, channel, records, size, jnp.int32(0), alone=True)
        coins = Coins(seeded(0))
        return FollowedSilo(
            site, jnp.int32(1), coins, memory, account, findings=findings, expected=declared, asked=asked
        )

    def remember(records: PyTree) -> PyTree:
        return algorithm.remember(silo(records, (), account, asked=False), x)

    memory = jax.eval_shape(remember, records)
    secret_memory = followed_program(remember, [records], [True], findings)
    programs = {name: query_program(algorithm, name, silo, objective.parameters, account) for name in algorithm.queries}
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    while True:  # what one query remembers another may send
        before = list(secret_memory)
        for name, (program, public) in programs.items():
            secret = [*[True] * len(jax.tree.leaves(records)), *secret_memory, *[False] * len(public)]
            fresh = Findings(findings.stated)
            out = followed_program(program, [records, blank, *public], secret, fresh)
            secret_memory = [a or b for a, b in zip(secret_memory, out[: len(secret_memory)], strict=True)]
            findings.leaks += [f"query {name!r}: {leak}" for leak in fresh.leaks]
        if before == secret_memory:
            break
    findings.leaks, findings.mistakes = (list(dict.fromkeys(each)) for each in (findings.leaks, findings.mistakes))
    return findings


def examine_messages(
    channel: Channel, objective: Objective, records: PyTree, declared: Mapping[str, Expected]
) -> Findings:
    """Follow records through the silo's end of a channel, message after message.

    What is counted in the silo must have been noised there; where only the server counts, it has to be trusted.
    """
    findings, account = Findings(), Account.empty(list(declared))
    sizes = {stream: told.size for stream, told in declared.items() if told.size is not None}

    def program(records: PyTree, wire: PyTree) -> Any:
        messages = []
        for stream, size in sizes.items():
            site = Site(objective, channel, records, jnp.int32(1), jnp.int32(0), alone=True)
            silo = Silo(site, jnp.int32(1), ChannelCoins(seeded(0)), (), account)
            everything = lambda record, size=size: jnp.full(size, sum(leaf.sum() for leaf in jax.tree.leaves(record)))
            mean = RecordMean(Statistic(everything, size), Full().draw(silo, stream), 1.0, stream)
            message, wire = channel.send(mean, silo, wire)
            if silo.account is not account:
                what = f"a message of {type(channel).__name__}"
                messages += [checked(leaf, what) for leaf in jax.tree.leaves(message)]
        return wire, messages

    wire = channel.remember(sizes)
    secret = [False] * len(jax.tree.leaves(wire))
    while True:  # what a channel keeps of one message may stand in the next
        given = [*[True] * len(jax.tree.leaves(records)), *secret]
        out = followed_program(program, [records, wire], given, findings)
        grown = [a or b for a, b in zip(secret, out, strict=False)]
        if grown == secret:
            return findings
        secret = grown


def query_program(
    algorithm: Algorithm, name: str, silo: Callable[..., FollowedSilo], parameters: int, account: Account
) -> tuple[Callable[..., Any], list[Array]]:
    """The query as a function of records, memory and public arguments; returns memory, then everything it sends."""

    def program(records: PyTree, memory: PyTree, *public: Array) -> Any:
        asked = silo(records, memory, account)
        sent = let_out(getattr(algorithm, name)(asked, *public), asked)
        counts = {name: checked(t.count, f"the count of {name!r}") for name, t in asked.account.tallies.items()}
        return asked.memory, sent, checked(asked.account.gradients, "the work told in the header"), counts

    return program, [jax.device_put(np.zeros(shape, np.float32)) for shape in algorithm.shapes(name, parameters)]


def let_out(answer: Answer, silo: FollowedSilo) -> Any:
    """What leaves the silo: a Public value as it is, anything else through the channel's noise."""
    if isinstance(answer, Public):
        return checked(answer.value, "its Public answer")
    if isinstance(answer, RecordMean | Release):
        return PRIVATISED.bind(silo.followed(answer, local=False).value)
    raise TypeError(f"a query must return a RecordMean, a Release or Public, not {type(answer).__name__}")


def refuse_leaks(name: str, findings: Findings) -> None:
    if findings.leaks:
        raise ConfigError(
            f"algorithm.name = {name!r}: {findings.leaks[0]}; use silo.privatise, or return the mean itself"
        )
    if findings.mistakes:
        raise ConfigError(f"algorithm.name = {name!r}: {findings.mistakes[0]}")
