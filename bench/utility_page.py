"""Page and figure of `python -m bench.utility`, from the numbers that it has kept."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from bench.families import DEFAULTS, FAMILIES, MOST_ROUNDS, PRESCRIBED, prescribed_under
from bench.tasks import TASKS
from silodp.plan.auto import CLASSES

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "utility.json", HERE.parent / "docs" / "utility.md"
FIGURE = HERE.parent / "docs" / "utility.png"
TRUST_ORDER = ("trusted", "aggregated", "shuffled", "untrusted", "none")
NOTES = HERE / "utility_notes.md"
ALL_METHODS_AT = ("1", "3")  # epsilons of the tables with every method
MEDIAN, WORST = 0.003, 0.02  # the target
CONSTANTS, OTHER_KNOTS = "auto, other constants", "auto, other knots"  # not rivals of `auto`, but `auto` once more
FACTORS = ((0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0))  # of steps and clip norms, beside those of `auto`
VARIANTS = {
    CONSTANTS: [f"steps x {step:g}" if clip == 1 else f"clip norms x {clip:g}" for step, clip in FACTORS],
    OTHER_KNOTS: ["no broken lines", *(f"{knots} knots" for knots in sorted(CLASSES.knots))],
}  # in the order of their settings; of knots those come last that a task may not have
Key = tuple[str, str, str, str]  # task, epsilon, trust, method
Cells = dict[Key, dict[int, np.ndarray]]  # by split: what every setting reached


def cells_of(found: dict[str, Any]) -> Cells:
    cells: Cells = {}
    for key, value in sorted(found.items()):
        if "|" in key and "|check|" not in key:
            task, epsilon, trust, method, seed = key.split("|")
            cells.setdefault((task, epsilon, trust, method), {})[int(seed)] = np.atleast_1d(value)
    return cells


def means(rows: dict[int, np.ndarray]) -> np.ndarray:
    """Of every setting, over splits."""
    return np.mean(list(rows.values()), axis=0)


def best(rows: dict[int, np.ndarray]) -> float:
    """The mean over splits of the setting that is best in this mean: chosen on test records."""
    return float(np.nanmax(means(rows)))  # a setting that ended in no number hides no other


def beside(own: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> np.ndarray | None:
    """Every setting of another method, as if it had the splits of `auto`: the mean of `auto` and the difference on the
    splits that both have."""
    both = own.keys() & other.keys()
    if not both:
        return None
    return best(own) + means({i: other[i] for i in both}) - best({i: own[i] for i in both})


def rivals_of(
    cells: Cells, task: str, epsilon: str, trust: str, left_out: Collection[str] = VARIANTS
) -> dict[str, float]:
    """What `auto` is compared with: the same epsilon and trust, or the records of one silo alone."""
    own = cells.get((task, epsilon, trust, "auto"))
    if own is None:
        return {}
    there = {m: rows for (t, e, w, m), rows in cells.items() if (t, e, w) == (task, epsilon, trust)}
    asked = {m: rows for m, rows in there.items() if m not in left_out}
    asked |= {m: rows for (t, e, w, m), rows in cells.items() if (t, e, w, m) == (task, epsilon, "none", "local")}
    found = {method: beside(own, rows) for method, rows in asked.items()}
    return {method: float(np.nanmax(values)) for method, values in found.items() if values is not None}


def luck(own: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> float:
    """The standard error of what the best setting of another method is ahead of `auto`, over the splits of both."""
    both = sorted(own.keys() & other.keys())
    place = int(np.argmax(means({i: other[i] for i in both})))
    ahead = [float(other[i][place] - own[i][0]) for i in both]
    return float(np.std(ahead, ddof=1) / np.sqrt(len(both))) if len(both) > 1 else float("nan")


def luck_of(cells: Cells, key: tuple[str, str, str], name: str) -> float:
    task, epsilon, trust = key
    return luck(cells[*key, "auto"], cells[task, epsilon, "none" if name == "local" else trust, name])


def regrets(cells: Cells, left_out: Collection[str] = VARIANTS) -> dict[tuple[str, str, str], tuple[float, str]]:
    """By task, epsilon and trust: how far `auto` is below the best of everything tuned on test, and which that is."""
    found = {}
    for task, epsilon, trust, method in cells:
        rivals = rivals_of(cells, task, epsilon, trust, left_out) if method == "auto" else {}
        if len(rivals) > 1:
            own = rivals.pop("auto")
            name = max(rivals, key=lambda m: rivals[m])
            found[task, epsilon, trust] = (rivals[name] - own, name)
    return found


def give_or_take(error: float) -> str:
    """Nothing where one split tells nothing."""
    return "" if math.isnan(error) else f" ± {error:.3f}"


def ends_told(cells: Cells, steps: dict[str, list[float]]) -> str:
    """Of searches, given by the steps of their settings: how often the best has the largest step."""
    shown = []
    for method, each in steps.items():
        found = [int(np.nanargmax(means(rows))) for (*_, m), rows in cells.items() if m == method]
        if found:
            shown.append(f"{np.mean([each[best % len(each)] == max(each) for best in found]):.0%} of {method}")
    return ", ".join(shown) or "none"


def order(key: tuple[str, str, str]) -> tuple[int, int, float]:
    task, epsilon, trust = key
    return list(TASKS).index(task), TRUST_ORDER.index(trust), float(epsilon)


def table(cells: Cells) -> str:
    lines = [
        "| task | trust | epsilon | auto | best other | regret | local only | not private: linear, trees |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, epsilon, trust), (regret, name) in sorted(regrets(cells).items(), key=lambda pair: order(pair[0])):
        own = np.concatenate(list(cells[task, epsilon, trust, "auto"].values()))
        error = give_or_take(own.std() / np.sqrt(len(own)) if len(own) > 1 else math.nan)
        doubt = give_or_take(luck_of(cells, (task, epsilon, trust), name))
        alone = cells.get((task, epsilon, "none", "local"))
        plain = [cells.get((task, "none", "none", method)) for method in ("linear", "trees")]
        local, *shown = ["-" if rows is None else f"{best(rows):.3f}" for rows in (alone, *plain)]
        lines.append(
            f"| {marked(task)} | {trust} | {epsilon} | {own.mean():.3f}{error} ({len(own)}) | "
            f"{own.mean() + regret:.3f} {name} | {regret:+.3f}{doubt} | "
            f"{local} | {', '.join(shown)} |"
        )
    return "\n".join(lines)


def marked(task: str) -> str:
    return task if TASKS[task].seen else f"{task} *"


def summary(cells: Cells) -> str:
    """Median and worst regret at every epsilon and trust, of tasks that were looked at and of the others."""
    lines = [
        "| trust | epsilon | tasks | median | worst | seen: median, worst | never looked at: median, worst | "
        "above .02, by more than luck | target |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    found = regrets(cells)
    cells_there = {(trust, epsilon) for _, epsilon, trust in found}
    for trust, epsilon in sorted(cells_there, key=lambda pair: (TRUST_ORDER.index(pair[0]), float(pair[1]))):
        rows = {task: regret for (task, e, t), (regret, _) in found.items() if (e, t) == (epsilon, trust)}
        worst, median = max(rows, key=lambda task: rows[task]), float(np.median(list(rows.values())))
        parts = [[regret for task, regret in rows.items() if TASKS[task].seen is seen] for seen in (True, False)]
        each = [f"{np.median(part):+.3f}, {max(part):+.3f}" if part else "-" for part in parts]
        kept = "kept" if median <= MEDIAN and rows[worst] <= WORST else "**missed**"
        high = [task for task, regret in rows.items() if regret > WORST]
        clear = [
            t for t in high if rows[t] - 2 * luck_of(cells, (t, epsilon, trust), found[t, epsilon, trust][1]) > WORST
        ]
        lines.append(
            f"| {trust} | {epsilon} | {len(rows)} | {median:+.3f} | {rows[worst]:+.3f} ({worst}) | "
            f"{each[0]} | {each[1]} | {len(high)}, {len(clear)} | {kept} |"
        )
    return "\n".join(lines)


def methods_table(cells: Cells, trust: str) -> str:
    """Every method under a trust model, at two epsilons."""
    keys = {(t, e, w) for t, e, w, _ in cells if w == trust and e in ALL_METHODS_AT}
    found = {key: rivals_of(cells, *key) for key in sorted(keys, key=order)}
    names = sorted({name for rivals in found.values() for name in rivals} - {"auto"})
    lines = ["| task | epsilon | auto | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for (task, epsilon, _), rivals in found.items():
        if rivals:
            shown = [f"{rivals[name]:.3f}" if name in rivals else "-" for name in ("auto", *names)]
            lines.append(f"| {marked(task)} | {epsilon} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def too_far_ahead(found: dict[str, Any]) -> set[tuple[str, str]]:
    """Tasks, and methods that are ahead of `auto` there by more than the target, at some epsilon and trust."""
    cells, pairs = cells_of(found), set()
    for task, epsilon, trust in regrets(cells):
        rivals = rivals_of(cells, task, epsilon, trust)
        pairs |= {(task, method) for method, reached in rivals.items() if reached - rivals["auto"] > WORST}
    return pairs


def variants_table(cells: Cells) -> str:
    """What other constants of `auto` would have brought, over all tasks."""
    asked = [(trust, epsilon) for trust in ("trusted", "untrusted") for epsilon in ("0.5", "1", "3", "8")]
    lines = ["| | " + " | ".join(f"{trust}, {epsilon}" for trust, epsilon in asked) + " |", "|---" * 9 + "|"]
    for method, names in VARIANTS.items():
        for place, name in enumerate(names):
            shown = [gains_told(gains(cells, trust, epsilon, method, place)) for trust, epsilon in asked]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def with_variants(cells: Cells) -> str:
    """Regret against other constants of `auto` too: the best of eight on one split is ahead of all of them."""
    there = {task for task, *_, method in cells if method == CONSTANTS}
    missing = len({task for task, *_, method in cells if method == "auto"} - there)
    if missing:
        return f"nothing is known yet: {missing} tasks lack them"
    by_row: dict[tuple[str, str], list[float]] = {}
    for (_, epsilon, trust), (regret, _) in regrets(cells, left_out=()).items():
        by_row.setdefault((epsilon, trust), []).append(regret)
    medians = [float(np.median(row)) for row in by_row.values()]
    high = sum(regret > WORST for row in by_row.values() for regret in row)
    return f"medians would be {min(medians):+.3f} to {max(medians):+.3f}, and {high} cells above .02"


def gains(cells: Cells, trust: str, epsilon: str, method: str, place: int) -> list[float]:
    """Of every task that has this setting: how far it is ahead of `auto`, in the mean over splits of both."""
    found = []
    for task in {t for t, *rest in cells if rest == [epsilon, trust, method]}:
        own, other = cells.get((task, epsilon, trust, "auto"), {}), cells[task, epsilon, trust, method]
        both = [i for i in own.keys() & other.keys() if place < len(other[i])]
        if both:
            found.append(float(np.mean([other[i][place] - own[i][0] for i in both])))
    return found


def gains_told(found: list[float]) -> str:
    if not found:
        return "-"
    return (
        f"{np.median(found):+.3f} ({sum(f > WORST for f in found)}, {sum(f < -WORST for f in found)} of {len(found)})"
    )


def defaults_table(cells: Cells) -> str:
    """What each algorithm reaches as its theorem prescribes it."""
    lines = ["| task | trust | epsilon | auto | " + " | ".join(PRESCRIBED) + " |", "|---" * (len(PRESCRIBED) + 4) + "|"]
    for task, epsilon, trust in sorted(((t, e, w) for t, e, w, m in cells if m == DEFAULTS), key=order):
        own = cells.get((task, epsilon, trust, "auto"), {})
        values = beside(own, cells[task, epsilon, trust, DEFAULTS])
        if values is not None:
            told = dict(zip(prescribed_under(trust), values, strict=True))
            shown = [f"{told[name]:.3f}" if name in told else "-" for name in PRESCRIBED]
            lines.append(f"| {marked(task)} | {trust} | {epsilon} | {best(own):.3f} | " + " | ".join(shown) + " |")
    return "\n".join(lines) if len(lines) > 2 else "Not measured yet."


def splits_table(cells: Cells, planned: dict[str, list[int]]) -> str:
    """How many splits were asked for, and how many there are."""
    lines = [
        "| method | splits of a task | of a small task | of a tiny task | tasks measured | splits measured |",
        "|---|---|---|---|---|---|",
    ]
    for method, splits in planned.items():
        told = ("linear", "trees") if method == "no privacy" else (method,)
        there = {(t, frozenset(rows)) for (t, *_, m), rows in cells.items() if m in told}
        counts = [len(rows) for _, rows in there]
        shown = f"{len({t for t, _ in there})} | {min(counts)} to {max(counts)}" if counts else "**none** | 0"
        lines.append(f"| {method} | {' | '.join(map(str, splits))} | {shown} |")
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
    """Regret of every cell by epsilon, a panel for each trust model; the worst task of each epsilon has its name."""
    import matplotlib.pyplot as plt

    found = regrets(cells)
    trusts = sorted({trust for _, _, trust in found}, key=TRUST_ORDER.index)
    size = (4 * max(1, len(trusts)), 4.5)
    figure, axes = plt.subplots(1, max(1, len(trusts)), figsize=size, sharey=True, squeeze=False)
    for axis, trust in zip(axes[0], trusts, strict=True):
        rows: dict[float, dict[str, float]] = {}
        for (task, epsilon, own), (regret, _) in found.items():
            if own == trust:
                rows.setdefault(float(epsilon), {})[task] = regret
        each = sorted(rows.items())
        for task in sorted({task for _, row in each for task in row}, key=lambda task: TASKS[task].seen, reverse=True):
            line = [(epsilon, row[task]) for epsilon, row in each if task in row]
            seen = TASKS[task].seen
            axis.plot(
                *zip(*line, strict=True), "-" if seen else "--s", color="tab:blue" if seen else "tab:orange",
                alpha=0.4 if seen else 1.0, linewidth=1, markersize=3, label="looked at" if seen else "never looked at",
            )  # fmt: skip
        medians = [(epsilon, float(np.median(list(row.values())))) for epsilon, row in each]
        axis.plot(*zip(*medians, strict=True), "k-o", linewidth=2, label="median")
        for epsilon, row in each:
            worst = max(row, key=lambda task: row[task])
            axis.annotate(
                worst, (epsilon, row[worst]), rotation=40, fontsize=7, xytext=(0, 3), textcoords="offset points"
            )
        for level, style in ((0, "-"), (WORST, ":")):
            axis.axhline(level, color="black", linewidth=1, linestyle=style)
        axis.set(xscale="log", title=trust, xlabel="epsilon of every record")
        axis.set_xticks((0.5, 1, 3, 8), ("0.5", "1", "3", "8"))
        axis.minorticks_off()
        axis.set_yscale("symlog", linthresh=0.02)
    axes[0][0].set_ylabel("regret of auto: best other, tuned on test, less auto")
    handles = {label: line for line, label in zip(*axes[0][-1].get_legend_handles_labels(), strict=True)}
    axes[0][-1].legend(handles.values(), handles.keys(), fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)


PAGE_TEXT = """# Utility: what an epsilon buys

