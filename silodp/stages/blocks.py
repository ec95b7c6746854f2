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
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from silodp.core import Algorithm, Federation, Silo
from silodp.facts import Stream
from silodp.prox import build_prox
from silodp.releases import Answer, Vector, packed
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

    def whitening(self, released: Vector, std: float, ridge: float = 0.0) -> Whitening:
        parts = jnp.split(released, np.cumsum(self.lengths)[:-1].tolist())
        made = whiten.whitening_of(parts, self.blocks, std, np.asarray(self.scale), ridge)
        return replace(made, directions=SHORTER * made.directions)
