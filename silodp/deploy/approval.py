"""What an operator sees before approving a plan: one screen, recalculated by this site's own program."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from silodp import registry
from silodp.deploy.document import Document, approval
from silodp.deploy.guard import check_plan, total_with
from silodp.deploy.mixer import check_shuffled_plan
from silodp.deploy.office import KEY, open_ledger
from silodp.deploy.policy import Policy, is_shuffler, operators_file, read_policy
from silodp.deploy.signing import Key, canonical, read_document, words
from silodp.digits import rounded_down, rounded_up
from silodp.errors import ConfigError
from silodp.plan.certificate import collusion_lines, known_levels, unit_of


def load(path: Path, outside: Iterable[str] = ()) -> Document:
    """A plan that somebody else has written: from here on this process imports no code by name.

    `outside`: MODULE:CLASS parts that whoever runs this process allows; the first list of a process stands.
    """
    if not registry.is_closed():
        registry.close(outside)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a plan that silodp plan propose wrote")
    return Document(read_document(path.read_bytes()))


def outside_of(folder: Path) -> list[str]:
    """The parts from outside that an operator's file allows; a shuffler's has none."""
    policy = operators_file(folder)
    return policy.limits.outside if isinstance(policy, Policy) else []


def screen(folder: Path, document: Document) -> str:
    """Everything that an operator decides on. The plan is checked first: what is refused is not shown as if it were."""
    if is_shuffler(folder):
        return shufflers_screen(folder, document)
    policy, key, ledger = read_policy(folder), Key.read(folder / KEY), open_ledger(folder)
    try:
        ledger.check_unedited()
        check_plan(policy, key, ledger, document)
        before, after = total_with(policy, ledger), total_with(policy, ledger, document)
    finally:
        ledger.close()
    plan, index, limits = document.plan, document.sites.index(policy.site), policy.limits
    options, facts = plan.config.algorithm, plan.facts
    others = [f"{name} ({facts.sizes[i]} records)" for i, name in enumerate(facts.names) if i != index]
    level = f"epsilon {rounded_up(plan.epsilon(index))} at delta {rounded_up(plan.config.privacy.delta)}"
    levels = known_levels(
        plan.if_others_collude(index, plan.spent(index), plan.config.privacy.delta, plan.together(index))
    )
    left = max(0.0, limits.total_epsilon - after)
    lines = [
        f"Plan of run {document.run}",
        "",
        f"  trained      {plan.config.model.kind} with {facts.parameters} parameters, by {options.name}",
        f"  rounds       {facts.rounds}; a missing site: {document.tree['on_missing']}",
        f"  this site    {policy.site}, {facts.sizes[index]} records",
        f"  with         {', '.join(others) or 'nobody else'}",
        f"  seen by others   {plan.channel.sees}",
        f"  if they collude  {plan.channel.if_others_collude}",
        *([] if document.shuffler is None else [f"  shuffled by  {document.shuffler.site}"]),
        "",
        f"  this run     {level} for {unit_of(plan)} this site (calculated here)",
        *(f"               if {line}" for line in collusion_lines(levels)),
        f"  before       epsilon {rounded_up(before) if before else 0} of all earlier runs, for one record",
        f"  afterwards   epsilon {rounded_up(after)} of {limits.total_epsilon:g} at delta {limits.total_delta:g}, "
        f"for one record; {rounded_down(left)} left",
        "",
        "  fingerprint  compare it with the other sites, by telephone:",
        *(f"               {line}" for line in grouped(document.words)),
    ]
    return "\n".join(lines)


def shufflers_screen(folder: Path, document: Document) -> str:
    """For the operator of a shuffler, who has no records to protect and others' to hide."""
    terms = check_shuffled_plan(folder, document)
    facts = document.plan.facts
    batch = max(terms.values(), key=lambda each: each.messages)
    lines = [
        f"Plan of run {document.run}",
        "",
        f"  shuffled for {', '.join(document.sites)}",
        f"  rounds       {facts.rounds}; a batch has {batch.messages} messages of {batch.sealed_size} bytes",
        "  you promise  to keep to yourself which message came from which site, and to release whole batches only",
        "",
        "  fingerprint  compare it with the sites, by telephone:",
        *(f"               {line}" for line in grouped(document.words)),
    ]
    return "\n".join(lines)


def grouped(text: str, each: int = 4) -> list[str]:
    parts = text.split()
    return [" ".join(parts[i : i + each]) for i in range(0, len(parts), each)]


def approve(folder: Path, document: Document) -> dict[str, Any]:
    """Sign, and let the guard know."""
    key, ledger = Key.read(folder / KEY), open_ledger(folder)
    try:
        ledger.check_unedited()
        if is_shuffler(folder):
            check_shuffled_plan(folder, document)
        else:
            check_plan(read_policy(folder), key, ledger, document)
        ledger.approve(document.fingerprint, document.run, canonical(document.tree))
    finally:
        ledger.close()
    return approval(key, operators_file(folder).site, document)


def revoke(folder: Path, wanted: str) -> str:
    """No further answers under this plan; what was answered stays charged."""
    ledger = open_ledger(folder)
    try:
        for fingerprint, run, stands in ledger.approvals():
            if stands and wanted in (run, fingerprint, words(fingerprint)):
                ledger.revoke(fingerprint)
                return run
    finally:
        ledger.close()
    raise ConfigError(f"{wanted}: no such approval stands; silodp ledger show lists runs")


def show(document: Document) -> str:
    """A plan for anybody: no site's folder is needed."""
    plan, facts = document.plan, document.plan.facts
    lines = [f"Plan of run {document.run}: {plan.config.algorithm.name}, trust {plan.config.privacy.trust}"]
    for i, site in enumerate(document.sites):
        level = f"epsilon {rounded_up(plan.epsilon(i))}" if plan.private else "not private"
        key = " ".join(words(document.keys[site]).split()[:4])
        lines.append(f"  {site}: {facts.sizes[i]} records, {level}; key {key} ...")
    if document.shuffler is not None:
        key = " ".join(words(document.shuffler.key).split()[:4])
        lines.append(f"  {document.shuffler.site}: shuffles; key {key} ...")
    delta = rounded_up(plan.config.privacy.delta)
    lines += [f"  {facts.rounds} rounds, {facts.parameters} parameters, delta {delta}", "fingerprint:"]
    return "\n".join([*lines, *(f"  {line}" for line in grouped(document.words))])
