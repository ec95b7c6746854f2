"""What XLA's options change: `python -m bench.flags NAME [points]`, over ONE plain JAX gradient with its defaults.

An option that gives silodp more than it gives the plain gradient belongs into silodp/compiler.py.
"""

from __future__ import annotations

import sys

from bench import peers_jax
from bench.pieces import patched
from bench.targets import OURS, PLAIN
from bench.timing import interleaved
from bench.workloads import dense_workloads, other_workloads

TURNS, SECONDS = 12, 2.0  # and seconds for each program
LIBRARY = "xla_cpu_experimental_ynn_fusion_type"  # what goes to YNNPACK; by default products and reductions
OPTIONS: dict[str, dict[str, str | bool]] = {
    "defaults": {},
    "oneDNN": {"xla_cpu_use_onednn": True},
    "nothing to YNNPACK": {LIBRARY: ""},
    "convolutions to YNNPACK": {LIBRARY: "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"},
    "no fusion emitters": {"xla_cpu_use_fusion_emitters": False},
    "vectors of 512 bits": {"xla_cpu_prefer_vector_width": "512"},
}


def main(name: str, points: int = 1) -> None:
    work = next(each for each in dense_workloads() + other_workloads() if name in each.name)
    peers = {}
    for words, options in OPTIONS.items():
        with patched([(peers_jax, "OPTIONS", options)]):
            peers |= {(who, words): peers_jax.PEERS[who](work, points) for who in (PLAIN, OURS)}
    runs = {f"{who}, {words}": peer.run for (who, words), peer in peers.items() if peer is not None}
    for run in runs.values():
        run()
    base = f"{PLAIN}, defaults"
    samples = interleaved(runs, TURNS, SECONDS * len(runs), base)
    print(f"{work.name}, {points} point{'s'[: points - 1]}")
    for each, own in samples.items():
        over = own.over(samples[base])
        print(f"  {each:50}{over['cpu'][1]:6.2f}x CPU {over['wall'][1]:6.2f}x wall", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
