"""silodp's side of the whole runs: compiled once, started again and again."""

from __future__ import annotations

import time
from typing import Any

from silodp.run.prepare import Prepared
from silodp.run.simulate import Carry, Setting, begin, compile_run, simulate, start_program


class Ready:
    """A compiled run that can be started again and again, also from another setting of the same shape."""

    def __init__(self, prepared: Prepared):
        self.problem, self.setting = prepared.problem, prepared.setting
        began = time.perf_counter()
        self.program = start_program(self.problem, self.setting, sweep=False)
        self.carry = self.start(self.setting)
        self.compiled = compile_run(self.problem, self.setting, self.carry, sweep=False)
        self.compile_seconds = time.perf_counter() - began

    def start(self, setting: Setting) -> Carry:
        return begin(self.problem, setting, sweep=False, program=self.program)[0]

    def __call__(self, setting: Setting | None = None, carry: Carry | None = None) -> Any:
        return simulate(self.problem, setting or self.setting, carry or self.carry, self.compiled, lambda chunk: None)
