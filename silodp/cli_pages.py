"""The command line's `show`, `compare` and `plan`: what was found, what was promised, what may be expected."""

from __future__ import annotations

import json
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from silodp.cli_fit import told
from silodp.cli_told import Outside, only_listed
from silodp.errors import ConfigError
from silodp.later import Later
from silodp.show import console, print_errors, print_expectations, print_landscape, print_summary

folders = Later("silodp.run.directory")


def show(
    directory: Annotated[Path, typer.Argument(help="directory of a run, a saved model or a sweep")],
    json_: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    web: Annotated[bool, typer.Option("--web", help="open its report.html in a browser")] = False,
    outside: Outside = None,
) -> None:
    """Print what a run found and what it guarantees, or open its report."""
    with told():
        only_listed(outside)
        if web:
            opened(page_of(directory))
        elif (directory / "bundle.json").is_file():
            print((directory / ("bundle.json" if json_ else "report.txt")).read_text(encoding="utf-8"), end="")
        elif (directory / "certificates.json").is_file():
            print_federation(directory, json_)
        else:
            print_run(directory, json_)


def print_run(directory: Path, json_: bool) -> None:
    run = folders.RunDirectory.open(directory)
    swept = (directory / "sweep.json").is_file()
    summary = run.read_json("sweep.json" if swept else "summary.json")
    if json_ or swept:
        print(json.dumps(summary, indent=2))
        return
    print_summary(summary, directory)
    certificate = directory / "certificate.txt"
    if certificate.is_file():
        console.print(certificate.read_text(encoding="utf-8"), markup=False, highlight=False)


def print_federation(directory: Path, json_: bool) -> None:
    """The sites' certificates, once they are checked."""
    from silodp.deploy.approval import load
    from silodp.deploy.certify import verified

    text = (directory / "certificates.json").read_text(encoding="utf-8")
    lines = verified(json.loads(text), load(directory / "plan.json"))
    print(text if json_ else "\n".join([*lines, "all signatures are good"]))


def page_of(directory: Path) -> Path:
    """The report that is there, or that of an older run, written now."""
    from silodp.deploy.pages import story_of
    from silodp.report.files import NAME, write_report

    file = directory / NAME
    return file if file.is_file() else write_report(directory, story_of)


def opened(page: Path) -> None:
    """A browser may be missing, as on a server: the path is told in any case."""
    print(f"report in {page}", flush=True)
    if not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found; open the file yourself")


def compare(
    directories: Annotated[list[Path], typer.Argument(help="directories of runs or saved models", metavar="DIR...")],
    out: Annotated[
        Path | None, typer.Option(help="write the page to this file (default: none)", metavar="HTML")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="open the page in a browser")] = False,
    outside: Outside = None,
) -> None:
    """Put runs or saved models side by side: guarantees, results, costs."""
    from silodp.deploy.pages import story_of
    from silodp.report.compare import compared, comparison_page, read_all

    with told():
        if len(directories) < 2:
            raise ConfigError("compare: one directory only; give two or more")
        if out is not None and out.exists():
            raise ConfigError(f"--out {out}: exists; give another path")
        only_listed(outside)
        stories = read_all(directories, story_of)
        table = Table("", *map(escape, stories))
        for row in compared(stories):
            table.add_row(*map(escape, row))
        console.print(table)
        if out is not None or web:
            page = out or folders.free_path(Path("compare.html"))
            page.write_text(comparison_page(stories), encoding="utf-8")
            opened(page) if web else print(f"page in {page}")


def plan(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file that describes the run, or none", metavar="[CONFIG.toml]")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change one key of the config; may be repeated"),
    ] = None,
    records: Annotated[int | None, typer.Option(help="without a config: records of all silos together")] = None,
    silos: Annotated[int, typer.Option(help="how many silos share them")] = 4,
    features: Annotated[int, typer.Option(help="columns, after encoding")] = 20,
    epsilon: Annotated[float, typer.Option(help="of every record")] = 1.0,
    delta: Annotated[float | None, typer.Option(help="default: min(1e-5, 1/(10 n))")] = None,
    trust: Annotated[str, typer.Option(help="who is trusted")] = "untrusted",
    model: Annotated[str, typer.Option(help="logistic or linear")] = "logistic",
    figure: Annotated[
        Path | None,
        typer.Option(help="draw expected error (with a config: noise) against epsilon to this PNG, PDF or SVG"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """What would be run, with how much noise and what error to expect, and what other trust models would buy.

    No record is looked at. The expected error is that on a made-up task (silodp.plan.made_up): an order of magnitude.
    """
    with told():
        if (config is None) == (records is None):
            raise ConfigError("plan: give CONFIG.toml, or --records (with --silos, --features, --epsilon), not both")
        from silodp.parse import load_config
        from silodp.plan.expect import expectations, known_facts
        from silodp.plan.landscape import draw_noise, landscape

        if records is not None:
            expected = expected_of(records, silos, features, epsilon, delta, trust, model, figure)
        else:
            assert config is not None
            asked = load_config(config, set)
            expected, sizes = expectations(asked), known_facts(asked).sizes
            expected["landscape"] = found = landscape(asked, sizes, expected["parameters"] or 1)
            if figure is not None:
                draw_noise(found, sum(sizes), expected["parameters"] or 1, figure)
        if json_:
            print(json.dumps(expected, indent=2))
            return
        print_expectations(expected)
        if expected.get("error"):
            print_errors(expected["error"])
        print_landscape(expected["landscape"])


def expected_of(
    records: int, silos: int, features: int, epsilon: float, delta: float | None, trust: str, model: str,
    figure: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """From numbers alone; a few seconds, in which a made-up task is learnt at every epsilon."""
    from silodp.plan.advice import default_delta
    from silodp.plan.expect import expectations
    from silodp.plan.landscape import described, draw, expected_errors, landscape
    from silodp.plan.made_up import KINDS, MOST_FEATURES, Task

    if model not in KINDS:
        raise ConfigError(f"--model {model}: without a config it must be {' or '.join(KINDS)}")
    asked = described(records, silos, features, epsilon, delta or default_delta(records), trust, model)
    sizes = tuple(asked.data.sizes or ())
    task = Task(model, features, records)
    expected = expectations(asked, replace(task.facts(sizes), parameters=features + 1))
    expected["landscape"] = landscape(asked, sizes, features + 1)
    if features <= MOST_FEATURES:
        expected["error"] = expected_errors(asked, task, sizes)
    if figure is not None and features > MOST_FEATURES:
        raise ConfigError(f"--figure: expected errors are found for at most {MOST_FEATURES} features")
    if figure is not None:
        draw(expected["error"], records, features, figure)
    return expected
