"""What the commands of a federation share: how mistakes are told, and how signed statements are read and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp import registry
from silodp.errors import ConfigError, Refused, one_line

SiteFolder = Annotated[Path, typer.Argument(help="the folder of this site's guard", metavar="DIR")]
Outside = Annotated[
    list[str] | None,
    typer.Option("--outside", help="a part that the plan may name; its code is run", metavar="MODULE:CLASS"),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="write to this file (default: print)")]


@contextmanager
def told() -> Iterator[None]:
    """A mistake is one line and exit code 2; what is refused is one line and exit code 1."""
    try:
        yield
    except (ConfigError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(2) from None
    except Refused as error:
        code = getattr(error, "code", None)
        print(f"refused: {one_line(error)}{f' ({code})' if code else ''}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("stopped; what it had started has ended; a server's run goes on with --resume", file=sys.stderr)
        raise typer.Exit(130) from None


def only_listed(outside: list[str] | None) -> None:
    """Files that somebody else may have written are read from here on: what they name is imported only if it is
    listed. The first list of a process stands."""
    if not registry.is_closed():
        registry.close(outside or ())


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"--out {out}: exists; give another path")


def written(tree: Any, out: Path | None) -> None:
    text = json.dumps(tree, indent=2, allow_nan=False) + "\n"
    if out is None:
        print(text, end="")
        return
    refuse_existing(out)
    out.write_text(text, encoding="utf-8")
    print(f"written to {out}")


def loaded(files: list[Path]) -> list[Any]:
    """Signed statements of other parties."""
    from silodp.deploy.signing import LARGEST, read_json

    found: list[Any] = []
    for file in files:
        if not file.is_file() or file.stat().st_size > LARGEST:
            raise ConfigError(f"{file}: no such file, or too large")
        try:
            tree = read_json(file.read_bytes())
        except Refused:
            raise ConfigError(f"{file}: not valid JSON, or a key stands in it twice") from None
        found += tree if isinstance(tree, list) else [tree]
    return found
