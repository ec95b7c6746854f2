"""The report of a run or a saved model, from what its files say: plain words first, then numbers, then fine print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from silodp.digits import rounded_up, several
from silodp.report.chart import Chart, Line, drawn
from silodp.report.found import LABELS, LOGARITHMIC, Measured
from silodp.report.held_out import held_out_section
from silodp.report.html import Html, facts, items, joined, page, section, table, tag
from silodp.report.words import (
    BEFORE,
    FALSE_ALARMS,
    NO_EPSILON,
    RELEASED,
    SIMULATION,
    detection,
    in_odds,
    percent_up,
    several_of,
    suspicion,
    worst,
)

SIGNED = ("silo", "date (UTC)", "key, in words", "last entry of its ledger", "signature")
Pairs = Sequence[tuple[str, Any]]
ON_RECORDS = (
    "Numbers in this section that are not said to be private were computed on the records themselves. No epsilon "
    "covers them: leave them out before the page goes to somebody who may not see the records."
)
WOULD = "If the silos run the same plan themselves, this holds:"
UNSIGNED = "Nobody has signed this page. The hashes tell mixed-up and damaged files, not forgers."


@dataclass(frozen=True)
class Story:
    """What a report tells. No value of a record is in it; names of silos and columns are public."""

    title: str
    certificate: Mapping[str, Any] | None
    made: Pairs = ()  # how: algorithm, trust model, rounds ...
    versions: Mapping[str, str] = field(default_factory=dict)
    hashes: Pairs = ()
    found: Sequence[Measured] = ()
    history: Sequence[Mapping[str, float]] = ()
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by column of the history
    notes: Sequence[str] = ()  # what the section on what was found says beside
    held_out: Mapping[str, Any] | None = None  # released about held-out records, with standard errors
    signatures: Sequence[Sequence[str]] = ()  # rows of who signed what


def told(story: Story) -> str:
    """The whole page."""
    return page(
        story.title, *beginning(story.certificate), *sections_of(story.certificate), *how_good(story),
        *what_was_found(story), *not_covered(story.certificate), *signed(story), how_it_was_made(story),
    )  # fmt: skip


def how_good(story: Story) -> Iterator[Html]:
    if story.held_out is not None:
        yield held_out_section(story.held_out, story.certificate)


def signed(story: Story) -> Iterator[Html]:
    if story.signatures:
        yield section(
            "Signatures",
            tag("p", "Each silo counted its own releases and signed what they come to. All signatures were checked "
                "when this page was written. silodp verify checks them again, with public keys only."),
            table("Signed certificates", SIGNED, [hashes_small(row) for row in story.signatures]),
        )  # fmt: skip


def hashes_small(row: Sequence[str]) -> list[Any]:
    return [*row[:2], *(tag("span", cell, class_="hash") for cell in row[2:])]


def beginning(certificate: Mapping[str, Any] | None) -> Iterator[Html]:
    if certificate is None:
        yield tag("p", NO_EPSILON, class_="stamp")
        return
    if certificate["stamp"]:
        yield tag("p", SIMULATION, class_="stamp")


def sections_of(certificate: Mapping[str, Any] | None) -> Iterator[Html]:
    if certificate is not None:
        weakest = worst(certificate)
        yield plain_words(certificate, weakest)
        yield honest(certificate)
        yield each_silo(certificate["silos"])
        yield trade_off(weakest)


def plain_words(certificate: Mapping[str, Any], silo: Mapping[str, Any]) -> Html:
    epsilon, delta = silo["epsilon"], silo["delta"]
    rows = [(f"{100 * b:g} %", percent_up(suspicion(epsilon, b))) for b in BEFORE]
    return section(
        "In plain words",
        *([tag("p", WOULD)] if certificate["stamp"] else []),
        tag("p", in_odds(silo), class_="lead"),
        tag(
            "p", f"This is what epsilon {rounded_up(epsilon)} and delta {rounded_up(delta)} mean. They hold for "
            f"{certificate.get('protects', 'every record of every silo')}, whatever else is known. "
            "What is true of all records alike, such as that age goes with illness, can still be learnt.",
        ),
        table(f"How far a suspicion about {several_of(silo)} can grow", ("before", "after, at most"), rows, (1,)),
        tag("p", f"Compared are two worlds: {certificate['neighbours']}."),
    )  # fmt: skip


def honest(certificate: Mapping[str, Any]) -> Html:
    return section(
        "Who must be honest",
        items(certificate["honest"]),
        tag("p", f"Everybody else may look at {certificate['adversary_sees']}."),
        tag("p", f"If others join forces: {certificate['if_others_collude']}."),
        tag("p", f"The noise: {certificate['noise']}."),
    )


def each_silo(silos: Sequence[Mapping[str, Any]]) -> Html:
    groups, spent = silos[0]["several_records_of_one_person"], "spent" in silos[0]
    heads = (
        "silo", "records", "epsilon", "delta", *(["a record's epsilon over all runs, by its ledger"] if spent else []),
        *(f"epsilon of a person with {g['records']} records" for g in groups),
    )  # fmt: skip
    rows = [
        (
            silo["silo"], held(silo), rounded_up(silo["epsilon"]), rounded_up(silo["delta"]),
            *([over_runs(silo["spent"])] if spent else []),
            *(rounded_up(group["epsilon"]) for group in silo["several_records_of_one_person"]),
        )
        for silo in silos
    ]  # fmt: skip
    promises = table("Promise of each silo", heads, rows, range(1, len(heads)))
    return section("Each silo", promises, *releases(silos), *colluding(silos))


def held(silo: Mapping[str, Any]) -> str:
    return f"{silo['records']:,}" + (f", {silo['held_out']:,} of them held out" if silo.get("held_out") else "")


def over_runs(spent: Mapping[str, Any] | None) -> str:
    if spent is None:
        return "not told"
    return f"{rounded_up(spent['epsilon'])} in {several(spent['runs'], 'run')} at delta {rounded_up(spent['delta'])}"


def releases(silos: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """Once, where all silos released the same."""
    lines = [tuple(released(silo)) for silo in silos]
    if len(set(lines)) == 1:
        yield tag("p", "Every silo released:")
        yield items(lines[0])
        return
    rows = [(silo["silo"], joined(tag("div", line) for line in own)) for silo, own in zip(silos, lines, strict=True)]
    yield table("What each silo released", ("silo", "releases"), rows)


def released(silo: Mapping[str, Any]) -> Iterator[str]:
    for line in silo["releases"]:
        noise = f"noise {line['multiplier']:.4g} times what one record can change"
        words = f" ({RELEASED[line['stream']]})" if line["stream"] in RELEASED else ""
        yield f"{line['count']} × {line['stream']}{words}: {noise}; {line['sampling']}"


def colluding(silos: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    names = list(silos[0]["collusion"] or ())
    if names:
        heads = ("silo", *(f"epsilon if {name.replace('_', ' ')}" for name in names))
        rows = [(silo["silo"], *(rounded_up(silo["collusion"][name]) for name in names)) for silo in silos]
        yield table("What is left if others join forces", heads, rows, range(1, len(heads)))


def trade_off(silo: Mapping[str, Any]) -> Html:
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 120)])
    found = detection(silo, alarms)
    chart = Chart(
        "Most true cases that a test can find", "false alarms (share)", "found (share)",
        [
            Line("the most that any test can find", alarms.tolist(), found.tolist()),
            Line("guessing", [0.0, 1.0], [0.0, 1.0]),
        ],
    )  # fmt: skip
    finds = detection(silo, FALSE_ALARMS)
    rows = [(f"{100 * alarm:g} %", percent_up(float(share))) for alarm, share in zip(FALSE_ALARMS, finds, strict=True)]
    about = several_of(silo)
    says = "a record says" if about == "one record" else f"{about} say"
    words = (
        f"Somebody tests whether {says} one thing or another. With {rows[1][0]} false alarms the test finds at "
        f"most {rows[1][1]} of the true cases."
    )
    caption = tag("figcaption", words + " The nearer the curve is to guessing, the less a test can tell.")
    heads = ("false alarms", "found, at most")
    return section(
        "What a test could find out",
        tag("figure", drawn(chart, words), caption),
        table("Points of the curve", heads, rows, (1,)),
    )


def what_was_found(story: Story) -> Iterator[Html]:
    parts = [*measured(story.found), *(tag("p", note) for note in story.notes), *histories(story)]
    if parts:
        yield section("What was found", tag("p", ON_RECORDS, class_="soft"), *parts)


def measured(found: Sequence[Measured]) -> Iterator[Html]:
    if found:
        heads = ("measure", "value", "error (95 %)", "measured on")
        rows = [(each.name, each.shown, each.error_shown, each.on) for each in found]
        yield table("Results", heads, rows, (1, 2))


def histories(story: Story) -> Iterator[Html]:
    columns = [name for name in LABELS if story.history and name in story.history[0]]
    for column in columns:
        rounds = [row["round"] for row in story.history]
        values = [row[column] for row in story.history]
        levels = list(story.baselines.get(column, {}).items())
        label = LABELS[column]
        chart = Chart(
            label.capitalize(), "round", label, [Line("this run", rounds, values)], levels, log_y=column in LOGARITHMIC
        )
        words = ", ".join([f"From {values[0]:.4g} to {values[-1]:.4g}", *(f"{name} {y:.4g}" for name, y in levels)])
        yield tag("figure", drawn(chart, words), tag("figcaption", words + "."))


def not_covered(certificate: Mapping[str, Any] | None) -> Iterator[Html]:
    if certificate is not None:
        yield section("What is NOT covered", items(certificate["outside_the_guarantee"]))
        if certificate["public_preprocessing"]:
            lines = [line.removeprefix("public: ") for line in certificate["public_preprocessing"]]
            yield section("What was decided without the records, or taken as public", items(lines))


def how_it_was_made(story: Story) -> Html:
    hashes = [(name, tag("span", digest, class_="hash")) for name, digest in story.hashes]
    return section(
        "How it was made",
        facts("The run", [(name, value) for name, value in story.made if value not in (None, "")]),
        facts("SHA-256 of the files", hashes) if hashes else Html(""),
        facts("Software", list(story.versions.items())),
        tag("p", "The numbers of the guarantee were computed from the releases that were counted, not from this page."),
        *([] if story.signatures else [tag("p", UNSIGNED)]),
    )
