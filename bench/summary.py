"""The tables of docs/performance.md, written between two marks from what was measured, so that they cannot drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import targets
from bench.report import markdown, number

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
    where += f"{max(own['load_before'] for own in found.values()):.1f}."
    return f"{where}\n\n{markdown(['work', 'promise', 'target', 'reached', 'met'], targets.table(found))}"


def gradients(part: str) -> Any:
    def table(found: Found) -> str:
        works = found[part]["found"]
        names = list(dict.fromkeys(name for own in works.values() for name in own["peers"]))
        cell = lambda own, name: number(own["peers"][name]["ratio"][1]) if name in own["peers"] else ""
        rows = [[name, *(cell(own, name) for own in works.values())] for name in names]
        return markdown([f"clipped mean of {part}, CPU time over ONE plain JAX gradient", *works], rows)

    return table


def engines(found: Found) -> str:
    """What the general engine costs: time over the structured engine's, and memory."""
    rows = []
    for part in ("values", "differences"):
        for work, own in found.get(part, {"found": {}})["found"].items():
            general, structured = (own["peers"][f"silodp {engine}"] for engine in ("general", "structured"))
            ratio = general["cpu_ms"][1] / structured["cpu_ms"][1]
            rows.append([f"{part}, {work}", number(ratio), number(general["peak_mb"]), number(structured["peak_mb"])])
    return markdown(["general engine", "CPU time over structured", "grown, MB", "structured, MB"], rows)


def runs(found: Found) -> str:
    rows = []
    for name, run in found["runs"]["found"].items():
        own = run["rows"]
        over = [number(targets.of_medians(own, f"{loop} loop", "silodp")) for loop in ("PyTorch", "numpy")]
        seconds = number(own["silodp"]["cpu_s"][1])
        noise = "under 1%" if run["noise_share"] < 0.01 else f"{run['noise_share']:.0%}"
        rows.append([f"{name}, {run['rounds']:,} rounds", seconds, *over, noise, f"{run['compile_s']:.1f}"])
    head = ["whole run", "silodp, CPU s", "PyTorch loop over it", "numpy loop over it", "noise", "compile, s"]
    return markdown(head, rows)


def sweeps(found: Found) -> str:
    own = found["sweeps"]["found"]["rows"]
    over = lambda name, key: number(own[name][key][1] / own["one run"][key][1])
    rows = [[name, number(own[name]["cpu_s"][1]), over(name, "cpu_s"), over(name, "wall_s")] for name in own]
    return markdown(["sweep of DIFF2-GD 8-10-1", "CPU s", "over one run", "in wall time"], rows)


def growth(found: Found) -> str:
    series = {name: own for name, own in found["growth"]["found"].items() if "slope" in own}
    rows = [[name, f"{own['slope']:.2f}", f"{own['memory_slope']:.2f}"] for name, own in series.items()]
    return markdown(["a round grows with", "slope of time", "slope of memory"], rows)


def cores(found: Found) -> str:
    cases = found["cores"]["found"]
    ways = next(iter(cases.values()))
    rows = [
        [way, *(f"{number(own[way]['wall_s'])} ({number(own[way]['cpu_s'])})" for own in cases.values())]
        for way in ways
    ]
    return markdown(["eight runs, wall s (CPU s)", *cases], rows)


def machine(found: Found) -> str:
    limits = found["machine"]["found"]
    names = next(iter(limits.values()))
    return markdown(
        ["the machine", *limits], [[name, *(number(own[name]) for own in limits.values())] for name in names]
    )


TABLES: dict[str, Any] = {
    "values": gradients("values"),
    "differences": lambda found: f"{gradients('differences')(found)}\n\n{engines(found)}",
    "runs": runs,
    "sweeps": sweeps,
    "growth": growth,
    "cores": cores,
    "machine": machine,
}
