"""How long the way through the code is: `python -m bench.corridor [TREE]` counts it for a tree of silodp's sources.

For each path (a run, the server and a silo of a message run, a sweep, an account; spider, three silos, four rounds) it
prints the functions of silodp that were called, their modules, and the pairs of a calling and a called function that
stand in different rooms (folders of silodp, or its top level). Every process is watched from its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WATCH = """
import atexit, json, os, sys, threading
seen, crossings = set(), set()
mark = os.sep + "silodp" + os.sep

def place(frame):
    name = frame.f_code.co_filename
    imported = not frame.f_code.co_flags & 1  # a module's or a class's body: no step of the way
    return None if imported or mark not in name else (name.rpartition(mark)[2], frame.f_code.co_qualname)

def room(where):
    return where[0].rpartition(os.sep)[0]

def watch(frame, event, _):
    if event != "call" or (here := place(frame)) is None:
        return
    seen.add(here)
    caller = frame.f_back
    while caller is not None and place(caller) is None:
        caller = caller.f_back
    if caller is not None and room(place(caller)) != room(here):
        crossings.add((place(caller), here))

def tell():
    sys.setprofile(None)
    if seen:
        with open(os.path.join(os.environ["CORRIDOR"], f"{os.getpid()}.json"), "w") as file:
            json.dump({"argv": sys.orig_argv, "functions": len(seen), "modules": len({s[0] for s in seen}),
                       "crossings": len(crossings)}, file)

atexit.register(tell)
threading.setprofile(watch)
sys.setprofile(watch)
"""

SPIDER = {
    "privacy": {"epsilon": 2.0, "delta": 1e-4},
    "algorithm": {"name": "spider", "rounds": 4, "step_size": 0.3, "clip": 1.0, "clip_difference": 0.7, "restart": 2},
}
PATHS = {
    "run": ["run"],
    "messages": ["run", "--set", "run.mode=messages"],
    "sweep": ["sweep", "--set", 'sweep.grid={"algorithm.step_size" = [0.1, 0.3]}'],
    "account": ["account"],
}


def watched(tree: Path, arguments: list[str], folder: Path) -> list[dict]:
    """The counts of every process that one command of the tree's silodp starts."""
    notes = folder / "notes"
    notes.mkdir()
    (folder / "sitecustomize.py").write_text(WATCH)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{tree}", "CORRIDOR": str(notes)}
    command = [sys.executable, "-m", "silodp.cli", arguments[0], str(folder / "config.toml"), *arguments[1:]]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-500:]}")
    return [json.loads(file.read_text()) for file in sorted(notes.iterdir())]


def prepared(folder: Path) -> None:
    """Three CSV files and the config."""
    import numpy as np

    rng, rows = np.random.default_rng(0), (40, 25, 31)
    (folder / "silos").mkdir()
    for i, count in enumerate(rows):
        x = rng.normal(size=(count, 5))
        lines = [",".join([*(f"{v:.4f}" for v in row), "ill" if row.sum() > 0 else "well"]) for row in x]
        (folder / "silos" / f"silo{i}.csv").write_text("a,b,c,d,e,outcome\n" + "\n".join(lines) + "\n")
    from silodp.parse import parse_config, to_toml

    data = {"source": str(folder / "silos"), "target": "outcome"}
    (folder / "config.toml").write_text(to_toml(parse_config({"data": data, **SPIDER})))


def main() -> None:
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]).resolve()
    print(f"{'path':18}{'functions':>10}{'modules':>9}{'crossings':>11}")
    for name, arguments in PATHS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            prepared(folder)
            for i, counts in enumerate(sorted(watched(tree, arguments, folder), key=lambda c: -c["functions"])[:2]):
                label = name if name != "messages" else ("messages, server", "messages, silo")[i]
                print(f"{label:18}{counts['functions']:>10}{counts['modules']:>9}{counts['crossings']:>11}")


if __name__ == "__main__":
    main()
