"""The privacy statement of a run, written from the releases that were counted while it ran.

`settle` compares the count with the plan and refuses a run that released more, or with other noise, than planned. Its
numbers are the plan's own: what was told can end a run without a certificate, and can never make one look better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from silodp import registry
from silodp.channels.channel import Levels
from silodp.data.types import Note
from silodp.digits import known, rounded_up, together
from silodp.facts import Stream
from silodp.plan.claim import Claim
from silodp.plan.plan import Plan
from silodp.privacy import accountant
from silodp.privacy.kinds import Spent
from silodp.releases import Account, Tally

SIMULATED = "simulation: seeded noise, not private"
FLOAT_NOISE = "of a simulation, in float32 from a seed: its lowest bits, and whoever knows the seed, tell the values"
ROUNDING = 2e-6  # multipliers are counted in float32


class AccountingError(RuntimeError):
    """The run released something that its plan does not cover."""


@dataclass(frozen=True)
class Context:
    """What the certificate says beside the numbers."""

    notes: tuple[Note, ...] = ()
    stamp: str | None = SIMULATED
    versions: Mapping[str, str] = field(default_factory=dict)
    claim: Claim | None = None
    bounds: Mapping[str, str] = field(default_factory=dict)  # by stream: who vouches for its bound
    outside: tuple[str, ...] = ()  # parts that are not the library's own
    chosen: float | None = None  # epsilon of having been chosen privately among several
    made: Mapping[str, str] = field(default_factory=dict)  # which run this is (silodp.plan.identity)
    tested: bool = False  # whether something was measured on test records


def settle(plan: Plan, account: Account) -> list[list[Spent]]:
    """What each silo really spent; an error when that is not what the plan allows."""
    return [settled_silo(plan, silo, account) for silo in range(plan.facts.silos)]


def settled_silo(plan: Plan, silo: int, account: Account) -> list[Spent]:
    pairs = [(stream, account.tallies[stream.name]) for stream in plan.releases(silo)]
    return plan.spent(silo, [replace(stream, count=checked(plan, silo, stream, tally)) for stream, tally in pairs])


def checked(plan: Plan, silo: int, stream: Stream, tally: Tally) -> int:
    """How often the stream was released, if that and its noise are the plan's."""
    where = f"silo {silo}, stream {stream.name!r}"
    count, multiplier = int(np.asarray(tally.count)[silo]), float(np.asarray(tally.multiplier)[silo])
    if not 0 <= count <= stream.count or (plan.facts.counts_exactly and count != stream.count):
        raise AccountingError(f"{where}: {count} releases were counted, the plan has {stream.count}")
    least, most = (float(each[silo]) for each in plan.protection(plan.channel.accounted_as(stream)))
    if count and math.isnan(multiplier):
        raise AccountingError(f"{where}: a release had a bound below 0, which no noise fits; nothing is certified")
    nothing_moved = math.isinf(multiplier) and multiplier > 0  # no release of the stream depended on a record
    if count and not nothing_moved and not least * (1 - ROUNDING) <= multiplier <= most * (1 + ROUNDING):
        side = "more" if multiplier > most else "less"
        raise AccountingError(
            f"{where}: a release had noise multiplier {multiplier:.6g}, {side} than the plan's {least:.6g}; "
            "the run did not do what was planned"
        )
    return count


def certificate(plan: Plan, spent: Sequence[Sequence[Spent]], context: Context) -> dict[str, Any]:
    """The statement as plain data. `spent` is what `settle` returned."""
    channel, delta = plan.channel, plan.config.privacy.delta
    silos = [silo_statement(plan, i, own) for i, own in enumerate(spent)]
    worst = context.chosen or max(silo["epsilon"] for silo in silos)
    record = context.chosen or max(silo.get("record_epsilon", silo["epsilon"]) for silo in silos)
    claim = None if context.claim is None else context.claim.verdict(record) | {"delta": delta}
    return {
        "statement": statement(plan, worst, context),
        "stamp": context.stamp,
        "protects": f"{unit_of(plan)} every silo",
        "neighbours": neighbours(plan),
        "adversary_sees": channel.sees,
        "honest": list(channel.honest),
        "if_others_collude": channel.if_others_collude,
        "noise": FLOAT_NOISE if context.stamp else noise_of(plan),
        "calibration": plan.config.privacy.calibration,
        "claim": claim,
        "silos": silos,
        "bounds": dict(context.bounds),
        "outside_the_guarantee": [*context.outside, *outside(context)],
        "public_preprocessing": [str(note) for note in context.notes if note.public],
        "made": dict(context.made),
        "versions": dict(context.versions),
    }


