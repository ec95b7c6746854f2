"""Part `noise`: what the exact rounded Gaussian costs beside float64 noise whose low bits give the value away."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.targets import EXACT, FLOATS
from bench.timing import interleaved, summaries
from silodp.noise import Entropy, rounded_gaussian


def noise(quick: bool) -> dict[str, Any]:
    """A million numbers each, on one core; the exact ones at several grids."""
    count = 100_000 if quick else 1_000_000
    rng, entropy = np.random.default_rng(0), Entropy()
    value = rng.normal(size=count)
    drawn = lambda spread: lambda: rounded_gaussian(value, spread * 2.0**-8, 2.0**-8, entropy)
    programs = {FLOATS: lambda: rng.standard_normal(count), EXACT: drawn(256)}
    programs |= {f"exact, {spread:,} grid steps": drawn(spread) for spread in (1, 2**10, 2**20)}
    rows = summaries(interleaved(programs, 5 if quick else 40, 20.0, FLOATS), [FLOATS])
    for name, row in rows.items():
        print(f"  {name:38}{1e9 * row['cpu_s'][1] / count:8.1f} ns {row['over'][FLOATS]['cpu'][1]:9.2f}x", flush=True)
    return {"rows": rows, "count": count}
