"""What a paper says of its figure, judged on our runs: in how many places it holds, and whether by more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from silodp.reproduce.experiment import Claim, Column, Experiment, Values
from silodp.reproduce.report import Results, level_of, numbers

Run = dict[str, Any]  # one level of a unit's result
LEVEL = 0.05  # of the tests
FEWEST_SEEDS = 3  # that a test is made of


@dataclass(frozen=True)
class Judgement:
    """How a claim fares in one column, over the places (panels and levels) where both sides were run."""

    claim: Claim
    column: Column
    gains: tuple[float, ...]  # of each place: by what part the one side is better than the other, negative if worse
    p_values: tuple[float, ...]  # of each place: paired one-sided t-test; NaN where there is nothing to test
    apart: tuple[bool, ...] = ()  # of each place: the better side has the setting of `unless`

    @property
    def wins(self) -> int:
        return sum(gain > 0 for gain in self.gains)

    @property
    def tested(self) -> tuple[float, ...]:
        return tuple(p for p in self.p_values if not np.isnan(p))

    @property
    def significant(self) -> int:
        return sum(p < LEVEL for p in self.tested)

    @property
    def wins_apart(self) -> int:
        return sum(gain > 0 and apart for gain, apart in zip(self.gains, self.apart, strict=True))

    @property
    def verdict(self) -> str:
        untested = "" if self.tested else ", not tested"
        if self.wins < len(self.gains):
            return ("does not hold" if self.wins == 0 else f"holds in {self.wins} of {len(self.gains)}") + untested
        if untested:
            return "holds in the mean, not tested"
        return "holds" if self.significant == len(self.gains) else "holds in the mean, not significantly"


def told_apart(judged: Sequence[Judgement]) -> str:
    """How often the better side was another algorithm, where the claim says when it is one."""
    unless = judged[0].claim.unless
    if not unless:
        return ""
    places, wins = sum(len(j.gains) for j in judged), sum(j.wins for j in judged)
    apart, won = sum(sum(j.apart) for j in judged), sum(j.wins_apart for j in judged)
    held = f"{won} of these {wins} and " if wins else ""
    return f"{held}{apart} of all {places} at {setting_words(unless)}"


def setting_words(setting: Values) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in setting.items())


def judgements(experiment: Experiment, results: Results) -> list[Judgement]:
    columns: tuple[Column, ...] = ("paper", "exact")
    found = [judge(experiment, results, claim, column) for claim in experiment.claims for column in columns]
    return [judgement for judgement in found if judgement.gains]


def judge(experiment: Experiment, results: Results, claim: Claim, column: Column) -> Judgement:
    gains, p_values, apart = [], [], []
    for panel in experiment.panels:
        for level in experiment.level_values:
            place = (results, panel.name, level, column)
            better, than = runs_of(claim.better, *place), runs_of(claim.than, *place)
            if better and than:
                first, second = sides(experiment, claim, better, than)
                ours, theirs = compared(experiment, claim, first, second)
                apart.append(bool(claim.unless) and claim.unless.items() <= first["setting"].items())
                gains.append(gain(float(ours.mean()), float(theirs.mean())))
                p_values.append(p_value(ours, theirs))
    return Judgement(claim, column, tuple(gains), tuple(p_values), tuple(apart))


def gain(ours: float, theirs: float) -> float:
    """By what part ours is smaller; a side that diverged is infinitely large."""
    if np.isinf(ours):
        return -np.inf
    return 1.0 if np.isinf(theirs) else (theirs - ours) / abs(theirs)


def runs_of(lines: Sequence[str], results: Results, panel: str, level: float | None, column: str) -> list[Run]:
    """What the lines did in one place."""
    found = [level_of(results.get((panel, line, column)), level) for line in lines]
    return [run for run in found if run is not None]


def sides(experiment: Experiment, claim: Claim, better: list[Run], than: list[Run]) -> tuple[Run, Run]:
    """The run of either side that is compared."""
    sign = sign_of(experiment, claim.metric)
    if claim.each:
        by_result = lambda run: values(run, claim.metric, sign).mean()
        return max(better, key=by_result), min(than, key=by_result)
    # Several forms of one algorithm: the one that the search would take, not the one that happens to test best.
    searched = [i for i, metric in enumerate(experiment.metrics) if metric.column == experiment.search.column]
    by = searched[0] if searched else claim.metric
    by_search = lambda run: values(run, by, sign_of(experiment, by)).mean()
    return min(better, key=by_search), min(than, key=by_search)


def compared(experiment: Experiment, claim: Claim, ours: Run, theirs: Run) -> tuple[np.ndarray, np.ndarray]:
    """A number of every seed for either side, smaller is better."""
    sign = sign_of(experiment, claim.metric)
    if claim.per_bit:
        bits = ours["bits_up"][-1]
        return sign * at_bits(ours, claim.metric, bits), sign * at_bits(theirs, claim.metric, bits)
    return values(ours, claim.metric, sign), values(theirs, claim.metric, sign)


def sign_of(experiment: Experiment, metric: int) -> float:
    return -1.0 if experiment.metrics[metric].larger_is_better else 1.0


def values(run: Run, metric: int, sign: float) -> np.ndarray:
    """Every seed's number, smaller is better: infinite where it diverged."""
    signed = sign * numbers(run["metrics"][metric]["values"])
    return np.where(np.isfinite(signed), signed, np.inf)


def at_bits(run: Run, metric: int, bits: float) -> np.ndarray:
    """The mean curve where so many bits have been sent."""
    return np.interp([bits], run["bits_up"], numbers(run["metrics"][metric]["mean"]))


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """That the first is smaller: one-sided paired t-test, a sample per seed, as in DIFF2; NaN if it cannot say."""
    too_few = len(first) != len(second) or len(first) < FEWEST_SEEDS
    if too_few or np.all(first == second) or np.isinf([*first, *second]).any():
        return float("nan")
    return float(stats.ttest_rel(first, second, alternative="less").pvalue)  # type: ignore[attr-defined]