def statement(plan: Plan, worst: float, context: Context) -> str:
    """One sentence, true as it stands: nobody is protected by a simulation."""
    name = plan.config.algorithm.name
    what = name if context.chosen is None else f"the best of a random number of runs of {name}"
    promise = f"({rounded_up(worst)}, {rounded_up(plan.config.privacy.delta)})-differentially private"
    if context.stamp is None:
        return f"{what} {setting_of(plan)}: {unit_of(plan)} every silo is {promise}"
    return f"Simulation of {what} {setting_of(plan)}: run for real, {unit_of(plan)} every silo would be {promise}"


def setting_of(plan: Plan) -> str:
    """In the trust model's own words; one from outside may have inherited those of another."""
    trust = plan.config.privacy.trust
    return plan.channel.setting if registry.is_own("channel", trust) else f"with the trust model {trust!r}"


def noise_of(plan: Plan) -> str:
    """As the trust model draws it for real; what one from outside draws, nobody has looked at."""
    own = registry.is_own("channel", plan.config.privacy.trust)
    return plan.channel.noise if own else "of a trust model from outside: not verified"


def silo_statement(plan: Plan, silo: int, own: Sequence[Spent]) -> dict[str, Any]:
    delta, held = plan.config.privacy.delta, sum(plan.facts.held_out[silo : silo + 1])
    worst = max(plan.apart(own), key=lambda part: accountant.epsilon(part, delta), default=own)
    epsilon, record = plan.cost(silo, own), accountant.epsilon(worst, delta)
    alone, persons = plan.config.privacy.unit == "record", of_persons(plan, own)
    group, mu = plan.together(silo), accountant.gdp(worst)
    # Sampled releases need a search for every size of group: only where groups were asked for.
    curve = not alone or accountant.gdp(persons) is not None
    grouped = {"groups": groups(persons, delta, plan.facts.sizes[silo])} if curve else {}
    return grouped | ({} if alone else {"record_epsilon": record}) | {
        "silo": plan.facts.names[silo],
        "records": plan.facts.sizes[silo] + held,
        "held_out": held,
        "records_together": group,  # epsilon, gdp_mu, curve and collusion are of so many
        "epsilon": epsilon,
        "delta": delta,
        "gdp_mu": None if mu is None else group * mu,
        "curve": curve_points(worst, epsilon, group),
        "releases": [release_of(plan, silo, s) for s in own],
        "collusion": known_levels(plan.if_others_collude(silo, own, delta, group)),
        "several_records_of_one_person": [
            {"records": k, "epsilon": known(accountant.group_epsilon(persons, delta, k)), "delta": delta}
            for k in (2, 5)
        ],
    }  # fmt: skip


def unit_of(plan: Plan) -> str:
    """What one guarantee covers, as the statement says it."""
    unit = plan.config.privacy.unit
    if unit == "record":
        return "every record of"
    return "all records together of" if unit == "user" else f"any {unit} records together of"


def neighbours(plan: Plan) -> str:
    """The two worlds that the promise compares."""
    unit = plan.config.privacy.unit
    if unit == "record":
        moved = "one record of one silo is replaced by any other"
    else:
        moved = f"{'all' if unit == 'user' else f'up to {unit}'} records of one silo are replaced by any others"
    return f"{moved}; the silos' sizes are public"


def known_levels(levels: Levels) -> dict[str, float | None] | None:
    return None if levels is None else {who: known(epsilon) for who, epsilon in levels.items()}


def groups(own: Sequence[Spent], delta: float, records: int) -> list[dict[str, Any]]:
    """The epsilon of k records of a silo that change together, from one to all of them."""
    sizes = sorted({k for e in range(10) for k in (10**e, 2 * 10**e, 5 * 10**e) if k < records} | {records})
    return [{"records": k, "epsilon": known(accountant.group_epsilon(own, delta, k))} for k in sizes]


def of_persons(plan: Plan, own: Sequence[Spent]) -> Sequence[Spent]:
    """What may be spent on a person's records, some of which may be trained on and some held out.

    For Gaussian releases k records in one part are the worst case: j and k - j of them have (j^2 + (k - j)^2) mu^2.
    For others all is counted for all records.
    """
    apart = plan.apart(own)
    levels = [accountant.gdp(part) for part in apart]
    return own if None in levels or not levels else apart[int(np.argmax(levels))]  # type: ignore[arg-type]


def release_of(plan: Plan, silo: int, spent: Spent) -> dict[str, Any]:
    line = spent.releases.stream
    about = {"held_out": True} if plan.stage_of(line).held_out else {}
    return release_line(spent, float(plan.std_over_clip(line)[silo])) | about


