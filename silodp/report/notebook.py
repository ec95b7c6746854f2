"""What a notebook shows of an estimator, a run and a certificate: the report's own sections, in one box."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from silodp.report.html import Html, joined, tag
from silodp.report.story import (
    ON_RECORDS,
    Story,
    beginning,
    each_silo,
    histories,
    how_good,
    measured,
    not_covered,
    plain_words,
    sections_of,
)
from silodp.report.words import worst

# Rules of the box only: a notebook's own page must stay as it is, in the dark as well.
STYLE = """
.silodp { background: #fff; color: #1b1b1f; border: 1px solid #c9c9d2; border-radius: 4px; padding: .4rem .9rem;
  max-width: 60rem; overflow-x: auto; }
.silodp p, .silodp li, .silodp summary, .silodp figcaption { color: #1b1b1f; max-width: 46rem; }
.silodp h2 { color: #1b1b1f; font-size: 1.05rem; margin: .9rem 0 .3rem; }
.silodp .stamp { border: 2px solid #8a5a00; background: #fff6e0; color: #4a3000; padding: .4rem .7rem; }
.silodp table { border-collapse: collapse; margin: .4rem 0; color: #1b1b1f; background: #fff; }
.silodp caption { text-align: left; font-weight: 600; color: #1b1b1f; white-space: nowrap; }
.silodp th, .silodp td { border: 1px solid #c9c9d2; padding: .2rem .5rem; text-align: left; background: #fff; }
.silodp td.number { text-align: right; }
.silodp svg { max-width: 100%; height: auto; }
.silodp svg text { font: 13px system-ui, sans-serif; fill: #1b1b1f; }
.silodp summary { cursor: pointer; font-weight: 600; }
"""


def box(*parts: Any) -> Html:
    return tag("div", Html(f"<style>{STYLE}</style>"), *parts, class_="silodp")


def folded(title: str, parts: Iterable[Html]) -> Html:
    """Shown when somebody asks for it."""
    inside = joined(parts)
    return tag("details", tag("summary", title), inside) if inside else Html("")


def of_story(story: Story) -> Html:
    """What matters in sight, the rest folded."""
    certificate = story.certificate
    words = [] if certificate is None else [plain_words(certificate, worst(certificate))]
    silos = [] if certificate is None else [each_silo(certificate["silos"])]
    went = [tag("p", ON_RECORDS), *histories(story)] if story.history else []
    return box(
        tag("p", tag("strong", story.title)), *beginning(certificate), *words, *how_good(story),
        *([tag("p", ON_RECORDS), *measured(story.found)] if story.found else []),
        folded("Each silo", silos), folded("How it went", went),
        folded("What is NOT covered", not_covered(certificate)),
    )  # fmt: skip


class Certificate(dict[str, Any]):
    """A certificate as data that a notebook shows as text for people."""

    def _repr_html_(self) -> str:
        return box(*beginning(self), *sections_of(self), *not_covered(self))
