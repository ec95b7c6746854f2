"""One row for every algorithm and trust model: claim, measurement, verdict."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np
from scipy.stats import norm as gaussian

from silodp import cache, registry
from silodp.algorithms import REGISTRY, find
from silodp.algorithms.entry import Entry
from silodp.audit import attack, first, real, stages
from silodp.audit.attack import Reading
from silodp.audit.canaries import SIZES, STEADY, STEP_SIZE, TURNING, Canaries, canary_data, canary_model, make_canaries
from silodp.audit.coins import given_coins, is_read_by_coins
from silodp.audit.observe import Programs, Traces, View, observe
from silodp.audit.rows import BLIND, CORRELATED, EXCEEDED, OK, REPEATED, WEAK, Further, Row
from silodp.audit.shuffled import BATCH, Attacks, Found, message_data, message_model
from silodp.channels.channel import Form
from silodp.config import Config
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.plan.plan import Plan
from silodp.privacy import accountant
from silodp.privacy.kinds import Spent
from silodp.run.prepare import Prepared, prepare
from silodp.sampling import Cumulative, OnePass

ROUNDS = 6
KINDS = (STEADY, TURNING)
EPSILON, DELTA = 8.0, 1e-5  # loose on purpose: what leaks is then large against the standard error
RUNS = 3  # each with a seed of its own; their trials are read together


@dataclass(frozen=True)
class Case:
    """An algorithm under a trust model, in one of the forms that the trust model is audited in."""

    name: str
    trust: str
    form: Form

    @property
    def masked(self) -> bool:
        """With the claim that rand-k's mask hides what it drops."""
        return self.form.changes.get("privacy.mask_amplification", False)

    @property
    def randomizer(self) -> str | None:
        """Of messages that are attacked one by one."""
        return self.form.changes.get("algorithm.randomizer") if self.form.per_record else None


def audit(
    algorithms: Sequence[str] | None = None,
    trusts: Sequence[str] | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    processes: int = 1,
) -> list[Row]:
    """A row for each named private algorithm (default: all) under each of its trust models (or those named).

    The whole table ends with rows of the stage before training and of real message mode.

    `options`: algorithm options in the place of those of the entry's example.
    `processes`: that share the rows. Tracing holds Python's lock, so threads of one process wait for each other.
    """
    names = [name for name, entry in REGISTRY.items() if entry.private] if algorithms is None else algorithms
    for name in names:
        refuse(name, find(name), trusts)
    own = {f"algorithm.{key}": value for key, value in (options or {}).items()}
    wanted = lambda row: trusts is None or row.trust in trusts
    cases = [case for name in names for case in cases_of(name, changes=own) if wanted(case)]
    if not cases:
        supported = " or ".join(trusts_of(find(names[0])))
        raise ConfigError(f"privacy.trust = {', '.join(trusts or ())}: {names[0]} runs under {supported}")
    extra = [] if algorithms is not None else [i for i, row in enumerate(further_rows()) if wanted(row)]
    jobs = alike(cases)
    asked = [(further_row, (i,)) for i in extra]  # first: some wait for processes
    name = secrets.token_hex()
    asked += [(audit_several, ([cases[i] for i in job], seed, name)) for job in jobs]
    found = shared_work(asked, processes)
    rows = dict(zip(chain.from_iterable(jobs), chain.from_iterable(found[len(extra) :]), strict=True))
    return [*(rows[i] for i in range(len(cases))), *found[: len(extra)]]


def alike(cases: Sequence[Case]) -> list[list[int]]:
    """Which cases share a job, as places: those of one class under one trust model, because they share programs, and
    the messages of all algorithms, because equal levels are attacked once. Long jobs come first."""
    jobs: dict[Any, list[int]] = {}
    for i, case in enumerate(cases):
        kind = None if case.form.per_record else (find(case.name).build, case.trust)
        jobs.setdefault(kind, []).append(i)
    return sorted(jobs.values(), key=len, reverse=True)


