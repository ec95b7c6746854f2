"""Part `compile`: how long every registered algorithm takes to compile on the MLP 784-64-10 (10 silos)."""

from __future__ import annotations

import time
from typing import Any

import jax

from bench.synthetic import records
from silodp.algorithms import REGISTRY
from silodp.config import Config
from silodp.parse import parse_config
from silodp.run.prepare import prepare
from silodp.run.simulate import begin, compile_run

FEW = ("dp-sgd", "diff2-gd", "soteria-saga")


def compiling(quick: bool) -> dict[str, Any]:
    data = records(10, 100, 784, 10)
    rows = {}
    for name in FEW if quick else REGISTRY:
        config = config_of(name)
        prepared = prepare(config, data)
        began = time.perf_counter()
        carry, _ = begin(prepared.problem, prepared.setting, sweep=False)
        opening = time.perf_counter() - began
        seconds = compile_run(prepared.problem, prepared.setting, carry, sweep=False).seconds
        rows[name] = {"trust": config.privacy.trust, "opening_s": opening, "compile_s": seconds}
        print(f"  {name:20}{seconds:6.1f} s (and {opening:.1f} s for the start)", flush=True)
        jax.clear_caches()
    return rows


def config_of(name: str) -> Config:
    """The registry's minimal options, under an untrusted server where the algorithm has one."""
    entry = REGISTRY[name]
    trust = "untrusted" if "untrusted" in entry.trusts else entry.trusts[0]
    options = {"name": name, "rounds": 6, "step_size": 0.3} | entry.example
    if trust == "shuffled" and options.get("batch") is None:
        options["weights"] = "size"
    privacy = {"trust": trust, "delta": 1e-4} | ({"epsilon": 1.0} if entry.private else {})
    model = {"kind": "mlp", "hidden": [64], "activation": "sigmoid"}
    return parse_config({"model": model, "privacy": privacy, "algorithm": options, "run": {"every": 2}})
