"""The words of one experiment: its table in Markdown, its claims, what was chosen, what it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from silodp.digits import rounded_up
from silodp.reproduce.claims import Judgement, judgements, told_apart
from silodp.reproduce.experiment import WORDS, Column, Experiment
from silodp.reproduce.report import Cell, Results, Row, false_claims, rows_of
from silodp.reproduce.units import settings_in

LEVEL = "level"
HEADS = (
    LEVEL, "line", "measure", "published", "authors' way (not private)", "paper's noise", "exact", "verdict",
)  # fmt: skip


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
    left = [f"{p}, {line}, {WORDS[column]}" for p, line, column in missing_units(experiment, results)]
    parts += [f"Not run yet, or not as described now: {'; '.join(left)}."] if left else []
    return "\n\n".join(part for part in parts if part) + "\n"


def missing_units(experiment: Experiment, results: Results) -> list[tuple[str, str, Column]]:
    keys: list[tuple[str, str, Column]] = [(u.panel.name, u.line.name, u.column) for u in experiment.units()]
    return [key for key in keys if key not in results]


def table(experiment: Experiment, rows: Sequence[Row]) -> str:
    level = "" if experiment.levels is None else experiment.levels.label
    every = [cells_of(row) for row in rows]
    # The first column has no heading; a column that no row uses is left out.
    heads = ["", *(head for head in HEADS if any(cells[head] for cells in every))]
    lines = ["| " + " | ".join(level if head == LEVEL else head for head in heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cells[head] for head in heads) + " |" for cells in every]
    matches = ", ".join(dict.fromkeys(f"{m.label} ± {m.tolerance:g}" for m in experiment.metrics))
    told = [f"Match: {matches}. {experiment.reported}".rstrip()] if experiment.published else []
    return "\n\n".join(["\n".join(lines), *told, best_of_all(rows)])


def best_of_all(rows: Sequence[Row]) -> str:
    """The best private line with exact noise of every place and measure; the table above has its values."""
    found = {(row.panel, row.level, row.metric.label): row.best for row in rows if row.best is not None}
    if not found:
        return ""
    names = {best.line for best in found.values()}
    if len(names) == 1:
        return f"Best of silodp, in every row of places and measures: {names.pop()}."
    places = lambda panel, level: panel + ("" if level is None else f", {level:g}")
    lines = ["| best of silodp | measure | line |", "|---|---|---|"]
    lines += [f"| {places(p, level)} | {label} | {best.line} |" for (p, level, label), best in found.items()]
    return "\n".join(lines)


def cells_of(row: Row) -> dict[str, str]:
    """By the table's headings."""
    difference = "" if row.difference is None or not math.isfinite(row.difference) else f" ({row.difference:+.2g})"
    own = str(row.cells.get("authors", ""))
    told = [
        "" if row.level is None else f"{row.level:g}",
        row.line,
        row.metric.label,
        "" if row.published is None else f"{row.published:g}",
        f"{own}: {row.reproduced}" if row.reproduced else own,
        with_epsilon(row.cells.get("paper")),
        "" if "exact" not in row.cells else str(row.cells["exact"]),
        row.verdict + difference,
    ]
    return {"": row.panel} | dict(zip(HEADS, told, strict=True))


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
            names: dict[Column, str] = {"paper": f"{line}, {WORDS['paper']}", "exact": line}
            for column, name in names.items():
                cells = [own.get(level, {}).get(column) for level in levels]
                shown = [with_epsilon(cell) if column == "paper" else str(cell or "") for cell in cells]
                lines += [f"| {name} | " + " | ".join(shown) + " |"] if any(cells) else []
        best = {row.level: row.best for row in here if row.best is not None}
        shown = [best[level].line if level in best else "" for level in levels]
        tables.append("\n".join([*lines, "| best of silodp | " + " | ".join(shown) + " |"]))
    return "\n\n".join(tables)


