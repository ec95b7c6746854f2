"""A run is a directory: config, history, checkpoint, model, summary, figures. Every file is replaced whole or appended.

config.toml            what was asked for, enough to run it again
history.jsonl          one row every `every` rounds
checkpoint.safetensors the run between two rounds, after each chunk, with a checksum (removed when the run is complete)
silos/, coins.*        what silos and server must not forget when a message run stops (removed when it is complete)
lock                   held by the program that works on the run; there is one at a time
model.safetensors      parameters by name: last/... and drawn/..., and `whitening`, the map of the features, if any
trajectory.safetensors the flat parameters of every history row, when run.trajectory asks for them
answers/               what reached the server and everybody may see, when run.answers asks for it; plan.json with it
summary.json           last row, guarantee per silo, timing, versions
certificate.json|txt   the privacy statement
report.html            all of it for people, one file
figures/*              in the formats of run.figures
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save, save_file

from silodp.config import Config
from silodp.deploy.files import checksum, held, private_files, replacing, write_whole
from silodp.errors import ConfigError
from silodp.parse import load_config, to_toml

if TYPE_CHECKING:
    from jaxtyping import PyTree

# JAX is imported where trees are written or read: a command that refuses a config must not wait for it.
PACKAGES = ("silodp", "jax", "jaxlib", "equinox", "numpy", "scipy", "dp-accounting")
TRAJECTORY = "trajectory.safetensors"
POINTS = "trajectory.partial"  # of a run that goes on: appended to, as the history is
PARTS = "parts.json"  # of a sweep: which settings are stacked (silodp.run.parts)
CHECKPOINT, HISTORY, SILOS, COINS = "checkpoint.safetensors", "history.jsonl", "silos", "coins.*"


OTHER_PLAN = (
    "begun by another plan than config.toml gives now: another version chooses otherwise, or the config or the silos' "
    "sizes were changed; go on with what began it, or start anew"
)


class RunDirectory:
    """Reads and writes one run's files."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.written = hashlib.sha256()  # of the history, row by row
        self.promised: str | None = None  # what the history is by the checkpoint that was read
        self.plan = ""  # fingerprint of the plan that the run follows

    @staticmethod
    def create(path: Path | str | None, config: Config, name: str) -> RunDirectory:
        """A new directory (never one that already holds a run) with the config in it."""
        run = RunDirectory(new_path(config, name) if path is None else path)
        refuse_existing(run.path)
        with private_files():
            run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            run.write_text("config.toml", to_toml(config))
        return run

    def held(self) -> AbstractContextManager[None]:
        """For the program that trains: two would overwrite each other's rounds."""
        return held(self.path, "program")

    @staticmethod
    def open(path: Path | str) -> RunDirectory:
        run = RunDirectory(path)
        if not (run.path / "config.toml").is_file():
            raise ConfigError(f"{str(path)!r} is not a run: it has no config.toml")
        return run

    @property
    def config(self) -> Config:
        return load_config(self.path / "config.toml")

    @property
    def complete(self) -> bool:
        return any((self.path / name).is_file() for name in ("summary.json", "sweep.json"))

    def write_text(self, name: str, text: str) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text.encode())

    def write_json(self, name: str, tree: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(tree, indent=2, allow_nan=True) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            raise ConfigError(f"{self.path}: {name} is missing: the run is not complete; silodp resume {self.path}")
        return json.loads(file.read_text(encoding="utf-8"))

    def append_history(self, rows: list[dict[str, float]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        self.written.update(lines.encode())
        with (self.path / HISTORY).open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())  # before the checkpoint that counts on it

    def history(self) -> list[dict[str, float]]:
        file = self.path / HISTORY
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def cut_history(self, rows: int) -> None:
        """Drop rows written after the last checkpoint: they will be computed again. Those before it must be there."""
        file = self.path / HISTORY
        lines = file.read_bytes().splitlines(keepends=True)[:rows] if file.is_file() else []
        text = b"".join(lines)
        self.written = hashlib.sha256(text)
        if len(lines) < rows or self.promised not in (None, self.written.hexdigest()):
            raise ConfigError(f"{file}: cut short or changed; the checkpoint belongs to another one of {rows} rows")
        self.write_text(HISTORY, text.decode())

    def append_point(self, x: np.ndarray) -> None:
        with (self.path / POINTS).open("ab") as file:
            file.write(np.ascontiguousarray(x, np.float32).tobytes())

    def cut_points(self, rows: int, parameters: int) -> None:
        """As `cut_history`."""
        if (self.path / POINTS).is_file():
            os.truncate(self.path / POINTS, 4 * rows * parameters)

    def save_trajectory(self, parameters: int) -> None:
        """The points that were appended, as one array of rows."""
        points = np.fromfile(self.path / POINTS, np.float32).reshape(-1, parameters)
        self.write_arrays(TRAJECTORY, {"x": points})

    def trajectory(self) -> np.ndarray:
        if not (self.path / TRAJECTORY).is_file():
            raise ConfigError(f"{self.path}: no trajectory was kept; set run.trajectory = true before the run")
        return load_file(self.path / TRAJECTORY)["x"]

    def save_checkpoint(self, carry: PyTree, rows: int) -> None:
        """On the disk, file and name, when this returns."""
        arrays = {path: np.asarray(leaf) for path, leaf in named_leaves(carry)} | {"rows": np.asarray(rows)}
        told = {"history": self.written.hexdigest(), "plan": self.plan}
        self.write_arrays(CHECKPOINT, arrays, told | {"checksum": checksum(arrays, "".join(told.values()).encode())})

    def load_checkpoint(self, like: PyTree) -> tuple[PyTree, int] | None:
        """The saved run in the shape of `like`, and its number of history rows; None when there is none."""
        file = self.path / CHECKPOINT
        if not file.is_file():
            return None
        try:
            with safe_open(file, "np") as kept:
                meta = kept.metadata() or {}
                arrays = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 (no dict)
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error})") from None
        names = [path for path, _ in named_leaves(like)]
        if set(names) != arrays.keys() - {"rows"}:
            raise ConfigError(f"{file}: made by another configuration or version; start a new run")
        told = "".join(meta.get(name, "") for name in ("history", "plan"))
        if meta.get("checksum") != checksum(arrays, told.encode()):
            raise ConfigError(f"{file}: damaged; what it holds is not what was written")
        if meta.get("plan") != self.plan:  # what was released so far, and what would be, are not of one account
            raise ConfigError(f"{file}: {OTHER_PLAN}")
        self.promised = meta["history"]
        return rebuilt(like, [arrays[name] for name in names]), int(arrays["rows"])

    def forget_checkpoint(self) -> None:
        for name in (CHECKPOINT, POINTS):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob(COINS):
            file.unlink()
        shutil.rmtree(self.path / SILOS, ignore_errors=True)

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray], meta: dict[str, str] | None = None) -> None:
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        with replacing(target) as partial:
            save_file({key: np.asarray(array, order="C") for key, array in arrays.items()}, partial, meta)

    def save_model(self, content: bytes) -> bytes:
        """What `model_bytes` gave."""
        write_whole(self.path / "model.safetensors", content)
        return content


