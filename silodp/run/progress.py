"""Live progress of a run: rounds done, rate, time left, and the latest numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

Update = Callable[[int, Mapping[str, float]], None]
Progress = Callable[[int, int, str], AbstractContextManager[Update]]


@contextmanager
def silent(total: int, done: int, title: str) -> Iterator[Update]:
    yield lambda round, row: None


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:,.0f} rounds/s")


def bars(console: Console) -> Progress:
    """Progress bars on this console."""

    @contextmanager
    def shown(total: int, done: int, title: str) -> Iterator[Update]:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
        )
        console.print(title, markup=False, highlight=False)  # on a line of its own: the bar needs the width
        with RichProgress(*columns, console=console) as progress:
            task = progress.add_task("", total=total, completed=done, latest="compiling")

            def update(round: int, row: Mapping[str, float]) -> None:
                progress.update(task, completed=round, latest=f"objective {row['objective']:.4g}")

            yield update

    return shown
