"""Features whitened block by block: a second moment of those features alone that belong together.

    A_b = private mean of a_b a_b^T for every block b of the features, a = scale * (features - m)
    P_b = (A_b + ridge_b)^(-1/2),  as in silodp.stages.whiten, with the noise of matrices of the block's size
    every silo replaces its features by P a / sqrt(d_eff), P: the P_b along the diagonal, 1 for the constant

Blocks are public: all features of one column of a table, such as the parts of a broken line or the flags of a category.
Noise is that of far fewer numbers than a full moment has, and more is undone than by a diagonal. What blocks have in
common stays, and adds up along directions that cross them.

Formal guarantee: one release `moment` over all records. A record's numbers are the products within its blocks, a vector
of length (sum over b of |a_b|^4)^(1/2) that is clipped to c, so their mean moves by at most (2 + rounding) * c / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.releases import Answer, Vector, packed, unpacked
from silodp.sampling import Full
from silodp.stages import whiten
from silodp.stages.maps import Whitening

# Of a step that would suit features without any correlation: blocks have some (covtype and gas turbine in pieces).
SHORTER = 0.5


class Blocks(Algorithm):
    """One round: the second moment of every block of the scaled features."""

    queries: ClassVar = {"moment": ()}

    clip: Any  # of the vector of all products
    scale: Any
    blocks: tuple[tuple[int, ...], ...] = eqx.field(static=True)  # places of the features of each

    @staticmethod
    def of(clip: float, numbers: Sequence[int], scale: whiten.Scale | None) -> Blocks:
        """numbers: for each feature that of its block."""
        blocks = tuple(tuple(np.flatnonzero(np.equal(numbers, b)).tolist()) for b in dict.fromkeys(numbers))
        longest = min(clip**2, whiten.SPREAD / math.sqrt(len(blocks)))
        factors = whiten.scale_of(len(numbers), scale)
        return Blocks(jnp.float32(1.0), build_prox("none"), jnp.float32(longest), factors, blocks)

    @property
    def lengths(self) -> list[int]:
        """Of the blocks' parts of a release."""
        return [len(block) * (len(block) + 1) // 2 for block in self.blocks]

    @property
    def unit(self) -> float:
        return float(self.clip)

    def init(self, x0: Vector) -> whiten.State:
        return whiten.State(jnp.zeros(sum(self.lengths)))

    def round(self, state: whiten.State, fed: Federation) -> whiten.State:
        return whiten.State(fed.mean(self.moment))

    def moment(self, silo: Silo) -> Answer:
        return silo.statistic(self.products, self.clip, whiten.MOMENT)

    def products(self, record: PyTree) -> Vector:
        scaled = record[0] * self.scale
        own = [scaled[jnp.asarray(block)] for block in self.blocks]
        return jnp.concatenate([packed(jnp.outer(part, part)) for part in own])

    def releases(self, silo: int, sizes: tuple[int, ...], rounds: Sequence[int]) -> list[Stream]:
        return [Stream(whiten.MOMENT, len(rounds), Full(), dimension=sum(self.lengths))]

    def whitening(self, released: Vector, std: float) -> Whitening:
        """As `whiten.whitening_of`, block by block; the constant's mean square is known."""
        parts = np.split(np.asarray(released), np.cumsum(self.lengths)[:-1])
        matrices = [np.asarray(unpacked(jnp.asarray(part)), np.float64) for part in parts]
        pairs = [matrix - np.diag(np.diag(matrix)) for matrix in matrices]
        count = sum(matrix.size - len(matrix) for matrix in matrices)
        worth = whiten.worth_of(np.concatenate([each.ravel() for each in pairs]), count * std**2 / 2)
        squares = whiten.clear_squares(np.concatenate([np.diag(matrix) for matrix in matrices]), std)
        diagonals = np.split(squares, np.cumsum([len(block) for block in self.blocks])[:-1])
        found = [_eigen(d, worth * p, worth * std) for d, p in zip(diagonals, pairs, strict=True)]
        return self._map(found, std)

    def _map(self, found: Sequence[tuple[np.ndarray, np.ndarray, float]], std: float) -> Whitening:
        """found: of every block the eigenvalues, the eigenvectors, and how much the noise adds to a value."""
        least = max(whiten.SMALLEST_RIDGE * float(np.mean([*np.concatenate([v for v, _, _ in found]), 1.0])), 1e-30)
        ridges = [max(noise + whiten.CLEAR * std, least) for *_, noise in found]
        last = max(whiten.CLEAR * std, least)
        worth = [float(np.sum(v / (v + ridge))) for (v, _, _), ridge in zip(found, ridges, strict=True)]
        directions = max(1.0, sum(worth) + 1 / (1 + last))
        size = sum(map(len, self.blocks))
        root = np.zeros((size + 1, size + 1))
        for block, (values, vectors, _), ridge in zip(self.blocks, found, ridges, strict=True):
            root[np.ix_(block, block)] = (vectors / np.sqrt((values + ridge) * directions)) @ vectors.T
        root[-1, -1] = 1 / math.sqrt((1 + last) * directions)
        root[:, :-1] *= np.asarray(self.scale)
        return Whitening(root.astype(np.float32), SHORTER * directions)


def _eigen(
    squares: Float[np.ndarray, " k"], pairs: Float[np.ndarray, "k k"], std: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """std: of the noise that is left in the pairs."""
    values, vectors = np.linalg.eigh(np.diag(squares) + pairs)
    if len(values) == 1:
        return np.maximum(values, 0), vectors, 0.0
    noise = math.sqrt(2 * len(values)) * std
    return whiten.told_from_noise(values, noise), vectors, noise
