"""A server's run between two rounds, on the disk with a checksum; and where another run may begin. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save, save_file

from silodp.deploy.files import checksum, replacing, write_whole
from silodp.deploy.signing import canonical
from silodp.errors import ConfigError

if TYPE_CHECKING:
    from silodp.deploy.document import Document

CHECKPOINT, START = "checkpoint.safetensors", "start.safetensors"
MODEL_AT = "output"  # in what is told: the number of the array that is the model


def write_checkpoint(folder: Path, leaves: Sequence[Any], told: Mapping[str, Any]) -> None:
    arrays = {str(i): np.asarray(leaf, order="C") for i, leaf in enumerate(leaves)}
    meta = {"told": json.dumps(told), "checksum": checksum(arrays, canonical(told))}
    with replacing(folder / CHECKPOINT) as partial:
        save_file(arrays, partial, meta)


def read_checkpoint(folder: Path) -> tuple[list[np.ndarray], dict[str, Any]] | None:
    """The arrays and what is told with them; None where no round is over."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    try:
        with safe_open(file, "np") as kept:
            meta = kept.metadata()
            arrays = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 (no dict)
        told = json.loads(meta["told"])
        whole = checksum(arrays, canonical(told)) == meta["checksum"]
        leaves = [arrays[str(i)] for i in range(len(arrays))]
    except (SafetensorError, ValueError, LookupError, TypeError):
        whole, told, leaves = False, {}, []
    if not whole:
        raise ConfigError(f"{file}: damaged; what it held was not what was written")
    return leaves, told


def model_of(earlier: Path, document: Document) -> np.ndarray:
    """What an earlier run had come to, for a new plan to begin with. What that run spent stays spent."""
    found, plan = read_checkpoint(earlier), document.plan
    if found is None or MODEL_AT not in found[1]:
        raise ConfigError(f"--start {earlier}: holds no model; no round of that run is over")
    model = found[0][found[1][MODEL_AT]]
    if plan.before:
        raise ConfigError(f"--start {earlier}: this plan has {', '.join(plan.before)} first, so it begins anew")
    if model.shape != (plan.facts.parameters,):
        raise ConfigError(f"--start {earlier}: {model.size} parameters, the plan has {plan.facts.parameters}")
    return model


def put_first(folder: Path, model: np.ndarray) -> None:
    write_whole(folder / START, save({"model": model}))


def first_model(folder: Path) -> np.ndarray | None:
    """What `put_first` has left there."""
    file = folder / START
    return load_file(file)["model"] if file.is_file() else None