def shared_work(asked: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], processes: int) -> list[Any]:
    """Results in order: of threads, or of further processes beside this one, which has imported everything already."""
    if processes == 1:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda job: job[0](*job[1]), asked))
    left, found = iter(enumerate(asked)), {}  # one at a time takes from an iterator that is a list's

    def work(run: Callable[..., Any]) -> None:
        for place, (function, given) in left:
            found[place] = run(function, *given)

    others, kept_in = processes - 1, jax.config.values["jax_compilation_cache_dir"]
    started = {"initializer": cache.keep_programs_in, "initargs": (kept_in,)}
    with ProcessPoolExecutor(others, get_context("spawn"), **started) as pool, ThreadPoolExecutor(others) as hands:
        handed = [hands.submit(work, lambda *job: pool.submit(*job).result()) for _ in range(others)]
        work(lambda function, *given: function(*given))
        for each in handed:
            each.result()
    return [found[place] for place in range(len(asked))]


def further_rows() -> list[Further]:
    return [*first.rows(), *stages.rows(), Further("shuffled", share_row), *real.rows()]


def share_row() -> Row:
    """Sums over a Poisson share of the records: the coins hide who was drawn, too."""
    changes = {"algorithm.grid": 6000, "privacy.epsilon": 4.0, "algorithm.batch_share": 0.5}
    row = audit_case(Case("sdp-spider", "shuffled", Form(changes, smaller=2)))
    return replace(row, streams=(*row.streams[:-1], f"{row.streams[-1]} (Poisson share)"))


def further_row(place: int) -> Row:
    return further_rows()[place].run()


class Shared:
    """What several cases of one audit have in common. It is not kept any longer: the code may be another then."""

    def __init__(self, traces: Traces) -> None:
        self.attacks = Attacks()
        self.programs = {dear: Programs(dear, traces) for dear in (False, True)}


@lru_cache(maxsize=1)
def traces_of(audit: str) -> Traces:
    """Of one audit in this process, for all of its jobs."""
    return Traces()


def audit_several(cases: Sequence[Case], seed: int, audit: str) -> list[Row]:
    shared = Shared(traces_of(audit))
    return [audit_one(case, seed, shared) for case in cases]


def trusts_of(entry: Entry) -> Sequence[str]:
    return registry.names("channel") if entry.trusts is None else entry.trusts


def cases_of(name: str, trusts: Sequence[str] | None = None, changes: Mapping[str, Any] | None = None) -> list[Case]:
    """An algorithm in every form of its trust models (or those named), with these changes of the config."""
    entry = find(name)
    forms = lambda trust: registry.find("channel", trust).audited(entry, entry.example)
    changed = lambda form: form._replace(changes=form.changes | dict(changes or {}))
    return [Case(name, trust, changed(form)) for trust in trusts or trusts_of(entry) for form in forms(trust)]


def refuse(name: str, entry: Entry, trusts: Sequence[str] | None) -> None:
    if not entry.private:
        raise ConfigError(f"algorithm.name = {name!r}: adds no noise, so it claims nothing to audit")
    for trust in trusts or ():
        registry.check("channel", trust)


def audit_case(case: Case, seed: int = 0) -> Row:
    return audit_one(case, seed, Shared(Traces()))


def audit_one(case: Case, seed: int, shared: Shared) -> Row:
    return audit_messages(case, seed, shared.attacks) if case.form.per_record else audit_run(case, seed, shared)


def audit_messages(case: Case, seed: int, attacks: Attacks) -> Row:
    """Messages sent one by one: what the channel sends at the plan's eps0."""
    found = attacks.on(prepare(small_run(case, seed), message_data(), message_model()))
    return Row(
        case.name,
        case.trust,
        ("message",),
        found.claim_mu,
        found.central.mu,
        found.central.error,
        message_verdict(found),
        found.correlation_rounds,
        found.correlation_silos,
        convicts_from=min(found.local.convicts_from(found.claim_eps0), found.central.convicts_from(found.claim_mu)),
        randomizer=case.randomizer,
        claim_eps0=found.claim_eps0,
        measured_eps0=found.local.mu,
    )


