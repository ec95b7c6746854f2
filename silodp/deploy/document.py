"""The plan as a document that all sites sign: canonical JSON, a fingerprint, and the signed facts that it rests on."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from typing import Any

from silodp.config import Config
from silodp.deploy.shuffling import Shuffling, agreed_terms
from silodp.deploy.signing import SITE, Key, canonical, fingerprint_of, opened, words
from silodp.deploy.wire import is_number
from silodp.errors import ConfigError, Refused
from silodp.facts import Facts
from silodp.objective import parameter_count
from silodp.parse import parse_config
from silodp.plan.make import make_plan, resolved
from silodp.plan.parts import trained_model
from silodp.plan.plan import Plan

FORMAT, FACTS, APPROVAL = "plan", "facts", "approval"  # purposes of fingerprints and signatures
KEYS = {"format", "run", "plan", "roster", "shuffler", "epsilon", "delta", "on_missing", "versions"}
TOLD = {"site", "records", "record", "outputs", "task", "schema", "versions"}
PACKAGES = ("silodp", "jax", "jaxlib", "numpy", "equinox", "dp-accounting", "cryptography")


def versions() -> dict[str, str]:
    return {package: metadata.version(package) for package in PACKAGES}


def signed_facts(key: Key, site: str, facts: Facts, schema: str) -> dict[str, Any]:
    """What a site tells the others about its records: their number and what a record is. Nothing else is computed."""
    body = {
        "site": site,
        "records": facts.sizes[0],
        "record": facts.to_json()["record"],
        "outputs": facts.outputs,
        "task": facts.task,
        "schema": schema,
        "versions": versions(),
    }
    return key.signed(FACTS, body)


def told_facts(statement: Any) -> dict[str, Any]:
    """The body of signed facts, checked."""
    body, _ = opened(FACTS, statement)
    if body.keys() != TOLD or not isinstance(body["site"], str) or not SITE.fullmatch(body["site"]):
        raise Refused("facts: not those of a site")
    if type(body["records"]) is not int or not 2 <= body["records"] <= 2**31 - 1:
        raise Refused("facts: the number of records is none")
    return body


def joint_facts(roster: Sequence[Any]) -> Facts:
    """All sites' facts as a plan has them; they must describe the same kind of record."""
    told = [told_facts(statement) for statement in roster]
    if not told:
        raise Refused("roster: no sites")
    for name in ("record", "outputs", "task", "schema"):
        if any(body[name] != told[0][name] for body in told):
            raise Refused(f"roster: the sites' facts differ in {name}; all need the same schema")
    names = [body["site"] for body in told]
    if len(set(names)) < len(names) or len({statement["key"] for statement in roster}) < len(names):
        raise Refused("roster: a site, or a key, stands in it twice")
    first = told[0]
    sizes = tuple(body["records"] for body in told)
    return Facts(sizes, tuple(names), first["record"], first["outputs"], first["task"])


