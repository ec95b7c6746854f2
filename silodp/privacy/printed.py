"""Which paper's printed calibration belongs to which algorithm, in terms of a run's own options (see paper.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from silodp.config import AlgorithmConfig, ConfigError
from silodp.privacy import paper
from silodp.privacy.accountant import gaussian
from silodp.privacy.paper import Printed
from silodp.privacy.shuffled import paper_eps0


@dataclass(frozen=True)
class Case:
    """What a printed formula may depend on."""

    options: AlgorithmConfig
    epsilon: float
    delta: float
    records: int
    silos: int
    gdp: float | None

    @property
    def batch(self) -> int:
        return self.options.batch or self.records


class Inadmissible(ConfigError):
    """The paper's own conditions exclude every noise level here."""

    def __init__(self, reasons: tuple[str, ...]):
        super().__init__(f"privacy.calibration = 'paper': no eps0 is admissible: {'; '.join(reasons)}")
        self.reasons = reasons


def _lowy(printed: Printed, case: Case, uses: int) -> dict[str, float]:
    """The formula fixes the noise's std whatever the batch; our multiplier is relative to 2*clip/batch."""
    scale = case.batch / paper.lowy_batch(case.epsilon, uses, case.records)
    return {stream: multiplier * scale for stream, multiplier in _multipliers(printed).items()}


def _diff2(case: Case) -> dict[str, float]:
    return _multipliers(paper.diff2(case.epsilon, case.delta, case.options.rounds, case.options.restart or 1))


def _bvr(case: Case) -> dict[str, float]:
    o = case.options
    rate = (o.batch_local or case.records) / case.records
    if rate > 0.05 and rate < 1:
        raise ValueError(
            f"calibration = 'paper': Lemma B.7 says nothing for a sampling rate of {rate:.3g} (above 1/20)"
        )
    printed = paper.bvr(
        case.epsilon, case.delta, o.rounds, o.restart or 1, o.local_steps or 1, o.batch_local or case.records,
        case.records, case.silos,
    )  # fmt: skip
    return _multipliers(printed)


def _spider(case: Case) -> dict[str, float]:
    return _multipliers(paper.spider(case.epsilon, case.delta, case.options.rounds, case.options.restart or 1))


def _svrg(case: Case) -> dict[str, float]:
    o, inner = case.options, max(1, case.records // case.batch)
    stages = math.ceil(o.rounds / (inner * o.epochs)) if o.epochs else 1
    epochs = o.epochs or math.ceil(o.rounds / inner)
    return _multipliers(paper.prox_svrg(case.epsilon, case.delta, epochs, case.batch, case.records, stages))


def _soteria(estimator: str) -> Callable[[Case], dict[str, float]]:
    def formula(case: Case) -> dict[str, float]:
        printed = paper.soteria(
            case.epsilon, case.delta, case.options.rounds, case.batch, case.records, estimator  # type: ignore[arg-type]
        )  # fmt: skip
        return _multipliers(printed)

    return formula


def _mu2(case: Case) -> dict[str, float]:
    rho = case.gdp if case.gdp is not None else gaussian.mu_of(case.epsilon, case.delta)
    return _multipliers(paper.mu2(rho, case.delta, case.options.rounds))


def _psgm(case: Case) -> dict[str, float]:
    o = case.options
    first = o.batch_first or case.batch
    answer = paper_eps0(case.epsilon, case.delta, case.silos, case.records, o.rounds, first, case.batch)
    reasons = answer.reasons
    if (o.local_steps or 1) > 1:
        reasons += ("Thm 4.1 gives the noise of local steps only up to a constant",)
    if answer.eps0 is None or reasons:
        raise Inadmissible(reasons)
    return {"message": 1 / answer.eps0}


Formula = tuple[str, Callable[[Case], dict[str, float]]]

FORMULAS: dict[str, Formula] = {
    "dp-gd": ("DIFF2, Prop. 4.1 with restart 1", _diff2),
    "diff2-gd": ("DIFF2, Prop. 4.1", _diff2),
    "diff2-bvr-l-sgd": ("DIFF2, Prop. E.2", _bvr),
    "spider": ("Lowy et al., Thm F.1", _spider),
    "spider-alt": (
        "Lowy et al., App. H.2",
        lambda c: _lowy(paper.alternate_spider(c.epsilon, c.delta, c.options.rounds, c.records), c, c.options.rounds),
    ),
    "dp-sgd": (
        "Lowy et al., App. H.2",
        lambda c: _lowy(paper.mb_sgd(c.epsilon, c.delta, c.options.rounds, c.records), c, c.options.rounds),
    ),
    "local-sgd": (
        "Lowy et al., App. H.2",
        lambda c: _lowy(
            paper.local_sgd(c.epsilon, c.delta, c.options.rounds, c.options.local_steps or 1, c.records),
            c,
            c.options.rounds * (c.options.local_steps or 1),
        ),
    ),
    "prox-sgd": (
        "Lowy et al., Thm E.1",
        lambda c: _multipliers(paper.prox_sgd(c.epsilon, c.delta, c.options.rounds)),
    ),
    "prox-svrg": ("Lowy et al., Thm E.2", _svrg),
    "prox-pl-svrg": ("Lowy et al., Thm E.2", _svrg),
    "soteria-gd": ("SoteriaFL, eq. (4), constant 48", _soteria("gd")),
    "soteria-sgd": ("SoteriaFL, eq. (4), constant 48", _soteria("sgd")),
    "soteria-svrg": ("SoteriaFL, eq. (4), constant 48", _soteria("svrg")),
    "soteria-saga": ("SoteriaFL, eq. (4), constant 48", _soteria("saga")),
    "ldp-sgd": ("SoteriaFL, eq. (4), constant 48", _soteria("sgd")),
    "ldp-svrg": ("SoteriaFL, eq. (4), constant 48", _soteria("svrg")),
    "cdp-sgd": (
        "SoteriaFL, Thm 4",
        lambda c: _multipliers(paper.cdp_sgd(c.epsilon, c.delta, c.options.rounds, c.batch, c.records)),
    ),
    "mu2": ("mu2, Thm 5.1 and 6.1", _mu2),
}
PSGM: Formula = ("PSGM, Thm 4.1 and Lemma A.9", _psgm)
SHUFFLED: dict[str, Formula] = {"mb-psgm": PSGM, "mb-psgm-fg": PSGM, "ce-psgm": PSGM, "ce-psgm-fg": PSGM}


def formula_of(name: str, trust: str) -> Formula | None:
    """What the paper prints for this algorithm: Gaussian noise, or the level of shuffled messages."""
    return (SHUFFLED if trust == "shuffled" else FORMULAS).get(name)


def _multipliers(printed: Printed) -> dict[str, float]:
    return {part.releases.stream: part.multiplier for part in printed.spent}
