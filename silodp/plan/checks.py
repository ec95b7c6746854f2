"""Who vouches for the bounds of a plan's releases: the library, its proofs, or an author from outside."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import PyTree

from silodp import flow, registry, vouched
from silodp.errors import ConfigError
from silodp.objective import ModelObjective, refuse_shared_loss
from silodp.plan.parts import TRAINING
from silodp.plan.plan import Plan

COMPUTED = "computed by the library"
PROVED = "proved for this algorithm (docs/privacy.md)"
STATED = "stated by the author, not verified"


def vouched_bounds(plan: Plan, objective: ModelObjective, records: PyTree) -> dict[str, str]:
    """Follow records through the queries, refuse leaks, and say of each stream where its bound comes from.

    `records`: all silos', stacked; only shapes and types are looked at. A run without privacy promises nothing.
    """
    if not plan.private:
        return {}
    findings = examined(plan, objective, records)
    name = plan.config.algorithm.name
    flow.refuse_leaks(name, findings)
    refuse_open_channel(plan, objective, records)
    by_author = PROVED if registry.is_own("algorithm", name) else author_words(vouched.passed(type(plan.algorithm)))
    return {stream: by_author if stream in findings.stated else COMPUTED for stream in plan.streams}


def refuse_open_channel(plan: Plan, objective: ModelObjective, records: PyTree) -> None:
    """A trust model from outside, in which silos noise their messages themselves, must do so."""
    trust = plan.config.privacy.trust
    if registry.is_own("channel", trust) or not plan.channel.gaussian:
        return
    found = flow.examine_messages(plan.noised, objective, one_silo(records), flow.expected(plan.declared))
    if found.leaks:
        raise ConfigError(f"privacy.trust = {trust!r}: {found.leaks[0]}; send what `privatise_local` gives")


def one_silo(records: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), records)


_examined: dict[Any, flow.Findings] = {}
MOST_EXAMINED = 256


def examined(plan: Plan, objective: ModelObjective, records: PyTree) -> flow.Findings:
    """What was found, once for all settings of a sweep that run the same program."""
    one = one_silo(records)
    parts = (plan.algorithm, plan.noised, objective)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(one))
    declared = flow.expected(plan.declared)
    key = jax.tree.structure(parts), shapes, tuple(declared.items())
    if key not in _examined:
        if len(_examined) >= MOST_EXAMINED:
            _examined.clear()
        if plan.stages[-1].name == TRAINING:  # others ask for no loss
            refuse_shared_loss(objective, one_silo(one))  # one record of it
        _examined[key] = flow.examine(plan.algorithm, objective, plan.noised, one, declared)
    return _examined[key]


def author_words(passed: str | None) -> str:
    return STATED if passed is None else f"stated by the author; {passed}"


def outside_words(plan: Plan) -> list[str]:
    """What the certificate says of a trust model or a randomizer from outside."""
    words = []
    for kind, part in vouched.outside_parts(plan.config).items():
        if kind != "algorithm":
            verdict = vouched.passed(part) or "not verified"
            words.append(f"the {kind} {part.__name__} is not the library's own: {verdict}")
    return words
