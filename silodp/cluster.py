"""Work for other processes: a dask.distributed cluster, or workers that are started here and end with the command.

A cluster runs whatever it is told to, and dask pickles what it carries. It must be the researcher's own, and it is for
simulations only: between silos nothing of this is used. What is handed to dask is text: the name of a function in this
project and JSON. What comes back is JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from silodp.compiler import share_of_cores
from silodp.errors import ConfigError, Refused, one_line

OURS = ("silodp.", "bench.")  # whose functions a job may name
SAME = ("silodp", "jax", "jaxlib", "numpy")  # versions that decide the bits of a result
PATIENCE = 20.0  # seconds for a scheduler to answer, and to have a worker


@dataclass(frozen=True)
class Place:
    """Where jobs run: at a scheduler's address, or in so many workers of this machine."""

    address: str | None = None
    workers: int | None = None


def place_of(address: str | None, workers: int | None) -> Place | None:
    """What the options --cluster and --workers say; None: here, without a cluster."""
    if address is not None and workers is not None:
        raise ConfigError("--cluster and --workers: a cluster has its own workers; give one of the two")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: give at least 1")
    return None if address is None and workers is None else Place(address, workers)


def spread(job: str, texts: Sequence[str], place: Place) -> Iterator[tuple[int, str]]:
    """What `job` ("module:function", text in and text out) makes of each text, with its number, as soon as it is there.

    What a job refuses is refused here, in the same words. Whoever stops listening ends what has not begun.
    """
    with connected(place) as client:
        distributed = _distributed()
        told = json.dumps(versions())
        numbers = {client.submit(called, job, told, text, pure=False): i for i, text in enumerate(texts)}
        for future in distributed.as_completed(numbers):
            yield numbers[future], answer_of(future, distributed)
            future.release()


def workers_at(place: Place) -> int:
    if place.address is None:
        return place.workers or 1
    with connected(place) as client:
        return len(client.nthreads())


def answer_of(future: Any, distributed: Any) -> str:
    try:
        answer = json.loads(future.result())
    except distributed.KilledWorker as error:
        raise Refused(
            f"a worker of the cluster ended while it worked ({one_line(error)}); is its memory enough?"
        ) from None
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return answer["done"]


def called(job: str, told: str, text: str) -> str:
    """In a worker: the function that the job names. Another version of silodp would give other results."""
    own = versions()
    other = [
        f"{name} {version} (here {own[name]})" for name, version in json.loads(told).items() if own[name] != version
    ]
    if other:
        return json.dumps({"refused": f"a worker has other versions than the one who asks: {', '.join(other)}"})
    module, _, function = job.partition(":")
    if not module.startswith(OURS):
        return json.dumps({"refused": f"job {job!r}: only functions of silodp are run"})
    try:
        return json.dumps({"done": getattr(importlib.import_module(module), function)(text)})
    except (ConfigError, OSError) as error:
        return json.dumps({"refused": f"in a worker: {one_line(error)}"})


def versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in SAME}


@contextmanager
def connected(place: Place) -> Iterator[Any]:
    distributed = _distributed()
    with ExitStack() as stack:
        try:
            if place.address is None:
                cluster = stack.enter_context(started(distributed, place.workers or 1))
                client = stack.enter_context(distributed.Client(cluster))
            else:
                client = stack.enter_context(distributed.Client(place.address, timeout=PATIENCE))
                client.wait_for_workers(1, timeout=PATIENCE)
        except (OSError, ValueError) as error:  # a timeout is an OSError
            raise ConfigError(
                f"--cluster {place.address}: no scheduler with a worker answers there ({one_line(error)}); start one "
                "with `dask scheduler` and `dask worker`, or give --workers N"
            ) from None
        yield client


def started(distributed: Any, workers: int) -> Any:
    """Workers of this machine. Only who holds the keys drawn here can talk to them: they run whatever they are told."""
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        memory_limit=None, silence_logs=logging.ERROR, security=distributed.Security.temporary(),
        env=share_of_cores(workers),
    )  # fmt: skip


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise ConfigError(
            "--cluster, --workers: dask.distributed is not installed; pip install 'silodp[cluster]'"
        ) from None
