"""The kinds of stages beside training, in the order in which a run goes through them.

A stage is an algorithm with streams, and what the parties derive from its release: a map of the features for all that
follows, or figures about the model. Plan, simulation and message mode know no stage by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from silodp import registry
from silodp.core import Algorithm
from silodp.errors import ConfigError
from silodp.facts import Facts
from silodp.records import with_offset
from silodp.releases import Vector
from silodp.stages import rates, whiten
from silodp.stages.blocks import Blocks
from silodp.stages.evaluate import Metrics
from silodp.stages.maps import Map
from silodp.stages.rates import Rates
from silodp.stages.scale import Ranges, scaling_of

if TYPE_CHECKING:
    from silodp.config import Config, WhitenConfig
    from silodp.plan.plan import Plan


class Kind:
    """A stage before training. `share`: its part of mu^2, None where a config does not ask for it."""

    name: ClassVar[str]

    def share(self, config: Config) -> float | None:
        raise NotImplementedError

    def algorithm(self, config: Config, facts: Facts) -> Algorithm:
        """What is asked of records as earlier stages leave them."""
        raise NotImplementedError

    def rounds(self, facts: Facts) -> int:
        return 1

    def leaves(self, facts: Facts) -> Facts:
        """The facts with what a record is afterwards."""
        return facts

    def derived(self, plan: Plan, released: Vector) -> Map:
        """What every party makes of the release, with the plan of this stage."""
        raise NotImplementedError


class Scale(Kind):
    name = "scale"

    def share(self, config: Config) -> float | None:
        return None if config.scale is None else config.scale.share

    def algorithm(self, config: Config, facts: Facts) -> Ranges:
        assert config.scale is not None
        count = features_of(facts, self.name)
        columns = range(count) if config.scale.columns is None else config.scale.columns
        beyond = [column for column in columns if not 0 <= column < count]
        if beyond and facts.record is not None:
            raise ConfigError(f"scale.columns: {beyond[0]} is none of the {count} features, which count from 0")
        return Ranges.of(columns)

    def derived(self, plan: Plan, released: Vector) -> Map:
        asked = plan.algorithm
        assert isinstance(asked, Ranges)
        return scaling_of(released, asked.columns, features_of(plan.facts, self.name))


class Centre(Kind):
    name = "centre"

    def share(self, config: Config) -> float | None:
        return None if config.whiten is None else config.whiten.centre or None

    def algorithm(self, config: Config, facts: Facts) -> whiten.Centre:
        asked = config.whiten
        assert asked is not None
        return whiten.Centre.of(asked.clip, features_of(facts, "whiten"), scale_of(asked, facts))

    def derived(self, plan: Plan, released: Vector) -> Map:
        asked = plan.algorithm
        assert isinstance(asked, whiten.Centre)
        return whiten.shift_of(
            released, plan.std_of_average(whiten.CENTRE) * float(asked.clip), np.asarray(asked.scale)
        )


class Whiten(Kind):
    name = "whiten"

    def share(self, config: Config) -> float | None:
        return None if config.whiten is None else config.whiten.share

    def algorithm(self, config: Config, facts: Facts) -> whiten.Moment | whiten.Diagonal | Blocks:
        asked = config.whiten
        assert asked is not None
        if asked.moment == "blocks":
            return Blocks.of(asked.clip, blocks_of(config, facts), scale_of(asked, facts))
        made = whiten.Moment if asked.moment == "full" else whiten.Diagonal
        return made.of(asked.clip, features_of(facts, self.name), scale_of(asked, facts))

    def leaves(self, facts: Facts) -> Facts:
        assert facts.record is not None
        return replace(facts, record=(f"float32[{features_of(facts, self.name) + 1}]", facts.record[1]))

    def derived(self, plan: Plan, released: Vector) -> Map:
        asked, section = plan.algorithm, plan.config.whiten
        assert isinstance(asked, whiten.Moment | whiten.Diagonal | Blocks) and section is not None
        std = plan.std_of_average(whiten.MOMENT) * asked.unit
        made = replace(asked.whitening(released, std, section.ridge or 0.0), lengthen=section.lengthen)
        return replace(made, reach=whiten.reach_of(section.clip) / float(asked.scale)) if section.shorten else made


def blocks_of(config: Config, facts: Facts) -> list[int]:
    """For each feature the number of its block: as given, or of the feature that the last step has cut into pieces."""
    assert config.whiten is not None
    given, features = config.whiten.blocks, features_of(facts, "whiten")
    if facts.record is None:
        return given or [0]
    if given is not None and len(given) != features:
        raise ConfigError(f"whiten.blocks: {len(given)} numbers for {features} features; give one for each")
    from silodp.data.preprocess import pieces_of  # here: most plans have no blocks

    each = pieces_of(config.data.preprocess)
    if given is None and not each:
        raise ConfigError(
            "whiten.moment = 'blocks': nothing says which features belong together; give whiten.blocks, a number for "
            "each feature (as Schema.blocks has them), or let data.preprocess end with pieces"
        )
    return given or [place % (features // each) for place in range(features)]


class Intercepts(Kind):
    """The last one: what it adds to scores is beside the target, so no map of the features sees it."""

    name = "intercepts"

    def share(self, config: Config) -> float | None:
        return None if config.intercepts is None else config.intercepts.share

    def rounds(self, facts: Facts) -> int:
        return facts.silos

    def algorithm(self, config: Config, facts: Facts) -> Rates:
        if not registry.is_own("model", config.model.kind):
            raise ConfigError(f"intercepts: not with model.kind = {config.model.kind!r}; use a kind of the library")
        if facts.record is not None and facts.task != "classification":
            raise ConfigError("intercepts: are made of label rates, and the target is a number; leave them out")
        if facts.silos < 2:
            raise ConfigError("intercepts: there is one silo, and nothing that it differs from; leave them out")
        return Rates.of(facts.silos, classes_of(facts))

    def leaves(self, facts: Facts) -> Facts:
        assert facts.record is not None
        features, targets = facts.record
        return replace(facts, record=(features, with_offset(targets, f"float32[{classes_of(facts)}]")))

    def derived(self, plan: Plan, released: Vector) -> Map:
        asked, facts = plan.algorithm, plan.facts
        assert isinstance(asked, Rates)
        stds = plan.std_over_clip(rates.STREAM) * asked.clip if plan.private else np.zeros(facts.silos)
        return rates.offsets_of(asked.table(released), stds, facts.sizes, facts.weights)


def classes_of(facts: Facts) -> int:
    """2 where no data is known yet."""
    return max(2, facts.outputs)


def features_of(facts: Facts, section: str) -> int:
    """How many features a record has; 1 where no data is known yet, and nothing but an account can be asked."""
    if facts.record is None:
        return 1
    if len(facts.input_shape) != 1:
        raise ConfigError(f"{section}: features of shape {facts.input_shape}; it needs a table (flatten them)")
    return facts.input_shape[0]


def scale_of(section: WhitenConfig, facts: Facts) -> whiten.Scale | None:
    """What makes features about 1 long, for all of them or for each."""
    scale, count = section.scale, features_of(facts, "whiten")
    if facts.record is not None and isinstance(scale, list) and len(scale) != count:
        raise ConfigError(f"whiten.scale: {len(scale)} numbers for {count} features; give one, or one for each")
    return scale


BEFORE: tuple[Kind, ...] = (Scale(), Centre(), Whiten(), Intercepts())


def before(config: Config) -> list[tuple[Kind, float]]:
    """The stages that a config asks for before its training, each with its share of mu^2."""
    asked = [(kind, kind.share(config)) for kind in BEFORE]
    return [(kind, share) for kind, share in asked if share is not None]


def kind_of(name: str) -> Kind:
    return next(kind for kind in BEFORE if kind.name == name)


def leaves_of(config: Config, facts: Facts) -> Facts:
    """The facts with what a record is where the model sees it."""
    if facts.record is None:
        return facts
    for kind, _ in before(config):
        facts = kind.leaves(facts)
    return facts


def metrics_of(config: Config, facts: Facts) -> Metrics:
    assert config.evaluate is not None
    classes = facts.outputs if facts.task == "classification" else 1
    return Metrics.of(config.evaluate.loss_bound, facts.silos, classes)
