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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core as jaxpr_core
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, PyTree, UInt32

from silodp.channels import Channel
from silodp.core import Account, Algorithm, Answer, Public, RecordMean, Release, Silo, Site, Vector
from silodp.errors import ConfigError
from silodp.facts import Declared
from silodp.objective import CALLBACKS, Objective, sees_several
from silodp.randomness import SeededRandomness, Shape, Step
from silodp.sampling import Batch, BatchRule, Full


def _marker(name: str) -> Any:
    """An operation that does nothing to its argument but stand in the program."""
    primitive = jaxpr_core.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda _, x, **__: [x])
    batching.primitive_batchers[primitive] = lambda given, axes, **what: (primitive.bind(*given, **what), axes[0])
    return primitive


PRIVATISED = _marker("silodp_privatised")  # from here on it is public
SECRET = _marker("silodp_secret")  # from here on it is secret
CHECKED = _marker("silodp_checked")  # must not be secret here; `what` says what it is


def _privatised_in_a_stack(*_: Any, **__: Any) -> Any:
    raise ValueError("silo.privatise inside jax.vmap: many releases would be counted as one; use silo.loop")


batching.primitive_batchers[PRIVATISED] = _privatised_in_a_stack


@dataclass
class Findings:
    """Streams whose bound the author states, what must not be, and where a release is not the declared one."""

    stated: set[str] = field(default_factory=set)
    leaks: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)


class Expected(NamedTuple):
    """What is declared of a stream's releases; `size`: of those that pass through the channel."""

    rules: frozenset[BatchRule]
    local: bool
    size: int | None


def expected(declared: Declared) -> dict[str, Expected]:
    streams = [stream for own in declared.streams for stream in own]
    rules = lambda name: frozenset(s.batch for s in streams if s.name == name and s.count)
    return {s.name: Expected(rules(s.name), s.local, None if s.local else declared.dimension(s.name)) for s in streams}


class Coins(SeededRandomness):
    """A silo's coins; those of its batches and of its noise are secret."""

    def bits(self, purpose: str, shape: Shape, step: Step = 0) -> UInt32[Array, "..."]:
        drawn = super().bits(purpose, shape, step)
        return SECRET.bind(drawn) if purpose.startswith(("batch/", "noise/")) else drawn

    def uniform(self, purpose: str, shape: Shape, step: Step = 0) -> Float[Array, "..."]:
        drawn = super().uniform(purpose, shape, step)
        return SECRET.bind(drawn) if purpose.startswith("batch/") else drawn


class FollowedMean(RecordMean):
    """A mean that tells its silo what it released: only this very object, not a copy with other parts."""

    silo: FollowedSilo = eqx.field(static=True)

    def release(self) -> Release:
        made = super().release()
        rules = [rule for mean, rule in self.silo.means if mean is self]
        self.silo.computed += [(made, rule) for rule in rules]
        return made


class FollowedSilo(Silo):
    """A silo that marks in the program what is checked and what is privatised."""

    def __init__(self, *given: Any, findings: Findings, expected: Mapping[str, Expected], asked: bool):
        super().__init__(*given)
        self.findings, self.expected, self.asked = findings, expected, asked
        self.own_objective = self.objective
        self.means: list[tuple[RecordMean, BatchRule]] = []  # as `mean` and `statistic` gave them
        self.computed: list[tuple[Release, BatchRule]] = []  # and what was made of them

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

    def statistic(
        self,
        function: Callable[[PyTree], Vector],
        clip: Any,
        stream: str,
        batch: BatchRule | Batch | None = None,
        step: Any = 0,
    ) -> RecordMean:
        record = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), self.records)
        traced = jax.make_jaxpr(function)(record)
        for value in traced.consts:  # what the function has closed over
            checked(value, f"what the statistic of stream {stream!r} is computed with")
        several = sees_several(traced)
        if several is not None:
            self._mistake(stream, f"its function uses {several}, which sees several records at once; leave it out")
        clip = checked(clip, f"the clip of stream {stream!r}")
        return self._made(super().statistic(function, clip, stream, batch, step), batch)

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


def checked(value: Any, what: str) -> Any:
    return value if value is None or isinstance(value, int | float) else CHECKED.bind(jnp.asarray(value), what=what)


def examine(
    algorithm: Algorithm, objective: Objective, channel: Channel, records: PyTree, declared: Mapping[str, Expected]
) -> Findings:
    """Follow one silo's records (arrays, or only their shapes and types) through every query of an algorithm."""
    findings = Findings()
    x = jnp.zeros(objective.parameters)
    account = Account.empty(list(declared))

    def silo(records: PyTree, memory: PyTree, account: Account, asked: bool = True) -> FollowedSilo:
        size = jnp.int32(jax.tree.leaves(records)[0].shape[0])
        site = Site(objective, channel, records, size, jnp.int32(0), alone=True)
        coins = Coins(jax.random.key(0))
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


