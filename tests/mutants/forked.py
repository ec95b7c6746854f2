"""A process that has imported what all tests need and runs each asked-for pytest in a fork of itself.

Importing is more than half of what most mutants cost. Nothing of silodp or its tests is imported here: a fork takes
them from the copy that it is told. One JSON line in, one out: the exit code, or null for what never ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

NEEDED = (
    *("numpy", "scipy.special", "scipy.stats", "scipy.optimize", "pandas", "sklearn.base", "pydantic", "typer", "rich"),
    *("jax", "jax.numpy", "jax.experimental", "equinox", "optax", "jaxtyping", "beartype", "hypothesis", "pytest"),
    *("dp_accounting.pld.privacy_loss_distribution", "dp_accounting.rdp.rdp_privacy_accountant"),
    "cryptography.hazmat.primitives.ciphers",
)
# pytest would have rewritten the assertions of its plugins, had it been first to import them.
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
LOOKS = 0.05  # seconds between two looks at a fork


def main() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)  # JAX has not computed anything yet
    for line in sys.stdin:
        print(json.dumps(exit_code(json.loads(line))), flush=True)


def exit_code(asked: Mapping[str, Any]) -> int | None:
    fork = os.fork()
    if fork == 0:
        os._exit(tested(asked))
    ends = time.monotonic() + asked["hangs"]
    while time.monotonic() < ends:
        done, status = os.waitpid(fork, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOKS)
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    return None


def tested(asked: Mapping[str, Any]) -> int:
    """In the fork: what pytest says of the tests in their folder. All that is printed goes to a file."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (asked["longest"], resource.RLIM_INFINITY))
    os.chdir(asked["folder"])
    sys.path[:0] = [asked["folder"]]
    os.environ.update(asked["environment"])
    with open("printed", "w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        code = int(pytest.main([*asked["tests"], *OPTIONS]))
        with contextlib.suppress(ValueError):  # a test may have closed it
            sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
