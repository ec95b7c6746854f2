"""HTML that is escaped by construction: `tag` escapes every child and attribute that is not `Html` already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from silodp.errors import plainly

STYLE = """
:root { color-scheme: light; --ink: #1b1b1f; --soft: #55555f; --line: #c9c9d2; --paper: #fff; --wash: #f4f4f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p, li { max-width: 46rem; }
.lead { font-size: 1.1rem; }
.stamp { border: 2px solid #8a5a00; background: #fff6e0; color: #4a3000; padding: .6rem .9rem; font-weight: 600; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0 1.2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; white-space: nowrap; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
thead th { background: var(--wash); }
td.number { text-align: right; white-space: nowrap; }
code, .hash { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0 1.4rem; max-width: 46rem; }
figcaption { color: var(--soft); font-size: .93rem; }
svg, img { max-width: 100%; height: auto; }
svg text { font: 13px system-ui, "DejaVu Sans", Arial, sans-serif; fill: var(--ink); }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } h2 { break-after: avoid; }
  figure, tr, .stamp { break-inside: avoid; } .scroll { overflow: visible; } @page { margin: 18mm; } }
"""
# Were something not escaped after all: no script runs, and nothing is fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Html(str):
    """Markup that is safe to put into a page."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element; `class_` is the attribute class, `font_size` is font-size; an attribute that is None is left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(children)
    return Html(f"<{name}{told}>{inside}</{name}>")


def escaped(text: Any) -> str:
    return escape(plainly(str(text).replace("\n", " ")))


def joined(children: Iterable[Any]) -> Html:
    return Html("".join(child if isinstance(child, Html) else escaped(child) for child in children))


def items(lines: Iterable[Any]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = ()) -> Html:
    """The first cell of a row is its heading; `numbers`: the columns that are set to the right."""
    right = set(numbers)
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads)))
    body = tag("tbody", *(table_row(row, right) for row in rows))
    whole = tag("table", tag("caption", caption), head, body)
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)


def table_row(row: Sequence[Any], right: set[int]) -> Html:
    cells = [tag("td", cell, class_="number" if i in right else None) for i, cell in enumerate(row) if i]
    return tag("tr", tag("th", row[0], scope="row"), *cells)


def facts(caption: str, pairs: Iterable[tuple[str, Any]]) -> Html:
    """A table of two columns."""
    return table(caption, ("what", "value"), list(pairs))


def section(title: str, *parts: Any) -> Html:
    return tag("section", tag("h2", title), *parts)


def page(title: str, *parts: Any) -> str:
    """A whole document, with everything it needs in it."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    body = tag("body", tag("main", tag("h1", title), *parts))
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'
