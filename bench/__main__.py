"""`python -m bench [PART ...] [--quick]`: measure, then write RESULTS.md, results.png and the tables of the docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = {
    "values": "bench.gradients:values",
    "differences": "bench.gradients:differences",
    "networks": "bench.gradients:network_values",
    "network-differences": "bench.gradients:network_differences",
    "runs": "bench.runs:runs",
    "sweeps": "bench.runs:sweeps",
    "sweeps-one-core": "bench.runs:sweeps",
    "compile": "bench.compiling:compiling",
    "growth": "bench.growth:growth",
    "noise": "bench.noise:noise",
    "sums": "bench.sums:sums",
    "startup": "bench.startup:startup",
    "crowd": "bench.crowd:crowd",
    "workers": "bench.workers:workers",
}
ONE_CORE = ("sweeps-one-core",)
NEEDS_DATA = ("runs", "sweeps", "workers", *ONE_CORE)
HERE = Path(__file__).parent
# A worker that spins while it waits would be charged to whatever is timed next.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4", "JAX_PLATFORMS": "cpu"}
ONE_PART = """
import importlib, json, os, sys
if sys.argv[4] == "one":  # before JAX starts: it makes a thread for each core that it may use
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
module, function = sys.argv[1].split(":")
found = getattr(importlib.import_module(module), function)(sys.argv[2] == "quick")
open(sys.argv[3], "w").write(json.dumps(found))
"""


def main() -> None:
    options = parse()
    raw = HERE / ("quick.json" if options.quick else "results.json")
    if options.docs:
        publish(json.loads(raw.read_text()), options.quick)
        return
    # What was measured last stays until all that is wanted now is there; an interrupted run leaves this file.
    unfinished = HERE / f".unfinished-{raw.name}"
    new: dict[str, Any] = json.loads(unfinished.read_text()) if options.resume and unfinished.exists() else {}
    for part in options.parts or PARTS:
        if part not in new:
            new[part] = measured(part, options.quick)
            unfinished.write_text(as_json(new) + "\n")
    kept = json.loads(raw.read_text()) if options.parts and raw.exists() else {}
    found = kept | new
    publish(found, options.quick)
    raw.write_text(as_json(found) + "\n")
    unfinished.unlink()


def as_json(value: Any, indent: str = "\n") -> str:
    """One line for whatever holds no dictionary: quartiles are read, and compared, together."""
    if not isinstance(value, dict) or not any(isinstance(own, dict) for own in value.values()):
        return json.dumps(value)
    lines = [f"{indent} {json.dumps(key)}: {as_json(own, indent + ' ')}" for key, own in value.items()]
    return "{" + ",".join(lines) + indent + "}"


def publish(found: dict[str, Any], quick: bool) -> None:
    from bench.figure import draw
    from bench.report import write
    from bench.summary import write_tables

    name, picture = ("QUICK.md", "quick.png") if quick else ("RESULTS.md", "results.png")
    draw(found, HERE / picture)
    write(found, HERE / name, picture, quick)
    if not quick:
        write_tables(found, HERE.parent / "docs" / "performance.md")
    print(f"written: bench/{name}, bench/{picture}" + ("" if quick else ", the tables of docs/performance.md"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    # argparse holds an empty list of `parts` itself against the choices: [] allows it.
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all when left out; others are kept as they are")
    parser.add_argument("--quick", action="store_true", help="small and rough, to QUICK.md")
    parser.add_argument("--resume", action="store_true", help="keep the parts that an interrupted run has finished")
    parser.add_argument("--docs", action="store_true", help="measure nothing: write again from what was measured last")
    options = parser.parse_args()
    if options.docs:
        return options
    if set(options.parts or PARTS) & set(NEEDS_DATA) and not os.environ.get("SILODP_DATA"):
        raise SystemExit(f"SILODP_DATA is not set: {', '.join(NEEDS_DATA)} need the folder with the datasets' files")
    return options


def measured(part: str, quick: bool) -> dict[str, Any]:
    """A part in a process of its own, so that no part inherits another's threads, memory or compiled programs."""
    print(f"{part} ...", flush=True)
    began, target = time.perf_counter(), HERE / f".{part}.json"
    cores = "one" if part in ONE_CORE else "all"
    command = [sys.executable, "-c", ONE_PART, PARTS[part], "quick" if quick else "full", str(target), cores]
    load, source = os.getloadavg()[0], commit()
    subprocess.run(command, check=True, env=os.environ | QUIET_THREADS, cwd=HERE.parent)
    found = json.loads(target.read_text())
    target.unlink()
    seconds = time.perf_counter() - began
    print(f"{part}: {seconds:.0f} s", flush=True)
    return {
        "found": found, "seconds": seconds, "load_before": load, "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {processor()}", "versions": versions(), "commit": source,
    }  # fmt: skip


def commit() -> str:
    """What was measured; tracked files that differ from the commit are told."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, cwd=HERE).stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what is installed: parts without peers need none of them."""
    from importlib.metadata import distributions

    wanted = ("silodp", "jax", "numpy", "torch", "opacus", "jax-privacy")
    return {each.name: each.version for each in distributions() if each.name in wanted}


if __name__ == "__main__":
    main()