def query_program(
    algorithm: Algorithm, name: str, silo: Callable[..., FollowedSilo], parameters: int, account: Account
) -> tuple[Callable[..., Any], list[Array]]:
    """The query as a function of records, memory and public arguments; returns memory, then everything it sends."""

    def program(records: PyTree, memory: PyTree, *public: Array) -> Any:
        asked = silo(records, memory, account)
        sent = let_out(getattr(algorithm, name)(asked, *public), asked)
        counts = {name: checked(t.count, f"the count of {name!r}") for name, t in asked.account.tallies.items()}
        return asked.memory, sent, checked(asked.account.gradients, "the work told in the header"), counts

    return program, [jnp.zeros(shape) for shape in algorithm.shapes(name, parameters)]


def let_out(answer: Answer, silo: FollowedSilo) -> Any:
    """What leaves the silo: a Public value as it is, anything else through the channel's noise."""
    if isinstance(answer, Public):
        return checked(answer.value, "its Public answer")
    if isinstance(answer, RecordMean | Release):
        return PRIVATISED.bind(silo.followed(answer, local=False).value)
    raise TypeError(f"a query must return a RecordMean, a Release or Public, not {type(answer).__name__}")


def followed_program(
    function: Callable[..., Any], arguments: Sequence[Any], secret: Sequence[bool], findings: Findings
) -> list[bool]:
    """Whether each output is secret, given which inputs are (one for every leaf, or one for all)."""
    closed = jax.make_jaxpr(function)(*arguments)
    given = list(secret) if len(secret) == len(closed.jaxpr.invars) else [any(secret)] * len(closed.jaxpr.invars)
    return follow(closed.jaxpr, given, findings)


def follow(jaxpr: Any, secret: Sequence[bool], findings: Findings) -> list[bool]:
    """Forward through a program: an output is secret if an input is, unless the operation privatises."""
    known = dict(zip(jaxpr.invars, secret, strict=True))
    is_secret = lambda atom: not isinstance(atom, jaxpr_core.Literal) and (known.get(atom, False) or is_ref(atom))
    for equation in jaxpr.eqns:
        given = [is_secret(atom) for atom in equation.invars]
        known |= dict(zip(equation.outvars, step(equation, given, findings), strict=True))
    return [is_secret(atom) for atom in jaxpr.outvars]


def is_ref(atom: Any) -> bool:
    """A mutable array: who has written what into it is not followed."""
    return type(atom.aval).__name__ == "AbstractRef"


def step(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    name, count = equation.primitive.name, len(equation.outvars)
    if equation.primitive is PRIVATISED:
        return [False]
    if equation.primitive is SECRET or name in CALLBACKS:  # what the host knows is not followed
        return [True] * count
    if equation.primitive is CHECKED:
        if any(given):
            findings.leaks.append(f"{equation.params['what']} depends on records that were not privatised")
        return given
    if name == "cond":
        branches = [follow(branch.jaxpr, given[1:], findings) for branch in equation.params["branches"]]
        return [given[0] or any(outs) for outs in zip(*branches, strict=True)] if count else []
    if name == "while":
        return while_loop(equation, given, findings)
    if name == "scan":
        return scan(equation, given, findings)
    inner = called(equation)
    if inner is not None and len(inner.invars) == len(given) and len(inner.outvars) == count:
        return follow(inner, given, findings)
    if inner is not None:  # its own findings still count
        follow(inner, [any(given)] * len(inner.invars), findings)
    return [any(given)] * count


def called(equation: Any) -> Any | None:
    """The program that an operation calls, if it calls one."""
    for value in equation.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            return jaxpr
    return None


def while_loop(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    for_test, for_body, carry = given[:tests], given[tests : tests + bodies], given[tests + bodies :]
    test, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr

    def once(carry: list[bool]) -> list[bool]:
        # How often a loop runs shows in everything that it returns.
        stops = follow(test, [*for_test, *carry], findings)[0]
        return [stops or out for out in follow(body, [*for_body, *carry], findings)]

    return settled(once, carry)


def scan(equation: Any, given: list[bool], findings: Findings) -> list[bool]:
    consts, carried = equation.params["num_consts"], equation.params["num_carry"]
    body, rest = equation.params["jaxpr"].jaxpr, given[consts + carried :]
    once = lambda carry: follow(body, [*given[:consts], *carry, *rest], findings)
    carry = settled(lambda carry: once(carry)[:carried], given[consts : consts + carried])
    return [*carry, *once(carry)[carried:]]


def settled(once: Callable[[list[bool]], list[bool]], carry: list[bool]) -> list[bool]:
    """What is secret after any number of turns."""
    while True:
        grown = [a or b for a, b in zip(carry, once(carry), strict=True)]
        if grown == carry:
            return carry
        carry = grown


def refuse_leaks(name: str, findings: Findings) -> None:
    if findings.leaks:
        raise ConfigError(
            f"algorithm.name = {name!r}: {findings.leaks[0]}; use silo.privatise, or return the mean itself"
        )
    if findings.mistakes:
        raise ConfigError(f"algorithm.name = {name!r}: {findings.mistakes[0]}")
