"""Raw tables from files, as a schema reads them: every cell of a CSV file as text, duplicate names refused.

CSV files are UTF-8. Their columns are separated by commas, or by what the first line has in the place of commas.

No error quotes a cell, nor what a parser says about one.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from silodp.data import draft, inspection
from silodp.data.cells import number
from silodp.data.days import day
from silodp.errors import ConfigError, Problems
from silodp.later import Later

if TYPE_CHECKING:
    import pandas as pd

    from silodp.data.schema import Schema
else:
    pd = Later("pandas")

ENDINGS = (".csv", ".csv.gz", ".parquet")
COMMA, SEPARATORS = ",", (";", "\t", "|")
LONGEST_LINE = 1 << 20  # of what is read to see the separator
LARGEST, SMALL, PACKED = 1 << 36, 1 << 30, 200  # bytes of a table, of one that may be packed anyhow, and how densely
# What readers raise about a file that is none of theirs, or lies about its size.
UNREADABLE = (
    ValueError, OSError, EOFError, MemoryError, ArithmeticError, LookupError, TypeError, RuntimeError, zlib.error,
    zipfile.BadZipFile, Warning,
)  # fmt: skip


def read_frame(path: Path | str) -> pd.DataFrame:
    """A CSV file with every cell as text, or a Parquet file with its types."""
    file = Path(path)
    check_path(file)
    if file.name.endswith(".parquet"):
        return read_parquet(file)
    names = header(file)
    frame = parsed(file, header=0, dtype=str, keep_default_na=False, names=range(len(names)))
    return frame.set_axis(names, axis=1)


def check_path(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"{path}: unknown kind of file; need one ending in {', '.join(ENDINGS)}")


def header(path: Path | str) -> list[str]:
    """The names in the first line of a CSV file as they stand there: pandas renames the second of two alike."""
    first = parsed(Path(path), header=None, nrows=1, dtype=str, keep_default_na=False)
    return [str(name).strip() for name in first.iloc[0]]


def parsed(path: Path, **how: object) -> pd.DataFrame:
    """A CSV file; what is wrong with it is told without a cell."""
    with warnings.catch_warnings():
        # pandas only warns when lines are longer than the header, and drops the rest
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            with opened(path) as file:
                how["sep"] = separator(file.readline(LONGEST_LINE))
            with opened(path) as file:
                return pd.read_csv(file, index_col=False, skipinitialspace=True, low_memory=False, **how)  # pyright: ignore
        except UNREADABLE as fault:
            why = reason(fault)
    raise ConfigError(f"{path}: not a readable CSV file ({why})")  # out there, it would remember what a parser quoted


def separator(first: bytes) -> str:
    """Of a first line: another one than the comma only where there is no comma outside of quotes."""
    line = re.sub(rb'"[^"]*"', b"", first)
    return next((sep for sep in SEPARATORS if COMMA.encode() not in line and sep.encode() in line), COMMA)


def most(path: Path) -> int:
    """Bytes that a file may unpack to: records are packed to a tenth or so, a bomb to a thousandth."""
    return min(LARGEST, max(SMALL, PACKED * path.stat().st_size))


class Bounded(io.RawIOBase):
    """What a compressed file unpacks to, as long as that is not too much."""

    def __init__(self, file: gzip.GzipFile, most: int):
        self.file, self.left = file, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read1(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise MemoryError
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


def opened(path: Path) -> IO[bytes]:
    """A table's bytes, unpacked."""
    if not path.name.endswith(".gz"):
        return path.open("rb")
    return io.BufferedReader(Bounded(gzip.open(path), most(path)), 1 << 20)  # pyright: ignore[reportArgumentType]


def reason(fault: BaseException) -> str:
    """Why a file cannot be read, in the library's own words: a parser's may quote the file."""
    if isinstance(fault, UnicodeDecodeError):
        return "its text is not UTF-8: save it as such"
    if isinstance(fault, pd.errors.EmptyDataError):
        return "it is empty"
    if isinstance(fault, MemoryError):
        return "it unpacks to far more than its size lets expect"
    lengths = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(fault))
    if lengths:
        return f"line {lengths[2]} has {lengths[3]} fields, expected {lengths[1]}"
    if isinstance(fault, pd.errors.ParserWarning):
        return "lines are longer than the first one"
    return f"it is damaged or of another kind: {type(fault).__name__}"