def proposed(
    config: Config, roster: Sequence[Any], on_missing: str = "wait", shuffler: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The document of a config for these sites: choices made, noise calibrated. Nothing is known of a record.

    `shuffler`: its signed facts, and the server's key that messages are sealed to, where the trust model has one.
    """
    if config.data.preprocess:
        raise ConfigError("data.preprocess: sites encode their records by the schema; leave it out")
    tree = config.model_dump(exclude_unset=True) | {"data": {}}
    tree["run"] = tree.get("run", {}) | {"mode": "messages"}
    asked, facts = parse_config(tree), joint_facts(roster)
    plan = planned(asked, facts)
    check_missing(plan, on_missing)
    if (agreed_terms(plan) is None) != (shuffler is None):
        needs = "no shuffler" if shuffler is not None else "a shuffler; give its facts with --shuffler"
        raise ConfigError(f"privacy.trust = {config.privacy.trust!r}: this plan needs {needs}")
    return {
        "format": FORMAT,
        "run": secrets.token_hex(16),
        "plan": plan.to_json(),
        "roster": list(roster),
        "shuffler": None if shuffler is None else dict(shuffler),
        "epsilon": [plan.epsilon(i) for i in range(facts.silos)] if plan.private else None,
        "delta": plan.config.privacy.delta,
        "on_missing": on_missing,
        "versions": versions(),
    }


def planned(config: Config, facts: Facts) -> Plan:
    facts = replace(facts, parameters=parameter_count(trained_model(resolved(config, facts), facts)))
    return make_plan(config, facts)


def check_missing(plan: Plan, on_missing: str) -> None:
    """A round without a silo needs answers that are private alone, and silos that remember nothing."""
    from silodp.core import Algorithm

    if on_missing not in ("wait", "skip"):
        raise ConfigError(f"on_missing = {on_missing!r}: must be wait or skip")
    forgets = all(type(stage.algorithm).remember is Algorithm.remember for stage in plan.stages)
    if plan.config.privacy.missing and (plan.before or not forgets or on_missing == "skip"):
        raise ConfigError(
            f"privacy.missing = {plan.config.privacy.missing}: a site that comes back would not know what it missed "
            "(a stage before training, or what silos remember); leave it out, and on_missing = 'skip' too"
        )
    alone = plan.channel.alone_is_private and not plan.channel.remember(plan.sizes)
    if on_missing == "skip" and not (alone and forgets):
        raise ConfigError(
            "on_missing = 'skip': these silos' answers need each other, or what they remember; use 'wait'"
        )


@dataclass(frozen=True)
class Document:
    """A plan as it was proposed: whole, and checked against the facts that its sites have signed."""

    tree: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.tree.keys() != KEYS or self.tree["format"] != FORMAT:
            raise Refused(f"plan: must have {', '.join(sorted(KEYS))}")
        if not isinstance(self.run, str) or not re.fullmatch(r"[0-9a-f]{32}", self.run):
            raise Refused("plan: run must be 32 hexadecimal digits")
        if not isinstance(self.tree["roster"], list):
            raise Refused("plan: roster must be a list")
        joint_facts(self.tree["roster"])  # signed by their sites, and alike
        if self.shuffler is not None and {self.shuffler.site, self.shuffler.key} & {*self.keys, *self.keys.values()}:
            raise Refused("plan: its shuffler is one of the sites")

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(canonical(self.tree))

    @property
    def words(self) -> str:
        return words(self.fingerprint)

    @property
    def run(self) -> str:
        return self.tree["run"]

    @cached_property
    def facts(self) -> Facts:
        return joint_facts(self.tree["roster"])

    @property
    def sites(self) -> tuple[str, ...]:
        return self.facts.names

    @property
    def keys(self) -> dict[str, str]:
        """Public keys by site."""
        return dict(zip(self.sites, (statement["key"] for statement in self.tree["roster"]), strict=True))

    @cached_property
    def shuffler(self) -> Shuffling | None:
        return None if self.tree["shuffler"] is None else Shuffling.read(self.tree["shuffler"])

    @property
    def parties(self) -> dict[str, str]:
        """Public keys of all who sign: the sites, and the shuffler if there is one."""
        return self.keys | ({} if self.shuffler is None else {self.shuffler.site: self.shuffler.key})

    @property
    def waits(self) -> bool:
        return self.tree["on_missing"] == "wait"

    @cached_property
    def plan(self) -> Plan:
        """The plan, if its facts are what the sites have signed and its noise is what this program calculates."""
        try:
            plan = Plan.from_json(self.tree["plan"])
            own = planned(plan.config, self.facts)
        except Refused:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise Refused(f"plan: {error}") from None
        if plan.facts != own.facts:
            raise Refused("plan: its facts are not those that the sites have signed")
        check_missing(own, self.tree["on_missing"])
        if (agreed_terms(own) is None) != (self.shuffler is None):
            raise Refused("plan: a shuffler that it does not need, or none where it needs one")
        self._check_noise(plan, own)
        return plan

    def _check_noise(self, plan: Plan, own: Plan) -> None:
        if plan.multipliers.keys() != own.multipliers.keys():
            raise Refused("plan: noise on other streams than its config releases")
        for line, noise in own.multipliers.items():
            pairs = list(zip(plan.multipliers[line], noise, strict=True))
            if any(told < right * (1 - 1e-6) for told, right in pairs):
                raise Refused("plan: less noise than its config needs")
            # A site is charged by its own number; where one level serves all, another one's may be what is drawn.
            if any(told > right * (1 + 1e-3) for told, right in pairs):
                raise Refused("plan: more noise than its config needs")
        told, silos = self.tree["epsilon"], range(own.facts.silos)
        right = [own.epsilon(i) for i in silos] if own.private else None
        if self.tree["delta"] != own.config.privacy.delta or not alike(told, right):
            raise Refused("plan: its epsilon or delta is not that of its noise")


def alike(told: Any, right: Sequence[float] | None) -> bool:
    if told is None or right is None:
        return told is right
    if not isinstance(told, list) or len(told) != len(right) or not all(is_number(each) for each in told):
        return False
    return all(abs(each - own) <= 1e-6 * own for each, own in zip(told, right, strict=True))


def approval(key: Key, site: str, document: Document) -> dict[str, Any]:
    return key.signed(APPROVAL, {"site": site, "run": document.run, "fingerprint": document.fingerprint})


def check_approvals(document: Document, approvals: Any) -> None:
    """Every site of the plan, and its shuffler, must have signed this very fingerprint with the key of its facts."""
    if not isinstance(approvals, list):
        raise Refused("approvals: must be a list")
    signed = {}
    for statement in approvals:
        body, key = opened(APPROVAL, statement)
        site = str(body.get("site"))
        if body == {"site": site, "run": document.run, "fingerprint": document.fingerprint}:
            signed[site] = key
    missing = [site for site, key in document.parties.items() if signed.get(site) != key]
    if missing:
        raise Refused(f"approvals: {', '.join(missing)} has not signed this plan")
