"""The adversary: guesses canaries' signs from everything released, and looks for noise that was used twice.

A record's releases are its coordinate in each released vector: sign * shift + noise. The best score for Gaussian noise
is the matched filter  shift' * covariance^-1 * releases  over all releases together. Its shift is learnt from the
other half of the canaries and its covariance from the coordinates without records, so that the attack needs to know
nothing of the algorithm and is not fooled by what it was fitted on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.stats import norm as gaussian

Scores = Float[np.ndarray, " m"]
RIDGE = 1e-9  # noise that repeats makes the covariance singular
# A reading convicts beyond so many: by chance once in 30,000 readings, hence once in some 200 whole tables.
STANDARD_ERRORS = 4
NOTICED = 2  # standard errors of a release's shift, below which the filter takes it for nothing


@dataclass(frozen=True)
class Reading:
    """A measured lower bound on a privacy parameter (mu, eps0 or an advantage) and its standard error."""

    mu: float
    error: float

    @property
    def least(self) -> float:
        return self.mu - STANDARD_ERRORS * self.error

    @property
    def most(self) -> float:
        return self.mu + STANDARD_ERRORS * self.error

    def convicts_from(self, claim: float) -> float:
        """The factor by which noise has to be too small for a reading like this one to exceed the claim.

        A reading grows like the factor, its error at most as fast.
        """
        return max(1.0, claim / self.least) if self.least > 0 else math.inf


def agreement(
    releases: Float[np.ndarray, "r m"], signs: Float[np.ndarray, " m"], noise: Float[np.ndarray, "r b"]
) -> Scores:
    """score * sign of each canary, in units of the score's noise: positive when the sign is guessed."""
    spread = noise.std(axis=1)
    used = (spread > 0) | np.any(releases != 0, axis=1)
    if not used.any():
        return np.zeros(signs.size)
    if np.any(spread[used] == 0):
        return np.full(signs.size, math.inf)  # a release without noise
    pulls = releases[used] * signs / spread[used, None]
    covariance = np.atleast_2d(np.cov(noise[used] / spread[used, None])) + RIDGE * np.eye(int(used.sum()))
    scores = np.empty(signs.size)
    for half in (0, 1):
        shift = noticed(pulls[:, 1 - half :: 2])
        filter_ = np.linalg.solve(covariance, shift)
        scores[half::2] = filter_ @ pulls[:, half::2] / math.sqrt(filter_ @ covariance @ filter_)
    return scores


def noticed(pulls: Float[np.ndarray, "r m"]) -> Float[np.ndarray, " r"]:
    """The mean pull in each release; those that may well be nothing would only add their noise to the score."""
    shift = pulls.mean(axis=1)
    clear = np.abs(shift) * math.sqrt(pulls.shape[1]) > NOTICED
    return np.where(clear, shift, 0.0) if clear.any() else shift


def separation(groups: list[Scores]) -> Reading:
    """mu of two Gaussian clouds at +-shift: their distance over their spread. Groups may have different shifts."""
    scores = np.concatenate(groups)
    if not np.isfinite(scores).all():
        return Reading(math.inf, 0.0)
    spread = math.sqrt(sum(((group - group.mean()) ** 2).sum() for group in groups) / (scores.size - len(groups)))
    mu = 2 * float(scores.mean()) / spread
    return Reading(mu, math.sqrt(4 / scores.size + mu**2 / (2 * scores.size)))


def guessing(groups: list[Scores]) -> Reading:
    """mu of the Gaussian mechanism under which signs would be guessed as often; assumes no distribution."""
    scores = np.concatenate(groups)
    count = scores.size
    right = min(float(np.mean((1 + np.sign(scores)) / 2)), 1 - 1 / count)  # without any sign of it, a coin decides
    mu = 2 * float(gaussian.ppf(right))
    return Reading(mu, 2 * math.sqrt(right * (1 - right) / count) / float(gaussian.pdf(mu / 2)))


def frequency(happened: np.ndarray) -> Reading:
    """How often something happens."""
    share = float(np.mean(happened))
    return Reading(share, math.sqrt(share * (1 - share) / happened.size))


def repeated_noise(noise: Float[np.ndarray, "r b"]) -> float:
    """Largest correlation between the noise of two releases."""
    return largest(np.triu(correlations(noise, noise), 1))


def shared_noise(noise: Float[np.ndarray, "r b"], other: Float[np.ndarray, "s b"]) -> float:
    """Largest correlation between noise of two silos."""
    return largest(correlations(noise, other))


def correlations(a: Float[np.ndarray, "r b"], b: Float[np.ndarray, "s b"]) -> Float[np.ndarray, "r s"]:
    return standardised(a) @ standardised(b).T / a.shape[1]


def standardised(noise: Float[np.ndarray, "r b"]) -> Float[np.ndarray, "r b"]:
    spread = noise.std(axis=1, keepdims=True)
    return np.where(spread > 0, noise - noise.mean(axis=1, keepdims=True), 0.0) / np.where(spread > 0, spread, 1.0)


def largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
