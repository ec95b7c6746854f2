"""Programs timed in turns, so that a busy machine slows them alike; CPU time of all threads, and wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any

import numpy as np

LEAST_SAMPLE = 0.01  # seconds: shorter programs are called several times for one sample
FEWEST, DEAR, FEWER = 5, 2.0, 2  # samples of even the slowest program; of those that take more seconds than this
REST = 0.002  # for thread pools to fall asleep: a spinning worker would be charged to the next program

Quartiles = list[float]  # 25%, 50%, 75%
Turns = Mapping[int, float]  # seconds, by turn


@dataclass
class Samples:
    """CPU and wall seconds of a program, by turn."""

    cpu: dict[int, float] = field(default_factory=dict)
    wall: dict[int, float] = field(default_factory=dict)

    def add(self, turn: int, times: tuple[float, float], scale: float = 1.0) -> None:
        self.cpu[turn], self.wall[turn] = (scale * seconds for seconds in times)

    def over(self, base: Samples) -> dict[str, Any]:
        """Its times over another's, and in how many turns both took part."""
        cpu, wall = within_turns(self.cpu, base.cpu), within_turns(self.wall, base.wall)
        return {"cpu": quartiles(cpu), "wall": quartiles(wall), "samples": len(cpu)}


def within_turns(over: Turns, under: Turns) -> list[float]:
    """The ratios in the turns that both took part in."""
    return [seconds / under[turn] for turn, seconds in over.items() if turn in under]


def quartiles(values: list[float]) -> Quartiles:
    return [float(q) for q in np.percentile(values, [25, 50, 75])]


def clock(run: Callable[[], Any], calls: int = 1) -> tuple[float, float]:
    """CPU and wall seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        run()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls


def interleaved(
    programs: Mapping[str, Callable[[], Any]], turns: int, seconds: float, base: str | None = None
) -> dict[str, Samples]:
    """Every program in every turn; one that would take more than its part of `seconds` sits out some of them.

    Programs pause by powers of two: who takes part in a turn does so beside all that pause less. The base never pauses.
    """
    share = seconds / len(programs)
    pace = {name: _pace(run, turns, share) for name, run in programs.items()}
    if base is not None:
        pace[base] = pace[base][0], 1
    samples = {name: Samples() for name in programs}
    for turn in range(turns):
        for name in shuffled(programs, turn):
            calls, stride = pace[name]
            if turn % stride == 0:
                time.sleep(REST)
                samples[name].add(turn, clock(programs[name], calls))
    return samples


def shuffled(names: Iterable[str], turn: int) -> list[str]:
    """Another order in every turn, the same in every run: nobody always follows the same neighbour into the caches."""
    listed = list(names)
    return [listed[i] for i in np.random.default_rng(turn).permutation(len(listed))]


def _pace(run: Callable[[], Any], turns: int, share: float) -> tuple[int, int]:
    """Calls in a sample, and turns from one sample to the next. The programs have run before: they are warm."""
    once = max(clock(run)[1], 1e-7)
    calls = max(1, ceil(LEAST_SAMPLE / once))
    wanted = max(1.0, turns * once * calls / share)
    fewest = FEWEST if once < DEAR else FEWER
    return calls, 2 ** min(ceil(log2(wanted)), int(log2(max(1, turns // fewest))))


def summaries(samples: Mapping[str, Samples], bases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is kept of every program. Ratios within turns cannot be had from it later: they are taken here."""
    return {
        name: {
            "cpu_s": quartiles(list(own.cpu.values())), "wall_s": quartiles(list(own.wall.values())),
            "over": {base: own.over(samples[base]) for base in bases if base in samples},
        }
        for name, own in samples.items()
    }  # fmt: skip
