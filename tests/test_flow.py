"""silodp.flow: every registered algorithm lets nothing out unnoised, and each way to do so by mistake is found."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

import silodp
from silodp.algorithms import REGISTRY
from silodp.algorithms.gradient import GradientDescent
from silodp.config import ModelConfig
from silodp.core import POINT, Algorithm, Silo
from silodp.errors import ConfigError
from silodp.facts import Declared, Facts, Stream
from silodp.flow import Findings, examine, expected, refuse_leaks
from silodp.models import model_of
from silodp.objective import ModelObjective, build_objective, example_record, refuse_shared_loss
from silodp.plan.make import make_plan
from silodp.plan.plan import Plan
from silodp.privacy import kinds
from silodp.prox import build_prox
from silodp.releases import Answer, Public, RecordMean, Release, Statistic, Vector
from silodp.sampling import BatchRule, Full, Poisson
from tests.cases import CASES, case

RECORDS = 25
FACTS = Facts(
    (40, RECORDS, 31),
    ("a", "b", "c"),
    record=("float32[5]", "int32[]"),
    outputs=2,
    task="classification",
    parameters=6,
)
STATED = {"mu2", "soteria-svrg", "soteria-saga", "ldp-svrg"}  # their bounds are proved in docs/privacy.md
# The first trust model of each algorithm: what a query lets out does not depend on the channel.
ONCE = list({name: (name, trust) for name, trust in reversed(CASES) if REGISTRY[name].private}.values())


@pytest.fixture(scope="module")
def objective() -> ModelObjective:
    return build_objective(model_of(ModelConfig(kind="logistic"), FACTS), example_record(FACTS))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(case("dp-gd", "untrusted"), FACTS)


def records() -> Any:
    stacked = lambda leaf: jax.ShapeDtypeStruct((RECORDS, *leaf.shape), leaf.dtype)
    return jax.tree.map(stacked, example_record(FACTS))


def found(algorithm: Algorithm, objective: ModelObjective, plan: Plan) -> Findings:
    streams = tuple(tuple(algorithm.releases(i, FACTS.sizes, range(4))) for i in range(FACTS.silos))
    return examine(algorithm, objective, plan.noised, records(), expected(Declared(FACTS, streams)))


@pytest.mark.parametrize(("name", "trust"), ONCE, ids=[name for name, _ in ONCE])
def test_registered_algorithms_let_nothing_out(name, trust, objective):
    plan = make_plan(case(name, trust), FACTS)
    findings = found(plan.algorithm, objective, plan)
    assert findings.leaks == []
    assert bool(findings.stated) == (name in STATED)
    assert findings.stated <= set(plan.streams)


# --- mistakes -----------------------------------------------------------------------------------------------


class RawMean(GradientDescent):
    """The mean itself, called public."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.mean([x], [1.0], self.clip, "value").release().value)


class RawSteps(GradientDescent):
    """Local steps without noise, then a noised mean where they have led."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        w = x
        for k in range(2):
            w = w - silo.mean([w], [1.0], self.clip, "value", step=k).release().value
        return silo.mean([w], [1.0], self.clip, "value")


class RawStepsInALoop(GradientDescent):
    """The same in a loop: only its second turn starts from what is secret."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        def step(k: Any, w: Vector) -> Vector:
            return w - silo.mean([w], [1.0], self.clip, "value", step=k).release().value

        return Public(x + 0 * silo.loop(3, step, x).sum())


class PointInALoop(GradientDescent):
    """Nothing of the loop is sent, but what is released inside is taken at secret points."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        def step(k: Any, carry: Any) -> Any:
            secret, total = carry
            noised = silo.privatise(silo.mean([secret], [1.0], self.clip, "value"), step=k)
            return silo.mean([x], [1.0], self.clip, "value", step=k).release().value, total + noised

        return Public(silo.loop(3, step, (x, jnp.zeros_like(x)))[1])


class ClipOfRecords(GradientDescent):
    """A clip norm that is itself a mean of the records."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], jnp.mean(jnp.abs(silo.records[0])), "value")


class CoefficientOfRecords(GradientDescent):
    """A coefficient that the records decide."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [jnp.sum(silo.records[0])], self.clip, "value")


class BoundOfRecords(GradientDescent):
    """A stated bound that the records decide."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        value = silo.mean([x], [1.0], self.clip, "value").release().value
        return Release(value, jnp.max(jnp.abs(value)), "value")


class RememberedMean(GradientDescent):
    """One query writes the raw mean to the silo's memory, another sends it."""

    queries: ClassVar = {"other": (POINT,), "value": (POINT,)}  # the sender stands first

    def remember(self, silo: Silo, x0: Vector) -> Vector:
        return jnp.zeros_like(x0)

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], self.clip, "value")
        silo.memory = mean.release().value
        return mean

    def other(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.memory)


class MemoryOfRecords(GradientDescent):
    """What a silo remembers from the start is made of records."""

    def remember(self, silo: Silo, x0: Vector) -> Vector:
        return x0 + jnp.mean(silo.records[0])

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.memory)