def with_epsilon(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return str(cell) if cell.epsilon is None else f"{cell} [{rounded_up(cell.epsilon, 3)}]"


def claim_line(judgement: Judgement) -> str:
    name = {"paper": "with the paper's noise", "exact": "with exact noise"}[judgement.column]
    gain = 100 * median(judgement.gains)  # one place where the other side is near 0 would make any mean
    facts = [f"by {gain:+.{0 if abs(gain) >= 10 else 1}f} %" + (" in the median" if len(judgement.gains) > 1 else "")]
    facts += [told] if (told := told_apart([judgement])) else []
    if judgement.tested:
        facts.append(f"p < 0.05 in {judgement.significant} of {len(judgement.tested)}: {listed(judgement.tested)}")
    return f"- Claim: {judgement.claim.text} **{judgement.verdict}** {name} ({'; '.join(facts)})."


def listed(p_values: Sequence[float]) -> str:
    return ", ".join(f"{p:.2g}" for p in p_values)


def epsilon_lines(results: Results) -> list[str]:
    wrong = false_claims(results)
    if not wrong:
        return []
    places = "; ".join(
        f"{panel}, {line}: claims {claimed:g}, is {rounded_up(true, 3)}" for panel, line, claimed, true in wrong
    )
    return [f"The paper's noise does not give its epsilon in {len(wrong)} places: {places}."]


def missed(rows: Iterable[Row]) -> list[str]:
    """Published values that the best of silodp does not reach at the claimed epsilon; so too with the paper's model."""
    compared = [row for row in rows if row.beaten is not None]
    if not compared:
        return []
    told = [behind("The best of silodp", [(row, row.best) for row in compared if not row.beaten], len(compared))]
    if any(row.best != row.best_alike for row in compared):
        own = [(row, row.best_alike) for row in compared if not row.beaten_alike]
        told.append(behind("The best of silodp with the paper's own model", own, len(compared)))
    return told


def behind(who: str, rows: Sequence[tuple[Row, Cell | None]], compared: int) -> str:
    if not rows:
        return f"{who}, at the claimed epsilon, is at least as good as all {compared} published values."
    names = "; ".join(
        f"{row.panel}{'' if row.level is None else f' {row.level:g}'}, {row.line}, {row.metric.label}: "
        f"{row.published:g} against {best}{with_that_noise(row)}"
        for row, best in rows
    )
    return f"{who} misses {len(rows)} of {compared} published values: {names}."


def with_that_noise(row: Row) -> str:
    cell = row.cells.get("paper")
    return (
        ""
        if cell is None or cell.epsilon is None
        else f" (the paper's noise gives epsilon {rounded_up(cell.epsilon, 3)})"
    )


def effort(experiment: Experiment, results: Results) -> str:
    seeds = "seed" if len(experiment.seeds) == 1 else "seeds"
    return f"{len(experiment.seeds)} {seeds}; {minutes(results.values())}."


def minutes(results: Iterable[dict[str, Any]]) -> str:
    """CPU time; runs from before it was counted have the clock's, with other runs beside them."""
    known = list(results)
    cpu, clock = (sum(result.get(key, 0.0) for result in known) / 60 for key in ("cpu_seconds", "seconds"))
    counted, timed = f"{cpu:.1f} CPU minutes", f"{clock:.1f} minutes by the clock"
    if cpu and clock:
        return f"{counted} and, for runs whose CPU time was not counted, {timed}"
    return timed if clock else counted


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
            for i, measure in enumerate(chosen_by(experiment)):
                values = [across_levels(result, key, grid, i) for key, grid in line.search.items()]
                bullets.append(f"- {where}{line.name}{measure} ({tried} tried): {', '.join(values)}")
    if not bullets:
        return ""
    head = "Settings chosen, not privately (\\* lies at an end of three values or more: a wider grid might do better):"
    return "\n".join([head, "", *bullets])


def chosen_by(experiment: Experiment) -> list[str]:
    """Words for each of a line's settings: one, or one for each metric."""
    return [f", by {metric.label}" for metric in experiment.metrics] if experiment.search.each else [""]


def across_levels(result: dict[str, Any], key: str, grid: Sequence[Any], number: int = 0) -> str:
    """number: which of the settings, where each metric has its own."""
    ends = (grid[0], grid[-1]) if len(grid) > 2 else ()
    chosen = [settings_in(level)[number][key] for level in result["levels"]]
    words = [f"{value:g}" + ("\\*" if value in ends else "") for value in chosen]
    return f"{key.rpartition('.')[2]} {words[0] if len(set(words)) == 1 else ' / '.join(words)}"
