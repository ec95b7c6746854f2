"""Features centred and whitened by their private mean and second moment: two stages before the training.

    m = private mean of scale * features, which are at most `reach` long, reach^2 = clip^2 - 1: with a constant 1 beside
        them a record is at most `clip` long; m is moved towards 0 by what its noise is worth
    A = private mean of a a^T,  a = scale * (features - m), |a| <= reach
    P = (A + ridge)^(-1/2),     A's entries off the diagonal are first moved towards 0 by what their noise is worth;
                                ridge: the size of the noise that is left, and what the config adds; eigenvalues that
                                noise alone could have made are replaced by their mean. Directions of P A P that are
                                clearly longer than 1 all the same, because they are sums of many small entries, are
                                shortened to 1
    every silo replaces its features by (P a, p) / sqrt(d_eff),  d_eff = sum of eigenvalues a / (a + ridge)

    moment = "diagonal": of A only the diagonal is asked for, k numbers in place of k (k + 1) / 2, and P is diagonal too

p is what P would be for a constant 1 beside the features. Nobody is asked about it: its mean square is known, and its
products with centred features are about 0. A record with it would be longer, and there would be twice the noise.

Whitened features have length about 1 and no direction that matters more than another, so that one step size suits all.
The map depends on the releases alone: whatever is trained on mapped records is as private as it is on others.

Formal guarantee: one release `centre` over all records, of sensitivity (2 + rounding) * reach / n, and one release
`moment`, of sensitivity (sqrt(2) + rounding) * reach^2 / n: two matrices a a^T are never further apart than that. A
diagonal is a mean of vectors with a clip norm of its own, and moves by (2 + rounding) of that / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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
# Of what whitening would make of the constant. Centres are noised, so features are related to it: one direction would
# be up to twice as steep as others, which the steps of squared losses do not stand.
CONSTANT = 0.7
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
        longest = jnp.float32(reach_of(clip))
        return Centre(jnp.float32(1.0), build_prox("none"), longest, scale_of(features, scale), features)

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
    """One round: the second moment of the scaled features."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of a record's scaled features
    scale: Any
    features: int = eqx.field(static=True)

    @staticmethod
    def of(clip: float, features: int, scale: Scale | None) -> Moment:
        longest = jnp.float32(reach_of(clip))
        return Moment(jnp.float32(1.0), build_prox("none"), longest, scale_of(features, scale), features)

    @property
    def size(self) -> int:
        return self.features * (self.features + 1) // 2

    def init(self, x0: Vector) -> State:
        return State(jnp.zeros(self.size))

    def round(self, state: State, fed: Federation) -> State:
        return State(fed.mean(self.moment))

    def moment(self, silo: Silo) -> Answer:
        return silo.squares(lambda record: record[0] * self.scale, self.clip**2, MOMENT)

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(MOMENT, len(rounds), Full(), dimension=self.size, squares=True)]

    @property
    def unit(self) -> float:
        """The clip norm of what is released."""
        return float(self.clip) ** 2

    def whitening(self, released: Vector, std: float, ridge: float = 0.0) -> Whitening:
        return whitening_of([released], [range(self.features)], std, np.asarray(self.scale), ridge)


