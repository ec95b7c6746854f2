"""The command line's `fit` and `predict`. What needs pandas or JAX is imported inside a command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cache import keep_programs
from silodp.errors import ConfigError, Refused, SilodpWarning

if TYPE_CHECKING:
    import pandas as pd

    from silodp.data.schema import Schema

Table = Annotated[Path, typer.Argument(help="a CSV or Parquet file of raw rows", metavar="FILE")]


@contextmanager
def warned() -> Iterator[None]:
    """Warnings as lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", SilodpWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        yield


@contextmanager
def told() -> Iterator[None]:
    """Mistakes on lines of their own and exit code 2, warnings as lines."""
    with warned():
        try:
            yield
        except (ConfigError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except Refused as error:
            print(f"refused: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("stopped; nothing is kept", file=sys.stderr)
            raise typer.Exit(130) from None


def fit(
    files: Annotated[list[Path], typer.Argument(help="CSV or Parquet files of raw rows", metavar="FILE...")],
    schema: Annotated[Path | None, typer.Option(help="the public description of the rows", metavar="TOML")] = None,
    target: Annotated[str | None, typer.Option(help="the column to predict (default: the schema's)")] = None,
    silo: Annotated[str | None, typer.Option(help="the column of silos (default: each file is one)")] = None,
    epsilon: Annotated[float, typer.Option(help="of every record of every silo")] = 1.0,
    delta: Annotated[float | None, typer.Option(help="default: min(1e-5, 1/(10 n))")] = None,
    trust: Annotated[str, typer.Option(help="untrusted, aggregated, or trusted: see docs/trust.md")] = "untrusted",
    held_out: Annotated[
        float | None, typer.Option(help="part of the records for a private look at the model (default: as it pays)")
    ] = None,
    silo_intercepts: Annotated[
        bool, typer.Option("--silo-intercepts", help="every silo gets an intercept, made of its private label rates")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="directory of the model, a new one", metavar="DIR")] = None,
) -> None:
    """Train a private model on raw files, in a simulation on this machine, and save it."""
    with told():
        if schema is None:
            first = f"silodp schema draft {files[0]}" + (f" --target {target}" if target else "")
            raise ConfigError(f"--schema is missing: it describes the columns; {first} writes a draft")
        if out is None:
            raise ConfigError("--out is missing: give a new directory for the model")
        from silodp.front import bundle

        bundle.check_free(out)
        known = read_schema(schema, target, silo)
        if silo_intercepts and known.task != "classification":
            raise ConfigError("--silo-intercepts: are made of label rates, and the target is a number; leave it out")
        frame, labels = read_files(known, files)
        keep_programs()
        from rich.console import Console

        from silodp.estimators import SiloClassifier, SiloRegressor
        from silodp.front.asked import AUTO
        from silodp.front.estimator import fit_with
        from silodp.run.progress import bars

        console = Console(stderr=True)
        console.print(f"{len(frame)} records read; planning and compiling", highlight=False)
        given = {"delta": delta, "trust": trust, "held_out": AUTO if held_out is None else held_out}
        if known.task == "classification":
            estimator = SiloClassifier(epsilon=epsilon, silo_intercepts=silo_intercepts, **given)
        else:
            estimator = SiloRegressor(epsilon=epsilon, **given)
        fit_with(estimator, bars(console), frame, None, labels, known)
        estimator.save(out)
        print(estimator.report_)
        print(f"model in {out}; use it: silodp predict {out} FILE")


def read_schema(path: Path, target: str | None, silo: str | None) -> Schema:
    from silodp.data.schema import Schema
    from silodp.front.records import schema_for

    known = Schema.read(path)
    if target not in (None, known.target.name):
        raise ConfigError(f"--target {target}: the target of {path} is {known.target.name!r}; give this one")
    return schema_for(known, None, silo, known.task)


def read_files(known: Schema, files: Sequence[Path]) -> tuple[pd.DataFrame, Any]:
    """All rows, and the file of each where files are the silos."""
    import numpy as np
    import pandas as pd

    from silodp.data.frames import names_of, read_checked

    frames = read_checked(known, files)
    rows = pd.concat(frames.values(), ignore_index=True)
    if known.silo is not None or len(files) == 1:
        return rows, None
    return rows, np.repeat(names_of(files), [len(frame) for frame in frames.values()])


def predict(
    model: Annotated[Path, typer.Argument(help="directory of a model that `silodp fit` saved", metavar="MODEL")],
    file: Table,
    out: Annotated[Path | None, typer.Option(help="write to this CSV file (default: print)")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="a probability for every class too")] = False,
    silo: Annotated[
        str | None, typer.Option(help="of the rows, or their column of silos, to predict with its intercept")
    ] = None,
) -> None:
    """Predict raw rows, one line for each; other columns are ignored, and the order of columns does not matter."""
    with told():
        if out is not None and out.exists():
            raise ConfigError(f"--out {out}: exists; give another path")
        from silodp.data.frames import read_frame
        from silodp.estimators import load

        text = predictions(load(model), read_frame(file), str(file), proba, silo).to_csv(index=False)
        if out is None:
            print(text, end="")
        else:
            out.write_text(text, encoding="utf-8")
            print(f"predictions in {out}")


def predictions(model: Any, frame: pd.DataFrame, source: str, proba: bool, silo: str | None = None) -> pd.DataFrame:
    import pandas as pd

    from silodp.front import silos

    rows, own = checked_rows(model, frame, source), {} if silo is None else {"silo": silos.given(frame, silo)}
    if not hasattr(model, "predict_proba") and (proba or own):
        raise ConfigError(f"{'--proba' if proba else '--silo'}: the model predicts a number; leave it out")
    table = pd.DataFrame({"prediction": model.predict(rows, **own)})
    if not proba:
        return table
    names = [f"probability {name}" for name in model.classes_]
    return table.join(pd.DataFrame(model.predict_proba(rows, **own), columns=names))


def checked_rows(model: Any, frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Rows as the model takes them; all that is wrong is told with the file's name."""
    from silodp.errors import Problems

    if model.schema_ is not None:
        found = model.schema_.problems(frame, source, fitting=False)
        if found:
            raise Problems(found)
        return frame
    names = getattr(model, "feature_names_in_", None)
    if names is None:
        raise ConfigError("MODEL: it was fitted on an array without names; predict from Python: silodp.load(...)")
    return numbers(frame, [str(name) for name in names], source)


def numbers(frame: pd.DataFrame, names: list[str], source: str) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    from silodp.data.frames import refuse_twice

    refuse_twice(Path(source), list(frame.columns))
    lacking = [name for name in names if name not in frame.columns]
    if lacking:
        raise ConfigError(f"{source}: column {', '.join(lacking)} is not there; add it")
    columns = {name: np.asarray(pd.to_numeric(frame[name], errors="coerce"), np.float64) for name in names}
    wrong = [name for name, column in columns.items() if not np.isfinite(column).all()]
    if wrong:
        raise ConfigError(f"{source}: column {', '.join(wrong)}: some rows are no numbers; correct them")
    return pd.DataFrame(columns)
