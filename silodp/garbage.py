"""How often Python looks for objects that only refer to each other."""

from __future__ import annotations

import gc

OBJECTS = 100_000  # new ones before it looks; Python's own 700 (2,000 since 3.13) costs a short run a fifth of its time


def collect_seldom() -> None:
    """For a process of the library's own: imports and tracing make many objects, and nearly all of them stay."""
    gc.set_threshold(OBJECTS)
