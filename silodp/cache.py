"""What is kept between runs: compiled programs and calibrations, in the user's cache folder, bounded, never records.

`SILODP_CACHE` names another folder, or is "off". A kept program is code that the next run executes, and a kept
calibration decides its noise: a folder that others may write to is not used.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from silodp.compiler import THREADS

if TYPE_CHECKING:
    from silodp.config import Config

VARIABLE = "SILODP_CACHE"
OFF = "off"
MOST_BYTES, MOST_NUMBERS = 200 << 20, 1 << 16  # bytes of programs, and of calibrations


def folder(name: str) -> Path | None:
    """The user's own folder for what is kept under this name; None: nothing is kept."""
    asked = os.environ.get(VARIABLE, "")
    if asked == OFF:
        return None
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silodp"
    path = base / name
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = is_private(base) and is_private(path)
    except OSError:  # a home that cannot be written to: everything works without
        return None
    if not private:
        warnings.warn(f"{base}: others may write to it; nothing is kept there", stacklevel=2)
        return None
    return path


def is_private(path: Path) -> bool:
    """Whether nobody else can put files there."""
    found = path.stat()
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def trim(path: Path, most: int = MOST_BYTES) -> None:
    """Remove what has not been used for longest, until the rest fits."""
    files = []
    for file in path.iterdir():
        try:
            found = file.stat()
        except FileNotFoundError:  # another run trims too
            continue
        files.append((max(found.st_mtime, found.st_atime), found.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= most:
            return
        file.unlink(missing_ok=True)
        total -= size


def number(name: str, key: str) -> float | None:
    """What `keep_number` kept under this key; None where nothing readable is there."""
    path = folder(name)
    try:
        return None if path is None else float.fromhex((path / key).read_text(encoding="ascii"))
    except (OSError, ValueError, OverflowError):  # a file that was cut off is as good as none
        return None


def keep_number(name: str, key: str, value: float) -> None:
    """Replaced whole: another run never reads half of it."""
    path = folder(name)
    if path is None:
        return
    unfinished = path / f"{key}.{os.getpid()}"
    try:
        unfinished.write_text(value.hex(), encoding="ascii")
        unfinished.replace(path / key)
        trim(path, MOST_NUMBERS)
    except OSError:  # a full disk is no reason to end a run
        unfinished.unlink(missing_ok=True)


def keep_programs() -> None:
    """Programs that this process compiles from now on are kept, and taken from there where they are the same.

    Only for a process of the library's own that runs the library's own parts: records are arguments of its programs,
    whereas a function from outside may hold anything as a constant. A folder that the user has told JAX of stays.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return
    path = folder(programs())
    if path is None:
        return
    trim(path)
    keep_programs_in(str(path))


def programs() -> str:
    """Their folder's name: a program is made for so many threads, and the key that JAX gives it does not tell."""
    return f"programs-{os.environ[THREADS]}" if THREADS in os.environ else "programs"


def keep_programs_in(path: str | None) -> None:
    """The same, in the folder that another process of this run keeps its programs in, if it does."""
    import jax

    if path is None:
        return
    # JAX does not write a program in one step. Who meets half of one compiles anew: nothing to warn of.
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones add up


def keep_own_programs(config: Config) -> None:
    """The same, if all parts that the config names are the library's own."""
    from silodp import registry
    from silodp.parse import named_parts

    if all(registry.is_own(kind, name) for kind, name in named_parts(config).items()):
        keep_programs()
