"""Part `startup`: what a command costs from its first line to its last, each in a process of its own.

Commands run in turns. CPU time is that of the process and of those that it started and waited for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.timing import quartiles, shuffled
from silodp.config import Config
from silodp.facts import Facts
from silodp.parse import parse_config, to_toml
from silodp.plan.make import make_plan

TURNS, FEW = 7, 3
HELP, TYPO, LIST, ACCOUNT = "silodp --help", "silodp run, a typo in the config", "silodp list", "silodp account"
WARM, COLD = "silodp run, WBCD, 12 rounds", "the same, nothing kept from earlier runs"
SILO, MESSAGES = "a silo's process, before its first question", "silodp run, WBCD, 12 rounds, 4 silos in processes"
PREPARE = "a plan of 1,000 silos x 10,000 rounds"
PUBLIC = {"source": "wbcd", "silos": 4, "test": 0.2}


class Command(NamedTuple):
    arguments: Sequence[str]
    keeps: bool = True  # compiled programs, between turns
    code: int = 0
    settings: Mapping[str, str] = {}  # of the environment


def startup(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = commands_in(folder)
        for command in commands.values():  # programs are kept, and files of Python's own are read, from here on
            measured(command, folder, 0)
        samples: dict[str, list[tuple[float, float, float]]] = {each: [] for each in commands}
        for turn in range(1, 1 + (FEW if quick else TURNS)):
            for each in shuffled(commands, turn):
                samples[each].append(measured(commands[each], folder, turn))
    rows = {each: summary(own) for each, own in samples.items()}
    for each, row in rows.items():
        print(f"  {each:55}{row['cpu_s'][1]:6.2f} s CPU {row['wall_s'][1]:6.2f} s {row['peak_mb']:6.0f} MB", flush=True)
    return rows | {PREPARE: planning(quick)}


def commands_in(folder: Path) -> dict[str, Command]:
    run = wbcd()
    (folder / "run.toml").write_text(to_toml(run))
    (folder / "messages.toml").write_text(to_toml(wbcd(mode="messages", test_seed=True)))
    (folder / "typo.toml").write_text(to_toml(run).replace("step_size", "stepsize"))
    sizes = {"data": {"sizes": [100, 130]}, "privacy": privacy(), "algorithm": {"name": "dp-gd", "rounds": 12}}
    (folder / "account.toml").write_text(to_toml(parse_config(sizes)))
    cli = ["-m", "silodp.cli"]
    return {
        HELP: Command([*cli, "--help"]),
        TYPO: Command([*cli, "run", "typo.toml"], code=2),
        LIST: Command([*cli, "list"]),
        ACCOUNT: Command([*cli, "account", "account.toml"]),
        WARM: Command([*cli, "run", "run.toml"]),
        COLD: Command([*cli, "run", "run.toml"], keeps=False),
        SILO: Command(["-m", "silodp.deploy.silo_process"]),
        MESSAGES: Command([*cli, "run", "messages.toml"]),
    }


def privacy() -> dict[str, Any]:
    return {"trust": "untrusted", "epsilon": 2.0}


def wbcd(**run: Any) -> Config:
    algorithm = {"name": "dp-gd", "rounds": 12, "step_size": 1.0, "clip": 1.0}
    data = PUBLIC | {"preprocess": ["standardise"]}
    return parse_config({"data": data, "privacy": privacy(), "algorithm": algorithm, "run": run})


def measured(command: Command, folder: Path, turn: int) -> tuple[float, float, float]:
    """CPU seconds, wall seconds, and the most memory that one process held, in MB."""
    kept = folder / ("kept" if command.keeps else f"kept-{turn}")
    began = time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command.arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=environment() | {"SILODP_CACHE": str(kept), **command.settings},
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # nobody else may wait for it
    if process.returncode != command.code:
        raise SystemExit(f"{' '.join(command.arguments)}: {(folder / 'log').read_text()}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began, used.ru_maxrss / 1024


def environment() -> dict[str, str]:
    """A user's: Python keeps what it has compiled of its own, unless somebody tells it not to."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def summary(samples: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    cpu, wall, peak = zip(*samples, strict=True)
    return {"cpu_s": quartiles(list(cpu)), "wall_s": quartiles(list(wall)), "peak_mb": max(peak), "samples": len(cpu)}


def planning(quick: bool) -> dict[str, Any]:
    """In this process: what a run does before it looks at records, with as many silos and rounds."""
    algorithm = {
        "name": "spider",
        "rounds": 10_000,
        "restart": 10,
        "step_size": 0.1,
        "clip": 1.0,
        "clip_difference": 1.0,
    }
    facts = Facts.of_sizes([1000 + i for i in range(1000)], parameters=100)
    config = parse_config({"privacy": privacy(), "algorithm": algorithm})
    make_plan(config, Facts.of_sizes([1000], parameters=100))  # what is imported and started once
    samples = []
    for _ in range(FEW if quick else TURNS):
        cpu, wall = time.process_time(), time.perf_counter()
        make_plan(config, facts)
        samples.append((time.process_time() - cpu, time.perf_counter() - wall, 0.0))
    return summary(samples)
