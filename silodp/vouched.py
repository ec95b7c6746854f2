"""Which parts from outside `silodp check` has passed, kept by the hash of their source.

A file for each, in the user's cache folder (silodp.cache), to which nobody else can write: a part whose source has
changed by a letter has another hash, and is unknown again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
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
    """Of a class's name and of its author's files: those that define it, its bases, and what they use by name.

    None: no source, as in a notebook. Another class in the same file is another part: it may have failed what this one
    passed.
    """
    found: dict[str, str | None] = {}
    left = {kind.__module__ for kind in part.__mro__}
    while left:
        name = left.pop()
        if name in found or name not in sys.modules or not by_author(name, part):
            continue
        found[name] = getattr(sys.modules[name], "__file__", None)
        for value in vars(sys.modules[name]).values():
            left.add(str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)))
    digest = hashlib.sha256(part.__qualname__.encode())
    for _, file in sorted(found.items()):
        if file is None or not Path(file).is_file():
            return None
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def by_author(module: str, part: type) -> bool:
    """Whether a module belongs to the part: it is not the library's, nor of an installed package of somebody else."""
    root = module.partition(".")[0]
    if root in ("silodp", "builtins"):
        return False
    file = getattr(sys.modules[module], "__file__", None) or ""
    installed = any(file.startswith(place) for place in sysconfig.get_paths().values())
    return root == part.__module__.partition(".")[0] or bool(file and not installed)


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
