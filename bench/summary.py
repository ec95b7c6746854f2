"""The tables of docs/performance.md, written between two marks from what was measured, so that they cannot drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import shapes, targets
from bench.report import exponent, markdown, number

BEGIN, END = "<!-- tables: written by make bench -->", "<!-- end of tables -->"
Found = dict[str, Any]


def write_tables(found: Found, page: Path) -> None:
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = [table(found) for name, table in TABLES.items() if name in found]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join([verdicts(found), *tables]) + f"\n\n{END}{after}")


def verdicts(found: Found) -> str:
    first = next(iter(found.values()))
    days = sorted(own["when"] for own in found.values())
    where = f"Measured on {first['machine']}, {days[0]} to {days[-1]} UTC, load before each part at most "
    minutes = sum(own["seconds"] for own in found.values()) / 60
    commits = ", ".join(dict.fromkeys(own["commit"] for own in found.values()))
    where += f"{max(own['load_before'] for own in found.values()):.1f}; {minutes:.0f} minutes in all; commit {commits}."
    gradients = f"{markdown(shapes.HEAD, shapes.table(found))}\n\n" if found.keys() & shapes.PARTS.keys() else ""
    return f"{where}\n\n{gradients}{markdown(targets.HEAD, targets.table(found))}"


def gradients(part: str) -> Any:
    def table(found: Found) -> str:
        works = found[part]["found"]
        names = list(dict.fromkeys(name for own in works.values() for name in own))
        cell = lambda own, name: both(own, name, targets.PLAIN) if name in own else ""
        rows = [[name, *(cell(own, name) for own in works.values())] for name in names]
        return markdown([f"{shapes.PARTS[part]}: CPU / wall time over ONE plain JAX gradient", *works], rows)

    return table


def over(rows: Found, name: str, base: str, time: str = "cpu") -> str:
    return number(targets.paired(rows, name, base, time).quartiles[1])


def both(rows: Found, name: str, base: str) -> str:
    return " / ".join(over(rows, name, base, time) for time in ("cpu", "wall"))


def engines(found: Found) -> str:
    """What the general engine costs: time over the structured engine's, turn by turn, and memory."""
    rows = []
    for part, what in shapes.PARTS.items():
        for work, own in found.get(part, {"found": {}})["found"].items():
            engines = ("silodp general", targets.OURS)
            if engines[0] in own:  # else it is silodp's choice already
                memory = [number(targets.extra_mb(own[engine])) for engine in engines]
                rows.append([f"{what}, {work}", both(own, *engines), *memory])
    return markdown(["general engine", "CPU / wall time over structured", "extra, MB", "structured, MB"], rows)


LOOPS = ("PyTorch loop", "PyTorch loop, silos stacked")


def runs(found: Found) -> str:
    rows = []
    for name, run in found["runs"]["found"].items():
        own = run["rows"]
        loops = [both(own, loop, "silodp") if loop in own else "" for loop in LOOPS]
        seconds = number(own["silodp"]["cpu_s"][1])
        noise = "under 1%" if run["noise_share"] < 0.01 else f"{run['noise_share']:.0%}"
        rows.append([f"{name}, {run['rounds']:,} rounds", seconds, *loops, noise, f"{run['compile_s']:.1f}"])
    return markdown(
        ["whole run", "silodp, CPU s", *(f"{loop} over it, CPU / wall" for loop in LOOPS), "noise", "compile, s"], rows
    )


def sweeps(part: str, where: str) -> Any:
    def table(found: Found) -> str:
        own = found[part]["found"]["rows"]
        ratios = lambda name: [over(own, name, "one run", time) for time in ("cpu", "wall")]
        rows = [[name, number(row["cpu_s"][1]), *ratios(name)] for name, row in own.items()]
        return markdown([f"sweep of DIFF2-GD 8-10-1, {where}", "CPU s", "over one run", "in wall time"], rows)

    return table


def growth(found: Found) -> str:
    series = {name: own for name, own in found["growth"]["found"].items() if "slope" in own}
    rows = [[name, exponent(own["slope"]), exponent(own["memory_slope"])] for name, own in series.items()]
    return markdown(["a round grows with", "slope of time", "slope of memory"], rows)


def noise(found: Found) -> str:
    own = found["noise"]["found"]
    rows = [
        [name, number(1e9 * row["cpu_s"][1] / own["count"]), over(own["rows"], name, targets.FLOATS)]
        for name, row in own["rows"].items()
    ]
    return markdown(["a Gaussian number", "CPU ns", "over numpy"], rows)


def sums(found: Found) -> str:
    cases = found["sums"]["found"]
    rows = [
        [f"{case}: {name}", number(1e3 * row["cpu_s"][1]), over(own, name, targets.RUNNING)]
        for case, own in cases.items()
        for name, row in own.items()
    ]
    return markdown(["clipped sum", "CPU ms", "over the running sum"], rows)


def startup(found: Found) -> str:
    rows = [
        [name, number(row["cpu_s"][1]), number(row["wall_s"][1]), number(row["peak_mb"] or None)]
        for name, row in found["startup"]["found"].items()
    ]
    return markdown(["from start to end", "CPU s", "wall s", "peak, MB"], rows)


def crowd(found: Found) -> str:
    rows = [
        [
            f"{row['silos']:,} silos, {row['parameters']:,} parameters, {trust}",
            number(row["cpu_s"]),
            number(row["peak_mb"]),
        ]
        for trust, row in found["crowd"]["found"].items()
    ]
    return markdown(["a simulation of many silos", "CPU s a round", "peak of the process, MB"], rows)


def workers(found: Found) -> str:
    rows = [
        [name, number(row["cpu_s"][1]), number(row["wall_s"][1])]
        for name, row in found["workers"]["found"]["rows"].items()
    ]
    return markdown(["16-setting sweep, from start to end", "CPU s", "wall s"], rows)


TABLES: dict[str, Any] = {
    "values": gradients("values"),
    "differences": gradients("differences"),
    "networks": gradients("networks"),
    "network-differences": lambda found: f"{gradients('network-differences')(found)}\n\n{engines(found)}",
    "runs": runs,
    "sweeps": sweeps("sweeps", "all cores"),
    "sweeps-one-core": sweeps("sweeps-one-core", "one core"),
    "growth": growth,
    "noise": noise,
    "sums": sums,
    "startup": startup,
    "crowd": crowd,
    "workers": workers,
}
