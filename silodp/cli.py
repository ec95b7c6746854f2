"""The command line. `cli_fit.py`, `cli_pages.py` and `cli_schema.py` hold the commands that need a file of their own.

What needs JAX is imported inside a command, after the config has been read and accepted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from silodp import registry
from silodp.cache import keep_own_programs, keep_programs
from silodp.cli_deploy import attach
from silodp.cli_deploy import plan as plans
from silodp.cli_fit import fit, predict, warned
from silodp.cli_pages import compare, plan, show
from silodp.cli_schema import app as schema
from silodp.cli_told import Outside, only_listed
from silodp.cluster import place_of
from silodp.compiler import compile_quickly
from silodp.errors import ConfigError, Refused, one_line
from silodp.garbage import collect_seldom
from silodp.later import Later
from silodp.show import (
    MESSAGES,
    algorithm_row,
    console,
    print_account,
    print_algorithm,
    print_bounds,
    print_findings,
    print_outcomes,
    print_overview,
    print_selection,
    print_summary,
)

# Help, lists and a version need none of these.
parse = Later("silodp.parse")
directories = Later("silodp.run.directory")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(schema, name="schema")
attach(app)
app.command()(fit)
app.command()(predict)
app.command()(show)
app.command()(compare)
plans.command("tell")(plan)
errors = Console(stderr=True)

ConfigPath = Annotated[Path, typer.Argument(help="TOML file that describes the run", metavar="CONFIG.toml")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change one key of the config; may be repeated"),
]
Out = Annotated[Path | None, typer.Option(help="directory for the results (default: a new one under runs/)")]
Cluster = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="hand parts to the dask.distributed scheduler at this address")
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="hand parts to N worker processes of this machine")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@contextmanager
def refusals(directory: Path | None = None) -> Iterator[None]:
    """A mistake is one line and exit code 2; Ctrl-C says how to continue and exits with 130."""
    try:
        with warned():
            yield
    except (ConfigError, OSError) as error:
        complain(f"error: {one_line(error)}")
        raise typer.Exit(2) from None
    except Refused as error:
        resumable = directory is not None and directories.is_resumable(directory)
        complain(
            f"error: message run: {one_line(error)}"
            + (f"; continue with: silodp resume {directory}" if resumable else "")
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        resumable = directory is not None and directories.is_resumable(directory)
        complain(f"stopped; continue with: silodp resume {directory}" if resumable else "stopped; nothing is kept")
        raise typer.Exit(130) from None


def complain(line: str) -> None:
    errors.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)


def print_version(asked: bool) -> None:
    if asked:
        from silodp import __version__

        print(f"silodp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model across silos with record-level differential privacy."""


@app.command()
def run(config: ConfigPath, out: Out = None, set: Overrides = None) -> None:
    """Train as CONFIG.toml says and write a run directory."""
    with refusals():
        parsed = parse.load_config(config, set)
        directories.refuse_existing(out)
        from silodp.data import read_data

        data = read_data(parsed.data)
        keep_own_programs(parsed)
        from silodp.run.progress import bars
        from silodp.run.runner import source_name
        from silodp.run.runner import train as execute

        directory = out or directories.new_path(parsed, f"{parsed.algorithm.name}-{source_name(data)}")
        with refusals(directory):
            finished = execute(parsed, data=data, out=directory, progress=bars(console))
        print_summary(finished.summary, finished.directory)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="directory of a stopped run or sweep")],
    cluster: Cluster = None,
    workers: Workers = None,
) -> None:
    """Continue a stopped run or sweep; the result is that of an unbroken one."""
    with refusals(directory):
        place = place_of(cluster, workers)
        opened = directories.RunDirectory.open(directory)
        swept = (directory / directories.PARTS).is_file()
        if place is not None and not swept:
            raise ConfigError("--cluster, --workers: a single run has no parts to hand out; leave them out")
        keep_own_programs(opened.config)
        from silodp.run.progress import bars

        if swept:
            from silodp.run.parts import resume_sweep

            print_sweep(opened, resume_sweep(opened, bars(console), place))
            return
        from silodp.run.runner import resume as execute

        finished = execute(directory, progress=bars(console))
        print_summary(finished.summary, finished.directory)


