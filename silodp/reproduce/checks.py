"""Every config of an experiment is read, and every name in it looked up, before the first one runs.

A mistake in the last line of a figure would otherwise wait for hours until its turn comes. What depends on the records
(sizes of silos, shapes, classes) is known only when they are read, and is checked then.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, get_args

from silodp.algorithms import find
from silodp.config import Config, DataConfig, ModelConfig
from silodp.data.datasets import DATASETS
from silodp.data.partition import PARTITIONS
from silodp.data.preprocess import categorical_columns, parse_steps
from silodp.errors import ConfigError
from silodp.models import ACTIVATIONS
from silodp.plan.claim import claim_of
from silodp.plan.parts import channel_of, check_wishes
from silodp.reproduce.experiment import Experiment, HistoryColumn, Unit
from silodp.run.sweep import SWEPT

WITH_TEST_RECORDS = ("mnist", "a9a", "blogfeedback", "cifar10")  # datasets that come in two parts
METRICS = {"linear": "mse", "ridge": "mse", "logistic": "accuracy", "softmax": "accuracy", "cnn": "accuracy"}


def check(experiment: Experiment) -> None:
    """Refuse, by file and place, what cannot run."""
    built: set[Any] = set()
    for unit in experiment.units():
        with named(unit):
            check_varied(unit)
        for level in range(len(unit.levels)):
            check_level(unit, level, built)


def check_level(unit: Unit, level: int, built: set[Any]) -> None:
    settings = representative(unit.search)
    with named(unit, level, settings[0]):  # settings share the data and the model
        check_shared(unit, unit.config(level, settings[0]))
    for values in settings:
        with named(unit, level, values):
            check_algorithm(unit.config(level, values), built)


def representative(search: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Settings that hold every value of the grid and every combination of its names; numbers do not act together."""
    first = {key: values[0] for key, values in search.items()}
    number = lambda values: all(type(value) in (int, float) for value in values)
    names = {key: values[:1] if number(values) else values for key, values in search.items()}
    together = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
    return together + [first | {key: value} for key, values in search.items() for value in values[1:]]


@contextmanager
def named(unit: Unit, level: int = 0, values: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What is refused here is told with its file and its place."""
    try:
        yield
    except ValueError as error:
        experiment = unit.experiment
        where = f"panel {unit.panel.name!r}, line {unit.line.name!r}, column {unit.column}"
        if experiment.levels is not None and unit.levels[level] is not None:
            where += f", {experiment.levels.label} {unit.levels[level]:g}"
        where += "".join(f", {key} = {value!r}" for key, value in (values or {}).items())
        raise ConfigError(f"experiment {experiment.file or experiment.name}: {where}: {error}") from None


def check_varied(unit: Unit) -> None:
    """All settings and levels of a unit run on one table with one model: nothing else may vary."""
    line, levels = unit.line, unit.experiment.levels
    at_levels = [] if levels is None else [levels.key, *line.by_level, *line.paper_by_level]
    for key in (*unit.search, *at_levels):
        if key.partition(".")[0] not in SWEPT:
            raise ConfigError(f"{key}: a search and levels vary keys of {', '.join(SWEPT)}; use panels for others")
    for key, values in unit.search.items():
        if not values or key == "run.seed":
            wanted = "give at least one value" if not values else "settings are run with the experiment's `seeds`"
            raise ConfigError(f"search: {key} = {values}: {wanted}, or leave it out")


def check_shared(unit: Unit, config: Config) -> None:
    check_data(config.data)
    check_model(config.model)
    check_columns(unit.experiment, config)


def check_data(options: DataConfig) -> None:
    if options.source is None:
        raise ConfigError(f"data.source is missing; name a file, or a dataset: {', '.join(DATASETS)}")
    for source in [options.source] if isinstance(options.source, str) else options.source:
        if source not in DATASETS and not Path(source).exists() and not glob.glob(source):
            raise ConfigError(f"data.source = {source!r}: no such file, and no dataset: {', '.join(DATASETS)}")
    known("data.partition", options.partition, PARTITIONS)
    try:
        categorical_columns(parse_steps(options.preprocess))
    except ValueError as error:
        raise ConfigError(f"data.preprocess: {error}") from None


def check_model(options: ModelConfig) -> None:
    known("model.activation", options.activation, ACTIVATIONS)
    known("model.loss", options.loss, ("squared", "cross-entropy"))


def known(key: str, value: str | None, values: Iterable[str]) -> None:
    if value is not None and value not in values:
        raise ConfigError(f"{key} = {value!r}: unknown; known: {', '.join(values)}")


def check_algorithm(config: Config, built: set[Any]) -> None:
    """Whether it can be built with these options; that does not depend on the numbers, so each kind is built once."""
    kind = tuple(worded(value) for section in (config.algorithm, config.privacy) for _, value in section)
    if kind not in built:
        check_options(config)
        built.add(kind)


def check_options(config: Config) -> None:
    options, privacy, entry = config.algorithm, config.privacy, find(config.algorithm.name)
    check_wishes(config, entry)
    channel = channel_of(config, entry)
    if privacy.calibration == "paper" and privacy.private and claim_of(config) is None:
        raise ConfigError(f"privacy.calibration = 'paper': no paper prints one for {options.name}; use other columns")
    if not (options.theory or entry.asked_by):  # theorems fill in what is missing, once sizes are known
        entry.algorithm(options, channel, config.data.silos or 1, private=privacy.private)


def worded(value: Any) -> str:
    return "a number" if type(value) in (int, float) else repr(value)


def check_columns(experiment: Experiment, config: Config) -> None:
    """Whether what the experiment looks at is ever measured."""
    there = measured(config)
    wanted = [(f"metrics.{i}.column", metric.column) for i, metric in enumerate(experiment.metrics)]
    for key, column in [*wanted, ("search.column", experiment.search.column)]:
        if column not in there:
            raise ConfigError(f"{key} = {column!r}: never measured here; measured: {', '.join(there)}")
    known("sweep.select", config.sweep.select, [column for column in there if column != "test_error"])


def measured(config: Config) -> list[str]:
    """Columns of the run's history, and those of which only the records can tell."""
    never = {"accuracy": ("test_mse",), "mse": ("test_accuracy", "test_error"), None: ()}[metric_of(config)]
    tested = config.data.test is not None or config.data.source in WITH_TEST_RECORDS  # files bring no test records
    return [
        column
        for column in get_args(HistoryColumn)
        if not column.startswith("test_") or (tested and column not in never)
    ]


def metric_of(config: Config) -> str | None:
    """What a model is tested by; None: it is a function of the user's own, or the targets decide."""
    loss, source = config.model.loss, config.data.source
    task = config.data.task or (DATASETS[source].task if isinstance(source, str) and source in DATASETS else None)
    if config.model.kind != "mlp" or (loss is None and task is None):
        return METRICS.get(config.model.kind)
    return "mse" if loss == "squared" or (loss is None and task == "regression") else "accuracy"
