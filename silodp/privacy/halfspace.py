"""Gaussian half-spaces: the geometry of PrivUnitG (Asi, Feldman, Talwar 2022).

The randomizer draws g, the component of a standard normal vector along the unit input u, with
density raised by e^eps0 where g >= c against where g < c. With share s = Phi(-c) of the space
raised,

    density against the normal one: w = 1 / (1 + (e^eps0 - 1) s) below c, e^eps0 w above,
    E g = phi(c) (e^eps0 - 1) w,         E g^2 = 1 + c E g.

The ratio of the two densities is exactly e^eps0 and does not depend on u. At c = 0 this is Duchi's
randomizer on Gaussian directions; the best c grows with eps0.
"""

import math

from silodp.later import Later

optimize = Later("scipy.optimize")
special = Later("scipy.special")


def raised_share(threshold: float) -> float:
    """Probability of the half-space {g >= threshold} under the standard normal law."""
    return float(special.ndtr(-threshold))


def blanket(eps0: float, share: float) -> float:
    """Probability with which a message can be taken as drawn from the data-free law."""
    return 1.0 / (1.0 + math.expm1(eps0) * share)


def mean_component(eps0: float, threshold: float) -> float:
    """E g: how far a message points, on average, along the input."""
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    return density * math.expm1(eps0) * blanket(eps0, raised_share(threshold))


def second_moment(eps0: float, threshold: float, dimension: int) -> float:
    """E |message|^2 for a unit input once the message is scaled to be unbiased."""
    mean = mean_component(eps0, threshold)
    return (dimension + threshold * mean) / mean**2


def best_threshold(eps0: float, dimension: int) -> float:
    """The threshold c >= 0 with the least variance at level eps0."""
    highest = math.sqrt(2 * eps0) + 3
    search = optimize.minimize_scalar(
        lambda threshold: math.log(second_moment(eps0, threshold, dimension)),
        bounds=(0.0, highest),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(search.x)  # type: ignore[attr-defined]
