"""What the commands print: runs, sweeps, accounts and the algorithms there are."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from silodp import registry
from silodp.digits import rounded_up

if TYPE_CHECKING:
    from silodp.algorithms.entry import Entry

console = Console()

MESSAGES = """bits of one message: 32 d; with a compressor (untrusted) rand-k 32 k + 64, natural 9 d, qsgd
ceil(log2(2 levels + 1)) d + 32; through a shuffler, a message for every record of the round
n: records of a silo, b: batch, K: local steps, R: rounds, N: silos, d: parameters"""


def print_overview() -> None:
    """All names, from the registry alone: no family's file is imported."""
    told(f"{registry.AUTO}: {registry.AUTO_SENTENCE}")
    for family, names in registry.FAMILIES.items():
        told(f"{family}: {registry.SENTENCES[family]}\n  {', '.join(names)}")
    outside = [name for name in registry.names("algorithm") if not registry.is_own("algorithm", name)]
    if outside:
        told(f"from outside:\n  {', '.join(outside)}")
    for title, kind in (("trust models", "channel"), *((f"{kind}s", kind) for kind in OTHER_KINDS)):
        told(f"{title}: {', '.join(registry.names(kind))}")
    told(f"datasets: {', '.join(registry.DATASETS)}")
    told(f"partitions: {', '.join(registry.PARTITIONS)}")
    told("`silodp list NAME` says more about an algorithm: paper, theorems, rate and costs.")


OTHER_KINDS = ("compressor", "randomizer", "model")


def told(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def algorithm_row(name: str, entry: Entry) -> dict[str, Any]:
    """An algorithm's entry as plain data."""
    return {
        "name": name,
        "trust": list(registry.names("channel") if entry.trusts is None else entry.trusts),
        "private": entry.private,
        "summary": entry.summary,
        "paper": entry.paper,
        "proved": dict(entry.proved),
        "rate": entry.rate,
        "gradients_per_round": entry.cost,
        "bits_per_round": entry.bits,
    }


def print_algorithm(row: dict[str, Any]) -> None:
    """Some lines for each: a table of all this does not fit on a screen."""
    lines = [f"  paper: {row['paper']}"]
    for trust in row["trust"]:
        utility = row["proved"].get(trust, "no theorem on its utility here")
        lines.append(f"  {trust}: {'private; ' + utility if row['private'] else 'adds no noise, not private'}")
    lines += [f"  rate: {row['rate']}"] if row["rate"] else []
    lines.append(f"  a silo's round: record gradients {row['gradients_per_round']}; bits up {row['bits_per_round']}")
    console.print(f"[bold]{row['name']}[/bold]: {row['summary']}", highlight=False)
    told("\n".join(lines))


def print_bounds(found: dict[str, Any]) -> None:
    """The setting, then a table for each thing that is bounded: upper bounds, then lower ones."""
    told(", ".join(f"{letter} = {number:.6g}" for letter, number in found["setting"].items()))
    told("n: records of the smallest silo, N: silos in a round, d: parameters, R: rounds, K: local steps, B: batch,")
    told("b: batch of local steps (all records when left out), b0: batch of the first round")
    for of in dict.fromkeys(row["of"] for row in found["bounds"]):
        table = Table("", of, "trust", "value", box=None)
        for column in table.columns:
            column.overflow = "fold"
        for row in found["bounds"]:
            if row["of"] == of:
                lacks = f"\n  needs {row['missing']}" if row["value"] is None else ""
                fails = f"\n  says nothing here, not met: {'; '.join(row['unmet'])}" if row["unmet"] else ""
                words = Text(f"{row['method']} ({row['paper']})\n  {row['formula']}{lacks}{fails}")
                value = "" if lacks else f"{row['value']:.3g}"
                table.add_row("at least" if row["lower"] else "at most", words, row["trust"], value)
        console.print(table)
    told("Constants that O(.) and Omega(.) hide are 1, and so is F(x0) - min F: compare rates, not runs.")
    told("Steps and clips are taken to be those of each theorem.")


def print_summary(summary: dict[str, Any], directory: Path) -> None:
    from silodp.data.types import Note  # here, because it brings pandas and scikit-learn

    table = Table(show_header=False, box=None)
    final = summary["final"]
    guarantee = "none (no noise)"
    if summary["private"]:
        guarantee = (
            f"({rounded_up(summary['epsilon'])}, {rounded_up(summary['delta'])})-DP for "
            f"{summary.get('protects', 'every record of every silo')}"
        )
    lines: dict[str, str] = {
        "algorithm": summary["algorithm"],
        "trust model": summary["trust"],
        "guarantee": guarantee,
        "rounds": f"{final['round']:.0f}",
        "objective": f"{final['objective']:.6g}",
        "squared gradient norm": f"{final['gradient_norm2']:.4g}",
    }
    lines |= {k.replace("_", " "): f"{v:.4f}" for k, v in final.items() if k.startswith("test_")}
    lines |= {
        "sent up, down": f"{final['bits_up'] / 8e6:.3g} MB, {final['bits_down'] / 8e6:.3g} MB",
        "record gradients": f"{final['record_gradients']:,.0f}",
        "engine": f"{summary['engine']} ({summary['engine_reason']})",
        "time": ", ".join(f"{k.replace('_seconds', '')} {v:.1f} s" for k, v in summary["timing"].items()),
    }
    methods = summary.get("engine_methods", {})  # older runs have none
    if len(set(methods.values())) > 1:
        lines |= {f"gradient of {name}": method for name, method in methods.items()}
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table)
    print_chosen(summary["chosen_by_theory"])
    if not math.isfinite(final["objective"]):
        console.print("the run diverged: lower algorithm.step_size", style="yellow", markup=False)
    if summary["stamp"]:
        console.print(summary["stamp"], style="yellow", markup=False)
    for note in map(Note.read, summary["preprocessing"]):
        if not note.public:
            console.print(str(note), style="yellow", markup=False, soft_wrap=True)
    console.print(f"files in {directory}", markup=False, soft_wrap=True)


