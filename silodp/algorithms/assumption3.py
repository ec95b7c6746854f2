"""SoteriaFL's Theorem 3 for an estimator of your own (Li, Zhao, Li, Chi 2022, Assumption 3).

An unbiased estimator whose variance is at most C1 Delta_t + C2, where Delta shrinks as

    E Delta_{t+1} <= (1 - theta) Delta_t + C3 |grad f(x_t)|^2 + C4 E|x_{t+1} - x_t|^2,

may be sent with shifted compression at any step

    eta <= min( 1 / ((s + 2 alpha C3/eta^2) L),  sqrt(beta N) / (sqrt(s) (1+omega) L) ),

    alpha = 3 beta C1 / (2 (1+omega) theta L^2),    s = 1 + 2 alpha C4 + 4 beta (1+omega),    any beta > 0.

An algorithm from outside asks for it in its entry:

    entry = {"compression": "shifted", **theorem_3(Estimator(C1=..., C2=..., C3=..., C4=..., theta=...))}

Constants that depend on the options are given as a function of the `Choice`. Privacy does not depend on any of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from silodp.algorithms.proofs import CLIP, step
from silodp.algorithms.theory import GAP, Choice, whole
from silodp.privacy.roots import root


@dataclass(frozen=True)
class Estimator:
    """Constants of Assumption 3. C3 is in units of eta^2, as all of the paper's are. beta: the one with the longest
    step when left out. bounds: G_A^2/4 + G_B^2 in units of G^2 (one gradient: 1/4; SVRG, SAGA: 2)."""

    C1: float = 0.0
    C2: float = 0.0
    C3: float = 0.0
    C4: float = 0.0
    theta: float = 1.0
    beta: float | None = None
    bounds: float = 0.25

    def limits(self, beta: float, L: float, omega: float, silos: int) -> tuple[float, float]:
        """The two steps of the minimum."""
        alpha = 3 * beta * self.C1 / (2 * (1 + omega) * self.theta * L**2)
        s = 1 + 2 * alpha * self.C4 + 4 * beta * (1 + omega)
        return 1 / ((s + 2 * alpha * self.C3) * L), math.sqrt(beta * silos / s) / ((1 + omega) * L)

    def free(self, L: float, omega: float, silos: int) -> float:
        """beta: given, or where the limit that falls with it meets the one that rises."""
        if self.beta is not None:
            return self.beta

        def apart(log_beta: float) -> float:
            falls, rises = self.limits(math.exp(log_beta), L, omega, silos)
            return math.log(rises / falls)

        return math.exp(root(apart, -60.0, 60.0))

    def step(self, L: float, omega: float, silos: int) -> float:
        return min(self.limits(self.free(L, omega, silos), L, omega, silos))

    def rounds(self, c: Choice) -> int:
        """T of eq. (5), with F(x0) - min F = GAP for Phi_0 and 1 for the constant c."""
        cost = c.noise * c.silos * self.bounds * c.G**2  # d (G_A^2/4 + G_B^2) ln(1/delta) / (m eps)^2
        beta = self.free(c.L, c.omega, c.silos)
        return whole(max(math.sqrt(2 * (1 + c.omega) * c.L * GAP / (3 * beta * cost)), self.C2 / cost))


Given = Estimator | Callable[[Choice], Estimator]


def theorem_3(given: Given) -> dict[str, Any]:
    """What an entry says of such an estimator: what the theorem chooses, and when it covers a run."""
    of = lambda c: given if isinstance(given, Estimator) else given(c)
    longest = lambda c: of(c).step(c.L, c.omega, c.silos)

    def choose(c: Choice) -> None:
        c.pick("clip", lambda: c.G)
        c.pick("rounds", lambda: of(c).rounds(c))
        c.pick("step_size", lambda: longest(c))

    return {
        "theory": choose,
        "proved": {"untrusted": "Thm 3"},
        "conditions": (CLIP, step("the minimum of Thm 3", longest)),
        "output": "before",
    }


def lemma_1(name: str) -> Callable[[Choice], Estimator]:
    """The constants of the paper's own estimators: "sgd", "svrg" and "saga"."""

    def sgd(c: Choice) -> Estimator:
        b = c.options.batch or c.n
        return Estimator(C2=(c.n - b) * c.G**2 / (c.n * b))

    def svrg(c: Choice) -> Estimator:
        p = c.options.snapshot_probability or 1.0
        return Estimator(c.L**2 / (c.options.batch or c.n), 0.0, 2 * (1 - p) / p, 1.0, p / 2, bounds=2.0)

    def saga(c: Choice) -> Estimator:
        b = c.options.batch or c.n
        return Estimator(c.L**2 / b, 0.0, 2 * (c.n - b) / b, 1.0, b / (2 * c.n), bounds=2.0)

    return {"sgd": sgd, "svrg": svrg, "saga": saga}[name]
