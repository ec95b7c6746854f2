"""What a guarantee means in plain words and numbers, each rounded to the side that promises less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

from silodp.digits import rounded_up, together
from silodp.privacy import gaussian

BEFORE = (0.01, 0.1, 0.5)  # suspicions
FALSE_ALARMS = (0.001, 0.01, 0.05, 0.1)
ONE_MACHINE = "This was a simulation on one machine. One process read the records of all silos."
SIMULATION = (
    f"{ONE_MACHINE.removesuffix('.')}, and its noise comes from a seed. "
    "It shows what silos would get that run the same plan themselves. It is no deployment and protects nobody."
)
RELEASED = {
    "magnitude": "how large columns without a public range are",
    "middle": "where the middle of these columns lies",
    "spread": "how far these columns spread",
    "centre": "the mean of every column",
    "moment": "how columns vary, each alone or all together",
    "value": "which way the model should move",
    "first": "which way the model should move at first",
    "difference": "how that has changed since the last time",
    "local": "a step of the silo's own",
    "rates": "how often each class occurs in the silo",
    "metric": "how good the model is on records that were held out",
}  # by the names of streams; an algorithm of one's own may have others
NO_EPSILON = "No epsilon was given: the model is not private."


def suspicion(epsilon: float, before: float = 0.01) -> float:
    """What a suspicion about one record can become, in the eyes of who sees everything that is released."""
    odds = math.exp(min(epsilon, 700.0)) * before / (1 - before)
    return odds / (1 + odds)


def percent_up(share: float) -> str:
    """A share in per cent, never less than it is.

    Example:
        >>> from silodp.report.words import percent_up
        >>> percent_up(0.026724), percent_up(0.99971), percent_up(0.5)
        ('2.7 %', '100 %', '50 %')
    """
    number = 100 * share
    return f"{rounded_up(number, 3 if number >= 10 else 2)} %"


def chance_of_more(silo: Mapping[str, Any], epsilon: float) -> float:
    """A bound on the chance that what is released moves a suspicion by more than this epsilon says.

    With L the loss of the release: P(L > e) - exp(e') P'(L > e) <= delta(e') and P'(L > e) <= exp(-e) P(L > e) give
    P(L > e) <= delta(e') / (1 - exp(e' - e)) for every e' < e. The least of these counts.
    """
    points = [(e, d) for e, d in delta_curve(silo) if e < epsilon]
    return min((d / -math.expm1(e - epsilon) for e, d in points), default=1.0)


def delta_curve(silo: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(epsilon, delta) pairs that the certificate vouches for: many where it is plainly Gaussian."""
    points = [(point["epsilon"], point["delta"]) for point in silo["curve"]]
    mu = silo["gdp_mu"]
    if mu is None or not 0 < mu < math.inf:
        return [*points, (silo["epsilon"], silo["delta"])]
    grid = np.linspace(0, 2 * silo["epsilon"], 81)
    return [(epsilon, gaussian.delta_of(epsilon, mu)) for epsilon in grid.tolist()]


def detection(silo: Mapping[str, Any], alarms: Sequence[float] | Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The most true cases that a test with so many false alarms can find: 1 - f of the trade-off curve f."""
    alarms = np.asarray(alarms, float)
    mu = silo["gdp_mu"]
    if mu is not None and math.isfinite(mu):
        law = NormalDist()
        return np.array([law.cdf(law.inv_cdf(each) + mu) if 0 < each < 1 else each for each in alarms.tolist()])
    found = np.ones_like(alarms)
    for epsilon, delta in delta_curve(silo):
        missed = np.exp(-min(epsilon, 700.0)) * (1 - delta - alarms)  # the same line, mirrored
        found = np.minimum(found, np.minimum(np.exp(min(epsilon, 700.0)) * alarms + delta, 1 - missed))
    return np.clip(found, alarms, 1.0)


def worst(certificate: Mapping[str, Any]) -> Mapping[str, Any]:
    """The silo with the weakest promise."""
    return max(certificate["silos"], key=lambda silo: silo["epsilon"])


def several_of(silo: Mapping[str, Any]) -> str:
    """Of how many records of a silo its promise speaks."""
    return together(silo.get("records_together", 1), silo["records"])


def in_odds(silo: Mapping[str, Any]) -> str:
    epsilon, after = silo["epsilon"], percent_up(suspicion(silo["epsilon"]))
    chance, more = chance_of_more(silo, epsilon), "this"
    if chance >= 1:  # epsilon and delta alone say nothing of a little more than epsilon, but of twice as much
        chance, more = chance_of_more(silo, 2 * epsilon), percent_up(suspicion(2 * epsilon))
    return (
        f"Somebody who is 1 % sure of something about {several_of(silo)} is at most {after} sure of it after "
        f"seeing everything that was released. The chance that a release tells more than {more} is at most "
        f"{rounded_up(min(1.0, chance), 2)}."
    )
