"""From a config to everything that a run needs, checked and built: nothing is written yet.

Stages before training are asked here, in a simulation. What comes out is the training on records as they have left
them, and what they have spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from silodp.compiler import make_room
from silodp.config import Config, ModelConfig
from silodp.data import FederatedData, read_data
from silodp.data.types import SiloData
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.models import Model
from silodp.objective import ModelObjective, build_objective, example_record, parameter_count, with_penalty
from silodp.plan.certificate import settle
from silodp.plan.checks import vouched_bounds
from silodp.plan.make import make_plan, resolved
from silodp.plan.objects import facts_of
from silodp.plan.parts import divided_facts, trained_model, trained_on
from silodp.plan.plan import Plan
from silodp.privacy.kinds import Spent
from silodp.randomness import seeded
from silodp.records import target_of
from silodp.releases import Account, Vector
from silodp.run.federation import Silos
from silodp.run.measure import Metric, Wanted, named_metrics
from silodp.run.simulate import Problem, Setting, measured, whole_stage
from silodp.server import build_average
from silodp.stages.held_out import divided
from silodp.stages.kinds import before
from silodp.stages.maps import Map, mapped, mapped_records, nobodys_records, with_steps

HISTORY_ROWS = 100  # by default


@dataclass(frozen=True)
class Ground:
    """What all settings of a sweep share: the data, the public facts about it, and the objective."""

    data: FederatedData
    facts: Facts
    section: ModelConfig  # what the objective's model is made by; `auto` chooses some of it
    objective: ModelObjective
    records: PyTree = field(repr=False)  # that are trained on: all silos', stacked and padded
    held_out: PyTree | None = field(default=None, repr=False)  # that are not, where the config holds some out
    metrics: tuple[tuple[str, Metric], ...] = ()  # the user's own
    stages: tuple[str, ...] = ()  # before training: the objective is one of records as they leave them
    maps: tuple[Map, ...] = ()  # of the features, by the stages that were asked

    @staticmethod
    def of(
        config: Config,
        data: FederatedData | None = None,
        model: Model | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> Ground:
        make_room()
        own = named_metrics(metrics)
        data = data if data is not None else read_data(config.data)
        facts = facts_of(data)
        config = resolved(config, facts)
        if model is not None and config.intercepts is not None:
            raise ConfigError("intercepts: not with a model of your own, whose loss knows nothing of them; name a kind")
        model = model or trained_model(config, facts)
        facts = facts_of(data, parameter_count(model))
        seen = trained_on(config, facts)
        try:
            objective = build_objective(model, example_record(seen), config.model.engine)
        except TypeError:
            if config.whiten is None:
                raise
            raise ConfigError(
                f"whiten: the model does not take {seen.input_shape[0]} features; a constant comes in: give it one more"
            ) from None
        records, held_out = stacked(config, data, facts)
        return Ground(data, facts, config.model, objective, records, held_out, own, stage_names(config))

    def mapped(self, made: Map) -> Ground:
        """The same ground after one more stage."""
        held_out = None if self.held_out is None else mapped_records(made, self.held_out)
        return replace(
            self, records=mapped_records(made, self.records), held_out=held_out, maps=(*self.maps, made)
        )  # fmt: skip

    @cached_property  # one program for all settings of a sweep
    def first_point(self) -> Callable[[Any], Vector]:
        """Of a key: the flat parameters that a run begins with."""
        return jax.jit(lambda key: ravel_pytree(self.objective.model.init(key))[0])

    @property
    def test(self) -> PyTree | None:
        test = self.data.test
        if test is None:
            return None
        records = jax.device_put((test.features, test.targets))
        for made in self.maps:
            records = nobodys_records(made, records)
        return records

    @property
    def model(self) -> Model:
        """What predicts from features as the silos have them."""
        model, maps = self.objective.model, self.maps
        if not maps or model.scores is None:
            return model
        scores = model.scores
        return replace(model, scores=lambda params, features: scores(params, mapped(maps, features)))

    def wanted(self, config: Config, facts: Facts) -> Wanted | None:
        if not (self.metrics or config.run.per_silo):
            return None
        return Wanted(self.metrics, tuple(zip(facts.names, facts.sizes, strict=True)), config.run.per_silo)


def stage_names(config: Config) -> tuple[str, ...]:
    return tuple(kind.name for kind, _ in before(config))


def stacked(config: Config, data: FederatedData, facts: Facts) -> tuple[PyTree, PyTree | None]:
    """All silos' records that are trained on, and those that are held out."""
    on_device = lambda silos: jax.device_put(replace(data, silos=tuple(silos)).stack()[:2])
    held = divided_facts(config, facts).held_out
    if not held:
        return on_device(data.silos), None
    rows = [divided(n, h, config.data.seed, i) for i, (n, h) in enumerate(zip(data.sizes, held, strict=True))]
    part = lambda which: [taken(silo, own[which]) for silo, own in zip(data.silos, rows, strict=True)]
    return on_device(part(0)), on_device(part(1))


def taken(silo: SiloData, rows: Any) -> SiloData:
    return SiloData(silo.name, *jax.tree.map(lambda leaf: leaf[rows], (silo.features, silo.targets)))


