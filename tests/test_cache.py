"""What is kept between runs: own programs only, no records, in a folder of one's own, bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from silodp import cache, compiler, registry, train
from silodp.compiler import THREADS
from silodp.config import AlgorithmConfig, Config
from silodp.privacy import accountant
from silodp.privacy.kinds import Poisson, Releases
from tests.conftest import made_data

ROOT = Path(registry.__file__).resolve().parents[1]
CONFIG = """
[data]
source = "{source}"
target = "y"
silos = 2
test = 0.2
[privacy]
trust = "untrusted"
epsilon = 2.0
[algorithm]
name = "{name}"
rounds = 2
step_size = 0.1
clip = 1.0
[run]
{run}
"""


def written(folder: Path, features: np.ndarray, name: str = "dp-gd", run: str = "") -> Path:
    rows = [",".join(["a", "b", "y"]), *(f"{a!r},{b!r},{i % 2}" for i, (a, b) in enumerate(features.tolist()))]
    (folder / "rows.csv").write_text("\n".join(rows))
    (folder / "config.toml").write_text(CONFIG.format(source=folder / "rows.csv", name=name, run=run))
    return folder / "config.toml"


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def contents(path: Path) -> bytes:
    """All programs that are kept there, unpacked as JAX packs them."""
    packed = [file.read_bytes() for file in path.iterdir()]
    try:
        from compression import zstd  # pyright: ignore
    except ImportError:
        zstd = None
    return b"".join(zstd.decompress(p) if zstd and p[:4] == b"\x28\xb5\x2f\xfd" else zlib.decompress(p) for p in packed)


FEATURES = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)


@pytest.mark.parametrize("mode", ["", pytest.param('mode = "messages"\ntest_seed = true', marks=pytest.mark.slow)])
def test_programs_are_kept_without_records(tmp_path, mode):
    """Of silos in processes of their own too, whose programs have no noise of the system's in them: those are kept."""
    config = written(tmp_path, FEATURES, run=mode)
    done = run(tmp_path, "-m", "silodp.cli", "run", str(config), SILODP_CACHE=str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    kept = contents(tmp_path / "kept" / "programs")
    assert b"jit_run" in kept if mode else b"jit_advance" in kept
    for row in FEATURES:
        assert row.tobytes() not in kept


def test_records_that_are_constants_would_be_found(tmp_path):
    program = "import jax, numpy as np; from silodp.cache import keep_programs; keep_programs();"
    program += "rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32);"
    program += "print(jax.jit(lambda x: rows @ x)(np.ones(2, np.float32)).sum())"
    done = run(tmp_path, "-c", program, SILODP_CACHE=str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    assert FEATURES[3].tobytes() in contents(tmp_path / "kept" / "programs")
    for file in (tmp_path / "kept" / "programs").iterdir():  # as a process leaves it that was killed while writing
        file.write_bytes(file.read_bytes()[:100])
    again = run(tmp_path, "-c", program, SILODP_CACHE=str(tmp_path / "kept"))
    assert (again.stdout, again.stderr) == (done.stdout, "")


@pytest.mark.parametrize(("name", "own"), [("dp-gd", True), ("mine:Mine", False)])
def test_programs_with_parts_from_outside_are_not_kept(monkeypatch, name, own):
    """A function of somebody else's may hold records as constants."""
    kept = []
    monkeypatch.setattr(cache, "keep_programs", lambda: kept.append(name))
    cache.keep_own_programs(Config(algorithm=AlgorithmConfig(name=name)))
    assert bool(kept) == own


def test_keeping_can_be_switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SILODP_CACHE", "off")
    assert cache.folder("programs") is None
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("SILODP_CACHE")
    assert cache.folder("programs") == tmp_path / "silodp" / "programs"


def test_a_folder_that_others_may_write_to_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_CACHE", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to it"):
        assert cache.folder("programs") is None
    (tmp_path / "open").chmod(0o700)
    assert cache.folder("programs") is not None


def test_a_home_that_cannot_be_written_to_is_no_fault(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SILODP_CACHE", str(tmp_path / "file"))
    assert cache.folder("programs") is None


def test_what_is_kept_is_bounded(tmp_path):
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    cache.trim(tmp_path, most=250)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}


# --- calibrations -----------------------------------------------------------------------------------------------

RELEASES = [Releases("value", 20, Poisson(0.05))]


def searches(monkeypatch, folder: Path) -> list[str]:
    """Searches for noise that are made from now on."""
    monkeypatch.setenv("SILODP_CACHE", str(folder))
    made, search = [], accountant._smallest
    monkeypatch.setattr(accountant, "_smallest", lambda *given: made.append("search") or search(*given))
    return made


def test_a_calibration_is_searched_once(monkeypatch, tmp_path):
    made = searches(monkeypatch, tmp_path)
    first = accountant.calibrate(RELEASES, 2.0, 1e-5)
    assert accountant.calibrate(RELEASES, 2.0, 1e-5) == first
    assert len(made) == 1
    accountant.calibrate(RELEASES, 2.5, 1e-5)
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["", "not a number", "nan", "inf", "less noise", "more noise"])
def test_a_damaged_calibration_is_not_believed(monkeypatch, tmp_path, damage):
    made = searches(monkeypatch, tmp_path)
    first = accountant.calibrate(RELEASES, 2.0, 1e-5)
    (file,) = (tmp_path / "calibrations").iterdir()
    shift = {"less noise": -0.01, "more noise": 0.01}.get(damage)
    file.write_text(damage if shift is None else (float.fromhex(file.read_text()) + shift).hex())
    assert accountant.calibrate(RELEASES, 2.0, 1e-5) == first
    assert len(made) == 2


def test_programs_for_another_number_of_threads_are_kept_apart(monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    assert cache.programs() == "programs"
    monkeypatch.setenv(THREADS, "1")
    assert cache.programs() == "programs-1"


@pytest.mark.skipif(not compiler.MAPS.exists(), reason="Linux counts maps of memory")
def test_programs_are_forgotten_before_a_process_has_no_room_for_more(monkeypatch, tmp_path):
    forgotten = []
    monkeypatch.setattr(jax, "clear_caches", lambda: forgotten.append(True))
    config = {"privacy": {"epsilon": 2.0}, "algorithm": {"name": "dp-gd", "rounds": 1, "step_size": 0.1, "clip": 1.0}}
    train(config, data=made_data())
    assert not forgotten
    taken = len(compiler.MAPS.read_bytes().splitlines())
    monkeypatch.setattr(compiler, "MOST_MAPS", tmp_path / "limit")
    (tmp_path / "limit").write_text(f"{taken}\n")
    train(config, data=made_data())
    assert forgotten
