"""A trained estimator as a directory, without pickle.

model.safetensors  parameters, and the whitening map where there is one
bundle.json        schema, classes, model, certificate, versions, SHA-256 of the other files, number of the format
certificate.txt    the privacy statement
report.txt         the same in plain words
report.html        the same as a page

The hashes tell accidents and mixed-up files, not forgers: who can write the directory can write its hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from silodp.errors import ConfigError
from silodp.front.fitting import as_file
from silodp.report.files import NAME as PAGE
from silodp.report.files import story_of_bundle
from silodp.report.story import told as told_as_page
from silodp.run.directory import versions

FORMAT = 1
INDEX, MODEL, CERTIFICATE, REPORT = "bundle.json", "model.safetensors", "certificate.txt", "report.txt"
FILES = (MODEL, CERTIFICATE, REPORT, PAGE)
KEYS = {"estimator", "options", "model", "schema", "features", "inputs", "plan", "certificate"}


def write(directory: Path, told: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: str) -> Path:
    check_free(directory)
    files = {
        MODEL: as_file(arrays),
        CERTIFICATE: certificate_text(told["certificate"]).encode(),
        REPORT: report.encode(),
    }
    index = {
        "format": FORMAT,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        **told,
        "versions": versions(),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    page = told_as_page(story_of_bundle(json.loads(as_json(index)))).encode()  # first: it may refuse
    files[PAGE], index["files"][PAGE] = page, hashlib.sha256(page).hexdigest()
    text = as_json(index)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    (directory / INDEX).write_text(text, encoding="utf-8")  # last: a directory without it is no bundle
    return directory


def as_json(index: Mapping[str, Any]) -> str:
    return json.dumps(index, indent=2, allow_nan=False, default=plain) + "\n"


def plain(part: Any) -> Any:
    """NumPy's numbers and arrays as JSON can hold them."""
    if isinstance(part, np.generic | np.ndarray):
        return part.tolist()
    kind = type(part).__name__
    raise ConfigError(f"save: a class or an option is a {kind}, which JSON cannot hold; use texts and numbers")


def check_free(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{str(directory)!r}: exists and is not an empty directory; give a new one")


def certificate_text(certificate: Mapping[str, Any] | None) -> str:
    if certificate is None:
        return "No epsilon was given: the model is not private.\n"
    from silodp.plan.certificate import as_text

    return as_text(certificate)


def read(directory: Path, estimators: set[str]) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """What was told, the arrays, and the report; an error says why a directory cannot be used."""
    told = index_of(directory)
    check_format(directory, told, estimators)
    contents = {name: checked_file(directory / name, digest) for name, digest in told["files"].items()}
    try:
        arrays = load(contents[MODEL])
    except SafetensorError:
        raise ConfigError(f"{directory / MODEL}: not a safetensors file; save the model again") from None
    return told, arrays, contents[REPORT].decode()


def index_of(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    if not path.is_file():
        raise ConfigError(
            f"{str(directory)!r}: no model is saved here ({INDEX} is not there); give the directory of one"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{path}: not valid JSON; save the model again") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{path}: not a bundle's index; save the model again")
    return told


def check_format(directory: Path, told: Mapping[str, Any], estimators: set[str]) -> None:
    path, number = directory / INDEX, told.get("format")
    if not isinstance(number, int) or number < 1:
        raise ConfigError(f"{path}: format {number!r} is not known; save the model again")
    if number > FORMAT:
        by = told.get("versions", {}).get("silodp", "unknown")
        raise ConfigError(
            f"{path}: format {number} of silodp {by}, this version reads up to {FORMAT}; install a later one"
        )
    lacking = sorted((KEYS | {"files"}) - told.keys())
    if lacking or not {MODEL, REPORT, CERTIFICATE} <= told["files"].keys():
        raise ConfigError(f"{path}: {', '.join(lacking) or 'files'} incomplete; save the model again")
    if told["estimator"] not in estimators:
        raise ConfigError(f"{path}: estimator {told['estimator']!r} is not known; install a later version of silodp")


def checked_file(path: Path, digest: str) -> bytes:
    if path.name not in FILES:
        raise ConfigError(f"{path}: no file of a bundle; save the model again")
    if not path.is_file():
        raise ConfigError(f"{path}: is not there; copy the whole directory of the model")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{path}: changed since it was saved (SHA-256 differs); take the original")
    return content