@app.command()
def sweep(
    config: ConfigPath, out: Out = None, set: Overrides = None, cluster: Cluster = None, workers: Workers = None
) -> None:
    """Run the grid of CONFIG.toml's sweep section in one compiled program (or one per program shape)."""
    with refusals():
        place = place_of(cluster, workers)
        parsed = parse.load_config(config, set)
        directories.refuse_existing(out)
        from silodp.data import read_data

        data = read_data(parsed.data)
        keep_own_programs(parsed)
        from silodp.run.parts import sweep_in, sweep_name
        from silodp.run.progress import bars
        from silodp.run.selection import save_selection
        from silodp.run.sweep import selected, source_name

        if parsed.sweep.private_trials is not None:
            if place is not None:
                raise ConfigError("--cluster, --workers: a private selection shows nobody its trials; leave them out")
            chosen = selected(parsed, data)
            directory = save_selection(parsed, chosen, source_name(data), out)
            print_selection(chosen, directory.path)
            return
        directory = out or directories.new_path(parsed, sweep_name(parsed, data))
        with refusals(directory):
            print_sweep(*sweep_in(directory, parsed, data, bars(console), place))


def print_sweep(directory: Any, outcomes: list[Any]) -> None:
    from silodp.run.sweep import best_of

    column = directory.config.sweep.select
    print_outcomes(outcomes, best_of(outcomes, column), column)
    console.print(f"results in {directory.path}", markup=False)


@app.command()
def audit(
    algorithm: Annotated[str | None, typer.Argument(help="the algorithm to audit (default: all private ones)")] = None,
    trust: Annotated[str | None, typer.Option(help="only under this trust model")] = None,
    json_: AsJson = False,
    real: Annotated[
        Path | None, typer.Option(metavar="RUNDIR", help="check the answers that a message run kept (run.answers)")
    ] = None,
    outside: Outside = None,
) -> None:
    """Attack the library's own code with canary records and compare what leaks with what the plan claims."""
    with refusals():
        if real is not None:
            only_listed(outside)
            audit_answers(real)
            return
        for kind, given in (("algorithm", algorithm), ("channel", trust)):
            if given is not None:
                registry.check(kind, given)
        compile_quickly()  # a program for every row, run once
        if algorithm is None or registry.is_own("algorithm", algorithm):
            keep_programs()
        from silodp.audit import audit as execute
        from silodp.audit import plain, render

        processes = os.cpu_count() or 1 if algorithm is None else 1
        rows = execute(algorithm and [algorithm], trust and [trust], processes=processes)
        if json_:
            print(json.dumps(plain(rows), indent=2))
        else:
            console.print(render(rows))
        if any(row.verdict != "ok" for row in rows):
            raise typer.Exit(1)


def audit_answers(directory: Path) -> None:
    opened = directories.RunDirectory.open(directory)
    from silodp.audit.recorded import UNSEEN, audit_recorded

    findings = audit_recorded(opened)
    print_findings(findings)
    console.print(UNSEEN, markup=False, highlight=False)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(1)


@app.command()
def check(
    part: Annotated[str, typer.Argument(help="an algorithm, trust model, compressor or randomizer: MODULE:CLASS")],
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="an option that the part needs; may be repeated"),
    ] = None,
) -> None:
    """Run the library's own checks on a part from outside; certificates then say that it passed."""
    compile_quickly()  # many programs, each run a few times
    from silodp.audit.check import check as execute
    from silodp.parse import toml_value

    with refusals():
        pairs = [option.partition("=") for option in set or []]
        findings = execute(part, {key.strip(): toml_value(value.strip()) for key, _, value in pairs})
        print_findings(findings)
        if not all(finding.passed for finding in findings):
            raise typer.Exit(1)


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="an algorithm: its paper, theorems, rate and costs")] = None,
    json_: AsJson = False,
) -> None:
    """List algorithms by family, trust models, models, datasets and partitions, or describe one algorithm."""
    with refusals():
        if name is None and not json_:
            print_overview()
            return
        names = registry.names("algorithm") if name is None else [name]
        for each in names:
            registry.check("algorithm", each)
        from silodp.algorithms import find

        rows = [algorithm_row(each, find(each)) for each in names]
        if json_:
            print(json.dumps(rows[0] if name else listed(rows), indent=2))
            return
        print_algorithm(rows[0])
        console.print(MESSAGES, markup=False, highlight=False)


