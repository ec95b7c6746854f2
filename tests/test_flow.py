"""silodp.flow: every registered algorithm lets nothing out unnoised, and each way to do so by mistake is found."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from silodp.algorithms import REGISTRY
from silodp.algorithms.gradient import GradientDescent
from silodp.config import ModelConfig
from silodp.core import POINT, Algorithm, Answer, Public, Release, Silo, Vector
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.flow import Findings, examine, refuse_leaks
from silodp.models import model_of
from silodp.objective import ModelObjective, build_objective, example_record
from silodp.plan.plan import Plan, make_plan
from silodp.prox import build_prox
from silodp.sampling import Poisson
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
    return examine(algorithm, objective, plan.noised, records(), plan.streams)


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


class PublicStatistic(GradientDescent):
    """A statistic may close over what is public."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        return silo.statistic(lambda record: record[0] * x[0], 1.0, "value")


class PublicBranch(GradientDescent):
    """A branch on the round."""

    def value(self, silo: Silo, x: Vector) -> Answer:
        mean = silo.mean([x], [1.0], self.clip, "value")
        return Public(silo.cond(silo.round > 0, lambda: silo.privatise(mean), lambda: x))


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


def test_a_stated_bound_is_told(objective, plan):
    assert found(built(SmallBound), objective, plan) == Findings({"value"}, [])


def test_other_answers_are_refused(objective, plan):
    class Naked(GradientDescent):
        def value(self, silo: Silo, x: Vector) -> Any:
            return x

    with pytest.raises(TypeError, match="must return a RecordMean, a Release or Public"):
        found(built(Naked), objective, plan)
