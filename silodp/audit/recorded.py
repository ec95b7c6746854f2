"""`silodp audit --real RUNDIR`: what the answers that a message run kept show without any record.

Noise that is too small shows, because everything else that changes between two answers (the point, the batch) only adds
to their difference: E (y - y')^2 >= std^2 + std'^2 in every coordinate.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from silodp.audit.attack import STANDARD_ERRORS
from silodp.audit.check import Finding
from silodp.plan.plan import Plan
from silodp.randomness import GRID_STEPS
from silodp.run.answers import PLAN, SERVER, Answer, load_answers
from silodp.run.directory import RunDirectory
from silodp.sampling import Cumulative

FEWEST = 50  # numbers, below which nothing is said about their spread

UNSEEN = (
    "These checks see no record. They cannot tell whether vectors were clipped, whether a mean moves by no more than "
    "its bound, whether batches were drawn as planned, whether somebody can predict the noise, or what local steps and "
    "masked or sealed messages held. Noise that is too large passes, and so does noise that moving points replace."
)


def audit_recorded(directory: RunDirectory) -> list[Finding]:
    """Every check of the answers kept in a run's directory."""
    answers = load_answers(directory)
    plan = Plan.from_json(json.loads((directory.path / PLAN).read_text(encoding="utf-8")))
    trust = plan.channel.name
    by_stream: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        by_stream[answer.sender, plan.algorithm.stream_of(answer.query)].append(answer)
    by_silos = plan.channel.averaged(4.0) < 4.0  # independent noise of silos averages out; else the server adds it
    findings = []
    for (sender, stream), own in by_stream.items():
        for check, passed, words in checked(plan, sender, stream, own, sender != SERVER or not by_silos):
            findings.append(Finding(trust, f"{check}: {stream}, {told(plan, sender)}", passed, words))
    return findings


def told(plan: Plan, sender: str) -> str:
    return "server" if sender == SERVER else plan.facts.names[int(sender)]


def checked(
    plan: Plan, sender: str, stream: str, answers: Sequence[Answer], noised: bool
) -> Iterator[tuple[str, bool, str]]:
    most = max(s.count for i in range(plan.facts.silos) for s in plan.releases(i) if s.name == stream)
    yield "count", len(answers) <= most, f"{len(answers)} answers, the plan has {most}"
    yield "fresh", *fresh(answers)
    if sender != SERVER:
        yield "grid", *on_grid(answers)
    stds = [planned_std(plan, sender, stream, answer, noised) for answer in answers]
    if all(stds):
        yield "noise", *noise_level(answers, stds)


def fresh(answers: Sequence[Answer]) -> tuple[bool, str]:
    different = len({answer.values.tobytes() for answer in answers})
    return different == len(answers), f"{different} different of {len(answers)}"


def on_grid(answers: Sequence[Answer]) -> tuple[bool, str]:
    whole = all(np.issubdtype(a.values.dtype, np.integer) and math.frexp(a.step)[0] == 0.5 for a in answers)
    return whole, "whole numbers of a power of two" if whole else "floating-point numbers: their low bits may speak"


def planned_std(plan: Plan, sender: str, stream: str, answer: Answer, noised: bool) -> float:
    """What the plan says, or at least what the grid implies; 0: not known."""
    if not plan.channel.gaussian or not noised:
        return 0.0
    clip = getattr(plan.algorithm, "clip", None)
    line = next(s for s in plan.releases(0) if s.name == stream)
    if stream == "value" and clip is not None and not isinstance(line.batch, Cumulative):  # its sums have other bounds
        stds = float(clip) * plan.std_over_clip(stream)
        return float(stds[0 if sender == SERVER else int(sender)])
    return answer.step * GRID_STEPS


def noise_level(answers: Sequence[Answer], stds: Sequence[float]) -> tuple[bool, str]:
    """The spread of differences of successive answers, each answer used once, against their noise alone."""
    values = [answer.values.astype(np.float64) * (answer.step or 1.0) for answer in answers]
    pairs = range(0, len(values) - 1, 2)
    ratios = [np.square(values[i] - values[i + 1]) / (stds[i] ** 2 + stds[i + 1] ** 2) for i in pairs]
    count = sum(ratio.size for ratio in ratios)
    if count < FEWEST:
        return True, f"only {count} differences: nothing can be said"
    measured, error = math.sqrt(np.concatenate(ratios).mean()), 1 / math.sqrt(2 * count)
    words = f"std {measured:.3f} of the plan's, or less; below {1 - STANDARD_ERRORS * error:.3f} would be convicted"
    return measured > 1 - STANDARD_ERRORS * error, words
