"""`python -m bench.blocks NAME ...`: what a clipped mean costs by records in a block, over the block of the rule.

With --settings the points are stacked as a sweep stacks them, and the base is one setting alone. The rule in
silodp/gradients/structured.py was chosen by these tables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

SIZES = (256, 512, 1024, 2048, 4096)
TURNS, SECONDS = 12, 1.0
RULE, ONE = "as the rule takes it", "one setting"


def programs(work: Any, silos: int, records: int, points: int, settings: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from silodp.gradients import clipped_sum
    from silodp.gradients.blocks import SETTINGS

    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(silos, records, *work.shape)), jnp.float32)
    number = work.classes == 0
    targets = rng.normal(size=(silos, records)) if number else rng.integers(0, work.classes, (silos, records))
    data = (features, jnp.asarray(targets, jnp.float32 if number else jnp.int32))
    loss = work.model.inside.loss if work.penalty else work.model.loss
    coefficients, weights = [1.0, -1.0][:points], jnp.ones((silos, records))
    one = [jax.tree.map(jnp.asarray, work.point(i)) for i in range(points)]
    many = jax.tree.map(lambda leaf: jnp.stack([leaf * (1 + 0.01 * i) for i in range(settings)]), one)

    def sums(block: int | None, at: Any, data: Any, weights: Any) -> Any:
        own = lambda rows, counts: clipped_sum(loss, at, coefficients, rows, counts, 1.0, microbatch=block)
        return jax.vmap(own)(data, weights)

    def program(block: int | None, at: Any, stacked: bool) -> Callable[[], Any]:
        called: Any = partial(sums, block)
        called = jax.vmap(called, in_axes=(0, None, None), axis_name=SETTINGS) if stacked else called
        compiled = jax.jit(called).lower(at, data, weights).compile()
        return lambda: jax.block_until_ready(compiled(at, data, weights))

    at, stacked = (many, True) if settings > 1 else (one, False)
    made = {RULE: program(None, at, stacked)} | {f"{size:,}": program(size, at, stacked) for size in SIZES}
    return made | ({ONE: program(None, one, False)} if stacked else {})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.blocks", description=__doc__)
    parser.add_argument("names", nargs="+", help="how a dense workload's name begins, or a part of it")
    parser.add_argument("--silos", type=int, default=10)
    parser.add_argument("--records", type=int, default=1651, help="of a silo")
    parser.add_argument("--settings", type=int, default=1, help="that are stacked")
    parser.add_argument("--one-core", action="store_true")
    asked = parser.parse_args()
    if asked.one_core:  # before JAX starts: it makes a thread for each core that it may use
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from bench.timing import interleaved, summaries
    from bench.workloads import dense_workloads

    for work in (work for work in dense_workloads() if any(name in work.name for name in asked.names)):
        for points in (1, 2):
            made = programs(work, asked.silos, asked.records, points, asked.settings)
            base = ONE if ONE in made else RULE
            rows = summaries(interleaved(made, TURNS, SECONDS * len(made), base), [base])
            print(f"{work.name.split(' x ')[0]}, {points} point{'s' * (points > 1)}, over {base}, CPU / wall")
            for name, row in rows.items():
                print(f"  {name:24}{row['over'][base]['cpu'][1]:7.2f} / {row['over'][base]['wall'][1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