def read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow.parquet as pq

        told = pq.read_metadata(path)
        if 8 * told.num_rows * told.num_columns > most(path):
            raise MemoryError
        return pd.read_parquet(path)
    except ImportError:
        raise ConfigError(f"{path}: Parquet needs pyarrow; install silodp[parquet]") from None
    except UNREADABLE as fault:
        why = reason(fault)
    raise ConfigError(f"{path}: not a readable Parquet file ({why})")


def parquet_kinds(path: Path) -> dict[str, str]:
    """The kind of every column by its type; no row is read."""
    try:
        import pyarrow.parquet as pq
        import pyarrow.types as types
    except ImportError:
        raise ConfigError(f"{path}: Parquet needs pyarrow; install silodp[parquet]") from None
    try:
        fields = pq.read_schema(path)
    except UNREADABLE as fault:
        raise ConfigError(f"{path}: not a readable Parquet file ({reason(fault)})") from None
    is_number = lambda kind: types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    is_day = lambda kind: types.is_date(kind) or types.is_timestamp(kind)
    tests = {"flag": types.is_boolean, "number": is_number, "date": is_day}
    return {
        field.name: next((kind for kind, fits in tests.items() if fits(field.type)), "category") for field in fields
    }


def draft_of(path: Path, target: str | None, silo: str | None, look: bool = False) -> str:
    """A draft of a schema for a file: from its names (Parquet: and types), or with `look` from its values."""
    check_path(path)
    kinds = parquet_kinds(path) if path.name.endswith(".parquet") else {}
    names = list(kinds) or header(path)
    _check_names(path, names, {"--target": target, "--silo": silo})
    if look:
        return draft.from_values(read_frame(path), target, silo)
    return draft.from_types(kinds, target, silo) if kinds else draft.from_names(names, target, silo)


def _check_names(path: Path, names: Sequence[str], given: dict[str, str | None]) -> None:
    if looks_like_a_record(names):
        raise ConfigError(f"{path}: the first line looks like a record; it has to hold the names of the columns")
    refuse_twice(path, names)
    for option, name in given.items():
        if name is not None and name not in names:
            raise ConfigError(f"{path}: {option} {name}: no such column; there are: {', '.join(names)}")


def refuse_twice(path: Path, names: Sequence[str]) -> None:
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        told = "a column" if looks_like_a_record(names) else f"column '{twice[0]}'"
        raise ConfigError(f"{path}: {told} occurs twice; give every column its own name")


def looks_like_a_record(names: Sequence[str]) -> bool:
    """Whether a first line holds an empty cell, a number or a day, which are no names."""
    return any(not name or _is_value(name) for name in names)


def _is_value(name: str) -> bool:
    for parse in (number, day):
        try:
            return not math.isnan(parse(name))
        except ValueError:
            continue
    return False


def refuse_same_file(paths: Sequence[Path | str]) -> None:
    """By whatever path or link: a record in two silos, or twice in one, is protected less than the certificate says."""
    seen: dict[tuple[int, int], Path] = {}
    for path in filter(Path.is_file, map(Path, paths)):
        found = path.stat()  # of what a link points to
        first = seen.setdefault((found.st_dev, found.st_ino), path)
        if first is not path:
            raise ConfigError(f"{path}: the same file as {first}; one is given twice: give every file once")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Of different files: as much of the end of their paths as tells them apart, without endings where these do not."""
    whole = [Path(os.path.abspath(path)) for path in paths]
    short = [path.with_name(path.name.split(".")[0] or path.name) for path in whole]
    files = short if len(set(short)) == len(short) else whole
    for parts in range(1, max(len(path.parts) for path in files)):
        names = ["/".join(path.parts[1:][-parts:]) for path in files]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("FILE: one is given twice; give every silo's file once")


def read_checked(schema: Schema, paths: Sequence[Path | str]) -> dict[str, pd.DataFrame]:
    """Tables to train on, by path; an error tells all problems of all files."""
    refuse_same_file(paths)
    frames, lines, extra = {}, [], []
    for path in paths:
        try:
            frames[str(path)] = read_frame(path)
        except ConfigError as error:
            lines.append(str(error))
            continue
        found = inspection.inspected(schema, frames[str(path)], str(path), fitting=True)
        lines += found.problems
        extra += found.extra
    if lines:
        raise Problems(lines, draft.columns_draft(dict.fromkeys(extra)))
    return frames
