"""Experiment files: how one extends another, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from silodp.errors import ConfigError
from silodp.reproduce import load_experiment, names
from silodp.reproduce.checks import check
from silodp.reproduce.driver import fingerprints, load_results

DOCS = Path(__file__).parent.parent / "docs"
LINE = """
[[add.lines]]
name = "more"
columns = ["best"]
set = { "algorithm.name" = "dp-gd", "algorithm.clip" = 1.0, "algorithm.step_size" = 1.0 }
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str, name: str = "mine.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("name", names())
def test_the_results_in_the_docs_are_of_the_experiments_as_they_are_described(name):
    """Hours of runs are kept by fingerprint: a new way to read a file must not change what it says."""
    kept, described = load_results(DOCS / "reproduction" / f"{name}.json"), fingerprints(load_experiment(name))
    assert {key: result["fingerprint"] for key, result in kept.items()}.items() <= described.items()
    left = len(described) - len(kept)  # a description may be ahead of its runs: then the page says so
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert (f"{name} ({left} runs)" in page) == (left > 0)


def test_lines_are_added_and_nothing_else_changes(written):
    parent, child = load_experiment("spider-fig8"), load_experiment(written('extends = "spider-fig8"\n' + LINE))
    assert [line.name for line in child.lines] == [*(line.name for line in parent.lines), "more"]
    own = {"name", "file", "lines"}
    assert child.name == "mine" and child.model_dump(exclude=own) == parent.model_dump(exclude=own)
    new = fingerprints(child)
    assert fingerprints(parent).items() <= new.items() and len(new) == len(fingerprints(parent)) + 1


def test_every_list_can_be_added_to(written):
    text = """
extends = "soteria-fig4"
[add]
axes = ["levels"]
notes = ["a note"]
seeds = [7]
[[add.metrics]]
column = "objective"
label = "loss"
[[add.panels]]
name = "epsilon 32"
set = { "privacy.epsilon" = 32.0 }
[[add.published]]
panel = "epsilon 32"
line = "LDP-SGD"
value = 0.96
[[add.claims]]
text = "a claim"
better = ["LDP-SGD"]
than = ["CDP-SGD"]
"""
    parent, child = load_experiment("soteria-fig4"), load_experiment(written(text))
    for key in ("axes", "notes", "seeds", "metrics", "panels", "published", "claims"):
        assert getattr(child, key)[:-1] == getattr(parent, key), key
    # `only` of soteria-fig4 leaves out all panels but its own: one that is added was meant to be seen
    assert [panel.name for panel in child.panels] == ["epsilon 1", "epsilon 32"]
    assert child.lines == parent.lines


def test_a_files_own_only_is_kept_as_it_is(written):
    panels = '[[add.panels]]\nname = "a"\n[[add.panels]]\nname = "b"\n'
    child = load_experiment(written('extends = "soteria-fig4"\nonly = ["b"]\n' + panels))
    assert [panel.name for panel in child.panels] == ["b"]


def test_what_is_added_comes_after_a_default(written):
    whole = (DOCS / "experiments.md").read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    written(whole.replace("seeds = [0, 1, 2]\n", ""), "parent.toml")
    assert load_experiment(written('extends = "parent.toml"\nadd.seeds = [1]\n')).seeds == [0, 1]


def test_lists_are_replaced_and_tables_merged(written):
    text = 'extends = "diff2-fig1"\nnotes = ["mine"]\n[config.privacy]\nepsilon = 9.0\n[search]\ntogether = 3\n'
    parent, child = load_experiment("diff2-fig1"), load_experiment(written(text))
    assert child.notes == ["mine"] and child.lines == parent.lines
    assert child.config["privacy"] == {"trust": "trusted", "epsilon": 9.0}
    assert child.search.together == 3 and child.search.rungs == parent.search.rungs


def test_a_file_is_looked_for_beside_the_one_that_extends_it(written, monkeypatch, tmp_path):
    written('extends = "spider-fig8"\n' + LINE, "parent.toml")
    child = written('extends = "parent.toml"\n' + LINE.replace("more", "still more"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [line.name for line in load_experiment(child).lines][-2:] == ["more", "still more"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "spider-fig88"\n', "mine.toml: extends = 'spider-fig88': unknown; known: diff2-few, "),
        ('extends = "none.toml"\n', "mine.toml: extends = 'none.toml': there is no file"),
        ('extends = "mine.toml"\n', "in a circle"),
        ("extends = 3\n", "extends = 3: must be the name"),
        ("extends = [\n", "mine.toml: not valid TOML"),
        (LINE, "give extends, or write [[lines]]"),
        ('extends = "spider-fig8"\nadd.config = [1]\n', "add.config: nothing can be added to it; known: axes, metrics"),
        ('extends = "spider-fig8"\nadd.only = ["a"]\n', "add.only: nothing can be added to it"),
        ('extends = "spider-fig8"\nadd.notes = "a"\n', "must hold lists"),
        ('extends = "spider-fig8"\nadd = 1\n', "add = 1: must hold lists"),
        ('extends = "spider-fig8"\nnotes = ["a"]\nadd.notes = ["b"]\n', "notes and add.notes: the one replaces"),
        ('extends = "spider-fig8"\n' + LINE.replace("more", "DP-GD"), "two of its lines have one name"),
        (
            'extends = "spider-fig8"\n[quick]\nlevel = [3.0]\n',
            "mine.toml: quick.level: unknown key; known: set",
        ),
        ('extends = "spider-fig8"\n' + LINE + "serch = {}\n", "lines.7.serch: unknown key; known: name, set"),
        ('extends = "spider-fig8"\n' + LINE.replace('"best"', '"beest"'), "lines.7.columns.0 = 'beest': Input should"),
        ('extends = "spider-fig8"\n[[add.lines]]\ncolumns = ["best"]\n', "lines.7.name: is missing"),
    ],
)
def test_a_mistake_in_a_file_is_named(written, text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_experiment(written(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.toml"):
        load_experiment(str(tmp_path / "nothing.toml"))


def test_the_files_in_the_docs_are_sound(written):
    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    whole, child = (load_experiment(written(part.split("```")[0])) for part in text.split("```toml\n")[1:])
    for experiment in (whole, child):
        check(experiment)
    assert len(list(whole.units())) == 4
    assert child.lines[-1].name == "MB-PSGM-FG" and child.claims[-1].better == ["MB-PSGM-FG"]
    assert "exact" in child.lines[-1].columns  # in the column best its claim would not be judged
