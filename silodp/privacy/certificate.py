"""The privacy statement of a run, written from the releases that were counted while it ran.

`settle` compares the count with the plan and refuses a run that released more, or with less noise, than planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from silodp.core import Account, Stream
from silodp.privacy import accountant, events
from silodp.privacy.binomial import FEWEST_BITS, dominating_gaussian, sensitivity
from silodp.privacy.events import Sampling, Spent
from silodp.privacy.messages import Messages
from silodp.privacy.plan import LOCAL, MESSAGE, Plan, divisors, planned

SIMULATED = "simulation: seeded noise, not private"
NEIGHBOURS = "one record of one silo is replaced by any other; the silos' sizes are public"
VIEWS = {
    "untrusted": "every message that a silo sends, in every round, and everything the server computes from them",
    "trusted": "everything the server broadcasts; not the silos' messages to the server",
    "shuffled": "the unordered, anonymous messages of all silos' records in every round, and what follows from them",
}
HONEST = {
    "untrusted": ["the silo itself: its software clips, draws fresh noise and tells nobody"],
    "trusted": [
        "the silo itself: its software clips",
        "the server: it sees clipped means in the clear, draws fresh noise and keeps both to itself",
        "the transport between silo and server is confidential",
    ],
}
HONEST["shuffled"] = [
    "the silo itself: its software clips, randomises every record with fresh coins and tells nobody",
    "the shuffler: it keeps origin and order of the messages to itself",
    "the other silos: their messages really are in every batch",
]
VIEWS["pvec"] = "the sums over all silos' records of rounded integers and coins, in every round, and no part of them"
HONEST["pvec"] = [
    "the silo itself: its software clips, rounds, draws fresh coins for every record and tells nobody",
    "the server: it passes the silos' public keys on unchanged (fingerprints show it), so that masks hide each part",
    "the other silos: their coins really are in every sum",
]
COLLUSION = {
    "untrusted": "unchanged if the server and all other silos collude: the silo's noise is its own",
    "trusted": "unchanged if all other silos collude; nothing is left against the server itself",
    "shuffled": "each silo's statement says what is left if the other silos, or the shuffler, work for the server",
    "pvec": "if the other silos tell the server their coins, only this silo's own coins are left",
}
ROUNDING = 1e-6  # multipliers are counted in float32


class AccountingError(RuntimeError):
    """The run released something that its plan does not cover."""


@dataclass(frozen=True)
class Claim:
    """A paper's own calibration: what it says the epsilon is."""

    epsilon: float
    formula: str


@dataclass(frozen=True)
class Context:
    """What the certificate says beside the numbers."""

    algorithm: str
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    stamp: str | None = SIMULATED
    versions: Mapping[str, str] = field(default_factory=dict)
    calibration: str = "exact"
    claim: Claim | None = None


def settle(plan: Plan, account: Account) -> list[list[Spent]]:
    """What each silo really spent; an error when that is not what the plan allows."""
    counted: list[list[Spent]] = []
    for silo in range(len(plan.federates.sizes)):
        seen: list[Stream] = []
        # Rounded to float32 on the way: never report less or more noise than the plan's own number.
        noise: dict[str, float] = {}
        for stream in plan.streams[silo]:
            accounted = stream.name if stream.name in plan.multipliers else MESSAGE
            tally = account.tallies[stream.name]
            count = int(np.asarray(tally.count)[silo])
            multiplier = float(np.asarray(tally.multiplier)[silo])
            floor = float(plan.protecting(accounted)[silo])
            check_tally(plan, silo, stream.name, count, stream.count, multiplier, floor)
            seen.append(replace(stream, count=count))
            noise[accounted] = min(noise.get(accounted, math.inf), max(floor, multiplier * (1 - ROUNDING)))
        releases = planned(seen, silo, plan.federates)
        counted.append([Spent(each, noise[each.stream]) for each in releases if each.count])
    return counted


def check_tally(plan: Plan, silo: int, stream: str, count: int, planned: int, multiplier: float, floor: float) -> None:
    exact = plan.federates.everyone or plan.federates.attendance is not None
    if count > planned or (exact and count != planned):
        raise AccountingError(f"silo {silo}, stream {stream!r}: {count} releases were counted, the plan has {planned}")
    if count and multiplier < floor * (1 - ROUNDING):
        raise AccountingError(
            f"silo {silo}, stream {stream!r}: a release had noise multiplier {multiplier:.6g}, the plan has {floor:.6g}"
        )


