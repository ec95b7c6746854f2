"""The report of a real federation's run: what every silo signed, and what its ledger says over all runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.deploy.approval import load
from silodp.deploy.certify import CERTIFICATE, is_shufflers, promises, tells_total, verified
from silodp.deploy.document import Document
from silodp.deploy.signing import opened, words
from silodp.deploy.spending import read
from silodp.errors import ConfigError
from silodp.plan.certificate import Context, certificate
from silodp.plan.checks import outside_words
from silodp.report import files
from silodp.report.files import day_and_time, hashes_of, read_json, title_of
from silodp.report.story import Story

NOT_COVERED = (
    "what can be learnt from the time that a silo takes, or from its use of power",
    "what a silo's own staff, or whoever has broken into its guard, does with its records",
    "hyper-parameters chosen by looking at results on these records",
)
HASHED = ("model.safetensors", "plan.json", "certificates.json")


def story_of(directory: Path) -> Story:
    """Of a real federation's run, or of what lies there of one machine."""
    found = (directory / "certificates.json").is_file()
    return story_of_federation(directory) if found else files.story_of(directory)


def story_of_federation(directory: Path) -> Story:
    """Every signature is checked, and that the model in the directory is the one that was signed."""
    document = load(directory / "plan.json")
    statements = json.loads((directory / "certificates.json").read_text(encoding="utf-8"))
    verified(statements, document)
    of_sites = [each for each in statements if not is_shufflers(each)]
    by_site = {body["site"]: body for body, _ in (opened(CERTIFICATE, each) for each in of_sites)}
    bodies = [by_site[site] for site in document.sites]
    check_model(directory, bodies)
    plan, facts = document.plan, document.plan.facts
    tree = certified(document, bodies) if plan.private else None
    silos = [{"records": size} for size in facts.sizes] if tree is None else tree["silos"]
    held_out = directory / "held_out.json"
    return Story(
        title=title_of(f"{plan.config.algorithm.name}, a real federation", silos),
        certificate=tree,
        made=[
            ("date (UTC)", day_and_time(max(body["date"] for body in bodies))),
            ("run", document.run),
            ("algorithm", plan.config.algorithm.name),
            ("trust model", plan.config.privacy.trust),
            ("records", f"{sum(silo['records'] for silo in silos):,}"),
            ("parameters of the model", f"{facts.parameters:,}"),
            ("rounds", f"{facts.rounds}"),
            ("fingerprint of the plan", document.words),
        ],
        versions=document.tree["versions"],
        hashes=hashes_of(directory, HASHED),
        held_out=read_json(held_out) if held_out.is_file() else None,
        signatures=[signature_row(each) for each in sorted(statements, key=lambda each: each["body"]["site"])],
    )


def check_model(directory: Path, bodies: Sequence[Mapping[str, Any]]) -> None:
    file = directory / "model.safetensors"
    if not file.is_file() or {body["model"] for body in bodies} != {hashlib.sha256(file.read_bytes()).hexdigest()}:
        raise ConfigError(f"{file}: not the model that the silos' certificates name; take the original")


def certified(document: Document, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statement of what the guards counted, with the epsilon that they signed."""
    plan = document.plan
    context = Context(stamp=None, versions=document.tree["versions"], outside=tuple(outside_words(plan)))
    tree = certificate(plan, [read(body["releases"]) for body in bodies], context)
    for silo, body in zip(tree["silos"], bodies, strict=True):
        total = {"epsilon": body["total_epsilon"], "delta": body["total_delta"], "runs": body["runs"]}
        silo |= {name: body[name] for name in promises(body) if name in silo}
        silo |= {"spent": total if tells_total(body) else None}
    return tree | {"outside_the_guarantee": [*context.outside, *NOT_COVERED]}


def signature_row(statement: Mapping[str, Any]) -> tuple[str, ...]:
    body = statement["body"]
    entry, head = body["ledger"]
    return (
        body["site"], day_and_time(body["date"]) or "", words(statement["key"]), f"{entry}: {head[:16]}",
        statement["signature"],
    )  # fmt: skip
