"""What the documentation site adds to the files in this folder: pages written from the code, and links that lead here.

mkdocs calls `on_files` and `on_page_markdown`; tests call the rest.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import silodp
from silodp import registry
from silodp.algorithms import find
from silodp.config import SHARED_KEYS, AlgorithmConfig, Config
from silodp.deploy.policy import Policy, ShufflerPolicy
from silodp.deploy.provision import FederationFile

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = {"guard.toml": Policy, "shuffler.toml": ShufflerPolicy, "fed.toml": FederationFile}
# Files outside this folder that are pages of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "tutorials/hospitals.md",
}


# --- config keys -------------------------------------------------------------------------------------


def config_reference() -> str:
    parts = [
        "# Every config key",
        "A config is a TOML file, or a dict with the same sections. `silodp run` and `silodp.train` take it. A key "
        "that is unknown, or that the algorithm does not use, is refused with one line before anything is spent.",
    ]
    for name, field in Config.model_fields.items():
        section = next(kind for kind in kinds(field.annotation) if hasattr(kind, "model_fields"))
        parts.append(f"## [{name}]\n\n{first_line(section)}")
        keys = set(section.model_fields) if section is not AlgorithmConfig else SHARED_KEYS
        parts.append(key_table(section, [key for key in section.model_fields if key in keys]))
    parts.append(
        "## [algorithm], by algorithm\n\nEach algorithm takes the keys of [algorithm] above and those of its own table "
        "here. `step_size` and what is **needed** must be given, unless `theory = true` chooses it. "
        "`auto` needs nothing."
    )
    for family, names in registry.FAMILIES.items():
        parts.append(f"### {family}\n\n{registry.SENTENCES[family][0].upper()}{registry.SENTENCES[family][1:]}.")
        parts += [algorithm_part(name) for name in names]
    parts.append("## Who takes which key\n\n" + takers_table())
    parts.append(
        "## Files of a real federation\n\nThey lie with their owners and are read from their own disks. No message can "
        "change them ([a real federation](../deployment.md))."
    )
    parts += [operators_part(name, model) for name, model in OPERATORS.items()]
    return "\n\n".join(parts) + "\n"


def operators_part(name: str, model: Any, level: str = "###") -> str:
    """A file's own keys, then those of its tables."""
    fields = {key: field.annotation for key, field in model.model_fields.items()}
    inner = {key: kind for key, kind in fields.items() if hasattr(kind, "model_fields")}
    own = [key for key in fields if key not in inner]
    tables = [operators_part(f"[{key}] of {name}", table, "####") for key, table in inner.items()]
    return "\n\n".join([f"{level} {name}\n\n{first_line(model)}", key_table(model, own), *tables])


def kinds(annotation: Any) -> list[Any]:
    return [annotation, *getattr(annotation, "__args__", ())]


def first_line(part: Any) -> str:
    return (inspect.getdoc(part) or "").split("\n")[0]


def own_keys() -> list[str]:
    return [key for key in AlgorithmConfig.model_fields if key not in SHARED_KEYS]


def key_table(section: Any, keys: list[str], defaults: Mapping[str, str] | None = None) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        field = section.model_fields[key]
        default = "**needed**" if field.is_required() else "" if field.default is None else f"`{toml(field.default)}`"
        default = default if defaults is None else defaults[key]
        name, kind, meaning = field.alias or key, type_words(field.annotation), field.description or ""
        lines.append(f"| `{name}` | {cell(kind)} | {default} | {cell(meaning)} |")
    return "\n".join(lines)


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "table"}


