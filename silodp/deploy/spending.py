"""What releases were and what they cost, as JSON keeps them: mechanism, multiplier, sampling and count. No JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from silodp.privacy import adaptive, clones, kinds
from silodp.privacy.kinds import Releases, Spent

if TYPE_CHECKING:
    from silodp.deploy.ledger import Run

KINDS = (kinds.Full, kinds.Disjoint, kinds.Poisson, kinds.FixedSize, kinds.TwoLevel, kinds.Masked)
BESIDE = ("loss", "lost", "coins")  # of releases that are not quite those of their kind; written where they are not 0
BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in (*KINDS, clones.Messages, clones.Shuffled)}


def written(spent: Iterable[Spent]) -> list[dict[str, Any]]:
    """Infinite noise is written as null."""
    return [
        {
            "stream": each.releases.stream,
            "count": each.releases.count,
            "multiplier": None if math.isinf(each.multiplier) else each.multiplier,
            "sampling": _plain(each.releases.sampling),
        }
        | {name: value for name in BESIDE if (value := getattr(each.releases, name))}
        for each in spent
    ]


def read(lines: Iterable[Mapping[str, Any]]) -> list[Spent]:
    return [
        Spent(
            Releases(
                line["stream"], line["count"], _kind(line["sampling"]), **{k: line[k] for k in BESIDE if k in line}
            ),
            math.inf if line["multiplier"] is None else line["multiplier"],
        )
        for line in lines
    ]


def _plain(part: Any) -> Any:
    if not is_dataclass(part):
        return part
    name = type(part).__name__
    if BY_NAME.get(name) is not type(part):
        raise ValueError(f"{name}: this ledger cannot keep such releases")
    return {"kind": name} | {field.name: _plain(getattr(part, field.name)) for field in fields(part)}


def _kind(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return BY_NAME[tree["kind"]](**{name: _kind(value) for name, value in tree.items() if name != "kind"})


def is_charged_singly(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run that has ended costs what it has released, and nothing that it has not."""
    return all(adaptive.is_gaussian(part) for part in read(lines))


def charged(run: Run) -> list[Spent]:
    """What a run costs: its whole plan while it is open, and afterwards what was used of it."""
    return read(run.reserved) if run.closed is None else used_of(run)


def used_of(run: Run) -> list[Spent]:
    """What it costs if it ends now."""
    return adaptive.used(read(run.reserved), read(run.counted))


def epsilon_over(runs: Iterable[Run], delta: float, planned: Mapping[str, Sequence[Spent]] | None = None) -> float:
    """Epsilon of all runs together. `planned`: by run, what is charged whatever the ledger says."""
    return adaptive.epsilon(({each.run: charged(each) for each in runs} | dict(planned or {})).values(), delta)
