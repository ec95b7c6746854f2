"""What a clipped sum costs next to ONE plain gradient of the mean loss: CPU-time ratios and temporary memory.

    python bench/engines.py [repetitions] [workload]

All programs of a workload run interleaved in one process, so that a busy machine slows them alike; medians are shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from silodp.gradients import clipped_sum
from silodp.models import Model, build_model


class Workload(NamedTuple):
    name: str
    model: Model
    shape: tuple[int, ...]
    classes: int
    records: int
    silos: int = 1


WORKLOADS = [
    Workload(
        "MLP 784-64-10",
        build_model("mlp", inputs=784, outputs=10, hidden=(64,), activation="sigmoid"),
        (784,),
        10,
        6000,
    ),
    Workload(
        "MLP 784-64-10, 10 silos",
        build_model("mlp", inputs=784, outputs=10, hidden=(64,), activation="sigmoid"),
        (784,),
        10,
        600,
        10,
    ),
    Workload(
        "MLP 8-10-1",
        build_model("mlp", inputs=8, hidden=(10,), activation="softplus"),
        (8,),
        0,
        1651,
    ),
    Workload(
        "logistic 123",
        build_model("logistic", inputs=123, outputs=2, regulariser=0.2),
        (123,),
        2,
        3256,
    ),
    Workload("LeNet", build_model("cnn", inputs=(3, 32, 32), outputs=10), (3, 32, 32), 10, 500),
]


def records_of(work: Workload) -> tuple[jax.Array, jax.Array]:
    lead = (work.silos, work.records)
    features = jax.random.normal(jax.random.key(1), (*lead, *work.shape))
    if work.classes == 0:
        return features, jax.random.normal(jax.random.key(2), lead)
    return features, jax.random.randint(jax.random.key(2), lead, 0, work.classes)


def library_lenet_loss(params: Any, record: Any) -> jax.Array:
    """The same LeNet as one would write it with JAX's own convolution and pooling."""
    h = record[0][None]
    for name in ("conv1", "conv2"):
        h = lax.conv_general_dilated(h, params[name]["weight"], (1, 1), "VALID") + params[name]["bias"][:, None, None]
        h = lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    h = h.reshape(-1)
    for name in ("dense1", "dense2"):
        h = jax.nn.relu(params[name]["weight"] @ h + params[name]["bias"])
    z = params["dense3"]["weight"] @ h + params["dense3"]["bias"]
    return jax.nn.logsumexp(z) - z[record[1]]


def programs(work: Workload, general: bool) -> dict[str, Any]:
    """Compiled programs of the stacked records: the plain gradient, and clipped sums of values and differences."""
    y, records = work.model.init(jax.random.key(0)), records_of(work)
    x = jax.tree.map(lambda leaf: leaf + 1e-3, y)
    weights = jnp.ones((work.silos, work.records))

    # One silo is not stacked: a vmap over it would only cost the plain gradient a copy of its records.
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
    records, weights = (records, weights) if work.silos > 1 else first((records, weights))
    each_silo = jax.vmap if work.silos > 1 else lambda function: function

    def plain(loss: Callable[..., jax.Array], x: Any, y: Any, records: Any) -> Any:
        mean = lambda p, r: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(p, r))
        return each_silo(lambda r: jax.grad(mean)(x, r))(records)

    def clipped(engine: str, points: int) -> Callable[..., Any]:
        def run(x: Any, y: Any, records: Any) -> Any:
            at, signs = [x, y][:points], [1.0, -1.0][:points]
            one = lambda r, w: clipped_sum(work.model.loss, at, signs, r, w, 0.5, engine=engine)
            return each_silo(one)(records, weights)

        return run

    chosen = {"plain gradient": partial(plain, work.model.loss)}
    if work.model.name == "cnn":
        chosen |= {"plain, lax.conv": partial(plain, library_lenet_loss)}
    chosen |= {"values": clipped("structured", 1), "differences": clipped("structured", 2)}
    if general:
        chosen |= {"general values": clipped("general", 1), "general differences": clipped("general", 2)}
    compiled = {}
    for name, function in chosen.items():
        start = time.perf_counter()
        program = jax.jit(function).lower(x, y, records).compile()
        compiled[name] = (program, time.perf_counter() - start, (x, y, records))
    return compiled


def measure(compiled: dict[str, Any], repetitions: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for turn in range(repetitions + 1):
        for name, (program, _, arguments) in compiled.items():
            start = time.process_time()
            jax.block_until_ready(program(*arguments))
            if turn:  # the first turn warms caches
                times[name].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    print(f"{'workload':26}{'program':22}{'CPU ms':>9}{'ratio':>8}{'MB':>8}{'compile s':>11}")
    for work in WORKLOADS:
        if wanted not in work.name:
            continue
        compiled = programs(work, general=work.silos == 1)
        times = measure(compiled, repetitions)
        for name, seconds in times.items():
            program, compile_time, _ = compiled[name]
            memory = program.memory_analysis().temp_size_in_bytes / 1e6
            ratio = seconds / times["plain gradient"]
            print(f"{work.name:26}{name:22}{1e3 * seconds:9.2f}{ratio:8.2f}{memory:8.1f}{compile_time:11.1f}")


if __name__ == "__main__":
    main()
