"""Parts `values` and `differences`: a clipped mean by every peer, checked, timed in turns, and its memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import peers_jax, peers_torch
from bench.peer import Build, Peer
from bench.targets import GHOST, OURS, PLAIN, TORCH
from bench.timing import interleaved, summaries
from bench.workloads import Tree, Workload, dense_workloads, other_workloads

PEERS: dict[str, Build] = peers_jax.PEERS | peers_torch.PEERS
# silodp enlarges norms by what their rounding may have taken: half a unit for each number that was added, which are
# the inputs and outputs of a layer, or in the general engine all parameters.
TOLERANCE, ROUNDING = 2e-4, 2.0**-24


def measure(works: list[Workload], points: int, quick: bool) -> dict[str, Any]:
    some = works[:3] if quick else works
    return {work.name: measure_workload(work, points, quick) for work in some}


def values(quick: bool) -> dict[str, Any]:
    return measure(dense_workloads(), 1, quick)


def differences(quick: bool) -> dict[str, Any]:
    return measure(dense_workloads(), 2, quick)


def network_values(quick: bool) -> dict[str, Any]:
    return measure(other_workloads(), 1, quick)


def network_differences(quick: bool) -> dict[str, Any]:
    return measure(other_workloads(), 2, quick)


def measure_workload(work: Workload, points: int, quick: bool) -> dict[str, Any]:
    print(f"  {work.name}", flush=True)
    peers = {name: peer for name, build in PEERS.items() if (peer := build(work, points)) is not None}
    first = {name: first_run(peer) for name, peer in peers.items()}
    results = {name: result for name, (_, result) in first.items()}
    checked = {name: agreement(name, peers, results, work) for name in peers}
    peers = {name: peer for name, peer in peers.items() if checked[name] is not None}
    turns, seconds = (4, 1.0) if quick else (20, 6.0)
    samples = interleaved({name: peer.run for name, peer in peers.items()}, turns, seconds, PLAIN)
    rows = summaries(samples, [PLAIN, OURS, GHOST, TORCH])
    for name, peer in peers.items():
        rows[name] |= {
            "difference": checked[name], "same": peer.same, "note": peer.note,
            "temporary_mb": peer.temporary_mb, "peak_mb": first[name][0], "compile_s": peer.compile_seconds,
        }  # fmt: skip
        cpu, wall = (rows[name]["over"][PLAIN][time][1] for time in ("cpu", "wall"))
        print(f"    {name:38}{1e3 * rows[name]['cpu_s'][1]:10.2f} ms CPU {cpu:9.2f}x {wall:9.2f}x wall", flush=True)
    return rows


def flat(tree: Tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def agreement(name: str, peers: dict[str, Peer], results: dict[str, np.ndarray], work: Workload) -> float | None:
    """|its result - the reference| / |the reference|; plain gradients are compared with each other.

    None: another library's result is another one, and has no row.
    """
    expected = results[OURS] if peers[name].clipped else results[PLAIN]
    gap = float(np.linalg.norm(results[name] - expected) / np.linalg.norm(expected))
    most = TOLERANCE + ROUNDING * work.parameters
    if peers[name].same and not gap <= most:
        told = f"{name} differs from the reference by {gap:.1e}, more than {most:.0e}: not timed"
        if name.startswith(("silodp", "plain", "JAX")):  # what is written here
            raise SystemExit(told)
        print(f"    {told}", flush=True)
        return None
    return gap


def first_run(peer: Peer) -> tuple[float | None, np.ndarray]:
    """Megabytes that a run adds at its peak to what the process holds (None where the system does not say); the result.

    The first run: later ones may find memory that the last result still holds.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None, flat(peer.read(peer.run()))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else a run could use what others have freed
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again from what is held now
    before = resident("VmRSS")
    result = peer.run()
    grown = resident("VmHWM") - before
    return grown, flat(peer.read(result))


def resident(field: str) -> float:
    """A memory figure of this process, in megabytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) / 1e3
