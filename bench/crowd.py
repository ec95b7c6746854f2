"""Part `crowd`: a simulation of very many silos with a large model, and how much memory its process holds.

`python -m bench.crowd TRUST SILOS HIDDEN` is one of its processes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from bench.synthetic import Rounds, records
from bench.timing import clock

SILOS, HIDDEN = 10_000, 5_000  # MLP 8-5000-1: 50,001 parameters
FEW_SILOS = 500


def crowd(quick: bool) -> dict[str, Any]:
    return {trust: alone(trust, FEW_SILOS if quick else SILOS) for trust in ("untrusted", "trusted")}


def alone(trust: str, silos: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.crowd", trust, str(silos), str(HIDDEN)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print(f"  {silos:,} silos, {trust}: {found['peak_mb']:.0f} MB, {found['cpu_s']:.1f} s CPU a round", flush=True)
    return found


def main() -> None:
    trust, silos, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rounds = Rounds(records(silos, 5, 8), trust, hidden=hidden, longest=4)
    (cpu, wall), size = clock(lambda: rounds.run(1)), rounds.parameters
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_mb": peak, "cpu_s": cpu, "wall_s": wall, "parameters": size, "silos": silos}))


if __name__ == "__main__":
    main()
