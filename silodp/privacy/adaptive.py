"""What runs come to when each is chosen by looking at what earlier ones released: a privacy filter. No JAX.

An accountant composes releases that were fixed beforehand. Who chooses the next run, or ends one early, by what was
released may fit it to the luck of the earlier ones. What happened to be released, composed, is then no bound in general
(docs/privacy.md). Gaussian releases are an exception, however they are chosen: each takes a stretch mu^2 of one
Brownian path. So every run counts as Gaussian releases here, and as a small chance beside them that it shows all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from silodp.later import Later
from silodp.privacy import accountant, gaussian
from silodp.privacy.kinds import Spent
from silodp.privacy.sums import apart

special = Later("scipy.special")

# Taken off always, so that what is left for Gaussian releases does not depend on what else was chosen:
SHOWN = 0.005  # of delta, for chances that everything is shown
ASIDE = SHOWN / 100  # of delta, for each run that is not Gaussian
LOSS = 1e-4  # of epsilon, for sums whose noise is nearly Gaussian
LOST = 1e-20  # of delta before it is multiplied by e^epsilon, for the same sums and for coins
FAR = 0.005  # of delta, for that after it
_POINTS = 96  # at which two profiles are compared
_STEP = 1.0005  # of the search for mu
_MOST_EPSILON = 500.0  # beyond which nothing is compared: e^epsilon has to be a number
_MOST_MU = 1e3


class Gaussian(NamedTuple):
    """What a run's releases are no easier to tell apart than: a Gaussian of `mu`, beside a chance that everything is
    `shown`. Releases are within e^loss and `lost` of it (silodp.privacy.sums)."""

    mu: float
    shown: float
    loss: float
    lost: float


def epsilon(runs: Iterable[Sequence[Spent]], delta: float) -> float:
    """Epsilon of all runs together, whoever chooses them. A limit that is compared with it before every run holds."""
    accountant.check_delta(delta)
    each = [gaussian_of(tuple(spent), ASIDE * delta) for spent in runs if spent]
    if not each:
        return 0.0
    mus, *others = zip(*each, strict=True)
    if any(sum(own) > most for own, most in zip(others, (SHOWN * delta, LOSS, LOST), strict=True)):
        return math.inf
    found = gaussian.epsilon_of((1 - SHOWN - FAR) * math.exp(-LOSS) * delta, math.hypot(*mus)) + LOSS
    return found if found < math.log(FAR * delta / LOST) - LOSS else math.inf


def used(planned: Sequence[Spent], released: Sequence[Spent]) -> list[Spent]:
    """What a run costs that has ended. Gaussian releases are charged one by one. Others are covered as they were
    planned, and somebody has seen some of them when the run was ended: they cost what all of them would have."""
    singly = [part for part in released if is_gaussian(part)]
    begun = any(part.releases.count for part in released if not is_gaussian(part))
    return singly + [part for part in planned if begun and not is_gaussian(part)]


def is_gaussian(part: Spent) -> bool:
    return accountant.nearest_gdp([part]) is not None


@lru_cache(maxsize=1024)
def gaussian_of(spent: tuple[Spent, ...], aside: float) -> Gaussian:
    singly, others = ([ideal(part) for part in spent if is_gaussian(part) is kind] for kind in (True, False))
    mu, shown = accountant.nearest_gdp(singly) or 0.0, accountant.left_out(singly)
    if others:
        mu, shown = math.hypot(mu, covering(tuple(others), aside)), shown + aside
    return Gaussian(mu, shown, *apart(spent))


def ideal(part: Spent) -> Spent:
    """The release that a sum under masks is within e^loss and `lost` of."""
    return replace(part, releases=replace(part.releases, loss=0.0, lost=0.0))


def covering(spent: tuple[Spent, ...], aside: float) -> float:
    """A mu whose Gaussian, with a chance of `aside` that everything is shown, covers the releases at every epsilon."""
    top = accountant.epsilon(spent, aside)
    if top == 0:
        return 0.0  # the chance alone covers them
    if top > _MOST_EPSILON:
        return math.inf
    epsilons = [top * i / _POINTS for i in range(_POINTS + 1)]
    needed = [(accountant.delta(spent, each) - aside) / (1 - aside) for each in epsilons]
    mu = max((gaussian.mu_of(e, d) for e, d in zip(epsilons, needed, strict=True) if d > 0), default=0.0)
    while mu and not _covers(mu, epsilons, needed):
        mu *= _STEP
        if mu > _MOST_MU:
            return math.inf
    return mu


def _covers(mu: float, epsilons: Sequence[float], needed: Sequence[float]) -> bool:
    """A profile is convex in e^epsilon: between two points the one lies below its chord, the other above its tangents.
    Those two cross once; if the chord is below them there and at both points, it is below them in between."""
    lines = [(math.exp(e), gaussian.delta_of(e, mu), -float(special.ndtr(-e / mu - mu / 2))) for e in epsilons]
    return all(
        _below(d0, d1, line0, line1) for (d0, d1), (line0, line1) in zip(pairwise(needed), pairwise(lines), strict=True)
    )


def _below(d0: float, d1: float, line0: tuple[float, float, float], line1: tuple[float, float, float]) -> bool:
    (x0, y0, slope0), (x1, y1, slope1) = line0, line1
    if d0 > y0 or d1 > y1:
        return False
    bend = slope1 - slope0
    crossing = x0 + (y0 - y1 + slope1 * (x1 - x0)) / bend if bend > 0 else x0
    crossing = min(max(crossing, x0), x1)
    return d0 + (d1 - d0) * (crossing - x0) / (x1 - x0) <= max(
        y0 + slope0 * (crossing - x0), y1 + slope1 * (crossing - x1)
    )
