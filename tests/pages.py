"""A reader of the library's pages that finds what a person with a screen reader, or without a network, would miss."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "img", "br", "link", "input", "hr"}
FETCHING = {"src", "href", "srcset", "data", "action", "poster"}


class Reader(HTMLParser):
    """Collects elements and text, and checks that they are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parents: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{name}> is not closed" for name in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.parents.append((tag, self.open[-1] if self.open else ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def problems(page: str) -> list[str]:
    """What is wrong with a page of ours; empty when it is as promised."""
    read = Reader(page)
    found = list(read.problems)
    fetched = [v for _, a in read.elements for k, v in a.items() if k in FETCHING and not (v or "").startswith("data:")]
    found += [f"fetches {url}" for url in fetched]
    found += [f"<{name}>" for name in ("script", "iframe", "link", "object") if read.named(name)]
    found += [f"fetches {url}" for url in re.findall(r"url\(|@import", page)]
    found += [] if read.named("html")[0].get("lang") else ["no language"]
    found += [] if len(read.named("title")) >= 1 and "<title>" in page.split("<body>")[0] else ["no title"]
    levels = [int(name[1]) for name, _ in read.elements if re.fullmatch(r"h[1-6]", name)]
    found += [] if levels[:1] == [1] and levels.count(1) == 1 else ["not one h1, first"]
    found += [f"h{b} after h{a}" for a, b in pairwise(levels) if b > a + 1]
    found += [f"{len(read.named('table'))} tables, {len(read.named('caption'))} captions"] * (
        len(read.named("table")) != len(read.named("caption"))
    )
    found += ["a heading cell without scope" for cell in read.named("th") if cell.get("scope") not in ("row", "col")]
    found += ["a picture without words" for each in read.named("img") if not each.get("alt")]
    found += ["a drawing without role or label" for each in read.named("svg") if not is_labelled(each, page)]
    return found


def is_labelled(svg: dict[str, str | None], page: str) -> bool:
    labels = (svg.get("aria-labelledby") or "").split()
    return svg.get("role") == "img" and bool(labels) and all(f'id="{label}"' in page for label in labels)