@dataclass(frozen=True)
class Prepared:
    """Everything checked and built, nothing written yet."""

    ground: Ground
    plan: Plan
    problem: Problem
    setting: Setting
    bounds: dict[str, str]  # by stream: who vouches for how far a record moves it
    before: Account | None = None  # what earlier stages have spent
    raw: Ground | None = None  # before the stages, whose answers only silos can give

    @property
    def unmapped(self) -> Ground:
        return self.ground if self.raw is None else self.raw

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def data(self) -> FederatedData:
        return self.ground.data

    def settled(self, account: Account) -> list[list[Spent]]:
        """What each silo spent over all stages; an error when that is not what the plan allows."""
        return settle(self.plan, account if self.before is None else account.joined(self.before))


def prepare(
    config: Config,
    data: FederatedData | None = None,
    model: Model | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Prepared:
    """Load, check, calibrate and build. Every mistake in the config is reported from here."""
    return prepared_on(Ground.of(config, data, model, metrics), config)


def prepared_on(ground: Ground, config: Config) -> Prepared:
    """One setting on data that is loaded already; of a simulation the stages before its training are asked."""
    plan = plan_on(ground, config)
    raw, bounds, account = ground, {}, None
    for name in plan.before:
        stage = plan.at(name)
        bounds |= vouched_bounds(stage, ground.objective, ground.records)
        if plan.config.run.mode == "messages":  # the silos' answers will say; nothing is looked at before
            released = jnp.zeros(stage.algorithm.init(jnp.zeros(0)).x.size)
        else:
            released, spent = asked_stage(ground, stage, ground.records, jnp.zeros(ground.objective.parameters))
            account = spent if account is None else account.joined(spent)
        ground = ground.mapped(plan.derived(name, released))
    return replace(assembled(ground, plan, bounds, account), raw=raw)


def plan_on(ground: Ground, config: Config) -> Plan:
    """Of one setting; all settings on a ground have the same model and stages."""
    plan = make_plan(config, ground.facts)
    if ground.stages != stage_names(plan.config):
        raise ConfigError("algorithm.name: some settings whiten the features and some do not; sweep them apart")
    if ground.section != plan.config.model:
        raise ConfigError("algorithm.name: auto chooses parts of the model, others do not; sweep them apart")
    return plan


def asked_stage(ground: Ground, stage: Plan, records: PyTree, x0: Vector) -> tuple[Vector, Account]:
    """A stage beside training, simulated: what it released, and what was counted."""
    return whole_stage(*stage_problem(ground, stage, records, x0))


def stage_problem(ground: Ground, stage: Plan, records: PyTree, x0: Vector) -> tuple[Problem, Setting]:
    streams = tuple((name, stage.sizes.get(name, 0)) for name in stage.streams)
    problem = Problem(ground.objective, silos_of(stage, records), None, stage.facts.rounds, 1, streams)
    return problem, Setting(stage.algorithm, stage.noised, seeded(stage.config.run.seed), x0)


def silos_of(stage: Plan, records: PyTree) -> Silos:
    facts = stage.facts
    return Silos(records, *jax.device_put((np.asarray(facts.sizes, np.int32), np.asarray(facts.weights, np.float32))))


def assembled(
    ground: Ground, plan: Plan, bounds: Mapping[str, str] | None = None, before: Account | None = None
) -> Prepared:
    """The training stage of a plan, on records as earlier stages have left them, with what those have spent."""
    config, stage = plan.config, plan.training
    objective, algorithm = with_penalty(ground.objective, plan.algorithm)
    problem = Problem(
        objective=objective,
        silos=silos_of(stage, ground.records),
        test=ground.test,
        rounds=stage.facts.rounds,
        every=config.run.every or max(1, stage.facts.rounds // HISTORY_ROWS),
        streams=tuple((name, stage.sizes.get(name, 0)) for name in stage.streams),
        participation=stage.facts.participation,
        same_silos=stage.facts.same_silos,
        wanted=ground.wanted(config, stage.facts),
        average=build_average(config.algorithm.average, stage.facts.rounds),
    )
    key = seeded(config.run.seed)
    x0 = ground.first_point(key)
    if ground.metrics:
        jax.eval_shape(partial(measured, problem, plan.algorithm), x0)  # a metric that cannot be computed is found here
    setting = Setting(with_steps(ground.maps, algorithm), stage.noised, key, x0)
    vouched = {**(bounds or {}), **vouched_bounds(stage, objective, ground.records)}
    if plan.evaluation is not None and ground.held_out is not None:
        refuse_unscored(ground)
        vouched |= vouched_bounds(plan.evaluation, ground.objective, ground.held_out)
    return Prepared(ground, plan, problem, setting, vouched, before)


def refuse_unscored(ground: Ground) -> None:
    model = ground.objective.model
    one = ground.facts.record is not None and isinstance(target_of(ground.facts.record[1]), str)
    if model.scores is None or model.metric is None or not one:
        raise ConfigError(f"evaluate: model {model.name!r} has no scores of one target; leave it out")
