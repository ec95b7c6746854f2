"""The words of a reproduction: an experiment's table in Markdown, and the page with all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from silodp.digits import rounded_up
from silodp.reproduce.claims import Judgement, judgements
from silodp.reproduce.experiment import Column, Experiment
from silodp.reproduce.report import Cell, Results, Row, epsilon_claims, false_claims, rows_of

HEAD = """# Reproduction of the five papers

Written by `silodp reproduce --docs` from the results of `make reproduce`; `silodp reproduce NAME` runs one of them
again, with `--quick` in about two minutes, with `--full` every setting of its grid to the end. Figures and compact
results (every seed's value, curves at 40 points or fewer) lie in [reproduction](reproduction).

- **published**: printed in the paper, or read off its figure (about ± 0.01).
- **paper's noise**: our run of the paper's algorithm, with per-record clipping, under the paper's own calibration, in
  the setting found with exact noise. The epsilon in brackets is what that noise really gives, whatever is claimed.
- **exact**: the same run with exactly the noise that the epsilon in question needs. silodp's own lines stand
  only here, as do references without privacy and what was not run with the paper's noise.
- **best of silodp**: the best line with exact noise at the same epsilon, trust model and data, the paper's own lines
  included. It is chosen among them by the number shown.
- **verdict**: our run with the paper's noise (with exact noise where there is no other) against the published value;
  a match is within the tolerance given below each table.

What is listed as chosen below a table was searched on the private records: the searches are not covered by the epsilons
here. The papers' searches were not either. Deviations are over seeds (start and noise; one split of the data). With
fewer than three seeds nothing is tested.
"""


def as_markdown(experiment: Experiment, results: Results) -> str:
    """One experiment's section."""
    parts = [f"## {experiment.name}: {experiment.title}", experiment.paper]
    parts.append("\n".join(f"- {note}" for note in experiment.notes))
    rows = rows_of(experiment, results)
    parts.append(table(experiment, rows) if experiment.published or experiment.levels is None else by_level(rows))
    verdicts = [claim_line(judgement) for judgement in judgements(experiment, results)]
    parts += ["\n".join(verdicts)] if verdicts else []
    parts += epsilon_lines(results)
    parts += missed(rows)
    parts.append(chosen_settings(experiment, results))
    parts.append(effort(experiment, results))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(experiment: Experiment, rows: Sequence[Row]) -> str:
    level = [] if experiment.levels is None else [experiment.levels.label]
    heads = ["", *level, "line", "measure", "published", "paper's noise", "exact", "best of silodp", "verdict"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cells_of(row, with_level=bool(level))) + " |" for row in rows]
    if not experiment.published:
        return "\n".join(lines)
    matches = ", ".join(dict.fromkeys(f"{m.label} ± {m.tolerance:g}" for m in experiment.metrics))
    return "\n".join(lines) + f"\n\nMatch: {matches}. {experiment.reported}".rstrip()


def cells_of(row: Row, *, with_level: bool) -> list[str]:
    best = "" if row.best is None else f"{row.best} ({row.best.line})"
    published = "" if row.published is None else f"{row.published:g}"
    difference = "" if row.difference is None or not math.isfinite(row.difference) else f" ({row.difference:+.2g})"
    level = [] if not with_level else ["" if row.level is None else f"{row.level:g}"]
    return [
        row.panel,
        *level,
        row.line,
        row.metric.label,
        published,
        with_epsilon(row.cells.get("published")),
        "" if "exact" not in row.cells else str(row.cells["exact"]),
        best,
        row.verdict + difference,
    ]


def by_level(rows: Sequence[Row]) -> str:
    """Without published values to stand beside ours: a table for each panel and measure, a column for each level."""
    tables = []
    for panel, measure in dict.fromkeys((row.panel, row.metric.label) for row in rows):
        here = [row for row in rows if (row.panel, row.metric.label) == (panel, measure)]
        levels = list(dict.fromkeys(row.level for row in here))
        lines = [
            f"| {panel}: {measure} | " + " | ".join("" if level is None else f"{level:g}" for level in levels) + " |",
            "|" + "---|" * (len(levels) + 1),
        ]
        for line in dict.fromkeys(row.line for row in here):
            own = {row.level: row.cells for row in here if row.line == line}
            names: dict[Column, str] = {"published": f"{line}, paper's noise", "exact": line}
            for column, name in names.items():
                cells = [own.get(level, {}).get(column) for level in levels]
                shown = [with_epsilon(cell) if column == "published" else str(cell or "") for cell in cells]
                lines += [f"| {name} | " + " | ".join(shown) + " |"] if any(cells) else []
        best = {row.level: row.best for row in here if row.best is not None}
        shown = [f"{best[level]} ({best[level].line})" if level in best else "" for level in levels]
        tables.append("\n".join([*lines, "| best of silodp | " + " | ".join(shown) + " |"]))
    return "\n\n".join(tables)


