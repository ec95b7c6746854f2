"""Figures: the format is the path's, and the same figure is the same file."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from PIL import Image

from silodp.errors import ConfigError
from silodp.plots import FORMATS, curve_figure, history_figure

OPENINGS = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
LINES = {"first": ([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]), "second": ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])}


def drawn(path: Path, lines=LINES) -> bytes:
    curve_figure(path, lines, "epsilon", "loss", title="A title", markers=True)
    return path.read_bytes()


@pytest.mark.parametrize("ending", [*FORMATS, "SVG"])
def test_the_ending_decides_the_format(ending, tmp_path):
    assert drawn(tmp_path / "new" / f"figure.{ending}").startswith(OPENINGS[ending.lower()])


@pytest.mark.parametrize("ending", FORMATS)
def test_the_same_figure_is_the_same_file(ending, tmp_path):
    once, again = (drawn(tmp_path / f"{name}.{ending}") for name in ("once", "again"))
    assert once == again
    assert once != drawn(tmp_path / f"other.{ending}", {"first": LINES["second"]})
    assert b"CreationDate" not in once and b"date>" not in once  # two files of one second would not tell


def test_vectors_are_vectors_with_fonts_that_publishers_take(tmp_path):
    figure = drawn(tmp_path / "figure.pdf")
    assert b"/Type0" in figure and b"/Type3" not in figure and b"/Subtype /Image" not in figure
    drawing = xml.fromstring(drawn(tmp_path / "figure.svg"))
    assert not list(drawing.iter("{http://www.w3.org/2000/svg}image"))
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}path"))) > 10


def test_pixels_are_of_few_colours(tmp_path):
    drawn(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.size == (550, 396) and image.mode == "P"


def test_a_history_is_drawn_in_any_format(tmp_path):
    rows = [{"round": i, "objective": 1 / (i + 1), "gradient_norm2": 1 / (i + 1)} for i in range(3)]
    history_figure(tmp_path / "history.svg", {"run": rows}, {"objective": {"mean predictor": 0.7}}, "A run")
    assert (tmp_path / "history.svg").read_bytes().startswith(OPENINGS["svg"])


@pytest.mark.parametrize("name", ["figure.gif", "figure"])
def test_other_formats_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be drawn as '(gif)?'; end its name with \.png, \.pdf, \.svg"):
        drawn(tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()
