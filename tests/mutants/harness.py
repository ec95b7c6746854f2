"""Apply one seeded bug at a time to a copy of the package, and see a named test fail.

The working tree is never touched. A verdict is kept under .pytest_cache/mutants by the hash of the patch, the package
and the tests, so that a stopped run goes on where it was and nothing is believed about other sources.
"""

from __future__ import annotations

import atexit
import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = ROOT / ".pytest_cache" / "mutants"
LONGEST = 300  # seconds of one core: a busy machine is no verdict
HANGS = 20 * LONGEST  # seconds by the clock, for what waits and computes nothing
TOGETHER = 25  # tests that one process runs without a bug; a stopped run goes on after the last of them
LOCK = threading.Lock()  # one base, also for several threads
OWN = threading.local()  # a thread has its own process to ask
FAILED, PASSED = 1, 0  # pytest's exit codes; others: it could not run


@dataclass(frozen=True)
class Mutant:
    """A mistake that a person could make in one place. `test` is a pytest id, or several with spaces between."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    test: str
    quick: bool = False  # tried by every `make test`


@dataclass(frozen=True)
class Verdict:
    caught: bool | None  # None: the tests did not come to an end
    words: str  # the tests that failed, or why there is no verdict


def patched(mutant: Mutant, source: str) -> str:
    """The source with the bug; an error when it is not clear where that goes."""
    places = source.count(mutant.old)
    if places != 1:
        raise ValueError(f"{mutant.name}: its old text occurs {places} times in {mutant.file}; it must occur once")
    return source.replace(mutant.old, mutant.new)


@cache
def base() -> tempfile.TemporaryDirectory[str]:
    """Package and tests as they are when a process begins. Byte code is checked by content, not by time: a patch of
    equal length within a second would otherwise go unnoticed."""
    folder = tempfile.TemporaryDirectory(prefix="silodp-base-")
    for part in ("silodp", "tests"):
        target = Path(folder.name) / part
        shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__", "mutants"))
    shutil.copy(ROOT / "pyproject.toml", folder.name)
    code = Path(folder.name) / "silodp"
    compileall.compile_dir(code, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return folder


def original() -> Path:
    with LOCK:
        return Path(base().name)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy in a folder of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="silodp-mutant-") as name:
        yield shutil.copytree(original(), Path(name) / "copy")


@cache
def shared_hash() -> str:
    """Of what all verdicts depend on: the package, and what tests have in common."""
    folder = original()
    helpers = [file for file in (folder / "tests").glob("*.py") if not file.name.startswith("test_")]
    return hash_of([*(folder / "silodp").rglob("*.py"), *helpers, folder / "pyproject.toml"])


def hash_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(original())).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def verdict_file(tests: Sequence[str], patch: object) -> Path:
    own = hash_of(list({original() / test.partition("::")[0] for test in tests}))
    return VERDICTS / f"{hashlib.sha256(repr((tests, patch, own, shared_hash())).encode()).hexdigest()[:24]}.json"


def known(file: Path) -> Verdict | None:
    return Verdict(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def keep(file: Path, verdict: Verdict) -> Verdict:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"caught": verdict.caught, "words": verdict.words}), encoding="utf-8")
    os.replace(partial, file)
    return verdict


def optimising(tests: Sequence[str]) -> bool:
    """Whether these tests need the compiler that users have, as in the Makefile."""
    return any(test.startswith("tests/rounding/") for test in tests)


class Done(NamedTuple):
    code: int | None  # pytest's; None: no end
    printed: str


def run_tests(folder: Path, tests: Sequence[str], longest: int = LONGEST) -> Done:
    here = {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-n 0 --tb=line"}
    here["SILODP_TESTS_TYPES"] = "off"  # seconds, and a named test must fail by itself
    if optimising(tests):
        here["SILODP_TESTS_COMPILER"] = "optimising"
    asked = {"folder": str(folder), "tests": list(tests), "environment": here, "longest": longest, "hangs": HANGS}
    process = forking()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    return Done(json.loads(process.stdout.readline()), (folder / "printed").read_text(encoding="utf-8"))


def forking() -> subprocess.Popen[str]:
    """This thread's process that runs tests in forks of itself (forked.py). It ends when its input does."""
    if getattr(OWN, "process", None) is None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "XLA_FLAGS"))}
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "xla"))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        command = [sys.executable, str(Path(__file__).parent / "forked.py")]
        OWN.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(OWN.process.kill)
    return OWN.process


def found(done: Done) -> str:
    """Which tests failed, or what came last."""
    lines = [line for line in done.printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "; ".join(lines) or done.printed[-400:]


def tried(mutant: Mutant) -> Verdict:
    """The verdict on one seeded bug, from the disk where it is known."""
    patched(mutant, (original() / mutant.file).read_text(encoding="utf-8"))  # a patch that does not fit is never known
    file = verdict_file(mutant.test.split(), (mutant.file, mutant.old, mutant.new))
    before = known(file)
    if before is not None:
        return before
    with copied() as folder:
        source = folder / mutant.file
        source.write_text(patched(mutant, source.read_text(encoding="utf-8")), encoding="utf-8")
        done = run_tests(folder, mutant.test.split())
    if done.code not in (FAILED, PASSED):
        return Verdict(None, f"no end, exit code {done.code}: {found(done)}")
    words = found(done) if done.code == FAILED else f"survived {mutant.test}"
    return keep(file, Verdict(done.code == FAILED, words))


def honest(mutants: Sequence[Mutant]) -> Verdict:
    """Whether the named tests pass without any bug, and on the copy: otherwise their failing says nothing."""
    tests = {test for mutant in mutants for test in mutant.test.split()}
    for kind in (False, True):
        alike = sorted(test for test in tests if optimising([test]) == kind)
        for first in range(0, len(alike), TOGETHER):
            verdict = passing(alike[first : first + TOGETHER])
            if not verdict.caught:
                return verdict
    return Verdict(True, "")


def passing(tests: Sequence[str]) -> Verdict:
    file = verdict_file(tests, None)
    before = known(file)
    if before is not None:
        return before
    with copied() as folder:
        where = [sys.executable, "-c", "import silodp; print(silodp.__file__)"]
        told = subprocess.run(where, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True)
        if str(folder) not in told.stdout.decode():
            return Verdict(False, f"the copy is not what is tested: {told.stdout.decode()}")
        done = run_tests(folder, tests, longest=TOGETHER * LONGEST)
    verdict = Verdict(done.code == PASSED, "" if done.code == PASSED else found(done))
    return keep(file, verdict) if verdict.caught else verdict