class ByTheHost(GradientDescent):
    """What the host gives back may be anything that it was shown before."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(jax.pure_callback(lambda: np.zeros(6, np.float32), jax.ShapeDtypeStruct(x.shape, x.dtype)))


class ByAMutableArray(GradientDescent):
    """Written into a mutable array, and read from it."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        kept = jax.new_ref(jnp.zeros_like(x))
        kept[...] = silo.mean([x], [1.0], self.clip, "value").release().value
        return Public(kept[...])


class NoiseOfARelease(GradientDescent):
    """The numbers that a simulation adds to the stream: whoever has both has the mean."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.randomness.normal("noise/value", x.shape))


class BatchSize(GradientDescent):
    """How many records a Poisson batch happened to have."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(x + jnp.sum(Poisson(4).draw(silo, "value").weights))


class WorkOfRecords(GradientDescent):
    """A count of work, which stands in the header, that the records decide."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        silo.account = silo.account.work(jnp.sum(silo.records[1]).astype(jnp.float32))
        return silo.mean([x], [1.0], self.clip, "value")


class ReleaseIfRecords(GradientDescent):
    """The records decide whether there is a release: its value is dropped, its count stands in the account."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], self.clip, "value")
        silo.cond(silo.records[0].sum() > 0, lambda: silo.privatise(mean), lambda: x)
        return mean


class CentredStatistic(GradientDescent):
    """A statistic that closes over a mean of all records: one record moves everybody's vector."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        middle = silo.records[0].mean(0)
        return silo.statistic(lambda record: record[0] - middle, 1.0, "value")


class Branch(GradientDescent):
    """Both branches are public, but the records choose."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.cond(silo.records[0].sum() > 0, lambda: x, lambda: x + 1))


MISTAKES: dict[type[GradientDescent], str] = {
    RawMean: "its Public answer",
    RawSteps: "a point of stream 'value'",
    RawStepsInALoop: "a point of stream 'value'",
    PointInALoop: "a point of stream 'value'",
    ClipOfRecords: "the clip of stream 'value'",
    CoefficientOfRecords: "a coefficient of stream 'value'",
    BoundOfRecords: "the bound of stream 'value'",
    RememberedMean: "query 'other': its Public answer",
    MemoryOfRecords: "its Public answer",
    BatchSize: "its Public answer",
    ByTheHost: "its Public answer",
    ByAMutableArray: "its Public answer",
    NoiseOfARelease: "its Public answer",
    WorkOfRecords: "the work told in the header",
    ReleaseIfRecords: "the count of 'value'",
    CentredStatistic: "what the statistic of stream 'value' is computed with",
    Branch: "its Public answer",
}


def built(kind: type[GradientDescent]) -> GradientDescent:
    return kind(jnp.float32(0.3), build_prox("none"), jnp.float32(1.0))


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_is_found_and_refused(kind, objective, plan):
    findings = found(built(kind), objective, plan)
    assert any(MISTAKES[kind] in leak for leak in findings.leaks), findings.leaks
    with pytest.raises(ConfigError, match=r"algorithm\.name = 'mine': query .* were not privatised; use"):
        refuse_leaks("mine", findings)


# --- what is allowed ----------------------------------------------------------------------------------------


class Privatised(GradientDescent):
    """Local steps with noise of their own, then what they have led to."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        def step(k: Any, w: Vector) -> Vector:
            return w - silo.privatise(silo.mean([w], [1.0], self.clip, "value", step=k), step=k)

        return Public(silo.loop(3, step, x))

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", 3 * len(rounds), self.batch, local=True)]


class PublicStatistic(GradientDescent):
    """A statistic may close over what is public."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.statistic(lambda record: record[0] * x[0], 1.0, "value")

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch, dimension=5)]


class PublicBranch(GradientDescent):
    """A branch on the round."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], self.clip, "value")
        return Public(silo.cond(silo.round > 0, lambda: silo.privatise(mean), lambda: x))

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", 3 * len(rounds), self.batch, local=True)]


class SmallBound(GradientDescent):
    """A bound that is too small: not a leak that a program shows, but one that the author has to answer for."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        computed = silo.mean([x], [1.0], self.clip, "value").release()
        return Release(computed.value, computed.bound / 100, "value")


@pytest.mark.parametrize("kind", [GradientDescent, Privatised, PublicStatistic, PublicBranch])
def test_what_is_privatised_may_leave(kind, objective, plan):
    findings = found(built(kind), objective, plan)
    assert findings == Findings(set(), [])
    refuse_leaks("mine", findings)


class ChangedValue(GradientDescent):
    """The library's own release, with another value in it."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        computed = silo.mean([x], [1.0], self.clip, "value").release()
        return dataclasses.replace(computed, value=100 * computed.value, rest=None)


class ChangedBatch(GradientDescent):
    """The library's own mean, with every record a hundredfold in it."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], self.clip, "value")
        return eqx.tree_at(lambda m: m.batch.weights, mean, 100 * mean.batch.weights)