def certificate(plan: Plan, spent: Sequence[Sequence[Spent]], context: Context) -> dict[str, Any]:
    """The statement as plain data. `spent` is what `settle` returned."""
    trust, delta, shuffle = plan.federates.trust, plan.target.delta, plan.federates.shuffle
    view = "pvec" if shuffle is not None and shuffle.randomizer == "pvec" else trust
    silos = [silo_statement(plan, i, own, context) for i, own in enumerate(spent)]
    worst = max(silo["epsilon"] for silo in silos)
    return {
        "statement": (
            f"{context.algorithm} under a{'n' if trust == 'untrusted' else ''} {trust} server: every record of "
            f"every silo is ({worst:.4g}, {delta:g})-differentially private"
        ),
        "stamp": context.stamp,
        "neighbours": NEIGHBOURS,
        "adversary_sees": VIEWS[view],
        "honest": HONEST[view],
        "if_others_collude": COLLUSION[view],
        "calibration": context.calibration,
        "claim": claim_statement(context.claim, worst, delta),
        "silos": silos,
        "outside_the_guarantee": outside(context.notes),
        "public_preprocessing": [note for note in context.notes if not note.startswith("not private")],
        "versions": dict(context.versions),
    }


def silo_statement(plan: Plan, silo: int, own: Sequence[Spent], context: Context) -> dict[str, Any]:
    delta = plan.target.delta
    epsilon = accountant.epsilon(own, delta)
    return {
        "silo": context.names[silo],
        "records": plan.federates.sizes[silo],
        "epsilon": epsilon,
        "delta": delta,
        "gdp_mu": accountant.gdp(own),
        "curve": curve_points(own, epsilon),
        "releases": [release_line(s, float(plan.std_over_clip(s.releases.stream)[silo])) for s in own],
        "collusion": collusion(own, delta) if not summed(plan) else summed_collusion(plan, silo, own),
        "several_records_of_one_person": [
            {"records": k, "epsilon": accountant.group_epsilon(own, delta, k), "delta": delta} for k in (2, 5)
        ],
    }


def collusion(own: Sequence[Spent], delta: float) -> dict[str, float] | None:
    """What is left of shuffled messages when others work for the server."""
    if not any(isinstance(s.releases.sampling, Messages) for s in own):
        return None

    def changed(change: Callable[[Messages], Messages]) -> float:
        kinds = [
            replace(s, releases=replace(s.releases, sampling=change(s.releases.sampling)))
            if isinstance(s.releases.sampling, Messages)
            else s
            for s in own
        ]
        return accountant.epsilon(kinds, delta)

    return {
        "other_silos_collude": changed(Messages.without_other_silos),
        "shuffler_colludes": changed(Messages.without_shuffler),
    }


def summed(plan: Plan) -> bool:
    return plan.federates.shuffle is not None and plan.federates.shuffle.randomizer == "pvec"


def summed_collusion(plan: Plan, silo: int, own: Sequence[Spent]) -> dict[str, float]:
    """What is left of P_vec's sums when only this silo's own coins are secret.

    The same holds if the masks between silos are broken: the server then reads the silo's part of each sum.
    """
    shuffle, lost, left = plan.federates.shuffle, 0.0, []
    assert shuffle is not None
    shift = sensitivity(shuffle.levels, shuffle.parameters)
    for spent in own:
        if spent.releases.stream == LOCAL:  # Gaussian noise that is this silo's alone
            left.append(spent)
            continue
        shares = divisors(plan.streams, plan.federates, spent.releases.stream)
        fewest = sum(sorted(shares)[: plan.federates.participation])  # records in a round that the plan counts on
        # Fewer coins than there are: their Gaussian equivalent has been rounded down already.
        coins = (2 * spent.multiplier * shift) ** 2 * shares[silo] / fewest
        if coins < FEWEST_BITS:
            return dict.fromkeys(("other_silos_collude", "masks_are_broken"), math.inf)
        noise = dominating_gaussian(2 * int(coins / 2), shift)
        lost += spent.releases.count * shuffle.parameters * noise.lost
        left.append(replace(spent, multiplier=noise.std / shift))
    delta = plan.target.delta - lost
    epsilon = accountant.epsilon(left, delta) if delta > 0 else math.inf
    return {"other_silos_collude": epsilon, "masks_are_broken": epsilon}