def listed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "algorithms": rows,
        "models": registry.names("model"),
        "datasets": sorted(registry.DATASETS),
        "partitions": sorted(registry.PARTITIONS),
    }


@app.command()
def account(
    config: ConfigPath,
    set: Overrides = None,
    json_: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="draw delta(epsilon) to this PNG file")] = None,
) -> None:
    """The noise for a target epsilon, or the epsilon of given noise; needs no data, only silos and their sizes."""
    with refusals():
        parsed = parse.load_config(config, set)
        from silodp.plan.account import account as compute
        from silodp.plan.account import draw_curves

        result = compute(parsed)
        if plot is not None:
            draw_curves(parsed, plot)
        if json_:
            print(json.dumps(result, indent=2))
        else:
            print_account(result)


@app.command()
def bounds(config: ConfigPath, set: Overrides = None, json_: AsJson = False) -> None:
    """The papers' upper and lower bounds for the setting of a config, as numbers; needs no data, only sizes."""
    with refusals():
        parsed = parse.load_config(config, set)
        from silodp.plan.account import known_facts
        from silodp.plan.make import paper_bounds

        found = paper_bounds(parsed, known_facts(parsed))
        if json_:
            print(json.dumps(found, indent=2))
        else:
            print_bounds(found)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="directory for the results")] = Path("runs/demo"),
) -> None:
    """Raw CSV files of four hospitals in, models out (breast cancer records): accuracy against epsilon."""
    keep_programs()
    from silodp.demo import run_demo

    with refusals():
        run_demo(out, console)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="a table or figure (see --list), or a TOML file of your own")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="one seed, few settings: about two minutes")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="the whole grid, every setting to the end with every seed: long")
    ] = False,
    calibration: Annotated[str | None, typer.Option(help="only these columns: exact or paper (default: all)")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="directory of the results (default: under runs/); with --docs, of all experiments' directories"
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="list the tables and figures")] = False,
    formats: Annotated[str, typer.Option(help="formats of the figure, among png, pdf and svg: e.g. png,pdf")] = "png",
    docs: Annotated[bool, typer.Option("--docs", help="write docs/reproduction.md from the results there are")] = False,
    cluster: Cluster = None,
    workers: Workers = None,
) -> None:
    """Run a paper's table or figure again; what is already done in the directory is not run twice."""
    from silodp.reproduce import load_experiment, names
    from silodp.reproduce.driver import FULL_ROOT, QUICK_ROOT, ROOT, write_docs
    from silodp.reproduce.driver import reproduce as execute
    from silodp.run.progress import bars

    with refusals():
        place = place_of(cluster, workers)
        if list_:
            for known in names():
                console.print(f"{known}: {load_experiment(known).title}", markup=False, highlight=False)
            return
        if docs:
            if name is not None or quick or full or calibration is not None or formats != "png":
                raise ConfigError("--docs: writes the page of all experiments; give it no name and no option but --out")
            missing = write_docs([load_experiment(known) for known in names()], out or ROOT, Path("docs"))
            console.print(
                f"docs/reproduction.md written; no results as described now for: {', '.join(missing) or 'none'}",
                markup=False,
            )
            return
        if name is None:
            raise ConfigError("name a table or figure: silodp reproduce --list shows them")
        if quick and full:
            raise ConfigError("--quick and --full: choose one")
        experiment = load_experiment(name)
        experiment = experiment.quickly() if quick else experiment.fully() if full else experiment
        directory = out or (QUICK_ROOT if quick else FULL_ROOT if full else ROOT) / experiment.name
        units = None if out else directory.parent / "units"  # figures of a paper share some
        try:
            execute(
                experiment, directory, units=units, calibration=calibration, progress=bars(console),
                formats=[ending.strip() for ending in formats.split(",")],
                announce=lambda text: console.print(text, markup=False, highlight=False), place=place,
            )  # fmt: skip
        except KeyboardInterrupt:
            complain(f"stopped; what is done is kept in {directory}: the same command goes on from there")
            raise typer.Exit(130) from None
        console.print((directory / "table.md").read_text(encoding="utf-8"), markup=False, highlight=False)
        console.print(f"results in {directory}", markup=False)


def main() -> None:
    collect_seldom()
    app()


if __name__ == "__main__":
    sys.exit(main())
