"""RESULTS.md from what was measured. Nothing is typed in by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bench import shapes, targets

Rows = list[list[str]]


def write(found: dict[str, Any], path: Path, picture: str, quick: bool) -> None:
    sections = [heading(found, picture, quick)]
    for part, section in SECTIONS.items():
        if part in found:
            sections.append(section(found[part]["found"]))
    path.write_text("\n\n".join(sections) + "\n")


def markdown(head: list[str], rows: Rows) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    rule = "|" + "---|" + "---:|" * (len(head) - 1)
    return "\n".join([line(head), rule, *map(line, rows)])


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{number(middle)} ({number(low)}-{number(high)})"


def exponent(slope: float | None) -> str:
    return "" if slope is None else f"{slope:.2f}"


def missed(found: dict[str, Any]) -> str:
    lines = targets.explanations(found)
    return "\n".join(["Why a target was missed:", "", *(f"- {line}" for line in lines)]) if lines else ""


def heading(found: dict[str, Any], picture: str, quick: bool) -> str:
    first = next(iter(found.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    measured = markdown(
        ["part", "measured (UTC)", "took, s", "load before", "commit"],
        [
            [p, own["when"], f"{own['seconds']:.0f}", f"{own['load_before']:.1f}", own["commit"]]
            for p, own in found.items()
        ],
    )
    warning = "\n\n**A quick try: few repetitions, short runs. Not for quoting.**" if quick else ""
    return f"""# Results of `make bench`

Written by `python -m bench`; docs/performance.md says how to read it. CPU time is that of all threads;
programs of a table ran in turns in one process. Medians, quartiles in brackets.{warning}

{first["machine"]}; {versions}.

## What must be shown

{VERDICTS}

{markdown(shapes.HEAD, shapes.table(found))}

{markdown(targets.HEAD, targets.table(found))}

{missed(found)}

![CPU time of a clipped mean, and growth of a round]({picture})

{measured}"""


def gradient_section(title: str, text: str) -> Any:
    def section(found: dict[str, Any]) -> str:
        parts = [f"## {title}\n\n{text}"]
        for work, own in found.items():
            head = [work, *GRADIENT_COLUMNS]
            parts.append(markdown(head, [gradient_row(name, row) for name, row in own.items()]))
            notes = [f"{name}: {row['note']}." for name, row in own.items() if row["note"]]
            parts += [" ".join(notes)] if notes else []
        return "\n\n".join(parts)

    return section


GRADIENT_COLUMNS = [
    "CPU ms", "over plain JAX", "wall ms", "over plain JAX", "samples", "grown, MB", "XLA temp., MB", "compile, s",
    "differs by",
]  # fmt: skip


def gradient_row(name: str, row: dict[str, Any]) -> list[str]:
    gap = f"{row['difference']:.0e}" + ("" if row["same"] else " (not the same)")
    over = row["over"][targets.PLAIN]
    return [
        name, spread([1e3 * s for s in row["cpu_s"]]), spread(over["cpu"]), number(1e3 * row["wall_s"][1]),
        spread(over["wall"]), str(over["samples"]), number(row["peak_mb"]), number(row["temporary_mb"]),
        number(row["compile_s"]), gap,
    ]  # fmt: skip


def runs_section(found: dict[str, Any]) -> str:
    text = """The same algorithm, noise included; silodp compiled beforehand (its compile time stands beside). The loops
are timed on fewer rounds and scaled. Without noise, on full batches and with nothing dropped, a loop's point after five
rounds differs from silodp's by the last column (relative to the way moved)."""
    parts = [f"## Whole runs\n\n{text}"]
    for name, run in found.items():
        head = [f"{name}, {run['rounds']:,} rounds", "CPU s", "over silodp", "wall s", "rounds timed", "differs by"]
        parts.append(markdown(head, [run_row(n, row, run["rounds"]) for n, row in run["rows"].items()]))
        noise = "under 1%" if run["noise_share"] < 0.01 else f"{run['noise_share']:.0%}"
        parts.append(f"Compile: {run['compile_s']:.1f} s. Noise takes {noise} of silodp's CPU time.")
    return "\n\n".join(parts)


def run_row(name: str, row: dict[str, Any], rounds: int) -> list[str]:
    gap = f"{row['difference']:.0e}" if "difference" in row else ""
    timed = f"{row.get('rounds_timed', rounds):,}"
    return [name, spread(row["cpu_s"]), spread(row["over"]["silodp"]["cpu"]), number(row["wall_s"][1]), timed, gap]


def sweeps_section(found: dict[str, Any], where: str = "") -> str:
    both = lambda row, time: [spread(row[f"{time}_s"]), spread(row["over"]["one run"][time])]
    rows = [[name, *both(row, "cpu"), *both(row, "wall")] for name, row in found["rows"].items()]
    seconds = ", ".join(f"{name} {s:.1f} s" for name, s in found["compile_s"].items())
    head = [f"DIFF2-GD 8-10-1, {found['rounds']:,} rounds", "CPU s", "over one run", "wall s", "over one run"]
    text = f"All compiled and started beforehand. The 16 settings run in {found['parts']} parts, a thread each."
    return f"## Sweeps{where}\n\n{text}\n\n{markdown(head, rows)}\n\nCompile: {seconds}."


def compile_section(found: dict[str, Any]) -> str:
    rows = [[n, r["trust"], f"{r['compile_s']:.1f}", f"{r['opening_s']:.1f}"] for n, r in found.items()]
    text = "MLP 784-64-10, 10 silos. The start is the state before the first round and its history row."
    head = ["algorithm", "trust", "the run, s", "the start, s"]
    return f"## Compile times\n\n{text}\n\n{markdown(head, rows)}"