class Diagonal(Algorithm):
    """One round: the mean square of each scaled feature."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of the vector of squares
    scale: Any
    features: int = eqx.field(static=True)

    @staticmethod
    def of(clip: float, features: int, scale: Scale | None) -> Diagonal:
        longest = min(clip**2, SPREAD / math.sqrt(features))
        factors = scale_of(features, scale)
        return Diagonal(jnp.float32(1.0), build_prox("none"), jnp.float32(longest), factors, features)

    @property
    def size(self) -> int:
        return self.features

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

    def whitening(self, released: Vector, std: float, ridge: float = 0.0) -> Whitening:
        return rescaling_of(released, std, np.asarray(self.scale), ridge)


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


def whitening_of(
    moments: Sequence[Float[Array, " _"]], blocks: Sequence[Sequence[int]], std: float, scale: Any, ridge: float = 0.0
) -> Whitening:
    """From released moments, packed, of blocks of the features, and the std of the noise in each of their numbers.

    One block of all features is a full moment. ridge: what is added to that of the noise.
    """
    matrices = [np.asarray(unpacked(jnp.asarray(each)), np.float64) for each in moments]
    pairs = [matrix - np.diag(np.diag(matrix)) for matrix in matrices]
    count = sum(matrix.size - len(matrix) for matrix in matrices)
    noise = count * std**2 / 2  # pairs are packed sqrt(2) times as long
    worth = worth_of(np.concatenate([each.ravel() for each in pairs]), noise)
    squares = clear_squares(np.concatenate([np.diag(matrix) for matrix in matrices]), std)
    diagonals = np.split(squares, np.cumsum([len(block) for block in blocks])[:-1])
    found = [eigen(d, worth * p, worth * std) for d, p in zip(diagonals, pairs, strict=True)]
    least = max(SMALLEST_RIDGE * float(np.mean([*np.concatenate([v for v, _, _ in found]), 1.0])), 1e-30)
    ridges = [max(noise + CLEAR * std, least) + ridge for *_, noise in found]
    last = max(CLEAR * std, least)
    told = [float(np.sum(v / (v + own))) for (v, _, _), own in zip(found, ridges, strict=True)]
    directions = max(1.0, sum(told) + 1 / (1 + last))
    root = np.zeros((squares.size + 1, squares.size + 1))
    for block, matrix, (values, vectors, _), own in zip(blocks, matrices, found, ridges, strict=True):
        whitened = (vectors / np.sqrt(values + own)) @ vectors.T
        root[np.ix_(block, block)] = shortened(whitened, matrix, std) / math.sqrt(directions)
    root[-1, -1] = CONSTANT / math.sqrt((1 + last) * directions)
    root[:, :-1] *= scale
    return Whitening(root.astype(np.float32), directions)


def eigen(
    squares: Float[np.ndarray, " k"], pairs: Float[np.ndarray, "k k"], std: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Eigenvalues, eigenvectors, and how much noise adds to a value. std: of the noise that is left in the pairs."""
    values, vectors = np.linalg.eigh(np.diag(squares) + pairs)
    if len(values) == 1:
        return np.maximum(values, 0), vectors, 0.0
    noise = math.sqrt(2 * len(values)) * std  # that of pairs alone has eigenvalues up to this
    return told_from_noise(values, noise), vectors, noise


def shortened(
    whitened: Float[np.ndarray, "k k"], moment: Float[np.ndarray, "k k"], std: float
) -> Float[np.ndarray, "k k"]:
    """The map without directions in which the released moment is clearly longer than 1: steps would be too long there.

    Pairs lose as much of a few long directions, which noise hardly hides, as of everything else.
    """
    values, vectors = np.linalg.eigh(whitened @ moment @ whitened)
    noise = math.sqrt(2 * len(moment)) * std * np.sum((whitened @ vectors) ** 2, axis=0)
    return (vectors / np.sqrt(np.maximum(1.0, values - noise))) @ vectors.T @ whitened


def dearness(features: int, std: float, clip: float) -> float:
    """Of a full moment that is not released: its noise's largest eigenvalue over the moment's mean eigenvalue.

    std: on the average gradient, in clip norms, at the moment's share of the budget. Features are about 1 long, so that
    eigenvalues have the mean 1 / features.
    """
    return math.sqrt(2 * features) * std * (SQUARES_MOVE / MOVES) * reach_of(clip) ** 2 * features


def rescaling_of(squares: Vector, std: float, scale: Any, ridge: float = 0.0) -> Whitening:
    """From released mean squares of features."""
    told = np.asarray(squares, np.float64)
    values = np.append(clear_squares(told, std), 1.0)
    noise = max(CLEAR * std, DIAGONAL_RIDGE * told.size * std, SMALLEST_RIDGE * float(np.mean(values)), 1e-30)
    ridges = noise + np.append(np.full(told.size, ridge), 0.0)
    directions = max(1.0, float(np.sum(values / (values + ridges))))
    factors = 1 / np.sqrt((values + ridges) * directions)
    factors[:-1] *= scale
    factors[-1] *= CONSTANT
    return Whitening(factors.astype(np.float32), directions)


def clear_squares(told: Float[np.ndarray, " k"], std: float) -> Float[np.ndarray, " k"]:
    """Released mean squares; those that noise alone could have made get their mean."""
    clear = told > CLEAR * std
    left = max(0.0, float(told[~clear].sum())) / max(1, int((~clear).sum()))
    return np.where(clear, told, left)


def reach_of(clip: float) -> float:
    """The longest scaled features that have room for a constant 1 within the clip norm."""
    return math.sqrt(max(clip**2 - 1, clip**2 / 4))


def told_from_noise(values: Float[np.ndarray, " k"], noise: float) -> Float[np.ndarray, " k"]:
    """Eigenvalues without what noise has added to them; those that it could have made alone get their mean.

    An eigenvalue a of the moment shows as a + noise^2 / (4 a) beside noise of this spectral norm (Benaych-Georges,
    Nadakuditi 2011).
    """
    clear = values > 1.05 * noise
    grown = (values + np.sqrt(np.maximum(values**2 - noise**2, 0))) / 2
    left = max(0.0, float(values.sum() - grown[clear].sum()))
    return np.where(clear, grown, left / max(1, int((~clear).sum())))