Written by `python -m bench.utility`. Accuracy for classes, R^2 for numbers, on a fifth of the records; silos of equal
size; delta 1e-5; at most 10,000 records of covtype, kdd, blogfeedback and diamonds, 12,000 of a9a. `auto` has the same
constants everywhere and sees nothing but public facts. The number of splits is in brackets. Everything else is tuned on
the test records, which nobody who keeps an epsilon can do: of each search that setting is taken which is best in the
mean over all splits. Tasks with a star were not looked at before the constants of `auto` were fixed.

Searches (steps and clip norms of squared losses are .3 and 1/.3 times those given):

- dp-gd: 20 and 60 rounds, steps 4, 16, 64, clip norms .1, .3, 1, mean of the last quarter of the iterates
- dp-gd, momentum: 60 rounds, Nesterov's momentum .9, steps .3, 1, 4, clip norms .1, .3, 1, the same mean
- dp-gd, pieces: the same as with momentum, on broken lines of 3 and of 5 knots, where there are numbers and these make
  no more than 400 features: what `auto` owes to its features, DP-GD gets as well

  The best of these has the largest step in so many cells: {ends}. A wider search might bring a little more.

- local only: `auto` on the records of one silo
- other families of the library, under the trust models in brackets, on features as they are; steps and clip norms of
  squared losses are .15 and 1/.15 times those given, because the library's squared loss is twice the one above:
{families}
- papers' defaults: {prescribed},
  each as its theorem prescribes it (`theory = true`) with the noise that its epsilon really needs, no more than {most}
  rounds, and bounds of gradients and smoothness that hold for logistic and softmax losses of such records; squared
  losses have no bound, and a residual of one deviation is taken. mu2 has a ball of diameter 10. Epsilon 1 and 3 only.
  prox-sgd is left out: its theorem needs a PL constant, which nobody is told.