def release_line(spent: Spent, std_over_clip: float) -> dict[str, Any]:
    return {
        "stream": spent.releases.stream,
        "count": spent.releases.count,
        "multiplier": spent.multiplier,
        "std_over_clip": std_over_clip,
        "sampling": in_words(spent.releases.sampling),
    } | ({"eps0": 1 / spent.multiplier} if spent.releases.stream == MESSAGE else {})


def in_words(sampling: Sampling) -> str:
    """How a release uses a record."""
    match sampling:
        case events.Full():
            return "all records"
        case events.Disjoint():
            return "one pass: each record in one of them"
        case events.Poisson(rate):
            return f"Poisson batches, rate {rate:.4g}"
        case events.FixedSize(batch, records):
            return f"batches of {batch} of {records} records without replacement"
        case events.TwoLevel(batch, records):
            return f"Poisson batches of {batch} of {records} records beside a mean over all"
        case events.Masked(keep, parameters):
            return f"all records, {keep} of {parameters} coordinates under a mask drawn by the silo"
        case Messages(shuffle):
            return f"{shuffle.messages} shuffled messages, {shuffle.own} of this silo, {shuffle.randomizer}"
    return repr(sampling)


def curve_points(own: Sequence[Spent], epsilon: float) -> list[dict[str, float]]:
    if not math.isfinite(epsilon) or epsilon == 0:
        return []
    grid = [epsilon * factor for factor in (0.25, 0.5, 1.0, 1.5, 2.0)]
    deltas = accountant.curve(own, grid)
    return [{"epsilon": e, "delta": float(d)} for e, d in zip(grid, deltas, strict=True)]


def claim_statement(claim: Claim | None, worst: float, delta: float) -> dict[str, Any] | None:
    if claim is None:
        return None
    return {
        "claimed_epsilon": claim.epsilon,
        "true_epsilon": worst,
        "delta": delta,
        "formula": claim.formula,
        "violated": bool(worst > claim.epsilon * (1 + 1e-6)),
    }


def outside(notes: Sequence[str]) -> list[str]:
    fitted = [note for note in notes if note.startswith("not private")]
    return [
        *fitted,
        "the process that starts a run on one machine reads all silos' records",
        "the history (objective, gradient norm) is measured on the private records",
        "hyper-parameters chosen by looking at results on these records are not covered",
    ]


def as_text(tree: Mapping[str, Any]) -> str:
    """The certificate for a reader."""
    lines = [tree["statement"], ""]
    if tree["stamp"]:
        lines += [f"*** {tree['stamp']} ***", ""]
    lines += [
        f"Neighbouring inputs: {tree['neighbours']}.",
        f"The adversary sees {tree['adversary_sees']}.",
        "It assumes: " + "; ".join(tree["honest"]) + ".",
        f"Collusion: {tree['if_others_collude']}.",
        f"Calibration: {tree['calibration']}.",
    ]
    if tree["claim"]:
        claim = tree["claim"]
        verdict = "VIOLATED" if claim["violated"] else "holds"
        lines.append(
            f"The paper's claim of epsilon {claim['claimed_epsilon']:g} {verdict}: the noise gives "
            f"{claim['true_epsilon']:.4g} ({claim['formula']})."
        )
    for silo in tree["silos"]:
        lines += ["", *silo_lines(silo)]
    lines += ["", "Outside the guarantee:", *(f"  - {note}" for note in tree["outside_the_guarantee"])]
    lines += ["", "Software: " + ", ".join(f"{k} {v}" for k, v in tree["versions"].items())]
    return "\n".join(lines) + "\n"


def silo_lines(silo: Mapping[str, Any]) -> list[str]:
    mu = "" if silo["gdp_mu"] is None else f", {silo['gdp_mu']:.4g}-Gaussian-DP"
    lines = [f"Silo {silo['silo']} ({silo['records']} records): ({silo['epsilon']:.4g}, {silo['delta']:g})-DP{mu}"]
    for release in silo["releases"]:
        lines.append(
            f"  {release['count']} x {release['stream']}: noise {release['multiplier']:.5g} x sensitivity, "
            f"{release['sampling']}"
        )
    if silo["collusion"]:
        lines += [f"  if {name.replace('_', ' ')}: epsilon {value:.4g}" for name, value in silo["collusion"].items()]
    for group in silo["several_records_of_one_person"]:
        lines.append(f"  a person with {group['records']} records here: epsilon {group['epsilon']:.4g}")
    return lines
