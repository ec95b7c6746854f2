"""Settings that share one compiled program, run in parts, a thread for each core.

A part's settings are stacked (vmapped). Threads, because XLA spreads only large operations over cores: with small
models, a part beside the first is what keeps a second core busy (docs/performance.md).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from silodp.compiler import cores
from silodp.releases import Account
from silodp.run.history import Row, rows_of, with_totals
from silodp.run.prepare import Prepared
from silodp.run.progress import Update
from silodp.run.simulate import Carry, Chunk, Compiled, Setting, begin, compile_run, simulate, start_program

Ran = tuple[list[Row], np.ndarray, Account]  # history, last point, what was counted


class Begun(NamedTuple):
    """A part before its first round."""

    setting: Setting
    carry: Carry
    rows: dict[str, np.ndarray]  # of its start, for the history


class Stopped(Exception):
    """Ends a part's thread when the whole is given up."""


def part_size(members: int, together: int, at_once: int | None = None) -> int:
    """How many of so many members are stacked in a part.

    Parts that run at once (default: one for each core) are in memory at once: they hold no more than `together`.
    """
    at_once = at_once or cores()
    parts = max(-(-members * at_once // together), min(at_once, members))
    return -(-members // min(parts, members))


class Group:
    """Members that differ in traced numbers only. `size`: of a part. Another size rounds otherwise."""

    def __init__(self, members: Sequence[Prepared], size: int):
        self.members, self.problem, self.size = members, members[0].problem, size
        self.starts = range(0, len(members), self.size)
        self.start = start_program(self.problem, self._setting(0), sweep=True)
        _, self.carry, rows = self.begin(0)
        self.measured = list(rows)

    @cached_property
    def compiled(self) -> Compiled:
        return compile_run(self.problem, self._setting(0), self.carry, sweep=True)

    def _setting(self, first: int) -> Setting:
        part = self.members[first : first + self.size]
        filled = [*part, *[part[-1]] * (self.size - len(part))]  # the program's shape is fixed
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[member.setting for member in filled])

    def begin(self, first: int) -> Begun:
        """The part that starts with this member (one of `starts`)."""
        setting = self._setting(first)
        return Begun(setting, *begin(self.problem, setting, sweep=True, program=self.start))

    def run(self, bar: Update, begun: Mapping[int, Begun] | None = None) -> list[Ran]:
        """Every member's result, in order; `bar` is told the rounds done by all together.

        Parts begin when their turn comes, unless `begun` has them (by first member), as a benchmark wants it.
        """
        compiled = self.compiled
        if compiled.lapack and self.size > 1:
            # jaxlib 0.10 hands a stack of matrices to the threads of XLA's pool and waits for them on a thread of the
            # same pool. As many such calls as threads wait for ever. One matrix is no stack and needs no other thread.
            return Group(self.members, 1).run(bar)
        stop, done = threading.Event(), dict.fromkeys(self.starts, 0)

        def shown(first: int, round: int, row: Mapping[str, float]) -> None:
            if stop.is_set():
                raise Stopped
            done[first] = round * len(self.members[first : first + self.size])
            bar(sum(done.values()), row)

        # A silo's query may hold a stack of its own, over silos: nothing beside it then, as in a run alone.
        with ThreadPoolExecutor(1 if compiled.lapack else min(cores(), len(self.starts))) as pool:
            ready = begun or {}
            parts = [
                pool.submit(self._run_part, first, ready.get(first), compiled, partial(shown, first))
                for first in self.starts
            ]
            try:
                return [ran for part in parts for ran in part.result()]
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _run_part(self, first: int, begun: Begun | None, compiled: Compiled, bar: Update) -> list[Ran]:
        setting, carry, rows = begun or self.begin(first)
        columns = {name: [start] for name, start in rows.items()}

        def on_chunk(chunk: Chunk) -> None:
            for name, rows in chunk.rows.items():
                columns[name].append(rows)
            bar(chunk.round, {"objective": smallest(chunk.rows["objective"][:, -1])})

        carry = simulate(self.problem, setting, carry, compiled, on_chunk, sweep=True)
        whole = {name: np.concatenate(pieces, axis=1) for name, pieces in columns.items()}
        return [result(whole, carry, i) for i in range(len(self.members[first : first + self.size]))]


def smallest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if finite.size else float("nan")


def result(columns: dict[str, np.ndarray], carry: Carry, i: int) -> Ran:
    history = with_totals(rows_of({name: values[i] for name, values in columns.items()}))
    return history, np.asarray(carry.output[i]), jax.tree.map(lambda leaf: leaf[i], carry.ends.accounts)
