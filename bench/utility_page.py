"""Page and figure of `python -m bench.utility`, from the numbers that it has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.tasks import TASKS

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "utility.json", HERE.parent / "docs" / "utility.md"
FIGURE = HERE.parent / "docs" / "utility.png"
TRUST_ORDER = ("trusted", "aggregated", "shuffled", "untrusted", "none")
NOTES = HERE / "utility_notes.md"
Cells = dict[tuple[str, str, str, str], np.ndarray]  # task, epsilon, trust, method: a row for each split


def cells_of(found: dict[str, Any]) -> Cells:
    rows: dict[tuple[str, str, str, str], list[Any]] = {}
    for key, value in sorted(found.items()):
        if "|" in key and "|check|" not in key:
            task, epsilon, trust, method, _ = key.split("|")
            rows.setdefault((task, epsilon, trust, method), []).append(np.atleast_1d(value))
    return {key: np.array(values) for key, values in rows.items()}


def best(rows: np.ndarray) -> float:
    """The mean over splits of the setting that is best in this mean: chosen on test records."""
    return float(np.max(rows.mean(axis=0)))


def rivals_of(cells: Cells, task: str, epsilon: str, trust: str) -> dict[str, float]:
    """What `auto` is compared with: the same epsilon and trust, or a weaker server still."""
    found = {m: best(rows) for (t, e, w, m), rows in cells.items() if (t, e, w) == (task, epsilon, trust)}
    alone = cells.get((task, epsilon, "none", "local"))
    return found | ({} if alone is None else {"local": best(alone)})


def regrets(cells: Cells) -> dict[tuple[str, str, str], tuple[float, str]]:
    """By task, epsilon and trust: how far `auto` is below the best of everything tuned on test, and which that is."""
    found = {}
    for task, epsilon, trust, method in cells:
        rivals = rivals_of(cells, task, epsilon, trust)
        if method == "auto" and len(rivals) > 1:
            own = rivals["auto"]
            name, value = max(((m, v) for m, v in rivals.items() if m != "auto"), key=lambda pair: pair[1])
            found[task, epsilon, trust] = (value - own, name)
    return found


def order(key: tuple[str, str, str]) -> tuple[int, int, float]:
    task, epsilon, trust = key
    return list(TASKS).index(task), TRUST_ORDER.index(trust), float(epsilon)


def table(cells: Cells) -> str:
    lines = [
        "| task | trust | epsilon | auto | best other | regret | local only | not private: linear, trees |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, epsilon, trust), (regret, name) in sorted(regrets(cells).items(), key=lambda pair: order(pair[0])):
        own = cells[task, epsilon, trust, "auto"][:, 0]
        error = f" ± {own.std() / np.sqrt(len(own)):.3f}" if len(own) > 1 else ""
        alone = cells.get((task, epsilon, "none", "local"))
        local = "-" if alone is None else f"{best(alone):.3f}"
        plain = [cells.get((task, "none", "none", method)) for method in ("linear", "trees")]
        shown = ", ".join("-" if rows is None else f"{best(rows):.3f}" for rows in plain)
        lines.append(
            f"| {marked(task)} | {trust} | {epsilon} | {own.mean():.3f}{error} ({len(own)}) | "
            f"{own.mean() + regret:.3f} {name} | {regret:+.3f} | {local} | {shown} |"
        )
    return "\n".join(lines)


def marked(task: str) -> str:
    return task if TASKS[task].seen else f"{task} *"


def summary(cells: Cells) -> str:
    """Median and worst regret at every epsilon and trust, of tasks that were looked at and of the others."""
    lines = ["| trust | epsilon | tasks | median regret | worst regret | median, not seen | worst, not seen |"]
    lines.append("|---|---|---|---|---|---|---|")
    found = regrets(cells)
    for trust, epsilon in sorted({(t, e) for _, e, t in found}, key=lambda pair: (pair[0], float(pair[1]))):
        rows = {task: regret for (task, e, t), (regret, _) in found.items() if (e, t) == (epsilon, trust)}
        new = [regret for task, regret in rows.items() if not TASKS[task].seen]
        worst = max(rows, key=lambda task: rows[task])
        unseen = f"{np.median(new):+.3f} | {max(new):+.3f}" if new else "- | -"
        lines.append(
            f"| {trust} | {epsilon} | {len(rows)} | {np.median(list(rows.values())):+.3f} | "
            f"{rows[worst]:+.3f} ({worst}) | {unseen} |"
        )
    return "\n".join(lines)


def methods_table(cells: Cells) -> str:
    """Every method with a server that is trusted: some have no other."""
    names = sorted({m for _, _, t, m in cells if t == "trusted"} - {"auto"})
    lines = ["| task | epsilon | auto | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    keys = {(task, epsilon, "trusted") for task, epsilon, trust, _ in cells if trust == "trusted"}
    for task, epsilon, trust in sorted(keys, key=order):
        found = rivals_of(cells, task, epsilon, trust)
        shown = [f"{found[name]:.3f}" if name in found else "-" for name in ("auto", *names)]
        lines.append(f"| {marked(task)} | {epsilon} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def check_table(found: dict[str, Any]) -> str:
    lines = ["| task | trust | epsilon | whole library | averages |", "|---|---|---|---|---|"]
    for key in sorted(k for k in found if "|check|" in k):
        task, epsilon, trust, _, seed = key.split("|")
        own = found.get(f"{task}|{epsilon}|{trust}|auto|{seed}")
        told = "-" if own is None else f"{np.max(own):.3f}"
        lines.append(f"| {task} | {trust} | {epsilon} | {found[key]:.3f} | {told} |")
    return "\n".join(lines) if len(lines) > 2 else "Not measured yet."


def draw(cells: Cells) -> None:
    """Regret of every cell by epsilon, a panel for each trust model."""
    import matplotlib.pyplot as plt

    found = regrets(cells)
    trusts = sorted({trust for _, _, trust in found}, key=TRUST_ORDER.index)
    figure, axes = plt.subplots(
        1, max(1, len(trusts)), figsize=(4 * max(1, len(trusts)), 4), sharey=True, squeeze=False
    )
    for axis, trust in zip(axes[0], trusts, strict=True):
        for task in TASKS:
            line = sorted((float(e), regret) for (t, e, w), (regret, _) in found.items() if (t, w) == (task, trust))
            style = "-o" if TASKS[task].seen else "--s"
            if line:
                axis.plot(*zip(*line, strict=True), style, label=marked(task), markersize=4)
        axis.axhline(0, color="black", linewidth=1)
        axis.set(xscale="log", title=trust, xlabel="epsilon of every record")
        axis.set_xticks((0.5, 1, 3, 8), ("0.5", "1", "3", "8"))
        axis.minorticks_off()
        axis.set_yscale("symlog", linthresh=0.02)
    axes[0][0].set_ylabel("regret of auto: best other, tuned on test, less auto")
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)


PAGE_TEXT = """# Utility: what an epsilon buys

