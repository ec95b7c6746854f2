"""What is allowed and costs more than it seems to, as warnings. No silo is named: the column may be the wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from silodp.config import AlgorithmConfig
from silodp.data.types import FederatedData
from silodp.errors import SilodpWarning
from silodp.records import target_of
from silodp.report.words import suspicion

LARGEST_EPSILON, FEW_RECORDS, LARGEST_CLIP, MANY_CLASSES = 10.0, 50, 1e4, 10


def default_delta(records: int) -> float:
    return min(1e-5, 1 / (10 * records))


def warn(data: FederatedData, epsilon: float | None, delta: float, algorithm: AlgorithmConfig | None = None) -> None:
    """Of a fit."""
    options = {} if algorithm is None or epsilon is None else algorithm.model_dump(exclude_none=True)
    of_data = (*_of_sizes(data.sizes), *_of_classes(data))
    _tell((*_of_budget(sum(data.sizes), epsilon, delta), *_of_clips(options), *of_data))


def warn_of_run(config: Any, sizes: Sequence[int], data: FederatedData | None = None) -> None:
    """Of a config that is run or planned for; without data, of what is known before."""
    privacy = config.privacy
    if not privacy.private:
        return
    _tell(
        (
            *_of_budget(sum(sizes), privacy.epsilon, privacy.delta),
            *_of_clips(config.algorithm.model_dump(exclude_none=True)),
            *_of_sizes(sizes),
            *(() if data is None else _of_classes(data)),
        )
    )


def warn_of_numbers(classes: np.ndarray) -> None:
    """Of labels found in y: a length of stay in whole days looks like many classes."""
    if classes.dtype.kind in "iuf" and len(classes) >= MANY_CLASSES:
        _tell([f"y: {len(classes)} different numbers are taken as classes; for a quantity take SiloRegressor"])


def _tell(lines: Iterable[str]) -> None:
    for text in lines:
        warnings.warn(text, SilodpWarning, stacklevel=5)


def _of_budget(records: int, epsilon: float | None, delta: float) -> Iterator[str]:
    if epsilon is not None and epsilon > LARGEST_EPSILON:
        yield (
            f"epsilon = {epsilon:g}: a 1 % suspicion about one record may become {100 * suspicion(epsilon):.4g} %; "
            f"take {LARGEST_EPSILON:g} or less"
        )
    if epsilon is not None and delta > 1 / records:
        yield (
            f"delta = {delta:g}: above 1/n = {1 / records:.2g}, which allows to publish whole records; "
            "leave it out, or take much less"
        )


def _of_clips(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name.startswith("clip") and isinstance(value, float) and value > LARGEST_CLIP:
            yield f"algorithm.{name} = {value:g}: the noise grows with it; take the length of a record's gradient"


def _of_sizes(sizes: Sequence[int]) -> Iterator[str]:
    few = [size for size in sizes if size < FEW_RECORDS]
    if few:
        yield (
            f"silo: {len(few)} of {len(sizes)} have fewer than {FEW_RECORDS} records "
            f"({100 * sum(few) / sum(sizes):.3g} % of all); where silos add their own noise, each adds as much as the "
            "largest: join it with another, or leave it out"
        )


def _of_classes(data: FederatedData) -> Iterator[str]:
    """Where a record has one target."""
    targets = [target_of(silo.targets) for silo in data.silos]
    plain = [each for each in targets if isinstance(each, np.ndarray)]
    lacking = sum(len(np.unique(each)) < len(data.classes) for each in plain)
    if lacking:
        yield f"silo: {lacking} of {len(targets)} lack a class; their answers pull the model to the classes they have"
