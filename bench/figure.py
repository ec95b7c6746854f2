"""One picture: a clipped mean by every peer (log bars), and how a round grows (log-log lines)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.targets import PLAIN


def draw(found: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(18, 6), layout="constrained")
    for axis, part in zip(axes, ("values", "differences"), strict=False):
        if part in found:
            bars(axis, part, found[part]["found"])
    if "growth" in found:
        lines(axes[2], found["growth"]["found"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(axis: Any, part: str, found: dict[str, Any]) -> None:
    names = sorted({name for own in found.values() for name in own})
    height = 0.8 / len(found)
    for i, (work, own) in enumerate(found.items()):
        rows = [(y, own[name]["over"][PLAIN]["cpu"]) for y, name in enumerate(names) if name in own]
        middle = [r[1] for _, r in rows]
        errors = [[r[1] - r[0] for _, r in rows], [r[2] - r[1] for _, r in rows]]
        axis.barh([y + i * height for y, _ in rows], middle, height, xerr=errors, label=work)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="CPU time over ONE plain JAX gradient", title=f"clipped mean of {part}")
    axis.set_yticks([y + 0.4 for y in range(len(names))], names)
    axis.invert_yaxis()
    axis.legend(fontsize=8)


def lines(axis: Any, found: dict[str, Any]) -> None:
    for name, series in found.items():
        if name != "many silos":
            points = series["points"]
            label = f"{name} (slope {series['slope']:.2f})"
            axis.plot([p["at"] for p in points], [p["cpu_ms"][1] for p in points], "o-", label=label)
    axis.set(
        xscale="log", yscale="log", xlabel="size", ylabel="CPU ms (of a round; `rounds`: of a run)", title="growth"
    )
    axis.legend(fontsize=8)
