"""Part `runs`: whole runs against eager loops of the same algorithm; sweeps; noise's share of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.backends import NumpyBackend, TorchBackend
from bench.cases import Case, all_cases, diff2, mu2
from bench.loops import loop_of
from bench.simulated import Ready
from bench.timing import clock, quartiles
from silodp.run.group import Group
from silodp.run.runner import Prepared
from silodp.run.simulate import simulate
from silodp.run.sweep import variant

BACKENDS = {"PyTorch": TorchBackend, "numpy": NumpyBackend}
CHECKED_ROUNDS = 5
TURNS = 3


def runs(quick: bool) -> dict[str, Any]:
    cases = [diff2(), mu2(1)] if quick else all_cases()
    return {case.name: whole_run(case, quick) for case in cases}


def whole_run(case: Case, quick: bool) -> dict[str, Any]:
    print(f"  {case.name}", flush=True)
    rounds = case.rounds // 10 if quick else case.rounds
    prepared = case.prepared(rounds=rounds)
    ready = Ready(prepared)
    silent = Ready(case.prepared(rounds=rounds, noise=False))
    loops = eager_loops(case, prepared)
    length = {name: affordable(loop, rounds, 0.3 if quick else 1.5) for name, loop in loops.items()}
    times: dict[str, list[tuple[float, float]]] = {"silodp": [], "silodp without noise": []} | {n: [] for n in loops}
    for _ in range(1 if quick else TURNS):
        times["silodp"].append(clock(ready))
        times["silodp without noise"].append(clock(silent))
        for name, loop in loops.items():
            cpu, wall = clock(lambda loop=loop, name=name: [loop(r) for r in range(length[name])])
            scale = rounds / length[name]
            times[name].append((cpu * scale, wall * scale))
    rows = {name: timed(own, times["silodp"]) for name, own in times.items()}
    fixed = without_chance(case)
    expected = np.asarray(Ready(fixed)().state.x)
    for name in loops:
        gap = trajectory_gap(case, name, fixed, expected)
        rows[name] |= {"rounds_timed": length[name], "difference": gap}
    for name, row in rows.items():
        print(f"    {name:38}{row['cpu_s'][1]:10.3f} s CPU {row['ratio'][1]:9.2f}x", flush=True)
    share = 1 - rows["silodp without noise"]["cpu_s"][1] / rows["silodp"]["cpu_s"][1]
    return {"rows": rows, "rounds": rounds, "compile_s": ready.compile_seconds, "noise_share": share}


def timed(own: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [mine[0] / theirs[0] for mine, theirs in zip(own, base, strict=True)]
    return {
        "cpu_s": quartiles([t[0] for t in own]), "wall_s": quartiles([t[1] for t in own]), "ratio": quartiles(ratios)
    }  # fmt: skip


def eager_loops(case: Case, prepared: Prepared) -> dict[str, Callable[[int], Any]]:
    loops = {f"{name} loop": loop_of(case, prepared, make(case, prepared)) for name, make in BACKENDS.items()}
    if case.tree["privacy"]["trust"] == "trusted":
        loops["PyTorch loop, silos stacked"] = loop_of(case, prepared, TorchBackend(case, prepared), stacked=True)
    return loops


def affordable(loop: Callable[[int], Any], rounds: int, seconds: float) -> int:
    """As many rounds as fit into so many seconds; a multiple of 20, for the restarts."""
    loop(0)
    trial = min(rounds, 20)
    cost = clock(lambda: [loop(r) for r in range(trial)])[1] / trial
    return int(min(rounds, max(trial, 20 * int(seconds / cost / 20))))


def without_chance(case: Case) -> Prepared:
    """Some rounds of the case without noise, on full batches and with nothing dropped."""
    changes: dict[str, Any] = {}
    if "compressor" in case.tree["algorithm"]:
        d = case.prepared(noise=False).parts.objective.parameters
        changes = {"batch": None, "keep": d, "sampling": "full"}
    return case.prepared(noise=False, rounds=CHECKED_ROUNDS, **changes)


def trajectory_gap(case: Case, name: str, prepared: Prepared, expected: np.ndarray) -> float:
    """How far the loop's last point is from silodp's, relative to the way moved."""
    make = BACKENDS[name.split()[0]]
    loop = loop_of(case, prepared, make(case, prepared), stacked="stacked" in name)
    # mu2 reports the point of the last query, one behind the loop's.
    last = CHECKED_ROUNDS - 1 if case.tree["algorithm"]["name"] == "mu2" else CHECKED_ROUNDS
    found = [np.asarray(loop(r)) for r in range(last)][-1]
    moved = np.linalg.norm(expected - np.asarray(prepared.setting.x0))
    return float(np.linalg.norm(found - expected) / moved)


def sweeps(quick: bool) -> dict[str, Any]:
    """16 settings in one program, 16 runs one after another, and one run, of DIFF2-GD."""
    rounds = 50 if quick else 300
    case = diff2()
    prepared = case.prepared(rounds=rounds)
    steps = [0.125 * 0.8**i for i in range(16)]
    members = [variant(prepared, case.config(rounds=rounds, step_size=s), None) for s in steps]
    one, problem = Ready(prepared), prepared.problem
    group = Group(members, len(members))
    compile_seconds = group.compiled.seconds

    def together() -> Any:
        return group.run(lambda round, row: None)

    def one_after_another() -> None:
        for member in members:
            simulate(problem, member.setting, one.carry, one.compiled, lambda chunk: None)

    programs = {"one run": one, "16 settings in one program": together, "16 runs one after another": one_after_another}
    times = {name: [] for name in programs}
    for _ in range(1 if quick else TURNS):
        for name, run in programs.items():
            times[name].append(clock(run))
    rows = {name: timed(own, times["one run"]) for name, own in times.items()}
    for name, row in rows.items():
        print(f"    {name:38}{row['cpu_s'][1]:10.3f} s CPU {row['ratio'][1]:9.2f}x", flush=True)
    return {"rows": rows, "rounds": rounds, "compile_s": {"one run": one.compile_seconds, "sweep": compile_seconds}}
