"""A classifier's labels: in which order, and as JSON holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from silodp.data.schema import Schema


def sorted_classes(schema: Schema) -> tuple[np.ndarray, Shaped[np.ndarray, " k"]]:
    """Classes in sorted order where they can be sorted, and the new number of each of the schema's."""
    assert schema.target.classes is not None
    classes = schema.labels(np.arange(len(schema.target.classes)))
    order = np.arange(len(classes)) if classes.dtype == object else np.argsort(classes)
    return classes[order], np.argsort(order).astype(np.int32)


def names(classes: np.ndarray) -> tuple[str, ...]:
    return tuple(map(str, classes))


def labels_of(classes: Sequence[Any], kind: str) -> Shaped[np.ndarray, " k"]:
    """The array whose `tolist()` and `dtype.str` these are."""
    return np.array(classes, dtype=object if "O" in kind else kind)


def texts_among(labels: Any) -> set[bool]:
    """Whether there are texts, and whether there is anything else."""
    return {isinstance(label, str) for label in np.asarray(labels, dtype=object).ravel().tolist()}
