"""What an audit found, and how it is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from silodp.audit.attack import Reading

OK, EXCEEDED, BLIND, REPEATED = "ok", "claim exceeded", "canaries too weak", "noise repeats"
CORRELATED = 5  # standard errors of a correlation: there are some hundred pairs of releases in the table
WEAK = 0.9  # a claim that is attained must be read at least to this part


@dataclass(frozen=True)
class Row:
    """What one algorithm under one trust model claims and shows. None: no silo adds noise of its own.

    convicts_from: noise that is too small by this factor would be convicted; inf: no error of the noise would be.
    given: the coins under which a single release is read; else mu is that of the whole run. Of shuffled messages mu is
    that of a single round, and eps0 that of a single message.
    """

    algorithm: str
    trust: str
    streams: tuple[str, ...]
    claim_mu: float
    measured_mu: float
    standard_error: float
    verdict: str
    noise_correlation_rounds: float
    noise_correlation_silos: float | None
    masked: bool = False
    convicts_from: float = math.inf
    given: str | None = None
    randomizer: str | None = None
    claim_eps0: float | None = None
    measured_eps0: float | None = None


class Further(NamedTuple):
    """A row that belongs to no algorithm's own, still to be run."""

    trust: str
    run: Callable[[], Row]


def attained_row(
    what: tuple[str, str, str], claim: float, reading: Reading, repeated: bool, rounds: float, silos: float | None
) -> Row:
    """Of an algorithm, a trust model and a stream whose claim is attained."""
    blind = reading.most < WEAK * claim
    verdict = EXCEEDED if reading.least > claim else REPEATED if repeated else BLIND if blind else OK
    name, trust, stream = what
    found = (claim, reading.mu, reading.error, verdict, rounds, silos)
    return Row(name, trust, (stream,), *found, convicts_from=reading.convicts_from(claim))


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON, which has no infinity: a release without noise measures null."""
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    return [{key: finite(value) for key, value in asdict(row).items()} for row in rows]


def described(row: Row) -> str:
    if row.claim_eps0 is not None:
        return f"{row.randomizer}, eps0 {row.claim_eps0:.3f}: {row.measured_eps0:.3f}"
    return ", ".join(row.streams) + (f" ({row.given})" if row.given else "")


def factor(value: float) -> str:
    return f"x {value:.2f}" if math.isfinite(value) else "never"


def render(rows: Sequence[Row]) -> Table:
    table = Table("algorithm", "trust", "streams", "claim", "measured", "convicts from", "noise: rounds", "silos", "")
    for row in rows:
        table.add_row(
            row.algorithm,
            row.trust,
            described(row),
            f"{row.claim_mu:.3f}",
            f"{row.measured_mu:.3f} +- {row.standard_error:.3f}",
            factor(row.convicts_from),
            f"{row.noise_correlation_rounds:.3f}",
            "-" if row.noise_correlation_silos is None else f"{row.noise_correlation_silos:.3f}",
            row.verdict,
            style=None if row.verdict == OK else "bold red",
        )
    return table
