"""Part `growth`: how a round's time and memory grow with records, parameters and silos, and a run's with rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

from bench.synthetic import LONGEST, Rounds, records
from bench.timing import clock, quartiles, shuffled

SAMPLES = 5


def growth(quick: bool) -> dict[str, Any]:
    top = -1 if quick else None  # leaves out the largest
    return {
        "records": series("records", [1_000, 10_000, 100_000, 500_000][:top], lambda n: small(1, n)),
        "parameters": series("parameters", [8, 32, 128, 512][:top], wide, of=lambda r: r.parameters),
        "silos, untrusted": series("silos", [10, 100, 1_000, 10_000][:top], lambda n: small(n, 50)),
        "silos, trusted": series(
            "silos", [10, 100, 1_000, 10_000][:top], lambda n: small(n, 50, "trusted")
        ),
        "rounds": lengths(quick),
        "many silos": many_against_one(1_000 if quick else 10_000),
    }  # fmt: skip


@cache
def small(silos: int, size: int, trust: str = "untrusted") -> Rounds:
    return Rounds(records(silos, size, 8), trust)


def wide(hidden: int) -> Rounds:
    return Rounds(records(10, 600, 784, 10), hidden=hidden, activation="sigmoid")


def series(
    axis: str, sizes: Iterable[int], make: Callable[[int], Rounds], of: Callable[[Rounds], int] | None = None
) -> dict[str, Any]:
    points = []
    for size in sizes:
        rounds = make(size)
        cost = rounds.cost(many(rounds))
        points.append({"at": of(rounds) if of else size, "temporary_mb": rounds.temporary_mb} | cost)
        print(f"  {axis} {points[-1]['at']:,}: {cost['cpu_ms'][1]:.3f} ms CPU a round", flush=True)
    return {"points": points, "slope": slope(points, "cpu_ms"), "memory_slope": slope(points, "temporary_mb")}


def many(rounds: Rounds) -> int:
    """Rounds that take about a third of a second."""
    return int(np.clip(0.3 / max(clock(lambda: rounds.run(2))[1], 1e-5), 4, LONGEST - 2))


def slope(points: list[dict[str, Any]], key: str) -> float:
    """Of the larger half on log-log axes: 1 means that twice the size costs twice as much."""
    value = lambda p: p[key][1] if isinstance(p[key], list) else p[key]
    half = points[len(points) // 2 - 1 :]
    logs = np.log([[p["at"], max(value(p), 1e-9)] for p in half])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def lengths(quick: bool) -> dict[str, Any]:
    """A whole run, measurement at its end included, against its rounds."""
    rounds = Rounds(records(10, 50, 8), longest=10_000)
    points = []
    for count in [100, 1_000, 10_000][: 2 if quick else None]:
        times = [clock(lambda count=count: rounds.run(count)) for _ in range(SAMPLES)]
        cpu, wall = (quartiles([1e3 * t[which] for t in times]) for which in (0, 1))
        points.append({"at": count, "temporary_mb": rounds.temporary_mb, "cpu_ms": cpu, "wall_ms": wall})
        print(f"  rounds {count:,}: {cpu[1]:.1f} ms CPU", flush=True)
    return {"points": points, "slope": slope(points, "cpu_ms"), "memory_slope": None}  # one program for all lengths


def many_against_one(silos: int) -> dict[str, Any]:
    """So many silos of 50 records against one silo with all of them, in turns."""
    programs = {
        "one silo": small(1, 50 * silos),
        "silos, trusted": small(silos, 50, "trusted"),
        "silos, untrusted": small(silos, 50),
    }
    costs = {name: [] for name in programs}
    for turn in range(SAMPLES):
        for name in shuffled(programs, turn):
            costs[name].append(programs[name].cost(8, tries=1)["cpu_ms"][1])
    base = np.array(costs["one silo"])
    ratios = {name: quartiles(list(np.array(own) / base)) for name, own in costs.items()}
    print(f"  {silos:,} silos of 50 records against one: {ratios}", flush=True)
    return {
        "silos": silos,
        "samples": SAMPLES,
        "cpu_ms": {name: float(np.median(own)) for name, own in costs.items()},
        "ratio": ratios,
    }
