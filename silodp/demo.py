"""The demo: what privacy costs when four hospitals do not trust the server (Wisconsin breast cancer)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from silodp.config import Config
from silodp.data import read_data
from silodp.digits import rounded_up
from silodp.parse import parse_config
from silodp.plots import curve_figure, history_figure
from silodp.run.directory import free_path
from silodp.run.progress import bars
from silodp.run.runner import Run, train

EPSILONS: tuple[float | None, ...] = (1.0, 3.0, 10.0, None)
HONESTY = (
    "What the epsilon does not cover: features are standardised with means and deviations of these records, and the "
    "step size, clips and number of rounds (the same in all four runs) were chosen by trying several on these records. "
    "114 test records and one draw of the noise: differences of one or two points are chance. A simulation with seeded "
    "noise, so that it can be repeated: for noise from the operating system see run.mode = messages."
)
TRUST = "Each silo adds its own noise: the guarantee holds even if the server and all other silos collude."


def demo_config(epsilon: float | None) -> Config:
    """One setting for every epsilon and for the run without privacy, which clips as the others do.

    Few rounds: each of them costs privacy, and 114 records a silo are few.
    """
    privacy: dict[str, Any] = {"trust": "untrusted", "delta": 1e-4}
    return parse_config(
        {
            "data": {
                "source": "wbcd",
                "silos": 4,
                "partition": "iid",
                "test": 0.2,
                "preprocess": ["standardise", "normalise"],
            },
            "model": {"kind": "logistic", "initial": "zeros"},
            "privacy": privacy | ({} if epsilon is None else {"epsilon": epsilon}),
            "algorithm": {
                "name": "spider",
                "rounds": 12,
                "step_size": 3.0,
                "clip": 0.5,
                "clip_difference": 0.1,
                "restart": 12,
            },
            "run": {"every": 1},
        }
    )


def run_demo(out: Path, console: Console) -> list[Run]:
    """Train at three epsilons and without privacy; print a table and draw two figures."""
    base = free_path(out)
    data = read_data(demo_config(None).data)
    runs = []
    for epsilon in EPSILONS:
        name = "non-private" if epsilon is None else f"epsilon-{epsilon:g}"
        console.print(f"[bold]{name}[/bold]", highlight=False)
        runs.append(train(demo_config(epsilon), data=data, out=base / name, progress=bars(console)))
    draw(base, runs)
    console.print(table_of(runs))
    for line in (TRUST, HONESTY, f"figures, models and certificates in {base}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return runs


def table_of(runs: list[Run]) -> Table:
    title = f"spider, {len(runs[0].summary['silos'])} silos, untrusted server"
    table = Table("epsilon per record", "test accuracy", "objective", "seconds", title=title)
    for finished in runs:
        epsilon = finished.summary["epsilon"]
        table.add_row(
            "no privacy" if epsilon is None else rounded_up(epsilon, 3),
            f"{finished.history[-1]['test_accuracy']:.3f}",
            f"{finished.history[-1]['objective']:.4f}",
            f"{sum(finished.summary['timing'].values()):.1f}",
        )
    return table


def draw(base: Path, runs: list[Run]) -> None:
    private = [r for r in runs if r.summary["epsilon"] is not None]
    epsilons = [r.summary["epsilon"] for r in private]
    accuracy = [r.history[-1]["test_accuracy"] for r in private]
    floor = runs[-1].history[-1]["test_accuracy"]
    lines = {"spider": (epsilons, accuracy), "no privacy": (epsilons, [floor] * len(epsilons))}
    curve_figure(base / "accuracy-epsilon.png", lines, "epsilon", "test accuracy", log_x=True, markers=True)
    labels = [
        "no privacy" if r.summary["epsilon"] is None else f"epsilon {rounded_up(r.summary['epsilon'], 3)}" for r in runs
    ]
    history_figure(base / "accuracy-rounds.png", dict(zip(labels, [r.history for r in runs], strict=True)))