class DrawnByHand(GradientDescent):
    """A batch that the author drew: whether another release has it too, nobody knows."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value", self.batch.draw(silo, "value"))


class MeanByHand(GradientDescent):
    """A mean of vectors that are all centred by a mean of the records."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        middle = silo.records[0].mean()
        return RecordMean(Statistic(lambda z: x + middle, x.size), self.batch.draw(silo, "value"), 1.0, "value")


class RuleOfOnesOwn(GradientDescent):
    """A batch rule that says itself how seldom it draws a record."""

    class Seldom(Full):
        def sampling(self, records: int) -> kinds.Sampling:
            return kinds.Poisson(0.01)

    batch: BatchRule = Seldom()


class ObjectiveOfOnesOwn(GradientDescent):
    """Gradients of another objective: who knows whether it clips."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        silo.objective = dataclasses.replace(silo.objective, engine="general")  # type: ignore[type-var]
        return silo.mean([x], [1.0], self.clip, "value")


STATES = [SmallBound, ChangedValue, ChangedBatch, DrawnByHand, MeanByHand, RuleOfOnesOwn, ObjectiveOfOnesOwn]


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
def test_a_bound_that_the_library_did_not_compute_is_told(kind, objective, plan):
    assert found(built(kind), objective, plan) == Findings({"value"}, [])


# --- releases that are not the declared ones ----------------------------------------------------------------


class ForgottenBatch(GradientDescent):
    """Declares small batches, but all records answer: far too little noise."""

    batch: BatchRule = Poisson(4)

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.mean([x], [1.0], self.clip, "value")


class UndeclaredPlace(GradientDescent):
    """Noise in the silo, of a stream that a channel may account otherwise."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.privatise(silo.mean([x], [1.0], self.clip, "value")))


class UndeclaredSize(GradientDescent):
    """Declares so many numbers that a mask of rand-k would hide nearly everything."""

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch, dimension=10_000)]


class DeclaredSquares(GradientDescent):
    """Declared as a mean of squares, which moves less: too small a noise over clip would be printed."""

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch, squares=True)]


class UndeclaredSquares(GradientDescent):
    """A mean of squares that is not declared as one."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.squares(lambda record: record[0][:3], 1.0, "value")


class ReleasedBefore(GradientDescent):
    """A release before the first round, where nobody counts."""

    def remember(self, silo: Silo, x0: Vector) -> Vector:
        return silo.privatise(silo.mean([x0], [1.0], self.clip, "value"))

    def value(self, silo: Silo, x: Vector) -> Answer:
        return Public(silo.memory)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Any) -> list[Stream]:
        return [Stream("value", len(rounds), self.batch, local=True)]


@custom_vmap
def centred(a: Any) -> Any:
    return a


@centred.def_vmap
def _(axis_size: int, in_batched: Any, a: Any) -> Any:
    return a - a.mean(0), True


class SeveralRecords(GradientDescent):
    """A function of a record that sees the batch."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.statistic(lambda record: x + jax.jit(centred)(record[0]).sum(), 1.0, "value")


OTHERS: dict[type[GradientDescent], str] = {
    ForgottenBatch: r"batches are drawn by Full\(\), but releases\(\) declares Poisson\(batch=4\)",
    UndeclaredPlace: r"noise is added in the silo, but releases\(\) declares local=False",
    UndeclaredSize: r"has 6 numbers; declare dimension=6 in releases\(\), not 10000",
    DeclaredSquares: r"is no mean of silo\.squares, but releases\(\) declares squares=True",
    UndeclaredSquares: r"is a mean of silo\.squares, but releases\(\) declares squares=False",
    ReleasedBefore: "is released by `remember`, where nothing is counted",
    SeveralRecords: "uses custom_vmap_call, which sees several records at once",
}


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_a_release_that_is_not_the_declared_one_is_refused(kind, objective, plan):
    with pytest.raises(ConfigError, match=rf"algorithm\.name = 'mine': stream 'value': .*{OTHERS[kind]}"):
        refuse_leaks("mine", found(built(kind), objective, plan))


def test_releases_in_a_stack_are_refused(objective, plan):
    class Stacked(GradientDescent):
        def value(self, silo: Silo, x: Vector) -> Answer:
            one = lambda w: silo.privatise(silo.mean([w], [1.0], self.clip, "value"))
            return Public(jax.vmap(one)(jnp.stack([x, x])).mean(0))

    with pytest.raises(ValueError, match="many releases would be counted as one"):
        found(built(Stacked), objective, plan)


def test_a_loss_that_sees_several_records_is_refused():
    model = silodp.from_loss(lambda x, record: jnp.sum(x * centred(record[0])), lambda key: jnp.zeros(5), name="mine")
    with pytest.raises(ConfigError, match=r"model 'mine': its loss uses custom_vmap_call, which sees several records"):
        refuse_shared_loss(build_objective(model, example_record(FACTS), "general"), example_record(FACTS))


def test_other_answers_are_refused(objective, plan):
    class Naked(GradientDescent):
        def value(self, silo: Silo, x: Vector) -> Any:
            return x

    with pytest.raises(TypeError, match="must return a RecordMean, a Release or Public"):
        found(built(Naked), objective, plan)
