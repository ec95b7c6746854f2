"""Shared fixtures: small data, quick runs, and silo processes that live as long as the test session."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from silodp.compiler import compile_quickly

# Before JAX is imported: compiling is most of what the tests do, and a compiler that optimises nothing is done in a
# third of the time. `make test-all`, and in `make test` the tests of rounding, take the one that users have.
if os.environ.get("SILODP_TESTS_COMPILER") != "optimising":
    compile_quickly()
# Workers and silo processes share what any of them compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

os.environ.setdefault("SILODP_CACHE", "off")  # what a test finds does not depend on earlier ones

if os.environ.get("SILODP_TESTS_TYPES") != "off":
    import tests.typed  # noqa: F401 (before silodp: it checks what is imported afterwards)
from silodp import registry
from silodp.data import FederatedData, SiloData
from silodp.parse import parse_config, to_toml
from tests.lowering import share_contexts
from tests.quick import is_slow, unfit

share_contexts()

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
if SHARED.is_dir():
    os.environ.setdefault("SILODP_DATA", str(SHARED))


def made_data(sizes: tuple[int, ...] = (40, 25, 31), features: int = 5, seed: int = 0) -> FederatedData:
    """Unbalanced silos of a noisy linear rule, two classes."""
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=features)

    def silo(name: str, n: int) -> SiloData:
        x = rng.normal(size=(n, features)).astype(np.float32)
        y = (x @ rule + 0.3 * rng.normal(size=n) > 0).astype(np.int32)
        return SiloData(name, x, y)

    silos = tuple(silo(f"silo {i}", n) for i, n in enumerate(sizes))
    return FederatedData("made", silos, silo("test", 50), "classification", ("0", "1"), ())


@pytest.fixture
def sites(tmp_path):
    """Two sites with guards in this process."""
    from tests.guards import Federation

    federation = Federation(tmp_path / "sites")
    yield federation
    federation.close()


@pytest.fixture(autouse=True)
def open_registry():
    """Whatever reads somebody's plan closes its process; that process is the tests' here."""
    registry._allowed = None
    yield
    registry._allowed = None


@pytest.fixture(scope="session")
def data() -> FederatedData:
    return made_data()


@pytest.fixture(scope="session")
def silo_processes():
    """Three silos in processes of their own; a new plan replaces the old one."""
    from silodp.deploy.links import SiloProcess

    with ExitStack() as stack:
        yield [stack.enter_context(SiloProcess()) for _ in range(3)]


def write_silos(folder: Path, tree: dict[str, Any]) -> Path:
    """Three CSV files with labels ill and well under folder/silos, and a config that trains on them."""
    silos = folder / "silos"
    silos.mkdir()
    for i, silo in enumerate(made_data().silos):
        frame = pd.DataFrame(silo.features, columns=[f"f{j}" for j in range(silo.features.shape[1])])
        frame["outcome"] = np.where(silo.targets > 0, "ill", "well")
        frame.to_csv(silos / f"silo{i}.csv", index=False)
    data = {"source": str(silos), "target": "outcome"}
    config = folder / "config.toml"
    config.write_text(to_toml(parse_config({"data": data, **tree})), encoding="utf-8")
    return config


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by, and xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_dear_cases(config, items)
    share_runs(items)


def share_runs(items: list[pytest.Item]) -> None:
    """Tests of one algorithm and channel share a compiled run: keep them on one worker."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.name == "test_conformance.py" and {"name", "trust"} <= params.keys():
            item.add_marker(pytest.mark.xdist_group(f"{params['name']}-{params['trust']}"))


def leave_dear_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """To `make test-all` (tests/quick.py)."""
    cases = {item: named_case(item) for item in items if isinstance(item, pytest.Function)}
    for item, case in cases.items():
        if is_slow(*case):
            item.add_marker(pytest.mark.slow)
    wrong = unfit(cases.values())
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/quick.py: no such case: {', '.join(wrong)}")


def named_case(item: pytest.Function) -> tuple[str, str]:
    called = getattr(item, "callspec", None)
    return f"{item.path.stem}::{item.originalname}", "" if called is None else called.id


gc.set_threshold(500_000, 20, 100)  # programs that were compiled are many objects, and none of them is garbage
MOST_MAPS = 20_000  # of 65,530 that Linux allows a process; every compiled program takes a few
ENDED = count(1)  # tests of this process: counting maps takes milliseconds, so it is done after every tenth


def pytest_runtest_teardown(item, nextitem):
    """Let go of compiled programs before their memory maps run out: XLA then crashes instead of raising."""
    maps = Path("/proc/self/maps")
    if next(ENDED) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
