"""Ways to divide one table among silos, for experiments. The rule and its seed are public.

A partition is a list of arrays of row numbers, one per silo. All are disjoint except
`label-pairs-shared`. Where each comes from: `iid` DIFF2 and MB-PSGM-FG; `by-label` SoteriaFL;
`label-pairs` and `by-class` FedProx-SPIDER; `round-robin` DP-mu2 (record (t-1)N + i is the t-th
of silo i).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from jaxtyping import Int

Rows = Int[np.ndarray, " k"]
DIRICHLET_DRAWS = 100


@dataclass(frozen=True)
class Request:
    """What a partition rule may look at. `labels` are class indices; None for regression."""

    records: int
    labels: Int[np.ndarray, " n"] | None = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    silos: int | None
    sizes: tuple[int, ...] | None
    alpha: float | None
    rng: np.random.Generator

    def count(self, implied: int | None = None) -> int:
        """Number of silos, from `silos` or `sizes`, or implied by the rule."""
        stated = len(self.sizes) if self.sizes is not None else self.silos
        if implied is not None and stated not in (None, implied):
            raise ValueError(f"silos = {stated}: this partition of this data makes {implied} silos")
        count = stated if stated is not None else implied
        if count is None or count < 1:
            raise ValueError(f"silos = {count}: need a number of silos, 1 or more")
        if 2 * count > self.records:
            raise ValueError(f"silos = {count}: too many for {self.records} records; every silo needs 2 or more")
        return count


def divide(kind: str, request: Request) -> list[Rows]:
    """Row numbers of each silo under the rule called `kind`."""
    if kind not in PARTITIONS:
        raise ValueError(f"partition = '{kind}': need one of {', '.join(PARTITIONS)}")
    if request.sizes is not None and kind not in ("iid", "by-label"):
        raise ValueError(f"sizes: partition '{kind}' makes its own; use them with iid or by-label")
    if (request.alpha is not None) != (kind == "dirichlet"):
        raise ValueError(f"alpha = {request.alpha}: needed by, and only by, partition 'dirichlet'")
    if kind not in ("iid", "round-robin") and request.labels is None:
        raise ValueError(f"partition = '{kind}' needs classes; for regression use iid, round-robin")
    return PARTITIONS[kind](request)


def _cut(rows: Rows, request: Request) -> list[Rows]:
    """Contiguous pieces of `rows`: of the given sizes, or as equal as can be."""
    count, sizes = request.count(), request.sizes
    if sizes is None:
        return np.array_split(rows, count)
    if min(sizes) < 2 or sum(sizes) > len(rows):
        raise ValueError(f"sizes = {list(sizes)}: need 2 or more each and at most {len(rows)} in all, got {sum(sizes)}")
    return np.split(rows, np.cumsum(sizes))[:-1]


def _iid(request: Request) -> list[Rows]:
    return _cut(request.rng.permutation(request.records), request)


def _by_label(request: Request) -> list[Rows]:
    assert request.labels is not None
    return _cut(np.argsort(request.labels, kind="stable"), request)


def _round_robin(request: Request) -> list[Rows]:
    count = request.count()
    return [np.arange(silo, request.records, count) for silo in range(count)]


def _rows_of_each_class(request: Request) -> list[Rows]:
    assert request.labels is not None
    return [np.flatnonzero(request.labels == c) for c in range(len(request.classes))]


def _by_class(request: Request) -> list[Rows]:
    request.count(implied=len(request.classes))
    return _rows_of_each_class(request)


def _dirichlet(request: Request) -> list[Rows]:
    """Each class is spread over the silos in Dirichlet(alpha) shares; small alpha, few labels."""
    count, alpha = request.count(), request.alpha
    if alpha is None or not 0 < alpha < np.inf:
        raise ValueError(f"alpha = {alpha}: need a positive number")
    for _ in range(DIRICHLET_DRAWS):
        silos = _dirichlet_draw(request, count, alpha)
        if min(map(len, silos)) >= 2:
            return silos
    raise ValueError(
        f"alpha = {alpha}: {DIRICHLET_DRAWS} draws all left a silo with fewer than 2 records; "
        f"use a larger alpha or fewer than {count} silos"
    )


def _dirichlet_draw(request: Request, count: int, alpha: float) -> list[Rows]:
    pieces: list[list[Rows]] = []
    for rows in _rows_of_each_class(request):
        shares = request.rng.dirichlet(np.full(count, alpha))
        ends = np.round(np.cumsum(shares) * len(rows)).astype(int)[:-1]
        pieces.append(np.split(request.rng.permutation(rows), ends))
    return [request.rng.permutation(np.concatenate(parts)) for parts in zip(*pieces, strict=True)]


def _pairs(request: Request) -> list[tuple[int, int]]:
    """(even class, odd class) of each silo."""
    if not all(name.isdecimal() for name in request.classes):
        raise ValueError("partition = 'label-pairs' needs labels that are whole numbers (digits)")
    even = [c for c, name in enumerate(request.classes) if int(name) % 2 == 0]
    odd = [c for c, name in enumerate(request.classes) if int(name) % 2 == 1]
    pairs = list(product(even, odd))
    request.count(implied=len(pairs))
    return pairs


def _label_pairs(request: Request) -> list[Rows]:
    """The records of a digit are divided among the silos that hold it."""
    pairs = _pairs(request)
    holders = np.bincount(np.ravel(pairs), minlength=len(request.classes))
    pieces = [
        iter(np.array_split(request.rng.permutation(rows), max(1, number)))
        for rows, number in zip(_rows_of_each_class(request), holders, strict=True)
    ]
    return [request.rng.permutation(np.concatenate([next(pieces[even]), next(pieces[odd])])) for even, odd in pairs]


def _label_pairs_shared(request: Request) -> list[Rows]:
    """As the paper did: every silo gets all records of both its digits, so silos share records."""
    rows = _rows_of_each_class(request)
    return [request.rng.permutation(np.concatenate([rows[even], rows[odd]])) for even, odd in _pairs(request)]


PARTITIONS: dict[str, Callable[[Request], list[Rows]]] = {
    "iid": _iid,
    "by-label": _by_label,
    "by-class": _by_class,
    "label-pairs": _label_pairs,
    "label-pairs-shared": _label_pairs_shared,
    "dirichlet": _dirichlet,
    "round-robin": _round_robin,
}


def hold_out(parts: list[Rows], fraction: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Sorted (kept, held out) rows; the same fraction of every part is held out."""
    if not 0 < fraction < 1:
        raise ValueError(f"test = {fraction}: need a fraction between 0 and 1")
    drawn = [rng.permutation(rows)[: round(fraction * len(rows))] for rows in parts]
    test = np.sort(np.concatenate(drawn))
    kept = np.setdiff1d(np.concatenate(parts), test)
    if not len(test) or not len(kept):
        raise ValueError(f"test = {fraction}: leaves no test or no training records")
    return kept, test


def select(
    records: int,
    labels: np.ndarray | None,
    limit: int | None,
    per_class: int | None,
    rng: np.random.Generator,
) -> Rows:
    """Sorted rows: the first `per_class` of every class, of those `limit` drawn at random."""
    rows = np.arange(records)
    if per_class is not None:
        if labels is None or per_class < 1:
            raise ValueError(f"per_class = {per_class}: need 1 or more, and a classification task")
        each = [np.flatnonzero(labels == c)[:per_class] for c in np.unique(labels)]
        rows = np.sort(np.concatenate(each))
    if limit is not None:
        if not 1 <= limit <= len(rows):
            raise ValueError(f"limit = {limit}: need 1 to {len(rows)}, the number of records")
        rows = np.sort(rng.choice(rows, limit, replace=False))
    return rows