def print_selection(chosen: Any, directory: Path) -> None:
    values = ", ".join(f"{key} = {value}" for key, value in chosen.outcome.values.items())
    column = chosen.column
    console.print(f"chosen: {values}; {column} {chosen.outcome.history[-1][column]:.6g}", markup=False)
    console.print(
        f"epsilon of one run {rounded_up(chosen.outcome.epsilon)}; of choosing the best of a random number of runs "
        f"{rounded_up(chosen.epsilon)}" + (", if the test records are public" if column.startswith("test_") else ""),
        markup=False,
    )
    console.print(f"results in {directory}", markup=False)


def print_chosen(options: dict[str, Any]) -> None:
    if options:
        shown = ", ".join(f"{name} = {value:.5g}" for name, value in options.items())
        console.print(f"chosen by theory: {shown}", markup=False, highlight=False)


def print_expectations(expected: dict[str, Any]) -> None:
    """What `silodp plan` tells."""
    told(f"{expected['records']} records in {expected['silos']} silos, {expected['parameters']} parameters")
    if expected["whiten"] is not None:
        print_whitening(**expected["whiten"])
    for reason in expected["why"]:
        told(f"  because {reason}")
    told("  " + ", ".join(f"{key} {value}" for key, value in expected["chosen"].items()))
    noise = Table("stream", "releases", "noise of one, in clip norms", title="on the average of all silos")
    for row in expected["noise"]:
        noise.add_row(row["stream"], str(row["releases"]), "-" if row["length"] is None else f"{row['length']:.3g}")
    console.print(noise)
    trust = Table("trust model", "noise of a number, in clip norms", "relative", title="what trust buys")
    for row in expected["trust"]:
        cells = ["not here" if row[key] is None else f"{row[key]:.3g}" for key in ("noise", "relative")]
        trust.add_row(row["trust"], *cells)
    console.print(trust)


def print_whitening(moment: str, share: float, centre: float, clip: float) -> None:
    asked = {"full": "second moment", "diagonal": "mean squares", "blocks": "second moments of blocks"}[moment]
    does = {"full": "whitens them", "diagonal": "gives each its scale", "blocks": "whiten each block"}[moment]
    before = f"first the features' mean ({centre:.0%} of the budget) and" if centre else "first"
    told(f"{before} the features' {asked} ({share:.0%} of the budget), which {does}; then:")


def print_errors(found: dict[str, Any]) -> None:
    """Expected error against epsilon, silos and trust, and what `auto` takes."""
    what = {"logistic": "share of wrong classes", "linear": "unexplained share of the variance"}[found["kind"]]
    title = f"expected error ({what}) on a made-up task, ± over {found['draws']} draws of the noise"
    table = Table("epsilon", *found["lines"], title=title)
    for i, epsilon in enumerate(found["epsilons"]):
        cells = (f"{row[i]['mean']:.3f} ± {row[i]['deviation']:.3f}" for row in found["lines"].values())
        table.add_row(f"{epsilon:g}", *cells)
    console.print(table)
    told("; ".join(f"{name}: {level:.3f}" for name, level in found["levels"].items()))
    for choice, where in reversed(by_choice(found).items()):
        told(f"auto takes {choice}: {where}")


