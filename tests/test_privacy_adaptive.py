"""Runs that are chosen by looking at what earlier ones released (silodp.privacy.adaptive)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from silodp.privacy import accountant, adaptive, gaussian
from silodp.privacy.clones import Messages, Shuffled
from silodp.privacy.kinds import FixedSize, Full, Masked, Poisson, Releases, Spent, TwoLevel

DELTA = 1e-5
Profile = Callable[[np.ndarray], np.ndarray]


def run(sampling, count: int, multiplier: float, **beside: float) -> list[Spent]:
    return [Spent(Releases("value", count, sampling, **beside), multiplier)]  # type: ignore[arg-type]


SAMPLED = {
    "poisson": run(Poisson(0.05), 40, 2.0),
    "a few rounds": run(Poisson(0.05), 2, 0.6),
    "fixed size": run(FixedSize(16, 400), 60, 2.0),
    "two levels": run(TwoLevel(10, 100, 0.1), 20, 4.0),
    "masked": run(Masked(10, 200), 50, 6.0),
    "shuffled": run(Messages(Shuffled(300, 100, "privunit", 21, 0.5, 2), True, Shuffled(300, 100)), 5, 1.0),
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_run_is_covered_by_its_gaussian_at_every_epsilon(kind):
    """Also between the points that are compared, and beyond the last of them."""
    spent, aside = SAMPLED[kind], 1e-9
    mu, top = adaptive.covering(tuple(spent), aside), accountant.epsilon(spent, aside)
    for epsilon in np.linspace(0, 1.2 * top, 53):
        assert accountant.delta(spent, epsilon) <= aside + (1 - aside) * gaussian.delta_of(epsilon, mu) * (1 + 1e-9)


def test_a_gaussian_is_covered_by_hardly_more_than_itself():
    spent = run(Full(), 50, 20.0)
    assert 1 <= adaptive.covering(tuple(spent), 1e-10) / (math.sqrt(50) / 20) < 1.002


def test_sums_under_masks_cost_what_their_batches_do():
    """They are not quite Gaussian, however they are drawn: that is taken off beside the Gaussian that covers them."""
    drawn = run(Poisson(0.05), 40, 2.0, loss=2**-30, lost=1e-300)
    assert adaptive.epsilon([drawn], DELTA) == adaptive.epsilon([SAMPLED["poisson"]], DELTA)


@pytest.mark.parametrize("spent", [run(Poisson(1e-7), 1, 3.0), run(Masked(10, 200), 50, 1e9)])
def test_a_run_that_tells_next_to_nothing_costs_next_to_nothing(spent):
    assert adaptive.epsilon([spent], 1e-9) < 1e-3


DEARER = {"poisson": 1.01, "two levels": 1.01, "fixed size": 1.07, "masked": 1.25, "a few rounds": 2.01}


def test_what_it_costs_that_runs_were_not_fixed_beforehand():
    for kind, most in DEARER.items():
        (once,) = SAMPLED[kind]
        twice = [replace(once, releases=replace(once.releases, stream=stream)) for stream in "ab"]
        fixed = accountant.epsilon(twice, DELTA)
        assert fixed <= adaptive.epsilon([[once], [once]], DELTA) <= most * fixed
    full = run(Full(), 50, 20.0)
    assert accountant.epsilon(full, DELTA) < adaptive.epsilon([full], DELTA) < 1.001 * accountant.epsilon(full, DELTA)
    assert adaptive.epsilon([], DELTA) == adaptive.epsilon([[]], DELTA) == 0


def profile(spent: list[Spent]) -> Profile:
    """delta at any epsilon, also below 0, by interpolation."""
    points = np.linspace(0, 4, 161)
    deltas = np.log([accountant.delta(spent, each) + 1e-300 for each in points])
    above = lambda e: np.exp(np.interp(np.abs(e), points, deltas))
    return lambda e: np.where(e >= 0, above(e), 1 - np.exp(e) * (1 - above(e)))


def chosen_delta(first: list[Spent], others: list[Profile], epsilon: float) -> float:
    """Of whoever looks at the loss of a Gaussian first run, and takes the second run that then tells most.

    delta is the mean, over that loss, of what the second run has at epsilon less the loss.
    """
    mu, z = accountant.gdp(first), np.linspace(-9, 9, 1801)
    assert mu is not None
    weights = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    left = epsilon - (mu**2 / 2 + mu * z)
    return float(weights @ np.max([second(left) for second in others], axis=0))


def test_what_happened_to_be_released_is_no_bound_and_this_is():
    """Two second runs with the same total at DELTA. Who chooses between them by the first run's luck has more."""
    first, drawn = run(Full(), 1, 8.0), run(Poisson(0.02), 1, 0.55)
    limit = accountant.epsilon([*first, replace(drawn[0], releases=Releases("other", 1, Poisson(0.02)))], DELTA)
    mu, own = gaussian.mu_of(limit, DELTA), 1 / 8.0
    full = run(Full(), 1, 1 / math.sqrt(mu**2 - own**2))
    both = [profile(drawn), profile(full)]
    assert [chosen_delta(first, [each], limit) for each in both] == pytest.approx([DELTA, DELTA], rel=0.02)
    assert 1.3 * DELTA < chosen_delta(first, both, limit) < 1.6 * DELTA
    allowed = max(adaptive.epsilon([first, second], DELTA) for second in (drawn, full))
    assert allowed > limit and chosen_delta(first, both, allowed) < DELTA


def test_a_run_that_was_ended_is_charged_as_it_was_covered():
    """Gaussian releases one by one; drawn batches as they were planned, as soon as one was released."""
    planned = [*run(Full(), 10, 4.0), Spent(Releases("drawn", 20, Poisson(0.1)), 2.0)]
    few = run(Full(), 3, 4.0)
    assert adaptive.used(planned, few) == few
    begun = [*few, Spent(Releases("drawn", 1, Poisson(0.1)), 2.0)]
    assert adaptive.used(planned, begun) == [*few, planned[1]]
    assert adaptive.used(planned, []) == []


def test_what_is_kept_aside_has_an_end():
    """It does not depend on what else was chosen: with too much of it no epsilon holds."""
    sampled, drawn = SAMPLED["poisson"], run(Full(), 10, 1e6)
    assert adaptive.epsilon([sampled] * 100, DELTA) < math.inf and adaptive.epsilon([sampled] * 101, DELTA) == math.inf
    assert adaptive.epsilon([run(Full(), 10, 1e6, loss=9e-6)], DELTA) < math.inf
    assert adaptive.epsilon([run(Full(), 10, 1e6, loss=1.1e-5)], DELTA) == math.inf
    assert adaptive.epsilon([run(Full(), 10, 1e6, lost=1.1e-21)], DELTA) == math.inf
    assert adaptive.epsilon([drawn], DELTA) == pytest.approx(adaptive.LOSS)
    assert adaptive.epsilon([run(Full(), 1, 0.1)], DELTA) == math.inf  # e^epsilon times what is lost is no delta
