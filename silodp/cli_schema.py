"""The command line's `schema draft` and `schema check`. What needs pandas is imported inside a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from silodp.errors import ConfigError, Problems

app = typer.Typer(no_args_is_help=True, help="Draft or check the public description of a table.")


@app.command()
def draft(
    file: Annotated[Path, typer.Argument(help="a CSV or Parquet file", metavar="FILE")],
    target: Annotated[str | None, typer.Option(help="the column to predict")] = None,
    silo: Annotated[str | None, typer.Option(help="the column that names each record's silo")] = None,
    from_values: Annotated[
        bool, typer.Option("--from-values", help="ranges and lists from the records: for your own site, not private")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="write to this file (default: print)")] = None,
) -> None:
    """Draft a schema from a file's column names (and Parquet's types), without looking at values."""
    from silodp.data.frames import draft_of

    try:
        if out is not None and out.exists():
            raise ConfigError(f"{out} exists; give another path")
        text = draft_of(file, target, silo, from_values)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        print(f"draft in {out}")


@app.command()
def check(
    schema: Annotated[Path, typer.Argument(help="the schema", metavar="SCHEMA.toml")],
    files: Annotated[list[Path], typer.Argument(help="CSV or Parquet files", metavar="FILE...")],
) -> None:
    """Print all problems of all files, one line each and without a cell; exit code 1 if there are any."""
    from silodp.data.frames import read_checked
    from silodp.data.inspection import others
    from silodp.data.schema import Schema

    try:
        known = Schema.read(schema)
        frames = read_checked(known, files)
    except (ConfigError, OSError) as error:
        print(error)
        lines = error.lines if isinstance(error, Problems) else (str(error),)
        print(f"{len(lines)} problem{'s' if len(lines) > 1 else ''}")
        raise typer.Exit(1) from None
    for source, frame in frames.items():
        for line in others(known, frame, source):
            print(f"note: {line}")
    print(f"no problems in {len(files)} file{'s' if len(files) > 1 else ''}")
