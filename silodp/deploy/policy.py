"""What a site's operator allows, in guard.toml: read from the site's own disk, never from the network. No JAX."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError

from silodp import registry
from silodp.config import Config, Section
from silodp.errors import ConfigError, Refused
from silodp.parse import named_parts, parse_config

if TYPE_CHECKING:
    from silodp.deploy.document import Document
    from silodp.plan.plan import Plan

NAME, SHUFFLER_NAME = "guard.toml", "shuffler.toml"
SOCKET = "run/guard.sock"
S = TypeVar("S", bound=Section)


class Records(Section):
    """Where this site's records are, and what is publicly known about their columns."""

    files: list[str] = Field(min_length=1, description="CSV or Parquet files; paths from the guard's folder")
    schema_file: str = Field(alias="schema", description="the federation's schema; path from the guard's folder")


class Limits(Section):
    """The most that a plan may ask for. A plan that asks for more is refused, whoever signed it."""

    trusts: list[str] = Field(default=["untrusted"], description="trust models that plans may use")
    algorithms: list[str] = Field(default=[], description="algorithms that plans may use; empty: all of the library's")
    outside: list[str] = Field(default=[], description="MODULE:CLASS parts that may be imported here; best none")
    epsilon: float = Field(gt=0, description="largest epsilon of one run")
    delta: float = Field(gt=0, lt=1e-2, description="largest delta of one run")
    total_epsilon: float = Field(gt=0, description="largest epsilon of all runs on these records together")
    total_delta: float = Field(gt=0, lt=2e-2, description="the delta at which all runs together are counted")
    colluding: int = Field(
        default=1, ge=0, description="other silos that sums must stand when they work for the server (trust aggregated)"
    )
    epsilon_alone: float | None = Field(
        default=None, gt=0, description="largest epsilon of one run if all others work for the server; none: any"
    )
    clip: float = Field(default=1e-6, gt=0, description="smallest clip norm")
    rounds: int = Field(default=10_000, ge=1, description="most rounds of a run")
    parameters: int = Field(default=2_000_000, ge=1, description="most parameters of a model")
    silos: int = Field(default=100, ge=1, description="most silos of a run")
    message_bytes: int = Field(default=64 << 20, ge=1024, description="largest message that is read")
    cpu_seconds: float = Field(default=36_000, gt=0, description="most processor time of one run")


class Policy(Section):
    """What a site's operator allows, and where the site's things are."""

    site: str = Field(min_length=1, description="this site's name in plans and certificates")
    data: Records
    limits: Limits
    relay_uid: int | None = Field(default=None, ge=0, description="user number of the relay; none: the guard's own")
    socket: str = Field(default=SOCKET, description="where the guard listens; outside, if the relay is another user")
    counter: str = Field(default="counter", description="second file of the ledger, best on another disk")
    tell_budget: bool = Field(
        default=True,
        description="whether the server may know what is spent and left here; false: certificates leave the total out",
    )
    peers: dict[str, str] = Field(default={}, description="public keys of the other sites, by name")
    shufflers: dict[str, str] = Field(default={}, description="public keys of shufflers that may be used, by name")


class ShufflerLimits(Section):
    """The most that a plan may ask of a shuffler."""

    silos: int = Field(default=100, ge=2, description="most silos of a run")
    messages: int = Field(default=1_000_000, ge=2, description="most messages of one batch")
    message_bytes: int = Field(
        default=256 << 20, ge=1024, description="largest request that is read: all parcels of a batch"
    )


class ShufflerPolicy(Section):
    """What a shuffler's operator allows, and where the shuffler's things are."""

    site: str = Field(min_length=1, description="the shuffler's name in plans and certificates")
    limits: ShufflerLimits = ShufflerLimits()
    relay_uid: int | None = Field(default=None, ge=0, description="user number of the relay; none: the shuffler's own")
    socket: str = Field(default=SOCKET, description="where the guard listens; outside, if the relay is another user")
    counter: str = Field(default="counter", description="second file of the ledger, best on another disk")


def is_shuffler(folder: Path) -> bool:
    return (folder / SHUFFLER_NAME).is_file()


def read_shuffler(folder: Path) -> ShufflerPolicy:
    return read_toml(folder / SHUFFLER_NAME, ShufflerPolicy, "silodp shuffler init")


def operators_file(folder: Path) -> Policy | ShufflerPolicy:
    return read_shuffler(folder) if is_shuffler(folder) else read_policy(folder)


def socket_of(folder: Path, policy: Policy | ShufflerPolicy) -> Path:
    return folder / policy.socket


def read_policy(folder: Path) -> Policy:
    return read_toml(folder / NAME, Policy, "silodp silo init")


def read_toml(file: Path, kind: type[S], maker: str) -> S:
    """An operator's file; `maker`: the command that writes one."""
    if not file.is_file():
        raise ConfigError(f"{file.parent}: no {file.name}; {maker} writes one")
    return parsed_toml(file, file.read_text(encoding="utf-8"), kind)


def parsed_toml(file: Path, text: str, kind: type[S]) -> S:
    """What an operator's file says, or is about to say."""
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Denied(Refused):
    """What this site's policy does not allow. `code` names the rule, `about` the site of the plan that it is about."""

    def __init__(self, code: str, about: str = ""):
        super().__init__(f"{SENTENCES[code]}: {about}" if about else SENTENCES[code])
        self.code, self.about = code, about


