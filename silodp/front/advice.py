"""What is allowed and costs more than it seems to, as warnings. No silo is named: the column may be the wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from silodp.data.types import FederatedData
from silodp.errors import SilodpWarning
from silodp.report.words import suspicion

LARGEST_EPSILON, FEW_RECORDS = 10.0, 50


def default_delta(records: int) -> float:
    return min(1e-5, 1 / (10 * records))


def warn(data: FederatedData, epsilon: float | None, delta: float) -> None:
    for text in (*_of_budget(sum(data.sizes), epsilon, delta), *_of_silos(data)):
        warnings.warn(text, SilodpWarning, stacklevel=4)


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


def _of_silos(data: FederatedData) -> Iterator[str]:
    total, silos = sum(data.sizes), len(data.silos)
    few = [size for size in data.sizes if size < FEW_RECORDS]
    share = 100 * sum(few) / total
    if few:
        yield (
            f"silo: {len(few)} of {silos} have fewer than {FEW_RECORDS} records ({share:.2g} % of all); "
            "where silos add their own noise, each adds as much as the largest: join it with another, or leave it out"
        )
    lacking = sum(len(np.unique(np.asarray(silo.targets))) < len(data.classes) for silo in data.silos)
    if lacking:
        yield f"silo: {lacking} of {silos} lack a class; their answers pull the model to the classes they have"