def message_verdict(found: Found) -> str:
    repeated = max(found.correlation_rounds, found.correlation_silos) > CORRELATED / math.sqrt(found.draws)
    verdicts = (
        verdict(Read(found.claim_eps0, found.attained, found.local), repeated),
        verdict(Read(found.claim_mu, False, found.central), repeated),
    )
    return gravest(verdicts)


def audit_run(case: Case, seed: int, shared: Shared) -> Row:
    """Whole runs, attacked through their canaries."""
    canaries = make_canaries(seed, sizes_of(case), RUNS)
    prepared = prepare(small_run(case, seed), canary_data(canaries), canary_model(canaries.position.size))
    views = observe(prepared, canaries, shared.programs[case.form.smaller > 1])
    rounds, silos = noise_correlations(views, canaries)
    repeated = max(rounds, silos or 0.0) > CORRELATED / math.sqrt(canaries.blank.sum() * RUNS)
    read, given = read_run(prepared, views, canaries), None
    verdicts = [verdict(read, repeated)]
    if is_read_by_coins(prepared.plan):
        given = "if kept" if case.masked else "if drawn"
        claim, reading, frequent = given_coins(prepared, views, canaries)
        read = Read(claim, True, reading)
        verdicts += [verdict(read, repeated), EXCEEDED if frequent else OK]
    return Row(
        case.name,
        case.trust,
        tuple(dict.fromkeys(s.name for own in prepared.plan.declared.streams for s in own if s.count)),
        read.claim,
        read.worst.mu,
        read.worst.error,
        gravest(verdicts),
        rounds,
        silos,
        case.masked,
        read.worst.convicts_from(read.claim),
        given,
    )


@dataclass(frozen=True)
class Read:
    """A claim, whether it is attained, and the worst that canaries show of it."""

    claim: float
    attained: bool
    worst: Reading


def read_run(prepared: Prepared, views: list[View], canaries: Canaries) -> Read:
    claim, attained = claimed(prepared.plan)
    read = attack.separation if attained else attack.guessing
    readings = [read(scores(prepared, views, canaries, kind)) for kind in KINDS]
    return Read(claim, attained, max(readings, key=lambda reading: reading.least))


def gravest(verdicts: Sequence[str]) -> str:
    return next((each for each in (EXCEEDED, REPEATED, BLIND) if each in verdicts), OK)


def verdict(read: Read, repeated: bool) -> str:
    if read.worst.least > read.claim:
        return EXCEEDED
    if repeated:
        return REPEATED
    return BLIND if read.attained and read.worst.most < WEAK * read.claim else OK


