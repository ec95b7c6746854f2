"""The two kinds of refusal: a user's mistake, and what a party does not accept from another."""

import re
from collections.abc import Iterable

# Characters that are not seen and do something: end a line, move a cursor, turn the order of letters, break a file.
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and what would be right.

    Example:
        >>> import silodp
        >>> silodp.train({"algorithm": {"name": "spidr"}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        silodp.errors.ConfigError: algorithm.name = 'spidr': unknown (did you mean spider?); known: ...
    """


class Inadmissible(ConfigError):
    """A paper's own conditions exclude every noise level, or what is asked for."""

    def __init__(self, reasons: tuple[str, ...]):
        super().__init__(f"privacy.calibration = 'paper': no noise is admissible: {'; '.join(reasons)}")
        self.reasons = reasons


class Problems(ConfigError):
    """Everything that is wrong with a schema or with tables, one line each; no line holds a value of a record.

    `lines` are the problems. `draft` is TOML to add to the schema, where columns are not in it.
    """

    def __init__(self, lines: Iterable[str], draft: str = ""):
        self.lines, self.draft = tuple(map(plainly, lines)), draft  # a column's name may hold a line break
        super().__init__("\n".join([*self.lines, *([f"add to the schema:\n{draft}"] if draft else [])]))


class Refused(ValueError):
    """Bytes, a message or a request that a party does not accept, or a peer that went away; the text says why."""


class Gone(Refused):
    """A peer that went away."""


class Undecided(Refused):
    """A silo on the border between two grids, which asks to be told the one that the others take: an exponent."""

    def __init__(self, either: tuple[int, int]):
        super().__init__(f"grid: 2^{either[0]} or 2^{either[1]}; tell which")
        self.either = either


class SilodpWarning(UserWarning):
    """What is allowed and costs more than it seems to: a weak promise, or a silo that brings more noise than data."""


def one_line(error: object) -> str:
    """An error as a terminal may show it: one line, and no character of a file's that could do anything there."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))


def plainly(text: str) -> str:
    """A name as a page may show it: what it looks like is all that it does.

    Example:
        >>> from silodp.errors import plainly
        >>> plainly("north\\nSilo south: private")
        'north\ufffdSilo south: private'
    """
    return UNSEEN.sub("\ufffd", text)