def model_bytes(last: PyTree, drawn: PyTree, maps: Mapping[str, np.ndarray]) -> bytes:
    """model.safetensors: the parameters, and the maps of the features that they belong to, by name."""
    arrays = {
        prefix + path: np.asarray(leaf, order="C")
        for prefix, params in (("last", last), ("drawn", drawn))
        for path, leaf in named_leaves(params)
    }
    return save(arrays | dict(maps))


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Leaves by their path, e.g. "/layers/0/weight"."""
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [("/" + jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in flat]


def rebuilt(like: PyTree, leaves: list[np.ndarray]) -> PyTree:
    """A tree of the shape of `like` with these leaves."""
    import jax

    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(leaf) for leaf in leaves])


def load_model(path: Path | str, params_like: PyTree, which: str = "last") -> PyTree:
    """The parameters in a run's model.safetensors, in the model's own pytree.

    Args:
        path: the file; `run.directory / "model.safetensors"`.
        params_like: parameters of the same model, as `model.init(key)` gives them; only their shape is used.
        which: "last" for the last iterate, "drawn" for the iterate of a uniformly drawn round.

    Returns:
        The parameters, for `model.predict(params, features)`.

    Example:
        >>> import jax, silodp, tempfile
        >>> data = silodp.load_data("wbcd", silos=3, test=0.2, preprocess=["standardise"])
        >>> folder = tempfile.mkdtemp()
        >>> options = silodp.algorithms.DPGD(rounds=2, step_size=0.5, clip=1.0)
        >>> run = silodp.train(algorithm=options, epsilon=3.0, data=data, out=f"{folder}/run")
        >>> model = silodp.build_model("logistic", inputs=30)
        >>> params = silodp.load_model(run.directory / "model.safetensors", model.init(jax.random.key(0)))
        >>> bool((model.predict(params, data.test.features) == run.predict(data.test.features)).all())
        True
    """
    arrays = load_file(Path(path))
    return rebuilt(params_like, [arrays[which + name] for name, _ in named_leaves(params_like)])


def is_resumable(path: Path) -> bool:
    """Whether a run was begun here and is not complete, and its silos, if it had any, have kept what they know."""
    run = RunDirectory(path)
    if not (path / "config.toml").is_file() or run.complete:
        return False
    return run.config.run.mode == "simulation" or (path / SILOS).is_dir()


def refuse_existing(path: Path | None) -> None:
    if path is None:
        return
    if (path / "config.toml").exists():
        raise ConfigError(
            f"--out {str(path)!r} already holds a run; give another directory, "
            f"or continue it with: silodp resume {path}"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {str(path)!r} is a file; give a directory")


def new_path(config: Config, name: str) -> Path:
    """Where a run goes when the user does not say: a new directory named after what it does and when."""
    return free_path(Path(config.run.output) / f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def free_path(path: Path) -> Path:
    """This path, or the next one with a number that is free: nothing is overwritten."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