def growth_section(found: dict[str, Any]) -> str:
    text = """A round of DIFF2-GD on differences (`rounds`: a whole run). Slopes are those of the larger half on log-log
axes: 1 means that twice the size costs twice as much."""
    rows = []
    for axis, series in found.items():
        if axis == "many silos":
            continue
        for p in series["points"]:
            rows.append(
                [axis, f"{p['at']:,}", number(p["cpu_ms"][1]), number(p["wall_ms"][1]), number(p["temporary_mb"])]
            )
        rows.append([f"{axis}: slope", "", exponent(series["slope"]), "", exponent(series["memory_slope"])])
    many = found["many silos"]
    costs = [[n, number(ms), spread(many["ratio"][n])] for n, ms in many["cpu_ms"].items()]
    head = [f"{many['silos']:,} silos of 50 records", "CPU ms a round", "over one silo"]
    table = markdown(["axis", "at", "CPU ms", "wall ms", "XLA temp., MB"], rows)
    return f"## Growth\n\n{text}\n\n{table}\n\n{markdown(head, costs)}"


def noise_section(found: dict[str, Any]) -> str:
    nanoseconds = lambda row: spread([1e9 * seconds / found["count"] for seconds in row["cpu_s"]])
    rows = [[name, nanoseconds(row), spread(row["over"][targets.FLOATS]["cpu"])] for name, row in found["rows"].items()]
    text = "Gaussian numbers on one core. Grid steps are those in a standard deviation."
    head = [f"{found['count']:,} numbers", "CPU ns each", "over numpy"]
    return f"## Noise\n\n{text}\n\n{markdown(head, rows)}"


def startup_section(found: dict[str, Any]) -> str:
    rows = [
        [name, spread(row["cpu_s"]), spread(row["wall_s"]), number(row["peak_mb"] or None), str(row["samples"])]
        for name, row in found.items()
    ]
    text = "Whole processes, in turns. Memory is the most that one process held."
    return f"## Start-up\n\n{text}\n\n{markdown(['command', 'CPU s', 'wall s', 'peak, MB', 'samples'], rows)}"


def sums_section(found: dict[str, Any]) -> str:
    milliseconds = lambda row: spread([1e3 * seconds for seconds in row["cpu_s"]])
    rows = [
        [f"{case}: {name}", milliseconds(row), spread(row["over"][targets.RUNNING]["cpu"])]
        for case, own in found.items()
        for name, row in own.items()
    ]
    text = "The clipped sum whose rounding stands in its bound, beside the sum that crafted neighbours move further."
    return f"## Sums\n\n{text}\n\n{markdown(['clipped sum', 'CPU ms', 'over the running sum'], rows)}"


VERDICTS = """Reached: the median of ratios that were each taken within a turn. "Within the spread": the limit lies
between the quartiles. One sample: the largest of single figures."""
VALUES = """sum of clip(gradient of a record) / records. Every peer's result is compared with silodp's (the plain
gradients with each other) before it is timed. *Grown*: how far the process's memory rises during one run above what it
held before, with inputs loaded, programs compiled, and freed memory given back to the system."""
DIFFERENCES = """sum of clip(gradient at x - gradient at y of a record) / records: one clip for the difference. Two
clipped passes, subtracted, are not the same thing (their sensitivity is that of two values, however close x and y are),
so Opacus ghost clipping has no row; Opacus hooks gives per-record gradients, which are subtracted and clipped by hand.
The plain gradients stand for ONE point."""


def crowd_section(found: dict[str, Any]) -> str:
    head = ["trust", "silos", "parameters", "CPU s a round", "wall s", "peak of the process, MB"]
    numbers = lambda row: [number(row[key]) for key in ("cpu_s", "wall_s", "peak_mb")]
    rows = [[trust, f"{row['silos']:,}", f"{row['parameters']:,}", *numbers(row)] for trust, row in found.items()]
    return f"## Many silos\n\nA round of differences, once, in a process of its own.\n\n{markdown(head, rows)}"


def workers_section(found: dict[str, Any]) -> str:
    rows = [
        [name, spread(row["cpu_s"]), spread(row["wall_s"]), str(row["samples"])] for name, row in found["rows"].items()
    ]
    faster = " and ".join(
        f"{spread(found['faster'][time])} in {name}" for time, name in (("wall", "wall"), ("cpu", "CPU time"))
    )
    text = f"`silodp sweep --workers N` from start to end. One worker with one core over two, turn by turn: {faster}."
    return f"## Workers\n\n{text}\n\n{markdown(['16 settings of DIFF2-GD', 'CPU s', 'wall s', 'samples'], rows)}"


SECTIONS: dict[str, Any] = {
    "values": gradient_section("Clipped mean of values", VALUES),
    "differences": gradient_section("Clipped mean of differences", DIFFERENCES),
    "networks": gradient_section("Clipped mean of values, other networks", VALUES),
    "network-differences": gradient_section("Clipped mean of differences, other networks", DIFFERENCES),
    "runs": runs_section,
    "sweeps": sweeps_section,
    "sweeps-one-core": partial(sweeps_section, where=", on one core"),
    "compile": compile_section,
    "growth": growth_section,
    "noise": noise_section,
    "sums": sums_section,
    "startup": startup_section,
    "crowd": crowd_section,
    "workers": workers_section,
}
