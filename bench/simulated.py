"""silodp's side of the whole runs: compiled once, started again and again."""

from __future__ import annotations

import time
from typing import Any

from silodp.run.runner import Prepared
from silodp.run.simulate import begin, compile_run, simulate


class Ready:
    """A compiled run that can be started again and again."""

    def __init__(self, prepared: Prepared):
        self.problem, self.setting = prepared.problem, prepared.setting
        began = time.perf_counter()
        self.carry, _ = begin(self.problem, self.setting, sweep=False)
        self.compiled = compile_run(self.problem, self.setting, self.carry, sweep=False)
        self.compile_seconds = time.perf_counter() - began

    def __call__(self) -> Any:
        return simulate(self.problem, self.setting, self.carry, self.compiled, lambda chunk: None)
