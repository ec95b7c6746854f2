"""One-dimensional worst pairs of sampled Gaussian releases, and their privacy loss distributions.

A sampled release is a mixture: with probability w_k its noised vector has mean u_k. Given only
|u_k| <= U_k the hockey-stick divergence is largest on a line, P = sum w_k N(+U_k, 1) against
Q = sum w_k N(-U_k, 1) (noise std as unit; docs/privacy.md has the proof). Sampling without
replacement has no such pair, but its worst profile is that of P = (1-q) N(0) + q N(D) against
Q = N(0) where the loss is positive, mirrored where it is negative (Zhu, Dong and Wang 2022,
Theorem 11). Both are one object here: a pair with a loss increasing in x, used for x above the
point where the loss is zero, and mirrored.

Discretisation: the P- and Q-mass of every loss interval [l, l+h] go to its two ends so that both
masses are kept ("connect the dots", Doroshenko et al. 2022). The profile it gives lies above the
true one and touches it on the grid. Computing the masses directly, not as second differences of
delta, keeps their relative accuracy when h is tiny. Composition is dp-accounting's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from silodp.later import Later

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

laws = Later("dp_accounting.pld.pld_pmf")
losses = Later("dp_accounting.pld.privacy_loss_distribution")
special = Later("scipy.special")

_TAIL = 9.0  # normal deviates, beyond which a component has no mass to speak of (1e-19)
_LOST = 1e-18  # probability of one release that counts as a total loss of privacy
_TABLE = 1 << 13
_ROUNDED = 1e-14  # of the quadrature's logarithm: with much noise all of it is rounding, and 0 would promise too much
_LARGEST_EXPONENT = 400.0  # order * shift; beyond it the quadrature for RDP is not attempted


@dataclass(frozen=True)
class MixturePair:
    """P = sum weights_k N(up_k, 1) against Q = sum weights_k N(down_k, 1); loss 0 at `centre`."""

    weights: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    centre: float

    def loss(self, x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """log P(x)/Q(x), increasing in x."""
        return self._log_sum(self.up, x) - self._log_sum(self.down, x)

    def masses(self, edges: Float[np.ndarray, " edges"]) -> tuple[np.ndarray, np.ndarray]:
        """P- and Q-mass of the intervals between neighbouring edges."""
        return self._mass(self.up, edges), self._mass(self.down, edges)

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        reach = np.linspace(self.centre, max(self.up) + _TAIL, _TABLE)
        beyond = np.cumsum(self._mass(self.up, reach)[::-1])[::-1]
        end = reach[np.argmax(beyond <= _LOST)] if beyond[-1] <= _LOST else reach[-1]
        x = np.linspace(self.centre, end, _TABLE)
        return x, self.loss(x)

    @property
    def largest_loss(self) -> float:
        """Loss at the end of the table: the mass beyond is negligible."""
        return float(self._table[1][-1])

    @cached_property
    def loss_scale(self) -> float:
        """Root mean square privacy loss, which sets the grid; floored so that the grid fits."""
        x, loss = self._table
        p, q = self.masses(x)
        middle = (loss[1:] + loss[:-1]) / 2
        return max(math.sqrt(float(np.sum((p + q) * middle**2))), 1e-4 * self.largest_loss)

    def points_of(self, losses: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """x with loss(x) = losses: interpolation in the table, then Newton steps."""
        x = np.interp(losses, self._table[1], self._table[0])
        for _ in range(3):
            slope = self._mean(self.up, x) - self._mean(self.down, x)
            x = np.clip(x - (self.loss(x) - losses) / slope, *self._table[0][[0, -1]])
        return np.maximum.accumulate(x)

    def pld(self, interval: float) -> PrivacyLossDistribution:
        """Pessimistic privacy loss distribution of one release on multiples of `interval`."""
        cells = max(1, math.ceil(self.largest_loss / interval))
        levels = np.arange(cells) * interval
        edges = np.append(self.points_of(levels), self._table[0][-1])
        p, q = self.masses(edges)
        upper = np.clip((p - _scaled(q, levels)) / -math.expm1(-interval), 0.0, p)
        lower = p - upper
        # in the mirror P and Q trade places: the Q-mass that went with `lower` is P-mass there
        nearer = np.minimum(lower * np.exp(-levels), q)
        beyond_p, beyond_q = self._beyond()
        probabilities = np.zeros(2 * cells + 1)
        probabilities[cells:-1] += lower
        probabilities[cells + 1 :] += upper
        probabilities[cells:0:-1] += nearer
        probabilities[cells - 1 :: -1] += q - nearer
        probabilities[0] += beyond_q
        probabilities[cells] += max(0.0, 1.0 - beyond_p - float(probabilities.sum()))
        return losses.PrivacyLossDistribution(
            laws.DensePLDPmf(interval, -cells, probabilities, beyond_p, pessimistic_estimate=True)
        )

    def rdp(self, orders: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"]:
        """Renyi divergences of the mirrored pair by quadrature; inf where that is out of reach."""
        return np.array([self._renyi(float(order)) for order in orders])

    def _renyi(self, order: float) -> float:
        shift = max(self.up) - min(self.down)
        if order * shift > _LARGEST_EXPONENT:
            return math.inf
        end = self.centre + order * shift + max(self.up) + _TAIL + 3
        x = np.linspace(self.centre, end, max(2001, int(50 * (end - self.centre))))
        log_p, log_q = self._log_density(self.up, x), self._log_density(self.down, x)
        powers = np.logaddexp(order * log_p + (1 - order) * log_q, order * log_q + (1 - order) * log_p)
        trapezoid = np.full(x.size, x[1] - x[0])
        trapezoid[[0, -1]] /= 2
        ends = x[[0, -1]]
        atom = max(1.0 - self._mass(self.up, ends)[0] - self._mass(self.down, ends)[0], 1e-300)
        largest = powers.max()
        integral = largest + math.log(np.exp(powers - largest) @ trapezoid)
        total = np.logaddexp(integral, math.log(atom))
        return (max(0.0, float(total)) + _ROUNDED) / (order - 1)

    def _log_sum(self, means: tuple[float, ...], x: np.ndarray) -> np.ndarray:
        terms = [math.log(w) + m * x - m * m / 2 for w, m in zip(self.weights, means, strict=True)]
        return np.logaddexp.reduce(terms)

    def _log_density(self, means: tuple[float, ...], x: np.ndarray) -> np.ndarray:
        return self._log_sum(means, x) - x**2 / 2 - math.log(2 * math.pi) / 2

    def _mean(self, means: tuple[float, ...], x: np.ndarray) -> np.ndarray:
        """Posterior mean of the component's shift given x: the slope of _log_sum."""
        total = self._log_sum(means, x)
        return sum(
            (m * np.exp(math.log(w) + m * x - m * m / 2 - total) for w, m in zip(self.weights, means, strict=True)),
            start=np.zeros_like(x),
        )

    def _mass(self, means: tuple[float, ...], edges: np.ndarray) -> np.ndarray:
        return sum(
            (w * _normal_mass(edges - m) for w, m in zip(self.weights, means, strict=True)),
            start=np.zeros(edges.size - 1),
        )

    def _beyond(self) -> tuple[float, float]:
        end = np.array([self._table[0][-1], math.inf])
        return float(self._mass(self.up, end)[0]), float(self._mass(self.down, end)[0])


def mirrored(weights: tuple[float, ...], shifts: tuple[float, ...]) -> MixturePair:
    """The worst pair of a mixture whose component k has mean of norm at most shifts_k."""
    kept = [(w, s) for w, s in zip(weights, shifts, strict=True) if w > 0]
    up = tuple(s for _, s in kept)
    return MixturePair(tuple(w for w, _ in kept), up, tuple(-s for s in up), centre=0.0)


def without_replacement(rate: float, shift: float) -> MixturePair:
    """The pair whose positive losses, mirrored, dominate sampling without replacement."""
    return MixturePair((1 - rate, rate), (0.0, shift), (0.0, 0.0), centre=shift / 2)


def _scaled(mass: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """mass * e^level. Masses too small to be exact count as 0: that can only raise the loss."""
    exact = mass > 1e-290
    return np.where(exact, np.exp(np.log(np.where(exact, mass, 1.0)) + levels * exact), 0.0)


def _normal_mass(edges: np.ndarray) -> np.ndarray:
    """Standard normal mass between neighbouring edges, from whichever tail is more accurate."""
    left, right = edges[:-1], edges[1:]
    ndtr = special.ndtr
    return np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left))