def type_words(annotation: Any) -> str:
    """As a reader of TOML would say it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(inside[0])
    if origin is Literal:
        return " or ".join(map(str, inside))
    if origin is list:
        return "list of " + re.sub(r"(number|table)\b", r"\1s", type_words(inside[0]))
    if origin is tuple:
        return f"[{', '.join(type_words(each) for each in inside)}]"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_words(each) for each in inside if each is not type(None)))
    return PLAIN[origin or annotation]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def algorithm_part(name: str) -> str:
    entry, own = find(name), taken_keys(name)
    trusts = "every trust model" if entry.trusts is None else ", ".join(entry.trusts)
    keys = key_table(AlgorithmConfig, list(own), own) if own else "It has no keys of its own."
    return f"#### {name}\n\n{entry.summary[0].upper()}{entry.summary[1:]}. Runs under: {trusts}.\n\n{keys}"


def taken_keys(name: str) -> dict[str, str]:
    """Keys that an algorithm takes beside the shared ones, with what its table says in the place of a default."""
    entry = find(name)
    found = {}
    for field in dataclasses.fields(entry.build):
        if field.name not in AlgorithmConfig.model_fields or field.name in SHARED_KEYS or field.name in entry.fixed:
            continue
        found[field.name] = default_words(field, private=entry.private)
    return found


def default_words(field: dataclasses.Field[Any], *, private: bool) -> str:
    needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if needed and field.name.startswith("clip"):
        return "**needed** with an epsilon" if private else "no clipping"
    plain = isinstance(field.default, bool | int | float | str)
    return "**needed**" if needed else f"`{toml(field.default)}`" if plain else ""


def takers_table() -> str:
    lines = ["| key | algorithms that take it |", "|---|---|"]
    for key in own_keys():
        takers = [f"`{name}`" for names in registry.FAMILIES.values() for name in names if key in taken_keys(name)]
        lines.append(f"| `{key}` | {', '.join(takers)} |")
    return "\n".join(lines)


# --- Python names and commands -----------------------------------------------------------------------


def python_reference() -> str:
    parts = ["# Python names", "All public names, with examples that the tests run. Everything else may change."]
    for name in sorted(set(silodp.__all__) - {"__version__"}, key=str.lower):
        part = getattr(silodp, name)
        parts.append(f"## silodp.{name}\n\n{signature(name, part)}{docstring(part)}{methods_table(part)}")
    return "\n\n".join(parts) + "\n"


def signature(name: str, part: Any) -> str:
    if not callable(part) or inspect.ismodule(part):
        return ""
    try:
        given = inspect.signature(part)
    except ValueError:
        return ""
    names = [str(p.replace(annotation=inspect.Parameter.empty)) for p in given.parameters.values()]
    return f"```text\n{name}({', '.join(names)})\n```\n\n" if len(names) < 20 else ""


def docstring(part: Any) -> str:
    """The first paragraph as text, arguments and examples as they stand."""
    first, _, rest = (inspect.getdoc(part) or "").partition("\n\n")
    first = re.sub(r"^[A-Z]+: (\w)", lambda found: found[1].upper(), first)  # a folder's motto is for contributors
    return " ".join(first.split()) + (f"\n\n```text\n{rest.rstrip()}\n```" if rest.strip() else "")


def methods_table(part: Any) -> str:
    """What an object of a class can be asked: the methods and properties that say so themselves."""
    if not inspect.isclass(part):
        return ""
    rows = []
    for name, member in sorted(inspect.getmembers(part)):
        home = getattr(getattr(member, "fget", None) or member, "__module__", "") or ""
        told = first_line(member)
        if name.startswith("_") or not home.startswith("silodp") or not told or inspect.isclass(member):
            continue
        shown = name if isinstance(member, property) else f"{name}({', '.join(arguments(member))})"
        rows.append(f"| `{cell(shown)}` | {cell(told)} |")
    return "\n\n| of an object | what it is or does |\n|---|---|\n" + "\n".join(rows) if rows else ""


def arguments(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in ("self", "cls")]


def command_reference() -> str:
    import typer

    from silodp.cli import app

    whole = typer.main.get_command(app)
    parts = ["# Commands", "`silodp COMMAND --help` says the same in a terminal."]
    parts += [command_part(name, command) for name, command in sorted(getattr(whole, "commands", {}).items())]
    return "\n\n".join(parts) + "\n"


def command_part(name: str, command: Any) -> str:
    inner = getattr(command, "commands", None)
    if inner:
        return "\n\n".join(command_part(f"{name} {each}", one) for each, one in sorted(inner.items()))
    lines = ["| argument or option | default | meaning |", "|---|---|---|"]
    for each in command.params:
        shown = ", ".join(each.opts) if each.opts[0].startswith("-") else (each.metavar or each.name.upper())
        plain = isinstance(each.default, str | int | float | Path) and not isinstance(each.default, bool)
        default = f"`{each.default}`" if plain else ""
        lines.append(f"| `{cell(shown)}` | {default} | {cell(getattr(each, 'help', None) or '')} |")
    name = name.removesuffix(" tell")  # what `silodp plan` does without the name of a command
    return f"## silodp {name}\n\n{command.help or ''}\n\n" + "\n".join(lines)


# --- links -------------------------------------------------------------------------------------------

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def led_here(text: str, source: str) -> str:
    """Links of a file of the repository as links of the site; `source`: its path from the root.

    What is no page of the site keeps its words and loses its link.
    """

    def replaced(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        page = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if page is None:
            return words
        here = posixpath.dirname(OUTSIDE.get(source, source.removeprefix("docs/")))
        words = words if mark or not words.rstrip("/").endswith((".md", path.rstrip("/"))) else title_of(page)
        return f"{mark}[{words}]({posixpath.relpath(page, here or '.')}{hash_}{anchor})"

    return LINK.sub(replaced, text)


def title_of(page: str) -> str:
    """Of a page that is a file: its first heading, which reads better on a page than a path."""
    path = next((path for path, copied in OUTSIDE.items() if copied == page), f"docs/{page}")
    return re.findall(r"^# (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[0]


def page_of(path: str) -> str | None:
    """The site's page for a file of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path == "docs/algorithms":
        return "algorithms/README.md"
    inside = path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".json")
    return path.removeprefix("docs/") if inside else None


def generated() -> dict[str, str]:
    """Pages that are no files of this folder."""
    copied = {page: led_here((ROOT / path).read_text(encoding="utf-8"), path) for path, page in OUTSIDE.items()}
    return copied | {
        "reference/config.md": config_reference(),
        "reference/python.md": python_reference(),
        "reference/commands.md": command_reference(),
    }


# --- mkdocs ------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = f"docs/{page.file.src_uri}"
    return led_here(markdown, path) if (ROOT / path).is_file() else markdown
