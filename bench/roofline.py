"""How much of the machine's limits each workload reaches: products over the GEMM peak, bytes over the bandwidth."""

from __future__ import annotations

from typing import Any

HEAD = ["work", "Gflop", "MB", "CPU ms", "of the GEMM peak", "of the bandwidth", "nearer limit"]
GRADIENTS = ("plain gradient, JAX", "silodp structured", "plain gradient, PyTorch")


def rows(everything: dict[str, Any]) -> list[list[str]]:
    limits = everything["machine"]["found"]["1 thread"]
    peak = max(value for name, value in limits.items() if name.endswith("Gflop/s"))
    bandwidth = max(value for name, value in limits.items() if name.endswith("GB/s"))

    def row(name: str, flops: float, moved: float, milliseconds: float) -> list[str]:
        products, memory = flops / 1e6 / milliseconds / peak, moved / 1e6 / milliseconds / bandwidth
        nearer = "products" if products >= memory else "memory"
        counts = [f"{flops / 1e9:.3g}", f"{moved / 1e6:.3g}", f"{milliseconds:.3g}"]
        return [name, *counts, f"{products:.1%}", f"{memory:.1%}", nearer]

    found = []
    for part, points in (("values", 1), ("differences", 2)):
        for work, own in everything.get(part, {"found": {}})["found"].items():
            for peer in GRADIENTS:
                count = points if peer == "silodp structured" else 1
                name = f"{part}, {work}: {peer}"
                found.append(row(name, count * own["flops"], own["bytes"], 1e3 * own["peers"][peer]["cpu_s"][1]))
    for name, run in everything.get("runs", {"found": {}})["found"].items():
        seconds = run["rows"]["silodp"]["cpu_s"][1]
        found.append(row(f"run, {name}", run["work"]["flops"], run["work"]["bytes"], 1e3 * seconds))
    return found
