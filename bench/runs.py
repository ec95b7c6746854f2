"""Part `runs`: whole runs against eager loops of the same algorithm; sweeps; noise's share of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import Case, all_cases, diff2, mu2
from bench.loops import eager_loops
from bench.simulated import Ready
from bench.targets import TOGETHER
from bench.timing import Samples, clock, shuffled, summaries
from silodp.run.group import Group, part_size
from silodp.run.prepare import Prepared, prepared_on

CHECKED_ROUNDS = 5
TOLERANCE = 2e-5  # of the loops' own rounding in float32
TURNS = 5
# Of a loop in each turn, where a second is too little: a narrow target, or rounds that take long.
SECONDS = {("DIFF2-GD", "PyTorch loop"): 5.0, ("SPIDER", "PyTorch loop"): 3.0}


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
    gaps = trajectory_gaps(case)
    cycle = case.tree["algorithm"].get("restart", 20)
    seconds = lambda name: 0.3 if quick else SECONDS.get((case.name.split(",")[0], name), 1.0)
    length = {name: affordable(loop, rounds, cycle, seconds(name)) for name, loop in loops.items()}
    shortened = lambda name, loop: lambda: [loop(r) for r in range(length[name])]
    programs = {"silodp": ready, "silodp without noise": silent} | {n: shortened(n, loop) for n, loop in loops.items()}
    scale = {name: rounds / length.get(name, rounds) for name in programs}
    rows = in_turns(programs, 1 if quick else TURNS, "silodp", scale)
    for name in loops:
        rows[name] |= {"rounds_timed": length[name], "difference": gaps[name]}
    share = 1 - rows["silodp without noise"]["over"]["silodp"]["cpu"][1]
    return {"rows": rows, "rounds": rounds, "compile_s": ready.compile_seconds, "noise_share": max(0.0, share)}


def in_turns(
    programs: dict[str, Callable[[], Any]], turns: int, base: str, scale: dict[str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Every program in every turn, in another order each."""
    samples = {name: Samples() for name in programs}
    for turn in range(turns):
        for name in shuffled(programs, turn):
            samples[name].add(turn, clock(programs[name]), scale[name] if scale else 1.0)
    rows = summaries(samples, [base])
    for name, row in rows.items():
        print(f"    {name:38}{row['cpu_s'][1]:10.3f} s CPU {row['over'][base]['cpu'][1]:9.2f}x", flush=True)
    return rows


def affordable(loop: Callable[[int], Any], rounds: int, cycle: int, seconds: float) -> int:
    """As many rounds as fit into so many seconds; whole cycles, so that restarts have their share."""
    loop(0)
    trial = min(rounds, cycle)
    cost = clock(lambda: [loop(r) for r in range(trial)])[1] / trial
    return int(min(rounds, max(trial, cycle * int(seconds / cost / cycle))))


def without_chance(case: Case) -> Prepared:
    """Some rounds of the case without noise, on full batches and with nothing dropped."""
    changes: dict[str, Any] = {}
    if "compressor" in case.tree["algorithm"]:
        d = case.prepared(noise=False).ground.objective.parameters
        changes = {"batch": None, "keep": d, "sampling": "full"}
    return case.prepared(noise=False, rounds=CHECKED_ROUNDS, **changes)


def trajectory_gaps(case: Case) -> dict[str, float]:
    """How far each loop's last point is from silodp's, relative to the way moved, when chance is taken out."""
    prepared = without_chance(case)
    expected = np.asarray(Ready(prepared)().state.x)
    moved = np.linalg.norm(expected - np.asarray(prepared.setting.x0))
    # mu2 reports the point of the last query, one behind the loop's.
    last = CHECKED_ROUNDS - 1 if case.tree["algorithm"]["name"] == "mu2" else CHECKED_ROUNDS
    gaps = {}
    for name, loop in eager_loops(case, prepared).items():
        found = [np.asarray(loop(r)) for r in range(last)][-1]
        gaps[name] = float(np.linalg.norm(found - expected) / moved)
        if not gaps[name] <= TOLERANCE:
            raise SystemExit(f"{case.name}: {name} is {gaps[name]:.1e} away, more than {TOLERANCE:.0e}: not timed")
    return gaps


def sweeps(quick: bool) -> dict[str, Any]:
    """16 settings in one program, 16 runs one after another, and one run, of DIFF2-GD, all started beforehand."""
    rounds = 50 if quick else 300
    case = diff2()
    prepared = case.prepared(rounds=rounds)
    steps = [0.125 * 0.8**i for i in range(16)]
    members = [prepared_on(prepared.ground, case.config(rounds=rounds, step_size=s)) for s in steps]
    one, group = Ready(prepared), Group(members, part_size(len(members), len(members)))
    compile_seconds = {"one run": one.compile_seconds, "sweep": group.compiled.seconds}
    apart = [(member.setting, one.start(member.setting)) for member in members]
    programs = {
        "one run": one,
        TOGETHER: begun_parts(group),
        "16 runs one after another": lambda: [one(*started) for started in apart],
    }
    rows = in_turns(programs, 1 if quick else TURNS, "one run")
    return {"rows": rows, "rounds": rounds, "parts": len(group.starts), "compile_s": compile_seconds}


def begun_parts(group: Group) -> Callable[[], Any]:
    """The group's run from its start to the results, which small programs read: they are compiled in a first run."""
    begun = {first: group.begin(first) for first in group.starts}
    run = lambda: group.run(lambda round, row: None, begun)
    run()
    return run
