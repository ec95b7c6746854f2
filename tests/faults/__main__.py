"""`python -m tests.faults [COUNT]`: the table. It may be stopped; what was counted is in .pytest_cache/faults.json."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from silodp.compiler import compile_quickly
from tests.faults.network import BROKEN, KINDS, RUNS, faults, inject

KEPT = Path(".pytest_cache") / "faults.json"
ONE_BATCH = 40


def main() -> None:
    compile_quickly()
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    counts = counted()
    while (done := faults(counts)) < wanted:
        began, kind = time.monotonic(), list(KINDS)[counts["runs"] % len(KINDS)]
        with tempfile.TemporaryDirectory() as folder:
            inject(Path(folder), min(ONE_BATCH, wanted - done), done, counts, kind)
        keep(counts, f"{faults(counts)} faults", f"{kind}: {time.monotonic() - began:.0f} s")
    print(table(counts))
    sys.exit(any(counts[name] for name in BROKEN) or counts["finished"] != counts["runs"])


def counted() -> Counter[str]:
    return Counter(json.loads(KEPT.read_text()) if KEPT.is_file() else {})


def keep(counts: Counter[str], done: str, last: str) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(counts))
    print(f"{done}, {sum(counts[name] for name in BROKEN)} broken; {last}", flush=True)


def add(kind: str, usual: int, run: Callable[[Path, Counter[str], int], str]) -> None:
    """More faults, whose names begin with `kind`, to what was counted. `run`: one run with so many faults at most; it
    says what it was."""
    wanted, counts = int(sys.argv[1]) if len(sys.argv) > 1 else usual, counted()
    done = lambda: sum(number for name, number in counts.items() if name.startswith(f"{kind}: "))
    while done() < wanted and not counts["hung"]:
        with tempfile.TemporaryDirectory() as folder:
            what = run(Path(folder), counts, wanted - done())
        keep(counts, f"{done()} faults of {kind}", what)
    print(table(counts))


def table(counts: Counter[str]) -> str:
    """As it stands in docs/faults.md."""
    names = sorted(name for name, number in counts.items() if number and name not in (*BROKEN, *RUNS))
    half = -(-len(names) // 2)
    cells = lambda name: f"{name} | {counts[name]}" if name else " | "
    lines = [f"{faults(counts)} faults, {counts['runs']} runs, {counts['finished']} finished:", ""]
    lines += ["| fault | number | fault | number |", "|---|---:|---|---:|"]
    lines += [f"| {cells(a)} | {cells(b)} |" for a, b in zip_longest(names[:half], names[half:])]
    lines += ["", "| must be 0 | number |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {counts[name]} |" for name in BROKEN)])


if __name__ == "__main__":
    main()
