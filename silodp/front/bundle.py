"""A trained estimator as a directory, without pickle.

model.safetensors  parameters, and the whitening map where there is one
bundle.json        schema, classes, model, certificate, versions, SHA-256 of the other files and of itself, the format
certificate.txt    the privacy statement
report.txt         the same in plain words
report.html        the same as a page

The hashes tell accidents and mixed-up files, not forgers: who can write the directory can write its hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from silodp.errors import ConfigError, one_line
from silodp.front.fitting import as_file
from silodp.front.index import MODEL, Index, checked
from silodp.front.predictor import check_arrays
from silodp.parse import shown
from silodp.report.files import NAME as PAGE
from silodp.report.files import REMEDY, check_digest, digest_of, story_of_bundle
from silodp.report.story import told as told_as_page
from silodp.run.directory import versions

FORMAT = 2  # broken lines as coarse and fine bends
INDEX, CERTIFICATE, REPORT = "bundle.json", "certificate.txt", "report.txt"
FILES = (MODEL, CERTIFICATE, REPORT, PAGE)


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
    text = as_json(index | {"digest": digest_of(json.loads(as_json(index)))})
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
    nearest = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{str(directory)!r}: {nearest} is no directory that you may write to; give another place")


def certificate_text(certificate: Mapping[str, Any] | None) -> str:
    if certificate is None:
        return "No epsilon was given: the model is not private.\n"
    from silodp.plan.certificate import as_text

    return as_text(certificate)


def read(directory: Path, estimators: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """What was told, the arrays, and the report; an error says why a directory cannot be used."""
    told, index = index_of(directory, estimators)
    contents = {name: checked_file(directory / name, digest) for name, digest in index.files.items()}
    try:
        arrays = arrays_of(contents[MODEL])
        check_arrays(index.model, arrays, index.inputs, index.outputs, len(index.silos or ()))
    except ConfigError as error:
        raise ConfigError(f"{directory / MODEL}: {error}; {REMEDY}") from None
    return told, arrays, contents[REPORT].decode(errors="replace")


def arrays_of(content: bytes) -> dict[str, np.ndarray]:
    try:
        return load(content)
    except (SafetensorError, KeyError):  # the latter: a type of numbers that NumPy does not have
        raise ConfigError("not a safetensors file of numbers") from None


def index_of(directory: Path, estimators: Mapping[str, Any]) -> tuple[dict[str, Any], Index]:
    path = directory / INDEX
    if not path.is_file():
        raise ConfigError(
            f"{str(directory)!r}: no model is saved here ({INDEX} is not there); give the directory of one"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        check_format(told)
        ordered, index = checked(told, estimators)
        check_files(index)
        check_digest(told)  # after what can be told by its key
        return ordered, index
    except ConfigError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not valid JSON, or nested too deeply; {REMEDY}") from None


def check_format(told: Any) -> None:
    """Before anything else is looked at: a later format may say it in another way."""
    if not isinstance(told, dict):
        raise ConfigError(f"not a bundle's index; {REMEDY}")
    number, by = told.get("format"), told.get("versions")
    if type(number) is not int or number < 1:
        raise ConfigError(f"format{shown(number)}: not known; {REMEDY}")
    if number < 2 and has_pieces(told):
        raise ConfigError("saved by an older silodp, which made broken lines (pieces) in another way; fit it again")
    if number > FORMAT:
        version = one_line(by.get("silodp", "unknown")) if isinstance(by, dict) else "unknown"
        raise ConfigError(
            f"format {number} of silodp {version}, this version reads up to {FORMAT}; install a later one"
        )


def has_pieces(told: Mapping[str, Any]) -> bool:
    """Of an index that nobody has checked."""
    schema = told.get("schema")
    columns = schema.get("columns") if isinstance(schema, dict) else None
    return isinstance(columns, dict) and any(isinstance(each, dict) and each.get("pieces") for each in columns.values())


def check_files(index: Index) -> None:
    for name in sorted(index.files.keys() ^ set(FILES) - {PAGE}):
        if name not in FILES:
            raise ConfigError(f"files: {name!r} is no file of a bundle; {REMEDY}")
        if name != PAGE:
            raise ConfigError(f"files: {name} is missing; {REMEDY}")


def checked_file(path: Path, digest: str) -> bytes:
    if not path.is_file():
        raise ConfigError(f"{path}: is not there; copy the whole directory of the model")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{path}: changed since it was saved (SHA-256 differs); take the original")
    return content