def sizes_of(case: Case) -> tuple[int, ...]:
    return tuple(n // case.form.smaller for n in SIZES)


def small_run(case: Case, seed: int) -> Config:
    """The algorithm's example, with batches and messages that suit so many records and parameters."""
    entry = find(case.name)
    options: dict[str, Any] = {"name": case.name, "rounds": ROUNDS, "step_size": STEP_SIZE} | dict(entry.example)
    if case.form.per_record:
        options |= {key: BATCH for key in ("batch", "batch_local", "batch_first") if key in options}
    else:
        least, coordinates = min(sizes_of(case)), sum(sizes_of(case))
        half = least // 2
        # In small batches SVRG's bound is near what its canaries do: no rounding turns their gradients.
        chunk = {"one-pass": least // ROUNDS, "cumulative": least // ROUNDS, "two-level": least // 16}.get(
            entry.sampling or "", half
        )
        # Differences must not be zero: SVRG's and SAGA's canaries need a clock that no mask stops.
        whole = case.form.keep_all or entry.sampling == "two-level"
        keep = coordinates + 1 if whole else coordinates // 8
        suited = {"batch": chunk, "batch_local": half, "batch_first": half, "keep": keep}
        options |= {key: value for key, value in suited.items() if key in options}
    privacy = {"trust": case.trust, "epsilon": EPSILON, "delta": DELTA, "split": 0.5}
    tree = {"privacy": privacy, "algorithm": options, "run": {"seed": seed}}
    for dotted, value in case.form.changes.items():
        section, _, key = dotted.partition(".")
        tree[section][key] = value
    return parse_config(tree)


def claimed(plan: Plan) -> tuple[float, bool]:
    """The plan's mu, averaged over canaries, and whether it is attained: so it is for plainly Gaussian releases.

    Otherwise the mu of a Gaussian mechanism under which signs are guessed right as often as the plan admits.
    """
    sizes = np.array(plan.facts.sizes)
    spent = [seen_by_canaries(plan, silo) for silo in range(sizes.size)]
    exact = [accountant.nearest_gdp(own) for own in spent]
    known = [mu for mu in exact if mu is not None]
    if len(known) == sizes.size:
        return float(sizes @ known / sizes.sum()), True
    right = [right_guesses(own) for own in spent]
    return 2 * float(gaussian.ppf(sizes @ right / sizes.sum())), False


def seen_by_canaries(plan: Plan, silo: int) -> list[Spent]:
    """Without releases that are no vectors of parameters: canaries have no coordinate of their own in a statistic."""
    other = {name for name, size in plan.sizes.items() if size != plan.facts.parameters}
    return [spent for spent in plan.spent(silo) if spent.releases.stream not in other]


def right_guesses(spent: Sequence[Spent]) -> float:
    """Most that can be right of guesses which err as often on either side: 1 - p >= (1 - delta) / (1 + e^epsilon)."""
    return min(1 - (1 - accountant.delta(spent, level)) / (1 + math.exp(level)) for level in (0.0, 1.0, 2.0, 4.0))


def scores(prepared: Prepared, views: list[View], canaries: Canaries, kind: int) -> list[attack.Scores]:
    """Scores of one kind of canary, in groups that are equally exposed as far as everybody knows."""
    groups = []
    for silo, view in enumerate(views):
        for chosen in exposed_alike(prepared, canaries, silo):
            rows = chosen & (canaries.kind == kind)
            signs = canaries.sign[:, rows].ravel()
            groups.append(attack.agreement(in_rows(view, rows), signs, in_rows(view, canaries.blank)))
    return groups


def in_rows(view: View, rows: np.ndarray) -> np.ndarray:
    """Some coordinates of the releases, those of all runs side by side."""
    return view.releases[:, :, rows].reshape(len(view.releases), -1)


def exposed_alike(prepared: Prepared, canaries: Canaries, silo: int) -> list[np.ndarray]:
    """One group, or the chunks of a single pass, whose rounds are public. Of running sums the first chunk: the claim
    is about the record that is in all of them."""
    own = canaries.silo == silo
    rule = getattr(prepared.setting.algorithm, "batch", None)
    if not isinstance(rule, OnePass):
        return [own]
    chunk = int(rule.divisor(int(own.sum())))
    rounds = 1 if isinstance(rule, Cumulative) else prepared.problem.rounds
    return [own & (canaries.position // chunk == r) for r in range(rounds)]


def noise_correlations(views: list[View], canaries: Canaries) -> tuple[float, float | None]:
    """Between releases about one silo, and between silos that add noise themselves."""
    noises = [in_rows(view, canaries.blank) for view in views]
    rounds = max(attack.repeated_noise(noise) for noise in noises)
    own = [noise[view.own_noise] for noise, view in zip(noises, views, strict=True)]
    if any(not len(noise) for noise in own):
        return rounds, None
    pairs = [(a, b) for i, a in enumerate(own) for b in own[:i]]
    return rounds, max((attack.shared_noise(a, b) for a, b in pairs), default=None)