def with_epsilon(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return str(cell) if cell.epsilon is None else f"{cell} [{rounded_up(cell.epsilon, 3)}]"


def claim_line(judgement: Judgement) -> str:
    name = {"published": "with the paper's noise", "exact": "with exact noise"}[judgement.column]
    gain = 100 * median(judgement.gains)  # one place where the other side is near 0 would make any mean
    facts = [f"by {gain:+.{0 if abs(gain) >= 10 else 1}f} %" + (" in the median" if len(judgement.gains) > 1 else "")]
    if judgement.tested:
        facts.append(f"p < 0.05 in {judgement.significant} of {len(judgement.tested)}: {listed(judgement.tested)}")
    return f"- Claim: {judgement.claim.text} **{judgement.verdict}** {name} ({'; '.join(facts)})."


def listed(p_values: Sequence[float]) -> str:
    return ", ".join(f"{p:.2g}" for p in p_values)


def epsilon_lines(results: Results) -> list[str]:
    wrong = false_claims(results)
    if not wrong:
        return []
    places = "; ".join(f"{panel}, {line}: claims {claimed:g}, is {true:.3g}" for panel, line, claimed, true in wrong)
    return [f"The paper's noise does not give its epsilon in {len(wrong)} places: {places}."]


def missed(rows: Iterable[Row]) -> list[str]:
    """Published values that the best of silodp does not reach at the claimed epsilon."""
    compared = [row for row in rows if row.beaten is not None]
    behind = [row for row in compared if row.beaten is False]
    if not compared:
        return []
    if not behind:
        return [
            f"The best of silodp, at the claimed epsilon, is at least as good as all {len(compared)} published values."
        ]
    names = "; ".join(
        f"{row.panel}{'' if row.level is None else f' {row.level:g}'}, {row.line}, {row.metric.label}: "
        f"{row.published:g} against {row.best}{with_that_noise(row)}"
        for row in behind
    )
    return [f"Published values that the best of silodp misses ({len(behind)} of {len(compared)}): {names}."]


def with_that_noise(row: Row) -> str:
    cell = row.cells.get("published")
    return (
        ""
        if cell is None or cell.epsilon is None
        else f" (the paper's noise gives epsilon {rounded_up(cell.epsilon, 3)})"
    )


def effort(experiment: Experiment, results: Results) -> str:
    minutes = sum(result.get("seconds", 0.0) for result in results.values()) / 60
    seeds = "seed" if len(experiment.seeds) == 1 else "seeds"
    return f"{len(experiment.seeds)} {seeds}; {minutes:.1f} minutes."


def chosen_settings(experiment: Experiment, results: Results) -> str:
    """What the searches chose, a bullet for each line; levels are separated by strokes."""
    bullets = []
    for panel in experiment.panels:
        for line in experiment.lines_of(panel.name):
            result = next(
                (results[key] for c in ("exact", "best") if (key := (panel.name, line.name, c)) in results), None
            )
            if result is None or not line.search:
                continue
            where = f"{panel.name}, " if len(experiment.panels) > 1 else ""
            tried = (result.get("tuning") or "").split(" ")[0]
            values = [across_levels(result, key, grid) for key, grid in line.search.items()]
            bullets.append(f"- {where}{line.name} ({tried} tried): {', '.join(values)}")
    if not bullets:
        return ""
    head = "Settings chosen, not privately (\\* lies at an end of three values or more: a wider grid might do better):"
    return "\n".join([head, "", *bullets])


def across_levels(result: dict[str, Any], key: str, grid: Sequence[Any]) -> str:
    ends = (grid[0], grid[-1]) if len(grid) > 2 else ()
    chosen = [level["setting"][key] for level in result["levels"]]
    words = [f"{value:g}" + ("\\*" if value in ends else "") for value in chosen]
    return f"{key.rpartition('.')[2]} {words[0] if len(set(words)) == 1 else ' / '.join(words)}"


def whole_page(sections: Sequence[tuple[Experiment, Results]], missing: Sequence[str]) -> str:
    parts = [HEAD, overview(sections)]
    if missing:
        parts.append(f"Not run yet, or not as they are described now: {', '.join(missing)}.")
    for experiment, results in sections:
        parts.append(as_markdown(experiment, results))
        parts.append(f"![{experiment.name}](reproduction/{experiment.name}.png)\n")
    return "\n\n".join(parts)


def overview(sections: Sequence[tuple[Experiment, Results]]) -> str:
    """Two tables, of the published values and of the claims, and the time it all took."""
    # Figures of a paper share some of their runs: each counts once.
    each = {(e.paper, key, r.get("seconds", 0.0)) for e, results in sections for key, r in results.items()}
    minutes = sum(seconds for *_, seconds in each) / 60
    time = (
        f"The runs took {minutes:.0f} minutes in all if counted one after another; several ran at a time, so that each "
        "took longer than alone."
    )
    return "\n\n".join([values_table(sections), claims_table(sections), time])


def values_table(sections: Sequence[tuple[Experiment, Results]]) -> str:
    """For each experiment, how many published values were met and how often the paper's noise is too small."""
    heads = ["experiment", "published values", "matched or bettered by our run of the line"]
    heads += ["reached by the best of silodp at the claimed epsilon", "runs whose noise is less than claimed"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for experiment, results in sections:
        rows = [row for row in rows_of(experiment, results) if row.verdict]
        wrong, claimed = false_claims(results), len(epsilon_claims(results))
        good, reached = sum(row.verdict in ("match", "better") for row in rows), sum(bool(row.beaten) for row in rows)
        counts = [str(len(rows)), str(good), str(reached)] if rows else ["none", "", ""]
        cells = [experiment.name, *counts, f"{len(wrong)} of {claimed}" if claimed else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims_table(sections: Sequence[tuple[Experiment, Results]]) -> str:
    """One line for each claim of each experiment."""
    lines = ["| experiment | claim | verdict with the paper's noise | with exact noise |", "|---|---|---|---|"]
    for experiment, results in sections:
        found = {(j.claim.text, j.column): j.verdict for j in judgements(experiment, results)}
        for text in dict.fromkeys(claim.text for claim in experiment.claims):
            cells = [experiment.name, text, found.get((text, "published"), ""), found.get((text, "exact"), "")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
