"""Brent's root finder (Brent 1973, chapter 4), step for step as scipy.optimize.brentq takes it.

scipy.optimize takes longer to import than all calibrations of a Gaussian run; tests compare the two bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

ROUNDING = 4 * 2.0**-52


def root(
    function: Callable[[float], float],
    low: float,
    high: float,
    xtol: float = 2e-12,
    rtol: float = ROUNDING,
    steps: int = 100,
) -> float:
    """Where the function changes its sign between two points, to xtol + rtol * |x|."""
    before, now = float(low), float(high)
    f_before, f_now = float(function(before)), float(function(now))
    if f_before == 0 or f_now == 0:
        return before if f_before == 0 else now
    if (f_before < 0) == (f_now < 0):
        raise ValueError(f"no change of sign between {low!r} and {high!r}")
    across, f_across, step, last = before, f_before, 0.0, 0.0  # `across` lies on the other side of the root
    for _ in range(steps):
        if f_before != 0 and f_now != 0 and (f_before < 0) != (f_now < 0):
            across, f_across = before, f_before
            step = last = now - before
        if abs(f_across) < abs(f_now):  # the nearer of the two goes on
            before, now, across = now, across, now
            f_before, f_now, f_across = f_now, f_across, f_now
        tolerance, half = (xtol + rtol * abs(now)) / 2, (across - now) / 2
        if f_now == 0 or abs(half) < tolerance:
            return now
        attempt = None
        if abs(last) > tolerance and abs(f_now) < abs(f_before):
            attempt = _interpolated(before, now, across, f_before, f_now, f_across)
        if attempt is not None and 2 * abs(attempt) < min(abs(last), 3 * abs(half) - tolerance):
            last, step = step, attempt
        else:
            last = step = half
        before, f_before = now, f_now
        now += step if abs(step) > tolerance else tolerance if half > 0 else -tolerance
        f_now = float(function(now))
    raise RuntimeError(f"no root within {steps} steps between {low!r} and {high!r}")


def _interpolated(before: float, now: float, across: float, f_before: float, f_now: float, f_across: float) -> float:
    """The step to the zero of a line through two points, or of an inverse parabola through three."""
    if before == across:
        return -f_now * (now - before) / (f_now - f_before)
    slope, wide = (f_before - f_now) / (before - now), (f_across - f_now) / (across - now)
    return -f_now * (f_across * wide - f_before * slope) / (wide * slope * (f_across - f_before))
