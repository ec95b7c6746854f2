"""The pages of the docs: a short one with claim, verdict and figure of each paper, and one for each paper's details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silodp.reproduce.claims import Judgement, judge, judgements, setting_words, told_apart
from silodp.reproduce.experiment import Column, Experiment
from silodp.reproduce.report import Results, Row, epsilon_claims, false_claims, rows_of
from silodp.reproduce.text import as_markdown, minutes
from silodp.threefry import NORMALS

Section = tuple[Experiment, Results]


@dataclass(frozen=True)
class Paper:
    """What the page says of a paper beside what is counted."""

    title: str
    claim: str = ""  # what it says of its experiments
    beside: str = ""  # what to know beside the verdict
    figure: str = ""  # the one that is shown


# By the first word of an experiment's name.
PAPERS = {
    "psgm": Paper(
        "Efficient Private Federated Non-Convex Optimization with Shuffled Model",
        "MB-PSGM-FG trains a small network on California Housing in the shuffle model; losses fall as epsilon grows.",
        "The authors call the local level of a message epsilon, and 200 records share one message. Our runs have a "
        "message for every record. One of five starts stays on a plateau for 300 rounds and makes most of the spread.",
        "psgm-fig1",
    ),
    "spider": Paper(
        "Private Non-Convex Federated Learning Without a Trusted Server (Lowy, Ghafelebashi, Razaviyayn 2023)",
        "FedProx-SPIDER has a lower test error than MB-SGD and Local SGD on MNIST, CIFAR-10 and WBCD.",
        "SPIDER's restart interval q is searched. At q = 1 it never takes a difference: it is DP-GD, and such a place "
        "says nothing for SPIDER. CIFAR-10 (spider-fig6, spider-fig7) is not counted: our runs have 200 of 6,000 "
        "images of a class and one or two seeds, and most errors are near that of guessing; SPIDER is behind MB-SGD in "
        "five of six places there. The authors' programs choose by test "
        "accuracy and clip per tensor or not at all; ours clip every record's gradient and choose by train loss.",
        "spider-fig4",
    ),
    "soteria": Paper(
        "SoteriaFL (Li, Zhao, Li, Chi 2022)",
        "Shifted compression beats direct compression, and compressed messages beat uncompressed ones per bit.",
        "The figures were made with the mean of a batch clipped, which protects no record. That way is run with five "
        "seeds on a9a and with one on MNIST. Our private runs clip every record's gradient, which shortens a step of "
        "the same step size: the paper's step sizes are kept where it states them, so lower values are to be expected; "
        "on MNIST those of LDP-SGD and LDP-SVRG, which it does not state, are searched. On MNIST the best of silodp is "
        "another model, softmax on public features of the images, whose settings were chosen with a look at test "
        "images; on a9a it starts nearer to zero, but is ahead from the paper's own start too.",
        "soteria-fig2",
    ),
    "diff2": Paper(
        "DIFF2 (Murata, Suzuki 2023)",
        "DIFF2-GD reaches lower losses and gradient norms than DP-GD under a trusted server.",
        "The figure of two classification sets (diff2-fig3) has all records, but 100 rounds where the paper has 2,000, "
        "and few settings; of these DIFF2-GD does best with steps half as long as DP-GD's. On 10,000 records of each "
        "set (diff2-few) the noise is some 50 times larger and no claim is judged. Settings are chosen by train loss; "
        "the paper tunes for each measure, as diff2-measures does for California and, at epsilon 3, Gas Turbine.",
        "diff2-fig1",
    ),
    "mu2": Paper(
        "Private and Federated Stochastic Convex Optimization (Reshef, Levy 2024)",
        "DP-mu2-FL trains softmax regression on MNIST in one pass, with trusted and untrusted servers.",
        "Its rho of 4, 8 and 16 are epsilons of 24, 65 and 195. In its ball of radius 0.05 lies no good model: clipped "
        "corrections in a larger ball do better at epsilon 1 to 8 (mu2-clipped). Beside mu2's one pass stand full "
        "batches of DP-GD, whose number is searched from 50 to 200: they are ahead in all six places. mu2 comes "
        "nearest at epsilon 8 under a trusted server, with a test accuracy of .909 against .917.",
        "mu2-table1",
    ),
}

HEAD = """# Reproduction of the five papers

