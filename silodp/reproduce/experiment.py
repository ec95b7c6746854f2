"""What an experiment file may say: the settings of one table or figure, its published values and its claims.

A figure has panels (its subplots, or rows of a table), lines (the algorithms) and maybe levels (the epsilons of its
x axis). Each line of each panel is one unit of work, run in up to four columns:

paper       our run with the paper's own calibration; the epsilon it really gives is shown beside the claim
exact       the same epsilon with exact noise
best        what silodp offers beyond the paper's lines at the same epsilon, trust and data
authors     the line as the authors' program runs it, where that differs from the paper: not private
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from silodp.config import Config, Section
from silodp.errors import ConfigError
from silodp.parse import parse_config

Column = Literal["paper", "exact", "best", "authors"]
WORDS: dict[Column, str] = {  # of a run's column, wherever it is shown
    "paper": "paper's noise",
    "exact": "exact noise",
    "best": "exact noise",
    "authors": "authors' way (not private)",
}
Statistic = Literal["last", "min", "mean"]
HistoryColumn = Literal[
    "round", "objective", "gradient_norm2", "test_loss", "test_accuracy", "test_mse",
    "bits_up", "bits_down", "record_gradients", "test_error",
]  # fmt: skip
Values = dict[str, Any]  # dotted keys of a config
AS_IN_PAPERS = {"weights": "equal"}  # their objective is the mean over silos, whatever their sizes


class Metric(Section):
    """A number of the table: a history column and how a whole run becomes one number."""

    column: HistoryColumn = Field(description="of the history; test_error is 1 - test_accuracy")
    statistic: Statistic = Field(default="last", description="last row, smallest row, or mean of all rows")
    label: str
    tolerance: float = Field(default=0.01, gt=0, description="differences up to this count as a match")
    log: bool = False

    @property
    def larger_is_better(self) -> bool:
        return "accuracy" in self.column


class Panel(Section):
    name: str
    set: Values = Field(default={})
    paper: Values = Field(default={}, description="changes for the column `paper`")
    authors: Values = Field(default={}, description="changes for the column `authors`")


class Line(Section):
    name: str
    set: Values = Field(default={})
    columns: list[Column] = Field(default=["paper", "exact"])
    by_panel: dict[str, Values] = Field(default={}, description="changes in some panels")
    by_level: dict[str, list[Any]] = Field(default={}, description="a value for every level")
    paper: Values = Field(default={"privacy.calibration": "paper"}, description="changes for the column `paper`")
    paper_by_level: dict[str, list[Any]] = Field(default={}, description="the same, a value for every level")
    authors: Values = Field(default={}, description="changes for the column `authors`, which searches nothing")
    authors_seeds: int | None = Field(default=None, ge=1, description="how many of the seeds that column runs; all")
    search: dict[str, list[Any]] = Field(default={}, description="grid from which settings are chosen, not privately")
    full: dict[str, list[Any]] = Field(default={}, description="the larger parts of the grid that --full searches")
    panels: list[str] | None = Field(default=None, description="only in these panels")
    finalists: int | None = Field(default=None, ge=1, description="settings that the last rung of a search keeps")
    levels: bool = Field(default=True, description="false: one run serves all levels (a reference without privacy)")

    @property
    def papers_model(self) -> bool:
        """Whether it trains the figure's own model on the figure's own features."""
        return not any(key == "model.kind" or key.startswith("data.") for key in self.set)


class Levels(Section):
    key: str = "privacy.epsilon"
    values: list[float]
    label: str = "epsilon"


class Rung(Section):
    """One stage of a search: every setting for so many rounds, the best go on."""

    rounds: int | None = Field(default=None, ge=1, description="stop here, with the noise of the whole run")
    keep: int = Field(default=1, ge=1)


class Search(Section):
    """How settings are chosen: on the private records, so not privately; every report says so."""

    column: HistoryColumn = "objective"
    statistic: Statistic = "last"
    each: bool = Field(default=False, description="each metric has a setting of its own, the best by that metric")
    rungs: list[Rung] = Field(default=[Rung()])
    together: int = Field(default=16, ge=1, description="settings run in one program")

    @property
    def said(self) -> Values:
        """What results depend on."""
        return self.model_dump(exclude={"together"} if self.each else {"together", "each"})


class Published(Section):
    panel: str
    line: str
    value: float
    level: float | None = None
    metric: int = Field(default=0, ge=0, description="which of the metrics")


class Claim(Section):
    """What the paper says of its figure: lines that are better than others."""

    text: str
    better: list[str]
    than: list[str]
    metric: int = Field(default=0, ge=0)
    each: bool = Field(
        default=False,
        description="each line is better than each of the others; else one of either side, chosen as searches choose",
    )
    per_bit: bool = Field(default=False, description="where both have sent as many bits as the better ones send in all")
    unless: Values = Field(
        default={}, description="a setting in which the better side is another algorithm: such places are told apart"
    )


class Quick(Section):
    """What --quick leaves out."""

    set: Values = Field(default={})
    levels: list[float] | None = None
    panels: list[str] | None = None
    lines: list[str] | None = None
    search_points: int = Field(default=3, ge=1)
    rungs: list[Rung] = Field(default=[Rung()])


class Experiment(Section):
    """One table or figure."""

    name: str
    paper: str
    title: str
    axes: list[Literal["rounds", "bits", "levels"]] = Field(min_length=1, description="x axes of the figure")
    reported: str = Field(default="", description="where the published values come from")
    metrics: list[Metric] = Field(min_length=1)
    panels: list[Panel] = Field(min_length=1)
    lines: list[Line] = Field(min_length=1)
    levels: Levels | None = None
    seeds: list[int] = Field(default=[0], min_length=1)
    search: Search = Search()
    published: list[Published] = Field(default=[])
    claims: list[Claim] = Field(default=[])
    notes: list[str] = Field(default=[])
    again: str = Field(
        default="", description="in what way it repeats places of other figures: its claims are told apart from theirs"
    )
    only: list[str] | None = Field(default=None, description="of the panels described, those of this figure")
    quick: Quick = Quick()
    config: dict[str, Values] = Field(default={})
    file: str = Field(default="", description="where it was read from, for messages")

    @model_validator(mode="after")
    def _names_exist(self) -> Experiment:
        known: dict[str, list[Any]] = {
            "line": [line.name for line in self.lines],
            "panel": [panel.name for panel in self.panels],
            "level": self.level_values,
            "metric": list(range(len(self.metrics))),
        }
        for where, kind, value in mentions(self):
            if value not in known[kind]:
                there_are = ", ".join(map(str, dict.fromkeys(known[kind])))
                raise ValueError(f"{where} = {value!r}: no such {kind}; known: {there_are}")
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Experiment:
        panels = [panel.name for panel in self.panels]
        for panel in panels:
            if panels.count(panel) > 1:
                raise ValueError(f"panels: two are called {panel!r}; give each a name of its own")
            if len({line.name for line in self.lines_of(panel)}) < len(self.lines_of(panel)):
                raise ValueError(f"panel {panel!r}: two of its lines have one name; give each `panels` of its own")
        return self

    @model_validator(mode="after")
    def _every_level_has_its_values(self) -> Experiment:
        for line in self.lines:
            for key, values in (line.by_level | line.paper_by_level).items():
                if len(values) != len(self.level_values):
                    raise ValueError(
                        f"line {line.name!r}: {key} has {len(values)} values; "
                        f"need {len(self.level_values)}, one for each level"
                    )
        return self

    @model_validator(mode="after")
    def _quick_shows_something(self) -> Experiment:
        if self.only is not None and self.quick.panels is not None and not set(self.only) & set(self.quick.panels):
            raise ValueError(f"quick.panels = {self.quick.panels}: only = {self.only} leaves none of them")
        return self

    @property
    def level_values(self) -> list[float | None]:
        return [None] if self.levels is None else list(self.levels.values)

    def units(self) -> Iterator[Unit]:
        for panel in self.panels:
            for line in self.lines_of(panel.name):
                for column in line.columns:
                    yield Unit(self, panel, line, column)

    def lines_of(self, panel: str) -> list[Line]:
        """A line whose settings differ between panels is described once for each kind of panel, under one name."""
        return [line for line in self.lines if line.panels is None or panel in line.panels]

    def fully(self) -> Experiment:
        """The same with every setting of the whole grid run to the end with every seed."""
        lines = [line.model_copy(update={"search": line.search | line.full}) for line in self.lines]
        return self.model_copy(update={"lines": lines, "search": self.search.model_copy(update={"rungs": []})})

    def quickly(self) -> Experiment:
        """The same with one seed, a few settings and maybe fewer levels and rounds."""
        quick = self.quick
        kept = [i for i, level in enumerate(self.level_values) if quick.levels is None or level in quick.levels]
        panels = [p for p in self.panels if quick.panels is None or p.name in quick.panels]
        lines = [
            line.model_copy(
                update={
                    "by_level": {key: [values[i] for i in kept] for key, values in line.by_level.items()},
                    "paper_by_level": {k: [values[i] for i in kept] for k, values in line.paper_by_level.items()},
                    "search": {key: thinned(values, quick.search_points) for key, values in line.search.items()},
                    "finalists": None,
                    "by_panel": {p: v for p, v in line.by_panel.items() if any(p == panel.name for panel in panels)},
                }
            )
            for line in self.lines
            if quick.lines is None or line.name in quick.lines
        ]
        levels = self.levels and self.levels.model_copy(update={"values": [self.levels.values[i] for i in kept]})
        return self.model_copy(
            update={
                "panels": [p.model_copy(update={"set": p.set | quick.set}) for p in panels],
                "lines": lines,
                "levels": levels,
                "seeds": self.seeds[:1],
                "search": self.search.model_copy(update={"rungs": quick.rungs}),
            }
        )


def mentions(experiment: Experiment) -> Iterator[tuple[str, str, Any]]:
    """(where, kind, name) of all that a description says of its own panels, lines, levels and metrics."""
    for i, value in enumerate(experiment.published):
        for kind in ("panel", "line", "level", "metric"):
            yield f"published.{i}.{kind}", kind, getattr(value, kind)
    for i, claim in enumerate(experiment.claims):
        yield f"claims.{i}.metric", "metric", claim.metric
        for side in ("better", "than"):
            yield from ((f"claims.{i}.{side}", "line", name) for name in getattr(claim, side))
    for line in experiment.lines:
        yield from ((f"line {line.name!r}: by_panel", "panel", name) for name in line.by_panel)
        yield from ((f"line {line.name!r}: panels", "panel", name) for name in line.panels or ())
    yield from (("only", "panel", name) for name in experiment.only or ())
    for kind in ("panel", "line", "level"):
        yield from ((f"quick.{kind}s", kind, name) for name in getattr(experiment.quick, f"{kind}s") or ())


def thinned(values: list[Any], most: int) -> list[Any]:
    """Evenly spaced values of a grid, its middle when only one may stay."""
    if len(values) <= most:
        return values
    if most == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class Unit:
    """One line of one panel in one column: all its levels, settings and seeds are run together."""

    experiment: Experiment
    panel: Panel
    line: Line
    column: Column

    @property
    def slug(self) -> str:
        words = f"{self.panel.name} {self.line.name} {self.column}".lower()
        return "-".join("".join(c if c.isalnum() or c == "." else " " for c in words).split())

    @property
    def levels(self) -> list[float | None]:
        return self.experiment.level_values if self.line.levels else [None]

    @property
    def seeds(self) -> list[int]:
        return self.experiment.seeds[: self.line.authors_seeds] if self.column == "authors" else self.experiment.seeds

    @property
    def search(self) -> dict[str, list[Any]]:
        return {} if self.column == "authors" else self.line.search

    @property
    def searched(self) -> Unit:
        """The unit whose settings this one takes: with the paper's noise a line is run as it is with exact noise."""
        exact = self.column == "paper" and "exact" in self.line.columns
        return Unit(self.experiment, self.panel, self.line, "exact") if exact else self

    def file(self, folder: Path) -> Path:
        """Where its result is kept."""
        return folder / f"{self.slug}-{self.fingerprint}.json"

    @property
    def rungs(self) -> list[Rung]:
        rungs, finalists = self.experiment.search.rungs, self.line.finalists
        if finalists is None or not rungs:
            return rungs
        return [*rungs[:-1], rungs[-1].model_copy(update={"keep": finalists})]

    def tree(self, level: int) -> dict[str, Any]:
        """The whole config at a level; later changes win: panel, line, line in this panel, level, column."""
        line, experiment = self.line, self.experiment
        changes = self.panel.set | line.set | line.by_panel.get(self.panel.name, {})
        value = self.levels[level]
        if value is not None and experiment.levels is not None:
            changes |= {experiment.levels.key: value} | {key: values[level] for key, values in line.by_level.items()}
        if self.column == "paper":
            at_level = {key: values[level] for key, values in line.paper_by_level.items()}
            changes |= line.paper | self.panel.paper | at_level
        if self.column == "authors":
            changes |= line.authors | self.panel.authors
        return changed(experiment.config, changes)

    def config(self, level: int, changes: Values | None = None) -> Config:
        tree = changed(self.tree(level), changes or {})
        return parse_config(tree | {"algorithm": AS_IN_PAPERS | tree["algorithm"]})

    @property
    def fingerprint(self) -> str:
        """Changes with anything in the description that this unit's result depends on (not with the program)."""
        experiment = self.experiment
        about: dict[str, Any] = {
            "trees": [self.tree(level) for level in range(len(self.levels))],
            "search": self.search,
            "how": experiment.search.said,
            "seeds": self.seeds,
            "metrics": [metric.model_dump() for metric in experiment.metrics],
        }
        if self.line.finalists is not None:
            about["finalists"] = self.line.finalists
        if self.search and self.searched.column != self.column:
            about["searched"] = self.searched.fingerprint
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def changed(tree: dict[str, Any], changes: Values) -> dict[str, Any]:
    """A config's tree with dotted keys set; a value "none" takes the key out."""
    result = {name: dict(section) for name, section in tree.items()}
    for dotted, value in changes.items():
        section, dot, key = dotted.partition(".")
        if not dot:
            raise ConfigError(f"{dotted!r}: write section.key")
        if value == "none" and key != "prox":
            result.get(section, {}).pop(key, None)
        else:
            result.setdefault(section, {})[key] = value
    return result
