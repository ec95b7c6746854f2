"""`python -m tests.mutants [NAME ...]`: every seeded bug, or those named, two at a time where there are two cores.

Survivors, and mutants whose tests did not come to an end, end it with 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.harness import Mutant, Verdict, honest, tried
from tests.mutants.seeded import MUTANTS

AT_A_TIME = 2
MARKS = {True: "caught  ", False: "SURVIVED", None: "UNKNOWN "}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen(names: Sequence[str]) -> list[Mutant]:
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def told(mutant: Mutant) -> tuple[Mutant, Verdict]:
    began = time.perf_counter()
    verdict = tried(mutant)
    print(f"{MARKS[verdict.caught]} {mutant.name} ({time.perf_counter() - began:.0f} s): {verdict.words}", flush=True)
    return mutant, verdict


def main() -> None:
    mutants = chosen(sys.argv[1:])
    with ThreadPoolExecutor(min(AT_A_TIME, cores())) as pool:
        verdicts = list(pool.map(told, mutants))
    missed = [(mutant, verdict) for mutant, verdict in verdicts if not verdict.caught]
    print(f"{len(mutants) - len(missed)} of {len(mutants)} caught, if the same tests pass without a bug", flush=True)
    without = honest(mutants)
    if not without.caught:
        sys.exit(f"they do not: {without.words}")
    print("they do")
    if missed:
        lines = [f"  {MARKS[v.caught]} {m.name} ({m.file}): {m.breaks}" for m, v in missed]
        sys.exit("not caught:\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
