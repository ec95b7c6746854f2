"""What a fit promises, in plain words. Nothing in it was measured on records beyond what its epsilon covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silodp.digits import as_number, rounded_up
from silodp.report.held_out import NAMES, TOO_FEW, tells
from silodp.report.words import NO_EPSILON, ONE_MACHINE, SIMULATION, in_odds, worst

NOT_MEASURED = (
    "No accuracy is reported: held_out = 0.2 holds records out for a private look; score(X, y) measures it on records "
    "of yours, and no epsilon covers that."
)


def report(
    title: str,
    certificate: Mapping[str, Any] | None,
    delta_by_default: bool,
    held_out: Mapping[str, Any] | None = None,
) -> str:
    measured = NOT_MEASURED if held_out is None else "\n".join(figures(held_out, private=certificate is not None))
    if certificate is None:
        return "\n".join([title, "", f"{ONE_MACHINE} {NO_EPSILON}", "", measured, ""])
    return "\n".join([
        title, "", SIMULATION, "", *promise(certificate, delta_by_default), "", *table(certificate["silos"]), "",
        "Not covered:", *(f"  - {line}" for line in certificate["outside_the_guarantee"]),
        f"  - {persons(certificate['silos'])}",
        "", measured, "",
    ])  # fmt: skip


def figures(held_out: Mapping[str, Any], *, private: bool) -> list[str]:
    """What was released about held-out records, with standard errors."""
    noise = "noise of their own, which a real run's epsilon would cover" if private else "no noise"
    width = max(len("all"), *(len(silo["silo"]) for silo in held_out["silos"]))
    return [
        f"Measured on {held_out['records']} records that were held out, with {noise} (+- one standard error):",
        f"  {'all':<{width}}  {shown(held_out)}",
        *(f"  {silo['silo']:<{width}}  {shown(silo)}" for silo in held_out["silos"]),
    ]


def shown(told: Mapping[str, Any]) -> str:
    known = [name for name in NAMES if name in told and tells(told, name)]
    return "  ".join(f"{name} {told[name]['value']:.3f} +- {told[name]['error']:.3f}" for name in known) or TOO_FEW


def promise(certificate: Mapping[str, Any], delta_by_default: bool) -> list[str]:
    weakest = worst(certificate)
    epsilon, delta = weakest["epsilon"], rounded_up(weakest["delta"])
    chosen = ", chosen as min(1e-5, 1/(10 n))" if delta_by_default else ""
    return [
        f"Promise for {certificate['protects']}: epsilon {rounded_up(epsilon)}, delta {delta}{chosen}.",
        f"In words: {in_odds(weakest)}",
        f"Seen: {certificate['adversary_sees']}.",
        "These must be honest: " + "; ".join(certificate["honest"]) + ".",
    ]


def table(silos: list[Mapping[str, Any]]) -> list[str]:
    width = max(4, *(len(silo["silo"]) for silo in silos))
    lines = [f"{'silo':<{width}}  records  epsilon     delta  releases"]
    for silo in silos:
        released = ", ".join(f"{line['count']} x {line['stream']}" for line in silo["releases"])
        numbers = f"{silo['records']:>7}  {rounded_up(silo['epsilon']):>7}  {rounded_up(silo['delta'], 2):>8}"
        lines.append(f"{silo['silo']:<{width}}  {numbers}  {released}")
    return lines


def persons(silos: list[Mapping[str, Any]]) -> str:
    found = (silo["several_records_of_one_person"][0] for silo in silos)
    several = max(found, key=lambda group: as_number(group["epsilon"]))
    return f"a person with {several['records']} records in a silo has epsilon {rounded_up(several['epsilon'])}"