def by_choice(found: dict[str, Any]) -> dict[str, str]:
    """What `auto` takes, and where; of the commonest choice no places are told."""
    cells = [
        (name, epsilon, choice)
        for name, row in found["takes"].items()
        for epsilon, choice in zip(found["epsilons"], row, strict=True)
    ]
    (commonest, count), *others = Counter(choice for *_, choice in cells).most_common()
    places: dict[str, str] = {}
    for choice, _ in others:
        lines = {name: [f"{e:g}" for n, e, c in cells if n == name and c == choice] for name in found["takes"]}
        places[choice] = "; ".join(f"{name} at epsilon {', '.join(at)}" for name, at in lines.items() if at)
    return {commonest: "everywhere" if count == len(cells) else "everywhere but there", **places}


def print_landscape(found: dict[str, Any]) -> None:
    """Noise against epsilon, silos and trust."""
    title = "length of the noise over that of the longest gradient, the whole budget in one release"
    table = Table("epsilon", *found["nu"], title=title)
    for i, epsilon in enumerate(found["epsilons"]):
        table.add_row(f"{epsilon:g}", *(f"{row[i]:.3g}" for row in found["nu"].values()))
    console.print(table)
    from silodp.plan.auto import CLASSES, SQUARES

    limits = f"`auto` lowers its clip norms from {CLASSES.noise:g} on (squares: {SQUARES.noise:g})."
    told(f"At 1 noise is as long as the longest gradient. {limits}")


def print_account(result: dict[str, Any]) -> None:
    how = f"{result['calibration']} calibration, delta {result['delta']:g}"
    title = f"{result['algorithm']}, trust model {result['trust']}, {how}"
    table = Table(
        "silo", "records", "epsilon", "stream", "releases", "noise / sensitivity", "noise / clip", title=title
    )
    for silo in result["silos"]:
        head = (silo["silo"], str(silo["records"]), rounded_up(silo["epsilon"], 5))
        for i, row in enumerate(silo["releases"]):
            table.add_row(*(head if i == 0 else ("", "", "")), *release_cells(row))
    console.print(table)
    print_chosen(result["chosen_by_theory"])
    if "note" in result:
        console.print(result["note"], markup=False)
    paper = result["paper"]
    if paper is not None and not paper["admissible"]:
        console.print(f"{paper['formula']}: the paper's conditions admit no noise level here:", markup=False)
        for reason in paper["reasons"]:
            console.print(f"  {reason}", markup=False)
    elif paper is not None:
        verdict = "VIOLATED" if paper["violated"] else "holds"
        console.print(
            f"the paper's own noise ({paper['formula']}) claims epsilon {paper['claimed_epsilon']:g} and really gives "
            f"{rounded_up(paper['true_epsilon'], 5)}: the claim {verdict}",
            markup=False,
        )
        for row in paper["releases"]:
            stream, count, multiplier, std = release_cells(row)
            console.print(f"  {count} x {stream}: {multiplier} x sensitivity, {std} x clip", markup=False)


def release_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["stream"], str(row["count"]), f"{row['multiplier']:.5g}", f"{row['std_over_clip']:.5g}"


def shown(value: float | bool | str) -> str:
    """A value of a grid as its config would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def print_outcomes(outcomes: list[Any], best: int, column: str) -> None:
    keys = list(outcomes[0].values)
    table = Table(*keys, "epsilon", column, "")
    for i, outcome in enumerate(outcomes):
        epsilon = "-" if outcome.epsilon is None else rounded_up(outcome.epsilon)
        last = f"{outcome.history[-1][column]:.6g}"
        table.add_row(*(shown(outcome.values[k]) for k in keys), epsilon, last, "best" if i == best else "")
    console.print(table)
    console.print(f"best by {column}: not private: selected on private data", style="yellow", markup=False)


def print_findings(findings: list[Any]) -> None:
    table = Table("trust", "check", "", "")
    for finding in findings:
        style = None if finding.passed else "bold red"
        table.add_row(
            finding.trust, finding.check, "passed" if finding.passed else "FAILED", finding.words, style=style
        )
    console.print(table)
