"""Features centred and whitened by their private mean and second moment: two stages before the training.

    m = private mean of scale * features, |scale * features| <= clip; moved towards 0 by what its noise is worth
    A = private mean of a a^T,  a = (scale * (features - m), 1), |a| <= clip
    P = (A + ridge)^(-1/2),     A's entries off the diagonal are first moved towards 0 by what their noise is worth;
                                ridge: the size of the noise that is left; eigenvalues that noise alone could have made
                                are replaced by their mean
    every silo replaces its features by P a / sqrt(d_eff),  d_eff = sum of eigenvalues a / (a + ridge)

    moment = "diagonal": of A only the diagonal is asked for, k numbers in place of k (k + 1) / 2, and P is diagonal too

Whitened features have length about 1 and no direction that matters more than another, so that one step size suits all.
The map depends on the releases alone: whatever is trained on mapped records is as private as it is on others.

Formal guarantee: one release `centre` over all records, of sensitivity (2 + rounding) * clip / n, and one release
`moment`, of sensitivity (sqrt(2) + rounding) * clip^2 / n: two matrices a a^T are never further apart than that. A
diagonal is a mean of vectors with a clip norm of its own, and moves by (2 + rounding) of that / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.releases import Answer, Vector, unpacked
from silodp.sampling import MOVES, SQUARES_MOVE, Full
from silodp.stages.maps import Shift, Whitening

CENTRE, MOMENT = "centre", "moment"
SMALLEST_RIDGE = 1e-5  # of the mean eigenvalue, where there is no noise
CLEAR = 2.0  # stds of noise; what is larger is told
# Per feature, in stds. With it the ridge is the noise that a full moment would have had: what is learned on rescaled
# features has noise of that size as well, and without it steps are too long (wbcd, digits).
DIAGONAL_RIDGE = 0.375
SPREAD = 3.0  # squares of features of length 1 have this length / sqrt(features) at most, unless few carry them all


Scale = float | list[float]  # of all features, or of each


class State(eqx.Module):
    x: Vector


class Centre(Algorithm):
    """One round: the mean of the scaled features."""

    queries: ClassVar = {"centre": ()}

    clip: Any  # of a record's scaled features
    scale: Any
    features: int = eqx.field(static=True)

    @staticmethod
    def of(clip: float, features: int, scale: Scale | None) -> Centre:
        """`scale`: makes features about 1 long, for all or for each; left out, that of standardised ones."""
        return Centre(jnp.float32(1.0), build_prox("none"), jnp.float32(clip), scale_of(features, scale), features)

    @property
    def size(self) -> int:
        return self.features

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.size))

    def round(self, state: State, fed: Federation) -> State:
        return State(fed.mean(self.centre))

    def centre(self, silo: Silo) -> Answer:
        return silo.statistic(lambda record: record[0] * self.scale, self.clip, CENTRE)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(CENTRE, len(rounds), Full(), dimension=self.size)]


class Moment(Algorithm):
    """One round: the second moment of the scaled features, with a constant beside them."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of a record's features, the constant included
    scale: Any
    features: int = eqx.field(static=True)  # with the constant

    @staticmethod
    def of(clip: float, features: int, scale: Scale | None) -> Moment:
        scale_ = scale_of(features - 1, scale)
        return Moment(jnp.float32(1.0), build_prox("none"), jnp.float32(clip), scale_, features)

    @property
    def size(self) -> int:
        return self.features * (self.features + 1) // 2

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.size))

    def round(self, state: State, fed: Federation) -> State:
        return State(fed.mean(self.moment))

    def moment(self, silo: Silo) -> Answer:
        return silo.squares(lambda record: jnp.append(record[0] * self.scale, 1.0), self.clip**2, MOMENT)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(MOMENT, len(rounds), Full(), dimension=self.size, squares=True)]

    @property
    def unit(self) -> float:
        """The clip norm of what is released."""
        return float(self.clip) ** 2

    def whitening(self, released: Vector, std: float) -> Whitening:
        return whitening_of(released, std, np.asarray(self.scale))


