"""ATTACKS: an audit runs the code on canaries and compares what leaks with what the plan claims.

For every algorithm and trust model one small run of the real code (silodp.audit.canaries, silodp.audit.observe) is
attacked (silodp.audit.attack). A measured mu above the claim by more than three standard errors convicts the code; a
reading far below a claim that is attained would mean that the audit has become blind, and fails too.

`silodp.audit(...)` is `silodp.audit.audit(...)`:

Args:
    algorithms: names of the algorithms to attack; all private ones when left out.
    trusts: only under these trust models.
    seed: of the canaries and the noise.

Returns:
    A `Row` for each algorithm and trust model: claim, measurement, verdict ("ok", or what is wrong).

Example:
    >>> import silodp
    >>> [row.verdict for row in silodp.audit(["dp-gd"], ["trusted"])]
    ['ok']
"""

import sys
from types import ModuleType
from typing import Any

from silodp.audit.rows import Row, plain, render
from silodp.audit.table import audit

__all__ = ["Row", "audit", "plain", "render"]


class _Callable(ModuleType):
    """The folder and the public function share a name, and importing the folder hides the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Row]:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
