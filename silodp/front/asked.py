"""What an estimator asks for, as a config: its options, checked, and what follows from them and from public facts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from silodp import registry
from silodp.config import Config
from silodp.data.types import FederatedData
from silodp.errors import ConfigError
from silodp.front import records
from silodp.parse import parse_config, shown

if TYPE_CHECKING:
    from silodp.models import Model

LARGEST_SEED = 2**31 - 1
# By default a tenth of the records is held out, where there are enough for a private look that says something.
AUTO, TENTH, LARGEST_ERROR, FEWEST = "auto", 0.1, 0.02, 20


def check_options(estimator: Any) -> None:
    """Texts where there are texts to give, and nowhere else: a config reads "1" as a number, and None as a default."""
    if not isinstance(estimator.trust, str) or not estimator.trust:
        raise ConfigError(f"trust{shown(estimator.trust)}: give the name of a trust model, e.g. 'untrusted'")
    for name in ("epsilon", "delta", "held_out"):
        value = getattr(estimator, name)
        if isinstance(value, str) and (name, value) != ("held_out", AUTO):
            raise ConfigError(f"{name} = {value!r}: must be a number, and is a text")


def knots_for(estimator: Any, config: Config, data: FederatedData) -> int:
    """Of the broken lines that numbers become where all is left to `auto` and it says that they pay; 0: none."""
    from silodp.plan.make import knots_that_pay
    from silodp.plan.objects import facts_of

    schema = estimator.schema_
    if schema is None or not schema.numbers or estimator.model is not None or config.algorithm.name != registry.AUTO:
        return 0
    return knots_that_pay(config, facts_of(data), lambda knots: len(schema.in_pieces(knots).feature_names))


def config_of(estimator: Any, data: FederatedData, delta: float) -> tuple[Config, Model | None]:
    """What the estimator asks for, and the model where it is an object."""
    from silodp.models import Model
    from silodp.plan.auto_networks import is_network
    from silodp.plan.objects import config_from
    from silodp.records import has_weight
    from silodp.weights import weighted

    own, counted = estimator.model if isinstance(estimator.model, Model) else None, estimator._class_weights()
    kind = default_kind(data) if estimator.model is None else estimator.model
    if own is not None:
        own, section = weighted(own, counted, has_weight(data.silos[0].targets)), {}
    else:
        section = plain_section(kind, "kind") | ({} if counted is None else {"class_weights": counted})
    weights = {} if estimator.weights is None else {"weights": estimator.weights}
    algorithm = weights | plain_section(estimator.algorithm, "name")
    config = config_from(
        algorithm=algorithm, channel=estimator.trust, epsilon=estimator.epsilon, delta=delta, model=section,
        seed=seed_of(estimator.random_state),
    )  # fmt: skip
    stages = estimator._stages()
    if config.algorithm.name == registry.AUTO and not is_network(config):  # whose recipe whitens nothing
        # Ranges bound what a record can do, and a model of one matrix can be taken elsewhere: nothing is shortened.
        schema = estimator.schema_
        scale = {} if schema is None else {"scale": records.public_scale(schema)}
        target = {} if data.classes else {"target": records.TARGET_DEVIATION}
        stages["whiten"] = {"shorten": False, **scale, **target}
    if estimator.schema_ is not None and estimator.schema_.private:
        stages["scale"] = {"columns": records.private_columns(estimator.schema_)}
    config = parse_config(config.model_dump(exclude_unset=True) | stages)
    return with_held_out(config, data, estimator.held_out), own


def with_held_out(config: Config, data: FederatedData, share: Any) -> Config:
    """The config with a part of the records held out for a private look at the model."""
    from silodp.plan.make import make_plan
    from silodp.plan.objects import facts_of
    from silodp.stages.evaluate import STREAM

    if share is None or (isinstance(share, str) and share == AUTO and not config.privacy.private):
        return config
    tenth = isinstance(share, str) and share == AUTO
    asked = parse_config(config.model_dump(exclude_unset=True) | {"evaluate": {"held_out": TENTH if tenth else share}})
    if not tenth:
        return asked
    channel = registry.find("channel", config.privacy.trust)
    if min(data.sizes) < FEWEST or not channel.gaussian:
        return config
    stage = make_plan(asked, facts_of(data)).evaluation
    assert stage is not None
    return asked if stage.std_of_average(STREAM) <= LARGEST_ERROR else config


def plain_section(given: Any, key: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {key: given}
    if hasattr(given, "model_dump"):
        return given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping):
        what = {"name": "algorithm", "kind": "model"}[key]
        raise ConfigError(f"{what}: a {type(given).__name__}; give a name, or a dict of the {what} section")
    return dict(given)


def default_kind(data: FederatedData) -> str:
    return "linear" if not data.classes else "logistic" if len(data.classes) == 2 else "softmax"


def seed_of(random_state: Any) -> int:
    """A whole number as it is; from the operating system when there is none."""
    if random_state is None:
        return secrets.randbelow(LARGEST_SEED)
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    if not isinstance(random_state, np.random.RandomState):
        raise ConfigError(f"random_state: a {type(random_state).__name__}; give a whole number, a RandomState or None")
    return int(random_state.randint(LARGEST_SEED))