class Diagonal(Algorithm):
    """One round: the mean square of each scaled feature. That of the constant is known."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of the vector of squares
    scale: Any
    features: int = eqx.field(static=True)  # with the constant

    @staticmethod
    def of(clip: float, features: int, scale: Scale | None) -> Diagonal:
        count = max(1, features - 1)
        longest = min(clip**2, SPREAD / math.sqrt(count))
        return Diagonal(jnp.float32(1.0), build_prox("none"), jnp.float32(longest), scale_of(count, scale), count + 1)

    @property
    def size(self) -> int:
        return self.features - 1

    @property
    def unit(self) -> float:
        return float(self.clip)

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.size))

    def round(self, state: State, fed: Federation) -> State:
        return State(fed.mean(self.moment))

    def moment(self, silo: Silo) -> Answer:
        return silo.statistic(lambda record: jnp.square(record[0] * self.scale), self.clip, MOMENT)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(MOMENT, len(rounds), Full(), dimension=self.size)]

    def whitening(self, released: Vector, std: float) -> Whitening:
        return rescaling_of(released, std, np.asarray(self.scale))


def scale_of(features: int, given: Scale | None) -> Any:
    return jnp.asarray(1 / math.sqrt(max(1, features)) if given is None else given, jnp.float32)


def shift_of(mean: Vector, std: float, scale: Any) -> Shift:
    """From a released mean and the std of the noise in each of its numbers.

    A mean that is no longer than its noise says nothing: the more noise, the nearer the centre stays to 0
    (James, Stein 1961).
    """
    told = np.asarray(mean, np.float64)
    return Shift((worth_of(told, told.size * std**2) * told / scale).astype(np.float32))


def worth_of(told: Float[np.ndarray, "..."], noise: float) -> float:
    """What is left of released numbers whose noise has this expected squared length."""
    length = float(np.sum(told**2))
    return max(0.0, 1 - noise / length) if length > 0 else 0.0


def whitening_of(moment: Vector, std: float, scale: Any) -> Whitening:
    """From a released moment, the std of the noise in each of its numbers, and its features' scale."""
    matrix = np.asarray(unpacked(moment), np.float64)
    pairs = matrix - np.diag(np.diag(matrix))
    worth = worth_of(pairs, len(pairs) * (len(pairs) - 1) * std**2 / 2)  # pairs are packed sqrt(2) times as long
    values, vectors = np.linalg.eigh(np.diag(clear_squares(np.diag(matrix), std)) + worth * pairs)
    noise = worth * math.sqrt(2 * len(values)) * std  # the noise of pairs alone has eigenvalues up to this
    values = told_from_noise(values, noise)
    ridge = max(noise + CLEAR * std, SMALLEST_RIDGE * float(np.mean(values)), 1e-30)
    directions = max(1.0, float(np.sum(values / (values + ridge))))
    root = (vectors / np.sqrt((values + ridge) * directions)) @ vectors.T
    root[:, :-1] *= scale
    return Whitening(root.astype(np.float32), directions)


def dearness(features: int, std: float, clip: float) -> float:
    """Of a full moment that is not released: its noise's largest eigenvalue over the moment's mean eigenvalue.

    features: with the constant. std: on the average gradient, in clip norms, at the moment's share of the budget.
    Features are about 1 long, so that eigenvalues have the mean 1 / features.
    """
    return math.sqrt(2 * features) * std * (SQUARES_MOVE / MOVES) * clip**2 * features


def rescaling_of(squares: Vector, std: float, scale: Any) -> Whitening:
    """From released mean squares of features."""
    told = np.asarray(squares, np.float64)
    values = np.append(clear_squares(told, std), 1.0)
    ridge = max(CLEAR * std, DIAGONAL_RIDGE * told.size * std, SMALLEST_RIDGE * float(np.mean(values)), 1e-30)
    directions = max(1.0, float(np.sum(values / (values + ridge))))
    factors = 1 / np.sqrt((values + ridge) * directions)
    factors[:-1] *= scale
    return Whitening(factors.astype(np.float32), directions)


def clear_squares(told: Float[np.ndarray, " k"], std: float) -> Float[np.ndarray, " k"]:
    """Released mean squares; those that noise alone could have made get their mean."""
    clear = told > CLEAR * std
    left = max(0.0, float(told[~clear].sum())) / max(1, int((~clear).sum()))
    return np.where(clear, told, left)


def reach_of(clip: float, scale: float) -> float:
    """The longest features, unscaled, that have room for the constant within the clip norm."""
    return math.sqrt(max(clip**2 - 1, clip**2 / 4)) / scale


def told_from_noise(values: Float[np.ndarray, " k"], noise: float) -> Float[np.ndarray, " k"]:
    """Eigenvalues without what noise has added to them; those that it could have made alone get their mean.

    An eigenvalue a of the moment shows as a + noise^2 / (4 a) beside noise of this spectral norm (Benaych-Georges,
    Nadakuditi 2011).
    """
    clear = values > 1.05 * noise
    grown = (values + np.sqrt(np.maximum(values**2 - noise**2, 0))) / 2
    left = max(0.0, float(values.sum() - grown[clear].sum()))
    return np.where(clear, grown, left / max(1, int((~clear).sum())))
