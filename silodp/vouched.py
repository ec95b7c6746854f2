"""Which parts from outside `silodp check` has passed, kept by the hash of their source.

A file for each, in the user's cache folder (silodp.cache), to which nobody else can write: a part whose source has
changed by a letter has another hash, and is unknown again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from silodp import cache, registry
from silodp.config import Config
from silodp.parse import named_parts

AFFECTING = ("algorithm", "channel", "randomizer")  # a compressor and a model only see what is public or clipped


def file_of(known: str | None) -> Path | None:
    """Where it is kept what a source has passed; None: nothing can be kept."""
    place = cache.folder("checked")
    return None if known is None or place is None else place / f"{known}.json"


def source_hash(part: type) -> str | None:
    """Of a class's name and of the files that define it and what it inherits from, the library's own left out.

    None: no source. Another class in the same file is another part: it may have failed what this one passed.
    """
    files: set[str] = set()
    for kind in part.__mro__:
        if kind.__module__.partition(".")[0] in ("silodp", "equinox", "builtins", "typing", "abc"):
            continue
        try:
            files.add(inspect.getfile(kind))
        except (TypeError, OSError):
            return None
    digest = hashlib.sha256(part.__qualname__.encode())
    for file in sorted(files, key=lambda name: Path(name).name):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def record(part: type, facts: dict[str, Any], options: dict[str, Any]) -> Path | None:
    """Keep that the part passed with these options, beside the options it has passed with before."""
    known = source_hash(part)
    file = file_of(known)
    if file is None:
        return None
    tried = [*(each for each in tried_with(file) if each != options), options]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(facts | {"source": known, "tried": tried}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
    return file


def tried_with(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["tried"] if file.is_file() else []


def passed(part: type) -> str | None:
    """For a certificate: under which hash the part passed, and with which options. None: it has not."""
    known = source_hash(part)
    file = file_of(known)
    tried = [] if file is None else tried_with(file)
    if known is None or not tried:
        return None
    said = " or ".join(", ".join(f"{key} = {value}" for key, value in each.items()) or "no options" for each in tried)
    return f"silodp check passed for source {known[:16]}, tried with {said}"


def outside_parts(config: Config) -> dict[str, type]:
    """The parts from outside that a run's guarantee depends on, by kind."""
    found = {}
    for kind, name in named_parts(config).items():
        if kind in AFFECTING and not registry.is_own(kind, name):
            part = registry.find(kind, name)
            found[kind] = getattr(part, "build", part)  # an entry names its class
    return found