These see all records in one place, and so stand in the trusted rows:

- objective perturbation with four ridges; AdaSSP and DP-EBM as they come
- opacus: its DP-SGD, Poisson batches of a quarter, 40 rounds, Nesterov's momentum .9, steps .3, 1, 4, clip norms .1,
  .5, mean of the last quarter of the iterates. Opacus counts records that are added or removed; a record that is
  replaced is one removed and one added. So its noise is not the one that Opacus takes for an epsilon, but what silodp's
  accountant finds for replacement (`bench/rivals_torch.py`), which is more.
- diffprivlib (delta 0): records shortened to .5, 1, 2, features as they are and standardised once more

Features are standardised by the training records' own means and deviations, and records are shortened to 1.1 times the
usual length, for all methods; no epsilon covers the means and deviations. Columns with more than two values are numbers
that may become broken lines, others are flags.

`auto` and DP-GD are trained by `bench/averages.py`: plans, noise, stages and constants are the library's, but the
clipped mean over all silos' records is computed at once, and noise of the size that the plan gives this mean is added.
What whole runs of the library give is at the end of the page (`--check`). Other families are whole runs of the library.

Dear methods have fewer splits, and more of them where they are ahead by more than the target (`--doubtful`). They are
compared with `auto` on the splits that both have: what is shown for them is the mean of `auto` over all its splits and
the difference on these. A small task has fewer than 2,500 records, a tiny one at most 1,000.

