"""What the project promises about speed, and what was reached: the first table of the report.

A verdict rests on the medians of ratios that were each taken within a turn: of CPU time and of wall time, where both
were measured. `shapes.py` has the promises about single gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bench import startup

HEAD = ["work", "promise", "target", "CPU", "quartiles", "wall", "samples", "met"]
MLP, LENET = "MLP 784-64-10 x 6,000", "LeNet x 500"
MU2 = "mu2, MNIST, M = 1,"
TOGETHER = "16 settings in one program"
PLAIN, OURS, GHOST, TORCH = "plain gradient, JAX", "silodp", "Opacus ghost clipping", "plain gradient, PyTorch"
RUNNING, IN_RUNS = "one running sum in float32", "runs of 256, added in doubles"
FLOATS, EXACT = "numpy standard_normal, float64", "exact, 256 grid steps"
Found = dict[str, Any]


class Reached(NamedTuple):
    """Quartiles of a figure (thrice the same where it was taken once), and how many samples they are of.

    wall: quartiles in wall time, where the figure is a ratio of times that has them.
    """

    quartiles: list[float]
    samples: int
    wall: list[float] | None = None


class Target(NamedTuple):
    part: str
    work: str
    promise: str
    value: Callable[[Any], Reached | None]
    limit: float
    at_most: bool
    unit: str = "x"


def once(value: float) -> Reached:
    return Reached([value] * 3, 1)


def paired(rows: Any, over: str, under: str, time: str = "cpu") -> Reached:
    """One program's time over another's, turn by turn: the ratios of the tables."""
    ratios = rows[over]["over"][under]
    return Reached(ratios[time], ratios["samples"])


def both(rows: Any, over: str, under: str) -> Reached:
    """The same in CPU and in wall time."""
    return paired(rows, over, under)._replace(wall=rows[over]["over"][under]["wall"])


def ratio(work: str, over: str, under: str) -> Callable[[Any], Reached | None]:
    """None: not measured, or there is no such peer."""
    taken = lambda found: work in found and over in found[work] and under in found[work][over]["over"]
    return lambda found: both(found[work], over, under) if taken(found) else None


def extra_memory(found: Any) -> Reached:
    return once(extra_mb(found[MLP][OURS]))


def extra_mb(row: Any) -> float:
    """The larger of what the process grew by (where the system says) and what XLA reserves."""
    return max(row["peak_mb"] or 0.0, row["temporary_mb"] or 0.0)


def run_of(found: Any, start: str) -> Any:
    return next((run for name, run in found.items() if name.startswith(start)), None)


def loop_ratio(start: str) -> Callable[[Any], Reached | None]:
    def value(found: Any) -> Reached | None:
        run = run_of(found, start)
        return None if run is None else both(run["rows"], "PyTorch loop", "silodp")

    return value


def sweep(found: Any) -> Reached:
    return both(found["rows"], TOGETHER, "one run")


def many_silos(trust: str) -> Callable[[Any], Reached]:
    return lambda found: Reached(found["many silos"]["ratio"][f"silos, {trust}"], found["many silos"]["samples"])


def exact_noise(found: Any) -> Reached:
    return both(found["rows"], EXACT, FLOATS)


def costliest_sum(found: Any) -> Reached:
    return max((both(rows, IN_RUNS, RUNNING) for rows in found.values()), key=lambda reached: reached.quartiles[1])


def worst_compile(found: Any) -> Reached:
    return once(max(row["compile_s"] for row in found.values()))


def largest_crowd(found: Any) -> Reached:
    return once(max(row["peak_mb"] for row in found.values()))


def two_workers(found: Any) -> Reached:
    """Of wall time alone: that is what a second worker is for. Its CPU time is in the table."""
    return Reached(found["faster"]["wall"], found["faster"]["samples"])


def started(name: str) -> Callable[[Any], Reached | None]:
    return lambda found: Reached(found[name]["cpu_s"], found[name]["samples"]) if name in found else None


def held(name: str) -> Callable[[Any], Reached | None]:
    return lambda found: once(found[name]["peak_mb"]) if name in found else None


# From the first line of a process to its last, in CPU seconds.
STARTUP = {
    startup.HELP: 0.6, startup.TYPO: 0.6, startup.LIST: 0.8, startup.ACCOUNT: 1.5, startup.WARM: 3, startup.COLD: 5,
    startup.SILO: 1.5, startup.MESSAGES: 8, startup.PREPARE: 0.5,
}  # fmt: skip

TARGETS = [
    Target("values", f"values, {MLP}", "faster than Opacus hooks", ratio(MLP, "Opacus hooks", OURS), 100, False),
    Target("values", "", "faster than Opacus ghost clipping", ratio(MLP, GHOST, OURS), 2.5, False),
    Target("values", "", "faster than jax-privacy", ratio(MLP, "jax-privacy clipped_grad", OURS), 25, False),
    Target("networks", f"values, {LENET}", "over the plain JAX gradient", ratio(LENET, OURS, PLAIN), 0.8, True),
    Target("networks", "", "over Opacus ghost clipping", ratio(LENET, OURS, GHOST), 1.0, True),
    Target("networks", "", "over the plain PyTorch gradient", ratio(LENET, OURS, TORCH), 1.5, True),
    Target("values", f"extra memory, values, {MLP}", "at the peak", extra_memory, 40, True, " MB"),
    Target("differences", f"extra memory, differences, {MLP}", "at the peak", extra_memory, 40, True, " MB"),
    Target("runs", "DIFF2-GD 8-10-1, whole run", "faster than the eager PyTorch loop", loop_ratio("DIFF2"), 20, False),
    Target("runs", "mu2 M = 1, whole run", "faster than the eager PyTorch loop", loop_ratio(MU2), 20, False),
    Target("sweeps", "16-setting sweep of DIFF2-GD 8-10-1", "over one run", sweep, 6, True),
    Target("sweeps-one-core", "the same, on one core", "over one run", sweep, 6, True),
    Target(
        "growth", "a round of 10,000 silos of 50 records, untrusted", "over one silo with 500,000",
        many_silos("untrusted"), 2, True,
    ),
    Target("growth", "the same, trusted server", "over one silo with 500,000", many_silos("trusted"), 2, True),
    Target("compile", "compiling any registered algorithm on the MLP", "at the longest", worst_compile, 10, True, " s"),
    Target("sums", "clipped sums with a proven bound", "over a float32 running sum", costliest_sum, 1.1, True),
    Target("noise", "noise: exact rounded Gaussian", "over numpy standard_normal", exact_noise, 4, True),
    *(Target("startup", name, "CPU", started(name), limit, True, " s") for name, limit in STARTUP.items()),
    Target("startup", startup.SILO, "memory", held(startup.SILO), 250, True, " MB"),
    Target("crowd", "10,000 silos x 50,001 parameters, one process", "memory", largest_crowd, 2000, True, " MB"),
    Target("workers", "16-setting sweep, two workers", "faster than one with one core, wall", two_workers, 1.8, False),
]  # fmt: skip


def table(found: Found) -> list[list[str]]:
    rows = []
    for target in TARGETS:
        value = target.value(found[target.part]["found"]) if target.part in found else None
        sign = "<=" if target.at_most else ">="
        rows.append([target.work, target.promise, f"{sign} {target.limit:g}{target.unit}", *outcome(target, value)])
    return rows


def outcome(target: Target, reached: Reached | None) -> list[str]:
    """The medians and whether they meet the limit; the quartiles, and whether the limit lies between them."""
    if reached is None:
        return ["not measured", "", "", "", ""]
    low, value, high = reached.quartiles
    verdict = told(target, value) + (", within the spread" if low < target.limit < high else "")
    wall = None if reached.wall is None else told(target, reached.wall[1])
    if wall is not None and wall.split(",")[0] != verdict.split(",")[0]:
        verdict = f"NO: CPU {verdict}; wall {wall}"
    between = f"{low:.3g}-{high:.3g}" if reached.samples > 1 else ""
    walls = "" if reached.wall is None else f"{reached.wall[1]:.3g}{target.unit}"
    return [f"{value:.3g}{target.unit}", between, walls, str(reached.samples), verdict]


def told(target: Target, value: float) -> str:
    met = value <= target.limit if target.at_most else value >= target.limit
    missed = value / target.limit if target.at_most else target.limit / value
    return "yes" if met else f"NO, by {missed:.2f}x"


def explanations(found: Found) -> list[str]:
    """What was measured beside a target that was missed, for those that are known to be hard."""
    reasons = {"values": hooks, "runs": noise, "sweeps": unshared}
    return [text for part, reason in reasons.items() if part in found for text in reason(found[part]["found"])]


def hooks(found: Any) -> list[str]:
    if MLP not in found:
        return []
    floor, ours = (paired(found[MLP], "Opacus hooks", under).quartiles[1] for under in (PLAIN, OURS))
    if ours >= 100:
        return []
    return [
        f"Opacus hooks: the plain JAX gradient, with no privacy at all, is {floor:.3g}x faster than Opacus hooks here; "
        f"silodp is {ours:.3g}x faster, that is, within {floor / ours:.3g}x of the floor."
    ]


def noise(found: Any) -> list[str]:
    run = run_of(found, MU2)
    if run is None or paired(run["rows"], "PyTorch loop", "silodp").quartiles[1] >= 20:
        return []
    loop = 1e6 * run["rows"]["PyTorch loop"]["cpu_s"][1] / run["rounds"]
    wall = paired(run["rows"], "PyTorch loop", "silodp", "wall").quartiles[1]
    return [
        f"mu2 M = 1: the loop takes {loop:.0f} us a round, so the target leaves {loop / 20:.0f} us. Noise takes "
        f"{run['noise_share']:.0%} of silodp's CPU time. On both cores, in wall time, silodp is {wall:.3g}x faster."
    ]


def unshared(found: Any) -> list[str]:
    reached = sweep(found)
    cpu, wall = reached.quartiles[1], (reached.wall or reached.quartiles)[1]
    if cpu <= 6:
        return []
    return [
        f"Sweep: {cpu:.3g}x in CPU time, {wall:.3g}x in wall time. Activations differ from setting to setting and are "
        "paid in full for each; docs/performance.md says how much that was."
    ]