What each paper claims of its experiments, and what our runs of its algorithms show. A page for each paper has the
tables, every claim, the settings and the figures.

Written by `silodp reproduce --docs` from the results of `make reproduce`; `silodp reproduce NAME` runs one of them
again, with `--quick` in about two minutes, with `--full` every setting of its grid to the end. Compact results (every
seed's value, curves at 40 points or fewer) lie in [reproduction](reproduction).
"""

WORDS = """## How to read the tables

- **published**: printed in the paper, or read off its figure (about ± 0.01).
- **authors' way (not private)**: the line as the authors' program runs it, where that differs from the paper. The
  program of SoteriaFL clips the mean of a batch and not each record's gradient, so its noise protects nobody.
- **paper's noise**: our run of the paper's algorithm, with per-record clipping, under the paper's own calibration, in
  the setting found with exact noise. The epsilon in brackets is what that noise really gives, whatever is claimed.
- **exact**: the same run with exactly the noise that the epsilon in question needs. silodp's own lines stand
  only here, as do references without privacy and what was not run with the paper's noise.
- **best of silodp**: the best line with exact noise at the same epsilon, trust model and data, the paper's own lines
  included. It is chosen among them by the number shown.
- **verdict**: our run with the paper's noise (with exact noise where there is no other) against the published value;
  a match is within the tolerance given below each table.

What is listed as chosen below a table was searched on the private records: the searches are not covered by the epsilons
here. The papers' searches were not either. Deviations are over seeds (start and noise; one split of the data), with the
smallest and largest value where seeds differ widely. With fewer than three seeds nothing is tested.
"""


def pages(sections: Sequence[Section], missing: Sequence[str]) -> dict[str, str]:
    """Every page by its path below docs/."""
    by_paper: dict[str, list[Section]] = {}
    for section in sections:
        by_paper.setdefault(paper_of(section[0]), []).append(section)
    ordered = sorted(by_paper, key=lambda paper: [*PAPERS, paper].index(paper))
    parts = [HEAD, *(paper_summary(paper, by_paper[paper]) for paper in ordered), overview(sections)]
    parts += [f"Not run yet, or not as they are described now: {', '.join(missing)}."] if missing else []
    whole = {"reproduction.md": "\n\n".join([*parts, WORDS])}
    return whole | {f"reproduction/{paper}.md": details(paper, own) for paper, own in by_paper.items()}


def paper_of(experiment: Experiment) -> str:
    return experiment.name.partition("-")[0]


def details(paper: str, sections: Sequence[Section]) -> str:
    title = PAPERS.get(paper, Paper(paper)).title
    parts = [f"# {title}\n\nThe [summary](../reproduction.md) says how to read the tables."]
    for experiment, results in sections:
        parts += [as_markdown(experiment, results), f"![{experiment.name}]({experiment.name}.png)\n"]
    return "\n\n".join(parts)


def paper_summary(paper: str, sections: Sequence[Section]) -> str:
    """Claim, verdict, one figure."""
    known, own = PAPERS.get(paper, Paper(paper)), distinct(sections)
    # Where none is chosen, one with published values or claims and few panels: it is read at a glance.
    plain = min(own, key=lambda s: (not s[0].published, not s[0].claims, len(s[0].panels)))[0].name
    shown = known.figure if known.figure in (section[0].name for section in sections) else plain
    told = " ".join(words for words in (verdict(own), values_told(own)) if words)
    parts = [f"## {known.title}", f"**Claim.** {known.claim}" if known.claim else "", f"**Verdict.** {told}"]
    parts += [claims_told(own), chosen_apart(own), known.beside]
    parts += [f"Tables and settings: [{paper}](reproduction/{paper}.md).", f"![{shown}](reproduction/{shown}.png)"]
    return "\n\n".join(part for part in parts if part)


def verdict(sections: Sequence[Section]) -> str:
    """How the claims fare, in one sentence; with exact noise where that was run."""
    judged = [own.get("exact") or own["paper"] for own in claims_of([s for s in sections if not s[0].again]).values()]
    if not judged:
        return ""
    wins = [(sum(j.wins for j in own), sum(len(j.gains) for j in own)) for own in judged]
    whole, none = sum(won == places for won, places in wins), sum(won == 0 for won, _ in wins)
    return (
        f"Of {len(wins)} claims {whole} hold everywhere, {len(wins) - whole - none} in some places and {none} nowhere."
    )


def distinct(sections: Sequence[Section]) -> list[Section]:
    """Without figures all of whose runs another figure of the paper has too."""
    runs = [{result.get("fingerprint", "") for result in results.values()} for _, results in sections]
    again = lambda i: any(runs[i] < other or (runs[i] == other and j < i) for j, other in enumerate(runs) if j != i)
    return [section for i, section in enumerate(sections) if not again(i)]


def values_told(sections: Sequence[Section]) -> str:
    """How the published values fare, in one sentence for each way of running the lines."""
    named = published_once(sections)
    if not named:
        return "The paper prints no values."
    rows = [row for _, row in named]
    authors = [row.reproduced for row in rows if row.reproduced]
    ours = [row.verdict for row in rows if row.verdict]
    reached = [row.beaten for row in rows if row.beaten is not None]
    alike = [row.beaten_alike for row in rows if row.beaten_alike is not None]
    told = [f"The paper has {len(rows)} values (those that two figures or tables share are counted once)."]
    if authors:
        near, missed = (
            authors.count("within the seeds' spread"),
            [each for each in named if each[1].reproduced == "miss"],
        )
        others = [f"{near} more lie within the spread of our seeds"] * bool(near)
        others += [f"{len(missed)} are missed ({'; '.join(miss(*each) for each in missed)})"] * bool(missed)
        told.append(
            f"Run the authors' way, which is not private, {authors.count('match')} of {len(authors)} are matched"
            + "".join(f", {each}" for each in others)
            + "."
        )
    told.append(
        f"Our private runs of the same lines match {ours.count('match')} and better {ours.count('better')} "
        f"of {len(ours)}."
    )
    own = f"; with the paper's own model, {sum(alike)} of {len(alike)}" if alike != reached else ""
    told.append(
        f"The best of silodp at the claimed epsilon is at least as good as {sum(reached)} of {len(reached)}{own}."
    )
    return " ".join(told)


def published_once(sections: Sequence[Section]) -> list[tuple[str, Row]]:
    """Rows with a published value, by the figure; a number that the paper prints twice counts where it stands first."""
    found: dict[tuple[object, ...], tuple[str, Row]] = {}
    for section in sections:
        for row in rows_of(*section):
            if row.published is not None:
                place = (row.panel, row.level, row.line, row.metric.label, row.published)
                found.setdefault(place, (section[0].name, row))
    return list(found.values())


def miss(figure: str, row: Row) -> str:
    return f"{row.line} in {figure}: {row.cells['authors'].mean:.3g} for {row.published:g}"


def claims_of(sections: Sequence[Section]) -> dict[str, dict[Column, list[Judgement]]]:
    """By claim and column, how it fares in each figure."""
    found: dict[str, dict[Column, list[Judgement]]] = {}
    for section in sections:
        for judgement in judgements(*section):
            text, again = judgement.claim.text, section[0].again
            text = f"{text.removesuffix('.')} ({again})." if again else text
            found.setdefault(text, {}).setdefault(judgement.column, []).append(judgement)
    return found


def claims_told(sections: Sequence[Section]) -> str:
    """A row for each claim of the paper, over all places of all its figures."""
    found = claims_of(sections)
    if not found:
        return ""
    lines = ["| claim of a figure | with the paper's noise | with exact noise |", "|---|---|---|"]
    lines += [f"| {text} | {counted(own.get('paper'))} | {counted(own.get('exact'))} |" for text, own in found.items()]
    return "\n".join(lines)


def chosen_apart(sections: Sequence[Section]) -> str:
    """How often the search chose the setting in which a line is another algorithm."""
    found: dict[tuple[str, str], dict[tuple[str, str, int], bool]] = {}
    for experiment, results in sections:
        sides = [(claim.unless, name) for claim in experiment.claims if claim.unless for name in claim.better]
        for unless, name in sides:
            runs = {panel: r for (panel, line, column), r in results.items() if (line, column) == (name, "exact")}
            for panel, result in runs.items():
                settings = [level["setting"] for level in result["levels"]]
                if unless.keys() <= settings[0].keys():
                    own = found.setdefault((name, setting_words(unless)), {})
                    own |= {(experiment.name, panel, i): unless.items() <= s.items() for i, s in enumerate(settings)}
    return " ".join(
        f"The search chose {words} for {line} in {sum(places.values())} of {len(places)} places."
        f"{elsewhere(sections, line)}"
        for (line, words), places in found.items()
    )


def elsewhere(sections: Sequence[Section], line: str) -> str:
    """How a line fares by itself where it is the algorithm that its name says."""
    won: dict[str, list[bool]] = {}
    for experiment, results in sections:
        for claim in (claim for claim in experiment.claims if claim.unless and line in claim.better):
            judged = judge(experiment, results, claim.model_copy(update={"better": [line]}), "exact")
            kept = [gain > 0 for gain, apart in zip(judged.gains, judged.apart, strict=True) if not apart]
            won.setdefault(" and ".join(claim.than), []).extend(kept)
    places = max((len(each) for each in won.values()), default=0)
    if not places:
        return ""
    beaten = " and ".join(f"{than} in {sum(each)}" for than, each in won.items())
    return f" In the other {places}, {line} by itself beats {beaten} (exact noise)."


def counted(judged: Sequence[Judgement] | None) -> str:
    if not judged:
        return ""
    places, wins = sum(len(j.gains) for j in judged), sum(j.wins for j in judged)
    tested, sure = sum(len(j.tested) for j in judged), sum(j.significant for j in judged)
    facts = [told_apart(judged)] + [f"p < 0.05 in {sure} of {tested} tested"] * bool(tested)
    beside = "; ".join(fact for fact in facts if fact)
    return f"holds in {wins} of {places} places" + (f" ({beside})" if beside else "")


def overview(sections: Sequence[Section]) -> str:
    """The published values of every figure, and the time it all took."""
    # Figures of a paper share some of their runs: each counts once.
    each = {(e.paper, key, str(r.get("fingerprint"))): r for e, results in sections for key, r in results.items()}
    time = f"All runs took {minutes(each.values())}."
    told = [time, drawn_before(list(each.values()))]
    return "\n\n".join(["## Published values, figure by figure", values_table(sections), " ".join(filter(None, told))])


def drawn_before(results: Sequence[Mapping[str, Any]]) -> str:
    """Seeds are told beside results: who runs one again should know that it cannot come out the same."""
    count = sum(result.get("normals") != NORMALS for result in results)
    if not count:
        return ""
    return (
        f"{count:,} of {len(results):,} were drawn before simulations made their normal numbers as they do now: the "
        "same seeds give other numbers of the same law."
    )


def values_table(sections: Sequence[Section]) -> str:
    """For each experiment, how many published values were met and how often the paper's noise is too small."""
    heads = ["experiment", "published values", "matched the authors' way (not private)"]
    heads += ["matched or bettered by our private run of the line"]
    heads += ["reached by the best of silodp at the claimed epsilon", "the same with the paper's own model"]
    heads += ["runs whose noise is less than claimed"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for experiment, results in sections:
        rows = [row for row in rows_of(experiment, results) if row.verdict]
        wrong, claimed = false_claims(results), len(epsilon_claims(results))
        authors = [row.reproduced for row in rows if row.reproduced]
        met = f"{authors.count('match')} of {len(authors)}" if authors else ""
        good = sum(row.verdict in ("match", "better") for row in rows)
        reached, alike = sum(bool(row.beaten) for row in rows), sum(bool(row.beaten_alike) for row in rows)
        counts = [str(len(rows)), met, str(good), str(reached), str(alike)] if rows else ["none", "", "", "", ""]
        cells = [experiment.name, *counts, f"{len(wrong)} of {claimed}" if claimed else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