# What may be told to anybody: fixed sentences. What exactly was wrong is in the site's own list of refusals.
SENTENCES = {
    "message": "this is no message that a guard reads",
    "kind": "a guard answers plan, keys, leave, start, ask, local, account, budget, certificate; a shuffler: shuffle",
    "not-approved": "this site's operator has not approved this plan, or has revoked it",
    "not-signed": "not all sites of the plan have signed its fingerprint",
    "document": "this is no plan, or its signatures, facts, noise or epsilon do not belong together",
    "not-listed": "this site is not in the plan, or stands in it with another key",
    "peers": "the plan has sites, or keys of sites, that this site's operator does not know",
    "shuffler": "the plan's shuffler, or its key, is not one that this site's operator knows",
    "versions": "the plan was made with other versions of the software than are installed here; close its run at every "
    "site (silodp ledger close) and propose a new plan, which may begin with this run's model",
    "not-private": "the plan has no privacy target, or its noise is not calculated exactly",
    "seeded": "the plan's noise could be repeated from a seed",
    "trust": "this trust model is not allowed here",
    "algorithm": "this algorithm is not allowed here",
    "outside": "the plan names a part that this site's operator has not listed",
    "epsilon": "the plan's epsilon or delta is larger than this site allows for one run",
    "colluding": "the plan stands fewer colluding parties than this site wants",
    "total": "all runs on these records together exceed what this site allows, or come to no number; "
    "batches and masks that are drawn at random count for more over adaptively chosen runs than in one run",
    "clip": "a clip norm of the plan is smaller than this site allows",
    "rounds": "the plan has more rounds than this site allows",
    "parameters": "the model is larger than this site allows",
    "silos": "the plan has more sites than this site allows",
    "messages": "the plan has larger batches than this shuffler allows",
    "preprocess": "the plan prepares records beyond the schema, outside of the budget",
    "data": "this site's records are not those that the plan describes",
    "run": "this run has another plan, is closed, or is not known here",
    "model": "this is no model's hash, or this run was certified for another model",
    "busy": "another run is open here; close it first",
    "cpu": "this run has used the computing time that this site allows",
    "question": "the silo's program refused this question; its operator can see why",
    "repeated": "this question was answered already, with other contents, or its bytes were dropped",
    "seen": "the sites were shown different points in the last round",
    "behind": "another site's ledger went back; it was put back from a copy, or cloned",
    "put-back": "this site's ledger lacks an entry that others have seen; it was put back from a copy, or cloned",
    "edited": "this site's ledger is not what was written in it; its operator can see why",
    "disk": "the ledger could not be written; nothing was sent",
    "fault": "something went wrong inside this site; nothing was sent",
}
CLIPS = ("clip", "clip_difference", "clip_local")


def check_document(policy: Policy, key: str, document: Document) -> None:
    """Refuse a plan beyond this site's limits, by itself; what other runs have spent is the ledger's business.

    First what can be read off, then what has to be calculated: a plan without end must not be calculated with.
    """
    limits = policy.limits
    if document.keys.get(policy.site) != key:
        raise Denied("not-listed")
    if any(policy.peers.get(site) != own for site, own in document.keys.items() if site != policy.site):
        raise Denied("peers")
    if document.shuffler is not None and policy.shufflers.get(document.shuffler.site) != document.shuffler.key:
        raise Denied("shuffler")
    if len(document.sites) > limits.silos:
        raise Denied("silos")
    check_config(limits, told_config(document.tree["plan"]))
    plan, index = document.plan, document.sites.index(policy.site)
    if not plan.epsilon(index) <= limits.epsilon * (1 + 1e-6):
        raise Denied("epsilon")
    if (plan.facts.parameters or 0) > limits.parameters:
        raise Denied("parameters")
    stands = plan.channel.colluders(plan.facts.answering)
    if stands is not None and stands < limits.colluding:
        raise Denied("colluding")
    if limits.epsilon_alone is not None and not left_alone(plan, index) <= limits.epsilon_alone * (1 + 1e-6):
        raise Denied("colluding")


def left_alone(plan: Plan, index: int) -> float:
    """The epsilon of one silo's records in this run if all others, a shuffler too, work for the server."""
    levels = plan.if_others_collude(index, plan.spent(index), plan.config.privacy.delta, plan.together(index))
    return max(levels.values()) if levels else plan.epsilon(index)


def told_config(tree: Any) -> Config:
    """The config of a plan; nothing that it names is imported."""
    try:
        return parse_config(dict(tree["config"]))
    except (ValueError, TypeError, LookupError):
        raise Denied("document") from None


def check_outside(allowed: Collection[str], config: Config) -> None:
    """Refuse a plan whose code somebody else chooses."""
    if any(not registry.is_own(kind, name) and name not in allowed for kind, name in named_parts(config).items()):
        raise Denied("outside")


def check_config(limits: Limits, config: Config) -> None:
    options, privacy = config.algorithm, config.privacy
    clips = [getattr(options, name) for name in CLIPS] + ([] if config.whiten is None else [config.whiten.clip])
    named = named_parts(config)
    check_outside(limits.outside, config)
    rules = {
        "trust": named["channel"] not in limits.trusts,
        "algorithm": bool(limits.algorithms) and named["algorithm"] not in limits.algorithms,
        "seeded": config.run.test_seed,
        "not-private": not privacy.private or privacy.calibration != "exact",
        "preprocess": bool(config.data.preprocess),
        "epsilon": privacy.delta > limits.delta,
        "clip": any(clip is not None and clip < limits.clip for clip in clips),
        "rounds": options.rounds > limits.rounds,
    }
    for code, broken in rules.items():
        if broken:
            raise Denied(code)
