"""An experiment's report as a page: the blocks of its Markdown as HTML, and the figure inside."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from silodp.report.html import Html, items, joined, page, section, table, tag
from silodp.reproduce.experiment import Experiment
from silodp.reproduce.summary import WORDS
from silodp.run.directory import versions


def report_page(experiment: Experiment, markdown: str, figure: Path | None) -> str:
    """Of what `as_markdown` wrote. The figure is put into the page where it is a PNG."""
    _, *blocks = markdown.strip().split("\n\n")  # the first is the heading
    return page(
        f"Reproduction report: {experiment.name}",
        tag("p", experiment.title, class_="lead"),
        section("Published and found", *(block_of(block) for block in blocks)),
        section("How to read the tables", *(block_of(block) for block in WORDS.strip().split("\n\n")[1:])),
        *([] if figure is None else [section("Figure", picture(experiment, figure))]),
        section("How it was made", table("Software", ("package", "version"), list(versions().items()))),
    )


def block_of(block: str) -> Html:
    lines = block.replace("\n  ", " ").split("\n")
    if block.startswith("|"):
        heads, _, *rows = ([marked(cell.strip()) for cell in line.strip("|").split("|")] for line in lines)
        caption = heads[0] or "Published values and ours"
        return table(re.sub(r"<[^>]+>", "", caption), heads, rows)
    if block.startswith("- "):
        return items(marked(line.removeprefix("- ")) for line in lines)
    return tag("p", marked(" ".join(lines)))


def marked(text: str) -> Html:
    """Bold words and escaped stars, the only marks that a reproduction's text has."""
    parts = re.split(r"\*\*(.+?)\*\*", text.replace("\\*", "\ue000"))
    whole = [tag("strong", part) if i % 2 else part for i, part in enumerate(parts)]
    return Html(joined(whole).replace("\ue000", "*"))


def picture(experiment: Experiment, figure: Path) -> Html:
    data = base64.b64encode(figure.read_bytes()).decode()
    words = f"{experiment.title}: mean over seeds, with the deviation as a band; the table above has the last values."
    image = Html(tag("img", src=f"data:image/png;base64,{data}", alt=words).removesuffix("</img>"))
    return tag("figure", image, tag("figcaption", words))
