"""A sweep in a directory, part by part: what is done is kept, so that a stopped sweep goes on. Parts may run elsewhere.

parts.json      which settings are stacked, fixed when the sweep begins: stacked otherwise, they would round otherwise;
                and a hash of all settings' plans
parts/N.json    what came of a part's settings (removed when the sweep is complete)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from silodp.cache import keep_own_programs
from silodp.cluster import Place, spread, workers_at
from silodp.compiler import cores
from silodp.config import Config, DataConfig
from silodp.data import FederatedData, read_data
from silodp.errors import ConfigError
from silodp.parse import parse_config
from silodp.plan.advice import warn_of_run
from silodp.plan.identity import fingerprint
from silodp.run.directory import OTHER_PLAN, PARTS, RunDirectory
from silodp.run.group import Ran, part_size
from silodp.run.prepare import Ground, Prepared, plan_on, prepared_on
from silodp.run.progress import Progress, silent
from silodp.run.runner import source_name
from silodp.run.sweep import Value, check_simulated, grid_of, grouped, run_group, save_sweep, settled, with_values

KEPT = "parts"
JOB = "silodp.run.parts:run_part"


@dataclass
class Tried:
    """A setting, and what came of it."""

    values: dict[str, Value]
    epsilon: float | None
    history: list[dict[str, float]]


class Part(NamedTuple):
    """Settings, by their numbers in the grid, that are stacked; `size`: of the stack, which may have room for more."""

    group: int
    size: int
    settings: list[int]


def sweep_in(
    out: Path | str | None, config: Config, data: FederatedData, progress: Progress = silent, place: Place | None = None
) -> tuple[RunDirectory, list[Tried]]:
    """A new sweep in a directory of its own."""
    warn_of_run(config, data.sizes, data)
    settings = Settings(config, data)
    plans, parts = settings.fingerprint(), settings.divided(place)
    directory = RunDirectory.create(out, config, sweep_name(config, data))
    directory.write_json(PARTS, {"parts": [part._asdict() for part in parts], "plans": plans})
    return directory, completed(directory, settings, progress, place)


def sweep_name(config: Config, data: FederatedData) -> str:
    return f"sweep-{config.algorithm.name}-{source_name(data)}"


def resume_sweep(directory: RunDirectory, progress: Progress = silent, place: Place | None = None) -> list[Tried]:
    """Run the parts that are missing; the result is that of an unbroken sweep."""
    if directory.complete:
        raise ConfigError(f"{str(directory.path)!r} is complete; nothing to resume")
    settings = Settings(directory.config, read_data(directory.config.data))
    if directory.read_json(PARTS).get("plans") != settings.fingerprint():
        raise ConfigError(f"{directory.path / PARTS}: {OTHER_PLAN}")
    return completed(directory, settings, progress, place)


def completed(directory: RunDirectory, settings: Settings, progress: Progress, place: Place | None) -> list[Tried]:
    parts = [Part(**part) for part in directory.read_json(PARTS)["parts"]]
    missing = [part for part in parts if not file_of(directory, part).is_file()]
    with directory.held():
        for part, found in settings.here(missing, progress) if place is None else settings.at(place, missing, progress):
            directory.write_json(str(file_of(directory, part).relative_to(directory.path)), {"settings": found})
        tried = in_order(directory, parts)
        save_sweep(directory, settings.config, tried, settings.ground)
        shutil.rmtree(directory.path / KEPT)
    return tried


def file_of(directory: RunDirectory, part: Part) -> Path:
    return directory.path / KEPT / f"{part.settings[0]}.json"


def in_order(directory: RunDirectory, parts: Sequence[Part]) -> list[Tried]:
    found: dict[int, Tried] = {}
    for part in parts:
        told = json.loads(file_of(directory, part).read_text(encoding="utf-8"))["settings"]
        found |= {i: Tried(**own) for i, own in zip(part.settings, told, strict=True)}
    return [found[i] for i in sorted(found)]


class Settings:
    """The settings of a sweep, and the ground that they share."""

    def __init__(self, config: Config, data: FederatedData):
        self.config, self.points = config, grid_of(config)
        self.configs = [with_values(config, point) for point in self.points]
        for each in self.configs:
            check_simulated(each)
        self.ground = Ground.of(self.configs[0], data)
        self.prepared: dict[int, Prepared] = {}

    def member(self, number: int) -> Prepared:
        if number not in self.prepared:
            self.prepared[number] = prepared_on(self.ground, self.configs[number])
        return self.prepared[number]

    def fingerprint(self) -> str:
        """Of all plans, checked: what is kept of a sweep goes on under these, or not at all."""
        each = [fingerprint(plan_on(self.ground, config)) for config in self.configs]
        return hashlib.sha256("".join(each).encode()).hexdigest()

    def divided(self, place: Place | None) -> list[Part]:
        """As many parts at once as there are cores here or, if that is more, workers."""
        every = range(len(self.configs))
        # A stage before training gives every setting records of its own, and a program. Asking it is the workers' work.
        groups = [[i] for i in every] if self.ground.stages else grouped([self.member(i) for i in every])
        at_once = cores() if place is None else max(cores(), workers_at(place))
        parts = []
        for number, group in enumerate(groups):
            size = part_size(len(group), len(group), at_once)
            parts += [Part(number, size, group[i : i + size]) for i in range(0, len(group), size)]
        return parts

    def here(self, parts: Sequence[Part], progress: Progress) -> Iterator[tuple[Part, list[dict[str, Any]]]]:
        """In this process: parts of a group share a program, and run in threads."""
        for _, alike in groupby(parts, key=lambda part: part.group):
            own = list(alike)
            numbers = [i for part in own for i in part.settings]
            members = [self.member(i) for i in numbers]
            ran = run_group(members, progress, own[0].size)
            found = dict(zip(numbers, told([self.points[i] for i in numbers], members, ran), strict=True))
            for part in own:
                yield part, [found[i] for i in part.settings]

    def at(
        self, place: Place, parts: Sequence[Part], progress: Progress
    ) -> Iterator[tuple[Part, list[dict[str, Any]]]]:
        """In the workers of a cluster, which read the data themselves."""
        whole = self.config.model_dump(mode="json", exclude_unset=True)
        job = lambda part: {"config": whole, "points": [self.points[i] for i in part.settings], "size": part.size}
        rounds = lambda part: sum(self.configs[i].algorithm.performed for i in part.settings)
        total, done = sum(map(rounds, parts)), 0
        count = sum(len(part.settings) for part in parts)
        title = f"{self.config.algorithm.name}: sweep of {count} settings in {len(parts)} parts, on a cluster"
        with progress(total, 0, title) as bar:
            for number, text in spread(JOB, [json.dumps(job(part)) for part in parts], place):
                found = json.loads(text)
                done += rounds(parts[number])
                bar(done, {"objective": min(own["history"][-1]["objective"] for own in found)})
                yield parts[number], found


def run_part(text: str) -> str:
    """In a worker: the settings of a part."""
    asked = json.loads(text)
    config = parse_config(asked["config"])
    keep_own_programs(config)
    configs = [with_values(config, point) for point in asked["points"]]
    ground = Ground.of(configs[0], data_of(config.data.model_dump_json(exclude_unset=True)))
    members = [prepared_on(ground, each) for each in configs]
    return json.dumps(told(asked["points"], members, run_group(members, silent, asked["size"])))


@lru_cache(1)  # jobs of a sweep are about the same data
def data_of(section: str) -> FederatedData:
    return read_data(DataConfig.model_validate_json(section))


def told(
    points: Sequence[Mapping[str, Value]], members: Sequence[Prepared], ran: Sequence[Ran]
) -> list[dict[str, Any]]:
    """What is kept of each setting. Python writes a float so that it is read as the same."""
    outcomes = [settled(member, *own, whole=True) for member, own in zip(members, ran, strict=True)]
    return [
        asdict(Tried(dict(point), outcome.epsilon, outcome.history))
        for point, outcome in zip(points, outcomes, strict=True)
    ]
