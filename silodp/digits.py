"""Numbers for people. A guarantee in few digits is never less than it is."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def rounded_up(number: float | None, digits: int = 4) -> str:
    """In so many significant digits, upwards: an epsilon or delta that is printed holds. None: there is none.

    Example:
        >>> from silodp.digits import rounded_up
        >>> rounded_up(1.12724, 4), rounded_up(1e-5), rounded_up(2.0), rounded_up(None)
        ('1.128', '1e-05', '2', 'none')
    """
    return "none" if number is None else _rounded(number, digits, ROUND_CEILING)


def known(epsilon: float) -> float | None:
    """As JSON can hold it, and a certificate tells it. None: no epsilon holds."""
    return epsilon if math.isfinite(epsilon) else None


def as_number(told: float | None) -> float:
    """The same, to be compared."""
    return math.inf if told is None else told


def rounded_down(number: float, digits: int = 4) -> str:
    """The same downwards, for what is left of a budget.

    Example:
        >>> from silodp.digits import rounded_down
        >>> rounded_down(1.12796), rounded_down(0.0)
        ('1.127', '0')
    """
    return _rounded(number, digits, ROUND_FLOOR)


def _rounded(number: float, digits: int, towards: str) -> str:
    if not math.isfinite(number):
        return f"{number:g}"
    # A float prints in full what it was given as: 0.1 is not rounded up because its bits are a little above 0.1.
    exact = Decimal(repr(float(number))).normalize(Context(prec=digits, rounding=towards))
    return f"{float(exact):.{digits}g}"


def together(count: int, of: int | None = None) -> str:
    """How many records of a silo a promise speaks of. `of`: how many it has.

    Example:
        >>> from silodp.digits import together
        >>> together(1), together(5), together(5, 5)
        ('one record', 'any 5 records of a silo together', 'all 5 records of a silo together')
    """
    return "one record" if count == 1 else f"{'all' if count == of else 'any'} {count} records of a silo together"


def several(count: int, what: str) -> str:
    """
    Example:
        >>> from silodp.digits import several
        >>> several(1, "run"), several(3, "run")
        ('1 run', '3 runs')
    """
    return f"{count} {what}" + ("" if count == 1 else "s")