{splits}

## Regret of `auto`

Regret: the best of everything else, tuned on the test records, less `auto`; `auto` is ahead where it is negative.
Target: a median of at most .003 and a worst of at most .02, at every epsilon and trust model. "By more than luck": by
more than two standard errors of the difference over splits. That the best of some fifty settings is taken counts as no
luck here, though it is.

{summary}

![Regret of auto](utility.png)

## Other constants

What `auto` would reach with steps or clip norms half or twice as long, and with other broken lines, whatever these
cost: the median over tasks of what each is ahead of `auto`, and in brackets of how many tasks it is ahead, and behind,
by more than .02. With one split of a task most of these are luck. They do not count in the regret, which compares
methods. If the best of them counted as well, chosen on the split that it has, {counted}.

{variants}

{notes}

## All cells

{table}

## All methods, trusted server

{trusted}

## All methods, untrusted server

{untrusted}

## Papers' defaults, each

{defaults}

## `auto` through the whole library

One split, three seeds (`python -m bench.utility --check`), beside the figure of `bench/averages.py` on the same split.

{check}
"""


def write_page(found: dict[str, Any], planned: dict[str, list[int]], steps: dict[str, list[float]]) -> str:
    """planned: splits of every method: of a task, of a small one, of a tiny one. steps: of the settings of searches."""
    cells = cells_of(found)
    if not regrets(cells):
        return "no task has both `auto` and another method yet"
    draw(cells)
    notes = NOTES.read_text(encoding="utf-8").strip() if NOTES.exists() else ""
    text = PAGE_TEXT.format(
        families="\n".join(f"    - {name}: {family.sentence}" for name, family in FAMILIES.items()),
        prescribed=", ".join(PRESCRIBED),
        most=MOST_ROUNDS,
        ends=ends_told(cells, steps),
        splits=splits_table(cells, planned),
        summary=summary(cells),
        notes=notes,
        variants=variants_table(cells),
        counted=with_variants(cells),
        table=table(cells),
        trusted=methods_table(cells, "trusted"),
        untrusted=methods_table(cells, "untrusted"),
        defaults=defaults_table(cells),
        check=check_table(found),
    )
    PAGE.write_text(text, encoding="utf-8")
    return summary(cells)
