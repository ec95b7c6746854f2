"""The command line's `show` and `compare`: what was found and promised, in the terminal or as a page."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from silodp.cli_fit import told
from silodp.errors import ConfigError
from silodp.run.directory import RunDirectory, free_path
from silodp.show import console, print_summary


def show(
    directory: Annotated[Path, typer.Argument(help="directory of a run, a saved model or a sweep")],
    json_: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    web: Annotated[bool, typer.Option("--web", help="open its report.html in a browser")] = False,
) -> None:
    """Print what a run found and what it guarantees, or open its report."""
    with told():
        if web:
            opened(page_of(directory))
        elif (directory / "bundle.json").is_file():
            print((directory / ("bundle.json" if json_ else "report.txt")).read_text(encoding="utf-8"), end="")
        else:
            print_run(directory, json_)


def print_run(directory: Path, json_: bool) -> None:
    run = RunDirectory.open(directory)
    swept = (directory / "sweep.json").is_file()
    summary = run.read_json("sweep.json" if swept else "summary.json")
    if json_ or swept:
        print(json.dumps(summary, indent=2))
        return
    print_summary(summary, directory)
    certificate = directory / "certificate.txt"
    if certificate.is_file():
        console.print(certificate.read_text(encoding="utf-8"), markup=False, highlight=False)


def page_of(directory: Path) -> Path:
    """The report that is there, or that of an older run, written now."""
    from silodp.report.files import NAME, write_report

    file = directory / NAME
    return file if file.is_file() else write_report(directory)


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
) -> None:
    """Put runs or saved models side by side: guarantees, results, costs."""
    from silodp.report.compare import compared, comparison_page, read_all

    with told():
        if len(directories) < 2:
            raise ConfigError("compare: one directory only; give two or more")
        if out is not None and out.exists():
            raise ConfigError(f"--out {out}: exists; give another path")
        stories = read_all(directories)
        table = Table("", *stories)
        for row in compared(stories):
            table.add_row(*row)
        console.print(table)
        if out is not None or web:
            page = out or free_path(Path("compare.html"))
            page.write_text(comparison_page(stories), encoding="utf-8")
            opened(page) if web else print(f"page in {page}")
