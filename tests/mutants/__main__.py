"""`python -m tests.mutants [NAME ...]`: every seeded bug, or those named, two at a time. Survivors end it with 1."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.harness import Mutant, Verdict, honest, tried
from tests.mutants.seeded import MUTANTS

AT_A_TIME = 2


def chosen(names: Sequence[str]) -> list[Mutant]:
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def told(mutant: Mutant) -> tuple[Mutant, Verdict]:
    began = time.perf_counter()
    verdict = tried(mutant)
    mark = "caught  " if verdict.caught else "SURVIVED"
    print(f"{mark} {mutant.name} ({time.perf_counter() - began:.0f} s): {verdict.words}", flush=True)
    return mutant, verdict


def main() -> None:
    mutants = chosen(sys.argv[1:])
    before = honest(mutants)
    if not before.caught:
        sys.exit(f"the tests fail without any mutant: {before.words}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        verdicts = list(pool.map(told, mutants))
    survivors = [mutant for mutant, verdict in verdicts if not verdict.caught]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught")
    if survivors:
        sys.exit("survivors:\n" + "\n".join(f"  {m.name} ({m.file}): {m.breaks}" for m in survivors))


if __name__ == "__main__":
    main()
