"""Part `workers`: `silodp sweep` with one worker process and with two, in turns, from start to end.

Needs the extra `silodp[cluster]`. A worker runs one part of the sweep at a time; programs are kept from an earlier run.
Workers share the cores: of two, each has one of two. One alone has both, and XLA's threads use part of the second. So
what a second worker brings is told beside one that has a core, as each of the two has.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.startup import Command, measured, summary
from bench.timing import quartiles, shuffled
from silodp.compiler import THREADS
from silodp.parse import parse_config, to_toml

TURNS, FEW = 2, 1
ROUNDS, FEW_ROUNDS = 3_000, 40
ONE_CORE, ONE, TWO = "1 worker with one core", "1 worker", "2 workers"
STEPS = [0.125 * 0.8**i for i in range(16)]


def workers(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sweep.toml").write_text(to_toml(swept(FEW_ROUNDS if quick else ROUNDS)))
        count = lambda n: ["-m", "silodp.cli", "sweep", "sweep.toml", "--out", "out", "--workers", str(n)]
        commands = {ONE_CORE: Command(count(1), settings={THREADS: "1"})}
        commands |= {ONE: Command(count(1)), TWO: Command(count(2))}
        samples: dict[str, list[tuple[float, float, float]]] = {each: [] for each in commands}
        for turn in range(1 + (FEW if quick else TURNS)):
            for each in shuffled(commands, turn):
                taken = measured(commands[each], folder, turn)
                shutil.rmtree(folder / "out")
                if turn:  # in the first one programs are compiled
                    samples[each].append(taken)
    one, two = samples[ONE_CORE], samples[TWO]
    cpu, wall = (quartiles([a[i] / b[i] for a, b in zip(one, two, strict=True)]) for i in (0, 1))
    print(f"  one worker with one core over two: {wall[1]:.2f} in wall time, {cpu[1]:.2f} in CPU time", flush=True)
    faster = {"cpu": cpu, "wall": wall, "samples": len(one)}
    return {"rows": {each: summary(own) for each, own in samples.items()}, "faster": faster}


def swept(rounds: int) -> Any:
    return parse_config(
        {
            "data": {"source": "california", "silos": 10, "test": 0.2, "preprocess": ["standardise", "target-max"]},
            "model": {"kind": "mlp", "hidden": [10], "activation": "softplus"},
            "privacy": {"trust": "trusted", "epsilon": 3.0},
            "algorithm": {
                "name": "diff2-gd", "rounds": rounds, "step_size": 0.125, "clip": 1.0, "clip_difference": 3.0,
                "restart": 20,
            },
            "sweep": {"grid": {"algorithm.step_size": STEPS}},
        }
    )  # fmt: skip