def release_line(spent: Spent, std_over_clip: float) -> dict[str, Any]:
    kind = spent.releases.sampling
    return {
        "stream": spent.releases.stream,
        "count": spent.releases.count,
        "multiplier": spent.multiplier,
        "std_over_clip": std_over_clip,
        "sampling": kind.words,
    } | kind.level(spent.multiplier)


def curve_points(own: Sequence[Spent], epsilon: float, records: int) -> list[dict[str, float]]:
    if not math.isfinite(epsilon) or epsilon == 0:
        return []
    grid = [epsilon * factor for factor in (0.25, 0.5, 1.0, 1.5, 2.0)]
    return [{"epsilon": e, "delta": accountant.group_delta(own, e, records)} for e in grid]


def outside(context: Context) -> list[str]:
    tried = "settings that were tried before this run" if context.chosen is None else "trials before this selection"
    return [
        *(str(note) for note in context.notes if not note.public),
        "the process that starts a run on one machine reads all silos' records",
        *(["the history (objective, gradient norm) is measured on the private records"] * (context.chosen is None)),
        *(["what is measured on test records (test loss, test accuracy) tells about those"] * context.tested),
        f"{tried} and compared on these records: what was learnt from them comes on top",
    ]


def as_text(tree: Mapping[str, Any]) -> str:
    """The certificate for a reader."""
    lines = [tree["statement"], ""]
    if tree["stamp"]:
        lines += [f"*** {tree['stamp']} ***", ""]
    lines += [
        f"Neighbouring inputs: {tree['neighbours']}.",
        f"The adversary sees {tree['adversary_sees']}.",
        "The guarantee assumes that these are honest: " + "; ".join(tree["honest"]) + ".",
        f"Collusion: {tree['if_others_collude']}.",
        f"Noise: {tree['noise']}.",
        f"Calibration: {tree['calibration']}.",
        *made_lines(tree["made"]),
    ]
    if tree["claim"]:
        claim = tree["claim"]
        verdict = "VIOLATED" if claim["violated"] else "holds"
        lines.append(
            f"The paper's claim of epsilon {claim['claimed_epsilon']:g} {verdict}: the noise gives "
            f"{rounded_up(claim['true_epsilon'])} ({claim['formula']})."
        )
    lines += [f"Bound of {stream}: {words}." for stream, words in tree["bounds"].items() if words.startswith("stated")]
    for silo in tree["silos"]:
        lines += ["", *silo_lines(silo)]
    lines += ["", "Outside the guarantee:", *(f"  - {note}" for note in tree["outside_the_guarantee"])]
    lines += ["", "Software: " + ", ".join(f"{k} {v}" for k, v in tree["versions"].items())]
    return "\n".join(lines) + "\n"


def made_lines(made: Mapping[str, str]) -> list[str]:
    if not made:
        return []
    when = made["date"].replace("T", " ").removesuffix("+00:00")
    return [f"Run {made['run']}, {when} UTC; SHA-256 of the model {made['model']}, of the plan {made['plan']}."]


def collusion_lines(levels: Mapping[str, float | None] | None) -> list[str]:
    return [f"{who.replace('_', ' ')}: epsilon {rounded_up(value)}" for who, value in (levels or {}).items()]


def silo_lines(silo: Mapping[str, Any]) -> list[str]:
    mu = "" if silo["gdp_mu"] is None else f", {rounded_up(silo['gdp_mu'])}-Gaussian-DP"
    promise = f"({rounded_up(silo['epsilon'])}, {rounded_up(silo['delta'])})-DP"
    held = f", {silo['held_out']} of them held out" if silo["held_out"] else ""
    lines = [f"Silo {silo['silo']} ({silo['records']} records{held}): {promise}{mu}"]
    if "record_epsilon" in silo:
        lines[0] += f" for {together(silo['records_together'], silo['records'])}"
        lines.append(f"  one record alone: epsilon {rounded_up(silo['record_epsilon'])}")
    for release in silo["releases"]:
        about = " that are held out" if release.get("held_out") else ""
        lines.append(
            f"  {release['count']} x {release['stream']}: noise {release['multiplier']:.5g} x sensitivity, "
            f"{release['sampling']}{about}"
        )
    lines += [f"  if {line}" for line in collusion_lines(silo["collusion"])]
    for group in silo["several_records_of_one_person"]:
        lines.append(f"  a person with {group['records']} records here: epsilon {rounded_up(group['epsilon'])}")
    told = [f"{rounded_up(group['epsilon'])} for {group['records']}" for group in silo.get("groups", ())]
    return [*lines, f"  any records that change together: epsilon {', '.join(told)}"] if told else lines