Written by `python -m bench.utility`. Accuracy for classes, R^2 for numbers, on a fifth of the records; silos of equal
size; delta 1e-5; at most 10,000 records of covtype, kdd and blogfeedback and 12,000 of a9a. `auto` has the same
constants everywhere and sees nothing but public facts. The number of splits is in brackets. Everything else is tuned on
the test records, which nobody who keeps an epsilon can do: of each search that setting is taken which is best in the
mean over all splits. Tasks with a star were not looked at before the constants of `auto` were fixed.

Searches (steps and clip norms of squared losses are .3 and 1/.3 times those given):

- dp-gd: 20 and 60 rounds, steps 4, 16, 64, clip norms .1, .3, 1, mean of the last quarter of the iterates
- dp-gd, momentum: 60 rounds, Nesterov's momentum .9, steps .3, 1, 4, clip norms .1, .3, 1, the same mean
- auto, other constants: `auto` with steps or clip norms half or twice as long
- auto, other knots: `auto` with no broken lines, and with broken lines of 3, 5 and 7 knots, whatever they cost
- objective perturbation with four ridges; AdaSSP and DP-EBM as they come. They see all records in one place, and so
  stand in the trusted rows.
- local only: `auto` on the records of one silo

Features are standardised by the training records' own means and deviations, and records are shortened to 1.1 times the
usual length, for all methods; no epsilon covers the means and deviations. Columns with more than two values are numbers
that may become broken lines, others are flags.

Linear models are trained by `bench/averages.py`: plans, noise, stages and constants are the library's, but the clipped
mean over all silos' records is computed at once, and noise of the size that the plan gives this mean is added. What
whole runs of the library give is at the end of the page (`--check`).

## Regret of `auto`

Target: a median of at most .003 and a worst of at most .02.

{summary}

![Regret of auto](utility.png)

{notes}

## All cells

{table}

## Methods that trust one server

{methods}

## `auto` through the whole library

One split, three seeds (`python -m bench.utility --check`), beside the figure of `bench/averages.py` on the same split.

{check}
"""


def write_page(found: dict[str, Any]) -> str:
    cells = cells_of(found)
    if not regrets(cells):
        return "no task has both `auto` and another method yet"
    draw(cells)
    notes = NOTES.read_text(encoding="utf-8").strip() if NOTES.exists() else ""
    text = PAGE_TEXT.format(summary=summary(cells), notes=notes, table=table(cells), methods=methods_table(cells),
        check=check_table(found),
    )  # fmt: skip
    PAGE.write_text(text, encoding="utf-8")
    return summary(cells)
