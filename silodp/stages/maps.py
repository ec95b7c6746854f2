"""What all parties make of a stage's release: a public map of the features that everything later is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from silodp.core import Algorithm
from silodp.records import target_of, with_offset

Features = Float[Array, "... _"]


@runtime_checkable
class Map(Protocol):
    """From a record's features to those that come after the stage. It depends on releases alone."""

    @property
    def longer(self) -> float:
        """By how much steps grow on mapped features."""
        ...

    def features(self, features: Features) -> Features: ...

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What a model's file keeps of the map: its parameters are of no use without it."""
        ...


@dataclass(frozen=True)
class Shift:
    """Features with their private centre moved to zero."""

    centre: Float[np.ndarray, " k"]
    longer: float = 1.0

    def features(self, features: Features) -> Features:
        return features - jnp.asarray(self.centre)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"centre": self.centre}


@dataclass(frozen=True)
class Whitening:
    """The linear map to whitened features, and how many directions of them carry signal.

    matrix: of (features, 1); its diagonal where each feature is scaled by itself. reach: longer features are shortened
    to this first, because what is far from all others would decide everything after whitening. lengthen: the most that
    steps grow by.
    """

    matrix: Float[np.ndarray, "k *k"]
    directions: float
    reach: float = math.inf
    lengthen: float | None = None

    @property
    def longer(self) -> float:
        """Steps are in units of what the loss allows: its curvature is that of one direction in `directions`."""
        return self.directions if self.lengthen is None else min(self.directions, self.lengthen)

    def features(self, features: Features) -> Features:
        if math.isfinite(self.reach):
            length = jnp.linalg.norm(features, axis=-1, keepdims=True)
            features = features * jnp.minimum(1, self.reach / jnp.maximum(length, 1e-30))
        matrix = jnp.asarray(self.matrix)
        if matrix.ndim == 1:
            last = jnp.broadcast_to(matrix[-1], (*features.shape[:-1], 1))
            return jnp.concatenate([features * matrix[:-1], last], axis=-1)
        return features @ matrix[:, :-1].T + matrix[:, -1]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        reach = {"reach": np.asarray([self.reach], np.float32)} if math.isfinite(self.reach) else {}
        return {"whitening": self.matrix} | reach


@dataclass(frozen=True)
class Scaling:
    """(x - centre) / scale, clipped: of the columns that had no public range; others have 0, 1 and no limit."""

    centre: Float[np.ndarray, " k"]
    scale: Float[np.ndarray, " k"]
    limit: Float[np.ndarray, " k"]
    longer: float = 1.0

    def features(self, features: Features) -> Features:
        centre, scale, limit = map(jnp.asarray, (self.centre, self.scale, self.limit))
        return jnp.clip((features - centre) / scale, -limit, limit)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"scaling": np.stack([self.centre, self.scale, self.limit])}


@dataclass(frozen=True)
class Offsets:
    """What is added to the scores of every class, a row for each silo. Features stay as they are."""

    rows: Float[np.ndarray, "silos classes"]
    longer: float = 1.0

    def features(self, features: Features) -> Features:
        return features

    def beside(self, targets: PyTree, silo: int | None) -> PyTree:
        """Of one silo's records, or (None) of all silos' stacked: each has its silo's row beside its target."""
        rows = jnp.asarray(self.rows)
        own = rows[:, None] if silo is None else rows[silo]
        return with_offset(targets, jnp.broadcast_to(own, (*target_of(targets).shape, rows.shape[1])))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"offsets": self.rows}


def mapped(maps: Iterable[Map], features: Features) -> Features:
    for each in maps:
        features = each.features(features)
    return features


def mapped_records(each: Map, records: PyTree, silo: int | None = None) -> PyTree:
    """Records of one silo, or (None) of all silos, stacked."""
    if isinstance(each, Offsets):
        return records[0], each.beside(records[1], silo)
    return nobodys_records(each, records)


def nobodys_records(each: Map, records: PyTree) -> PyTree:
    """Records of no silo, such as those of a test: what a map does for single silos is not theirs."""
    return jax.jit(each.features)(records[0]), records[1]


def with_steps(maps: Iterable[Map], algorithm: Algorithm) -> Algorithm:
    """The algorithm with the steps that mapped features ask for."""
    for each in maps:
        if each.longer != 1:
            algorithm = eqx.tree_at(lambda a: a.step_size, algorithm, algorithm.step_size * jnp.float32(each.longer))
    return algorithm


def sound(each: Map) -> bool:
    """Whether it maps numbers to numbers: what a silo is told may have been made to do something else."""
    return not any(np.isnan(array).any() or (np.isinf(array) & (array < 0)).any() for array in each.arrays.values())
