"""What the project promises about speed, and what was reached: the first table of the report.

A verdict rests on the median of ratios that were each taken within a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

HEAD = ["work", "promise", "target", "reached", "quartiles", "samples", "met"]
MLP, LENET = "MLP 784-64-10 x 6,000", "LeNet x 500"
MU2 = "mu2, MNIST, M = 1,"
TOGETHER = "16 settings in one program"
PLAIN, OURS, GHOST = "plain gradient, JAX", "silodp structured", "Opacus ghost clipping"
RUNNING, IN_RUNS = "one running sum in float32", "runs of 256, added in doubles"
FLOATS, EXACT = "numpy standard_normal, float64", "exact, 256 grid steps"
Found = dict[str, Any]


class Reached(NamedTuple):
    """Quartiles of a figure (thrice the same where it was taken once), and how many samples they are of."""

    quartiles: list[float]
    samples: int


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


def ratio(work: str, over: str, under: str) -> Callable[[Any], Reached | None]:
    return lambda found: paired(found[work], over, under) if work in found else None


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
        return None if run is None else paired(run["rows"], "PyTorch loop", "silodp")

    return value


def sweep(time: str) -> Callable[[Any], Reached]:
    return lambda found: paired(found["rows"], TOGETHER, "one run", time)


def many_silos(trust: str) -> Callable[[Any], Reached]:
    return lambda found: Reached(found["many silos"]["ratio"][f"silos, {trust}"], found["many silos"]["samples"])


def exact_noise(found: Any) -> Reached:
    return paired(found["rows"], EXACT, FLOATS)


def costliest_sum(found: Any) -> Reached:
    return max((paired(rows, IN_RUNS, RUNNING) for rows in found.values()), key=lambda reached: reached.quartiles[1])


def worst_compile(found: Any) -> Reached:
    return once(max(row["compile_s"] for row in found.values()))


TARGETS = [
    Target("values", f"values, {MLP}", "over the plain JAX gradient", ratio(MLP, OURS, PLAIN), 1.15, True),
    Target("values", "", "faster than Opacus hooks", ratio(MLP, "Opacus hooks", OURS), 100, False),
    Target("values", "", "faster than Opacus ghost clipping", ratio(MLP, GHOST, OURS), 2.5, False),
    Target("values", "", "faster than jax-privacy", ratio(MLP, "jax-privacy clipped_grad", OURS), 25, False),
    Target("differences", f"differences, {MLP}", "over ONE plain JAX gradient", ratio(MLP, OURS, PLAIN), 2.3, True),
    Target("values", f"values, {LENET}", "over the one-piece plain JAX gradient", ratio(LENET, OURS, PLAIN), 0.8, True),
    Target("values", "", "over Opacus ghost clipping", ratio(LENET, OURS, GHOST), 1.0, True),
    Target("values", f"extra memory, values, {MLP}", "at the peak", extra_memory, 40, True, " MB"),
    Target("differences", f"extra memory, differences, {MLP}", "at the peak", extra_memory, 40, True, " MB"),
    Target("runs", "DIFF2-GD 8-10-1, whole run", "faster than the eager PyTorch loop", loop_ratio("DIFF2"), 20, False),
    Target("runs", "mu2 M = 1, whole run", "faster than the eager PyTorch loop", loop_ratio(MU2), 20, False),
    Target("sweeps", "16-setting sweep of DIFF2-GD 8-10-1", "over one run", sweep("cpu"), 6, True),
    Target("sweeps", "", "over one run, in wall time", sweep("wall"), 6, True),
    Target(
        "growth", "a round of 10,000 silos of 50 records, untrusted", "over one silo with 500,000",
        many_silos("untrusted"), 2, True,
    ),
    Target("growth", "the same, trusted server", "over one silo with 500,000", many_silos("trusted"), 2, True),
    Target("compile", "compiling any registered algorithm on the MLP", "at the longest", worst_compile, 10, True, " s"),
    Target("sums", "clipped sums with a proven bound", "over a float32 running sum", costliest_sum, 1.1, True),
    Target("noise", "noise: exact rounded Gaussian", "over numpy standard_normal", exact_noise, 4, True),
]  # fmt: skip


def table(found: Found) -> list[list[str]]:
    rows = []
    for target in TARGETS:
        value = target.value(found[target.part]["found"]) if target.part in found else None
        sign = "<=" if target.at_most else ">="
        rows.append([target.work, target.promise, f"{sign} {target.limit:g}{target.unit}", *outcome(target, value)])
    return rows


def outcome(target: Target, reached: Reached | None) -> list[str]:
    """The median and whether it meets the limit; the quartiles, and whether the limit lies between them."""
    if reached is None:
        return ["not measured", "", "", ""]
    low, value, high = reached.quartiles
    met = value <= target.limit if target.at_most else value >= target.limit
    missed = value / target.limit if target.at_most else target.limit / value
    verdict = "yes" if met else f"NO, by {missed:.2f}x"
    verdict += ", within the spread" if low < target.limit < high else ""
    between = f"{low:.3g}-{high:.3g}" if reached.samples > 1 else ""
    return [f"{value:.3g}{target.unit}", between, str(reached.samples), verdict]


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
    cpu, wall = (sweep(time)(found).quartiles[1] for time in ("cpu", "wall"))
    if cpu <= 6:
        return []
    return [
        f"Sweep: {cpu:.3g}x in CPU time, {wall:.3g}x in wall time. Activations differ from setting to setting and are "
        "paid in full for each; docs/performance.md says how much that was."
    ]
